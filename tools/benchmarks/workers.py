"""Worker processes: starts, memory, descriptors, and the faults and system calls of a batch."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import child, data
from benchmarks.data import BATCH, DatasetSpec, Sample, drain
from benchmarks.harness import Bench, Lanes, Limit, case
from benchmarks.loading import busy
from shardio import Array, Schema, ShardLoader, ShardWriter, Text
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan
from shardio._engine.filling.filler import Filler
from shardio._workers.processes.blocks import Block
from shardio.batch.layout import layout_for_samples
from shardio.dataset.manifest import publish
from shardio.order.ranks import RankPartition
from shardio.samples.shard_dataset import ShardDataset
from shardio.samples.view import RowView
from shardio.storage.file_access import max_maps

# Starts.


@case(Limit("zygote", "ms, first batch", at_most=400), Limit("zygote", "ms, another", at_most=100))
def starts(bench: Bench) -> Lanes:
    """Measure first batches, rates and memory of every start method, with two workers."""
    folder = bench.cache.dataset("plain", data.PLAIN)
    yield {
        method: partial(child.call, measure_start, str(folder), method)
        for method in ("zygote", "spawn", "thread")
    }


def thirty_microseconds(sample: Sample, rng: np.random.Generator) -> Sample:
    """Compute in Python alone for about 30 µs."""
    n = 0
    for i in range(500):
        n += i
    return sample


def measure_start(folder: str, start_method: str) -> dict[str, float]:
    """Measure a start method in this process, which has imported what a program imports."""
    how: Any = {"output": "numpy", "num_workers": 2, "start_method": start_method}

    def first_ms(stack: ExitStack) -> tuple[ShardLoader, float]:
        start_s = time.perf_counter()
        loader = stack.enter_context(ShardLoader(folder, 64, **how))
        next(iter(loader))
        return loader, (time.perf_counter() - start_s) * 1e3

    def rate(loader: ShardLoader) -> float:
        drain(loader)
        start_s = time.perf_counter()
        return sum(drain(loader) for _ in range(2)) / (time.perf_counter() - start_s)

    with ExitStack() as stack:
        loader, first = first_ms(stack)
        with ExitStack() as inner:
            another = first_ms(inner)[1]
        found = {"ms, first batch": first, "ms, another": another, "batches/s": rate(loader)}
        shares = [_share_bytes(pid) for pid in child.descendants(os.getpid())]
        found["MB added"] = sum(shares) / 1e6
    with ShardLoader(folder, 64, transform=thirty_microseconds, **how) as loader:
        return found | {"batches with a transform/s": rate(loader)}


def _share_bytes(pid: int) -> int:
    """Return the memory of a process; shared pages are divided by the number of their users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


_COLD: Final = """
import json, sys, time
import numpy
import shardio
shardio.ShardLoader  # the name is loaded when it is first used
(folder,) = json.loads(sys.argv[1])
start_s = time.perf_counter()
loader = shardio.ShardLoader(folder, 32, output="numpy", shuffle=True)
batch = next(iter(loader))
print(json.dumps({"ms": (time.perf_counter() - start_s) * 1e3}))
"""


@case(Limit("cold", "ms", at_most=400), Limit("warm", "ms", at_most=100), rounds=7)
def first_batch(bench: Bench) -> Lanes:
    """Measure the time to the first batch, in a new process, and beside another loader."""
    folder = str(bench.cache.dataset("plain", data.PLAIN))

    def warm() -> Mapping[str, float]:
        start_s = time.perf_counter()
        with ShardLoader(folder, BATCH, output="numpy", shuffle=True) as loader:
            next(iter(loader))
            return {"ms": (time.perf_counter() - start_s) * 1e3}

    with ShardLoader(folder, BATCH, output="numpy") as other:
        next(iter(other))
        yield {"cold": partial(child.run_program, _COLD, folder), "warm": warm}


# Memory and descriptors.


def _mixed(i: int) -> Sample:
    return {"image": np.zeros(256, np.uint8), "label": i, "note": "x" * (i % 99)}


def doubled(sample: Sample) -> Sample:
    """Return a field of fixed size and a field of varying size."""
    return {"image": sample["image"], "note": sample["note"] * 2}


MEMORY: Final[dict[str, tuple[float, dict[str, Any]]]] = {
    "arrays": (1.0, {"output": "numpy", "fields": ["image", "label"]}),
    "tensors": (0.1, {"fields": ["image", "label"]}),
    "tensors, reuse": (1.0, {"reuse": True, "fields": ["image", "label"]}),
    "records": (0.1, {"output": "numpy"}),
    "a transform": (0.01, {"output": "numpy", "transform": doubled}),
}
"""For each lane: its share of the batches, and the options of the loader."""
N_MIXED: Final = 16_384


