"""The files of a dataset in an object store: its manifest, and its shards, whole or in parts.

A loader downloads whole shards to the cache. To read single samples, a RangeFile reads parts of a
shard directly from the store. A Prefetcher downloads shards in the main process before workers need
them. Workers do not depend on the Prefetcher: a worker waits for a running download, or downloads
the shard itself, and raises the errors that the Prefetcher ignores.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardio._base.callers import warn
from shardio.errors import (
    DatasetNotFound,
    ShardIncomplete,
    ShardioError,
    ShardNotFound,
    StoreUnavailable,
)
from shardio.format.layout import PAGE
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage import fs
from shardio.storage.content import PreadFile
from shardio.storage.file_access import Access, FileState, choose_access
from shardio.storage.remote.cache import ShardCache
from shardio.storage.remote.cache_folder import folder_lock
from shardio.storage.remote.connection import RemoteOptions
from shardio.storage.remote.object_store import ObjectStore

ListFiles = Callable[[Mapping[str, Any]], Collection[str]]

POINTER: Final = "dataset.json"
GENERATIONS: Final = "generations"
_REFRESH_DEADLINE_S: Final = 5.0
"""The deadline of a request for `dataset.json` if a cached copy can be used instead."""
_MANIFEST_BYTES: Final = 1 << 20
"""The number of bytes to free if the disk is too full for the files of a manifest."""
_DAMAGED_ERRORS: Final = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""The errors that parsing a damaged `dataset.json` can raise. The reader of the manifest reports
the damage."""


