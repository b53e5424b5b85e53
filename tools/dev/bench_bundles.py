#!/usr/bin/env python
"""Measure the saving of decoding clips of a video together: CPU time by `per_video`.

    python tools/dev/bench_bundles.py DATASET [--per-video 1 8] [--batch 32] [--rounds 3]

All clips of a dataset of videos, 16 frames of 112 x 112, in a shuffled order, through a ShardLoader
without workers, so that all of it is this process's CPU time; the least of several rounds. With it,
how many batches have more clips of a video than are to lie together.

Then the order alone, of 200 videos of 18 clips: how many batches of 32 have more than that.

Exit code 1 where the last of `--per-video` takes more than 0.8 of the CPU time of the first, or
more than one in 1,000 batches of the 200 videos have too many clips of one.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

import shardio
from shardio import ShardLoader
from shardio.order.clip_groups import ClipGroupEpochOrder, ClipGroups
from shardio.order.permutation import epoch_permutation

N_VIDEOS, N_CLIPS = 200, 18
N_EPOCHS = 50
MAX_CPU, MAX_CROWDED = 0.8, 0.001


def epoch(folder: str, per_video: int, batch_size: int, seed: int) -> tuple[float, int, float]:
    """CPU seconds of one epoch, its clips, and the share of batches with too many of a video."""
    view = shardio.open(folder).clips(16, size=(112, 112), per_video=per_video)
    options: dict[str, Any] = {"shuffle": True, "seed": seed, "num_workers": 0, "output": "numpy"}
    n_clips, crowded = 0, []
    with ShardLoader(view, batch_size, fields=["video"], **options) as loader:
        start_s = time.process_time()
        for batch in loader:
            n_clips += batch.n_rows
            _, counts = np.unique(batch.origins, axis=0, return_counts=True)
            crowded.append(counts.max() > per_video)
        return time.process_time() - start_s, n_clips, float(np.mean(crowded))


def crowded(k: int, *, spread: bool) -> float:
    """Return the share of batches of 32 with more than k clips of one of N_VIDEOS videos."""
    n = N_VIDEOS * N_CLIPS
    groups = ClipGroups(np.arange(1, N_VIDEOS + 1) * N_CLIPS, k, N_VIDEOS * N_CLIPS)
    found = []
    for number in range(N_EPOCHS):
        if spread:
            clips = ClipGroupEpochOrder(groups, seed=0, epoch=number).at(np.arange(n))
        else:  # bundles of k, shuffled and no more
            whole = epoch_permutation(n // k, seed=0, epoch=number).at(np.arange(n // k))
            clips = (whole[:, None] * k + np.arange(k)).reshape(-1)
        batches = (clips // N_CLIPS)[: len(clips) // 32 * 32].reshape(-1, 32)
        found += [np.bincount(each).max() > k for each in batches]
    return float(np.mean(found))


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", metavar="DATASET")
    parser.add_argument("--per-video", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runs = {
        k: [epoch(options.folder, k, options.batch, seed) for seed in range(options.rounds)]
        for k in options.per_video
    }
    least = {k: min(s for s, _, _ in found) for k, found in runs.items()}
    first, last = options.per_video[0], options.per_video[-1]
    for k, found in runs.items():
        n_clips = found[0][1]
        print(
            f"per_video={k:<3} {least[k] / n_clips * 1e3:8.2f} ms of CPU a clip, "
            f"{least[k] / least[first]:.2f} of per_video={first}; "
            f"{np.mean([share for _, _, share in found]):.1%} of batches have more than {k} of one"
        )
    shares = {k: crowded(k, spread=True) for k in options.per_video if k > 1}
    for k, share in shares.items():
        print(
            f"{N_VIDEOS} videos of {N_CLIPS} clips: {share:.3%} of batches of 32 have more than "
            f"{k} of one; of bundles that are only shuffled {crowded(k, spread=False):.1%}"
        )
    too_slow = least[last] > MAX_CPU * least[first]
    return int(too_slow or any(share > MAX_CROWDED for share in shares.values()))


if __name__ == "__main__":
    sys.exit(main())
