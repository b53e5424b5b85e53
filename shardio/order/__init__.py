"""Orders: the sample at each position of an epoch.

The options of a loader choose an `Order`. An order knows its parameters, its state, the datasets
for which it can be used, and the answers that read-ahead and caches need. `Sequential` and
`FullShuffle` are in this module, shuffles of blocks and shards in `shuffle`, draws in `sampling`,
and orders of several datasets in `mixture_order`; the registry is `sampling.ORDERS`. `permutation`
and `clip_groups` compute positions, and `partition` divides positions among ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, Self

from shardio.errors import InvalidArgument
from shardio.order.clip_groups import ClipGrouping, ClipGroupOrder
from shardio.order.permutation import Permutation, Positions, epoch_permutation

CACHE_HINT: Final = "raise cache_bytes, or take shuffle='shards'"


class Ordering(Protocol):
    """The samples of one epoch, by position."""

    def at(self, positions: Positions) -> Positions:
        """Return the sample at each of `positions`, which need not be sorted; int64, read-only."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The n samples of a dataset, as far as an order needs to know them.

    `shard_ends` returns the number of samples up to the end of each shard, `why_unsharded` the
    reason why samples are not in the order of shards, or None, and `measure` the bytes of all
    shards and the number of samples that take these bytes.
    """

    path: str
    n: int
    is_mixture: bool
    clip_grouping: ClipGrouping | None
    shard_ends: Callable[[], Positions]
    why_unsharded: Callable[[], str | None]
    measure: Callable[[], tuple[int, int]]


@dataclass(frozen=True)
class Order:
    """An order of an epoch's samples, with its parameters. Immutable; is sent to the workers.

    Subclasses are frozen, too: orders are compared by value.
    """

    name: ClassVar[bool | str]
    """The value of `shuffle` that chooses this order; also in a loader's state."""
    needs_shards: ClassVar[bool] = False
    """True if the samples must be in the order of shards."""
    mixes: ClassVar[bool] = False
    """True if the order can be used for the sources of a mixture, with `arrange_round`."""
    keeps_clips: ClassVar[bool] = False
    """True if the clips of a group stay together."""

    @classmethod
    def check(cls, samples: Samples) -> None:
        """Check that the samples can have this order.

        Raises:
            InvalidArgument: the samples cannot; the message names an order that they can have.
        """
        reason = samples.why_unsharded() if cls.needs_shards else None
        if reason is not None:
            raise InvalidArgument(
                f"{samples.path}: shuffle={cls.name!r} is for samples in the order of their "
                f"shards, and {reason}; or pass shuffle='blocks'"
            )
        if samples.is_mixture and not cls.mixes:
            raise InvalidArgument(
                f"{samples.path}: shuffle={cls.name!r} is for the samples of one dataset, and this "
                "is a mixture of several: pass shuffle=True or 'blocks', or load them one by one"
            )

    @classmethod
    def begin(cls, samples: Samples) -> Self:
        """Return the order for epochs that begin now."""
        return cls()

    def n_positions(self, samples: Samples) -> int:
        """Return the number of positions of an epoch that begins now."""
        return samples.n

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> Ordering:
        """Return the samples of an epoch of n positions; a pure function of the arguments."""
        raise NotImplementedError

    def arrange_round(self, samples: Samples, n: int, key: int, source: int) -> Ordering:
        """Return the n samples of a source of a mixture for one round over them."""
        raise NotImplementedError

    def identity(self, samples: Samples) -> dict[str, Any]:
        """Return the options that determine the samples of an epoch, for a loader's state.

        They include `rows` if the number of samples in an epoch is fixed.
        """
        grouping = samples.clip_grouping if self.keeps_clips else None
        return {"shuffle": self.name, "per_video": None if grouping is None else grouping.k}

    def to_state(self) -> dict[str, Any]:
        """Return the parameters as JSON values, for a loader's state."""
        return {}

    def from_state(self, state: Mapping[str, Any], samples: Samples, n: int) -> Self:
        """Return the order of a resumed epoch of n positions.

        Raises:
            InvalidArgument: the parameters in the state are not valid for the samples.
        """
        return self

    @property
    def is_sequential(self) -> bool:
        """True if samples are read in storage order, which the kernel's read-ahead predicts."""
        return False

    @property
    def window(self) -> int | None:
        """The number of positions per window, each of which reads few places; None: no windows."""
        return None

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, room: str) -> int:
        """Return the number of bytes in use at a time, for a dataset larger than its cache.

        Args:
            shard_bytes: the size of each shard.
            cache_bytes: the size of the cache.
            room: the beginning of the message, which compares the sizes.

        Raises:
            InvalidArgument: data would be downloaded repeatedly. Some orders warn of it instead.
        """
        return 0


class Sequential(Order):
    """The order in which the dataset stores its samples."""

    name = False
    mixes = True
    is_sequential = True

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> Ordering:
        """Return the positions themselves."""
        return self

    def at(self, positions: Positions) -> Positions:
        """Return `positions`."""
        return positions


class FullShuffle(Order):
    """A permutation of all samples, or of all groups of clips."""

    name = "full"
    mixes = True
    keeps_clips = True

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> Ordering:
        """Return the permutation of an epoch."""
        if samples.clip_grouping is None:
            return epoch_permutation(n, seed=seed, epoch=epoch)
        return ClipGroupOrder(samples.clip_grouping.groups(n), seed=seed, epoch=epoch)

    def arrange_round(self, samples: Samples, n: int, key: int, source: int) -> Ordering:
        """Return the permutation of a round."""
        if samples.clip_grouping is None:
            return Permutation(n, key)
        return ClipGroupOrder(samples.clip_grouping.groups(n, source), seed=key, epoch=0)

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, room: str) -> int:
        """Raise InvalidArgument: every batch would need samples that the cache does not hold."""
        raise InvalidArgument(
            f"{room}: with a full shuffle every batch needs samples from the whole dataset, which "
            f"would be downloaded again and again: {CACHE_HINT}"
        )
