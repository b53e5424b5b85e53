"""Where bytes come from and go to: files of this machine, maps of them, and spools.

Used by `reader` (one file, one map), `column_range` (one column of many files, in one reserved
address range) and `writer` (sections that wait for their place). Nothing above these opens or maps
a shard; `access/` does where it is not mapped.

What of a file lies in memory already, and what the kernel is to read before it is needed.

All of it is about files, not about maps: a page that a file has in memory is there for every
process, whether it maps the file or reads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.errors import InsufficientMemory, ShardIncomplete, ShardioError, UnsupportedEnvironment
from shardio.storage.file_access import FileState, open_shard

_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_DEFAULT_MAX_MAPS: Final = 65530
"""What Linux has by default."""
_FAILED: Final = ctypes.c_void_p(-1).value


def map_file(path: str) -> memoryview:
    """Map a whole file for reading; see `map_known_file`."""
    return map_with_state(path)[0]


def map_with_state(path: str) -> tuple[memoryview, FileState]:
    """Map a whole file for reading. The map lives until the last view of it is gone.

    Not by Python's `mmap`, which keeps a descriptor for every map: datasets have more shards than
    a process may have open files.

    Raises:
        ShardNotFound: there is no such file.
        ShardIncomplete: the file is empty.
        UnsupportedEnvironment: the kernel's limit on the number of maps is reached.
        InsufficientMemory: the addresses of this process do not suffice.
        OSError: the system refuses for another reason.
    """
    fd = open_shard(path)
    try:
        status = os.fstat(fd)
        n_bytes = status.st_size
        if n_bytes == 0:
            raise ShardIncomplete(f"{path}: the file is empty: its writer did not finish")
        address = _mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0, path)
    finally:
        os.close(fd)
    whole = (ctypes.c_ubyte * n_bytes).from_address(address)
    # Not at exit: other threads may still be reading.
    weakref.finalize(whole, unmap, address, n_bytes).atexit = False
    return memoryview(whole).cast("B").toreadonly(), FileState.of(status)


@functools.cache
def max_maps() -> int:
    """How many maps the kernel lets a process have."""
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as figure:
            return int(figure.read())
    except OSError:
        return _DEFAULT_MAX_MAPS


def map_over(address: int, n_bytes: int, fd: int) -> None:
    """Map the start of a file, to be read and written, in the place of what is mapped already.

    Raises:
        InsufficientMemory: the kernel has none for the map.
        OSError: it refuses for another reason.
    """
    flags = mmap.MAP_SHARED | _MAP_FIXED
    _mmap(address, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0, "")


def drop_pages(view: memoryview) -> None:
    """Drop the pages of a mapped file from this process's memory; the page cache keeps them."""
    if isinstance(view.obj, ctypes.Array) and hasattr(mmap, "MADV_DONTNEED"):
        _LIBC.madvise(ctypes.addressof(view.obj), view.nbytes, mmap.MADV_DONTNEED)


def disable_readahead(view: memoryview) -> None:
    """Have the kernel read no more of a mapped file than the pages that are touched."""
    if isinstance(view.obj, ctypes.Array):
        disable_readahead_at(ctypes.addressof(view.obj), view.nbytes)


def reserve(n_bytes: int) -> int:
    """An address from which on n_bytes are this process's, and hold nothing yet.

    Raises:
        InsufficientMemory: the addresses of this process do not suffice.
    """
    return _mmap(None, n_bytes, _PROT_NONE, _anonymous(), -1, 0, "")


def clear_reserved(address: int, n_bytes: int) -> None:
    """Have reserved addresses hold nothing again, whatever was mapped there."""
    _mmap(address, n_bytes, _PROT_NONE, _anonymous() | _MAP_FIXED, -1, 0, "")


def map_fixed(address: int, n_bytes: int, fd: int, offset: int, path: str) -> None:
    """Map a part of a file, for reading, at addresses that are reserved.

    Raises:
        UnsupportedEnvironment: the kernel's limit on the number of maps is reached.
        OSError: the system refuses for another reason.
    """
    _mmap(address, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset, path)


def unmap(address: int, n_bytes: int) -> None:
    """Unmap addresses and whatever is there."""
    _LIBC.munmap(address, n_bytes)


