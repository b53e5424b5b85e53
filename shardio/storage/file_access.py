"""Open a shard's file, and know it again later.

Where mapping is unsafe: file systems whose files others change behind this kernel's back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from typing import Final, Literal, NamedTuple, get_args

from shardio.errors import InvalidArgument, ShardChanged, ShardNotFound

_NO_FILE: Final = {errno.ELOOP: "is a link that leads to itself", errno.ENXIO: "is a socket"}


class FileState(NamedTuple):
    """What a file was when it was opened: which one, how long, and when last written to."""

    device: int
    inode: int
    n_bytes: int
    written_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """From what the system says of it."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def check(self, now: FileState, path: str) -> None:
        """Compare with what is found at the same path now.

        When it was written to is left out: what was written is for hashes to say, with its place.

        Raises:
            ShardChanged: another file, or the same one with another size.
        """
        if self[:2] != now[:2]:
            raise ShardChanged(
                "another file has taken the place of the one that was opened; open it anew",
                code="replaced",
                path=path,
                expected=self[:2],
                found=now[:2],
            )
        if self.n_bytes != now.n_bytes:
            raise resized_error(path, self.n_bytes, now.n_bytes)


def resized_error(path: str, expected: int, found: int) -> ShardChanged:
    """Make the error for a file that does not have the size it was opened with."""
    how = "cut short" if found < expected else "made longer"
    return ShardChanged(
        f"the file was {how} while it was in use",
        code="file_size",
        path=path,
        expected=expected,
        found=found,
    )


def check_length(path: str, opened: FileState) -> None:
    """Make sure that a mapped file has not become shorter: touching what is gone would kill.

    A file that was deleted or replaced by another is no concern: the map holds the one opened.

    Raises:
        ShardChanged: it has.
    """
    try:
        now = os.stat(path)
    except OSError:
        return
    if now.st_size < opened.n_bytes and (now.st_dev, now.st_ino) == opened[:2]:
        raise resized_error(path, opened.n_bytes, now.st_size)


def open_shard(path: str, name: str = "") -> int:
    """Open a file for reading; the descriptor is the caller's. `name` is what messages call it.

    Raises:
        ShardNotFound: there is none, or it is no file.
        OSError: the system refuses for another reason.
    """
    name = name or path
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # do not wait for a pipe
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
"""`f_type` of statfs(2) to a name. There a server, or another client, can cut a file short without
this kernel knowing, and an interrupted connection makes a mapped page a SIGBUS."""

_STATFS_BYTES: Final = 256  # more than any layout of struct statfs, which begins with f_type


def file_system_type(path: str) -> int | None:
    """The `f_type` of the file system that `path` lies on; None where that cannot be known."""
    statfs = getattr(_LIBC, "statfs", None)
    if os.uname().sysname != "Linux" or statfs is None:
        return None
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if statfs(os.fsencode(path), found) != 0:
        return None  # that there is nothing to open is said by opening it
    return ctypes.c_uint32.from_buffer(found).value


_LIBC: Final = ctypes.CDLL(None)


def choose_access(path: str, access: Access) -> Literal["mmap", "pread"]:
    """What "auto" means for a file or folder: "pread" on the file systems of REMOTE.

    Raises:
        InvalidArgument: `access` is none of the three.
    """
    given: object = access  # a user's: an array would be compared item by item
    if not isinstance(given, str) or given not in ACCESS:
        raise InvalidArgument(f"access must be one of {', '.join(ACCESS)}; found {access!r}")
    if access != "auto":
        return access
    return "pread" if file_system_type(path) in UNSAFE_FILE_SYSTEMS else "mmap"
