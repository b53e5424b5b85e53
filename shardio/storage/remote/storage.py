"""The files of a dataset in an object store: its manifest, shards in the cache, or byte ranges.

A loader downloads whole shards. For single samples, or to inspect a dataset, a RangeFile reads
parts of a shard directly from the store.

A Prefetcher downloads shards ahead of the training loop, in the order in which the loop needs them.
Its threads in the main process download while workers fill batches. Correctness does not depend on
the threads: a worker that needs a shard earlier waits for the download or downloads the shard
itself, and raises the errors that the threads ignore.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardio._base.callers import caller_stacklevel
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
from shardio.storage.remote.connection import RemoteOptions, validate_url
from shardio.storage.remote.object_store import ObjectStore, no_cancel

ListFiles = Callable[[Mapping[str, Any]], Collection[str]]

POINTER: Final = "dataset.json"
GENERATIONS: Final = "generations"
_REFRESH_DEADLINE_S: Final = 5.0
"""The deadline for requesting `dataset.json` again if a cached copy can be used instead."""
_DAMAGED_ERRORS: Final = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""Errors of parsing a damaged `dataset.json`; the manifest reader reports the damage."""


class ManifestCache:
    """Local copies of the manifest files of a dataset, in one folder for all processes.

    Published generations never change, so only `dataset.json` is requested again. If the store is
    unreachable, the last copy is used. `folder` must exist; `list_files` returns the names of the
    files that a generation refers to.
    """

    def __init__(self, folder: str, objects: ObjectStore, list_files: ListFiles) -> None:
        self.folder, self._objects, self._list_files = folder, objects, list_files

    def download(self, number: int | None) -> None:
        """Download `dataset.json` and a generation, by default the published one.

        Files in the cache are not requested again, except `dataset.json` if `number` is None.
        Raises DatasetNotFound if there is no dataset at the URL.
        """
        if number is None or not os.path.exists(self._path(POINTER)):
            self._download_pointer()
        if number is None:
            with contextlib.suppress(*_DAMAGED_ERRORS):
                number = int(json.loads(Path(self._path(POINTER)).read_bytes())["generation"])
        if number is not None:  # None: the pointer is damaged; reading it reports the damage
            name = f"{GENERATIONS}/{number:06d}.json"
            self._download(name)
            for part in self._parts(self._path(name)):
                self._download(f"{GENERATIONS}/{part}")

    def _download(self, name: str) -> None:
        if not os.path.exists(self._path(name)):
            with contextlib.suppress(ShardNotFound):  # reading the file reports that it is missing
                self.write(name, self._objects.read(name))

    def invalidate(self) -> None:
        """Remove all cached generations, because they are damaged or belong to another dataset."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._path(GENERATIONS)):
                if not name.endswith(".tmp"):  # another process is writing this file
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
            warnings.warn(
                f"{self._objects.url}: store unreachable; using the cached manifest: {error}",
                stacklevel=caller_stacklevel(),
            )
            return
        with folder_lock(self.folder):
            # Read again: another process may have downloaded generations in the meantime.
            old = self._pointer()
            if new != old:
                if old is None or _lineage(new) != _lineage(old):
                    self.invalidate()
                self.write(POINTER, new)

    def _pointer(self) -> bytes | None:
        """Return the content of the cached `dataset.json`; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return Path(self._path(POINTER)).read_bytes()
        return None

    def write(self, name: str, remote_file: bytes) -> None:
        """Write a local file that appears completely or not at all."""
        path = Path(self._path(name))
        fs.make_folder(path.parent)
        fs.write_atomic(path, remote_file, exclusive=False, durable=False)

    def _parts(self, generation: str) -> list[str]:
        """Return the names of a generation's external list files; none if it is damaged."""
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
BLOCK_BYTES: Final = 64 << 10
"""The size of the aligned block fetched for a small read; larger reads fetch only their range."""
_BLOCKS_KEPT: Final = 64


