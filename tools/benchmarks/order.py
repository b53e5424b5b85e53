"""Orders: the sample at a position of an epoch, and clips of a video that stay together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np

import shardio
from benchmarks.data import sample_videos
from benchmarks.harness import Bench, Lanes, Limit, case
from shardio import ShardLoader
from shardio.order.clip_groups import ClipGroupEpochOrder, ClipGroups
from shardio.order.permutation import CHUNK, epoch_permutation
from shardio.order.sampling import WeightedEpochOrder, draw_without_replacement
from shardio.order.shuffle import (
    SHARDS_PER_WINDOW,
    BlockShuffle,
    ShardEpochOrder,
    WindowedEpochOrder,
)

N: Final = 10**12
N_WEIGHTS: Final = 10**7
N_IN_SHARDS, N_SHARDS = 10**9, 10**5
BOUNDED: Final = (
    "full, at random",
    "full, in order",
    "blocks, at random",
    "blocks, in order",
    "shards of 10^9, in order",
)


@case(*(Limit(lane, "ns/index", at_most=100) for lane in BOUNDED))
def positions(bench: Bench) -> Lanes:
    """Measure finding the sample at one of 10^12 positions, by order; weighted draws of 10^7."""
    rng = np.random.default_rng(0)
    ways = {"at random": rng.integers(0, N, CHUNK), "in order": np.arange(N // 2, N // 2 + CHUNK)}
    orders: dict[str, Any] = {
        "full": epoch_permutation(N, seed=1, epoch=2),
        "blocks": WindowedEpochOrder(N, BlockShuffle.of(4096 * N, N), seed=1, epoch=2),
    }
    lanes = {
        f"{name}, {way}": partial(_ns_per_index, order, where)
        for name, order in orders.items()
        for way, where in ways.items()
    }
    ends = np.arange(1, N_SHARDS + 1) * (N_IN_SHARDS // N_SHARDS)
    in_shards = ShardEpochOrder(ends, N_IN_SHARDS, SHARDS_PER_WINDOW, seed=1, epoch=2)
    middle = np.arange(N_IN_SHARDS // 2, N_IN_SHARDS // 2 + CHUNK)
    lanes["shards of 10^9, in order"] = partial(_ns_per_index, in_shards, middle)
    weights = rng.random(N_WEIGHTS)
    drawn = WeightedEpochOrder(np.cumsum(weights), seed=1, epoch=2)
    lanes["weights, in order"] = partial(_ns_per_index, drawn, ways["in order"])

    def draw_once() -> Mapping[str, float]:
        start_s = time.perf_counter()
        draw_without_replacement(weights, N_WEIGHTS, seed=1, epoch=2)
        return {"s/epoch": time.perf_counter() - start_s}

    yield lanes | {"weights, drawn once": draw_once}


def _ns_per_index(order: Any, where: Any) -> Mapping[str, float]:
    """Return the fastest of many calls."""
    costs = []
    for _ in range(50):
        start_s = time.perf_counter()
        order.at(where)
        costs.append(time.perf_counter() - start_s)
    return {"ns/index": min(costs) / len(where) * 1e9}


@case(Limit("per_video=8", "CPU ms/clip", "per_video=1", at_most=0.8), rounds=3)
def bundles(bench: Bench, *, videos: str = "", batch: int = 32) -> Lanes:
    """Compare the CPU time per clip by the number of clips of a video that are decoded together."""
    folder = bench.temporary() / "set"
    source = sample_videos(bench.cache, videos)
    shardio.convert(source, folder, kind="videos", store="packets")
    yield {f"per_video={k}": partial(_clip_ms, str(folder), k, batch) for k in (1, 8)}


def _clip_ms(folder: str, per_video: int, batch_size: int) -> Mapping[str, float]:
    """Run an epoch of all clips, shuffled, without workers."""
    view = shardio.open(folder).clips(16, size=(112, 112), per_video=per_video)
    options: dict[str, Any] = {"shuffle": True, "num_workers": 0, "output": "numpy"}
    n_clips, crowded = 0, []
    with ShardLoader(view, batch_size, fields=["frames"], **options) as loader:
        start_s = time.process_time()
        for batch in loader:
            n_clips += batch.n_rows
            _, counts = np.unique(batch.origins, axis=0, return_counts=True)
            crowded.append(counts.max() > per_video)
        taken_s = time.process_time() - start_s
    return {"CPU ms/clip": taken_s / n_clips * 1e3, "share of crowded batches": np.mean(crowded)}


N_VIDEOS, N_CLIPS = 200, 18


@case(Limit("spread", "share of crowded batches", at_most=0.001), rounds=1)
def crowding(bench: Bench, *, per_video: int = 8, epochs: int = 50) -> Lanes:
    """Count batches of 32 with more than 8 clips of one video; 200 videos have 18 clips each."""
    yield {
        "spread": partial(_crowded, per_video, epochs, spread=True),
        "bundles that are only shuffled": partial(_crowded, per_video, epochs, spread=False),
    }


def _crowded(k: int, n_epochs: int, *, spread: bool) -> Mapping[str, float]:
    n = N_VIDEOS * N_CLIPS
    groups = ClipGroups(np.arange(1, N_VIDEOS + 1) * N_CLIPS, k, n)
    found: list[bool] = []
    for number in range(n_epochs):
        if spread:
            clips = ClipGroupEpochOrder(groups, seed=0, epoch=number).at(np.arange(n))
        else:
            whole = epoch_permutation(n // k, seed=0, epoch=number).at(np.arange(n // k))
            clips = (whole[:, None] * k + np.arange(k)).reshape(-1)
        batches = (clips // N_CLIPS)[: len(clips) // 32 * 32].reshape(-1, 32)
        found += [bool(np.bincount(each).max() > k) for each in batches]
    return {"share of crowded batches": float(np.mean(found))}
