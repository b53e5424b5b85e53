"""Copy rows of one column from many shards, either from one mapped address range or by reads.

`ColumnGather` in gather.py uses this for columns and for the hashes of their rows.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.errors import UnsupportedEnvironment
from shardio.shard.verification import Rows
from shardio.storage.content import PreadFile
from shardio.storage.file_access import (
    FileState,
    clear_reserved,
    disable_readahead_at,
    map_fixed,
    open_shard,
    reserve,
    resized_error,
    unmap,
)

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ColumnLocation:
    """A column in the file at `path`: n_rows rows, from `offset`; `file` is its expected state."""

    path: str
    offset: int
    n_rows: int
    file: FileState | None = None


class ColumnRange:
    """An address range into which a column of many files is mapped. It owns the range.

    The range is divided into parts, one per file. The start of each part is a multiple of the
    stride. Therefore the whole range is one array of rows, `rows`, and a batch over any number of
    shards is one gather. `slots[i]` is the index in `rows` of the first row of part i. Reading
    unmapped addresses or the gaps between parts kills the process. No view may outlive the object.

    Args:
        stride: the distance between rows in bytes.
        counts: the maximum number of rows of each part.

    Raises:
        InsufficientMemory: this process has no free address range of the required size.
        UnsupportedEnvironment: memory pages are larger than 4096 bytes, the alignment of shards.
    """

    def __init__(self, stride: int, counts: Sequence[int]) -> None:
        if mmap.PAGESIZE > 4096:
            raise UnsupportedEnvironment(
                f"memory pages of this kernel have {mmap.PAGESIZE} bytes; "
                "shardio maps columns on 4096-byte boundaries only"
            )
        step = math.lcm(stride, mmap.PAGESIZE)
        n_steps = [max(1, -(-n * stride // step)) for n in counts]
        self.n_bytes = max(1, sum(n_steps)) * step
        """The size of the address range."""
        used = -(-max(counts, default=0) * stride // mmap.PAGESIZE) * mmap.PAGESIZE
        self.maps_per_shard = 1 if used == max(n_steps, default=1) * step else 2
        """The number of maps per part: 2 if there is a gap after the file, else 1."""
        self._stride, self._is_scattered = stride, False
        self._address = reserve(self.n_bytes)
        self._close = weakref.finalize(self, unmap, self._address, self.n_bytes)
        self._close.atexit = False  # other threads may still be reading
        ends: _Numbers = np.cumsum(np.array(n_steps, np.int64))
        self.slots: _Numbers = (ends - n_steps) * (step // stride)
        self._mapped: dict[int, int] = {}
        """The number of mapped bytes of each part."""
        raw = (ctypes.c_ubyte * self.n_bytes).from_address(self._address)
        n_slots = self.n_bytes // stride
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(memoryview(raw), np.uint8)[
            : n_slots * stride
        ].reshape(n_slots, stride)

    def attach(self, part: int, place: ColumnLocation) -> None:
        """Map the column of a file into a part that is not mapped yet and is large enough.

        Raises:
            ShardNotFound: the file is missing.
            ShardChanged: the path names another file now, or the size of the file has changed.
            UnsupportedEnvironment: the kernel's limit on the number of maps is reached.
        """
        n_bytes = place.n_rows * self._stride
        if not n_bytes:
            return
        address = self._address + int(self.slots[part]) * self._stride
        fd = open_shard(place.path)
        try:
            now = FileState.of(os.fstat(fd))
            if place.file is not None:
                place.file.check(now, place.path)
            if now.n_bytes < place.offset + n_bytes:  # reading past the end would kill the process
                raise resized_error(place.path, place.offset + n_bytes, now.n_bytes)
            map_fixed(address, n_bytes, fd, place.offset, place.path)
        finally:
            os.close(fd)
        self._mapped[part] = n_bytes
        if self._is_scattered:
            disable_readahead_at(address, n_bytes)

    def detach(self, part: int) -> None:
        """Unmap a part, if it is mapped."""
        if n_bytes := self._mapped.pop(part, 0):
            clear_reserved(self._address + int(self.slots[part]) * self._stride, n_bytes)

    def disable_readahead(self) -> None:
        """Disable read-ahead, also for parts that are mapped later."""
        self._is_scattered = True
        disable_readahead_at(self._address, self.n_bytes)

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._close()


RowBytes = npt.NDArray[np.uint8]

_SCRATCH_BYTES: Final = 1 << 20
"""The size of the buffer that padded rows pass through; it fits into the CPU cache."""

_PREFAULTED_BYTES: Final = range(512, (16 << 10) + 1)
"""The row sizes in bytes at which touching rows before the copy saves time: a copy then takes 0.6
of its time without touching at 2 KiB, and 0.93 at 16 KiB. Other sizes gain nothing.
"""
_PREFAULTED_ROWS: Final = 512
"""The number of rows touched and then copied together: a third of the entries of a CPU's TLB."""