class RangeFile(PreadFile):
    """An object that is read by byte ranges. It caches its end and recent blocks. Thread-safe.

    The end of the object is fetched first, in one request. The end contains a copy of the header,
    the section table and the schema, which suffice to open most shards. The first page is assumed
    to equal the last page; the two are compared only after a download.

    Raises:
        ShardNotFound, StoreAccessDenied, StoreUnavailable: as from ObjectStore; also from every
            read.
        ShardChanged: (from every read) the object was replaced.
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
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        self._mutex = threading.Lock()

    def __getitem__(self, part: slice) -> memoryview:
        """Return a part of the object."""
        start, stop, _ = part.indices(self.nbytes)
        if stop <= start:
            return memoryview(b"")
        if stop <= PAGE <= len(self._tail):  # the first page equals the last
            return self._tail[len(self._tail) - PAGE :][start:stop]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if first == last:
            return self._block(first)[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]
        if last - first == 1 and stop - start <= BLOCK_BYTES:
            return memoryview(
                bytes(self[start : last * BLOCK_BYTES]) + self[last * BLOCK_BYTES : stop]
            )
        return self._objects.read_range(self._name, start, stop - start, self._tag)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes at `offset`."""
        view[:] = self[offset : offset + view.nbytes]

    def _read_all(self, views: list[memoryview], n_bytes: int, offset: int) -> None:
        whole = self[offset : offset + n_bytes]
        done = 0
        for view in views:
            view[:] = whole[done : done + view.nbytes]
            done += view.nbytes

    def _block(self, number: int) -> memoryview:
        with self._mutex:
            found = self._blocks.get(number)
            if found is not None:
                self._blocks.move_to_end(number)
                return found
        start = number * BLOCK_BYTES
        n_bytes = min(BLOCK_BYTES, self.nbytes - start)
        found = self._objects.read_range(self._name, start, n_bytes, self._tag)
        with self._mutex:
            self._blocks[number] = found
            while len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return found


