"""Open shard files, choose a safe access method for them, map them and prefetch them.

To *map* a file means to make it readable as memory of this process with mmap(2), without copies.
mmap(2) is called through ctypes, because Python's module `mmap` keeps a descriptor open for each
map, and can neither reserve addresses nor map a file to given addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import resource
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from shardio._base.classes import undo_on_error
from shardio.errors import (
    InsufficientMemory,
    InvalidArgument,
    ShardChanged,
    ShardIncomplete,
    ShardioError,
    ShardNotFound,
    UnsupportedEnvironment,
)

_NOT_A_FILE: Final = {errno.ELOOP: "is a link that leads to itself", errno.ENXIO: "is a socket"}


class FileState(NamedTuple):
    """The identity, size and modification time of a file when it was opened."""

    device: int
    inode: int
    n_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """Return the state of a file from its `stat` result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def check(self, now: FileState, path: str) -> None:
        """Raise ShardChanged if the current state, `now`, shows another file or another size.

        The modification time is not compared: hashes detect and locate a change of the content.
        """
        if self[:2] != now[:2]:
            raise ShardChanged(
                "the file was replaced by another one after it was opened; reopen it",
                code="replaced",
                path=path,
                expected=self[:2],
                found=now[:2],
            )
        if self.n_bytes != now.n_bytes:
            raise resized_error(path, self.n_bytes, now.n_bytes)


def resized_error(path: str, expected: int, found: int) -> ShardChanged:
    """Return the error for a file whose size changed after it was opened."""
    how = "cut short" if found < expected else "made longer"
    what = f"the file was {how} while it was in use"
    return ShardChanged(what, code="file_size", path=path, expected=expected, found=found)


def check_length(path: str, opened: FileState) -> None:
    """Raise ShardChanged if a mapped file is now smaller than in `opened`, its earlier state.

    A process that reads a page beyond the new end of the file is killed. A file that was deleted or
    replaced is harmless: the map keeps the opened file alive.
    """
    try:
        now = os.stat(path)
    except OSError:
        return
    if now.st_size < opened.n_bytes and (now.st_dev, now.st_ino) == opened[:2]:
        raise resized_error(path, opened.n_bytes, now.st_size)


def open_shard(path: str, name: str = "") -> int:
    """Open a shard's file for reading; return the descriptor, which the caller owns.

    `name` is the name of the file in messages, by default `path`. Raises ShardNotFound if the file
    does not exist, or is not a regular file.
    """
    name = name or path
    try:
        # O_NONBLOCK: if the path is a pipe, do not wait until a process writes to the pipe.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ShardNotFound(f"{name}: there is no such shard") from error
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise ShardNotFound(f"{name}: {_NOT_A_FILE[error.errno]}; a shard is a file") from error
        raise
    with undo_on_error(os.close, fd):
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            hint = ", and shardio.open opens the folder of a dataset" * stat.S_ISDIR(mode)
            raise ShardNotFound(f"{name}: is a folder or device; a shard is a file{hint}")
    return fd


Access = Literal["auto", "mmap", "pread"]
ACCESS: Final[tuple[str, ...]] = get_args(Access)

UNSAFE_FILE_SYSTEMS: Final[dict[int, str]] = {
    # include/uapi/linux/magic.h of Linux
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB 2 and 3",
    0x65735546: "FUSE: sshfs, buckets as folders, virtiofs",
    0x01021997: "9p: virtual machines, WSL",
    0x00C36400: "Ceph",
    0x5346414F: "AFS (OpenAFS)",
    0x6B414653: "AFS (kernel)",
    0x73757245: "Coda",
    # src/stat.c of GNU coreutils, which marks these file systems as remote
    0x0BD00BD0: "Lustre",
    0x19830326: "BeeGFS (FhGFS)",
    0x47504653: "GPFS",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS (PVFS2)",
    0x786F4256: "VirtualBox shared folders",
    0xBACBACBC: "VMware shared folders",
    0x7C7C6673: "Parallels shared folders",
}
"""The file systems on which mapping a file is unsafe: a dict from `f_type` of statfs(2) to names.

On these, the server or another client can truncate a file without this kernel's knowledge, and the
connection can be lost. A process that then reads a lost page is killed by SIGBUS."""

