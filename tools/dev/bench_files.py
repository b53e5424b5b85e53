"""Counts the maps and descriptors of loaders over 100,000 shards; exits with 1 over a limit.

python tools/dev/bench_files.py [--shards N] [--batches N]

The shards are small, and links to a few files: what is counted is what a process has of them, not
what is in them. For each shuffle a fresh process reads so many batches without workers, so that all
it has is its own; a worker of a loader has as much. Of the maps the kernel lets a process have,
three quarters are for shards.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from shardio import Array, Schema, ShardWriter
from shardio.dataset.manifest import publish
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import max_maps

PER_SHARD, LINKS, BATCH = 2, 10_000, 100
SHUFFLES = (False, True, "blocks", "shards")
MAX_DESCRIPTORS = 64

_COUNTED = """
import itertools, json, os, sys, time
import numpy
from shardio import ShardLoader

def own_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1e3

def counts():
    with open("/proc/self/maps") as maps:
        paths = [line.split()[-1] for line in maps]
    files = {path for path in paths if path.endswith(".shard")}
    return len(paths), len(files), len(os.listdir("/proc/self/fd")), own_mb()

folder, shuffle, batch_size, n_batches = json.loads(sys.argv[1])
start, before = time.perf_counter(), own_mb()
options = {"num_workers": 0, "output": "numpy", "seed": 1}
with ShardLoader(folder, batch_size, shuffle=shuffle, **options) as loader:
    made, peak = time.perf_counter(), (0, 0, 0, 0)
    for step, _ in enumerate(itertools.islice(loader, n_batches), 1):
        if step % 20 == 0:
            peak = tuple(map(max, peak, counts()))
    read = time.perf_counter()
maps, files, descriptors, peak_mb = peak
print(json.dumps({"made_ms": (made - start) * 1e3, "batch_ms": (read - made) * 1e3 / step,
                  "maps": maps, "files": files, "descriptors": descriptors,
                  "grown_mb": peak_mb - before}))
"""


def make(folder: Path, n_shards: int) -> None:
    """Write a dataset of so many shards, each 10,000 of which are one file."""
    schema = Schema({"image": Array("uint8", (64, 64)), "label": Array("int64")})
    sample = {"image": np.zeros((64, 64), np.uint8), "label": 0}
    shards: list[ShardSummary] = []
    for start in range(0, n_shards, LINKS):
        numbers = range(start, min(start + LINKS, n_shards))
        first, *others = (folder / f"{k:06d}-000.shard" for k in numbers)
        with ShardWriter(first, schema) as writer:
            for _ in range(PER_SHARD):
                writer.append(sample)
            written = writer.close()
        for path in others:
            os.link(first, path)
        shards += [dataclasses.replace(written, name=path.name) for path in (first, *others)]
    publish(folder, schema=schema, shards=shards)


def main() -> int:
    """Print what each shuffle takes; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=300)
    asked = parser.parse_args()
    limit = max_maps() * 3 // 4
    is_over = False
    print(f"{asked.shards:,} shards, {asked.batches} batches of {BATCH}; {limit:,} maps at most")
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary), asked.shards)
        for shuffle in SHUFFLES:
            told = json.dumps([temporary, shuffle, BATCH, asked.batches])
            command = [sys.executable, "-c", _COUNTED, told]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout)
            is_over |= found["maps"] > limit + 1000 or found["descriptors"] > MAX_DESCRIPTORS
            print(
                f"{shuffle!s:<7} made in {found['made_ms']:.0f} ms; {found['files']:,} files in "
                f"{found['maps']:,} maps, {found['descriptors']} descriptors, "
                f"{found['grown_mb']:.0f} MB; {found['batch_ms']:.1f} ms a batch"
            )
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
