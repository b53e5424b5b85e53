"""Copies rows of one column from many shards: from one address range, or by reads.

`gather` uses them for columns and for the hashes of their rows.
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
from shardio.storage.file_access import FileState, open_shard, resized_error
from shardio.storage.mmap import clear_reserved, disable_readahead_at, map_fixed, reserve, unmap

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ColumnLocation:
    """The location of a column in a shard: `n_rows` rows of the range's stride from `offset` on.

    The file at `path` must still have the state `file`.
    """

    path: str
    offset: int
    n_rows: int
    file: FileState | None = None


class ColumnRange:
    """Owns a reserved address range, into parts of which a column of many files is mapped.

    Each part starts a whole number of strides after the first, so that one stride addresses every
    row of every file, and a batch over any number of shards is one gather. Unmapped addresses and
    the gaps between parts must never be read: that kills the process. `slots[i]` is the range's own
    number of the first row of part i.

    The memory is valid until `close()`, or until the object is collected; no view may outlive it.

    Args:
        stride: distance between rows in bytes.
        counts: the number of rows for which each part has room.

    Raises:
        InsufficientMemory: the address space of this process is exhausted.
        UnsupportedEnvironment: memory pages are larger than the 4096 bytes that shards are aligned
            to.
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
        """Maps that a part takes: the file, and the gap after it."""
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

    def map(self, part: int, place: ColumnLocation) -> None:
        """Map the column of a file into a part, which has room for it and is not mapped.

        Raises:
            ShardNotFound: the file is missing.
            ShardChanged: it is another file, or has another size.
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
            if now.n_bytes < place.offset + n_bytes:  # reading it would kill the process
                raise resized_error(place.path, place.offset + n_bytes, now.n_bytes)
            map_fixed(address, n_bytes, fd, place.offset, place.path)
        finally:
            os.close(fd)
        self._mapped[part] = n_bytes
        if self._is_scattered:
            disable_readahead_at(address, n_bytes)

    def unmap(self, part: int) -> None:
        """Unmap a part, if it is mapped."""
        if n_bytes := self._mapped.pop(part, 0):
            clear_reserved(self._address + int(self.slots[part]) * self._stride, n_bytes)

    def disable_readahead(self) -> None:
        """Disable read-ahead, for later maps as well."""
        self._is_scattered = True
        disable_readahead_at(self._address, self.n_bytes)

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._close()


Lines = npt.NDArray[np.uint8]

_SCRATCH_BYTES: Final = 1 << 20
"""Padded rows pass through a buffer of this size, which fits in the CPU cache."""

_PREFAULTED_BYTES: Final = range(512, (16 << 10) + 1)
"""Sizes of rows that are touched before they are copied: 0.6 of the time at 2 KiB, 0.93 at 16 KiB;
smaller and larger rows gain nothing.
"""
_PREFAULTED_ROWS: Final = 512
"""Rows that are touched and then copied: a third of the entries in a processor's TLB."""


