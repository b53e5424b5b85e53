"""The files that are converted: which state one is in, and what tells its content from another."""

from __future__ import annotations

import os
import stat
import threading
from typing import Final, NamedTuple

from shardio.conversion.source import Input, Item
from shardio.format.checksum import Hasher, hash_bytes

_CHUNK_BYTES: Final = 1 << 20


class State(NamedTuple):
    """What tells a file from another, or from itself after a change."""

    mode: int
    inode: int
    n_bytes: int
    changed_ns: int


def state_of(path: str) -> State | None:
    """The state of the file at `path`; None where there is none, or nothing can be told of it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return State(found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns)


def states_of(one: Input) -> dict[str, State | None]:
    """The states of an input and of its parts, by their names; an item stays as it is."""
    if isinstance(one, Item):
        return {one.name: State(stat.S_IFREG, 0, one.n_bytes, 0)}
    return {each.name: state_of(each.path) for each in (one, *one.parts)}


def content_of(one: Input, stopped: threading.Event | None = None) -> str:
    """The hash of an input's content: with parts, of all names and hashes, in order.

    Raises:
        OSError: as of `hash_of`.
    """
    if isinstance(one, Item):
        return one.hash
    if not one.parts:
        return hash_of(one.path, stopped)
    lines = (f"{hash_of(each.path, stopped)} {each.name}\n" for each in (one, *one.parts))
    return f"{hash_bytes(''.join(lines).encode()):016x}"


def hash_of(path: str, stopped: threading.Event | None = None) -> str:
    """The xxh3-64 of a file's content, in 16 hex digits, as a generation keeps it.

    Once `stopped` is set by another thread, the hash is of no use: it ends where it is.

    Raises:
        OSError: it cannot be read; the error names it.
    """
    hasher = Hasher()
    try:
        with open(path, "rb", buffering=0) as file:
            while (stopped is None or not stopped.is_set()) and (chunk := file.read(_CHUNK_BYTES)):
                hasher.update(chunk)
    except OSError as error:
        error.filename = path  # the system does not say it of a read
        raise
    return f"{hasher.intdigest():016x}"
