"""Measure a loader over an object store against one over a folder with the same shards.

    python tools/dev/bench_remote.py [--mib N] [--rounds N] [--epochs N] [--workers N]

A server that speaks S3 (moto, in a process of its own, on loopback) has a dataset of frames,
224 × 224 × 3, in shards of 8 MiB. Of it:

* **cold**: the first epoch with an empty cache: every shard is downloaded, verified, and mapped;
* **warm**: later epochs of the same loader;
* **local**: as warm, of the folder that was uploaded.

Warm and local epochs are taken in turns, shuffled, some at a time. A round's ratio is the warm rate
by the mean of the local ones right before and right after it. The cold rate is that of a server in
Python, and says nothing but that it works. Exit code 1 if the median of the ratios is under 0.9, or
if a byte was downloaded twice.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardio import Array, DatasetWriter, Schema, ShardLoader
from tests.storage.remote.scene import scene

WANTED = 0.9
SCHEMA = Schema({"frames": Array("uint8", (224, 224, 3)), "label": Array("int64")})
FRAME_BYTES = 224 * 224 * 3
SHARD_BYTES = 8 << 20


def samples(n: int) -> Iterator[dict[str, Any]]:
    """Frames that differ."""
    frames = np.random.default_rng(0).integers(0, 255, (224, 224, 3), np.uint8)
    for i in range(n):
        frames[0, 0, 0] = i % 251
        yield {"frames": frames, "label": i}


def rate(loader: ShardLoader, n_epochs: int) -> float:
    """Return samples per second of some epochs."""
    start_s, n = time.perf_counter(), 0
    for _ in range(n_epochs):
        for batch in loader:
            n += len(batch["label"])
    return n / (time.perf_counter() - start_s)


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    options: Any = {"output": "numpy", "num_workers": given.workers, "shuffle": True}
    with tempfile.TemporaryDirectory() as place, scene() as store:
        folder = Path(place) / "set"
        with DatasetWriter(folder, SCHEMA, shard_bytes=SHARD_BYTES) as writer:
            for sample in samples((given.mib << 20) // FRAME_BYTES):
                writer.append(sample)
        url, cache = store.put_dataset(folder, "set"), Path(place) / "cache"
        told: Any = {"cache": cache, "storage_options": store.options}
        with ShardLoader(url, 32, **told, **options) as remote:
            sizes = {shard.name: shard.n_bytes for shard in remote.dataset.shards}
            cold = rate(remote, 1)
            with ShardLoader(folder, 32, **options) as local:
                rate(local, given.epochs), rate(remote, given.epochs)
                locals_, warms = [rate(local, given.epochs)], list[float]()
                for _ in range(given.rounds):
                    warms.append(rate(remote, given.epochs))
                    locals_.append(rate(local, given.epochs))
        came = {name: store.proxy.n_bytes[name] for name in sizes}
    ratios = [warm / statistics.mean(locals_[i : i + 2]) for i, warm in enumerate(warms)]
    ratio = statistics.median(ratios)
    print(f"{len(sizes)} shards, {sum(sizes.values()) >> 20} MiB; samples per second")
    print(f"  cold   {cold:10,.0f}")
    print(f"  warm   {statistics.median(warms):10,.0f}")
    print(f"  local  {statistics.median(locals_):10,.0f}")
    print(f"  ratio  {ratio:10.2f}  (of rounds: {', '.join(f'{r:.2f}' for r in ratios)})")
    print(f"  bytes downloaded {sum(came.values()):,} of {sum(sizes.values()):,}")
    return 0 if ratio >= WANTED and came == sizes else 1


if __name__ == "__main__":
    sys.exit(main())