class MappedRows(ColumnRange):
    """A column of many files in one address range, with a part for every shard; owns the range.

    Args:
        stride, row_bytes: the size of a row with and without padding.
        starts: for each shard, the index of its first row in the dataset.
        counts: the maximum number of rows of each part.
    """

    def __init__(self, stride: int, row_bytes: int, starts: Rows, counts: Sequence[int]) -> None:
        super().__init__(stride, counts)
        self._row_bytes, self._shift = row_bytes, self.slots - starts
        self._prefaulted, self._n_at_once = None, sys.maxsize
        if row_bytes in _PREFAULTED_BYTES:
            self._prefaulted, self._n_at_once = self.rows[:, row_bytes // 2], _PREFAULTED_ROWS
        self._scratch: RowBytes | None = None
        if stride != row_bytes:
            self._n_at_once = min(self._n_at_once, max(1, _SCRATCH_BYTES // stride))
            self._scratch = np.empty((self._n_at_once, stride), np.uint8)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Return the indices within the address range of `rows`, which are in `shards`."""
        slots: Rows = rows + self._shift.take(shards)
        return slots

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: RowBytes) -> None:
        """Copy rows into the rows of `out`; `slots` is the result of `place`."""
        step = self._n_at_once
        if len(slots) <= step:
            self._copy_slice(slots, out)
            return
        for i in range(0, len(slots), step):
            self._copy_slice(slots[i : i + step], out[i : i + step])

    def _copy_slice(self, slots: Rows, out: RowBytes) -> None:
        """Copy at most `_n_at_once` rows."""
        if self._prefaulted is not None:
            # Touch one byte of each row: the CPU then waits for many pages at once, whereas a copy
            # waits for one page after another. Touch the middle: the copy prefetches the start.
            self._prefaulted[slots]
        if self._scratch is None:
            self.rows.take(slots, axis=0, out=out, mode="clip")
            return
        # Copy rows with their padding: np.take would first copy the whole array if it had gaps.
        scratch = self._scratch[: len(slots)]
        self.rows.take(slots, axis=0, out=scratch, mode="clip")
        out[:] = scratch[:, : self._row_bytes]


class PooledRows(MappedRows):
    """A column of more files than can be mapped at a time.

    The range has `max_parts` parts, one for each attached shard. Because a shard has a part only
    while it is attached, its rows are located when they are copied, not by `place`.

    Args:
        stride, row_bytes, starts: as in MappedRows.
        counts: the row count of each shard.
        max_parts: the maximum number of attached shards.
    """

    def __init__(
        self, stride: int, row_bytes: int, starts: Rows, counts: Rows, max_parts: int
    ) -> None:
        n_parts = min(max_parts, len(counts))
        largest = int(counts.max(initial=0))
        super().__init__(stride, row_bytes, starts[:n_parts], [largest] * n_parts)
        self._starts, self._shift = starts, np.zeros(len(starts), np.int64)
        self._parts: dict[int, int] = {}
        self._free = list(range(n_parts))

    def attach(self, shard: int, place: ColumnLocation) -> None:
        """Map the file of a shard into a free part."""
        if not self._free:  # rebuild the list: Ctrl-C may have interrupted an update of it
            taken = self._parts.values()
            self._free = [part for part in range(len(self.slots)) if part not in taken]
        part = self._free[-1]
        super().attach(part, place)
        self._parts[shard] = self._free.pop()
        self._shift[shard] = self.slots[part] - self._starts[shard]

    def detach(self, shard: int) -> None:
        """Unmap the file of a shard and free its part."""
        if (part := self._parts.pop(shard, None)) is not None:
            super().detach(part)
            self._free.append(part)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Return `rows` unchanged: `copy` locates them."""
        return rows

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: RowBytes) -> None:
        """Copy rows of attached shards into the rows of `out`."""
        super().copy(rows + self._shift.take(shards), rows, shards, out)


class FileRows:
    """A column of many files that are not mapped. It borrows the files.

    Args:
        stride: the distance between rows in bytes.
        starts: for each shard, the index of its first row in the dataset.
    """

    maps_per_shard: Final = 0
    """The number of maps per attached shard."""

    def __init__(self, stride: int, starts: Rows) -> None:
        self._stride, self._starts = stride, starts
        self._places: dict[int, tuple[PreadFile, int]] = {}

    def attach(self, shard: int, file: PreadFile, offset: int) -> None:
        """Read a shard's rows from this file, in which the column starts at `offset`."""
        self._places[shard] = file, offset

    def detach(self, shard: int) -> None:
        """Drop the reference to the file of a shard."""
        self._places.pop(shard, None)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Return `rows` unchanged: `copy` locates them."""
        return rows

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: RowBytes) -> None:
        """Copy rows into the rows of `out`.

        Raises:
            ShardChanged: a file changed; the error has the file, the row in the file and the
                offset.
        """
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        ends = np.flatnonzero(np.diff(shards[order])) + 1
        start = 0
        for end in (*ends.tolist(), len(rows)):
            if start == end:
                return
            shard, part = int(shards[order[start]]), slice(start, end)
            local = ascending[part] - self._starts[shard]
            file, offset = self._places[shard]
            file.read_ascending(offset, self._stride, local, out, order[part])
            start = end

    def disable_readahead(self) -> None:
        """Do nothing: only the requested bytes are read."""

    def close(self) -> None:
        """Drop the references to all files. Idempotent."""
        self._places.clear()


def read_hashes(hashes: MappedRows | FileRows, rows: Rows, shards: Rows) -> npt.NDArray[np.uint64]:
    """Return the stored hashes of rows of the dataset."""
    out = np.empty((len(rows), 8), np.uint8)
    hashes.copy(hashes.place(rows, shards), rows, shards, out)
    return out.reshape(-1).view("<u8")
