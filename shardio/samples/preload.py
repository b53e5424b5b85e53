"""Read a dataset, if it fits, into the page cache, which all processes of the machine share.

Pages are not pinned: the kernel may evict them, and they are then read from the disk again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from shardio._workers.processes.limits import require_page_cache
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument
from shardio.samples.extents import NO_RANGES, Extents, Ranges, concatenate_ranges, merge_ranges
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import open_shard, resized_error
from shardio.storage.remote.object_store import run_parallel
from shardio.storage.remote.storage import N_THREADS, RemoteStorage

_N_THREADS: Final = 4
"""The number of reads at a time: enough to keep a disk busy; more reads gain little."""
_PIECE_BYTES: Final = 4 << 20
"""The size of a piece; after an error or Ctrl-C, a thread stops at the end of a piece."""
_BUFFER_BYTES: Final = 256 << 10
_GRAIN_BYTES: Final = 64 << 10
"""The granularity of ranges: reading a gap of this size takes less time than another read."""
_AT_ONCE: Final = 1 << 16
"""The number of samples whose ranges are computed at a time."""
_WHAT: Final = "the fields to preload"
_WAY_OUT: Final = (
    "leave preload() out (with shuffle='blocks' if the data is larger than memory), name fewer "
    "fields, or raise that limit"
)

Piece = tuple[str, int, int, int]
"""A part of a file: path, offset, size, and the expected size of the file."""


def preload(dataset: Dataset, fields: Sequence[str]) -> int:
    """Read all data of some fields of a dataset's samples; see `OpenDataset.preload`."""
    sizes = remote_sizes(dataset, fields)
    if not all(storage.fits(sizes) for storage in dataset.remote_storages):
        raise InvalidArgument(
            f"{dataset.path}: preload() downloads {sum(sizes.tolist())} bytes, and the cache is "
            "smaller: raise cache_bytes"
        )
    run_parallel(N_THREADS, lambda file: file[0].download(file[1]), remote_files(dataset, fields))
    # With verify="always", the ranges include all hashes, which a loader reads with the rows.
    extents = Extents(dataset, fields, "always", with_streams=True)
    fixed = _all(dataset, extents.fixed)
    require_page_cache(fixed.n_bytes, _WHAT, _WAY_OUT)
    ranges = merge_ranges(concatenate_ranges([fixed, _all(dataset, extents.records)]), _GRAIN_BYTES)
    require_page_cache(ranges.n_bytes, _WHAT, _WAY_OUT)
    run_parallel(_N_THREADS, _read_piece, _pieces(extents, ranges))
    return ranges.n_bytes


def _all(dataset: Dataset, ranges_of: Callable[[Rows, Rows], Ranges]) -> Ranges:
    found = [NO_RANGES]
    for start in range(0, len(dataset), _AT_ONCE):
        rows = dataset.rows.at(np.arange(start, min(start + _AT_ONCE, len(dataset))))
        found.append(merge_ranges(ranges_of(rows, dataset.locate(rows)), _GRAIN_BYTES))
    return merge_ranges(concatenate_ranges(found), _GRAIN_BYTES)


def _pieces(extents: Extents, ranges: Ranges) -> Iterator[Piece]:
    for number, parts in extents.files.pieces(ranges):
        path, most = extents.files.path(number), int(extents.files.sizes[number])
        for offset, n_bytes in parts:
            end = min(offset + n_bytes, most)
            for start in range(offset, end, _PIECE_BYTES):
                yield path, start, min(_PIECE_BYTES, end - start), most


def _read_piece(piece: Piece) -> None:
    path, offset, left, file_bytes = piece
    fd, buffer = open_shard(path), memoryview(bytearray(_BUFFER_BYTES))
    try:
        while left > 0:
            # The bytes are not used, so one system call may fill the same buffer many times.
            buffers = [buffer] * (left // _BUFFER_BYTES) or [buffer[:left]]
            if not (n_read := os.preadv(fd, buffers, offset)):
                raise resized_error(path, file_bytes, os.fstat(fd).st_size).at(offset=offset)
            offset, left = offset + n_read, left - n_read
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
    finally:
        os.close(fd)


def remote_files(
    dataset: Dataset, fields: Iterable[str]
) -> Iterator[tuple[RemoteStorage, ShardSummary]]:
    """Yield the files in object stores that hold some fields."""
    names = list(fields)
    for shard in range(len(dataset.shards)):
        for storage, summary in dataset.files.files_with_storage(shard, names):
            if isinstance(storage, RemoteStorage):
                yield storage, summary


def remote_sizes(dataset: Dataset, fields: Iterable[str]) -> Rows:
    """Return the sizes of the files in object stores that hold some fields."""
    storages = dataset.files.sizes_by_storage(list(fields))
    brought = [sizes for storage, sizes in storages if isinstance(storage, RemoteStorage)]
    return np.concatenate([np.zeros(0, np.int64), *brought])
