"""Open shard files, choose a safe access method for them, and detect replaced files."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from typing import Final, Literal, NamedTuple, get_args

from shardio.errors import InvalidArgument, ShardChanged, ShardNotFound

_NO_FILE: Final = {errno.ELOOP: "is a link that leads to itself", errno.ENXIO: "is a socket"}


class FileState(NamedTuple):
    """The identity, size and modification time of a file when it was opened."""

    device: int
    inode: int
    n_bytes: int
    written_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """Return the state of a file from its `stat` result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def check(self, now: FileState, path: str) -> None:
        """Compare with the current state of the file at the same path.

        The modification time is ignored, because hashes detect and locate changed content.

        Raises:
            ShardChanged: there is another file at the path, or the size of the file has changed.
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
    return ShardChanged(
        f"the file was {how} while it was in use",
        code="file_size",
        path=path,
        expected=expected,
        found=found,
    )


def check_length(path: str, opened: FileState) -> None:
    """Check that a mapped file was not truncated: reading a missing page would kill the process.

    Deleting or replacing the file is harmless, because the map keeps the opened file alive.

    Raises:
        ShardChanged: the file is shorter.
    """
    try:
        now = os.stat(path)
    except OSError:
        return
    if now.st_size < opened.n_bytes and (now.st_dev, now.st_ino) == opened[:2]:
        raise resized_error(path, opened.n_bytes, now.st_size)


def open_shard(path: str, name: str = "") -> int:
    """Open a file for reading; the caller owns the descriptor. `name` is its name in messages.

    Raises:
        ShardNotFound: the file does not exist, or is not a regular file.
        OSError: the file cannot be opened for another reason.
    """
    name = name or path
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # never wait for a pipe
    except FileNotFoundError as error:
        raise ShardNotFound(f"{name}: there is no such shard") from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ShardNotFound(f"{name}: {_NO_FILE[error.errno]}; a shard is a file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ShardNotFound(f"{name}: is a folder or device; a shard is a file")
    except BaseException:
        os.close(fd)
        raise
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
    # src/stat.c of GNU coreutils, which marks them as remote
    0x0BD00BD0: "Lustre",
    0x19830326: "BeeGFS (FhGFS)",
    0x47504653: "GPFS",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS (PVFS2)",
    0x786F4256: "VirtualBox shared folders",
    0xBACBACBC: "VMware shared folders",
    0x7C7C6673: "Parallels shared folders",
}
"""Names of file systems on which mapping is unsafe, by `f_type` of statfs(2). The server or another
client can truncate a file without this kernel's knowledge; after a lost connection, reading a
mapped page raises SIGBUS.
"""

_STATFS_BYTES: Final = 256  # larger than any struct statfs, which begins with f_type


def file_system_type(path: str) -> int | None:
    """Return the `f_type` of the file system of `path`; None if unknown."""
    statfs = getattr(_LIBC, "statfs", None)
    if os.uname().sysname != "Linux" or statfs is None:
        return None
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if statfs(os.fsencode(path), found) != 0:
        return None  # opening the file reports that it is missing
    return ctypes.c_uint32.from_buffer(found).value


_LIBC: Final = ctypes.CDLL(None)


def choose_access(path: str, access: Access) -> Literal["mmap", "pread"]:
    """Resolve "auto" for a file or folder: "pread" on UNSAFE_FILE_SYSTEMS, else "mmap".

    Raises:
        InvalidArgument: `access` is not one of ACCESS.
    """
    given: object = access  # a user's value may be an array, for which == returns no bool
    if not isinstance(given, str) or given not in ACCESS:
        raise InvalidArgument(f"access must be one of {', '.join(ACCESS)}; found {access!r}")
    if access != "auto":
        return access
    return "pread" if file_system_type(path) in UNSAFE_FILE_SYSTEMS else "mmap"
