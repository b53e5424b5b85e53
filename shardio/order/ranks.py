"""The positions of each rank in an epoch, and the rank that a launcher has given this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from shardio.errors import InvalidArgument
from shardio.order.permutation import Positions
from shardio.order.sampling import check_count

Tail = Literal["short", "drop", "pad"]


@dataclass(frozen=True, slots=True)
class RankPartition:
    """The positions that one rank visits among the positions first..n-1 of an epoch.

    In each step, rank 0 visits `batch_size` consecutive positions, rank 1 the next `batch_size`
    positions, and so on. All ranks together visit each position once, in order, except positions
    that `tail` drops.

    Args:
        n: the number of positions of the epoch.
        first: the first position that has not been visited yet.
        batch_size: the number of samples per step and rank.
        tail: the use of the last positions if they are too few for a step. "short": they are
            divided among the ranks, in parts whose sizes differ by at most one; a rank that gets no
            position has one step fewer. "drop": no rank visits them. "pad": they form a step of all
            ranks, which is filled up with padding.
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
        start, stop = self._own_range_of_rest(self.n - rest)
        return last + (1 if self.tail == "pad" or stop > start else 0)

    def position(self, step: int) -> int:
        """Return the first position that any rank visits in a step."""
        return min(self.n, self.first + (step - self.first_step) * self._stride)

    def _own_range_of_rest(self, start: int) -> tuple[int, int]:
        rest, n = self.n - start, self.world_size
        return start + rest * self.rank // n, start + rest * (self.rank + 1) // n

    def own_range(self, step: int) -> tuple[int, int]:
        """Return the start and the end of this rank's positions in a step.

        Both are equal if the rank has no position.
        """
        start = self.first + (step - self.first_step) * self._stride
        if start + self._stride > self.n:
            return self._own_range_of_rest(start)
        start += self.rank * self.batch_size
        return start, start + self.batch_size

    def n_samples(self, step: int) -> int:
        """Return the number of this rank's samples in the steps before `step`."""
        if step <= self.first_step:
            return 0
        start, stop = self.own_range(step - 1)
        return (step - 1 - self.first_step) * self.batch_size + stop - start

    def read_range(self, step: int) -> tuple[int, int]:
        """Return the start and the end of the positions that this rank reads for a step.

        If `own_range` is empty, the rank reads the first position of the step, whose sample is
        copied as padding.
        """
        start, stop = self.own_range(step)
        return (start, stop) if start < stop else (self.position(step), self.position(step) + 1)

    def positions(self, first_step: int, stop_step: int, every: int = 1) -> Positions:
        """Return the positions that this rank reads in range(first_step, stop_step, every)."""
        # All steps are complete, except that the last step may be shorter.
        n_whole = (stop_step - 1 - first_step) // every
        start, stop = self.read_range(first_step + n_whole * every)
        if self.world_size == every == 1:
            return np.arange(self.read_range(first_step)[0], stop)
        starts = self.read_range(first_step)[0] + np.arange(n_whole) * (self._stride * every)
        whole = (starts[:, None] + np.arange(self.batch_size)).reshape(-1)
        return np.concatenate([whole, np.arange(start, stop)])


_SLURM: Final = "SLURM_PROCID"
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    # SLURM_NTASKS is not used, because it is also set in a batch script, which is one process.
    (_SLURM, "SLURM_STEP_NUM_TASKS"),
)
_MAX_RANKS: Final = 1 << 24


def check_rank(rank: Any, world_size: Any) -> tuple[int, int]:
    """Return the rank and the number of ranks, by default from the environment; check both."""
    if (rank is None) != (world_size is None):
        raise InvalidArgument(
            f"rank and world_size belong together; found rank={rank!r}, world_size={world_size!r}"
        )
    where = "rank"
    if rank is None:
        where, rank, world_size = rank_from_environment()
    n = check_count("world_size", world_size, 1, _MAX_RANKS)
    if check_count("rank", rank, 0) >= n:
        raise InvalidArgument(f"{where} must be below world_size, which is {n}; found {rank}")
    return int(rank), n


def rank_from_environment() -> tuple[str, int, int]:
    """Return the name of the rank's environment variable, the rank, and the number of ranks.

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
                f"the environment has {name}={texts[0]!r} and {of_size}={texts[1]!r}; both "
                "must be numbers: set both or neither, or pass rank and world_size"
            ) from None
        if rank < 0 or world_size < 1:
            raise InvalidArgument(
                f"the environment has {name}={rank} and {of_size}={world_size}; pass rank and "
                "world_size if they are not meant for this program"
            )
        return name, rank, world_size
    return "rank", 0, 1
