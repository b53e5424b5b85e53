"""Measure what reading by offset costs beside mapping, with everything in the page cache.

    python tools/dev/bench_access.py [FOLDER]

Three datasets of one field each: images, small rows, texts. A ShardLoader without workers goes over
each in shuffled order, mapped and read by turns, for several rounds after one that checks every
hash; the fastest round of each counts. Also what looking after the lengths of mapped files costs a
batch. Exits with 1 when reading images takes more than LIMIT times as long. FOLDER keeps the data.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import shardio
from shardio import Array, DatasetWriter, Schema, ShardLoader, Text
from shardio import open as open_dataset

LIMIT: Final = 2.5
N_ROUNDS: Final = 7
BATCH: Final = 64
SHARD_BYTES: Final = 16 << 20
MODES: Final = ("mmap", "pread")

SETS: Final[dict[str, tuple[Schema, int]]] = {
    "images of 150,528 bytes": (Schema({"x": Array("uint8", (224, 224, 3))}), 1024),
    "rows of 2,048 bytes": (Schema({"x": Array("uint8", (2048,))}), 32_768),
    "numbers of 8 bytes": (Schema({"x": Array("int64")}), 262_144),
    "texts of 200 bytes": (Schema({"x": Text()}), 16_384),
}


def samples(schema: Schema, n: int) -> Iterator[dict[str, Any]]:
    """Values that cost little to make."""
    field = schema["x"]
    for i in range(n):
        if isinstance(field, Array):
            yield {"x": np.full([d or 1 for d in field.shape], i % 200, field.numpy)}
        else:
            yield {"x": f"{i:200d}"}


def write(folder: Path, schema: Schema, n: int) -> str:
    """Write a dataset, unless it is there."""
    if not folder.exists():
        with DatasetWriter(folder, schema, shard_bytes=SHARD_BYTES) as writer:
            for sample in samples(schema, n):
                writer.append(sample)
    return str(folder)


def measure(folder: str, batch: int) -> dict[str, float]:
    """Return the seconds of the fastest epoch in each mode."""
    loaders = {
        mode: ShardLoader(
            shardio.open(folder, access=mode),
            batch,
            shuffle=True,
            num_workers=0,
            output="numpy",
            reuse=True,
        )
        for mode in MODES
    }
    best = dict.fromkeys(MODES, float("inf"))
    for number in range(N_ROUNDS + 1):
        for mode, loader in loaders.items():
            start_s = time.perf_counter()
            for _ in loader:
                pass
            if number:
                best[mode] = min(best[mode], time.perf_counter() - start_s)
    for loader in loaders.values():
        loader.close()
    return best


def measure_check(folder: str) -> tuple[float, int]:
    """Return the seconds to stat every shard, and the number of shards."""
    with open_dataset(folder, access="mmap") as dataset:
        shards = np.arange(len(dataset.shards))
        dataset.files.check_lengths(shards)  # opens them
        best = float("inf")
        for _ in range(200):
            start_s = time.perf_counter()
            dataset.files.check_lengths(shards)
            best = min(best, time.perf_counter() - start_s)
        return best, len(shards)


def main() -> int:
    """Print a line for each dataset; return the exit code."""
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        root.mkdir(parents=True, exist_ok=True)
        for i, (name, (schema, n)) in enumerate(SETS.items()):
            folder = write(root / f"access-{i}", schema, n)
            found = measure(folder, BATCH)
            per_row = {mode: seconds / n * 1e6 for mode, seconds in found.items()}
            ratios.append(found["pread"] / found["mmap"])
            print(
                f"{name:<24} mmap {per_row['mmap']:8.2f} µs a sample, pread "
                f"{per_row['pread']:8.2f} µs: {ratios[-1]:5.2f} times"
            )
            if not i:
                seconds, n_shards = measure_check(folder)
                print(f"{'':<24} looking at a file's length: {seconds / n_shards * 1e6:.2f} µs")
    print(f"limit for images: {LIMIT} times")
    return int(ratios[0] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