@case(
    *(Limit(name, "MiB grown", at_most=4) for name in MEMORY),
    *(Limit(name, "descriptors grown", at_most=0) for name in MEMORY),
    rounds=1,
)
def memory(bench: Bench, *, batches: int = 1_000_000) -> Lanes:
    """Measure growth of memory and descriptors over a million batches; needs DEV=CPU."""
    schema = {"image": Array("uint8", (256,)), "label": Array("int64"), "note": Text()}
    folder = bench.cache.dataset("mixed", DatasetSpec(schema, _mixed, N_MIXED))
    for name, (share, options) in MEMORY.items():
        n = max(2 * N_MIXED // 16, int(batches * share))
        yield {name: partial(_growth, folder, n, options)}


def _growth(folder: Path, n_batches: int, options: dict[str, Any]) -> Mapping[str, float]:
    n_done, before = 0, dict[str, float]()
    with ShardLoader(folder, 16, shuffle=True, num_workers=2, **options) as loader:
        while n_done < n_batches:
            n_done += drain(loader)
            if not before and n_done * 5 >= n_batches:
                before = _sizes(loader)
        after = _sizes(loader)
    grown = {name: after[name] - before[name] for name in after}
    n_descriptors = grown.pop("descriptors")
    return {"MiB grown": max(grown.values()), "descriptors grown": n_descriptors}


def _sizes(loader: ShardLoader) -> dict[str, float]:
    """Return the anonymous memory of each process in MiB, and main's descriptors without blocks."""
    pids = [os.getpid(), *child.descendants(os.getpid())]
    found = {str(pid): child.status_bytes("RssAnon", pid) / (1 << 20) for pid in pids}
    # A block is created when it is first needed, and has two descriptors.
    n_of_blocks = 2 * len(loader._engine.pool)
    return found | {"descriptors": float(len(os.listdir("/proc/self/fd")) - n_of_blocks)}


@case(
    *(Limit(f"shuffle={name}", "descriptors", at_most=64) for name in ("False", "True")),
    *(Limit(f"shuffle={name}", "share of maps", at_most=0.76) for name in ("True", "blocks")),
    rounds=1,
)
def files(bench: Bench, *, shards: int = 100_000, batches: int = 300) -> Lanes:
    """Count maps and descriptors of a process that reads 100,000 shards, by shuffle."""
    folder = bench.cache.made("many-shards", f"{shards}", partial(_link_shards, shards))
    yield {
        f"shuffle={shuffle}": partial(child.call, count_files, str(folder), shuffle, batches)
        for shuffle in (False, True, "blocks", "shards")
    }


def _link_shards(n_shards: int, folder: Path) -> None:
    """Write a dataset of `n_shards` shards, in which every 10,000 shards are links to one file."""
    folder.mkdir()
    schema = Schema({"image": Array("uint8", (64, 64)), "label": Array("int64")})
    shards = []
    for start in range(0, n_shards, 10_000):
        numbers = range(start, min(start + 10_000, n_shards))
        first, *others = (folder / f"{k:06d}-000.shard" for k in numbers)
        with ShardWriter(first, schema) as writer:
            for _ in range(2):
                writer.append({"image": np.zeros((64, 64), np.uint8), "label": 0})
            written = writer.close()
        for path in others:
            os.link(first, path)
        shards += [dataclasses.replace(written, name=path.name) for path in (first, *others)]
    publish(folder, schema=schema, shards=shards)


def count_files(folder: str, shuffle: Any, n_batches: int) -> dict[str, float]:
    """Read batches in this process; return its maximum maps, descriptors and memory."""
    start_s, before = time.perf_counter(), child.status_bytes("RssAnon")
    options: dict[str, Any] = {"num_workers": 0, "output": "numpy", "seed": 1}
    peak = [0, 0, 0]
    with ShardLoader(folder, 100, shuffle=shuffle, **options) as loader:
        made_s = time.perf_counter()
        for step, _ in zip(range(1, n_batches + 1), loader, strict=False):
            if step % 20 == 0:
                n_maps = Path("/proc/self/maps").read_text().count("\n")
                n_files = len(os.listdir("/proc/self/fd"))
                now = n_maps, n_files, child.status_bytes("RssAnon") - before
                peak = list(map(max, peak, now))
        read_s = time.perf_counter()
    return {
        "ms to open": (made_s - start_s) * 1e3,
        "ms/batch": (read_s - made_s) * 1e3 / n_batches,
        "maps": peak[0],
        "share of maps": peak[0] / max_maps(),
        "descriptors": peak[1],
        "MB grown": peak[2] / 1e6,
    }


# Counts that no clock shows: faults, system calls, frames.

FEW, MANY = 8, 16
"""The numbers of epochs of two runs; the difference of their system calls is counted."""
COUNTED: Final = data.KINDS | {"raw, 2 KB, a transform of 10 µs": data.KINDS["raw, 2 KB"]}


@case(rounds=1)
def counts(bench: Bench, *, kind: str = "") -> Lanes:
    """Count page faults, system calls, Python frames and calls into C of a batch of 32."""
    if shutil.which("strace") is None:
        bench.note("without strace: system calls are not counted")
    for name, spec in COUNTED.items():
        if kind in ("", name):
            folder = str(bench.cache.dataset("rates", spec))
            yield {
                f"{name}, {side}": partial(_counted, name, side, folder)
                for side in ("worker", "main")
            }


def _transform_of(kind: str) -> Any:
    return partial(busy, 1e-5) if "transform" in kind else None


def _epochs_of_worker(kind: str, folder: str) -> Iterator[Callable[[], int]]:
    """Yield whole epochs, as a worker fills them; each returns its number of batches."""
    with ShardDataset(folder) as dataset:
        n = len(dataset)
        batch_spec = BatchSpec(
            source=dataset.worker_source,
            fields=tuple(dataset.schema),
            block_rows=BATCH,
            n_samples=n,
            is_full_shuffle=True,
            seed=0,
            transform=_transform_of(kind),
        )
        filler = Filler(batch_spec, RowView(dataset))
        layout = layout_for_samples(filler.schemas().samples, BATCH)
        blocks = [Block(number, 2 * layout.heap) for number in range(4)]

        def fill(epoch: int) -> int:
            plan = EpochPlan(epoch, RankPartition(n, 0, BATCH))
            for step in range(plan.partition.stop_step):
                filler.fill(layout, blocks[step % len(blocks)], plan, step)
            return plan.partition.stop_step

        for epoch in range(MANY):
            yield partial(fill, epoch)


def _epochs_of_main(kind: str, folder: str) -> Iterator[Callable[[], int]]:
    """Yield whole epochs of a loop over a loader with one worker."""
    options: dict[str, Any] = {"num_workers": 1, "output": "numpy", "shuffle": True}
    with ShardLoader(folder, BATCH, transform=_transform_of(kind), **options) as loader:
        for _ in range(MANY):
            yield partial(drain, loader)


SIDES: Final = {"worker": _epochs_of_worker, "main": _epochs_of_main}


def count(kind: str, side: str, folder: str) -> dict[str, float]:
    """Count faults of the first and third epoch, and frames and calls into C of the fourth."""
    faults, epochs = [], SIDES[side](kind, folder)
    for epoch in (next(epochs) for _ in range(3)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        n_batches = epoch()
        faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / n_batches)
    events: Counter[str] = Counter()
    epoch = next(epochs)
    sys.setprofile(lambda frame, event, argument: events.update((event,)))
    n_batches = epoch()
    sys.setprofile(None)
    epochs.close()  # type: ignore[attr-defined]  # a generator
    return {
        "faults/batch, first epoch": faults[0],
        "faults/batch": faults[2],
        "frames/batch": events["call"] / n_batches,
        "calls into C/batch": events["c_call"] / n_batches,
    }


def run_epochs(kind: str, side: str, folder: str, n_epochs: int) -> int:
    """Run some epochs; return the number of batches of one."""
    found = [epoch() for _, epoch in zip(range(n_epochs), SIDES[side](kind, folder), strict=False)]
    return found[-1]


def _counted(kind: str, side: str, folder: str) -> Mapping[str, float]:
    found: dict[str, float] = child.call(count, kind, side, folder)
    if shutil.which("strace") is None:
        return found
    totals, n_batches = {}, 1
    program = f"import json, sys; from {__name__} import run_epochs; "
    program += "print(run_epochs(*json.loads(sys.argv[1])))"
    with tempfile.NamedTemporaryFile("r") as counted:
        for n in (FEW, MANY):
            arguments = json.dumps([kind, side, folder, n])
            command = ["strace", "-c", "-o", counted.name, sys.executable, "-c", program, arguments]
            done = subprocess.run(
                command, env=child.environment(), check=True, capture_output=True, text=True
            )
            n_batches = int(done.stdout.split()[-1])
            lines = reversed(Path(counted.name).read_text().splitlines())
            totals[n] = int(next(line for line in lines if "total" in line).split()[3])
    return found | {"system calls/batch": (totals[MANY] - totals[FEW]) / (MANY - FEW) / n_batches}