_STATFS_BYTES: Final = 256  # larger than any struct statfs, which begins with f_type


def file_system_type(path: str) -> int | None:
    """Return the `f_type` of the file system of `path`; None if unknown."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _LIBC.statfs(os.fsencode(path), found) != 0:
        return None  # usually, the file is missing: opening it will raise the error
    return ctypes.c_uint32.from_buffer(found).value


def choose_access(path: str, access: Access) -> Literal["mmap", "pread"]:
    """Return the access method for a file, or for the files of a folder.

    For "auto", this is "pread" on the UNSAFE_FILE_SYSTEMS and "mmap" on all others.
    """
    given: object = access  # a user may pass an array, and `array == access` is not a bool
    if not isinstance(given, str) or given not in ACCESS:
        raise InvalidArgument(f"access must be one of {', '.join(ACCESS)}; found {access!r}")
    if access != "auto":
        return access
    return "pread" if file_system_type(path) in UNSAFE_FILE_SYSTEMS else "mmap"


_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_ANONYMOUS_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def map_file(path: str) -> tuple[memoryview, FileState]:
    """Map a whole file for reading; return a view of the map, and the state of the file.

    The file is unmapped when the last view is gone. The descriptor is closed at once, because a
    dataset may have more shards than a process may have open files.

    Raises:
        ShardNotFound, ShardIncomplete: there is no such file, or it is empty.
        UnsupportedEnvironment: the kernel's limit on the number of maps is reached.
        InsufficientMemory: this process has no free address range of the file's size.
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
    # Do not unmap the file when the interpreter exits: other threads may still be reading it.
    weakref.finalize(whole, unmap, address, n_bytes).atexit = False
    return memoryview(whole).cast("B").toreadonly(), FileState.of(status)


@functools.cache
def max_maps() -> int:
    """Return the maximum number of maps that the kernel allows a process."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_bytes())
    except OSError:
        return 65530  # the default of vm.max_map_count


def replace_map(address: int, n_bytes: int, fd: int) -> None:
    """Map the start of a file to `address`, for reading and writing, in place of the map there."""
    flags = mmap.MAP_SHARED | _MAP_FIXED
    _mmap(address, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0, "")


def disable_readahead(view: memoryview) -> None:
    """Disable read-ahead for a map that `map_file` returned; do nothing for other memory."""
    if isinstance(view.obj, ctypes.Array):
        disable_readahead_at(ctypes.addressof(view.obj), view.nbytes)


def reserve(n_bytes: int) -> int:
    """Reserve a range of `n_bytes` addresses, which takes no memory; return the first address."""
    return _mmap(None, n_bytes, _PROT_NONE, _ANONYMOUS_FLAGS, -1, 0, "")


def clear_reserved(address: int, n_bytes: int) -> None:
    """Unmap the files that are mapped to reserved addresses, which stay reserved."""
    _mmap(address, n_bytes, _PROT_NONE, _ANONYMOUS_FLAGS | _MAP_FIXED, -1, 0, "")


def map_fixed(address: int, n_bytes: int, fd: int, offset: int, path: str) -> None:
    """Map `n_bytes` of a file, beginning at `offset`, to reserved addresses for reading."""
    _mmap(address, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset, path)


def unmap(address: int, n_bytes: int) -> None:
    """Unmap an address range and free the addresses."""
    _LIBC.munmap(address, n_bytes)


def disable_readahead_at(address: int, n_bytes: int) -> None:
    """Disable read-ahead for an address range (MADV_RANDOM)."""
    _LIBC.madvise(address, n_bytes, mmap.MADV_RANDOM)


def lazy_zeros(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return an array of `n_bytes` zeros; each page of it takes memory only after it is written."""
    return np.frombuffer(mmap.mmap(-1, max(1, n_bytes), flags=_ANONYMOUS_FLAGS), np.uint8)[:n_bytes]


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = [ctypes.c_int] * 3
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *flags, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


