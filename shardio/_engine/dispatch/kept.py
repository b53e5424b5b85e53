"""Answers that a worker holds back for a moment, where main finds them if it dies meanwhile.

What it had done by then is not done again: perhaps it could not be, if the file that killed the
worker is too short to be opened anew.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

from shardio._workers.processes.channel import DESCRIPTOR_BYTES
from shardio._workers.processes.linux import memory_file, resize_memory_file

_COUNT: Final = 0
_ROOM: Final = mmap.PAGESIZE // DESCRIPTOR_BYTES - 1


def kept_file(n_workers: int) -> int:
    """Make the memory for all workers, a page each; the caller owns the descriptor."""
    fd = memory_file()
    try:
        resize_memory_file(fd, max(1, n_workers) * mmap.PAGESIZE, "answers held back")
    except BaseException:
        os.close(fd)
        raise
    return fd


class Kept:
    """The answers that one worker holds back.

    Args:
        memory: the map of what `kept_file` made.
        worker: which of the workers it is.
    """

    def __init__(self, memory: mmap.mmap, worker: int) -> None:
        start = worker * mmap.PAGESIZE
        self._page = memoryview(memory)[start : start + mmap.PAGESIZE]
        self._words = self._page.cast("Q")

    @property
    def is_full(self) -> bool:
        """Whether no other answer has room."""
        return self._words[_COUNT] == _ROOM

    def add(self, answer: bytes) -> None:
        """Hold an answer back that is nothing but a descriptor."""
        n = self._words[_COUNT]
        start = (n + 1) * DESCRIPTOR_BYTES
        self._page[start : start + DESCRIPTOR_BYTES] = answer
        self._words[_COUNT] = n + 1  # last: what is counted is there

    def take(self) -> bytes:
        """All of them, one behind the other; they are not held back any more."""
        n = self._words[_COUNT]
        self._words[_COUNT] = 0  # before they are sent: none is ever found and received
        return bytes(self._page[DESCRIPTOR_BYTES : (n + 1) * DESCRIPTOR_BYTES])
