"""Compute the source, and the sample of the source, at each position of an epoch of a mixture.

A mixture combines several datasets, its *sources*, each with a *share*: an integer proportional to
its part of the positions. Positions form *spans* of 256. The shares determine how many positions
each source has before the start and before the end of a span, and a keyed shuffle decides which
positions of the span each source gets. Both steps take constant time.

Each position of a source is a *draw* of its next sample. The draws of a source form *rounds*, each
of which has every sample once, in an order given by the seed, the epoch, the source and the round.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument
from shardio.format.checksum import distinct
from shardio.order import EpochOrder, Order, Samples
from shardio.order.permutation import (
    SORTED_MAX,
    Permutation,
    Positions,
    derive_key,
    keyed_hashes,
    permutations,
)

Exhausted = Literal["stop", "repeat"]

MAX_SHARE_SUM: Final = 1 << 30
"""The approximate maximum of the sum of all shares: products in `_divide` then fit in 63 bits."""
SPAN: Final = 256
"""The number of positions per span. Spans are short, because even a single sample needs its whole
span, and each rank computes every span."""
MAX_SOURCES: Final = 1024
"""With 2,048 sources, the plan of an epoch would not fit in a message to a worker; the files of all
sources must also be open at the same time."""
_SPANS_AT_ONCE: Final = 64
_MAX_POSITIONS: Final = 1 << 48


@dataclass(frozen=True, slots=True)
class MixtureShares:
    """The share of each source, at least 1, and the rule that ends an epoch.

    If `exhausted` is "stop", an epoch ends before the first position whose source has no sample
    left. If it is "repeat", an epoch ends when every sample has been drawn; some samples are then
    drawn more than once.
    """

    shares: tuple[int, ...]
    exhausted: Exhausted

    def counts(self, n: Any) -> list[Any]:
        """Return how many of the first n positions each source gets; n may be an array.

        The counts add up to n, never decrease as n grows, and differ from exact shares by at most
        the number of halvings in `_divide`.
        """
        return _divide(n, self.shares)


def _divide(n: Any, shares: tuple[int, ...]) -> list[Any]:
    """Divide n between the two halves of the list of sources, and so on within each half."""
    if len(shares) == 1:
        return [n]
    middle = len(shares) // 2
    part, whole = sum(shares[:middle]), sum(shares)
    of_part = n // whole * part + n % whole * part // whole
    return _divide(of_part, shares[:middle]) + _divide(n - of_part, shares[middle:])


@functools.lru_cache(maxsize=64)
def _n_positions(mixing: MixtureShares, sizes: tuple[int, ...]) -> int:
    repeats = mixing.exhausted == "repeat"

    def has_more_than(n: int) -> bool:
        pairs = zip(mixing.counts(n if repeats else n + 1), sizes, strict=True)
        if repeats:
            return any(count < size for count, size in pairs)
        return all(count <= size for count, size in pairs)

    most = sum(sizes)
    while has_more_than(most):
        most *= 2
        if most > _MAX_POSITIONS:
            raise InvalidArgument(
                f"an epoch that draws every sample would have more than {most // 2} positions; "
                "the maximum is 2^48: give larger weights to large sources"
            )
    least = -1  # the epoch is known to have more positions than this
    while most - least > 1:
        n = (least + most) // 2
        least, most = (n, most) if has_more_than(n) else (least, n)
    return most


@dataclass(frozen=True, slots=True)
class MixtureSizes:
    """The shares of a mixture, and the sizes of its sources at the start of an epoch.

    `firsts` has the index of each source's first sample in the mixture.
    """

    mixing: MixtureShares
    sizes: tuple[int, ...]
    firsts: tuple[int, ...]

    @property
    def n_positions(self) -> int:
        """The number of positions of an epoch."""
        return _n_positions(self.mixing, self.sizes)


class MixtureEpochOrder:
    """The samples of one epoch of a mixture, as indices in the mixture.

    `order` is the order within each source, and `samples` describes the samples of all sources. If
    `samples` is None, each source is in storage order.
    """

    def __init__(
        self,
        order: Order,
        mixture_sizes: MixtureSizes,
        samples: Samples | None,
        *,
        seed: int,
        epoch: int,
    ) -> None:
        self._mixing, self._firsts = mixture_sizes.mixing, mixture_sizes.firsts
        self._n, self._key = mixture_sizes.n_positions, derive_key(22, seed, epoch)
        self._sizes = mixture_sizes.sizes
        self._shuffled: list[_ShuffledSource] | None = None
        if samples is not None and not order.is_sequential:
            self._shuffled = [
                _ShuffledSource(order, samples, n, derive_key(23, seed, epoch, source), source)
                for source, n in enumerate(self._sizes)
            ]

    def at(self, positions: Positions) -> Positions:
        """Return the sample at each of `positions`, as `EpochOrder.at` does."""
        sources, draws = self.draws(positions)
        numbers = np.empty(len(positions), np.int64)
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            at = np.flatnonzero(sources == source)
            shuffled, n = self._shuffled, self._sizes[source]
            found = draws[at] % n if shuffled is None else shuffled[source].at(draws[at])
            numbers[at] = found + self._firsts[source]
        return numbers

    def first_position(self, source: int, draw: int) -> int | None:
        """Return the position of a source's draw `draw`; None if the epoch has no such draw."""

        def drawn(span: int) -> int:
            return int(self._mixing.counts(min((span + 1) * SPAN, self._n))[source])

        span = bisect.bisect_right(range(-(-self._n // SPAN)), draw, key=drawn)
        positions = np.arange(span * SPAN, min((span + 1) * SPAN, self._n))
        sources, draws = self.draws(positions)
        found = positions[(sources == source) & (draws == draw)]
        return int(found[0]) if len(found) else None

    def draws(self, positions: Positions) -> tuple[npt.NDArray[Any], Positions]:
        """Return, for each position, its source and the index of its draw."""
        sources = np.empty(len(positions), np.int16)
        draws = np.empty(len(positions), np.int64)
        spans = positions // SPAN
        for some, at in _chunks(spans, _SPANS_AT_ONCE):
            offsets = positions[at] % SPAN + np.searchsorted(some, spans[at]) * SPAN
            of_spans, draws_of_spans = self._spans(some)
            sources[at], draws[at] = of_spans[offsets], draws_of_spans[offsets]
        return sources, draws

    def _spans(self, spans: Positions) -> tuple[npt.NDArray[Any], Positions]:
        n, n_sources = len(spans), len(self._sizes)
        edges = np.minimum(np.concatenate([spans, spans + 1]) * SPAN, self._n)
        counts = np.stack(self._mixing.counts(edges), axis=1)
        before, here = counts[:n], counts[n:] - counts[:n]
        # Assign the positions past the epoch's end to an extra source, which is sorted last.
        here = np.concatenate([here, SPAN - here.sum(1, keepdims=True)], axis=1).reshape(-1)
        in_turn = np.tile(np.arange(n_sources + 1, dtype=np.int16), n)  # int16 is sorted faster
        unshuffled = np.repeat(in_turn, here).reshape(n, SPAN)
        first_slots = np.cumsum(here) - here
        before = np.pad(before, ((0, 0), (0, 1))).reshape(-1)
        draws_in_turn = np.arange(n * SPAN) + np.repeat(before - first_slots, here)
        # Put 56 random bits and the 8 bits of the index into one integer and sort these integers,
        # because `sort` is faster than `argsort`.
        hashes = keyed_hashes(spans[:, None] * SPAN + np.arange(SPAN), self._key)
        hashes[unshuffled == n_sources] = ~np.uint64(0)
        shuffled = np.sort(hashes & ~np.uint64(SPAN - 1) | np.arange(SPAN, dtype=np.uint64), axis=1)
        rows = (np.arange(n) * SPAN)[:, None]
        sources = unshuffled.reshape(-1)[(shuffled & np.uint64(SPAN - 1)).astype(np.int64) + rows]
        # The k-th position of a source in a span gets the k-th of the source's draws in this span.
        by_source = np.argsort(sources, axis=1, kind="stable") + rows
        draws = np.empty(n * SPAN, np.int64)
        draws[by_source.reshape(-1)] = draws_in_turn
        return sources.reshape(-1), draws


def _chunks(numbers: Positions, n_at_once: int) -> Iterator[tuple[Positions, Positions | slice]]:
    """Yield up to `n_at_once` ascending integers, and the indices of those `numbers` in this range.

    The integers are distinct values of `numbers`, or a short range that contains all `numbers`.
    """
    if not len(numbers):
        return
    first, last = int(numbers.min()), int(numbers.max())
    if last - first < n_at_once:  # a fast path for numbers that are close together
        yield np.arange(first, last + 1), slice(None)
        return
    wanted = distinct(numbers)
    for start in range(0, len(wanted), n_at_once):
        some = wanted[start : start + n_at_once]
        yield some, np.flatnonzero((numbers >= some[0]) & (numbers <= some[-1]))


class _ShuffledSource:
    def __init__(self, order: Order, samples: Samples, n: int, key: int, source: int) -> None:
        self._n, self._key = n, key
        self._arrange = functools.partial(order.arrange_round, samples, n, source=source)
        # One call of `at` may need many rounds of a small source; compute their orders together.
        self._is_small = n <= SORTED_MAX and isinstance(self._arrange(key=0), Permutation)
        self._n_at_once = max(1, SORTED_MAX // n) if self._is_small else 1
        self._rounds: Positions = np.zeros(0, np.int64)
        self._tables: Positions
        """If the source is small: the orders of the rounds in `_rounds`."""
        self._order: EpochOrder
        """If the source is not small: the order of the only round in `_rounds`."""

    def at(self, draws: Positions) -> Positions:
        rounds = draws // self._n
        offsets = draws - rounds * self._n
        samples = np.empty_like(offsets)
        for some, at in _chunks(rounds, self._n_at_once):
            if not np.array_equal(some, self._rounds):
                self._prepare(some)
            if self._is_small:
                which = np.searchsorted(some, rounds[at])
                samples[at] = self._tables[which, offsets[at]]
            else:
                samples[at] = self._order.at(offsets[at])
        return samples

    def _prepare(self, rounds: npt.NDArray[np.int64]) -> None:
        keys = keyed_hashes(rounds, self._key)
        if self._is_small:
            self._tables = permutations(self._n, keys)
        else:
            self._order = self._arrange(key=int(keys[0]))
        # Set `_rounds` last: if Ctrl-C interrupts this method before that, the next call computes
        # the orders again.
        self._rounds = rounds


@dataclass(frozen=True)
class InterleavedOrder(Order):
    """The order of a mixture: the order within its sources, and the shares of the sources."""

    order: Order
    """The order of the samples within each source."""
    mixture: MixtureSizes

    def n_positions(self, samples: Samples) -> int:
        """Return the number of positions of an epoch, for the sizes in `mixture`."""
        return self.mixture.n_positions

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        return MixtureEpochOrder(self.order, self.mixture, samples, seed=seed, epoch=epoch)

    def identity(self, samples: Samples) -> dict[str, Any]:
        """Return the options of the order within the sources, and the options of the mixture."""
        mixing = self.mixture.mixing
        weights = [share / sum(mixing.shares) for share in mixing.shares]
        found = {"weights": weights, "exhausted": mixing.exhausted}
        return self.order.identity(samples) | {"mixing": found}

    def to_state(self) -> dict[str, Any]:
        """Return the parameters of the order within the sources, and the sizes of the sources."""
        return self.order.to_state() | {"sizes": list(self.mixture.sizes)}

    def from_state(self, state: Mapping[str, Any], samples: Samples, n: int) -> Self:
        """Return the order with the sizes that the sources had when the epoch began."""
        found: Any = state.get("sizes")
        now = self.mixture.sizes
        is_list = isinstance(found, list | tuple) and len(found) == len(now)
        if not is_list or not all(
            type(a) is int and 0 < a <= b for a, b in zip(found, now, strict=True)
        ):
            raise InvalidArgument(
                f"load_state_dict: the state's sizes must be at most those of the sources of "
                f"{samples.path}, {list(now)}; found {found!r}"
            )
        mixture = replace(self.mixture, sizes=tuple(found))
        if n > mixture.n_positions:
            raise InvalidArgument(
                f"load_state_dict: the state's epoch has {n} samples, but with the state's "
                f"sizes it has {mixture.n_positions}"
            )
        return replace(self, order=self.order.from_state(state, samples, n), mixture=mixture)

    @property
    def is_sequential(self) -> bool:
        """True if each source is read in storage order."""
        return self.order.is_sequential

    @property
    def window(self) -> int | None:
        """The `window` of the order within the sources."""
        return self.order.window

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, prefix: str) -> int:
        """Check the cache as the order within the sources does."""
        return self.order.check_cache(shard_bytes, cache_bytes, prefix)
