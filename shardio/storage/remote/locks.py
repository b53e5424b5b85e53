"""Locks on single bytes of a file, between threads and processes.

The locks are Linux's open file description locks (fcntl(2), F_OFD_SETLK). The kernel releases a
lock when its descriptor is closed, at the latest when the process ends. A byte has any number of
shared locks or one exclusive lock.
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

from shardio.storage import fs

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""struct flock: l_type, l_whence, l_start, l_len and l_pid, which must be 0."""


class _HeldByThread(threading.local):
    is_held = False


_held: Final = _HeldByThread()


class ByteLocks:
    """The shared locks of this process on the bytes of one file, which are owned and counted.

    Thread-safe. A forked child starts without locks.

    Args:
        path: the file; created if missing.
    """

    def __init__(self, path: str) -> None:
        self._path, self._is_closed = path, False
        self._fd, self._pid = -1, os.getpid()
        self._counts: dict[int, int] = {}
        self._mutex = threading.Lock()
        self._released: deque[int] = deque()

    def acquire_shared(self, byte: int) -> bool:
        """Acquire a shared lock, or count another use of a held lock.

        Return False if another process holds the exclusive lock on the byte.
        """
        self._reset_after_fork()
        try:
            with self._mutex:
                n_held = self._counts.get(byte, 0)
                if self._fd < 0:
                    self._fd = fs.open_lock_file(self._path)
                if not n_held and not _lock(self._fd, fcntl.F_RDLCK, byte):
                    return False
                self._counts[byte] = n_held + 1
                return True
        finally:
            self._release_pending()  # locks whose `release` was called in the meantime

    def release(self, byte: int) -> None:
        """Release one shared lock. Safe in any thread at any point, even in a finalizer."""
        self._released.append(byte)
        self._release_pending()

    def close(self) -> None:
        """Close the file once no lock is held. Idempotent."""
        self._is_closed = True
        self._release_pending()

    def _release_pending(self) -> None:
        """Release the locks queued by `release`, unless another thread is doing so."""
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
        """Forget the parent's locks after a fork; releasing them here would affect the parent."""
        if self._pid != os.getpid():
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._pid, self._counts = -1, os.getpid(), {}
            self._mutex, self._released = threading.Lock(), deque()


@contextlib.contextmanager
def try_exclusive(path: str, byte: int) -> Iterator[bool]:
    """Hold the exclusive lock on a byte of a file; yield False if another process holds a lock.

    The lock is released explicitly: a child that was forked in the meantime shares the lock, and
    would keep it if this process only closed its descriptor.
    """
    fd, pid = fs.open_lock_file(path), os.getpid()
    try:
        yield _lock(fd, fcntl.F_WRLCK, byte)
    finally:
        if pid == os.getpid():
            _lock(fd, fcntl.F_UNLCK, byte)
        os.close(fd)


@contextlib.contextmanager
def folder_lock(folder: str) -> Iterator[None]:
    """Wait for the lock of a folder, and hold it in the block or until the process ends."""
    fd, pid = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), os.getpid()
    _held.is_held = True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        if pid == os.getpid():
            fcntl.flock(fd, fcntl.LOCK_UN)  # as in `try_exclusive`
        os.close(fd)
        _held.is_held = False


def holds_folder_lock() -> bool:
    """Return True if this thread holds a `folder_lock`; acquiring another one would deadlock."""
    return _held.is_held


def _lock(fd: int, kind: int, byte: int) -> bool:
    asked = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, asked)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
