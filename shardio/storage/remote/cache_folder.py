"""The folder of a cache: locks between threads and processes, the total size, and eviction.

To lock a shard means to lock one byte of a lock file with one of Linux's open file description
locks (fcntl(2), F_OFD_SETLK). Such a lock belongs to a descriptor, not to a process, and the kernel
releases it when the descriptor is closed. A byte has either any number of shared locks or one
exclusive lock. A shard with a shared lock is *pinned*; a download holds the exclusive lock.

To *evict* a shard means to remove it to make room. Only shards without a lock are evicted, the
least recently used first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import struct
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from shardio._base.callers import warn
from shardio.format.checksum import hash_bytes
from shardio.storage import fs

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""struct flock: l_type, l_whence, l_start, l_len and l_pid, which must be 0."""


_folder_lock_state: Final = threading.local()


class ByteLocks:
    """The shared locks that this process holds on the bytes of one lock file. Thread-safe.

    The lock on a byte is counted: it is released when `release` has been called as often as
    `acquire_shared`. A forked child starts without locks.
    """

    def __init__(self, path: str) -> None:
        self._path, self._is_closed = path, False
        self._fd, self._pid = -1, os.getpid()
        self._counts: dict[int, int] = {}
        self._mutex = threading.Lock()
        self._pending_releases: deque[int] = deque()

    def acquire_shared(self, byte: int) -> bool:
        """Acquire a shared lock on a byte; return False if the byte has an exclusive lock."""
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
            self._release_pending()  # `release` may have been called while the mutex was locked

    def release(self, byte: int) -> None:
        """Undo one call of `acquire_shared`. Safe in any thread, even in a finalizer."""
        self._pending_releases.append(byte)
        self._release_pending()

    def close(self) -> None:
        """Close the lock file as soon as no lock is held. Idempotent."""
        self._is_closed = True
        self._release_pending()

    def _release_pending(self) -> None:
        """Carry out the queued calls of `release`, unless another thread is doing so already."""
        self._reset_after_fork()
        has_pending = True
        while has_pending and self._mutex.acquire(blocking=False):
            try:
                while self._pending_releases:
                    byte = self._pending_releases.popleft()
                    n_held = self._counts.pop(byte, 0)
                    if n_held > 1:
                        self._counts[byte] = n_held - 1
                    elif n_held:
                        _lock(self._fd, fcntl.F_UNLCK, byte)
                if self._is_closed and not self._counts and self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1
            finally:
                self._mutex.release()
            has_pending = bool(self._pending_releases)

    def _reset_after_fork(self) -> None:
        """Drop the locks if this process is a forked child: they belong to the parent process."""
        if self._pid != os.getpid():
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._pid, self._counts = -1, os.getpid(), {}
            self._mutex, self._pending_releases = threading.Lock(), deque()


@contextlib.contextmanager
def try_exclusive(path: str, byte: int) -> Iterator[bool]:
    """Hold an exclusive lock on a byte of a file in the block; yield False if another lock exists.

    The lock is released explicitly: a child that was forked in the block would otherwise keep it.
    """
    fd, pid = fs.open_lock_file(path), os.getpid()
    try:
        is_exclusive = _lock(fd, fcntl.F_WRLCK, byte)
        try:
            yield is_exclusive
        finally:
            if pid == os.getpid():
                _lock(fd, fcntl.F_UNLCK, byte)
    finally:
        os.close(fd)


@contextlib.contextmanager
def folder_lock(folder: str) -> Iterator[None]:
    """Wait for the exclusive lock of a folder, and hold it in the block."""
    fd, pid = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), os.getpid()
    _folder_lock_state.is_held = True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        if pid == os.getpid():
            fcntl.flock(fd, fcntl.LOCK_UN)  # explicitly, for the reason given in `try_exclusive`
        os.close(fd)
        _folder_lock_state.is_held = False


def holds_folder_lock() -> bool:
    """Return True if this thread holds a `folder_lock`; taking it again would wait forever."""
    return getattr(_folder_lock_state, "is_held", False)


def _lock(fd: int, kind: int, byte: int) -> bool:
    asked = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, asked)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


_MANY_FILES: Final = 1000
"""With more files, `reserve` frees another 5% of the limit, so that it lists them less often."""
_SHARD: Final = re.compile(r".*\.[0-9a-f]{32}\.shard", re.DOTALL)
"""Matches the name NAME.ID.shard. Files with other names do not belong to the cache."""


class CachedFile(NamedTuple):
    """A shard or partial download in the cache. It may be removed unless `byte` is locked."""

    used_s: float
    path: str
    n_bytes: int
    byte: int


