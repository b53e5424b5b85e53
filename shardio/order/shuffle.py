"""Block shuffle and shard shuffle: orders for datasets larger than memory, or larger than a cache.

Block shuffle cuts the rows into *runs* of a few MiB and permutes the runs. Each 64 consecutive runs
of this sequence form a *window*, and the rows within a window are permuted. Therefore, storage
reads complete runs, the page cache needs to hold only one window, and neighbouring samples come
from 64 parts of the dataset. A window of 2^k positions is permuted by a Feistel network over the k
bits of a position (constants: MurmurHash3, A. Appleby, and the golden ratio).

Shard shuffle permutes the shards. Each 8 consecutive shards form a window, and the samples within a
window are permuted, so that an epoch reads each shard in only one window. The memory needed is
proportional to the number of shards.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from shardio._base.callers import warn
from shardio.errors import InvalidArgument
from shardio.format.checksum import distinct, hash_bytes
from shardio.order import CACHE_HINT, EpochOrder, FullShuffle, Order, Samples
from shardio.order.permutation import Permutation, Positions, derive_key, keyed_hashes

RUN_BYTES: Final = 4 << 20
RUNS_PER_WINDOW: Final = 64
_ROUNDS: Final = 8, 6
"""The number of Feistel rounds in windows of fewer than `_SMALL` positions, and in larger windows.
With one round fewer, rows that are half a window apart were correlated (in windows of 64 and of
1024)."""
_AT_ONCE: Final = 4096
"""The number of positions computed at a time. With twice as many, each call needs 600 new pages of
memory, which take a fifth of its time."""
_SMALL: Final = 1 << 12
_MAX_RUN: Final = 1 << 32
_MIX: Final = 0xC2B2AE35
_FACTORS: Final = tuple(0x85EBCA6B * 0x9E3779B1**i % (1 << 32) for i in range(max(_ROUNDS)))


@dataclass(frozen=True)
class BlockShuffle(Order):
    """Block shuffle: the runs are permuted, then the rows within each window of runs.

    A run has `run` rows, and a window `window_rows` rows; both are powers of two. Here a row is a
    group of `k` consecutive samples; `k` is 1 unless the clips of a video stay together.
    """

    name = "blocks"
    mixes = True
    keeps_clips = True
    run: int
    window_rows: int
    k: int = 1

    @classmethod
    def begin(cls, samples: Samples) -> Self:
        """Return the order with the longest runs that have at most RUN_BYTES on average."""
        (n_bytes, n), grouping = samples.measure(), samples.clip_grouping
        return cls.of(n_bytes, n) if grouping is None else cls.of(n_bytes, n, grouping.k)

    @classmethod
    def of(cls, n_bytes: int, n_samples: int, k: int = 1) -> Self:
        """Return the order of `n_samples` samples of `n_bytes` in total, in groups of k samples."""
        run, n = 1, n_samples if k == 1 else max(1, n_samples // k)
        while 2 * run * n_bytes <= RUN_BYTES * n and run < _MAX_RUN:
            run *= 2
        return cls(run, run * RUNS_PER_WINDOW, k)

    def to_state(self) -> dict[str, Any]:
        """Return the lengths of runs and windows."""
        return {"window": [self.run, self.window_rows]}

    def from_state(self, state: Mapping[str, Any], samples: Samples, n: int) -> Self:
        """Return the order with the lengths of runs and windows from a state."""
        found: Any = state.get("window")
        is_pair = isinstance(found, list | tuple) and len(found) == 2
        if is_pair and all(type(each) is int and each > 0 for each in found):
            run, n_rows = found
            if not (run & run - 1 or n_rows & n_rows - 1) and run <= n_rows < 1 << 48:
                return replace(self, run=run, window_rows=n_rows)
        raise InvalidArgument(
            "load_state_dict: the state's window must be two powers of two, the first not above "
            f"the second; found {found!r}"
        )

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> EpochOrder:
        """Return the permutation of an epoch."""
        if self.k == 1:
            return WindowedEpochOrder(n, self, seed=seed, epoch=epoch)
        return GroupedEpochOrder(n, self, seed=seed, epoch=epoch)

    def arrange_round(self, samples: Samples, n: int, key: int, source: int) -> EpochOrder:
        """Return the permutation of a round; a full permutation if n samples fit a window."""
        if n <= self.window:
            return FullShuffle().arrange_round(samples, n, key, source)
        return self.arrange(samples, n, seed=key, epoch=0)

    @property
    def window(self) -> int:
        """The number of samples in a window."""
        return self.window_rows * self.k

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, prefix: str) -> int:
        """Warn that each window needs parts of many shards, but whole shards are downloaded."""
        warn(
            f"{prefix}: with shuffle='blocks' a window of 256 MiB needs parts of many shards, "
            f"which are downloaded whole: {CACHE_HINT}"
        )
        return 0


class WindowedEpochOrder:
    """The order of one epoch of a block shuffle of n rows.

    A *place* is a row's index after the runs, and before the rows within windows, are permuted.
    """

    def __init__(self, n: int, window: BlockShuffle, *, seed: int, epoch: int) -> None:
        self._window = window
        n_runs, n_rest = divmod(n, window.run)
        self._runs = Permutation(n_runs, derive_key(16, seed, epoch))
        # The last n % run rows form a shorter run, which gets a random position among the runs.
        self._short_starts = derive_key(17, seed, epoch) % (n_runs + 1) * window.run
        self._n_short = n_rest
        self._short_shift = n_runs * window.run - self._short_starts
        self._windows_key = derive_key(18, seed, epoch)
        self._last = n - n % window.window_rows
        """The start of the last window if it is shorter than the others, otherwise n."""
        self._last_permutation = Permutation(n - self._last, derive_key(19, seed, epoch))

    def at(self, positions: Positions) -> Positions:
        """Return the row at each of `positions`, as `EpochOrder.at` does."""
        if len(positions) <= _AT_ONCE:
            return self._rows_at(positions)
        rows = np.empty(len(positions), np.int64)
        for start in range(0, len(rows), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            rows[part] = self._rows_at(positions[part])
        return rows

    def _rows_at(self, positions: Positions) -> Positions:
        n_rows = self._window.window_rows
        if not self._last:
            places = self._last_permutation.at(positions)
        else:
            starts = positions & -n_rows
            places = permute_windows(positions - starts, starts, n_rows, self._windows_key)
            places += starts
            is_last = np.flatnonzero(positions >= self._last)
            if len(is_last):
                offsets = positions[is_last] - self._last
                places[is_last] = self._last + self._last_permutation.at(offsets)
        return self._row_of(places)

    def _row_of(self, places: Positions) -> Positions:
        n_short = self._n_short
        if not n_short:
            return self._in_runs(places)
        from_start = places - self._short_starts
        is_short = np.flatnonzero(from_start.view(np.uint64) < np.uint64(n_short))
        behind = (from_start >= n_short).astype(np.int64)
        rows = self._in_runs(places - n_short * behind)
        if len(is_short):
            rows[is_short] = places[is_short] + self._short_shift
        return rows

    def _in_runs(self, places: Positions) -> Positions:
        """Return the row at each place; for places in the short last run, any row."""
        if not self._runs.n:
            return np.zeros_like(places)
        run = self._window.run
        numbers = np.minimum(places >> (run.bit_length() - 1), self._runs.n - 1)
        rows = self._runs.at(numbers) << (run.bit_length() - 1)
        rows += places & (run - 1)
        return rows


class GroupedEpochOrder:
    """The order of one epoch of a block shuffle in which groups of k samples stay together.

    The n % k samples that are left over come last.
    """

    def __init__(self, n: int, window: BlockShuffle, *, seed: int, epoch: int) -> None:
        self._k, self._n_groups = window.k, n // window.k
        self._groups = WindowedEpochOrder(self._n_groups, window, seed=seed, epoch=epoch)

    def at(self, positions: Positions) -> Positions:
        """Return the sample at each of `positions`, as `EpochOrder.at` does."""
        groups, places = np.divmod(positions, self._k)
        is_whole = groups < self._n_groups
        rows = positions.copy()
        rows[is_whole] = self._groups.at(groups[is_whole]) * self._k + places[is_whole]
        return rows


def permute_windows(offsets: Positions, starts: Positions, size: int, key: int) -> Positions:
    """Permute positions within windows of `size` positions, a power of two.

    `starts` has the start of each position's window, and `offsets` the position relative to it. The
    halves of the Feistel network are the upper and the lower bits of `offsets`.
    """
    n_low = (size.bit_length() - 1) // 2
    n_bits = size.bit_length() - 1 - n_low, n_low
    hashes = keyed_hashes(starts, key)
    keys = (hashes >> np.uint64(32)).astype(np.uint32), hashes.astype(np.uint32)
    halves = (offsets >> n_low).astype(np.uint32), (offsets & ((1 << n_low) - 1)).astype(np.uint32)
    step, low = np.empty_like(halves[0]), np.empty_like(halves[0])
    for i in range(_ROUNDS[size >= _SMALL]):
        target, source, added = halves[i % 2], halves[1 - i % 2], keys[i % 2]
        np.add(source, added, out=step)
        np.multiply(step, np.uint32(_FACTORS[i]), out=step)
        np.right_shift(step, np.uint32(15), out=low)
        np.bitwise_xor(step, low, out=step)
        np.multiply(step, np.uint32(_MIX), out=step)
        np.right_shift(step, np.uint32(32 - n_bits[i % 2]), out=step)
        np.bitwise_xor(target, step, out=target)
    return (halves[0].astype(np.int64) << n_low) + halves[1]


SHARDS_PER_WINDOW: Final = 8
_MAX_CACHED: Final = 8
"""The maximum number of windows whose permutations are cached. A permutation has up to 512 KiB."""


@dataclass(frozen=True)
class ShardShuffle(Order):
    """Shard shuffle: the shards are permuted, then the samples within each window of shards.

    A window has `n_shards` shards, and `n_in_window` samples on average. `layout` is a hash of the
    shards' cumulative sample counts: a state is only valid while these are the same.
    """

    name = "shards"
    needs_shards = True
    n_shards: int
    n_in_window: int
    layout: str

    @classmethod
    def begin(cls, samples: Samples) -> Self:
        """Return the order for the current shards."""
        return cls.of(samples.shard_ends(), samples.n, SHARDS_PER_WINDOW)

    @classmethod
    def of(cls, ends: Positions, n: int, n_shards: int) -> Self:
        """Return the order with windows of `n_shards`; `ends` are the shards' cumulative counts."""
        ends = clip_shard_ends(ends, n)
        n_in_window = max(1, n * n_shards // max(1, len(ends)))
        return cls(n_shards, n_in_window, f"{hash_bytes(ends.astype('<i8').data):016x}")

    def to_state(self) -> dict[str, Any]:
        """Return the parameters, which depend on the shards."""
        return {"window": [self.n_shards, self.n_in_window, self.layout]}

    def from_state(self, state: Mapping[str, Any], samples: Samples, n: int) -> Self:
        """Return the order with the windows from a state, if the shards have not changed."""
        found: Any = state.get("window")
        is_count = isinstance(found, list | tuple) and len(found) == 3 and type(found[0]) is int
        if not is_count or found[0] < 1:
            raise InvalidArgument(
                "load_state_dict: the state's window must be a list: the number of shards in a "
                "window (at least 1), the mean number of positions in a window, and a hash of the "
                f"shards; found {found!r}"
            )
        order = self.of(samples.shard_ends(), n, found[0])
        expected = order.to_state()["window"]
        if list(found) != expected:
            raise InvalidArgument(
                f"load_state_dict: the state's epoch is a shuffle of shards that {samples.path} no "
                f"longer has: expected window {expected}, found {list(found)}; the samples are "
                "in other shards now (shardio compact): open the generation that the state comes "
                "from with shardio.open(PATH, generation=…), or begin the next epoch"
            )
        return order

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> EpochOrder:
        """Return the permutation of an epoch."""
        return ShardEpochOrder(samples.shard_ends(), n, self.n_shards, seed=seed, epoch=epoch)

    @property
    def window(self) -> int:
        """The mean number of samples per window."""
        return self.n_in_window

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, prefix: str) -> int:
        """Return the size in bytes of the largest possible window; warn if the cache is smaller."""
        n_bytes = int(np.sort(shard_bytes)[-self.n_shards :].sum())
        if n_bytes > cache_bytes:
            warn(
                f"{prefix}: with shuffle='shards' a window of {self.n_shards} shards is read "
                f"at a time, up to {n_bytes} bytes, which are downloaded again and "
                "again: raise cache_bytes to twice that, or make smaller shards"
            )
        return n_bytes


