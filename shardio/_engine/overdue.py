"""What workers are doing when a batch does not come in time: their Python stacks.

A worker answers a signal from C, whatever its Python code hangs in, by writing the stacks of its
threads into a file that it shares with main.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable
from typing import Final

from shardio._engine.zygote import ASK_FOR_STACKS

_PATIENCE_S: Final = 1.0
_QUIET_S: Final = 0.02
"""A stack that has not grown for so long is whole."""
_OURS: Final = f"{os.sep}_engine{os.sep}"
"""Part of the name of every file that is between a process's start and the user's code."""


def answer_with_stacks(fd: int) -> None:
    """Have this process write its stacks into `fd` when main asks for them."""
    faulthandler.register(ASK_FOR_STACKS, fd, all_threads=True, chain=False)


def ask_for_stacks(fd: int, send: Callable[[int], bool]) -> str:
    """The stacks of a worker, from the innermost frame to its first that is not the user's.

    Args:
        fd: the file that it was given.
        send: sends it a signal of this number; False where there is no process to take it.
    """
    before = os.fstat(fd).st_size
    if not send(ASK_FOR_STACKS):
        return "it is being started"
    end_s = time.monotonic() + _PATIENCE_S
    size, since_s = before, time.monotonic()
    while (now_s := time.monotonic()) < end_s:
        if (found := os.fstat(fd).st_size) != size:
            size, since_s = found, now_s
        elif size > before and now_s - since_s > _QUIET_S:
            break
        time.sleep(0.002)
    if size == before:
        return f"it has not said within {_PATIENCE_S:g} s what it is doing"
    return _shortened(os.pread(fd, size - before, before).decode("utf-8", "replace"))


def _shortened(text: str) -> str:
    """Without the frames that lie under the user's code, thread by thread."""
    kept: list[str] = []
    is_ours = False
    for line in text.splitlines():
        if not line.startswith(" "):  # the next thread
            is_ours = False
        is_ours = is_ours or (_OURS in line and bool(kept) and kept[-1].startswith(" "))
        if line.strip() and not is_ours:
            kept.append(line)
    return "\n".join(kept)
