"""Which samples an epoch has, and in which order: the options of a loader that say so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from shardio.errors import InvalidArgument

Shuffle = bool | Literal["full", "blocks", "shards"]
Sampler = Collection[int] | Callable[[int], Collection[int]]
"""Positions of the view; a sampler as torch has them, iterated for each epoch; or a function of the
epoch's number that returns positions."""
_SHUFFLES: Final = (True, False, "full", "blocks", "shards")
_MOST_DRAWS: Final = 1 << 48


@dataclass(frozen=True, slots=True)
class Choice:
    """The options, as a user gives them; see ShardLoader.

    Raises:
        InvalidArgument: one of them is not acceptable, or two exclude each other.
    """

    shuffle: Shuffle
    seed: int
    sampler: Sampler | None = None
    weights: Any = None
    replacement: bool = True
    n_draws: int | None = None

    def __post_init__(self) -> None:
        if self.n_draws is not None:
            object.__setattr__(self, "n_draws", _count("n_draws", self.n_draws, _MOST_DRAWS))
        object.__setattr__(self, "seed", _count("seed", self.seed))
        if not any(self.shuffle is each for each in (True, False)) and (
            not isinstance(self.shuffle, str) or self.shuffle not in _SHUFFLES
        ):
            known = ", ".join(map(repr, _SHUFFLES))
            raise InvalidArgument(f"shuffle must be one of {known}; found {self.shuffle!r}")
        if not isinstance(self.replacement, bool):
            raise InvalidArgument(
                f"replacement must be one of True, False; found {self.replacement!r}"
            )
        if self._n_deciding > 1:
            raise InvalidArgument(
                "shuffle, sampler and weights each decide the order of an epoch: pass one of them"
            )
        if self.weights is None and (self.n_draws is not None or not self.replacement):
            raise InvalidArgument("replacement and n_draws are for weights; there are none")
        if self.sampler is not None and not _gives_samples(self.sampler):
            raise InvalidArgument(
                "sampler must be a sequence of positions, or a function that gives one for an "
                f"epoch; found {self.sampler!r}"
            )
        if callable(self.sampler):
            check_takes_one("sampler", "epoch", self.sampler)

    @property
    def _n_deciding(self) -> int:
        return (self.shuffle is not False) + (self.sampler is not None) + (self.weights is not None)

    @property
    def has_fixed_sampler(self) -> bool:
        """True if there is a sampler that holds the positions of every epoch."""
        return self.sampler is not None and holds_positions(self.sampler)

    @property
    def is_in_blocks(self) -> bool:
        """Whether an epoch is shuffled inside of windows."""
        return self.shuffle == "blocks"

    @property
    def is_in_shards(self) -> bool:
        """Whether an epoch is shuffled among a few shards at a time."""
        return self.shuffle == "shards"

    @property
    def is_full(self) -> bool:
        """Whether an epoch is a permutation of all samples."""
        return self.shuffle is True or self.shuffle == "full"


def holds_positions(sampler: Any) -> bool:
    """True if a sampler is a container, whose positions are those of every epoch.

    Anything else that can be iterated, as torch's samplers are, may draw anew each time.
    """
    if callable(sampler):
        return False
    return isinstance(sampler, Sequence | Set | Mapping) or any(
        hasattr(type(sampler), name) for name in ("__array__", "__getitem__")
    )


def check_deals_once(sampler: Any, rank: int, world_size: int) -> None:
    """Make sure that a sampler leaves the ranks to the loader, as a DistributedSampler does not.

    Raises:
        InvalidArgument: both deal samples out.
    """
    n = getattr(sampler, "num_replicas", 1)
    if world_size > 1 and isinstance(n, int) and n > 1:
        raise InvalidArgument(
            f"sampler is a {type(sampler).__name__} that deals samples out to {n} ranks, and so "
            f"does the loader, of which this is rank {rank} of {world_size}: pass shuffle=True in "
            "place of the sampler, or rank=0, world_size=1 beside it"
        )


def _gives_samples(sampler: object) -> bool:
    if isinstance(sampler, str | bytes):
        return False
    return callable(sampler) or (isinstance(sampler, Iterable) and hasattr(sampler, "__len__"))


def check_takes_one(name: str, given: str, function: Any) -> None:
    """Make sure that what a user gave is a function that can be called with one argument.

    Raises:
        InvalidArgument: naming the option, and what it is given.
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


def _count(name: str, value: Any, most: int | None = None) -> int:
    is_count = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_count or value < 0 or (most is not None and value > most):
        limit = "up" if most is None else f"to {most}"
        raise InvalidArgument(f"{name} must be an integer from 0 {limit}; found {value!r}")
    return int(value)
