"""Measure how fast samples of many kinds are loaded here, and what CPU time that takes.

    python tools/dev/bench_rates.py                        every kind, with 2 workers
    python tools/dev/bench_rates.py --workers 1 2 4 8      do more workers than CPUs cost anything?
    python tools/dev/bench_rates.py --case "raw, 2 KB"     this kind only

Makes a dataset for each kind in a temporary folder, and iterates over it in shuffled batches of 32
(8 of large samples) with nothing in the loop's body. After three epochs, in which all blocks are
touched, epochs are timed for a second: the best counts for samples/s. CPU time is that of all
workers together, and of this process, as the kernel accounts for it (/proc/PID/schedstat), over all
timed epochs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import shardio
from dev.bench_faces import CASES, ten_microseconds
from shardio import Array, Bytes, Schema, ShardLoader

TIMED_S: Final = 1.0
MIN_EPOCHS: Final = 2
FIRST_EPOCHS: Final = 3
BATCH, LARGE_BATCH = 32, 8
_LARGE_BYTES: Final = 1 << 20


def ten_milliseconds(sample: dict[str, Any]) -> dict[str, Any]:
    """Be busy for about as long."""
    end_ns = time.perf_counter_ns() + 10_000_000
    while time.perf_counter_ns() < end_ns:
        pass
    return sample


def sleep_ten_milliseconds(sample: dict[str, Any]) -> dict[str, Any]:
    """Wait for as long, as for an answer from elsewhere."""
    time.sleep(0.01)
    return sample


def halves(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of half the size, in floats, as many transforms do."""
    return {"image": sample["image"][:112, :112].astype(np.float32) / 255}


def whole_copy(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a new array of the same size, by way of another one."""
    return {"image": 255 - (sample["image"] + 1)}


def shift(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a new array of all samples."""
    return {"image": batch["image"] + 1, "label": batch["label"]}


def _large(n_bytes: int) -> Callable[[int], dict[str, Any]]:
    return lambda i: {"image": np.full(n_bytes, i % 251, np.uint8)}


def _varying(i: int) -> dict[str, Any]:
    return {"blob": bytes(500 + (i * 7919) % 4000)}


class Kind(NamedTuple):
    """Samples of one kind, and what is asked of the loader besides."""

    schema: dict[str, Any]
    sample: Callable[[int], dict[str, Any]]
    n_samples: int
    options: dict[str, Any] = {}


def _kinds() -> Iterator[tuple[str, Kind]]:
    small, images = CASES["raw, 2 KB"], CASES["raw, 150 KB"]
    for name, case in CASES.items():
        if "transform" not in name:
            yield name, Kind(*case)
    yield "records of 0.5 to 4.5 KB", Kind({"blob": Bytes()}, _varying, 4096)
    for n_bytes, n in ((_LARGE_BYTES, 128), (10 * _LARGE_BYTES, 24)):
        schema = {"image": Array("uint8", (n_bytes,))}
        name = f"raw, {n_bytes >> 20} MiB"
        yield name, Kind(schema, _large(n_bytes), n)
        yield (
            f"{name}, a transform that copies",
            Kind(schema, _large(n_bytes), n, {"transform": whole_copy}),
        )
    yield "raw, 150 KB, a transform to floats", Kind(*images, {"transform": halves})
    yield "raw, 2 KB, a transform of 10 µs", Kind(*small, {"transform": ten_microseconds})
    few = *small[:2], 192
    yield "raw, 2 KB, a transform of 10 ms", Kind(*few, {"transform": ten_milliseconds})
    yield "raw, 2 KB, one that sleeps 10 ms", Kind(*few, {"transform": sleep_ten_milliseconds})
    yield "raw, 2 KB, batch_transform", Kind(*small, {"batch_transform": shift})
    yield (
        "raw, 150 KB, batch_transform",
        Kind(
            images[0] | {"label": Array("int64")},
            lambda i: images[1](i) | {"label": i},
            images[2],
            {"batch_transform": shift},
        ),
    )


KINDS: Final = dict(_kinds())


def _descendants() -> list[int]:
    """Return the processes below this one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    found = [int(Path("/proc/self").readlink().name)]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found[1:]


def _cpu_ns(process: int | str) -> int:
    """Return the CPU time of a process in ns."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


def measure(folder: str, kind: Kind, n_workers: int) -> tuple[float, float, float]:
    """Return samples per second, and CPU µs per sample of all workers and of this process."""
    batch = LARGE_BATCH if "image" in kind.schema and _is_large(kind) else BATCH
    with ShardLoader(
        folder, batch, shuffle=True, num_workers=n_workers, output="numpy", **kind.options
    ) as loader:
        for _ in range(FIRST_EPOCHS):
            for _ in loader:
                pass
        workers = _descendants()
        before = sum(map(_cpu_ns, workers)), _cpu_ns("self")
        start_s, n_epochs, best_s = time.perf_counter(), 0, float("inf")
        while n_epochs < MIN_EPOCHS or time.perf_counter() - start_s < TIMED_S:
            epoch_s = time.perf_counter()
            for _ in loader:
                pass
            best_s = min(best_s, time.perf_counter() - epoch_s)
            n_epochs += 1
        after = sum(map(_cpu_ns, workers)), _cpu_ns("self")
    n = n_epochs * kind.n_samples * 1e3
    return kind.n_samples / best_s, (after[0] - before[0]) / n, (after[1] - before[1]) / n


def _is_large(kind: Kind) -> bool:
    return (kind.schema["image"].row_bytes or 0) >= _LARGE_BYTES


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--case", nargs="+", metavar="KIND", choices=[*KINDS], help="these kinds only"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    arguments = parser.parse_args()
    print("| samples | workers | samples/s | CPU µs per sample, workers | main |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as parent:
        for number, name in enumerate(arguments.case or KINDS):
            folder, kind = str(Path(parent) / str(number)), KINDS[name]
            with shardio.DatasetWriter(folder, Schema(kind.schema)) as writer:
                for i in range(kind.n_samples):
                    writer.append(kind.sample(i))
            for n_workers in arguments.workers:
                rate, of_workers, of_main = measure(folder, kind, n_workers)
                print(
                    f"| {name} | {n_workers} | {rate:,.0f} | {of_workers:.1f} | {of_main:.1f} |",
                    flush=True,
                )
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
