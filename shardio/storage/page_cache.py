"""What of a file lies in memory already, and what the kernel is to read before it is needed.

All of it is about files, not about maps: a page that a file has in memory is there for every
process, whether it maps the file or reads it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Final

from shardio.errors import ShardioError
from shardio.storage.file_access import open_shard

PAGE_BYTES: Final = 4096

END_BYTES: Final = 32 << 10
"""Of the end of a shard: its last sections are small, and say where all others are."""
_PROBED: Final = 4

AT_ONCE_BYTES: Final = 128 << 10
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


def will_need(fd: int, offset: int, n_bytes: int) -> None:
    """Have the kernel begin to read a part of a file; it is not waited for.

    Raises:
        OSError: the system refuses.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    advice = os.POSIX_FADV_WILLNEED
    for start in range(offset, offset + n_bytes, AT_ONCE_BYTES):
        os.posix_fadvise(fd, start, min(AT_ONCE_BYTES, offset + n_bytes - start), advice)


def will_open(paths: Sequence[str]) -> None:
    """Have the kernel begin to read where shards begin and end, if they are not in memory.

    One after another they cost a wait each, or several. Never an error: what is wrong with a file,
    opening it will say. Links are left alone: where they may lead has not been checked, and to
    open a device may do something.
    """
    step = max(1, len(paths) // _PROBED)
    if not all(_ends(path, is_asked=False) for path in paths[::step]):
        for path in paths:
            _ends(path, is_asked=True)


def _ends(path: str, *, is_asked: bool) -> bool:
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
            will_need(fd, 0, PAGE_BYTES)
            will_need(fd, start, n_bytes - start)
        finally:
            os.close(fd)
    return True
