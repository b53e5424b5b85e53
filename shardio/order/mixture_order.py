"""Mixtures: which source, and which of its samples, each position of an epoch has. Pure arithmetic.

How many of the first n positions each source has is computed for any n: n is divided between one
half of the sources and the other, by their shares, and so on down to each. Positions come in spans
of 256; which of a span's positions a source has, a keyed shuffle of the span decides. So a place in
an epoch costs the same wherever it is, and every span has its sources in proportion.

A source's positions take its samples in an order of its own, and when these are used up, in another
one: each such round is keyed by seed, epoch, source and its number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument
from shardio.format.checksum import distinct
from shardio.order.block_shuffle import GroupedOrder, Window, WindowedOrder
from shardio.order.clip_groups import ClipGrouping, ClipGroupOrder
from shardio.order.permutation import (
    SORTED_MAX,
    Permutation,
    Positions,
    derive_key,
    keyed_hashes,
    permutations,
)

Exhausted = Literal["stop", "repeat"]

WHOLE: Final = 1 << 30
"""What all shares come to at most, or little more; products of two such numbers fit in 63 bits."""
SPAN: Final = 256
"""Short, since a sample alone costs a span: ranks of small batches have their own in each."""
MOST_SOURCES: Final = 1024
"""A plan with twice as many would not fit in a message; and their files must all be open."""
_SPANS_AT_ONCE: Final = 64
_MOST_POSITIONS: Final = 1 << 48


@dataclass(frozen=True, slots=True)
class MixtureShares:
    """What is asked of a mixture: the share of each source, from 1 up, and when an epoch ends.

    With "stop" where the first source has no more samples, with "repeat" where every source has
    been seen whole.
    """

    shares: tuple[int, ...]
    exhausted: Exhausted

    def counts(self, n: Any) -> list[Any]:
        """How many of the first n positions each source has; n is a number, or an array of some.

        That is n times its share to within the number of halvings, it never falls as n grows, and
        all together are n.
        """
        found: list[Any] = []
        self._divide(n, 0, len(self.shares), found)
        return found

    def _divide(self, n: Any, first: int, last: int, found: list[Any]) -> None:
        """Append the counts of sources first..last-1, which have n positions together."""
        if last - first == 1:
            found.append(n)
            return
        middle = (first + last) // 2
        part, whole = sum(self.shares[first:middle]), sum(self.shares[first:last])
        of_part = n // whole * part + n % whole * part // whole
        self._divide(of_part, first, middle, found)
        self._divide(n - of_part, middle, last, found)

    def n_positions(self, sizes: tuple[int, ...]) -> int:
        """How many positions an epoch has, of sources with so many samples each, from 1 up.

        Raises:
            InvalidArgument: more than there may be.
        """
        return _n_positions(self, sizes)


@functools.lru_cache(maxsize=64)
def _n_positions(mixing: MixtureShares, sizes: tuple[int, ...]) -> int:
    repeats = mixing.exhausted == "repeat"

    def goes_on(n: int) -> bool:
        """Whether an epoch has more than n positions."""
        pairs = zip(mixing.counts(n if repeats else n + 1), sizes, strict=True)
        if repeats:
            return any(count < size for count, size in pairs)
        return all(count <= size for count, size in pairs)

    most = sum(sizes)
    while goes_on(most):
        most *= 2
        if most > _MOST_POSITIONS:
            raise InvalidArgument(
                f"until every source is seen whole, an epoch would have more than {most // 2} "
                "positions; the most there may be are 2^48: give larger weights to large sources"
            )
    least = -1  # the last that is known to go on
    while most - least > 1:
        n = (least + most) // 2
        least, most = (n, most) if goes_on(n) else (least, n)
    return most


@dataclass(frozen=True, slots=True)
class MixtureSizes:
    """A mixture of sources of certain sizes, in samples, as an epoch begins with it.

    `firsts` are the numbers that the first sample of each source has in the mixture.
    """

    mixing: MixtureShares
    sizes: tuple[int, ...]
    firsts: tuple[int, ...]

    @property
    def n_positions(self) -> int:
        """How many positions an epoch has."""
        return self.mixing.n_positions(self.sizes)


class MixtureOrder:
    """The samples of one epoch of a mixture, by position, as numbers in the mixture.

    Args:
        blend: of what.
        shuffle: whether each source is shuffled, or else walked in order.
        window: by which it is shuffled, if not as a whole.
        seed, epoch: the key.
        bundling: what its samples lie together in, if they are clips that do.
    """

    def __init__(
        self,
        blend: MixtureSizes,
        *,
        shuffle: bool,
        window: Window | None,
        seed: int,
        epoch: int,
        bundling: ClipGrouping | None = None,
    ) -> None:
        self._mixing, self._n, self._firsts = blend.mixing, blend.n_positions, blend.firsts
        self._key = derive_key(22, seed, epoch)
        shuffles = shuffle or window is not None
        self._walks = [
            _ShuffledSource(n, derive_key(23, seed, epoch, source), window, bundling, source)
            if shuffles
            else _SequentialSource(n)
            for source, n in enumerate(blend.sizes)
        ]

    def at(self, positions: Positions) -> Positions:
        """The sample at each of `positions`, in any order; int64, not to be written to."""
        sources, draws = self.draws(positions)
        numbers = np.empty(len(positions), np.int64)
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            at = np.flatnonzero(sources == source)
            numbers[at] = self._walks[source].at(draws[at]) + self._firsts[source]
        return numbers

    def draws(self, positions: Positions) -> tuple[npt.NDArray[Any], Positions]:
        """The source of each of `positions`, and how many positions before it have the same."""
        sources = np.empty(len(positions), np.int16)
        draws = np.empty(len(positions), np.int64)
        spans = positions // SPAN
        for some, at in _in_groups(spans, _SPANS_AT_ONCE):
            places = positions[at] % SPAN + np.searchsorted(some, spans[at]) * SPAN
            of_spans, draws_of_spans = self._spans(some)
            sources[at], draws[at] = of_spans[places], draws_of_spans[places]
        return sources, draws

    def _spans(self, spans: Positions) -> tuple[npt.NDArray[Any], Positions]:
        """The same of every position of some spans, one after another."""
        n, n_sources = len(spans), len(self._walks)
        edges = np.minimum(np.concatenate([spans, spans + 1]) * SPAN, self._n)
        counts = np.stack(self._mixing.counts(edges), axis=1)
        before, here = counts[:n], counts[n:] - counts[:n]
        # What is behind the epoch's end goes to a source more, and stays at the end.
        here = np.concatenate([here, SPAN - here.sum(1, keepdims=True)], axis=1).reshape(-1)
        in_turn = np.tile(np.arange(n_sources + 1, dtype=np.int16), n)  # small: it sorts faster
        slots = np.repeat(in_turn, here).reshape(n, SPAN)
        first_slots = np.cumsum(here) - here
        before = np.pad(before, ((0, 0), (0, 1))).reshape(-1)
        draws_in_turn = np.arange(n * SPAN) + np.repeat(before - first_slots, here)
        # A number of 56 random bits for each slot, and the slot itself: faster than an argsort.
        hashes = keyed_hashes(spans[:, None] * SPAN + np.arange(SPAN), self._key)
        hashes[slots == n_sources] = ~np.uint64(0)
        shuffled = np.sort(hashes & ~np.uint64(SPAN - 1) | np.arange(SPAN, dtype=np.uint64), axis=1)
        rows = (np.arange(n) * SPAN)[:, None]
        sources = slots.reshape(-1)[(shuffled & np.uint64(SPAN - 1)).astype(np.int64) + rows]
        # The k-th position of a source in a span takes the k-th of its draws there.
        by_source = np.argsort(sources, axis=1, kind="stable") + rows
        draws = np.empty(n * SPAN, np.int64)
        draws[by_source.reshape(-1)] = draws_in_turn
        return sources.reshape(-1), draws


def _in_groups(numbers: Positions, n_at_once: int) -> Iterator[tuple[Positions, Positions | slice]]:
    """Some of the distinct `numbers` at a time, ascending, and where in `numbers` these are."""
    if not len(numbers):
        return
    first, last = int(numbers.min()), int(numbers.max())
    if last - first < n_at_once:  # so it is for neighbours
        yield np.arange(first, last + 1), slice(None)
        return
    wanted = distinct(numbers)
    for start in range(0, len(wanted), n_at_once):
        some = wanted[start : start + n_at_once]
        yield some, np.flatnonzero((numbers >= some[0]) & (numbers <= some[-1]))


class _SequentialSource:
    """The samples of a source that is not shuffled, again and again."""

    def __init__(self, n: int) -> None:
        self._n = n

    def at(self, draws: Positions) -> Positions:
        """The sample that each draw takes."""
        return draws % self._n


class _ShuffledSource:
    """The samples of a source, round after round, each time in another order.

    Args:
        n: how many it has.
        key: of its orders.
        window: by which it is shuffled, where that makes a difference.
        bundling: what the samples of all sources lie together in, if they do.
        source: its number.
    """

    def __init__(
        self, n: int, key: int, window: Window | None, bundling: ClipGrouping | None, source: int
    ) -> None:
        self._n, self._key = n, key
        self._bundling, self._source = bundling, source
        k = 1 if bundling is None else bundling.k
        self._window = window if window is not None and n > window.whole * k else None
        # Of a small source a call may need many rounds: their orders are worked out together.
        self._is_small = n <= SORTED_MAX and self._window is None and bundling is None
        self._n_at_once = max(1, SORTED_MAX // n) if self._is_small else 1
        self._rounds: Positions = np.zeros(0, np.int64)
        self._tables: Positions
        """Of small sources, the orders of the rounds that came last."""
        self._order: Permutation | WindowedOrder | GroupedOrder | ClipGroupOrder
        """Of others, that of the latest."""

    def at(self, draws: Positions) -> Positions:
        """The sample that each draw takes."""
        rounds = draws // self._n
        places = draws - rounds * self._n
        samples = np.empty_like(places)
        for some, at in _in_groups(rounds, self._n_at_once):
            if not np.array_equal(some, self._rounds):
                self._prepare(some)
            if self._is_small:
                which = np.searchsorted(some, rounds[at])
                samples[at] = self._tables[which, places[at]]
            else:
                samples[at] = self._order.at(places[at])
        return samples

    def _prepare(self, rounds: npt.NDArray[np.int64]) -> None:
        keys = keyed_hashes(rounds, self._key)
        if self._is_small:
            self._tables = permutations(self._n, keys)
        else:
            self._order = self._ordered(int(keys[0]))
        self._rounds = rounds  # last: should Ctrl-C strike, it is done again

    def _ordered(self, key: int) -> Permutation | WindowedOrder | GroupedOrder | ClipGroupOrder:
        """The order of a round."""
        n, window, bundling = self._n, self._window, self._bundling
        if bundling is None:
            if window is None:
                return Permutation(n, key)
            return WindowedOrder(n, window, seed=key, epoch=0)
        if window is None:
            return ClipGroupOrder(bundling.bundles(n, self._source), seed=key, epoch=0)
        return GroupedOrder(n, bundling.k, window, seed=key, epoch=0)
