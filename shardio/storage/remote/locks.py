"""Locks of single bytes of a file, among threads and processes; they end with whoever has them.

Those of an open file description (fcntl(2), F_OFD_SETLK), of Linux: a lock goes when its descriptor
is closed, at the latest by the kernel when the process dies. Of a byte there are any number of
shared locks, or one exclusive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import Final

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""l_type, l_whence, l_start, l_len, l_pid, which must be 0."""


class _HeldByThread(threading.local):
    is_held = False


_held: Final = _HeldByThread()


class ByteLocks:
    """The shared locks of one file, which it owns. They are counted, and end with this process.

    For several threads at a time; a fork of the process begins with none.

    Args:
        path: made if it is missing.
    """

    def __init__(self, path: str) -> None:
        self._path, self._is_closed = path, False
        self._fd, self._pid = -1, os.getpid()
        self._counts: dict[int, int] = {}
        self._mutex = threading.Lock()
        self._released: deque[int] = deque()

    def acquire_shared(self, byte: int) -> bool:
        """Take a shared lock, or take it once more; False where somebody has an exclusive one."""
        self._reset_after_fork()
        try:
            with self._mutex:
                n_held = self._counts.get(byte, 0)
                if self._fd < 0:
                    self._fd = _open(self._path)
                if not n_held and not _lock(self._fd, fcntl.F_RDLCK, byte):
                    return False
                self._counts[byte] = n_held + 1
                return True
        finally:
            self._release_pending()  # what was given back meanwhile

    def release(self, byte: int) -> None:
        """Release one shared lock. Safe in any thread at any point, as finalizers need."""
        self._released.append(byte)
        self._release_pending()

    def close(self) -> None:
        """Keep nothing open but for what is still held. Idempotent."""
        self._is_closed = True
        self._release_pending()

    def _release_pending(self) -> None:
        """Do what was asked for by `release`; if somebody is at it, he does it all."""
        self._reset_after_fork()
        is_asked = True
        while is_asked and self._mutex.acquire(blocking=False):
            try:
                while self._released:
                    self._release_one(self._released.popleft())
                if self._is_closed and not self._counts and self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1
            finally:
                self._mutex.release()
            is_asked = bool(self._released)

    def _release_one(self, byte: int) -> None:
        n_held = self._counts.pop(byte, 0)
        if n_held > 1:
            self._counts[byte] = n_held - 1
        elif n_held:
            _lock(self._fd, fcntl.F_UNLCK, byte)

    def _reset_after_fork(self) -> None:
        """What was locked before a fork is the parent's: undoing it here would undo it there."""
        if self._pid != os.getpid():
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._pid, self._counts = -1, os.getpid(), {}
            self._mutex, self._released = threading.Lock(), deque()


@contextlib.contextmanager
def try_exclusive(path: str, byte: int) -> Iterator[bool]:
    """Whether nobody has a byte of a file, here or elsewhere; if so, nobody gets it meanwhile.

    A process that is forked meanwhile gets the same lock, which closing leaves it: so it is undone.
    """
    fd, pid = _open(path), os.getpid()
    try:
        yield _lock(fd, fcntl.F_WRLCK, byte)
    finally:
        if pid == os.getpid():
            _lock(fd, fcntl.F_UNLCK, byte)
        os.close(fd)


@contextlib.contextmanager
def folder_lock(folder: str) -> Iterator[None]:
    """Wait until nobody else is inside of the same `with`; the kernel lets go of who dies."""
    fd, pid = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), os.getpid()
    _held.is_held = True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        if pid == os.getpid():
            fcntl.flock(fd, fcntl.LOCK_UN)  # as in `exclusive`
        os.close(fd)
        _held.is_held = False


def holds_folder_lock() -> bool:
    """Whether this thread is inside of `alone_in`, and would wait for itself."""
    return _held.is_held


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(fd: int, kind: int, byte: int) -> bool:
    asked = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, asked)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
