"""Orders: the sample at each position of an epoch.

A loader's options choose an `Order` from `sampling.ORDERS`; `Order.arrange` returns the
`EpochOrder` of one epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, Self

from shardio.errors import InvalidArgument
from shardio.order.clip_groups import ClipGroupEpochOrder, ClipGrouping
from shardio.order.permutation import Permutation, Positions, epoch_permutation

CACHE_HINT: Final = "raise cache_bytes, or pass shuffle='shards'"


class EpochOrder(Protocol):
    """The samples of one epoch, by position."""

    def at(self, positions: Positions) -> Positions:
        """Return the index of the sample at each of `positions`, which need not be sorted.

        The result is of int64, and must not be written to.
        """


@dataclass(frozen=True, slots=True)
class Samples:
    """The facts that orders need about the n samples of a dataset or view.

    `shard_ends` returns the cumulative sample counts of the shards. `no_shards_reason` returns the
    reason why the samples are not in the order of the shards, or None if they are. `measure`
    returns the total bytes and the number of samples of all shards.
    """

    path: str
    n: int
    is_mixture: bool
    clip_grouping: ClipGrouping | None
    shard_ends: Callable[[], Positions]
    no_shards_reason: Callable[[], str | None]
    measure: Callable[[], tuple[int, int]]


@dataclass(frozen=True)
class Order:
    """An order of the samples of an epoch, with its parameters; sent to the workers.

    Subclasses must be frozen dataclasses, because orders are compared by value.
    """

    name: ClassVar[bool | str]
    """The value of the option `shuffle`, also in a loader's state."""
    needs_shards: ClassVar[bool] = False
    """True if the order requires samples that are in the order of the shards."""
    mixes: ClassVar[bool] = False
    """True if each source of a mixture can have this order."""
    keeps_clips: ClassVar[bool] = False
    """True if the clips of a group (see `clip_groups`) get neighbouring positions."""

    @classmethod
    def check(cls, samples: Samples) -> None:
        """Raise InvalidArgument if this order cannot be used; the message names another order."""
        reason = samples.no_shards_reason() if cls.needs_shards else None
        if reason is not None:
            raise InvalidArgument(
                f"{samples.path}: shuffle={cls.name!r} needs samples in the order of their shards, "
                f"but {reason}; pass shuffle='blocks' for samples in any order"
            )
        if samples.is_mixture and not cls.mixes:
            raise InvalidArgument(
                f"{samples.path}: shuffle={cls.name!r} is for the samples of one dataset, and this "
                "is a mixture of several: pass shuffle=True or 'blocks', or load them one by one"
            )

    @classmethod
    def begin(cls, samples: Samples) -> Self:
        """Return an order with parameters for the current samples."""
        return cls()

    def n_positions(self, samples: Samples) -> int:
        """Return the number of positions of an epoch."""
        return samples.n

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> EpochOrder:
        """Return the order of one epoch of n positions.

        The order depends only on `self` and the arguments.
        """
        raise NotImplementedError

    def arrange_round(self, samples: Samples, n: int, key: int, source: int) -> EpochOrder:
        """Return the order of a round of a mixture: the n samples of one source, each once.

        `key` determines the order; each round has its own key.
        """
        raise NotImplementedError

    def identity(self, samples: Samples) -> dict[str, Any]:
        """Return the options that determine the samples of an epoch.

        A loader's state is only valid for a loader with the same options.
        """
        grouping = samples.clip_grouping if self.keeps_clips else None
        return {"shuffle": self.name, "per_video": None if grouping is None else grouping.k}

    def to_state(self) -> dict[str, Any]:
        """Return the parameters as JSON values for a loader's state."""
        return {}

    def from_state(self, state: Mapping[str, Any], samples: Samples, n: int) -> Self:
        """Return the order with the parameters from a state, or raise InvalidArgument."""
        return self

    @property
    def is_sequential(self) -> bool:
        """True if samples are read in storage order; the kernel's read-ahead then helps."""
        return False

    @property
    def window(self) -> int | None:
        """The number of samples in a window, whose samples lie in few regions of the files.

        None if the order has no windows.
        """
        return None

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, prefix: str) -> int:
        """Return the total size of shards in use at once, or 0 if the order does not determine it.

        Loaders call this if the dataset is larger than the cache. Raises InvalidArgument, or warns,
        if shards would be downloaded again and again; the message begins with `prefix`.
        """
        return 0


class Sequential(Order):
    """The order in which the dataset stores its samples."""

    name = False
    mixes = True
    is_sequential = True

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> EpochOrder:
        """Return this object, the same in every epoch."""
        return self

    def at(self, positions: Positions) -> Positions:
        """Return `positions`."""
        return positions


class FullShuffle(Order):
    """A permutation of all samples or, if clips are grouped, of all groups of clips."""

    name = "full"
    mixes = True
    keeps_clips = True

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> EpochOrder:
        """Return the permutation of an epoch."""
        if samples.clip_grouping is None:
            return epoch_permutation(n, seed=seed, epoch=epoch)
        return ClipGroupEpochOrder(samples.clip_grouping.groups(n), seed=seed, epoch=epoch)

    def arrange_round(self, samples: Samples, n: int, key: int, source: int) -> EpochOrder:
        """Return the permutation of a round."""
        if samples.clip_grouping is None:
            return Permutation(n, key)
        return ClipGroupEpochOrder(samples.clip_grouping.groups(n, source), seed=key, epoch=0)

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, prefix: str) -> int:
        """Raise InvalidArgument: every batch would need samples from all shards."""
        raise InvalidArgument(
            f"{prefix}: with a full shuffle every batch needs samples from the whole dataset, "
            f"which would be downloaded again and again: {CACHE_HINT}"
        )
