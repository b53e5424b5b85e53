"""The total size of a cache over all its datasets, and eviction of shards beyond its limit.

The least recently used shards are evicted first; locks protect pinned shards and running downloads.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from typing import Final, NamedTuple

from shardio._base.callers import caller_stacklevel
from shardio.format.checksum import hash_bytes
from shardio.storage import fs
from shardio.storage.remote.locks import folder_lock, holds_folder_lock, try_exclusive

_MANY_FILES: Final = 1000
"""With more files, 5% more than needed is evicted, so that files are listed less often."""
_SHARD: Final = re.compile(r".*\.[0-9a-f]{32}\.shard", re.DOTALL)
"""Matches NAME.ID.shard. Files with other names do not belong to the cache."""


class CachedFile(NamedTuple):
    """A file in the cache that may be removed unless its lock is held."""

    used_s: float
    path: str
    n_bytes: int
    byte: int


class CacheEvictor:
    """An evictor that keeps a cache within its limit. Safe for several threads and processes.

    Args:
        folder: the folder of the cache; must exist.
        max_bytes: the limit in bytes; None for nine tenths of the free space.
    """

    def __init__(self, folder: str, max_bytes: int | None) -> None:
        self._folder, self._place = folder, os.path.join(folder, "used")
        self._warned = False
        self._may_evict = max_bytes is not None
        """True if the caller set the limit, or something was downloaded."""
        if max_bytes is None:
            max_bytes = (shutil.disk_usage(folder).free + self.used_bytes()) * 9 // 10
        self.max_bytes = max_bytes

    def used_bytes(self) -> int:
        """Return the total size of all files in the cache."""
        return sum(each.n_bytes for each in self._files())

    def reserve(self, partial: str, n_bytes: int) -> None:
        """Make room for a download, and add the size to the count unless it is counted already.

        If all shards are pinned, warn and let the cache exceed its limit.
        """
        self._may_evict = True
        with folder_lock(self._folder):
            if os.path.exists(partial):
                return
            used = _read_count(self._place)
            if used is None or used + n_bytes > self.max_bytes:
                files = list(self._files())
                used = sum(each.n_bytes for each in files)
                spare = self.max_bytes // 20 if len(files) > _MANY_FILES else 0
                used -= self._evict_unused(used + n_bytes + spare - self.max_bytes)
                if used + n_bytes > self.max_bytes and not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"{self._folder}: {used} bytes are in use at once and {n_bytes} more are "
                        f"needed, beyond cache_bytes={self.max_bytes}; raise it, use fewer "
                        "workers, or shuffle within fewer shards",
                        stacklevel=caller_stacklevel(),
                    )
            _write_count(
                self._place, used + n_bytes
            )  # counted before the file is created: too high a count is corrected later
            fs.create_private(partial).close()

    def finish(self, partial: str, path: str) -> None:
        """Rename a complete download; due to a lock, a recount counts the file exactly once."""
        with folder_lock(self._folder):
            fs.rename(partial, path)

    def evict(self, n_bytes: int) -> bool:
        """Evict `n_bytes` of shards because the disk is full; return False if none was evicted."""
        with folder_lock(self._folder):
            return self._evict_unused(n_bytes) > 0

    def trim(self) -> None:
        """Evict shards beyond the limit that are no longer pinned.

        May be called by a finalizer. If the finalizer interrupts code of this module, nothing is
        done, and the next download makes room instead. Nothing is evicted either if the limit is
        the default and nothing was downloaded.
        """
        if holds_folder_lock() or not self._may_evict:
            return
        with contextlib.suppress(OSError), folder_lock(self._folder):
            used = _read_count(self._place)
            if used is None or used > self.max_bytes:
                used = self.used_bytes()
                used -= self._evict_unused(used - self.max_bytes)
                _write_count(self._place, used)

    def _evict_unused(self, n_bytes: int) -> int:
        """Remove unpinned files, `n_bytes` or a little more in total; return the bytes removed."""
        freed = 0
        for each in sorted(self._files()):
            if freed >= n_bytes:
                break
            locks = os.path.join(os.path.dirname(each.path), "locks")
            with (
                contextlib.suppress(FileNotFoundError),  # the dataset's folder was removed
                try_exclusive(locks, each.byte) as is_exclusive,
            ):
                if is_exclusive:
                    remove_cached(each.path)
                    freed += each.n_bytes
        return freed

    def _files(self) -> Iterator[CachedFile]:
        """Iterate over the cached shards and partial downloads of all datasets."""
        with os.scandir(self._folder) as datasets:
            folders = [each.path for each in datasets if each.is_dir(follow_symlinks=False)]
        for folder in folders:
            with contextlib.suppress(OSError), os.scandir(folder) as found:
                for entry in found:
                    with contextlib.suppress(OSError, ValueError):  # removed, or not a cache file
                        if cached := _cached_file(entry):
                            yield cached


def lock_byte(file_name: str) -> int:
    """Return the offset of the byte that is locked for a shard, given its file name in the cache.

    The offset is a hash of the file name, cut to 60 bits to be a valid file offset. Among a million
    shards, two collide with a probability of 4e-7. The id alone would not suffice, because shards
    of equal content have equal ids.
    """
    return hash_bytes(os.fsencode(file_name)) >> 4


def remove_cached(path: str) -> None:
    """Remove a shard from the cache, its .ok file first."""
    fs.unlink(f"{path}.ok")
    fs.unlink(path)


def _cached_file(entry: os.DirEntry[str]) -> CachedFile | None:
    if entry.name.endswith(".part"):
        whole, n_bytes, _ = entry.name.removeprefix(".").rsplit(".", 2)
        if not _SHARD.fullmatch(whole):
            return None
        return CachedFile(entry.stat().st_mtime, entry.path, int(n_bytes), lock_byte(whole))
    if not _SHARD.fullmatch(entry.name):
        return None
    used_s = 0.0
    with contextlib.suppress(OSError):
        used_s = os.stat(f"{entry.path}.ok").st_mtime
    return CachedFile(used_s, entry.path, entry.stat().st_size, lock_byte(entry.name))


def _read_count(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _write_count(path: str, used_bytes: int) -> None:
    with contextlib.suppress(OSError):  # a missing count is recounted
        with fs.create(path, replace=True) as file:
            file.write(b"%d" % used_bytes)
