"""Reports on workers: the step that each worker is executing, and Python stacks after a timeout.

A step is the index of an item; a part is an index within the item. On a signal, a worker writes
the stacks of its threads to a file that it shares with the main process. The handler is C code, so
it works wherever the Python code hangs.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing
from shardio._workers.processes.linux import memory_file
from shardio._workers.processes.zygote import ASK_FOR_STACKS
from shardio.errors import BatchTimeout

Steps = npt.NDArray[np.uint64]


class StepFiles(Closing):
    """The files to which workers write their steps and stacks; owns them until `close`."""

    def __init__(self) -> None:
        self.stacks: list[int] = []  # for each worker, the descriptor of the file for its stacks
        self._fds = list[int]()
        self._steps: Steps = np.zeros((0, 2), np.uint64)

    def open(self, n_workers: int) -> int:
        """Create the files; return the descriptor of the step file, which this object owns."""
        self.stacks.extend(memory_file() for _ in range(n_workers))
        self._fds.append(memory_file(bytes(16 * n_workers)))
        self._steps = map_steps(self._fds[0])
        return self._fds[0]

    def take(self, worker: int) -> tuple[int | None, int | None]:
        """Return and clear a worker's recorded step and part; None if a number is not recorded."""
        step, part = (int(n) - 1 for n in self._steps[worker])
        self._steps[worker] = 0
        return None if step < 0 else step, None if part < 0 else part

    def close(self) -> None:
        self._steps = self._steps.copy()  # a map would keep the file open
        for fds in (self.stacks, self._fds):
            while fds:
                os.close(fds.pop())


def map_steps(fd: int) -> Steps:
    """Map the step file: for each worker, its current step plus 1 and part plus 1; 0 for none."""
    return np.frombuffer(mmap.mmap(fd, 0), np.uint64).reshape(-1, 2)


_ANSWER_TIMEOUT_S: Final = 1.0
_QUIET_S: Final = 0.02  # if the files have not grown for this time, the stacks are complete
_PRIVATE_PREFIX: Final = str(Path(__file__).parents[2] / "_")  # of the paths of private modules
_THREADING: Final = f'"{threading.__file__}"'


def install_stack_handler(fd: int) -> None:
    """Make this process write its stacks to `fd` when it receives ASK_FOR_STACKS."""
    faulthandler.register(ASK_FOR_STACKS, fd, all_threads=True, chain=False)


def timeout_error(
    what: str,
    path: str,
    timeout_s: float | None,
    workers: Sequence[tuple[str, str]],
    tasks_of: Callable[[int], list[str]],
) -> BatchTimeout:
    """Return the error for a late batch or item, `what`, of the dataset or function `path`.

    `workers` has the name and the stacks of each worker; `tasks_of(i)` describes the unanswered
    tasks of worker i.
    """
    lines = [f"{what} of {path} did not arrive within {timeout_s:g} s"]
    for worker, (who, stacks) in enumerate(workers):
        tasks = "; ".join(tasks_of(worker)) or "without a task"
        lines += [f"{who}, {tasks}:", indent(stacks, "    ")]
    return BatchTimeout("\n".join(lines))


def ask_for_stacks(fds: Sequence[int], send: Callable[[int, int], bool]) -> list[str]:
    """Return the stacks of all workers, innermost frame first, without frames of shardio.

    Worker i writes to the file `fds[i]` within `_ANSWER_TIMEOUT_S`. `send(i, signal)` sends a
    signal to worker i, and returns False if the worker has no process.
    """
    for fd in fds:  # the worker writes at the descriptor's position: reset the position, too
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
    is_asked = [send(worker, ASK_FOR_STACKS) for worker in range(len(fds))]
    sizes, since_s = [0] * len(fds), time.monotonic()
    end_s = since_s + _ANSWER_TIMEOUT_S
    while (now_s := time.monotonic()) < end_s:
        if (found := [os.fstat(fd).st_size for fd in fds]) != sizes:
            sizes, since_s = found, now_s
        are_complete = all(size or not asked for size, asked in zip(sizes, is_asked, strict=True))
        if are_complete and now_s - since_s > _QUIET_S:
            break
        time.sleep(0.002)
    reports = []
    for fd, size, asked in zip(fds, sizes, is_asked, strict=True):
        if not asked:
            reports.append("it is being started")
        elif not size:
            reports.append(f"it did not report within {_ANSWER_TIMEOUT_S:g} s what it is doing")
        else:
            reports.append(without_shardio_frames(os.pread(fd, size, 0).decode("utf-8", "replace")))
    return reports


def thread_stack(frame: FrameType) -> str:
    """Return the stack of a thread of this process, in the form of `ask_for_stacks`."""
    lines = [
        f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}'
        for each, line in traceback.walk_stack(frame)
    ]
    return without_shardio_frames("\n".join(lines))


def without_shardio_frames(text: str) -> str:
    """Return the stack of each thread without the frames of shardio that called the user's code.

    A thread of shardio that waits for an event is left out.
    """
    kept: list[str] = []
    is_own, begin = False, 0
    for line in text.splitlines():
        if not line.startswith(" "):  # the next thread begins
            is_own, begin = False, len(kept)
        if not is_own and _PRIVATE_PREFIX in line and kept and kept[-1].startswith(" "):
            is_own = True
            is_waiting = all(_THREADING in each for each in kept[begin + 1 :])
            if is_waiting and kept[begin].startswith("Thread"):
                del kept[begin:]
        if line.strip() and not is_own:
            kept.append(line)
    return "\n".join(kept)
