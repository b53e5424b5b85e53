"""Models of training at scale: requests, caches, failures and stragglers. Deterministic.

The cluster is that of docs/explanation/scale.md: 10^9 samples of 100 KB in 10^5 shards of 1 GB, on
1,000 ranks of 125 nodes; each rank takes 500 samples a second, in batches of 32.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.order.permutation import Positions, derive_key, epoch_permutation, keyed_hashes
from shardio.order.shuffle import (
    RUNS_PER_WINDOW,
    SHARDS_PER_WINDOW,
    BlockShuffle,
    ShardEpochOrder,
    WindowedEpochOrder,
)
from tests.docs.scale.measure_shuffle import BATCH, ENDS, N_CLASSES, N, classes_of, counts_of

Numbers = npt.NDArray[np.float64]

N_SAMPLES, N_DATA_SHARDS, N_RANKS, N_NODES = 10**9, 10**5, 1_000, 125
SAMPLE_BYTES: Final = 100_000
SHARD_BYTES: Final = SAMPLE_BYTES * (N_SAMPLES // N_DATA_SHARDS)
RATE: Final = 500.0
"""Samples that a rank takes in a second."""
EPOCH_S: Final = N_SAMPLES / (RATE * N_RANKS)
CACHE_BYTES: Final = 10**12
"""Of each node."""


def uniform(n: int, *key: int) -> Numbers:
    """Return `n` numbers in (0, 1], the same on every machine."""
    return (keyed_hashes(np.arange(n), derive_key(*key)).astype(np.float64) + 1) / 2.0**64


# Shuffling.


def balance_by_window() -> list[tuple[float, float]]:
    """Return the class imbalance of a batch by shards per window, for data sorted by class."""
    found = []
    for n_shards in (1, 2, 4, 8, 16, 32, 64, 128):
        rows = ShardEpochOrder(ENDS, N, n_shards, seed=1, epoch=0).at(np.arange(N))
        counts = counts_of(classes_of(rows, is_sorted=True).reshape(-1, BATCH))
        expected = BATCH / N_CLASSES
        uneven = ((counts - expected) ** 2).sum(axis=1).mean() / expected / (N_CLASSES - 1)
        found.append((float(n_shards), float(uneven)))
    return found


# Requests.


def requests_table() -> list[list[str]]:
    """Return the load on storage for each way of reading, while 1,000 ranks train."""
    missed = 1 - CACHE_BYTES / (N_SAMPLES * SAMPLE_BYTES)
    whole_s = N_DATA_SHARDS / EPOCH_S
    ways = [
        ("`True`: a range for each sample", N_SAMPLES / EPOCH_S, SAMPLE_BYTES),
        ("`True`: whole shards, cached", missed * N_SAMPLES / EPOCH_S, SHARD_BYTES),
        ('`"shards"`, one order for all ranks: whole shards', whole_s * N_NODES, SHARD_BYTES),
        ('`"shards"`, each node its own shards: whole shards', whole_s, SHARD_BYTES),
    ]
    rows = [["order, and what is read", "requests a second", "GB a second", "TB an epoch"]]
    for name, per_s, n_bytes in ways:
        total = per_s * n_bytes * EPOCH_S / 1e12
        rows.append([name, f"{per_s:,.0f}", f"{per_s * n_bytes / 1e9:,.0f}", f"{total:,.0f}"])
    return rows


# The cache of a node: shards of 64 samples, runs of 4, so that a shard has 16 runs.

N_CACHED_SHARDS, PER_CACHED_SHARD, CACHED_RUN = 1024, 64, 4
CAPACITIES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@cache
def downloads() -> dict[str, list[tuple[float, float]]]:
    """By order, for each size of the cache in shards: data sets downloaded in a later epoch."""
    orders = {name: [_shards_read(name, epoch) for epoch in (0, 1)] for name in _KINDS}
    return {
        name: [
            (float(room), max(0.01, _n_missed(epochs, room) / N_CACHED_SHARDS))
            for room in CAPACITIES
        ]
        for name, epochs in orders.items()
    }


_KINDS: Final = ("full", "blocks", "shards")


def _shards_read(name: str, epoch: int) -> list[int]:
    """Return the shards of consecutive samples of an epoch, without repetitions."""
    n = N_CACHED_SHARDS * PER_CACHED_SHARD
    at = np.arange(n)
    rows: Positions
    if name == "full":
        rows = epoch_permutation(n, seed=1, epoch=epoch).at(at)
    elif name == "blocks":
        window = BlockShuffle(CACHED_RUN, CACHED_RUN * RUNS_PER_WINDOW)
        rows = WindowedEpochOrder(n, window, seed=1, epoch=epoch).at(at)
    else:
        ends = np.arange(1, N_CACHED_SHARDS + 1) * PER_CACHED_SHARD
        rows = ShardEpochOrder(ends, n, SHARDS_PER_WINDOW, seed=1, epoch=epoch).at(at)
    shards = rows // PER_CACHED_SHARD
    return shards[np.diff(shards, prepend=-1) != 0].tolist()  # type: ignore[no-any-return]


def _n_missed(epochs: list[list[int]], room: int) -> int:
    """Return the shards downloaded in the last epoch with a least-recently-used cache."""
    held: OrderedDict[int, None] = OrderedDict()
    n_missed = 0
    for shards in epochs:
        n_missed = 0
        for shard in shards:
            if shard in held:
                held.move_to_end(shard)
                continue
            n_missed += 1
            held[shard] = None
            if len(held) > room:
                held.popitem(last=False)
    return n_missed


def cache_table() -> list[list[str]]:
    """Return data sets downloaded in an epoch, for some sizes of the cache."""
    found = {name: dict(points) for name, points in downloads().items()}
    shown = (4, 8, 16, 64, 256, 512, 1024)
    rows = [["shards that the cache holds, of 1,024", *(f'`"{name}"`' for name in found)]]
    for room in shown:
        cells = [found[name][room] for name in found]
        rows.append([f"{room:,}", *(f"{x:.2f}" if x > 0.01 else "0" for x in cells)])
    return rows


# Failures.

MTBF_DAYS: Final = (30, 100, 365)
INTERVALS: Final = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300)
STATE_S, RESTART_S = 30.0, 600.0
"""Seconds to save a state of the model, and to restart on another node."""
_N_FAILURES: Final = 4000


def lost_share(minutes: float, mtbf_days: float) -> float:
    """Return the share of time that is lost with a state kept every so many minutes, simulated.

    A run is that of 4,000 failures, whose distances are drawn; what was done since the last state
    is done again.
    """
    mean_s = mtbf_days * 86400 / N_NODES
    gaps = -np.log(uniform(_N_FAILURES, 201, int(mtbf_days))) * mean_s
    span = minutes * 60 + STATE_S
    useful = np.floor(np.maximum(0, gaps - RESTART_S) / span) * (minutes * 60)
    return float(1 - useful.sum() / gaps.sum())


def best_minutes(mtbf_days: float) -> float:
    """Return the best checkpoint interval in minutes: Young's rule."""
    return math.sqrt(2 * STATE_S * mtbf_days * 86400 / N_NODES) / 60


