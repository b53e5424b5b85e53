"""Measure how well each kind of shuffle mixes; print a table. Nothing is drawn by chance.

    python -m tests.docs.scale.measure_shuffle

2^18 samples lie in 1,024 shards of 256; runs have 16 samples, so that a window of blocks has 1,024
and one of shards 2,048. They belong to 64 classes: sorted by class, the worst case, where a shard
has one class alone; or in no order. Batches have 256. What a full shuffle should give is known, and
stands beside what the orders of the library give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.order.permutation import Positions, epoch_permutation, permute
from shardio.order.shuffle import (
    RUNS_PER_WINDOW,
    SHARDS_PER_WINDOW,
    BlockShuffle,
    ShardEpochOrder,
    WindowedEpochOrder,
)

N: Final = 1 << 18
N_SHARDS, N_CLASSES, BATCH, RUN = 1024, 64, 256, 16
PER_SHARD: Final = N // N_SHARDS
EPOCHS: Final = 3
ENDS: Final = np.arange(1, N_SHARDS + 1) * PER_SHARD
_MIXED_KEY: Final = 99


class Quality(NamedTuple):
    """Quality of a shuffle order, averaged over epochs.

    `neighbours` is the share of samples that come behind one of the same shard, `distance` how far
    apart in the dataset two are that follow each other, as a share of that of a full shuffle;
    `classes` how many a batch has; `chi_square` how uneven they are there, for each degree of
    freedom: 1 where they are drawn by chance. `entropy` is that of a batch, in bits.
    """

    neighbours: float
    distance: float
    classes: float
    chi_square: float
    entropy: float


def full(epoch: int) -> Positions:
    """Return a permutation of all."""
    return epoch_permutation(N, seed=1, epoch=epoch).at(np.arange(N))


def blocks(epoch: int) -> Positions:
    """One that keeps to windows of runs."""
    window = BlockShuffle(RUN, RUN * RUNS_PER_WINDOW)
    return WindowedEpochOrder(N, window, seed=1, epoch=epoch).at(np.arange(N))


def shards(epoch: int) -> Positions:
    """One that keeps to windows of shards."""
    return ShardEpochOrder(ENDS, N, SHARDS_PER_WINDOW, seed=1, epoch=epoch).at(np.arange(N))


ORDERS: Final[dict[str, Callable[[int], Positions]]] = {
    "full": full,
    "blocks": blocks,
    "shards": shards,
}


def classes_of(rows: Positions, *, is_sorted: bool) -> Positions:
    """Return the class of each row, of a dataset that is sorted by class, or in no order."""
    where = rows if is_sorted else permute(rows, N, _MIXED_KEY)
    return where * N_CLASSES // N


def quality(rows: Positions, *, is_sorted: bool) -> Quality:
    """Return the quality of one epoch."""
    of_shard = rows // PER_SHARD
    counts = counts_of(classes_of(rows, is_sorted=is_sorted).reshape(-1, BATCH))
    expected = BATCH / N_CLASSES
    shares = counts / BATCH
    bits = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=1)
    return Quality(
        neighbours=float(np.mean(of_shard[1:] == of_shard[:-1])),
        distance=float(np.abs(np.diff(rows)).mean() / (N / 3)),
        classes=float((counts > 0).sum(axis=1).mean()),
        chi_square=float(
            ((counts - expected) ** 2).sum(axis=1).mean() / expected / (N_CLASSES - 1)
        ),
        entropy=float(bits.mean()),
    )


def counts_of(batches: Positions) -> npt.NDArray[np.int64]:
    """Return the samples per class in each batch: (batches, N_CLASSES)."""
    flat = batches + np.arange(len(batches))[:, None] * N_CLASSES
    counts = np.bincount(flat.reshape(-1), minlength=len(batches) * N_CLASSES)
    return counts.reshape(-1, N_CLASSES).astype(np.int64)


def measured(name: str, *, is_sorted: bool) -> Quality:
    """Return the quality of a kind of shuffle, averaged over EPOCHS."""
    found = [quality(ORDERS[name](epoch), is_sorted=is_sorted) for epoch in range(EPOCHS)]
    return Quality(*np.mean(found, axis=0).tolist())


def table() -> list[list[str]]:
    """Return a header, and a row for each kind of shuffle and of dataset."""
    rows = [["shuffle", "dataset", "behind one of its shard", "distance", "classes", "χ²", "bits"]]
    for is_sorted in (True, False):
        for name in ORDERS:
            found = measured(name, is_sorted=is_sorted)
            rows.append(
                [
                    f'`"{name}"`',
                    "sorted by class" if is_sorted else "in no order",
                    f"{found.neighbours:.2%}",
                    f"{found.distance:.2f}",
                    f"{found.classes:.1f}",
                    f"{found.chi_square:.2f}",
                    f"{found.entropy:.2f}",
                ]
            )
    return rows


def main() -> None:
    """Print the table."""
    for row in table():
        print("  ".join(f"{cell:<24}" for cell in row))
    even = N_CLASSES * (1 - (1 - 1 / N_CLASSES) ** BATCH)
    print(f"by chance: 1/{N_SHARDS} = {1 / N_SHARDS:.2%} of its shard, {even:.1f} classes, χ² 1")


if __name__ == "__main__":
    main()