_LIBC: Final = _libc()


def _mmap(
    address: int | None, n_bytes: int, prot: int, flags: int, fd: int, offset: int, path: str
) -> int:
    """Call mmap(2) and return the address; `path` is for messages, and "" if it is unknown."""
    found = _LIBC.mmap(address, n_bytes, prot, flags, fd, offset)
    if found != _MAP_FAILED and found is not None:
        return int(found)
    code = ctypes.get_errno()
    if code != errno.ENOMEM:
        raise OSError(code, os.strerror(code), path or None)
    max_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    if not path or _mapped_bytes() + n_bytes > max_bytes != resource.RLIM_INFINITY:
        limit = f"; RLIMIT_AS is {max_bytes}, see `ulimit -v`"
        raise InsufficientMemory(
            f"no address range of {n_bytes} bytes is left in this process"
            + (f" for {path}" if path else "")
            + (limit if max_bytes != resource.RLIM_INFINITY else "")
        )
    raise UnsupportedEnvironment(
        f"{path}: the kernel's limit on memory maps is reached (sysctl vm.max_map_count); "
        "raise it, or write fewer, larger shards"
    )


def _mapped_bytes() -> int:
    """Return the total size of all mapped addresses, which RLIMIT_AS limits; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0


PAGE_BYTES: Final = 4096

END_BYTES: Final = 32 << 10
"""The number of bytes to prefetch from the end of a shard. In most shards, they contain the schema,
the section table and the last page."""
_N_PROBED: Final = 4
"""The approximate number of shards that `prefetch_ends` tests first."""

ADVICE_BYTES: Final = 128 << 10
"""The number of bytes per call of posix_fadvise(2). One call reads at most the read-ahead size of
the disk, which is 128 KiB by default."""


def is_cached(fd: int, offset: int) -> bool | None:
    """Return True if the page of a file at `offset` is in the page cache; None if this is unknown.

    Unlike mincore(2), this works for files of other users. Beyond the file's end, return True.
    """
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except (OSError, AttributeError):  # not supported by the file system or the kernel
        return None
    return True


def prefetch_range(fd: int, offset: int, n_bytes: int) -> None:
    """Start to read a part of a file into the page cache, but do not wait for the disk."""
    for start in range(offset, offset + n_bytes, ADVICE_BYTES):
        size = min(ADVICE_BYTES, offset + n_bytes - start)
        os.posix_fadvise(fd, start, size, os.POSIX_FADV_WILLNEED)


def prefetch_ends(paths: Sequence[str]) -> None:
    """Start to read the first page and the end of each shard into the page cache.

    The disk then reads many shards at once. If a few shards that are tested first are cached
    already, the others probably are, too, and nothing is read. Errors are ignored: opening the file
    later raises them. Links are skipped: a link may lead to a device, and opening a device has side
    effects.
    """
    step = max(1, len(paths) // _N_PROBED)
    if not all(_ends_are_cached(path, starts_prefetch=False) for path in paths[::step]):
        for path in paths:
            _ends_are_cached(path, starts_prefetch=True)


def _ends_are_cached(path: str, *, starts_prefetch: bool) -> bool:
    """Return False if the first page or the end of a file is certainly not cached, otherwise True.

    If `starts_prefetch` is True, start to prefetch the page and the end, and return True.
    """
    with contextlib.suppress(OSError, ShardioError):
        if os.path.islink(path):
            return True
        fd = open_shard(path)
        try:
            n_bytes = os.fstat(fd).st_size
            if not starts_prefetch:
                return is_cached(fd, 0) is not False and is_cached(fd, n_bytes - 1) is not False
            start = max(0, n_bytes - END_BYTES)
            prefetch_range(fd, 0, PAGE_BYTES)
            prefetch_range(fd, start, n_bytes - start)
        finally:
            os.close(fd)
    return True
