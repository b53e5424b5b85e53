"""Choose the samples of an epoch: shuffling, samplers, and weighted draws.

A draw with replacement looks up a random number in the cumulative weights. Without replacement,
rows are sorted by -log(u) / weight with a random u, which is equivalent to drawing from the rows
that are left (P. Efraimidis and P. Spirakis, 2006). The logarithms of libraries differ between
machines, so `natural_log` uses only operations that IEEE 754 rounds exactly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from shardio._base.callers import refuses
from shardio._workers.processes.shared_memory import SharedArray
from shardio.errors import InvalidArgument
from shardio.order import EpochOrder, FullShuffle, Order, Samples, Sequential
from shardio.order.permutation import Positions, derive_key, keyed_hashes
from shardio.order.shuffle import BlockShuffle, ShardShuffle

ORDERS: Final[dict[bool | str, type[Order]]] = {
    True: FullShuffle,
    False: Sequential,
    "full": FullShuffle,
    "blocks": BlockShuffle,
    "shards": ShardShuffle,
}
"""The `Order` class for each value of the option `shuffle`."""
Shuffle = bool | str
"""The type of a key of `ORDERS`."""
_MAX_DRAWS: Final = 1 << 48


@refuses({"generator": "the seed of the loader is used", "num_samples": "write n_draws="})
@dataclass(frozen=True, slots=True, eq=False)
class WeightedSampler:
    """A value for a loader's option `sampler`, which draws samples according to weights.

    The probability of each sample is proportional to its weight. Draws depend only on the
    loader's seed, the epoch and the position.

    Args:
        weights: the relative probability of each sample, at least 0; the loader checks the values.
        replacement: True if a sample may be drawn more than once in an epoch.
        n_draws: the number of draws in an epoch; by default the number of samples or, without
            replacement, the number of samples with a weight above 0.

    Raises:
        InvalidArgument: an argument is not valid.
    """

    weights: Any
    _: KW_ONLY
    replacement: bool = True
    n_draws: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.replacement, bool):
            raise InvalidArgument(
                f"replacement must be one of True, False; found {self.replacement!r}"
            )
        if self.n_draws is not None:
            object.__setattr__(self, "n_draws", check_count("n_draws", self.n_draws, 0, _MAX_DRAWS))

    def __repr__(self) -> str:
        try:
            what = f"{len(self.weights)} weights"
        except TypeError:
            what = repr(self.weights)
        return f"WeightedSampler({what}, replacement={self.replacement}, n_draws={self.n_draws})"


class Indices(Protocol):
    """Indices of samples.

    Only these two methods are required, because torch's samplers lack the other methods of a
    collection.
    """

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


Sampler = WeightedSampler | Indices | Callable[[int], Indices]
"""Weighted draws; a collection of positions in the view; a torch sampler, iterated for each epoch;
or a function that takes the number of an epoch, counted from 0, and returns the positions for that
epoch."""


def check_shuffle(name: str, value: Any) -> Shuffle:
    """Return the value; raise InvalidArgument unless it is a key of `ORDERS`."""
    if not isinstance(value, bool | str) or value not in ORDERS:
        known = ", ".join(map(repr, ORDERS))
        raise InvalidArgument(f"{name} must be one of {known}; found {value!r}")
    return value


def check_sampler(name: str, sampler: Any) -> Any:
    """Return the sampler; raise InvalidArgument if it is not a `Sampler`."""
    if callable(sampler):
        check_one_argument(name, "epoch", sampler)
    elif not isinstance(sampler, WeightedSampler) and (
        isinstance(sampler, str | bytes)
        or not isinstance(sampler, Iterable)
        or not hasattr(sampler, "__len__")
    ):
        raise InvalidArgument(
            f"{name} must be a sequence of positions, or a function that returns one for an epoch; "
            f"found {sampler!r}"
        )
    return sampler


def holds_positions(sampler: Any) -> bool:
    """Return True if a sampler is a container, and thus has the same positions in every epoch."""
    if callable(sampler):
        return False
    return isinstance(sampler, Sequence | Set | Mapping) or any(
        hasattr(type(sampler), name) for name in ("__array__", "__getitem__")
    )


def check_not_distributed(sampler: Any, rank: int, world_size: int) -> None:
    """Raise InvalidArgument if both a sampler and the loader divide the samples among ranks."""
    n = getattr(sampler, "num_replicas", 1)
    if world_size > 1 and isinstance(n, int) and n > 1:
        raise InvalidArgument(
            f"sampler is a {type(sampler).__name__} that divides samples among {n} ranks, but "
            f"the loader divides them as well (this is rank {rank} of {world_size}): pass "
            "shuffle=True instead of the sampler, or keep the sampler and also pass rank=0, "
            "world_size=1"
        )


def check_one_argument(name: str, given: str, function: Any) -> None:
    """Raise InvalidArgument unless `function` takes one argument.

    In the message, the function is called `name`, and its argument `given`.
    """
    if not callable(function):
        raise InvalidArgument(f"{name} must be callable; found {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(None)
    except TypeError:
        raise InvalidArgument(f"{name} must take ({given}); it takes {signature}") from None


def check_count(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return the value; raise InvalidArgument unless it is an integer from `least` to `most`."""
    is_count = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_count or value < least or (most is not None and value > most):
        limit = "up" if most is None else f"to {most}"
        raise InvalidArgument(f"{name} must be an integer from {least} {limit}; found {value!r}")
    return int(value)


