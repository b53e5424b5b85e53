#!/usr/bin/env python
"""Bytes per second of shuffled clips of `raw`, beside those of the frames of the race.

    python tools/dev/bench_raw.py [--workers 2] [--rounds 5]

Two datasets of as many bytes: clips as `raw` stores them (16 x 112 x 112 x 3, with times and names
beside) and frames as tools/dev/race.py reads them (224 x 224 x 3 and a label). Each is read for an
epoch, in batches of as many bytes, in turns; each round gives a ratio, and the median counts.

Exit code 1 where clips come at less than 0.7 of the frames' bytes per second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]

import numpy as np  # noqa: E402 - the checkout comes first

import shardio  # noqa: E402

BAR = 0.7
N_BYTES = 320 << 20
BATCH_BYTES = 64 * 224 * 224 * 3
CLIP, FRAME = (16, 112, 112, 3), (224, 224, 3)


def clip(n: int, pixels: np.ndarray) -> Mapping[str, Any]:
    """One sample as the converter of videos makes it."""
    return {
        "frames": pixels,
        "label": n % 5,
        "source": f"class{n % 5}/{n // 18:05d}.mp4",
        "pts": np.arange(16, dtype=np.int64) + n,
        "time_base": np.array([1, 30], np.int64),
    }


def frame(n: int, pixels: np.ndarray) -> Mapping[str, Any]:
    """One sample of the race."""
    return {"frames": pixels, "label": n}


def write(out: Path, shape: tuple[int, ...], sample: Any) -> None:
    """Make a dataset of N_BYTES of noise."""
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    columns: dict[str, Any] = {
        "frames": shardio.Array("uint8", shape),
        "label": shardio.Array("int64"),
    }
    if sample is clip:
        columns |= {
            "source": shardio.Text(),
            "pts": shardio.Array("int64", (16,)),
            "time_base": shardio.Array("int64", (2,)),
        }
    with shardio.DatasetWriter(out, shardio.Schema(columns)) as writer:
        for n in range(N_BYTES // noise.nbytes):
            writer.append(sample(n, noise))


def rate(place: Path, n_bytes: int, n_workers: int, epoch: int) -> float:
    """Bytes of pixels per second, from the first batch to the end of an epoch."""
    with shardio.ShardLoader(
        place, batch_size=BATCH_BYTES // n_bytes, num_workers=n_workers, shuffle=True, seed=epoch
    ) as loader:
        batches = iter(loader)
        next(batches)
        start_s, found = time.perf_counter(), 0
        for batch in batches:
            found += batch["frames"].numpy().nbytes
        return found / (time.perf_counter() - start_s)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Clips of `raw` beside frames.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clips, frames = Path(folder, "clips"), Path(folder, "frames")
        write(clips, CLIP, clip)
        write(frames, FRAME, frame)
        shares = []
        for n in range(options.rounds):
            by_frame = rate(frames, int(np.prod(FRAME)), options.workers, n)
            by_clip = rate(clips, int(np.prod(CLIP)), options.workers, n)
            shares.append(by_clip / by_frame)
            print(f"clips {by_clip / 1e9:.2f} GB/s, frames {by_frame / 1e9:.2f} GB/s")
    share = statistics.median(shares)
    print(f"raw: {share:.2f} of the frames' bytes/s (bar {BAR}){'' if share >= BAR else ': BELOW'}")
    return int(share < BAR)


if __name__ == "__main__":
    sys.exit(main())
