"""Imports, opening shards and datasets, and writing shards: time and memory in fresh processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from benchmarks import child
from benchmarks.data import Sample
from benchmarks.harness import Bench, Lanes, Limit, WrongResult, case
from shardio import Array, Bytes, Json, Schema, ShardWriter, Text
from shardio.dataset import external_lists
from shardio.dataset.manifest import publish
from shardio.shard.writer import ShardSummary

_IMPORT: Final = """
import json, sys, time
{before}
start_s = time.perf_counter()
import shardio
print(json.dumps({{"ms": (time.perf_counter() - start_s) * 1e3}}))
"""


@case(Limit("after numpy", "ms", at_most=30), rounds=15)
def imports(bench: Bench) -> Lanes:
    """Measure `import shardio`, as the first import and after `import numpy`."""
    yield {
        "first of all": partial(child.run_program, _IMPORT.format(before="")),
        "after numpy": partial(child.run_program, _IMPORT.format(before="import numpy")),
    }


_OPEN: Final = """
import json, os, sys, time
import numpy, shardio
shardio.ShardReader  # loads what it needs

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

(paths,) = json.loads(sys.argv[1])
resident, start = resident_bytes(), time.perf_counter()
readers = [shardio.ShardReader(path) for path in paths]
opened = time.perf_counter()
grown = resident_bytes() - resident
middle = readers[-1][len(readers[-1]) // 2]
read = time.perf_counter()
print(json.dumps({"ms to open": (opened - start) * 1e3, "MB grown": grown / 1e6,
                  "ms to the first record": (read - opened) * 1e3}))
"""


@case(Limit("texts", "ms to open", at_most=50), Limit("texts", "MB grown", at_most=30), rounds=7)
def shards(bench: Bench, *, records: int = 10_000_000) -> Lanes:
    """Measure opening a shard of ten million texts, and 400 small shards."""
    texts = bench.cache.made("texts", f"{records}", partial(_write_texts, records))
    small = bench.cache.made("small-shards", "400", _write_small)
    yield {
        name: partial(child.run_program, _OPEN, sorted(map(str, folder.iterdir())))
        for name, folder in (("texts", texts), ("400 small shards", small))
    }


def _write_texts(n: int, folder: Path) -> None:
    folder.mkdir()
    with ShardWriter(folder / "texts.shard", Schema({"text": Text()})) as writer:
        for i in range(n):
            writer.append({"text": f"record number {i}"})


def _write_small(folder: Path) -> None:
    folder.mkdir()
    schema = Schema({"tokens": Array("int32", (64,)), "label": Array("int64"), "text": Text()})
    for number in range(400):
        with ShardWriter(folder / f"small-{number:03d}.shard", schema) as writer:
            for i in range(50):
                writer.append({"tokens": [i] * 64, "label": i, "text": str(i)})


_SCALE: Final = """
import json, sys, time
import numpy, shardio
shardio.ShardDataset  # loads what it needs

def peak_mb():
    with open("/proc/self/status") as file:  # getrusage would include the peak of the parent
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024 / 1e6

(folder,) = json.loads(sys.argv[1])
imported_mb, start = peak_mb(), time.perf_counter()
dataset = shardio.open(folder)
found = {"ms to open": (time.perf_counter() - start) * 1e3, "peak MB": peak_mb(),
         "MB of it before": imported_mb}
n = len(dataset)

from shardio.order.permutation import CHUNK, epoch_permutation
from shardio.order.shuffle import SHARDS_PER_WINDOW, ShardEpochOrder
from shardio.order.shuffle import BlockShuffle, WindowedEpochOrder

key, middle = {"seed": 1, "epoch": 7}, numpy.arange(n // 2, n // 2 + CHUNK)
makers = {
    "full": lambda: epoch_permutation(n, **key),
    "blocks": lambda: WindowedEpochOrder(n, BlockShuffle.of(n * 100_000, n), **key),
    "shards": lambda: ShardEpochOrder(dataset.rows.shard_ends, n, SHARDS_PER_WINDOW, **key),
}
for name, make in makers.items():
    start = time.perf_counter()
    make().at(middle)
    found[f"ms to the middle of an epoch, {name}"] = (time.perf_counter() - start) * 1e3
print(json.dumps(found))
"""


@case(Limit("open", "ms to open", at_most=1000), Limit("open", "peak MB", at_most=200))
def dataset(
    bench: Bench, *, shards: int = 100_000, inputs: int = 100_000, listed: int = 0
) -> Lanes:
    """Measure opening 100,000 shards of 10^9 samples; listed=1: with all lists in one file."""
    folder = bench.temporary()
    start_s = time.perf_counter()
    most = 1 << 60 if listed else external_lists.MAX_INLINE_ENTRIES
    with mock.patch.object(external_lists, "MAX_INLINE_ENTRIES", most):
        _publish(folder, shards, inputs)
    bench.note(f"published in {time.perf_counter() - start_s:.2f} s")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        bench.note(f"{path.relative_to(folder)}: {path.stat().st_size:,} bytes")
    yield {"open": partial(child.run_program, _SCALE, str(folder))}


def _publish(folder: Path, n_shards: int, n_inputs: int) -> None:
    """Publish a generation whose shards do not exist; opening it touches none of them."""
    shards = [
        ShardSummary(f"{i:06d}-000.shard", 10_000, 1 << 30, f"{i:032x}") for i in range(n_shards)
    ]
    inputs = [
        {"path": f"part-{i:06d}.tar", "outcome": "converted", "samples": 10_000}
        for i in range(n_inputs)
    ]
    schema = Schema({"tokens": Array("int32", (64,)), "label": Array("int64"), "text": Text()})
    publish(folder, schema=schema, shards=shards, inputs=inputs)


# Writing.

_X: Final = np.random.default_rng(0).random((1000, 32), np.float32)
_DATA: Final = np.random.default_rng(0).bytes(3000)
_FOUR: Final = {"a": Array("int64"), "b": Array("float64"), "c": Array("float32"), "text": Text()}
SMALL: Final[dict[str, tuple[dict[str, Any], Any]]] = {
    "32 numbers and a label": (
        {"x": Array("float32", (32,)), "y": Array("int64")},
        lambda i: {"x": _X[i % 1000], "y": np.int64(i)},
    ),
    "3 of Python's numbers and a text": (
        _FOUR,
        lambda i: {"a": i, "b": i / 2, "c": i / 4, "text": f"row number {i}"},
    ),
    "3 of NumPy's numbers and a text": (
        _FOUR,
        lambda i: {"a": np.int64(i), "b": np.float64(i), "c": np.float32(i), "text": f"row {i}"},
    ),
    "up to 300 tokens": ({"t": Array("float32", (None,))}, lambda i: {"t": _X.ravel()[: i % 300]}),
    "3,000 bytes and a name": (
        {"data": Bytes(), "name": Text()},
        lambda i: {"data": _DATA, "name": f"{i}.jpg"},
    ),
    "JSON": ({"m": Json()}, lambda i: {"m": {"id": i, "tags": [1, "x"], "in": {"a": "b"}}}),
}


@case(rounds=3)
def write_samples(bench: Bench, *, samples: int = 30_000) -> Lanes:
    """Measure the CPU time of appending small samples to a shard, by kind."""
    path = bench.temporary() / "small.shard"

    def append(fields: dict[str, Any], made: list[Sample]) -> Mapping[str, float]:
        start_s = time.process_time()
        with ShardWriter(path, Schema(fields)) as writer:
            for each in made:
                writer.append(each)
        taken_s = time.process_time() - start_s
        path.unlink()
        return {"CPU µs/sample": taken_s / len(made) * 1e6}

    yield {
        kind: partial(append, fields, [sample(i) for i in range(samples)])
        for kind, (fields, sample) in SMALL.items()
    }


@case(Limit("write", "MiB grown", at_most=256), rounds=1)
def write_large(bench: Bench, *, gib: int = 4) -> Lanes:
    """Measure memory and rate of writing a shard of 4 GiB."""
    folder = bench.temporary()
    yield {"write": partial(child.call, write_shard, str(folder / "large.shard"), gib << 30)}


def write_shard(path: str, n_bytes: int) -> dict[str, float]:
    """Write a shard of clips with tokens in this process; return the time and memory of this."""
    schema = Schema(
        {
            "frames": Array("uint8", (16, 112, 112, 3)),
            "pts": Array("int64", (16,)),
            "tokens": Array("int32", (None,)),
            "label": Array("int64"),
            "source": Text(),
        }
    )
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (16, 112, 112, 3), np.uint8)
    tokens = rng.integers(0, 50000, 20_000, np.int32)
    before, start_s = child.status_bytes("VmHWM"), time.perf_counter()
    busy_s = time.process_time()
    with ShardWriter(Path(path), schema) as writer:
        while writer.n_bytes < n_bytes:
            i = writer.n_samples
            frames[0, 0, 0, 0] = i % 256
            varying = {"pts": np.arange(16) + i, "tokens": tokens[: i % 20_000]}
            source = f"clips/number {i}.mp4"
            writer.append({"frames": frames, "label": i % 9, "source": source, **varying})
        summary = writer.close()
    if summary.n_bytes < n_bytes:
        raise WrongResult(f"{path}: {summary.n_bytes} bytes, expected {n_bytes}")
    elapsed_s = time.perf_counter() - start_s
    return {
        "MiB grown": (child.status_bytes("VmHWM") - before) / (1 << 20),
        "MB/s": summary.n_bytes / 1e6 / elapsed_s,
        "CPU s": time.process_time() - busy_s,
    }