def clip_shard_ends(ends: Positions, n: int) -> Positions:
    """Return the cumulative counts of shards that have some of the first n samples."""
    clipped = np.minimum(ends, n)
    return clipped[np.diff(clipped, prepend=0) > 0]


class ShardEpochOrder:
    """The order of one epoch of a shard shuffle of the first n samples of a view.

    `ends` are the shards' cumulative counts. A *place* is a sample's index after the shards, and
    before the samples within windows, are permuted.
    """

    def __init__(self, ends: Positions, n: int, n_shards: int, *, seed: int, epoch: int) -> None:
        ends = clip_shard_ends(ends, n)
        sizes = np.diff(ends, prepend=0)
        shards = Permutation(len(ends), derive_key(64, seed, epoch)).at(np.arange(len(ends)))
        self._stops: Positions = np.cumsum(sizes[shards])
        """The place after the last sample of each permuted shard."""
        self._shifts: Positions = ends[shards] - self._stops
        """For each permuted shard, the difference between a sample's index and its place."""
        last = np.arange(n_shards - 1, len(ends) + n_shards - 1, n_shards)
        self._windows: Positions = self._stops[np.minimum(last, len(ends) - 1)]
        self._n_shards = n_shards
        starts = np.concatenate([[0], self._windows])

        @functools.lru_cache(_MAX_CACHED)
        def permutation(window: int) -> tuple[int, Permutation]:
            start, end = starts[window : window + 2].tolist()
            return start, Permutation(end - start, derive_key(65, seed, epoch, window))

        self._permutation = permutation

    def at(self, positions: Positions) -> Positions:
        """Return the sample at each of `positions`, as `EpochOrder.at` does."""
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
        start, permutation = self._permutation(window)
        places = permutation.at(positions - start) + start
        part = slice(window * self._n_shards, (window + 1) * self._n_shards)
        shards = np.searchsorted(self._stops[part], places, "right")
        places += self._shifts[part][shards]
        return places
