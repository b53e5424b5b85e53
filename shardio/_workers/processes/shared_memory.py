"""Memory files, in large pages if the kernel supports them, and arrays that all workers map.

Allocating pages of 2 MiB takes a seventh of the time of pages of 4 KiB, and copies are faster, too.
Linux 6.1 and later turns small pages into large pages on request (`MADV_COLLAPSE`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import os
import pickle
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from shardio._base.classes import undo_on_error
from shardio._base.statistics import now_ns
from shardio._workers.processes.limits import available_bytes, require
from shardio._workers.processes.linux import memory_file, translate_file_size_errors
from shardio.errors import InsufficientMemory
from shardio.storage.file_access import replace_map

LARGE_BYTES: Final = 2 << 20  # the size of a large page if small pages have 4 KiB
# The bytes per MADV_COLLAPSE. Each call interrupts all CPUs, so few calls are made.
_STEP_BYTES: Final = 16 * LARGE_BYTES
# If a large page takes more than _MAX_NS, because memory is fragmented, no more are requested.
# A large page usually takes 0.2 ms; small pages for the same memory take 2 ms.
_MAX_NS: Final = 10_000_000

_MAP_NORESERVE: Final = 0x4000
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_F_ADD_SEALS: Final = 1033
_F_SEAL_SHRINK: Final = 2


class _KernelSupport:
    """The state of this process's requests for large pages."""

    is_enabled = True  # False once the kernel has refused a request, or has taken too long


def take_large_pages(fd: int, n_bytes: int) -> None:
    """Allocate the first n_bytes of an empty memory file in large pages, if the kernel has any."""
    n_large = n_bytes // LARGE_BYTES * LARGE_BYTES
    if not (n_large and _KernelSupport.is_enabled):
        return
    try:
        # Create a page in each range: the kernel collapses only ranges that have a page.
        for start in range(0, n_large, LARGE_BYTES):
            os.pwrite(fd, b"\0", start)
        memory, first = _map_aligned(fd, n_large)
        for start in range(0, n_large, _STEP_BYTES):
            n_here = min(_STEP_BYTES, n_large - start)
            begin_ns = now_ns()
            memory.madvise(_MADV_COLLAPSE, first + start, n_here)
            if (now_ns() - begin_ns) * LARGE_BYTES > _MAX_NS * n_here:
                _KernelSupport.is_enabled = False
                return
    except (OSError, InsufficientMemory):
        _KernelSupport.is_enabled = False


def map_whole(fd: int, n_bytes: int, n_backed: int) -> tuple[mmap.mmap, int]:
    """Map a memory file; return the map, and the offset in the map at which the file starts.

    The pages of the first `n_backed` bytes are mapped at once. If the address space has room, a
    file of LARGE_BYTES or more starts at a multiple of LARGE_BYTES, as large pages require.
    """
    try:
        memory, first = _map_aligned(fd, n_bytes) if n_bytes >= LARGE_BYTES else _map_plain(fd)
    except (OSError, InsufficientMemory):
        memory, first = _map_plain(fd)
    with contextlib.suppress(OSError):  # before Linux 5.14, pages are mapped one by one on access
        if n_backed:
            memory.madvise(_MADV_POPULATE_WRITE, first, n_backed)
    return memory, first


def _map_plain(fd: int) -> tuple[mmap.mmap, int]:
    return mmap.mmap(fd, 0), 0


