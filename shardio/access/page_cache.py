"""What of a file lies in memory already, and what the kernel is to read before it is needed.

All of it is about files, not about maps: a page that a file has in memory is there for every
process, whether it maps the file or reads it.
"""

from __future__ import annotations

import os
from typing import Final

PAGE_BYTES: Final = 4096

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
