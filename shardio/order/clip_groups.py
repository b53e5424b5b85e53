"""Order clips so that neighbouring clips of one video are decoded together.

A *group* has up to k consecutive clips of one video, which stay together, in order. A video of n
clips has n // k groups of k clips. The clips that are left over form a smaller group, at a random
place among the other groups of the video.

An epoch permutes the groups of each size among themselves (see `permutation`). An epoch of 2,048
groups or more is divided into *windows* of about 1,024 to 2,048 groups. The proportions of the
sizes are the same in all windows, so that the start of a window can be calculated. Within a window,
the groups of one video are spread far apart. Looking up a position takes about 250 µs, because only
its window is computed.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.order.permutation import Permutation, Positions, derive_key, keyed_hashes

WINDOW: Final = 1024
"""Windows have at least this number of groups on average; fewer groups form one window. In larger
windows, the groups of a video are further apart, but looking up a single clip takes longer."""
_JITTER: Final = 0.5
"""The maximum random offset of a group within a window, as a fraction of the mean distance between
groups of the same video. Without the offset, videos would follow each other in the same sequence
again and again."""
_HALF: Final = 1 << 32


class ClipGroups:
    """The groups of up to k clips of the first n clips of several videos.

    `ends` has the cumulative clip counts of the videos.
    """

    def __init__(self, ends: Positions, k: int, n: int) -> None:
        self._k = k
        self._ends: Positions = np.minimum(ends, n)
        n_whole, n_left = np.divmod(np.diff(self._ends, prepend=0), k)
        self._ends_of_whole: Positions = np.cumsum(n_whole)
        # The videos that have a smaller group, sorted by the number of clips in this group.
        with_one = np.flatnonzero(n_left)
        self._by_size: Positions = with_one[np.argsort(n_left[with_one], kind="stable")]
        sizes, firsts, n_groups = np.unique(
            n_left[self._by_size], return_index=True, return_counts=True
        )
        self.sizes: Positions = np.concatenate([[k], sizes])
        """The sizes of groups, in clips: k, then those of smaller groups."""
        self.counts: Positions = np.concatenate([[n_whole.sum()], n_groups])
        """The number of groups of each size."""
        self._firsts: Positions = np.concatenate([[0], firsts])

    def find(self, size_index: int, numbers: Positions, key: int) -> tuple[Positions, Positions]:
        """Return the video and the first clip of groups that have the size `sizes[size_index]`.

        `numbers` are the indices of these groups among all groups of this size. `key` determines
        the place of the smaller group within each video.
        """
        k = self._k
        if size_index:
            videos = self._by_size[self._firsts[size_index] + numbers]
            begins, counts = self._clips_of(videos)
            return videos, begins + _random_up_to(counts // k, videos, key) * k
        videos = np.searchsorted(self._ends_of_whole, numbers, "right")
        begins, counts = self._clips_of(videos)
        n_whole = counts // k
        inside = numbers - self._ends_of_whole[videos] + n_whole
        is_behind = inside >= _random_up_to(n_whole, videos, key)
        return videos, begins + inside * k + is_behind * (counts - n_whole * k)

    def _clips_of(self, videos: Positions) -> tuple[Positions, Positions]:
        begins = np.where(videos > 0, self._ends[videos - 1], 0)
        return begins, self._ends[videos] - begins


def _random_up_to(most: Positions, videos: Positions, key: int) -> Positions:
    """Return a random integer from 0 to `most` for each video."""
    drawn = keyed_hashes(videos, key) >> np.uint64(32)
    found = drawn * (most + 1).astype(np.uint64) >> np.uint64(32)
    return found.astype(np.int64)


class ClipGrouping(NamedTuple):
    """The groups of up to k clips of a dataset, or of each source of a mixture.

    `ends` has an array for each source: the cumulative clip counts of its videos.
    """

    k: int
    ends: Sequence[Positions]

    def groups(self, n: int, source: int = 0) -> ClipGroups:
        """Return the groups of the first n clips of a source."""
        return ClipGroups(self.ends[source], self.k, n)


class ClipGroupEpochOrder:
    """The order of the clips of one epoch."""

    def __init__(self, groups: ClipGroups, *, seed: int, epoch: int) -> None:
        self._groups = groups
        self._keys = [derive_key(kind, seed, epoch) for kind in (24, 25, 26, 27)]
        self._n_windows = max(1, int(groups.counts.sum()) // WINDOW)
        # For most sizes, the groups cannot be divided equally among the windows, so some windows
        # get one group of that size more than others. Each size has its own random offset, so that
        # the windows with an extra group differ from size to size.
        starts = keyed_hashes(groups.sizes, self._keys[0]) % np.uint64(self._n_windows)
        self._offsets: Positions = starts.astype(np.int64)
        self._permutations = [
            Permutation(n, derive_key(size, self._keys[3]))
            for size, n in zip(groups.sizes.tolist(), groups.counts.tolist(), strict=True)
        ]

    def at(self, positions: Positions) -> Positions:
        """Return the index of the clip at each of `positions`, as `EpochOrder.at` does."""
        if not len(positions):
            return np.zeros(0, np.int64)
        first, last = self._window(int(positions.min())), self._window(int(positions.max()))
        edges = self._n_groups_before(np.arange(first, last + 1)) @ self._groups.sizes
        if first == last:
            return self._in_window(first, positions - edges[0])
        windows = np.searchsorted(edges, positions, "right") - 1
        ascending = np.argsort(windows, kind="stable")
        cuts = np.flatnonzero(np.diff(windows[ascending])) + 1
        found = np.empty(len(positions), np.int64)
        for part in np.split(ascending, cuts):
            window = int(windows[part[0]])
            found[part] = self._in_window(first + window, positions[part] - edges[window])
        return found

    def _window(self, position: int) -> int:
        def end(window: int) -> int:
            return int((self._n_groups_before(np.array([window + 1])) @ self._groups.sizes)[0])

        return bisect.bisect_right(range(self._n_windows), position, key=end)

    def _n_groups_before(self, windows: Positions) -> Positions:
        """Return the number of groups of each size (columns) before each window (rows)."""
        each, over = np.divmod(self._groups.counts, self._n_windows)
        numbers = windows[:, None]
        return numbers * each + (numbers * over + self._offsets) // self._n_windows

    def _in_window(self, window: int, positions: Positions) -> Positions:
        """Return the clips at positions within a window."""
        firsts, lasts = self._n_groups_before(np.array([window, window + 1]))
        videos, starts, sizes = [], [], []
        for size_index in np.flatnonzero(lasts > firsts).tolist():
            ranks = np.arange(firsts[size_index], lasts[size_index])
            numbers = self._permutations[size_index].at(ranks)
            of, begin = self._groups.find(size_index, numbers, self._keys[1])
            videos.append(of)
            starts.append(begin)
            sizes.append(np.broadcast_to(self._groups.sizes[size_index], len(of)))
        start = np.concatenate(starts)
        turn = spread_groups(np.concatenate(videos), start, derive_key(window, self._keys[2]))
        start, size = start[turn], np.concatenate(sizes)[turn]
        ends = np.cumsum(size)
        found = np.searchsorted(ends, positions, "right")
        clips: Positions = start[found] + positions - (ends - size)[found]
        return clips


def spread_groups(videos: Positions, starts: Positions, key: int) -> Positions:
    """Return an order of groups, as indices, in which the groups of one video are far apart.

    `starts` has the first clip of each group. The groups are sorted by points on a circle. For a
    video with m groups, the circle is divided into m equal parts, starting at a random point, and
    each group gets a random point in the first half of a part.
    """
    drawn = keyed_hashes(starts, key)
    by_video = np.lexsort((drawn, videos))
    ordered = videos[by_video]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    begins = np.flatnonzero(is_first)
    group = np.cumsum(is_first) - 1
    counts = np.diff(begins, append=len(videos))[group]
    parts = np.arange(len(videos)) - begins[group]
    # Use only operations that IEEE 754 rounds exactly, for equal results on every machine.
    phases = _fractions(keyed_hashes(ordered, derive_key(key, 1)))
    jitter = _JITTER * _fractions(keyed_hashes(starts[by_video], derive_key(key, 2)))
    angles = (parts + phases + jitter) / counts
    angles -= angles >= 1
    return by_video[np.argsort(angles, kind="stable")]


def _fractions(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = (hashes >> np.uint64(32)).astype(np.float64) / _HALF
    return found