def failures_table() -> list[list[str]]:
    """Return the cost of failures by failure rate of a node."""
    rows = [
        [
            "a node fails every",
            "failures a day",
            "best minutes between states",
            "lost",
            "lost with 60",
        ]
    ]
    for days in MTBF_DAYS:
        best = best_minutes(days)
        lost, seldom = lost_share(best, days), lost_share(60, days)
        cells = [f"{N_NODES / days:.1f}", f"{best:.0f}", f"{lost:.1%}", f"{seldom:.1%}"]
        rows.append([f"{days} days", *cells])
    return rows


# Stragglers.

RANKS: Final = (1, 10, 100, 1000)
DEPTHS: Final = (1, 2, 4, 8, 16, 32, 64)
_N_STEPS: Final = 400
_SLOW_SHARE, _SLOW_FACTOR, _MEDIAN, _SIGMA = 0.005, 20.0, 0.5, 0.3


@cache
def _filling_times(n_ranks: int) -> Numbers:
    """Return the time of each rank for each batch, in steps: (steps, ranks)."""
    n = n_ranks * _N_STEPS
    normal = np.sqrt(-2 * np.log(uniform(n, 301, n_ranks)))
    normal *= np.cos(2 * math.pi * uniform(n, 302, n_ranks))
    times: Numbers = _MEDIAN * np.exp(_SIGMA * normal)
    times[uniform(n, 303, n_ranks) < _SLOW_SHARE] *= _SLOW_FACTOR
    return times.reshape(_N_STEPS, n_ranks)


@cache
def utilisation(n_ranks: int, depth: int) -> float:
    """Return the share of time that ranks compute instead of waiting for the slowest batch.

    Every rank fills its batches one after another, up to `depth` of them ahead; a step takes 1, and
    begins when all ranks have its batch.
    """
    times = _filling_times(n_ranks)
    ready, ends = np.zeros(n_ranks), np.zeros(_N_STEPS)
    for step in range(_N_STEPS):
        has_room = ends[step - depth] if step >= depth else 0.0
        ready = np.maximum(ready, has_room) + times[step]
        begins = max(float(ready.max()), float(ends[step - 1]) if step else 0.0)
        ends[step] = begins + 1
    return float(_N_STEPS / ends[-1])


def stragglers_table() -> list[list[str]]:
    """Utilisation by ranks and batches ahead."""
    rows = [["batches filled ahead", *(f"{n:,} rank{'s' if n > 1 else ''}" for n in RANKS)]]
    for depth in DEPTHS:
        rows.append([str(depth), *(f"{utilisation(n, depth):.0%}" for n in RANKS)])
    return rows
