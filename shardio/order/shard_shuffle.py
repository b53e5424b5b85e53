"""Order for data that comes shard by shard: shards are permuted, samples among a few shards.

The shards that a view shows something of are permuted. Of that sequence a window of 8 at a time is
permuted again, sample by sample: a pass needs each shard once, and only those of a window at a
time. Shards are what they are in the dataset, however many samples each has.

As in `permutation`, everything is computed, at any position at once; what is kept is of the size of
the list of shards.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Self

import numpy as np

from shardio.errors import InvalidArgument
from shardio.format.checksum import distinct, hash_bytes
from shardio.order.permutation import Permutation, Positions, derive_key

SHARDS_PER_WINDOW: Final = 8
_MOST_KEPT: Final = 8
"""Permutations of windows: of at most 512 KiB each."""


class ShardWindow(NamedTuple):
    """What an epoch in shards is shuffled by.

    `n_shards` make a window, which has `whole` positions in the mean; `layout` is a hash of where
    the shards end.
    """

    n_shards: int
    whole: int
    layout: str

    @classmethod
    def of(cls, ends: Positions, n: int, n_shards: int | None = None) -> Self:
        """That of an epoch of n positions, by how many of a view lie up to each shard's end."""
        ends, per_window = ends_within(ends, n), n_shards or SHARDS_PER_WINDOW
        whole = max(1, n * per_window // max(1, len(ends)))
        return cls(per_window, whole, f"{hash_bytes(ends.astype('<i8').data):016x}")

    @classmethod
    def from_state(cls, found: Any, ends: Positions, n: int, where: str) -> Self:
        """What a state says of an epoch of n positions, as JSON gives it back.

        Raises:
            InvalidArgument: it is no such window, or that of other shards than these.
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
    """Where shards end of the first n positions of a view; without those that show nothing."""
    clipped = np.minimum(ends, n)
    return clipped[np.diff(clipped, prepend=0) > 0]


class ShardOrder:
    """The samples of one epoch, by position: a permutation that keeps to windows of shards.

    Args:
        ends: how many of the view's samples lie up to each shard's end.
        n: how many positions the epoch has: the view's first samples, as when it began.
        n_shards: how many make a window.
        seed, epoch: the key.
    """

    def __init__(self, ends: Positions, n: int, n_shards: int, *, seed: int, epoch: int) -> None:
        ends = ends_within(ends, n)
        sizes = np.diff(ends, prepend=0)
        shards = Permutation(len(ends), derive_key(64, seed, epoch)).at(np.arange(len(ends)))
        self._stops: Positions = np.cumsum(sizes[shards])
        """Where each shard ends in the epoch, before its window is permuted."""
        self._shifts: Positions = ends[shards] - self._stops
        """From such a place to the sample of the view."""
        last = np.arange(n_shards - 1, len(ends) + n_shards - 1, n_shards)
        self._windows: Positions = self._stops[np.minimum(last, len(ends) - 1)]
        self._key, self._n_shards = (seed, epoch), n_shards
        self._kept: dict[int, Permutation] = {}

    def at(self, positions: Positions) -> Positions:
        """The sample at each of `positions`, in any order; int64, not to be written to."""
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
