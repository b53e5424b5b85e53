"""Measures opening shards; exits with 1 when a limit is not met.

python tools/dev/bench_open.py [FOLDER]

Ten million `Text` records are to open in under 50 ms, with less than 30 MB of memory, in a fresh
process after its imports; 400 small shards are timed for the record. FOLDER keeps the data for the
next run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardio import Array, Schema, ShardWriter, Text

N_RECORDS = 10_000_000
N_SHARDS = 400
N_ROUNDS = 7
LIMIT_MS = 50.0
LIMIT_MB = 30.0

_TIMED = """
import json, os, sys, time
import numpy, shardio
shardio.ShardReader  # loads what it needs

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

paths = sys.argv[1:]
resident, start = resident_bytes(), time.perf_counter()
readers = [shardio.ShardReader(path) for path in paths]
opened = time.perf_counter()
grown = resident_bytes() - resident
n = sum(map(len, readers))
middle = readers[-1][len(readers[-1]) // 2]
read = time.perf_counter()
print(json.dumps({"open_ms": (opened - start) * 1e3, "first_record_ms": (read - opened) * 1e3,
                  "grown_mb": grown / 1e6, "n": n}))
"""


def write_texts(folder: Path) -> Path:
    """Write the large shard, unless it is there."""
    path = folder / f"texts-{N_RECORDS}.shard"
    if not path.exists():
        print(f"writing {N_RECORDS:,} records to {path} ...", flush=True)
        start_s = time.monotonic()
        with ShardWriter(path, Schema({"text": Text()})) as writer:
            for i in range(N_RECORDS):
                writer.append({"text": f"record number {i}"})
        elapsed_s = time.monotonic() - start_s
        print(f"... in {elapsed_s:.0f} s, {elapsed_s / N_RECORDS * 1e6:.1f} µs per record")
    return path


def write_small(folder: Path) -> list[Path]:
    """Write the small shards, unless they are there."""
    schema = Schema({"tokens": Array("int32", (64,)), "label": Array("int64"), "text": Text()})
    paths = [folder / f"small-{number:03d}.shard" for number in range(N_SHARDS)]
    for path in (path for path in paths if not path.exists()):
        with ShardWriter(path, schema) as writer:
            for i in range(50):
                writer.append({"tokens": [i] * 64, "label": i, "text": str(i)})
    return paths


def measure(paths: list[Path]) -> dict[str, float]:
    """Medians over fresh processes."""
    command = [sys.executable, "-c", _TIMED, *map(str, paths)]
    rounds = []
    for _ in range(N_ROUNDS):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rounds.append(json.loads(done.stdout))
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}


def main() -> int:
    """Print the medians; return the exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        folder.mkdir(parents=True, exist_ok=True)
        large, small = measure([write_texts(folder)]), measure(write_small(folder))
    for name, found in ((f"{N_RECORDS:,} texts", large), (f"{N_SHARDS} small shards", small)):
        print(
            f"{name:<20} open {found['open_ms']:7.2f} ms, first record "
            f"{found['first_record_ms']:6.2f} ms, memory +{found['grown_mb']:.1f} MB"
        )
    print(f"limits for texts: {LIMIT_MS:.0f} ms, {LIMIT_MB:.0f} MB")
    return int(large["open_ms"] > LIMIT_MS or large["grown_mb"] > LIMIT_MB)


if __name__ == "__main__":
    sys.exit(main())
