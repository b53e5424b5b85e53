"""Orders: the sample at each position of an epoch, and the positions of each rank.

A loader's options choose an `Order` from `sampling.ORDERS`; `Order.arrange` returns the `Ordering`
of one epoch. `RankPartition` divides the positions among steps and ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, Self

import numpy as np

from shardio.errors import InvalidArgument
from shardio.order.clip_groups import ClipGrouping, ClipGroupOrdering
from shardio.order.permutation import Permutation, Positions, epoch_permutation

CACHE_HINT: Final = "raise cache_bytes, or take shuffle='shards'"


class Ordering(Protocol):
    """The samples of one epoch, by position."""

    def at(self, positions: Positions) -> Positions:
        """Return the index of the sample at each of `positions`, in any order.

        The result is of int64, and must not be written to.
        """


@dataclass(frozen=True, slots=True)
class Samples:
    """The facts that orders need about the n samples of a dataset or view.

    `shard_ends` returns the cumulative sample counts of the shards, `why_unsharded` the reason why
    the samples are not in their order, and `measure` the size in bytes and the samples of all
    shards.
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
    """An order of the samples of an epoch, with its parameters; sent to the workers.

    Subclasses must be frozen dataclasses, because orders are compared by value.
    """

    name: ClassVar[bool | str]
    """The value of the option `shuffle`, also in a loader's state."""
    needs_shards: ClassVar[bool] = False
    """True if the order requires that the samples are in the order of the shards."""
    mixes: ClassVar[bool] = False
    """True if the sources of a mixture can have this order, by `arrange_round` unless sequential.
    """
    keeps_clips: ClassVar[bool] = False
    """True if the clips of a group (see `clip_groups`) get neighbouring positions."""

    @classmethod
    def check(cls, samples: Samples) -> None:
        """Raise InvalidArgument if this order cannot be used; the message names one that can."""
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
        """Return an order with parameters for the current samples."""
        return cls()

    def n_positions(self, samples: Samples) -> int:
        """Return the number of positions of an epoch."""
        return samples.n

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> Ordering:
        """Return the order of one epoch of n positions.

        It depends only on `self` and the arguments.
        """
        raise NotImplementedError

    def arrange_round(self, samples: Samples, n: int, key: int, source: int) -> Ordering:
        """Return an order of the n samples of a mixture's source, each once.

        `key` is that of the round.
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
        """The length of a range of positions whose samples are in few regions, or None."""
        return None

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, room: str) -> int:
        """Return the total size of shards in use at once, or 0 if the order does not determine it.

        Called if the dataset is larger than the cache. Raises InvalidArgument, or warns, if shards
        would be downloaded again and again; the message begins with `room`.
        """
        return 0


class Sequential(Order):
    """The order in which the dataset stores its samples."""

    name = False
    mixes = True
    is_sequential = True

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> Ordering:
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

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> Ordering:
        """Return the permutation of an epoch."""
        if samples.clip_grouping is None:
            return epoch_permutation(n, seed=seed, epoch=epoch)
        return ClipGroupOrdering(samples.clip_grouping.groups(n), seed=seed, epoch=epoch)

    def arrange_round(self, samples: Samples, n: int, key: int, source: int) -> Ordering:
        """Return the permutation of a round."""
        if samples.clip_grouping is None:
            return Permutation(n, key)
        return ClipGroupOrdering(samples.clip_grouping.groups(n, source), seed=key, epoch=0)

    def check_cache(self, shard_bytes: Positions, cache_bytes: int, room: str) -> int:
        """Raise InvalidArgument: every batch would need samples from all shards."""
        raise InvalidArgument(
            f"{room}: with a full shuffle every batch needs samples from the whole dataset, which "
            f"would be downloaded again and again: {CACHE_HINT}"
        )


Tail = Literal["short", "drop", "pad"]


@dataclass(frozen=True, slots=True)
class RankPartition:
    """The positions that one rank visits among the positions first..n-1 of an epoch.

    A step has `batch_size` consecutive positions for rank 0, the same number for rank 1, and so on.
    All ranks together visit each position once, in order.

    Args:
        n: the number of positions of the epoch.
        first: the first position that has not been visited yet.
        batch_size: the number of samples per step and rank.
        tail: the use of the positions that are left. "short": they are divided, with counts that
            differ by at most one; a rank that gets none has one step less. "drop": no rank visits
            them. "pad": a step of all ranks, whose batches are filled up with padding.
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
        """The index of the first step."""
        return self.first // self._stride

    @property
    def stop_step(self) -> int:
        """The index of the last step, plus 1."""
        whole, rest = divmod(max(0, self.n - self.first), self._stride)
        last = self.first_step + whole
        if not rest or self.tail == "drop":
            return last
        start, stop = self._part_of_rest(self.n - rest)
        return last + (1 if self.tail == "pad" or stop > start else 0)

    def position(self, step: int) -> int:
        """Return the first position of all ranks in a step."""
        return min(self.n, self.first + (step - self.first_step) * self._stride)

    def _part_of_rest(self, start: int) -> tuple[int, int]:
        rest, n = self.n - start, self.world_size
        return start + rest * self.rank // n, start + rest * (self.rank + 1) // n

    def share(self, step: int) -> tuple[int, int]:
        """Return the start and the end of this rank's positions in a step; equal for padding."""
        start = self.first + (step - self.first_step) * self._stride
        if start + self._stride > self.n:
            return self._part_of_rest(start)
        start += self.rank * self.batch_size
        return start, start + self.batch_size

    def n_samples(self, step: int) -> int:
        """Return the number of this rank's samples in the steps before `step`."""
        if step <= self.first_step:
            return 0
        start, stop = self.share(step - 1)
        return (step - 1 - self.first_step) * self.batch_size + stop - start

    def read(self, step: int) -> tuple[int, int]:
        """Return the start and the end of the positions that this rank reads for a step.

        If `share` is empty, it reads one position, whose sample it copies as padding.
        """
        start, stop = self.share(step)
        return (start, stop) if start < stop else (self.position(step), self.position(step) + 1)

    def positions(self, first_step: int, stop_step: int, every: int = 1) -> Positions:
        """Return the positions that this rank reads for every `every`-th step below stop_step."""
        # All steps are complete, except that the last step may be shorter.
        n_whole = (stop_step - 1 - first_step) // every
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
    # SLURM_NTASKS is not used, because it is also set in a batch script, which is one process.
    (_SLURM, "SLURM_STEP_NUM_TASKS"),
)


def rank_from_environment() -> tuple[str, int, int]:
    """Return the environment variable that has the rank, the rank, and the number of ranks.

    Return ("rank", 0, 1) if no launcher has set such a variable.
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
