"""Order clips so that neighbouring clips of one video are decoded together.

A group is up to k consecutive clips of one video. An epoch permutes the groups and keeps the clips
of a group together. One pass of a decoder then produces all clips of a group, unless a batch ends
within the group.

A video of n clips has n // k groups of k clips and, unless n % k is 0, a smaller group of n % k
clips. A key per video and epoch places the smaller group before, between or after the others. The
groups of each size are permuted by `permutation`. The epoch is divided into windows of about 1,024
groups. All windows have the same proportions of group sizes, so that the start of a window can be
calculated. Within a window, the groups of one video are spread far apart.

As in `permutation`, the clip at any position is computed directly. Computing one position takes as
long as computing its whole window, about 250 µs for 1,024 groups.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.order.permutation import Permutation, Positions, derive_key, keyed_hashes

WINDOW: Final = 1024
"""The minimum number of groups per window; the maximum is twice as large.

In larger windows, the groups of a video are further apart, but finding one sample takes longer.
"""
_JITTER: Final = 0.5
"""The maximum random offset, as a share of the distance between groups of a video.

Without random offsets, the same videos would follow each other throughout a window.
"""
_HALF: Final = 1 << 32


class ClipGroups:
    """The groups of up to k clips of some videos. Immutable.

    Args:
        ends: the cumulative sum of the videos' clip counts.
        n: the number of clips to use; by default all.
    """

    def __init__(self, ends: Positions, k: int, n: int | None = None) -> None:
        self._k = k
        self._ends: Positions = ends if n is None else np.minimum(ends, n)
        n_whole, n_left = np.divmod(np.diff(self._ends, prepend=0), k)
        self._ends_of_whole: Positions = np.cumsum(n_whole)
        # The videos that have a smaller group, sorted by the size of that group.
        with_one = np.flatnonzero(n_left)
        self._by_size: Positions = with_one[np.argsort(n_left[with_one], kind="stable")]
        sizes, firsts, n_bundles = np.unique(
            n_left[self._by_size], return_index=True, return_counts=True
        )
        self.sizes: Positions = np.concatenate([[k], sizes])
        """The different group sizes: first k, then the sizes of smaller groups."""
        self.counts: Positions = np.concatenate([[n_whole.sum()], n_bundles])
        """The number of groups of each size."""
        self._firsts: Positions = np.concatenate([[0], firsts])

    def find(self, which: int, numbers: Positions, key: int) -> tuple[Positions, Positions]:
        """Return the videos and the first clips of groups of one size.

        Args:
            which: the index of the size in `sizes`.
            numbers: the indices of the groups among those of this size, below `counts[which]`.
            key: the key that places the smaller group within each video.
        """
        k = self._k
        if which:
            videos = self._by_size[self._firsts[which] + numbers]
            begins, counts = self._clips_of(videos)
            return videos, begins + _random_up_to(counts // k, videos, key) * k
        videos = np.searchsorted(self._ends_of_whole, numbers, "right")
        begins, counts = self._clips_of(videos)
        n_whole = counts // k
        inside = numbers - self._ends_of_whole[videos] + n_whole
        is_behind = inside >= _random_up_to(n_whole, videos, key)
        return videos, begins + inside * k + is_behind * (counts - n_whole * k)

    def _clips_of(self, videos: Positions) -> tuple[Positions, Positions]:
        """Return the first clip and the number of clips of each video."""
        begins = np.where(videos > 0, self._ends[videos - 1], 0)
        return begins, self._ends[videos] - begins


def _random_up_to(most: Positions, videos: Positions, key: int) -> Positions:
    """Return a keyed random number from 0 to `most` for each video."""
    drawn = keyed_hashes(videos, key) >> np.uint64(32)
    found = drawn * (most + 1).astype(np.uint64) >> np.uint64(32)
    return found.astype(np.int64)


class ClipGrouping:
    """The groups of up to k clips of one dataset, or of each source of a mixture.

    `ends` has, for each source, the cumulative sum of its videos' clip counts.
    """

    def __init__(self, k: int, ends: Sequence[Positions]) -> None:
        self.k, self._ends = k, ends
        self._latest: dict[int, tuple[int, ClipGroups]] = {}

    def groups(self, n: int, source: int = 0) -> ClipGroups:
        """Return the groups of the first n clips of a source; cached for the next epoch."""
        latest = self._latest.get(source)
        if latest is None or latest[0] != n:
            ends = self._ends[source]
            is_all = not len(ends) or ends[-1] == n
            latest = n, ClipGroups(ends, self.k, None if is_all else n)
            self._latest[source] = latest
        return latest[1]


class ClipGroupOrder:
    """The clips of one epoch, by position, in an order that seed and epoch determine."""

    def __init__(self, groups: ClipGroups, *, seed: int, epoch: int) -> None:
        self._groups = groups
        self._keys = [derive_key(kind, seed, epoch) for kind in (24, 25, 26, 27)]
        self._n_windows = max(1, int(groups.counts.sum()) // WINDOW)
        # The counts of groups are not multiples of the number of windows. Each size has a different
        # offset; otherwise the remainders of all sizes would fall into the last window.
        starts = keyed_hashes(groups.sizes, self._keys[0]) % np.uint64(self._n_windows)
        self._offsets: Positions = starts.astype(np.int64)
        self._permutations: dict[int, Permutation] = {}

    def at(self, positions: Positions) -> Positions:
        """Return the clip at each of `positions`, which may be in any order; int64, read-only."""
        if not len(positions):
            return np.zeros(0, np.int64)
        first, last = self._window(int(positions.min())), self._window(int(positions.max()))
        edges = self._n_ranked(np.arange(first, last + 1)) @ self._groups.sizes
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
        """Return the window that contains a position."""

        def end(window: int) -> int:
            return int((self._n_ranked(np.array([window + 1])) @ self._groups.sizes)[0])

        return bisect.bisect_right(range(self._n_windows), position, key=end)

    def _n_ranked(self, windows: Positions) -> Positions:
        """Return the number of groups of each size before each window, (windows, sizes)."""
        each, over = np.divmod(self._groups.counts, self._n_windows)
        numbers = windows[:, None]
        return numbers * each + (numbers * over + self._offsets) // self._n_windows

    def _in_window(self, window: int, places: Positions) -> Positions:
        """Return the clip at each of `places`, which are offsets from the start of the window."""
        firsts, lasts = self._n_ranked(np.array([window, window + 1]))
        videos, starts, sizes = [], [], []
        for which in np.flatnonzero(lasts > firsts).tolist():
            ranks = np.arange(firsts[which], lasts[which])
            numbers = self._permutation(which).at(ranks)
            of, begin = self._groups.find(which, numbers, self._keys[1])
            videos.append(of)
            starts.append(begin)
            sizes.append(np.broadcast_to(self._groups.sizes[which], len(of)))
        start = np.concatenate(starts)
        turn = spread_groups(np.concatenate(videos), start, derive_key(window, self._keys[2]))
        start, size = start[turn], np.concatenate(sizes)[turn]
        ends = np.cumsum(size)
        found = np.searchsorted(ends, places, "right")
        clips: Positions = start[found] + places - (ends - size)[found]
        return clips

    def _permutation(self, which: int) -> Permutation:
        """Return the permutation of the groups of one size."""
        found = self._permutations.get(which)
        if found is None:
            size, n = int(self._groups.sizes[which]), int(self._groups.counts[which])
            found = self._permutations[which] = Permutation(n, derive_key(size, self._keys[3]))
        return found


def spread_groups(videos: Positions, starts: Positions, key: int) -> Positions:
    """Return an order of groups in which the groups of one video are far apart.

    Groups are sorted by their places on a circle. For a video with m groups, the circle is divided
    into m equal parts, starting at a random phase. Each part has one group of the video, at a
    random place in the first half of the part: two groups are at least half a part apart.

    `videos` and `starts` have the video and the first clip of each group.
    """
    drawn = keyed_hashes(starts, key)
    by_video = np.lexsort((drawn, videos))
    ordered = videos[by_video]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    begins = np.flatnonzero(is_first)
    group = np.cumsum(is_first) - 1
    counts = np.diff(begins, append=len(videos))[group]
    parts = np.arange(len(videos)) - begins[group]
    # Use only operations that IEEE 754 rounds exactly: the result is the same on every machine.
    phases = _fractions(keyed_hashes(ordered, derive_key(key, 1)))
    jitter = _JITTER * _fractions(keyed_hashes(starts[by_video], derive_key(key, 2)))
    places = (parts + phases + jitter) / counts
    places -= places >= 1
    return by_video[np.argsort(places, kind="stable")]


def _fractions(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a number from 0 to below 1 for each hash."""
    found: npt.NDArray[np.float64] = (hashes >> np.uint64(32)).astype(np.float64) / _HALF
    return found
