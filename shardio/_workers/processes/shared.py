"""An array in one memory file: written by main, mapped by every worker, copied by nobody."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from shardio._workers.processes.blocks import reserve_memory_file, sparse_memory_file

_MOST_RESERVED: Final = 64 << 20
"""Bytes of marks: of more, pages take memory only once something in them has been checked."""


def marks_file(n_marks: int) -> int:
    """A memory file for the marks of a dataset; the caller owns the descriptor.

    Raises:
        InsufficientMemory: there is not that much memory.
    """
    what = "the table of what has been checked"
    if n_marks > _MOST_RESERVED:
        return sparse_memory_file(n_marks, what)
    return reserve_memory_file(max(1, n_marks), what)


class SharedArray:
    """One-dimensional numbers that other processes can map. Immutable.

    `array` is over the memory file; `fd` is the file's, for sending, and goes with this object.
    """

    def __init__(self, fd: int, array: npt.NDArray[Any]) -> None:
        self.fd, self.array = fd, array
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def of(cls, numbers: npt.NDArray[Any], what: str) -> Self:
        """A copy of `numbers` in a memory file of their own.

        Raises:
            InsufficientMemory: there is not that much memory for `what`.
        """
        fd = reserve_memory_file(max(1, numbers.nbytes), what)
        try:
            written = _mapped(fd, numbers.dtype, len(numbers), mmap.ACCESS_WRITE)
            written[:] = numbers
            return cls(fd, _mapped(fd, numbers.dtype, len(numbers), mmap.ACCESS_READ))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def received(cls, fd: int, dtype: str, n: int) -> Self:
        """What another process has made, by a descriptor, which this object then owns."""
        return cls(fd, _mapped(fd, np.dtype(dtype), n, mmap.ACCESS_READ))


def _mapped(fd: int, dtype: np.dtype[Any], n: int, access: int) -> npt.NDArray[Any]:
    whole = mmap.mmap(fd, 0, access=access)
    return np.frombuffer(whole, dtype, n)