class CacheEvictor:
    """An evictor that keeps a cache within its limit. Safe for several threads and processes.

    `folder` is the folder of the cache. `max_bytes` is the limit for all datasets together; None
    stands for nine tenths of the space that is free or used by the cache.
    """

    def __init__(self, folder: str, max_bytes: int | None) -> None:
        self._folder, self._used_bytes_path = folder, os.path.join(folder, "used")
        self._has_warned = False
        self._may_evict = max_bytes is not None
        """False (`trim` does nothing) if the limit is the default and nothing was downloaded."""
        if max_bytes is None:
            max_bytes = (shutil.disk_usage(folder).free + self.used_bytes()) * 9 // 10
        self.max_bytes = max_bytes

    def used_bytes(self) -> int:
        """Return the total size of all files in the cache."""
        return sum(each.n_bytes for each in self._files())

    def reserve(self, partial: str, n_bytes: int) -> None:
        """Make room for a download, add `n_bytes` to the size of the cache, and create `partial`.

        Do nothing if `partial` exists: an interrupted download is counted already. If too many
        shards are pinned, warn and let the cache exceed its limit.
        """
        self._may_evict = True
        with folder_lock(self._folder):
            if os.path.exists(partial):
                return
            used = _read_used_bytes(self._used_bytes_path)
            if used is None or used + n_bytes > self.max_bytes:
                files = list(self._files())
                used = sum(each.n_bytes for each in files)
                spare = self.max_bytes // 20 if len(files) > _MANY_FILES else 0
                used -= self._evict_unused(used + n_bytes + spare - self.max_bytes)
                if used + n_bytes > self.max_bytes and not self._has_warned:
                    self._has_warned = True
                    warn(
                        f"{self._folder}: {used} bytes are in use at once and {n_bytes} more are "
                        f"needed, beyond cache_bytes={self.max_bytes}; raise it, use fewer "
                        "workers, or shuffle within fewer shards"
                    )
            # Write the count before the file is created. If this process is killed in between, the
            # count is too high; counting again at the limit corrects it.
            _write_used_bytes(self._used_bytes_path, used + n_bytes)
            fs.create_private(partial).close()

    def finish(self, partial: str, path: str) -> None:
        """Rename a finished download; the folder is locked so that no process counts both names."""
        with folder_lock(self._folder):
            fs.rename(partial, path)

    def evict(self, n_bytes: int) -> bool:
        """Evict shards to free `n_bytes`, if possible; return False if nothing was freed."""
        with folder_lock(self._folder):
            return self._evict_unused(n_bytes) > 0

    def trim(self) -> None:
        """Evict shards that are not pinned until the cache is within its limit.

        Do nothing if the limit is the default and nothing was downloaded. Do nothing in a finalizer
        that runs while this thread holds a `folder_lock`; the next download then makes room.
        """
        if holds_folder_lock() or not self._may_evict:
            return
        with contextlib.suppress(OSError), folder_lock(self._folder):
            used = _read_used_bytes(self._used_bytes_path)
            if used is None or used > self.max_bytes:
                used = self.used_bytes()
                used -= self._evict_unused(used - self.max_bytes)
                _write_used_bytes(self._used_bytes_path, used)

    def _evict_unused(self, n_bytes: int) -> int:
        """Free `n_bytes`: remove unlocked files, least recently used first; return freed bytes."""
        freed = 0
        for each in sorted(self._files()):
            if freed >= n_bytes:
                break
            locks = os.path.join(os.path.dirname(each.path), "locks")
            with (
                contextlib.suppress(FileNotFoundError),  # the folder of the dataset was removed
                try_exclusive(locks, each.byte) as is_exclusive,
            ):
                if is_exclusive:
                    remove_cached(each.path)
                    freed += each.n_bytes
        return freed

    def _files(self) -> Iterator[CachedFile]:
        """Yield the cached shards and partial downloads of all datasets."""
        with os.scandir(self._folder) as datasets:
            folders = [each.path for each in datasets if each.is_dir(follow_symlinks=False)]
        for folder in folders:
            with contextlib.suppress(OSError), os.scandir(folder) as found:
                for entry in found:
                    # The file may have been removed, or may not belong to the cache.
                    with contextlib.suppress(OSError, ValueError):
                        if cached := _cached_file(entry):
                            yield cached


def lock_byte(file_name: str) -> int:
    """Return the offset of the byte that locks a shard, given the shard's file name in the cache.

    The offset is a 60-bit hash: two of a million shards share an offset with probability 4e-7. The
    name is hashed, and not only the id, because shards with the same content have the same id.
    """
    return hash_bytes(os.fsencode(file_name)) >> 4


def remove_cached(path: str) -> None:
    """Remove a shard from the cache; its .ok file is removed first."""
    fs.unlink(f"{path}.ok")
    fs.unlink(path)


def _cached_file(entry: os.DirEntry[str]) -> CachedFile | None:
    if entry.name.endswith(".part"):
        file_name, n_bytes, _ = entry.name.removeprefix(".").rsplit(".", 2)
        if not _SHARD.fullmatch(file_name):
            return None
        return CachedFile(entry.stat().st_mtime, entry.path, int(n_bytes), lock_byte(file_name))
    if not _SHARD.fullmatch(entry.name):
        return None
    used_s = 0.0
    with contextlib.suppress(OSError):
        used_s = os.stat(f"{entry.path}.ok").st_mtime
    return CachedFile(used_s, entry.path, entry.stat().st_size, lock_byte(entry.name))


def _read_used_bytes(path: str) -> int | None:
    try:
        return int(Path(path).read_text("ascii"))
    except (OSError, ValueError):
        return None


def _write_used_bytes(path: str, used_bytes: int) -> None:
    with contextlib.suppress(OSError):  # if the count is missing, all files are counted again
        with fs.create(path, replace=True) as file:
            file.write(b"%d" % used_bytes)
