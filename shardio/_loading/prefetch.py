"""Bring data close before it is needed: into the page cache, or from an object store to the disk.

`preload` reads a loader's files into the page cache before its first batch, if there is room. Pages
are read, not copied: all processes of the machine share them. They are not pinned: under memory
pressure some may be evicted, and are then read again.

`RemotePrefetch` downloads the shards that a pass needs ahead of their use, in order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np

from shardio._engine.dispatch.iterations import EpochIteration
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan, IndexPlanner
from shardio._workers.processes.limits import require_page_cache
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument
from shardio.order import Order
from shardio.samples.extents import NOTHING, Extents, Ranges, joined, merged
from shardio.samples.view import SampleView
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import open_shard, resized_error
from shardio.storage.remote.object_store import run_parallel
from shardio.storage.remote.storage import N_THREADS, Prefetcher, PrefetchRequest, RemoteStorage

_N_THREADS: Final = 4
"""This many reads at a time keep a disk busy; more gain little."""
_PIECE_BYTES: Final = 4 << 20
"""Between two pieces of this size, a thread checks whether it should stop."""
_GRAIN_BYTES: Final = 64 << 10
"""Reading a gap of this size between two ranges costs less than another read."""
_AT_ONCE: Final = 1 << 16
"""Samples whose places are worked out in one go."""
_WAY_OUT: Final = (
    "leave preload=False (with shuffle='blocks' if the data is larger than memory), read fewer "
    "fields, or raise that limit"
)


class _PreloadRange(NamedTuple):
    """A part of a file that has `file_bytes`."""

    path: str
    offset: int
    n_bytes: int
    file_bytes: int


def preload(view: SampleView, fields: Sequence[str]) -> int:
    """Read all data of some fields of a view's samples; return the number of bytes.

    Data in memory already is only checked. Ctrl-C ends it within a few MiB.

    Raises:
        InsufficientMemory: it does not fit into the available memory; nothing was read.
        ShardChanged: a file is shorter than it was.
        OSError: a file cannot be read.
    """
    # Hashes too: they are read together with their rows.
    extents = Extents(view.dataset, fields, "always", has_streams=True)
    fixed = _all(view, extents, of_records=False)
    _require(fixed.n_bytes)
    ranges = merged(joined([fixed, _all(view, extents, of_records=True)]), _GRAIN_BYTES)
    _require(ranges.n_bytes)
    _read(list(_pieces(extents, ranges)))
    return ranges.n_bytes


def _require(n_bytes: int) -> None:
    require_page_cache(n_bytes, "the fields to preload", _WAY_OUT)


def _all(view: SampleView, extents: Extents, *, of_records: bool) -> Ranges:
    """Return the byte ranges of all samples of a view."""
    of = extents.records if of_records else extents.fixed
    found = [NOTHING]
    n, rows_of = view.every_row()
    for start in range(0, n, _AT_ONCE):
        rows = rows_of(np.arange(start, min(start + _AT_ONCE, n)))
        found.append(merged(of(rows, view.dataset.locate(rows)), _GRAIN_BYTES))
    return merged(joined(found), _GRAIN_BYTES)


def _pieces(extents: Extents, ranges: Ranges) -> Iterator[_PreloadRange]:
    """Yield the pieces of all ranges, none beyond the end of its file."""
    for number, places in extents.files.pieces(ranges):
        path, most = extents.files.path(number), int(extents.files.sizes[number])
        for offset, n_bytes in places:
            end = min(offset + n_bytes, most)
            for start in range(offset, end, _PIECE_BYTES):
                yield _PreloadRange(path, start, min(_PIECE_BYTES, end - start), most)


def _read(pieces: Sequence[_PreloadRange]) -> None:
    """Read pieces in several threads, until one fails or this one is interrupted."""
    stop = threading.Event()
    with ThreadPoolExecutor(_N_THREADS, "shardio-preload") as threads:
        shares = [pieces[i::_N_THREADS] for i in range(_N_THREADS)]
        try:
            for future in [threads.submit(_read_share, share, stop) for share in shares]:
                future.result()
        finally:
            stop.set()


def _read_share(pieces: Sequence[_PreloadRange], stop: threading.Event) -> None:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for piece in pieces:
        if stop.is_set():
            return
        fd = open_shard(piece.path)
        try:
            _read_piece(fd, piece, buffer[: piece.n_bytes])
        except BaseException:
            stop.set()  # nothing waits for this thread before the others
            raise
        finally:
            os.close(fd)


def _read_piece(fd: int, piece: _PreloadRange, buffer: memoryview) -> None:
    done = 0
    while done < buffer.nbytes:
        place = piece.offset + done
        try:
            n_read = os.preadv(fd, [buffer[done:]], place)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), piece.path) from error
        if not n_read:
            found = os.fstat(fd).st_size
            raise resized_error(piece.path, piece.file_bytes, found).at(offset=place)
        done += n_read


_SAMPLES_AT_ONCE: Final = 1 << 14


class RemotePrefetch:
    """Downloads shards for a loader's latest pass ahead of their use; does nothing for folders.

    Args:
        dataset: opened by main.
        batch_spec: determines the content of batches.
        order: of its epochs; None if the user draws them.

    Raises:
        InvalidArgument: epochs need more at once than the cache may hold.
    """

    def __init__(self, dataset: Dataset, batch_spec: BatchSpec, order: Order | None) -> None:
        self._dataset, self._batch_spec = dataset, batch_spec
        self._ahead: Prefetcher | None = None
        self._at_once = 0
        """The bytes that a pass uses at a time, which must not evict each other."""
        self._here = set[str]()
        """The paths of files that have come, and stay, if all fit into the cache."""
        self._is_done = not dataset.remote_storages
        if not self._is_done and order is not None and not self._all_fit():
            most, by_shard = self._most_bytes(), self._sizes().reshape(-1, len(dataset.shards))
            room = f"{dataset.path}: has {by_shard.sum()} bytes, of which {most} fit into its cache"
            self._at_once = order.check_cache(by_shard.sum(axis=0), most, room)

    def follow(self, iteration: EpochIteration, view: SampleView) -> None:
        """Download for a pass, and stop downloading for the one before."""
        if self._is_done or self._has_all():
            return
        if self._ahead is not None:
            self._ahead.cancel()

        def reached() -> int | None:
            is_over = iteration.is_cancelled or iteration.is_exhausted
            return None if is_over else iteration.n_handed_over

        wanted = _wanted(view, self._batch_spec, iteration.plan)
        most = self._most_bytes()
        most_ahead = min(most // 2, max(0, most - self._at_once))
        self._ahead = Prefetcher(wanted, reached, most_ahead, self._here)

    def download_all(self) -> None:
        """Download all files now.

        Raises:
            InvalidArgument: they do not fit into the cache.
            StoreUnavailable, StoreAccessDenied, ShardCorrupt, …: a file cannot be downloaded.
        """
        if not self._all_fit():
            raise InvalidArgument(
                f"{self._dataset.path}: preload=True brings {sum(self._sizes().tolist())} bytes, "
                "and the cache is for less: raise cache_bytes"
            )
        run_parallel(N_THREADS, lambda file: file[0].download(file[1]), self._all_files())

    def _has_all(self) -> bool:
        """Return True if there is nothing left to download."""
        self._is_done = self._all_fit() and all(
            storage.path_of(summary) in self._here for storage, summary in self._all_files()
        )
        return self._is_done

    def _all_files(self) -> Iterator[tuple[RemoteStorage, ShardSummary]]:
        for shard in range(len(self._dataset.shards)):
            for storage, summary in self._dataset.files.files_with_storage(
                shard, self._batch_spec.fields
            ):
                if isinstance(storage, RemoteStorage):
                    yield storage, summary

    def _sizes(self) -> Rows:
        """Return the sizes of the files in object stores that hold the fields."""
        storages = self._dataset.files.sizes_by_storage(self._batch_spec.fields)
        brought = [sizes for storage, sizes in storages if isinstance(storage, RemoteStorage)]
        return np.concatenate([np.zeros(0, np.int64), *brought])

    def _most_bytes(self) -> int:
        """Return how many bytes the caches may hold."""
        return min(storage.max_bytes for storage in self._dataset.remote_storages)

    def _all_fit(self) -> bool:
        return all(storage.fits(self._sizes()) for storage in self._dataset.remote_storages)

    def end_with(self, close: Callable[[], None]) -> None:
        """Stop downloading, and close the engine at the same time."""
        if self._ahead is not None:
            self._ahead.cancel()
        try:
            close()
        finally:
            if self._ahead is not None:
                self._ahead.close()
                for storage in self._dataset.remote_storages:
                    # Closed again: nothing uses the downloads that were still under way
                    storage.close()


def _wanted(view: SampleView, batch_spec: BatchSpec, plan: EpochPlan) -> Iterator[PrefetchRequest]:
    """Yield the files of a pass, each where it is first needed, and again after a long gap."""
    partition, dataset = plan.partition, view.dataset
    index_planner = IndexPlanner(view, seed=batch_spec.seed)
    n_steps = max(1, _SAMPLES_AT_ONCE // partition.batch_size)
    last_seen = np.full(len(dataset.shards), -2)
    for number, first in enumerate(range(partition.first_step, partition.last_step, n_steps)):
        last = min(first + n_steps, partition.last_step)
        index_chunk = index_planner.at(plan, partition.positions(first, last))
        rows, located = index_chunk.covered(slice(None))
        shards, storages = np.unique(located, return_index=True)
        for i in np.argsort(storages, kind="stable").tolist():
            shard = int(shards[i])
            if last_seen[shard] < number - 1:
                step = first + int(storages[i]) * (last - first) // len(rows)
                for storage, summary in dataset.files.files_with_storage(shard, batch_spec.fields):
                    if isinstance(storage, RemoteStorage):
                        yield PrefetchRequest(step, storage, summary)
        last_seen[shards] = number