Numbers = npt.NDArray[np.float64]

_LN_2: Final = 0.6931471805599453
_SQRT_HALF: Final = 0.7071067811865476
_AT_ONCE: Final = 1 << 14
_N_TERMS: Final = 12
"""The number of terms of the series in `natural_log`. Each further term is less than 2^-60 times
the first."""


class WeightedEpochOrder:
    """The order of one epoch of draws with replacement; `sums` are the cumulative weights."""

    def __init__(self, sums: Numbers, *, seed: int, epoch: int) -> None:
        self._sums, self._key = sums, derive_key(20, seed, epoch)
        # Because of rounding, a drawn number may be equal to the sum of all weights. The drawn row
        # is then the last row whose weight is above 0.
        self._last = int(np.searchsorted(sums, sums[-1], side="left"))

    def at(self, positions: Positions) -> Positions:
        """Return the row at each of `positions`, which need not be sorted."""
        drawn = _fractions(positions, self._key) * self._sums[-1]
        # Sort the numbers before they are looked up in `sums`. The lookup is then twice as fast,
        # because consecutive numbers use the same cache lines.
        ascending = np.argsort(drawn)
        rows = np.empty(len(drawn), np.int64)
        rows[ascending] = np.searchsorted(self._sums, drawn[ascending], side="right")
        return np.minimum(rows, self._last)


@dataclass(frozen=True)
class ListedOrder(Order):
    """The order that a sampler determines. `table` has the sample at each position of an epoch."""

    name = False
    table: SharedArray
    n: int
    origin: dict[str, Any]
    """The options that determine the table."""

    @classmethod
    def check(cls, samples: Samples) -> None:
        """Raise InvalidArgument for a mixture, whose weights decide the order."""
        if samples.is_mixture:
            raise InvalidArgument(
                "sampler decides the order of an epoch, and so does a mixture: pass weights to "
                "shardio.mix, or load the sources one by one"
            )

    def n_positions(self, samples: Samples) -> int:
        """Return the number of positions, which the sampler decides."""
        return self.n

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> EpochOrder:
        """Return this object."""
        return self

    def at(self, positions: Positions) -> Positions:
        """Return the sample at each of `positions`, which need not be sorted."""
        return self.table.array[positions]

    def identity(self, samples: Samples) -> dict[str, Any]:
        """Return the options that determine the table."""
        return super().identity(samples) | self.origin | {"rows": self.n}


class WeightedOrder(ListedOrder):
    """The order of weighted draws with replacement. `table` has the cumulative weights."""

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> EpochOrder:
        """Return the order of the draws of one epoch."""
        return WeightedEpochOrder(self.table.array, seed=seed, epoch=epoch)


def draw_without_replacement(weights: Numbers, n: int, *, seed: int, epoch: int) -> Positions:
    """Return n rows in the order in which they are drawn; rows with weight 0 are never drawn."""
    rows = np.flatnonzero(weights)
    keys = np.empty(len(rows))
    key = derive_key(21, seed, epoch)
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        # The keys of rows with tiny weights may be infinite. Such rows come last.
        with np.errstate(over="ignore"):
            keys[start : start + len(part)] = (
                -natural_log(1 - _fractions(part, key)) / weights[part]
            )
    return rows[np.argsort(keys, kind="stable")[:n]]


def _fractions(numbers: Positions, key: int) -> Numbers:
    """Return a random number from 0 to 1 - 2^-53 for each of `numbers`."""
    found: Numbers = (keyed_hashes(numbers, key) >> np.uint64(11)).astype(np.float64)
    return found * 2.0**-53


def natural_log(numbers: Numbers) -> Numbers:
    """Return natural logarithms of numbers above 0."""
    parts, exponents = np.frexp(numbers)
    is_low = parts < _SQRT_HALF
    parts = np.where(is_low, 2 * parts, parts)
    ratio = (parts - 1) / (parts + 1)  # log(x) is 2 artanh(ratio)
    square = ratio * ratio
    total = np.zeros_like(square)
    for k in range(_N_TERMS - 1, -1, -1):
        total = total * square + 1 / (2 * k + 1)
    found: Numbers = (exponents - is_low) * _LN_2 + 2 * ratio * total
    return found