class MappedRows:
    """A column of many files in one address range, which it owns until `close`.

    Every shard has a part of the range, into which its file is mapped.

    Args:
        stride, row_bytes: size of a row with and without padding.
        starts, counts: the dataset's row number of each shard's first row, and its number of rows.
    """

    def __init__(self, stride: int, row_bytes: int, starts: Rows, counts: Rows) -> None:
        self._use_range(ColumnRange(stride, counts.tolist()), stride, row_bytes)
        self._shift = self._range.slots - starts

    def _use_range(self, parts: ColumnRange, stride: int, row_bytes: int) -> None:
        """Copy rows from this range."""
        self.maps_per_shard = parts.maps_per_shard
        """Maps that an attached shard takes."""
        self._range, self._row_bytes = parts, row_bytes
        self._prefaulted, self._n_at_once = None, sys.maxsize
        if row_bytes in _PREFAULTED_BYTES:
            middle = row_bytes // 2
            self._prefaulted, self._n_at_once = self._range.rows[:, middle], _PREFAULTED_ROWS
        self._scratch: Lines | None = None
        if stride != row_bytes:
            self._n_at_once = min(self._n_at_once, max(1, _SCRATCH_BYTES // stride))
            self._scratch = np.empty((self._n_at_once, stride), np.uint8)

    def attach(self, shard: int, place: ColumnLocation) -> None:
        """Map the file of a shard.

        Raises:
            ShardNotFound, ShardChanged, UnsupportedEnvironment: as `ColumnRange.map`.
        """
        self._range.map(shard, place)

    def detach(self, shard: int) -> None:
        """Unmap the file of a shard."""
        self._range.unmap(shard)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Return the positions in the address range of `rows`, which lie in `shards`."""
        slots: Rows = rows + self._shift.take(shards)
        return slots

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: Lines) -> None:
        """Copy rows into the lines of `out`; `slots` is the result of `place`."""
        step = self._n_at_once
        if len(slots) <= step:
            self._copy_slice(slots, out)
            return
        for i in range(0, len(slots), step):
            self._copy_slice(slots[i : i + step], out[i : i + step])

    def _copy_slice(self, slots: Rows, out: Lines) -> None:
        """Copy at most `_n_at_once` rows."""
        if self._prefaulted is not None:
            # One byte of each row: the processor waits for many pages at once, where a copy waits
            # at the start of every row for its page. One in the middle, as the start comes at once.
            self._prefaulted[slots]
        if self._scratch is None:
            self._range.rows.take(slots, axis=0, out=out, mode="clip")
            return
        # np.take copies all of an array whose rows are not dense; so take padding along first.
        scratch = self._scratch[: len(slots)]
        self._range.rows.take(slots, axis=0, out=scratch, mode="clip")
        out[:] = scratch[:, : self._row_bytes]

    def disable_readahead(self) -> None:
        """Disable read-ahead for the range."""
        self._range.disable_readahead()

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._range.close()


class PooledRows(MappedRows):
    """A column of more files than can be mapped at a time.

    The range has as many parts as shards may be attached. A shard has a part only while it is
    attached, so rows are located when they are copied, not before.

    Args:
        stride, row_bytes, starts, counts: as of MappedRows.
        max_parts: the number of shards that may be attached at a time.
    """

    def __init__(
        self, stride: int, row_bytes: int, starts: Rows, counts: Rows, max_parts: int
    ) -> None:
        n_parts = min(max_parts, len(counts))
        largest = int(counts.max(initial=0))
        self._use_range(ColumnRange(stride, [largest] * n_parts), stride, row_bytes)
        self._starts, self._shift = starts, np.zeros(len(counts), np.int64)
        self._parts: dict[int, int] = {}
        self._free = list(range(n_parts))

    def attach(self, shard: int, place: ColumnLocation) -> None:
        """Map the file of a shard into a free part."""
        if not self._free:  # Ctrl-C may have lost some of the buffers
            taken = self._parts.values()
            self._free = [part for part in range(len(self._range.slots)) if part not in taken]
        part = self._free[-1]
        self._range.map(part, place)
        self._parts[shard] = self._free.pop()
        self._shift[shard] = self._range.slots[part] - self._starts[shard]

    def detach(self, shard: int) -> None:
        """Unmap the file of a shard and free its part."""
        if (part := self._parts.pop(shard, None)) is not None:
            self._range.unmap(part)
            self._free.append(part)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Return `rows` unchanged: `copy` locates them."""
        return rows

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: Lines) -> None:
        """Copy rows of attached shards into the lines of `out`."""
        super().copy(rows + self._shift.take(shards), rows, shards, out)


class FileRows:
    """A column of many files that are not mapped; borrows the files.

    Args:
        stride: distance between rows in bytes.
        starts: the dataset's row number of each shard's first row.
    """

    maps_per_shard: Final = 0
    """Maps that an attached shard takes."""

    def __init__(self, stride: int, starts: Rows) -> None:
        self._stride, self._starts = stride, starts
        self._places: dict[int, tuple[PreadFile, int]] = {}

    def attach(self, shard: int, file: PreadFile, offset: int) -> None:
        """Read a shard's rows from this file, in which the column starts at `offset`."""
        self._places[shard] = file, offset

    def detach(self, shard: int) -> None:
        """Forget the file of a shard."""
        self._places.pop(shard, None)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Return `rows` unchanged: `copy` locates them."""
        return rows

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: Lines) -> None:
        """Copy rows into the lines of `out`.

        Raises:
            ShardChanged: naming file, row in it, and offset.
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
        """Forget all files. Idempotent."""
        self._places.clear()


def read_hashes(hashes: MappedRows | FileRows, rows: Rows, shards: Rows) -> npt.NDArray[np.uint64]:
    """Return the stored hashes of rows of the dataset."""
    out = np.empty((len(rows), 8), np.uint8)
    hashes.copy(hashes.place(rows, shards), rows, shards, out)
    return out.reshape(-1).view("<u8")
