"""Measure what it costs to know which sample comes at a position of an epoch.

    python tools/dev/bench_order.py

Positions of 10^12 samples are addressed at random, 8192 at a time as a worker does it, and once
more one behind the other. The fastest of many calls counts. Weighted draws, which look up a table
in memory, are timed for the record. Exits with 1 when an order takes more than 100 ns per index.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from shardio.order.permutation import CHUNK, Permutation, Positions, epoch_permutation
from shardio.order.sampling import WeightedEpochOrder, draw_without_replacement
from shardio.order.shuffle import (
    SHARDS_PER_WINDOW,
    BlockShuffle,
    ShardEpochOrder,
    WindowedEpochOrder,
)

N = 10**12
N_WEIGHTS = 10**7
N_IN_SHARDS, N_SHARDS = 10**9, 10**5
N_CALLS = 200
LIMIT_NS = 100.0
WINDOW = BlockShuffle.of(4096 * N, N)


def _ns_per_index(
    order: Permutation | WindowedEpochOrder | ShardEpochOrder | WeightedEpochOrder,
    positions: Positions,
) -> float:
    order.at(positions)
    costs = []
    for _ in range(N_CALLS):
        start_s = time.perf_counter()
        order.at(positions)
        costs.append(time.perf_counter() - start_s)
    return min(costs) / len(positions) * 1e9


def main() -> int:
    """Print a line per order; 1 if one is too slow."""
    rng = np.random.default_rng(0)
    ways = {"at random": rng.integers(0, N, CHUNK), "in order": np.arange(N // 2, N // 2 + CHUNK)}
    orders: dict[str, Permutation | WindowedEpochOrder | ShardEpochOrder] = {
        "full": epoch_permutation(N, seed=1, epoch=2),
        "blocks": WindowedEpochOrder(N, WINDOW, seed=1, epoch=2),
    }
    too_slow = False
    for name, order in orders.items():
        for way, positions in ways.items():
            found = _ns_per_index(order, positions)
            too_slow |= found > LIMIT_NS
            print(f"{name:8} 10^12 samples, {way:9}: {found:6.1f} ns per index")
    ends = np.arange(1, N_SHARDS + 1) * (N_IN_SHARDS // N_SHARDS)
    in_shards = ShardEpochOrder(ends, N_IN_SHARDS, SHARDS_PER_WINDOW, seed=1, epoch=2)
    found = _ns_per_index(in_shards, np.arange(N_IN_SHARDS // 2, N_IN_SHARDS // 2 + CHUNK))
    too_slow |= found > LIMIT_NS
    print(f"shards   10^9 samples in 10^5 shards, in order: {found:6.1f} ns per index")
    weights = rng.random(N_WEIGHTS)
    drawn = WeightedEpochOrder(np.cumsum(weights), seed=1, epoch=2)
    print(f"weights  10^7 samples, in order : {_ns_per_index(drawn, ways['in order']):6.1f} ns")
    start_s = time.perf_counter()
    draw_without_replacement(weights, N_WEIGHTS, seed=1, epoch=2)
    print(f"weights  10^7 samples, drawn once: {time.perf_counter() - start_s:.2f} s per epoch")
    if too_slow:
        print(f"above the limit of {LIMIT_NS:.0f} ns", file=sys.stderr)
    return int(too_slow)


if __name__ == "__main__":
    sys.exit(main())