class ManifestCache:
    """Local copies of the manifest files of a dataset, in a folder that all processes share.

    Published generations never change, so only `dataset.json` is requested again. If the store is
    unreachable, the last copy of `dataset.json` is used. `list_files` returns the names of the
    other files to which the JSON of a generation refers.
    """

    def __init__(self, folder: str, objects: ObjectStore, list_files: ListFiles) -> None:
        self.folder, self._objects, self._list_files = folder, objects, list_files

    def download(self, number: int | None) -> None:
        """Download the files of the generation `number`; None means the published generation.

        If `number` is None, `dataset.json` is always requested. All other files are requested only
        if they are not in the folder. Raises DatasetNotFound if there is no dataset at the URL.
        """
        if number is None or not os.path.exists(self._path(POINTER)):
            self._download_pointer()
        if number is None:
            with contextlib.suppress(*_DAMAGED_ERRORS):
                number = int(json.loads(Path(self._path(POINTER)).read_bytes())["generation"])
        if number is not None:  # otherwise `dataset.json` is damaged; its reader will report this
            name = f"{GENERATIONS}/{number:06d}.json"
            self._download(name)
            for part in self._external_list_names(self._path(name)):
                self._download(f"{GENERATIONS}/{part}")

    def _download(self, name: str) -> None:
        if not os.path.exists(self._path(name)):
            # If the object is missing, the code that reads the file will report this.
            with contextlib.suppress(ShardNotFound):
                self.write(name, self._objects.read(name))

    def invalidate(self) -> None:
        """Remove the files of all generations: they are damaged or belong to another dataset."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._path(GENERATIONS)):
                if not name.endswith(".tmp"):  # another process is writing a file with such a name
                    fs.unlink(self._path(f"{GENERATIONS}/{name}"))

    def _download_pointer(self) -> None:
        old = self._pointer()
        try:
            new = self._objects.read(
                POINTER, deadline_s=None if old is None else _REFRESH_DEADLINE_S
            )
        except ShardNotFound as error:
            raise DatasetNotFound(
                f"{self._objects.url}: holds no {POINTER}: not a dataset, or never finished"
            ) from error
        except StoreUnavailable as error:
            if old is None:
                raise
            warn(f"{self._objects.url}: store unreachable; using the cached manifest: {error}")
            return
        with folder_lock(self.folder):
            # Read again: another process may have downloaded generations in the meantime.
            old = self._pointer()
            if new != old:
                if old is None or _lineage(new) != _lineage(old):
                    self.invalidate()
                self.write(POINTER, new)

    def _pointer(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return Path(self._path(POINTER)).read_bytes()
        return None

    def write(self, name: str, remote_file: bytes) -> None:
        """Write a file in the local folder so that it appears completely or not at all."""
        path = Path(self._path(name))
        fs.make_folder(path.parent)
        fs.write_atomic(path, remote_file, exclusive=False)

    def _external_list_names(self, generation: str) -> list[str]:
        """Return the names of the files with the long lists of the generation in a local file."""
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            raw = Path(generation).read_bytes()
            if b'"external_lists"' in raw:  # few generations have external lists
                named = self._list_files(json.loads(raw))
                return [name for name in sorted(named) if name == os.path.basename(name)]
        return []

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def _lineage(pointer: bytes) -> Any:
    with contextlib.suppress(*_DAMAGED_ERRORS):
        return json.loads(pointer)["lineage"]
    return None


TAIL_BYTES: Final = 64 << 10
"""The number of bytes at the end of an object that a RangeFile fetches first."""
FETCH_BYTES: Final = 64 << 10
"""The size of a block of an object. A small read fetches the whole blocks that contain its bytes; a
larger read fetches only its bytes."""
_MAX_CACHED_BLOCKS: Final = 64


class RangeFile(PreadFile):
    """A shard in an object store. Only byte ranges of the shard are read. Thread-safe.

    The end of the object, which usually contains all that is needed to open the shard, is fetched
    first and kept. A read of the first page returns the last page, which is a copy of the first;
    only a download compares the two. Recently read blocks are kept, too. Reads raise the errors of
    ObjectStore, and ShardChanged if the object was replaced.
    """

    def __init__(self, objects: ObjectStore, name: str) -> None:
        self.path = f"{objects.url}/{name}"
        self._objects, self._name = objects, name
        tail = objects.read_tail(name, TAIL_BYTES)
        self.nbytes, self._tag = tail.n_bytes, tail.tag
        if self.nbytes == 0:
            raise ShardIncomplete(f"{self.path}: the object is empty: its writer did not finish")
        self._tail, self._tail_start = tail.data, self.nbytes - len(tail.data)
        self.state = FileState(0, 0, self.nbytes, 0)
        read_block = functools.partial(_read_block, objects, name, tail.tag, self.nbytes)
        self._block = functools.lru_cache(_MAX_CACHED_BLOCKS)(read_block)

    def __getitem__(self, part: slice) -> memoryview:
        """Return a part of the object."""
        start, stop, _ = part.indices(self.nbytes)
        if stop <= start:
            return memoryview(b"")
        if stop <= PAGE <= len(self._tail):  # return bytes of the last page, which are the same
            return self._tail[len(self._tail) - PAGE :][start:stop]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        first, last = start // FETCH_BYTES, (stop - 1) // FETCH_BYTES
        if first == last:
            return self._block(first)[start - first * FETCH_BYTES : stop - first * FETCH_BYTES]
        if last - first == 1 and stop - start <= FETCH_BYTES:
            return memoryview(
                bytes(self[start : last * FETCH_BYTES]) + self[last * FETCH_BYTES : stop]
            )
        return self._objects.read_range(self._name, start, stop - start, self._tag)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes of the object at `offset`."""
        view[:] = self[offset : offset + view.nbytes]

    def _read_all(self, views: list[memoryview], n_bytes: int, offset: int) -> None:
        whole = self[offset : offset + n_bytes]
        done = 0
        for view in views:
            view[:] = whole[done : done + view.nbytes]
            done += view.nbytes


def _read_block(
    objects: ObjectStore, name: str, tag: str | None, n_bytes: int, number: int
) -> memoryview:
    start = number * FETCH_BYTES
    return objects.read_range(name, start, min(FETCH_BYTES, n_bytes - start), tag)


