"""Where workers are: files in which each says what step it is at, and writes its stacks."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from shardio._base.closing import Closing
from shardio._workers.processes.linux import memory_file
from shardio._workers.processes.overdue import stack_files

Steps = npt.NDArray[np.uint64]


class Whereabouts(Closing):
    """Owns the files of all workers, from `open` on."""

    def __init__(self) -> None:
        self.stacks: list[int] = []
        """The file of each worker for its stacks."""
        self._fds = list[int]()
        self._steps: Steps = np.zeros(0, np.uint64)

    def open(self, n_workers: int) -> int:
        """Make the files; gives the one of all steps, for `map_steps`, which stays this one's."""
        self.stacks.extend(stack_files(n_workers))
        self._fds.append(memory_file(bytes(8 * n_workers)))
        self._steps = map_steps(self._fds[0])
        return self._fds[0]

    def of(self, worker: int) -> int | None:
        """The step that a worker is at, or has died at; None if it is at none."""
        step = int(self._steps[worker]) - 1
        return None if step < 0 else step

    def take_step(self, worker: int) -> int | None:
        """The step that a worker has died at, or None; another in its place is at none."""
        step = self.of(worker)
        self._steps[worker] = 0
        return step

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._steps = self._steps.copy()  # a map is a file, too
        for fds in (self.stacks, self._fds):
            while fds:
                os.close(fds.pop())


def map_steps(fd: int) -> Steps:
    """A word for each worker: the step that it is at and 1, or 0."""
    return np.frombuffer(mmap.mmap(fd, 0), np.uint64)