def _map_aligned(fd: int, n_bytes: int) -> tuple[mmap.mmap, int]:
    """Map a file at a multiple of LARGE_BYTES, over a part of a larger anonymous map.

    Return the map, and the file's offset in it; Python's mmap cannot choose the address.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, n_bytes + LARGE_BYTES, flags)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = -address % LARGE_BYTES
    replace_map(address + first, n_bytes, fd)
    return memory, first


def reserve_memory_file(n_bytes: int, what: str) -> int:
    """Create a memory file of n_bytes for `what`, all allocated; the caller owns the descriptor.

    The file is sealed against shrinking: no process can remove pages that another has mapped.
    """
    # Check first: the kernel kills a process that exceeds the memory limit of its control group.
    require(n_bytes, what)
    with _new_memory_file(n_bytes, what) as fd:
        take_large_pages(fd, n_bytes)
        with translate_memory_errors(n_bytes, what):
            os.posix_fallocate(fd, 0, n_bytes)
    return fd


@contextlib.contextmanager
def _new_memory_file(n_bytes: int, what: str) -> Iterator[int]:
    """Yield a new memory file; then seal it against shrinking, or close it after an exception."""
    fd = memory_file()
    with undo_on_error(os.close, fd):
        with translate_file_size_errors(n_bytes, what):
            os.ftruncate(fd, n_bytes)
        yield fd
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)


@contextlib.contextmanager
def translate_memory_errors(n_bytes: int, what: str) -> Iterator[None]:
    """Raise InsufficientMemory if the kernel refuses n_bytes for `what` in the `with` block."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC):
            raise
        raise InsufficientMemory(
            f"the kernel refused {n_bytes} bytes for {what}, although {available_bytes()} seemed "
            f"to be available: {error.strerror}"
        ) from error


_MAX_RESERVED: Final = 64 << 20  # a larger file of marks takes memory only where marks are set


def sparse_memory_file(n_bytes: int, what: str) -> int:
    """Create a memory file, owned by the caller, whose pages take memory when they are touched."""
    with _new_memory_file(n_bytes, what) as fd:
        return fd


def create_marks_file(n_marks: int) -> int:
    """Create a memory file with a mark, one byte, for each hashed unit of a dataset.

    The mark of a unit is set when the unit is verified.
    """
    create = reserve_memory_file if n_marks <= _MAX_RESERVED else sparse_memory_file
    return create(max(1, n_marks), "the marks of verified units")


class SharedArray:
    """An array in a memory file, written by the main process and mapped by every worker."""

    def __init__(self, fd: int, array: npt.NDArray[Any]) -> None:
        self.fd, self.array = fd, array
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def from_array(cls, numbers: npt.NDArray[Any], what: str) -> Self:
        """Create a shared copy of `numbers`; `what` is the name of the array in errors."""
        fd = reserve_memory_file(max(1, numbers.nbytes), what)
        with undo_on_error(os.close, fd):
            written = _mapped(fd, numbers.dtype, len(numbers), mmap.ACCESS_WRITE)
            written[:] = numbers
            return cls(fd, _mapped(fd, numbers.dtype, len(numbers), mmap.ACCESS_READ))

    @classmethod
    def from_fd(cls, fd: int, dtype: str, n: int) -> Self:
        """Map an array that another process has created; take ownership of the descriptor `fd`."""
        return cls(fd, _mapped(fd, np.dtype(dtype), n, mmap.ACCESS_READ))


class _SharingPickler(pickle.Pickler):
    """A pickler that leaves the content of shared arrays out, and lists them in `arrays`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.arrays: list[SharedArray] = []

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        """Return the dtype and length of a shared array, else None."""
        if not isinstance(value, SharedArray):
            return None
        self.arrays.append(value)
        return value.array.dtype.str, len(value.array)


class _SharingUnpickler(pickle.Unpickler):
    def __init__(self, message: bytes, fds: Sequence[int]) -> None:
        super().__init__(io.BytesIO(message))
        self._fds = iter(fds)

    def persistent_load(self, shape: tuple[str, int]) -> SharedArray:
        """Map the next shared array; `shape` is its dtype and its length."""
        return SharedArray.from_fd(next(self._fds), *shape)


def pack_shared(value: Any) -> tuple[bytes, list[int]]:
    """Return a message that contains a value, and the descriptors that its shared arrays own."""
    pickler = _SharingPickler(file := io.BytesIO())
    pickler.dump(value)
    return file.getvalue(), [array.fd for array in pickler.arrays]


def unpack_shared(message: bytes, fds: Sequence[int]) -> Any:
    """Restore a value that `pack_shared` has packed; its shared arrays take over `fds`."""
    return _SharingUnpickler(message, fds).load()


def _mapped(fd: int, dtype: np.dtype[Any], n: int, access: int) -> npt.NDArray[Any]:
    whole = mmap.mmap(fd, 0, access=access)
    return np.frombuffer(whole, dtype, n)