class RemoteStorage:
    """The shards of a dataset in an object store.

    With `remote.whole_shards`, shards are downloaded to the cache and read there; otherwise, byte
    ranges are read. Thread-safe, but not usable after a fork. `list_files` is the argument of
    ManifestCache.
    """

    def __init__(self, url: str, remote: RemoteOptions, list_files: ListFiles) -> None:
        self._remote, self._objects = remote, ObjectStore(url, remote.options)
        self.root = self._objects.url
        self._cache = ShardCache(remote.cache_folder, remote.cache_bytes, self._objects)
        self._manifests = ManifestCache(self._cache.root, self._objects, list_files)

    def resolve_access(self, access: Access) -> Access:
        """Return the access method for the shards: "pread" unless whole shards are downloaded."""
        found = choose_access(self._cache.root, access)
        return found if self._remote.whole_shards else "pread"

    def manifest_folder(self, generation: int | None) -> str:
        """Return the local folder of the manifest, after `ManifestCache.download`."""
        name = f"{self.root}/{POINTER}"
        self._cache.retry_when_full(
            name, _MANIFEST_BYTES, lambda: self._manifests.download(generation)
        )
        return self._cache.root

    def invalidate(self) -> bool:
        """Remove the local copies of all generations; return True: they can be downloaded again."""
        self._manifests.invalidate()
        return True

    def max_pinned(self, sizes: Rows) -> int:
        """Return how many files of these sizes a reader may pin at a time.

        If all fit into the cache together, or if only byte ranges are read, all may be pinned.
        Otherwise, all readers share half of the cache; the other half is for prefetched files.
        """
        if not self._remote.whole_shards or self.fits(sizes):
            return max(1, len(sizes))
        share = self._cache.max_bytes // (2 * self._remote.n_readers)
        return max(1, share // int(sizes.max(initial=1)))

    def path_of(self, summary: ShardSummary) -> str:
        """Return the path that a file has in the cache. The file exists while it is pinned."""
        return self._cache.path_of(summary)

    def pin(self, summary: ShardSummary) -> str:
        """Pin a file and return its path in the cache, or its URL if only parts will be read."""
        pin = self._cache.pin if self._remote.whole_shards else self.pin_if_cached
        return pin(summary)

    def pin_if_cached(self, summary: ShardSummary) -> str:
        """Pin a file if it is cached and return its path; otherwise return its URL."""
        return self._cache.pin_if_cached(summary) or f"{self.root}/{summary.name}"

    @property
    def max_bytes(self) -> int:
        """The limit of the cache in bytes."""
        return self._cache.max_bytes

    def fits(self, sizes: Rows) -> bool:
        """Return True if files of these sizes fit into the cache together."""
        return bool(sum(sizes.tolist()) <= self._cache.max_bytes)

    def download(self, summary: ShardSummary) -> None:
        """Download a file to the cache without pinning it."""
        self._cache.pin(summary)
        self._cache.unpin(summary)

    def pin_with_check(self, summary: ShardSummary, check: Callable[[], None]) -> None:
        """Pin a file until `unpin`; download it if needed. `ShardCache.pin` explains `check`."""
        self._cache.pin(summary, check)

    def remote_file(self, summary: ShardSummary, path: str) -> PreadFile | None:
        """Return a RangeFile if `path`, which `pin` has returned, is a URL; None otherwise."""
        if os.path.isabs(path):
            return None
        return RangeFile(self._objects, summary.name)

    def unpin(self, summary: ShardSummary) -> None:
        """Unpin a file. Safe in any thread at any point, even after `close`."""
        self._cache.unpin(summary)

    def close(self) -> None:
        """Shrink the cache to its limit. Pinned files stay until they are unpinned. Idempotent."""
        self._cache.close()


N_THREADS: Final = 4
_POLL_S: Final = 0.05
_JOIN_TIMEOUT_S: Final = 1.0
"""The maximum time that `close` waits for the threads, which may be in a request."""


class PrefetchRequest(NamedTuple):
    """A file that the epoch first needs at step `step`; `storage` can download the file."""

    step: int
    storage: RemoteStorage
    summary: ShardSummary


class _Prefetched:
    """A file that is being downloaded, or that is pinned until the loop reaches the file's step."""

    def __init__(self, file: PrefetchRequest) -> None:
        self.file = file
        self._mutex = threading.Lock()
        self._is_pinned = self._is_reached = False

    def mark_downloaded(self) -> None:
        with self._mutex:
            self._is_pinned = not self._is_reached
        if not self._is_pinned:
            self.file.storage.unpin(self.file.summary)

    def unpin(self) -> None:
        with self._mutex:
            was_pinned, self._is_pinned, self._is_reached = self._is_pinned, False, True
        if was_pinned:
            self.file.storage.unpin(self.file.summary)


class _Cancelled(Exception):
    """Raised in the threads when the epoch is over. Partial downloads can be resumed later."""


class Prefetcher:
    """A downloader of the files of one epoch, ahead of the loop. Owns its threads until `close`.

    A downloaded file stays pinned in the cache until the loop reaches the file's step, or until the
    thread that downloaded it ends. Without the pin, the next download could evict the file before
    it is read.

    Args:
        requests: the files in the order in which they are needed.
        current_step: returns the step that the loop has reached; None when the epoch is over.
        max_bytes: the maximum number of bytes to download before the loop needs them.
        downloaded: a set to which the paths of downloaded files are added.
    """

    def __init__(
        self,
        requests: Iterator[PrefetchRequest],
        current_step: Callable[[], int | None],
        max_bytes: int,
        downloaded: set[str],
    ) -> None:
        self._requests, self._current_step, self._max_bytes = requests, current_step, max_bytes
        self._downloaded = downloaded
        self._mutex = threading.Lock()
        self._pending: deque[_Prefetched] = deque()
        """The files that are being downloaded, or that the loop has not reached yet, in order."""
        self._is_cancelled = False
        self._threads = [
            threading.Thread(target=self._run, name="shardio-ahead", daemon=True)
            for _ in range(N_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def cancel(self) -> None:
        """Ask the threads to stop, but do not wait for them."""
        self._is_cancelled = True

    def close(self) -> None:
        """Stop the threads; a thread in a request may outlive this call. Idempotent."""
        self.cancel()
        end_s = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0, end_s - time.monotonic()))

    def _run(self) -> None:
        prefetched_files = []
        try:
            while (prefetched := self._next()) is not None:
                # Ignore errors: the worker that needs the file will raise the same error.
                with contextlib.suppress(ShardioError, OSError, Warning):
                    storage, summary = prefetched.file.storage, prefetched.file.summary
                    storage.pin_with_check(summary, self._check)
                    prefetched_files.append(prefetched)
                    prefetched.mark_downloaded()
                    self._downloaded.add(storage.path_of(summary))
        except _Cancelled:
            pass
        finally:
            for prefetched in prefetched_files:
                prefetched.unpin()

    def _next(self) -> _Prefetched | None:
        """Wait until there is room for the next file, and return it; None if no file is left."""
        with self._mutex:
            file = next(self._requests, None)
            while file is not None:
                self._check()
                step = self._current_step()
                while self._pending and step is not None and self._pending[0].file.step <= step:
                    self._pending.popleft().unpin()
                n_ahead = sum(prefetched.file.summary.n_bytes for prefetched in self._pending)
                if not self._pending or n_ahead + file.summary.n_bytes <= self._max_bytes:
                    self._pending.append(_Prefetched(file))
                    return self._pending[-1]
                time.sleep(_POLL_S)
            return None

    def _check(self) -> None:
        if self._is_cancelled or self._current_step() is None:
            raise _Cancelled
