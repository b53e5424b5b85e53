"""Divide the positions of an epoch among steps and ranks. Pure arithmetic.

Loaders use this module to count steps and report progress, and workers to find the positions of a
step. The rank of the process is read from the environment variables that launchers set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from shardio.errors import InvalidArgument
from shardio.order.permutation import Positions

Tail = Literal["short", "drop", "pad"]


@dataclass(frozen=True, slots=True)
class RankPartition:
    """The part of the positions first..n-1 of an epoch that belongs to one rank.

    A step has `batch_size` consecutive positions for each rank, starting with rank 0. The remainder
    at the end of the epoch is divided evenly: the shares of two ranks differ by at most one
    position. Together, the ranks visit every position once, in order, except the remainder if
    `tail` is "drop".

    Args:
        n: the number of positions of the epoch.
        first: the first position still to be visited.
        batch_size: the number of samples per step and rank.
        rank, world_size: the rank, and the number of ranks.
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
        """Return the first position of a step over all ranks.

        Earlier steps visit all positions before this one.
        """
        return min(self.n, self.first + (step - self.first_step) * self._stride)

    def _part_of_rest(self, start: int) -> tuple[int, int]:
        rest, n = self.n - start, self.world_size
        return start + rest * self.rank // n, start + rest * (self.rank + 1) // n

    def share(self, step: int) -> tuple[int, int]:
        """Return the start and the end of this rank's positions in a step.

        Start and end are equal if this rank has only padding in the step.
        """
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
        """Return the positions read for steps first_step..last_step-1, concatenated.

        With `every=k`, read only every k-th step, starting with the first.
        """
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
