"""Shard shuffle: shards are permuted, and samples among a few shards at a time.

The shards that contain samples of the view are permuted. The samples of each window of 8 shards in
that sequence are then permuted again: an epoch needs each shard once, and only one window of shards
at a time. Shards are those of the dataset, whatever their sizes.

As in `permutation`, the sample at any position is computed directly; the memory used is
proportional to the number of shards.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Self

import numpy as np

from shardio.errors import InvalidArgument
from shardio.format.checksum import distinct, hash_bytes
from shardio.order.permutation import Permutation, Positions, derive_key

SHARDS_PER_WINDOW: Final = 8
_MOST_KEPT: Final = 8
"""Cached permutations of windows, of at most 512 KiB each."""


class ShardWindow(NamedTuple):
    """The parameters of a shard shuffle.

    `n_shards` form a window, which has `whole` positions on average; `layout` is a hash of the ends
    of the shards.
    """

    n_shards: int
    whole: int
    layout: str

    @classmethod
    def of(cls, ends: Positions, n: int, n_shards: int | None = None) -> Self:
        """Return the window for an epoch of n positions, given the ends of the view's shards."""
        ends, per_window = ends_within(ends, n), n_shards or SHARDS_PER_WINDOW
        whole = max(1, n * per_window // max(1, len(ends)))
        return cls(per_window, whole, f"{hash_bytes(ends.astype('<i8').data):016x}")

    @classmethod
    def from_state(cls, found: Any, ends: Positions, n: int, where: str) -> Self:
        """Parse the window of an epoch of n positions from a state, as decoded from JSON.

        Raises:
            InvalidArgument: the value is not a window, or belongs to other shards.
        """
        is_count = isinstance(found, list | tuple) and len(found) == 3 and type(found[0]) is int
        if not is_count or found[0] < 1:
            raise InvalidArgument(
                "load_state_dict: the state's window must be how many shards it has, from 1 up, "
                f"how many positions, and a hash of the shards; found {found!r}"
            )
        expected = cls.of(ends, n, found[0])
        if list(found) != list(expected):
            raise InvalidArgument(
                f"load_state_dict: the state's epoch is shuffled by shards that {where} has no "
                f"longer: expected window {list(expected)}, found {list(found)}; the samples lie "
                "in other shards since (shardio compact): open the generation that the state comes "
                "from with shardio.open(PATH, generation=…), or begin the next epoch"
            )
        return expected


def ends_within(ends: Positions, n: int) -> Positions:
    """Return the ends of shards within the first n positions of a view.

    Empty shards are left out.
    """
    clipped = np.minimum(ends, n)
    return clipped[np.diff(clipped, prepend=0) > 0]


class ShardOrder:
    """The samples of one epoch, by position: a permutation within windows of shards.

    Args:
        ends: cumulative numbers of the view's samples per shard.
        n: number of positions of the epoch: the view's first samples, as at its start.
        n_shards: shards per window.
        seed, epoch: the key.
    """

    def __init__(self, ends: Positions, n: int, n_shards: int, *, seed: int, epoch: int) -> None:
        ends = ends_within(ends, n)
        sizes = np.diff(ends, prepend=0)
        shards = Permutation(len(ends), derive_key(64, seed, epoch)).at(np.arange(len(ends)))
        self._stops: Positions = np.cumsum(sizes[shards])
        """The end of each shard in the epoch, before its window is permuted."""
        self._shifts: Positions = ends[shards] - self._stops
        """The offset from such a place to the sample of the view."""
        last = np.arange(n_shards - 1, len(ends) + n_shards - 1, n_shards)
        self._windows: Positions = self._stops[np.minimum(last, len(ends) - 1)]
        self._key, self._n_shards = (seed, epoch), n_shards
        self._kept: dict[int, Permutation] = {}

    def at(self, positions: Positions) -> Positions:
        """Return the sample at each of `positions`, in any order.

        Int64, read-only for the caller.
        """
        if not len(positions):
            return positions
        windows = np.searchsorted(self._windows, positions, "right")
        if windows.min() == windows.max():
            return self._in_window(int(windows[0]), positions)
        found = np.empty(len(positions), np.int64)
        for window in distinct(windows).tolist():
            here = np.flatnonzero(windows == window)
            found[here] = self._in_window(window, positions[here])
        return found

    def _in_window(self, window: int, positions: Positions) -> Positions:
        start = int(self._windows[window - 1]) if window else 0
        places = self._permutation(window, start).at(positions - start) + start
        part = slice(window * self._n_shards, (window + 1) * self._n_shards)
        shards = np.searchsorted(self._stops[part], places, "right")
        places += self._shifts[part][shards]
        return places

    def _permutation(self, window: int, start: int) -> Permutation:
        found = self._kept.get(window)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            key = derive_key(65, *self._key, window)
            found = self._kept[window] = Permutation(int(self._windows[window]) - start, key)
        return found
