"""Read a loader's data into the page cache before its first batch, if there is room.

Pages are read, not copied: all processes of the machine share them. Nothing pins them: under memory
pressure some may be evicted, and are then read again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np

from shardio._engine.filling.extents import NOTHING, Extents, Ranges, joined, merged
from shardio._workers.processes.limits import require_page_cache
from shardio.dataset.dataset import Dataset
from shardio.storage.file_access import open_shard, resized_error

_N_THREADS: Final = 4
"""This many reads at a time keep a disk busy; more gain little."""
_PIECE_BYTES: Final = 4 << 20
"""Between two of these a thread looks whether it is to stop."""
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


def preload(dataset: Dataset, fields: Sequence[str]) -> int:
    """Read all data of some fields of a view's samples; return the number of bytes.

    Data in memory already is only checked. Ctrl-C ends it within a few MiB.

    Raises:
        InsufficientMemory: it does not fit into the available memory; nothing was read.
        ShardChanged: a file is shorter than it was.
        OSError: a file cannot be read.
    """
    # Hashes too: they are read with their rows.
    extents = Extents(dataset, fields, "always", has_streams=True)
    fixed = _all(dataset, extents, of_records=False)
    _require(fixed.n_bytes)
    ranges = merged(joined([fixed, _all(dataset, extents, of_records=True)]), _GRAIN_BYTES)
    _require(ranges.n_bytes)
    _read(list(_pieces(extents, ranges)))
    return ranges.n_bytes


def _require(n_bytes: int) -> None:
    require_page_cache(n_bytes, "the fields to preload", _WAY_OUT)


def _all(dataset: Dataset, extents: Extents, *, of_records: bool) -> Ranges:
    """Return the byte ranges of all samples of a view."""
    of = extents.records if of_records else extents.fixed
    found = [NOTHING]
    is_packed = dataset.rows.packed is not None
    n = dataset.rows.n_rows if is_packed else len(dataset)
    rows_of = dataset.rows.map_rows if is_packed else dataset.rows.at
    for start in range(0, n, _AT_ONCE):
        rows = rows_of(np.arange(start, min(start + _AT_ONCE, n)))
        found.append(merged(of(rows, dataset.locate(rows)), _GRAIN_BYTES))
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
            stop.set()  # nobody waits for this thread before the others
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