class RemoteStorage:
    """The shards of a dataset in an object store; implements ShardStorage.

    With `remote.whole`, shards are downloaded to the cache and mapped there; otherwise they are
    read by ranges. Thread-safe, but not usable after a fork. `list_files` as in ManifestCache.
    """

    def __init__(self, url: str, remote: RemoteOptions, list_files: ListFiles) -> None:
        self.root = validate_url(url)
        self._remote, self._objects = remote, ObjectStore(url, remote.options)
        self._cache = ShardCache(remote.cache_folder, remote.cache_bytes, self._objects)
        self._manifests = ManifestCache(self._cache.root, self._objects, list_files)

    def resolve_access(self, asked: Access) -> Access:
        """Return the access method of the files: "pread" unless whole shards are downloaded."""
        found = choose_access(self._cache.root, asked)
        return found if self._remote.whole else "pread"

    @property
    def worker_access(self) -> Access:
        """The access method of workers, which download whole shards."""
        return choose_access(self._cache.root, self._remote.access)

    def manifest_folder(self, generation: int | None) -> str:
        """Return the local folder of the manifest, after downloading it if needed."""
        self._manifests.download(generation)
        return self._cache.root

    def invalidate(self) -> bool:
        """Remove the cached generations, so that they are downloaded again; return True."""
        self._manifests.invalidate()
        return True

    def max_pinned(self, sizes: Rows) -> int:
        """Return how many files of these sizes may be pinned at a time.

        If all files fit into the cache, all may be pinned. Otherwise each reader gets an equal
        share of half the cache, and the other half is for prefetching.
        """
        if not self._remote.whole or self.fits(sizes):
            return max(1, len(sizes))
        share = self._cache.max_bytes // (2 * self._remote.n_readers)
        return max(1, share // int(sizes.max(initial=1)))

    def path_of(self, summary: ShardSummary) -> str:
        """Return the path of a file in the cache; the file exists while it is pinned."""
        return self._cache.path_of(summary)

    def pin(self, summary: ShardSummary) -> str:
        """Pin a file in the cache, downloading it if needed, and return its path.

        If files are read by ranges and this file is not cached, return its URL. Raises the errors
        of `ShardCache.pin`.
        """
        return self._cache.pin(summary) if self._remote.whole else self.pin_if_cached(summary)

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

    def download(self, summary: ShardSummary, check: Callable[[], None] = no_cancel) -> None:
        """Download a file to the cache without pinning it; `check` as in `ShardCache.pin`."""
        self.pin_with_check(summary, check)
        self._cache.unpin(summary)

    def pin_with_check(self, summary: ShardSummary, check: Callable[[], None] = no_cancel) -> None:
        """Pin a file until `unpin`, downloading it if needed; `check` as in `ShardCache.pin`."""
        self._cache.pin(summary, check)

    def remote_file(self, summary: ShardSummary, path: str) -> PreadFile | None:
        """Return a reader if `pin` returned a URL as `path`; None for a local path."""
        if os.path.isabs(path):
            return None
        return RangeFile(self._objects, summary.name)

    def unpin(self, summary: ShardSummary) -> None:
        """Unpin a file. Safe in any thread at any point, also after `close`."""
        self._cache.unpin(summary)

    def close(self) -> None:
        """Stop downloading. Pinned files stay until they are unpinned. Idempotent."""
        self._cache.close()


N_THREADS: Final = 4
_POLL_S: Final = 0.05
_JOIN_TIMEOUT_S: Final = 1.0
"""The time that `close` waits for running requests."""


class PrefetchRequest(NamedTuple):
    """A file that the epoch needs from a given step on."""

    step: int
    storage: RemoteStorage
    summary: ShardSummary


class _Prefetched:
    """A file that is being downloaded, or is pinned until the loop reaches its step."""

    def __init__(self, file: PrefetchRequest) -> None:
        self.file = file
        self._mutex = threading.Lock()
        self._is_pinned = self._is_reached = False

    def keep_pinned(self) -> None:
        """Keep the downloaded file pinned; unpin it if the loop has already reached its step."""
        with self._mutex:
            self._is_pinned = not self._is_reached
        if not self._is_pinned:
            self.file.storage.unpin(self.file.summary)

    def unpin(self) -> None:
        """Unpin the file, which marks it as just used. Idempotent."""
        with self._mutex:
            was_kept, self._is_pinned, self._is_reached = self._is_pinned, False, True
        if was_kept:
            self.file.storage.unpin(self.file.summary)


class _Cancelled(Exception):
    """Raised in the threads when the epoch is over; partial downloads are kept and resumed."""


class Prefetcher:
    """A prefetcher of files for one epoch. It owns its threads until `close`.

    A downloaded file stays pinned in the cache until the loop reaches the file's step, or the
    thread that downloaded the file has nothing more to download. Without the pin, the file would be
    the least recently used, and the next download could evict it unread.

    Args:
        requests: the files in the order in which they are needed; consumed lazily, in a thread.
        current_step: returns the step that the loop has reached; None when the epoch is over.
        max_bytes: the limit of downloaded bytes that are not needed yet.
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
        """Tell the threads to stop, without waiting for them."""
        self._is_cancelled = True

    def close(self) -> None:
        """Stop the threads; a thread in a request may outlive this call. Idempotent."""
        self.cancel()
        end_s = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0, end_s - time.monotonic()))

    def _run(self) -> None:
        kept = []
        try:
            while (prefetched := self._next()) is not None:
                # Best effort: the worker that reads the file will raise the same error.
                with contextlib.suppress(ShardioError, OSError, Warning):
                    storage, summary = prefetched.file.storage, prefetched.file.summary
                    storage.pin_with_check(summary, self._check)
                    kept.append(prefetched)
                    prefetched.keep_pinned()
                    self._downloaded.add(storage.path_of(summary))
        except _Cancelled:
            pass
        finally:
            for prefetched in kept:
                prefetched.unpin()

    def _next(self) -> _Prefetched | None:
        """Return the next file as soon as there is room for it; None at the end."""
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
