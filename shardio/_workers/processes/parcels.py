"""Messages of any length between main and a worker: what is too long travels in a memory file.

A parcel is a descriptor and what follows it. One that is sent in a file is its descriptor and one
byte more, so that it is never taken for a descriptor alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Final

from shardio._workers.processes.channel import MAX_MESSAGE_BYTES
from shardio._workers.processes.linux import memory_file

DESCRIPTOR_BYTES: Final = 32
"""The length of every descriptor: a task's, and an answer's."""


@contextlib.contextmanager
def packed(parcel: bytes) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """The message, and the descriptors to send with it: open until the `with` is left."""
    if len(parcel) <= MAX_MESSAGE_BYTES:
        yield parcel, ()
        return
    fd = memory_file(parcel[DESCRIPTOR_BYTES:])
    try:
        yield parcel[: DESCRIPTOR_BYTES + 1], (fd,)
    finally:
        os.close(fd)


def unpacked(message: bytes, fds: Sequence[int]) -> bytes:
    """The parcel of a message that has arrived; closes its descriptors."""
    if not fds:
        return message
    (fd,) = fds
    try:
        return message[:DESCRIPTOR_BYTES] + os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)
