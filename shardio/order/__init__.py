"""Orders: the sample at each position of an epoch, and the positions of each rank.

The options of a loader choose an `Order`. An order has parameters and a state, checks whether it
applies to a dataset, and answers questions of read-ahead and caches. `Sequential` and `FullShuffle`
are in this module, shuffles of blocks and shards in `shuffle`, draws in `sampling`, and orders of
several datasets in `mixture_order`; the registry is `sampling.ORDERS`. `permutation` and
`clip_groups` compute the samples at given positions; `RankPartition` divides the positions among
steps and ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, Self

import numpy as np

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
    """The facts about a dataset's n samples that orders need.

    `shard_ends` returns the cumulative sum of the shards' sample counts. `why_unsharded` returns
    the reason why the samples are not in the order of the shards, or None. `measure` returns the
    size in bytes and the sample count of all shards together.
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
    """An order of an epoch's samples, with its parameters. Immutable; sent to the workers.

    Subclasses must be frozen too, because orders are compared by value.
    """

    name: ClassVar[bool | str]
    """The value of `shuffle` that chooses this order; also in a loader's state."""
    needs_shards: ClassVar[bool] = False
    """True if the samples must be in the order of the shards."""
    mixes: ClassVar[bool] = False
    """True if the order implements `arrange_round`, for the sources of a mixture."""
    keeps_clips: ClassVar[bool] = False
    """True if the clips of a group stay together (see `clip_groups`)."""

    @classmethod
    def check(cls, samples: Samples) -> None:
        """Check that this order applies to the samples.

        Raises:
            InvalidArgument: the order does not apply; the message names one that does.
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
        """Return the order, with parameters derived from the current samples."""
        return cls()

    def n_positions(self, samples: Samples) -> int:
        """Return the number of positions of an epoch over the current samples."""
        return samples.n

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> Ordering:
        """Return the samples of an epoch of n positions; a pure function of the arguments."""
        raise NotImplementedError

    def arrange_round(self, samples: Samples, n: int, key: int, source: int) -> Ordering:
        """Return the order of one round over the n samples of a mixture's source."""
        raise NotImplementedError

    def identity(self, samples: Samples) -> dict[str, Any]:
        """Return the options that determine the samples of an epoch, for a loader's state.

        The options include `rows` if an epoch has a fixed number of samples.
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
        """The number of positions per window, if each window reads few regions; else None."""
        return None

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, room: str) -> int:
        """Return the number of bytes that are read from at a time.

        Called only if the dataset is larger than the cache.

        Args:
            shard_bytes: the size of each shard.
            cache_bytes: the size of the cache.
            room: the beginning of the message: the sizes of the dataset and the cache.

        Raises:
            InvalidArgument: data would be downloaded repeatedly. Some orders only warn.
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
        """Raise InvalidArgument: every batch would need samples that are not in the cache."""
        raise InvalidArgument(
            f"{room}: with a full shuffle every batch needs samples from the whole dataset, which "
            f"would be downloaded again and again: {CACHE_HINT}"
        )


Tail = Literal["short", "drop", "pad"]


@dataclass(frozen=True, slots=True)
class RankPartition:
    """The part of the positions first..n-1 of an epoch that belongs to one rank.

    A step has `batch_size` consecutive positions for each rank, starting with rank 0. The remainder
    at the end of the epoch is divided evenly: the shares of two ranks differ by at most one
    position. Together, the ranks visit every position once, in order, except the remainder if
    `tail` is "drop".

    Args:
        first: the first position still to be visited.
        batch_size: the number of samples per step and rank.
        tail: "short": the last step has the remainder; ranks without a position of the remainder
            have one step less. "drop": there is no step for the remainder. "pad": all ranks have
            this step, filled up with padding.
    """

    n: int
    first: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    tail: Tail = "short"

    @property
    def _stride(self) -> int:
        return self.batch_size * self.world_size

    @property
    def first_step(self) -> int:
        """The index of the first step: the number of whole steps before position `first`."""
        return self.first // self._stride

    @property
    def last_step(self) -> int:
        """The index of the last step plus 1."""
        whole, rest = divmod(max(0, self.n - self.first), self._stride)
        last = self.first_step + whole
        if not rest or self.tail == "drop":
            return last
        start, stop = self._part_of_rest(self.n - rest)
        return last + (1 if self.tail == "pad" or stop > start else 0)

    def position(self, step: int) -> int:
        """Return the first position of a step over all ranks."""
        return min(self.n, self.first + (step - self.first_step) * self._stride)

    def _part_of_rest(self, start: int) -> tuple[int, int]:
        rest, n = self.n - start, self.world_size
        return start + rest * self.rank // n, start + rest * (self.rank + 1) // n

    def share(self, step: int) -> tuple[int, int]:
        """Return start and end of this rank's positions in a step; equal for only padding."""
        start = self.first + (step - self.first_step) * self._stride
        if start + self._stride > self.n:
            return self._part_of_rest(start)
        start += self.rank * self.batch_size
        return start, start + self.batch_size

    def n_samples(self, step: int) -> int:
        """Return the number of samples of this rank in the steps before `step`."""
        if step <= self.first_step:
            return 0
        start, stop = self.share(step - 1)
        return (step - 1 - self.first_step) * self.batch_size + stop - start

    def read(self, step: int) -> tuple[int, int]:
        """Return the positions read for a step: the rank's share; if it is empty, one position."""
        start, stop = self.share(step)
        return (start, stop) if start < stop else (self.position(step), self.position(step) + 1)

    def positions(self, first_step: int, last_step: int, every: int = 1) -> Positions:
        """Return the positions read for steps first_step, first_step + every, … below last_step."""
        n_whole = (last_step - 1 - first_step) // every  # and one more step after these
        start, stop = self.read(first_step + n_whole * every)
        if self.world_size == every == 1:
            return np.arange(self.read(first_step)[0], stop)
        starts = self.read(first_step)[0] + np.arange(n_whole) * (self._stride * every)
        whole = (starts[:, None] + np.arange(self.batch_size)).reshape(-1)
        return np.concatenate([whole, np.arange(start, stop)])


_SLURM: Final = "SLURM_PROCID"
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    # SLURM_NTASKS is unsuitable: it is also set in a batch script, which runs as one process.
    (_SLURM, "SLURM_STEP_NUM_TASKS"),
)
"""The variables in which launchers set the rank of a process and the number of ranks."""


def rank_from_environment() -> tuple[str, int, int]:
    """Return the environment variable that gives the rank, the rank, and the number of ranks.

    Without any such variable, this process is the only one.

    Raises:
        InvalidArgument: the variables are not valid.
    """
    for name, of_size in _LAUNCHERS:
        texts = os.environ.get(name), os.environ.get(of_size)
        if texts == (None, None) or (texts[1] is None and name == _SLURM):
            continue
        try:
            rank, world_size = (int(text or "") for text in texts)
        except ValueError:
            raise InvalidArgument(
                f"the environment has {name}={texts[0]!r} and {of_size}={texts[1]!r}, which both "
                "must be numbers: set both or none, or pass rank and world_size"
            ) from None
        if rank < 0 or world_size < 1:
            raise InvalidArgument(
                f"the environment has {name}={rank} and {of_size}={world_size}; pass rank and "
                "world_size if they are not meant for this program"
            )
        return name, rank, world_size
    return "rank", 0, 1
