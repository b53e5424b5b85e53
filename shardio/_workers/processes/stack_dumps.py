"""Reports of workers: the step and place each is at, and Python stacks when a batch times out.

On a signal, a worker writes the stacks of its threads to a file that it shares with the main
process. C code does this, so it works wherever the worker's Python code hangs.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing
from shardio._workers.processes.linux import memory_file
from shardio._workers.processes.zygote import ASK_FOR_STACKS
from shardio.errors import BatchTimeout

Steps = npt.NDArray[np.uint64]


class StepFiles(Closing):
    """The step and stack files of all workers, owned from `open` until `close`."""

    def __init__(self) -> None:
        self.stacks: list[int] = []
        """The file for the stacks of each worker."""
        self._fds = list[int]()
        self._steps: Steps = np.zeros((0, 2), np.uint64)

    def open(self, n_workers: int) -> int:
        """Create the files; return the file of all steps, for `map_steps`. This object owns it."""
        self.stacks.extend(stack_files(n_workers))
        self._fds.append(memory_file(bytes(16 * n_workers)))
        self._steps = map_steps(self._fds[0])
        return self._fds[0]

    def of(self, worker: int) -> int | None:
        """Return the step that a worker is at, or was at when it exited; None if none."""
        step = int(self._steps[worker, 0]) - 1
        return None if step < 0 else step

    def take(self, worker: int) -> tuple[int | None, int | None]:
        """Return and clear the step that a worker exited at, and the place in it; None if none."""
        step, place = self.of(worker), int(self._steps[worker, 1]) - 1
        self._steps[worker] = 0
        return step, None if place < 0 else place

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._steps = self._steps.copy()  # a map would keep the file open
        for fds in (self.stacks, self._fds):
            while fds:
                os.close(fds.pop())


def map_steps(fd: int) -> Steps:
    """Map two words per worker: the step that it is at plus 1, or 0; the place likewise."""
    return np.frombuffer(mmap.mmap(fd, 0), np.uint64).reshape(-1, 2)


_PATIENCE_S: Final = 1.0
_QUIET_S: Final = 0.02
"""A stack is complete if it has not grown for this long."""
_OURS: Final = str(Path(__file__).parents[2] / "_")
"""A part of the path of every file between the start of a process and the user's code."""


def stack_files(n_workers: int) -> Iterator[int]:
    """Create the file of each worker, one by one; the caller owns the descriptors."""
    return (memory_file() for _ in range(n_workers))


def answer_with_stacks(fd: int) -> None:
    """Make this process write its stacks to `fd` when it receives ASK_FOR_STACKS."""
    faulthandler.register(ASK_FOR_STACKS, fd, all_threads=True, chain=False)


def timeout_error(
    what: str,
    path: str,
    timeout_s: float | None,
    workers: Sequence[tuple[str, str]],
    tasks_of: Callable[[int], list[str]],
) -> BatchTimeout:
    """Return the error for a timeout, with the activity of every worker.

    Args:
        what: the name of what did not arrive.
        path: the path of the dataset.
        timeout_s: the time that the loop waited.
        workers: the name and the stacks of each worker.
        tasks_of: describes the unanswered tasks of a worker, given its number.
    """
    first = f"{what} of {path} did not come within {timeout_s:g} s"
    return BatchTimeout("\n".join([first, *describe_workers(workers, tasks_of)]))


def describe_workers(
    workers: Sequence[tuple[str, str]], tasks_of: Callable[[int], list[str]]
) -> list[str]:
    """Return lines that describe the activity of every worker; arguments as in `timeout_error`."""
    lines = []
    for worker, (who, stacks) in enumerate(workers):
        tasks = "; ".join(tasks_of(worker)) or "without a task"
        lines += [f"{who}, {tasks}:", indent(stacks, "    ")]
    return lines


def ask_for_stacks(fds: Sequence[int], send: Callable[[int, int], bool]) -> list[str]:
    """Return the stacks of all workers, innermost frame first, down to the first frame of shardio.

    All workers are asked at the same time, and must answer within `_PATIENCE_S`.

    Args:
        fds: the file that each worker writes to.
        send: sends a signal to a worker by number; returns False if there is no process.
    """
    for fd in fds:  # the offset at which the worker writes is shared, too
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
    before = _sizes(fds)
    is_asked = [send(worker, ASK_FOR_STACKS) for worker in range(len(fds))]
    sizes, since_s = before, time.monotonic()
    end_s = since_s + _PATIENCE_S
    while (now_s := time.monotonic()) < end_s:
        if (found := _sizes(fds)) != sizes:
            sizes, since_s = found, now_s
        n_silent = sum(
            asked and size == old for asked, size, old in zip(is_asked, sizes, before, strict=True)
        )
        if not n_silent and now_s - since_s > _QUIET_S:
            break
        time.sleep(0.002)
    return [
        _said(fd, start, stop) if asked else "it is being started"
        for fd, start, stop, asked in zip(fds, before, sizes, is_asked, strict=True)
    ]


def _sizes(fds: Sequence[int]) -> list[int]:
    return [os.fstat(fd).st_size for fd in fds]


def _said(fd: int, start: int, stop: int) -> str:
    if start == stop:
        return f"it did not report within {_PATIENCE_S:g} s what it is doing"
    return shortened(os.pread(fd, stop - start, start).decode("utf-8", "replace"))


def shortened(text: str) -> str:
    """Return stacks without the frames of shardio below the user's code, for each thread."""
    kept: list[str] = []
    is_ours = False
    for line in text.splitlines():
        if not line.startswith(" "):  # the next thread begins
            is_ours = False
        is_ours = is_ours or (_OURS in line and bool(kept) and kept[-1].startswith(" "))
        if line.strip() and not is_ours:
            kept.append(line)
    return "\n".join(kept)
