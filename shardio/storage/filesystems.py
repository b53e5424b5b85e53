"""Where mapping is unsafe: file systems whose files others change behind this kernel's back."""

from __future__ import annotations

import ctypes
import os
from typing import Final, Literal, get_args

from shardio.errors import InvalidArgument

Access = Literal["auto", "mmap", "pread"]
ACCESS: Final[tuple[str, ...]] = get_args(Access)

REMOTE: Final[dict[int, str]] = {
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


def file_system(path: str) -> int | None:
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
    return "pread" if file_system(path) in REMOTE else "mmap"