def disable_readahead_at(address: int, n_bytes: int) -> None:
    """Have the kernel read no more of what is mapped there than the pages that are touched."""
    if hasattr(mmap, "MADV_RANDOM"):
        _LIBC.madvise(address, n_bytes, mmap.MADV_RANDOM)


def lazy_zeros(n_bytes: int) -> npt.NDArray[np.uint8]:
    """So many bytes, which take memory where they are written to alone."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, max(1, n_bytes), flags=flags), np.uint8)[:n_bytes]


def _anonymous() -> int:
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


_LIBC: Final = _libc()


def _mmap(
    address: int | None, n_bytes: int, prot: int, flags: int, fd: int, offset: int, path: str
) -> int:
    """Call mmap(2): Python's mmap can neither reserve nor map at a fixed address."""
    found = _LIBC.mmap(address, n_bytes, prot, flags, fd, offset)
    if found != _FAILED and found is not None:
        return int(found)
    code = ctypes.get_errno()
    if code != errno.ENOMEM:
        raise OSError(code, os.strerror(code), path or None)
    most_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    if not path or _mapped_bytes() + n_bytes > most_bytes != resource.RLIM_INFINITY:
        limit = f"; RLIMIT_AS is {most_bytes}, see `ulimit -v`"
        raise InsufficientMemory(
            f"no address range of {n_bytes} bytes is left in this process"
            + (f" for {path}" if path else "")
            + (limit if most_bytes != resource.RLIM_INFINITY else "")
        )
    raise UnsupportedEnvironment(
        f"{path}: the kernel's limit on memory maps is reached (sysctl vm.max_map_count); "
        "raise it, or write fewer, larger shards"
    )


def _mapped_bytes() -> int:
    """How many bytes of addresses this process has, as RLIMIT_AS counts them; 0 if unknown."""
    try:
        with open("/proc/self/statm", "rb") as figures:
            return int(figures.read().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0


PAGE_BYTES: Final = 4096

END_BYTES: Final = 32 << 10
"""Of the end of a shard: its last sections are small, and say where all others are."""
_N_PROBED: Final = 4

ADVICE_BYTES: Final = 128 << 10
"""Of one advice, Linux takes no more than it reads ahead at a time; this is its default."""


def is_cached(fd: int, offset: int) -> bool | None:
    """Whether the page at an offset lies in memory; None where the system does not tell.

    Unlike mincore(2) this works for files of others. Where the file has no such byte it is True:
    there is nothing to wait for.
    """
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except (OSError, AttributeError):  # the file system, or the system, cannot
        return None
    return True


def prefetch_range(fd: int, offset: int, n_bytes: int) -> None:
    """Have the kernel begin to read a part of a file; it is not waited for.

    Raises:
        OSError: the system refuses.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    advice = os.POSIX_FADV_WILLNEED
    for start in range(offset, offset + n_bytes, ADVICE_BYTES):
        os.posix_fadvise(fd, start, min(ADVICE_BYTES, offset + n_bytes - start), advice)


def prefetch_ends(paths: Sequence[str]) -> None:
    """Have the kernel begin to read where shards begin and end, if they are not in memory.

    One after another they cost a wait each, or several. Never an error: what is wrong with a file,
    opening it will say. Links are left alone: where they may lead has not been checked, and to
    open a device may do something.
    """
    step = max(1, len(paths) // _N_PROBED)
    if not all(_ends_are_cached(path, is_asked=False) for path in paths[::step]):
        for path in paths:
            _ends_are_cached(path, is_asked=True)


def _ends_are_cached(path: str, *, is_asked: bool) -> bool:
    """Whether both ends of a file lie in memory, as far as is known; or ask for them."""
    with contextlib.suppress(OSError, ShardioError):
        if os.path.islink(path):
            return True
        fd = open_shard(path)
        try:
            n_bytes = os.fstat(fd).st_size
            if not is_asked:
                return is_cached(fd, 0) is not False and is_cached(fd, n_bytes - 1) is not False
            start = max(0, n_bytes - END_BYTES)
            prefetch_range(fd, 0, PAGE_BYTES)
            prefetch_range(fd, start, n_bytes - start)
        finally:
            os.close(fd)
    return True
