"""Measure `shardio verify` against reading and hashing the same files in as many processes.

    python tools/dev/bench_verify.py [--mib N] [--times N] [--rounds N] [--folder DIR] [NAME …]

Three datasets are written, in shards of the usual size: clips of raw frames, encoded pictures of
about 30 KB with a label, and embeddings of 3 KB. Each names its shards several times over (links),
so that it is large and the start of processes has the part in it that it has in a dataset worth
verifying. The files are in the page cache. Of each dataset, in turns:

* **whole**: the files are read and xxh3-hashed in pieces of 1 MiB, dealt out to as many processes
  as a verification may use, one per usable CPU: the best that can be done with them, rules aside;
* **verification**: `verify_dataset` as `shardio verify` calls it;
* **units**: as "whole", but with a hash call for every unit of a piece of 1 MiB, as the format asks
  for one per row from 2 KiB up: what such a call costs where rows are that small.

Each includes the start and the end of its processes (forks for "whole" and "units", a process with
NumPy loaded for verification), and nothing that happens once per interpreter. A round's ratio is
verification's rate by the mean of that right before and right after it. Exit code 1 if the median
of the ratios of a dataset to "whole" is under 0.8.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import mmap
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import shardio
from shardio import Array, Bytes, Schema, Text
from shardio.dataset.manifest import GENERATIONS, POINTER, load, publish
from shardio.maintenance import verify_dataset

WANTED = 0.8
PIECE_BYTES = 1 << 20
N_PROCESSES = len(os.sched_getaffinity(0))

Samples = Iterator[dict[str, Any]]


def clips(n_bytes: int) -> Samples:
    """Clips as `shardio convert --store raw` writes them."""
    frames = np.random.default_rng(0).integers(0, 255, (16, 112, 112, 3), np.uint8)
    for i in range(n_bytes // frames.nbytes):
        frames[0, 0, 0] = i % 251
        yield {"frames": frames, "label": i, "source": f"class/video {i}.mp4"}


def pictures(n_bytes: int) -> Samples:
    """Yield encoded pictures of many sizes."""
    rng = np.random.default_rng(0)
    content = rng.bytes(1 << 20)
    for i in range(n_bytes // 30_000):
        start, size = i % 1000, int(rng.integers(10_000, 50_000))
        yield {"picture": content[start : start + size], "label": i}


def embeddings(n_bytes: int) -> Samples:
    """Rows just long enough for a hash of their own."""
    row = np.random.default_rng(0).random(768, np.float32)
    for i in range(n_bytes // row.nbytes):
        row[0] = i
        yield {"embedding": row, "label": i}


DATASETS: dict[str, tuple[Schema, Callable[[int], Samples]]] = {
    "clips": (
        Schema(
            {
                "frames": Array("uint8", (16, 112, 112, 3)),
                "label": Array("int64"),
                "source": Text(),
            }
        ),
        clips,
    ),
    "pictures": (Schema({"picture": Bytes(), "label": Array("int64")}), pictures),
    "embeddings": (
        Schema({"embedding": Array("float32", (768,)), "label": Array("int64")}),
        embeddings,
    ),
}


UNIT_BYTES = {"clips": 16 * 112 * 112 * 3, "pictures": 30_000, "embeddings": 3072}
"""Approximate bytes that most hashes of each dataset cover."""


@functools.cache
def _piece(unit_bytes: int) -> tuple[memoryview, list[memoryview]]:
    """Return the buffer into which a process reads its files, and its units.

    It begins on a page: some processors copy a quarter as fast to other places.
    """
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    starts = range(0, PIECE_BYTES - unit_bytes + 1, unit_bytes)
    units = [buffer[start : start + unit_bytes] for start in starts]
    return buffer[: len(units) * unit_bytes], units


def hash_file(unit_bytes: int, path: str) -> int:
    """Read a file and hash its bytes, in units if they are smaller than a piece, and count them."""
    filled, units = _piece(unit_bytes)
    hash_, n_bytes = xxhash.xxh3_64_intdigest, 0
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(filled):
            list(map(hash_, units))
            n_bytes += n
    return n_bytes


def hash_rate(folder: Path, unit_bytes: int = PIECE_BYTES) -> float:
    """Bytes per second of reading and hashing."""
    paths = sorted(map(str, folder.glob("*.shard")))
    start_s = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(min(N_PROCESSES, len(paths))) as pool:
        n_bytes = sum(pool.imap_unordered(functools.partial(hash_file, unit_bytes), paths))
    return n_bytes / (time.perf_counter() - start_s)


def verify_rate(folder: Path) -> float:
    """Bytes per second of a verification."""
    start_s = time.perf_counter()
    report = verify_dataset(folder)
    if report.findings:
        raise SystemExit(f"{folder}: {report.findings[0]}")
    return report.n_bytes / (time.perf_counter() - start_s)


def multiply(folder: Path, n_times: int) -> None:
    """Make a dataset n_times as large, by links to its shards."""
    one = load(folder)
    shards = []
    for time_ in range(n_times):
        for shard in one.shards:
            name = f"{time_:03d}-{shard.name}"
            os.link(folder / shard.name, folder / name)
            shards.append(dataclasses.replace(shard, name=name))
    for shard in one.shards:
        (folder / shard.name).unlink()
    shutil.rmtree(folder / GENERATIONS)
    (folder / POINTER).unlink()
    publish(folder, schema=one.schema, shards=shards)


def ratios(folder: Path, unit_bytes: int, n_rounds: int) -> list[tuple[float, float, float]]:
    """(rate of verification, its ratio to "whole", its ratio to "units"), round by round."""
    unit_bytes = min(unit_bytes, PIECE_BYTES)
    hash_rate(folder), verify_rate(folder)  # the page cache, and what is loaded late
    found, whole, units = [], hash_rate(folder), hash_rate(folder, unit_bytes)
    for _ in range(n_rounds):
        verified = verify_rate(folder)
        before, whole, units_before, units = (
            whole,
            hash_rate(folder),
            units,
            hash_rate(folder, unit_bytes),
        )
        means = statistics.mean([before, whole]), statistics.mean([units_before, units])
        found.append((verified, verified / means[0], verified / means[1]))
    return found


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(DATASETS)}")
    parser.add_argument("--mib", type=int, default=512, help="data that is written of each")
    parser.add_argument("--times", type=int, default=64, help="how often each shard is named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the datasets are written for a while")
    options = parser.parse_args()
    is_bad = False
    for name in options.names or DATASETS:
        schema, samples = DATASETS[name]
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            folder = Path(place) / name
            with shardio.DatasetWriter(folder, schema) as writer:
                for sample in samples(options.mib << 20):
                    writer.append(sample)
            multiply(folder, options.times)
            found = ratios(folder, UNIT_BYTES[name], options.rounds)
        rate = statistics.median(verified for verified, _, _ in found)
        print(f"{name:<10}  {rate / (1 << 30):5.2f} GiB/s", end="")
        for what, ratio_of in (("whole", 1), ("units", 2)):
            values = [ratios_of_round[ratio_of] for ratios_of_round in found]
            median = statistics.median(values)
            print(f"  of {what} {median:.2f} ({min(values):.2f}–{max(values):.2f})", end="")
            if what == "whole" and median < WANTED:
                is_bad = True
                print(f" under {WANTED}", end="")
        print(flush=True)
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
