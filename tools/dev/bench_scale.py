"""Measures opening a dataset of 100,000 shards and 10^9 samples; exits with 1 over a limit.

python tools/dev/bench_scale.py [--shards N] [--inputs N] [--rounds N] [--listed]

A generation of so many shards and inputs is published into a new folder, without the shards, which
opening a dataset does not touch. Then fresh processes open it: in under 1 s from the call of
`shardio.open()`, and with less than 200 MB of memory in all, interpreter and imports included. For
the record: how long it takes to begin an epoch in its middle, as resuming does. With --listed all
shards and inputs lie in the JSON of the generation, as those of small datasets do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shardio import Array, Schema, Text
from shardio.dataset import external_lists
from shardio.dataset.manifest import publish
from shardio.shard.writer import ShardSummary

SAMPLES_PER_SHARD = 10_000
BYTES_PER_SHARD = 1 << 30
LIMIT_S = 1.0
LIMIT_MB = 200.0

_TIMED = """
import json, sys, time
import numpy, shardio
shardio.ShardDataset  # loads what it needs

def peak_mb():
    with open("/proc/self/status") as file:  # what getrusage says has its parent's peak in it
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024 / 1e6

imported_mb, start = peak_mb(), time.perf_counter()
dataset = shardio.open(sys.argv[1])
opened = time.perf_counter()
n, n_shards = len(dataset), len(dataset.shards)
found = {"open_s": opened - start, "peak_mb": peak_mb(), "imported_mb": imported_mb,
         "samples": n, "shards": n_shards}

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
    found[name + "_s"] = time.perf_counter() - start
print(json.dumps(found))
"""


def make(folder: Path, n_shards: int, n_inputs: int) -> float:
    """Publish a generation of shards that are not there; returns how many seconds that took."""
    shards = [
        ShardSummary(f"{i:06d}-000.shard", SAMPLES_PER_SHARD, BYTES_PER_SHARD, f"{i:032x}")
        for i in range(n_shards)
    ]
    inputs = [
        {"path": f"part-{i:06d}.tar", "outcome": "converted", "samples": SAMPLES_PER_SHARD}
        for i in range(n_inputs)
    ]
    schema = Schema({"tokens": Array("int32", (64,)), "label": Array("int64"), "text": Text()})
    start_s = time.perf_counter()
    publish(folder, schema=schema, shards=shards, inputs=inputs)
    return time.perf_counter() - start_s


def measure(folder: Path, n_rounds: int) -> dict[str, Any]:
    """Medians over fresh processes."""
    rounds = []
    for _ in range(n_rounds):
        command = [sys.executable, "-c", _TIMED, str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rounds.append(json.loads(done.stdout))
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def main() -> int:
    """Print the medians; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--listed", action="store_true")
    asked = parser.parse_args()
    if asked.listed:
        external_lists.MAX_INLINE_ENTRIES = 1 << 60  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "dataset"
        folder.mkdir()
        published_s = make(folder, asked.shards, asked.inputs)
        sizes = {path.suffix: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        found = measure(folder, asked.rounds)
    print(
        f"{found['shards']:,.0f} shards, {found['samples']:,.0f} samples, {asked.inputs:,} inputs"
    )
    print(f"published in {published_s:.2f} s; bytes: {sizes}")
    print(
        f"opened in {found['open_s'] * 1e3:.0f} ms (limit {LIMIT_S * 1e3:.0f} ms); peak memory "
        f"{found['peak_mb']:.0f} MB (limit {LIMIT_MB:.0f} MB), {found['imported_mb']:.0f} MB of it "
        "before"
    )
    ways = ", ".join(
        f"{name} {found[name + '_s'] * 1e3:.0f} ms" for name in ("full", "blocks", "shards")
    )
    print(f"an epoch from its middle on, its order and 16,384 positions: {ways}")
    return int(found["open_s"] > LIMIT_S or found["peak_mb"] > LIMIT_MB)


if __name__ == "__main__":
    sys.exit(main())
