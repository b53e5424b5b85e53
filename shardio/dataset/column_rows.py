"""A column of many files in one reserved range of addresses. Used by `rows`.

Rows of one column of many shards, copied to where they are wanted: from maps, or by reads.

Used by `gather`, for columns and for the hashes of their rows.
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
from shardio.storage.file_access import FileState, open_shard, resized_error
from shardio.storage.mmap import clear_reserved, disable_readahead_at, map_fixed, reserve, unmap
from shardio.storage.pread import PreadFile

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ColumnLocation:
    """Where one shard keeps a column: n_rows rows of the range's stride from `offset` on.

    The file at `path` must still be the one that `file` was.
    """

    path: str
    offset: int
    n_rows: int
    file: FileState | None = None


class ColumnRange:
    """Owns one reserved address range, into whose parts a column of many files is mapped.

    Each part begins a whole number of strides behind the first, so that one stride addresses every
    row of every file and a batch over any number of shards is one gather. What is not mapped, and
    the gaps between parts, must never be read: that kills. `slots[i]` is the range's own number of
    the first row of part i.

    The memory is valid until `close()` (or until the object is collected); no view of it may be
    handed on beyond that.

    Args:
        stride: from one row to the next.
        counts: how many rows each part has room for.

    Raises:
        InsufficientMemory: the addresses of this process do not suffice.
        UnsupportedEnvironment: memory pages are larger than the 4096 bytes that shards are aligned
            to.
    """

    def __init__(self, stride: int, counts: Sequence[int]) -> None:
        if mmap.PAGESIZE > 4096:
            raise UnsupportedEnvironment(
                f"this kernel has memory pages of {mmap.PAGESIZE} bytes; "
                "shardio maps columns on 4096-byte boundaries only"
            )
        step = math.lcm(stride, mmap.PAGESIZE)
        n_steps = [max(1, -(-n * stride // step)) for n in counts]
        self.n_bytes = max(1, sum(n_steps)) * step
        """Of addresses."""
        used = -(-max(counts, default=0) * stride // mmap.PAGESIZE) * mmap.PAGESIZE
        self.maps_per_shard = 1 if used == max(n_steps, default=1) * step else 2
        """How many maps a part takes: of a file, and of the gap behind it."""
        self._stride, self._is_scattered = stride, False
        self._address = reserve(self.n_bytes)
        self._close = weakref.finalize(self, unmap, self._address, self.n_bytes)
        self._close.atexit = False  # other threads may still be reading
        ends: _Numbers = np.cumsum(np.array(n_steps, np.int64))
        self.slots: _Numbers = (ends - n_steps) * (step // stride)
        self._mapped: dict[int, int] = {}
        """Bytes of each part that are mapped."""
        raw = (ctypes.c_ubyte * self.n_bytes).from_address(self._address)
        n_slots = self.n_bytes // stride
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(memoryview(raw), np.uint8)[
            : n_slots * stride
        ].reshape(n_slots, stride)

    def map(self, part: int, place: ColumnLocation) -> None:
        """Map what a file has of the column into a part, which has room for it and is not mapped.

        Raises:
            ShardNotFound: the file is missing.
            ShardChanged: it is another one, or has another size.
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
            if now.n_bytes < place.offset + n_bytes:  # reading it would kill
                raise resized_error(place.path, place.offset + n_bytes, now.n_bytes)
            map_fixed(address, n_bytes, fd, place.offset, place.path)
        finally:
            os.close(fd)
        self._mapped[part] = n_bytes
        if self._is_scattered:
            disable_readahead_at(address, n_bytes)

    def unmap(self, part: int) -> None:
        """Have a part hold nothing, if it is mapped."""
        if n_bytes := self._mapped.pop(part, 0):
            clear_reserved(self._address + int(self.slots[part]) * self._stride, n_bytes)

    def disable_readahead(self) -> None:
        """Have the kernel read no more than the pages that are touched, also of later maps."""
        self._is_scattered = True
        disable_readahead_at(self._address, self.n_bytes)

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._close()


Lines = npt.NDArray[np.uint8]

_SCRATCH_BYTES: Final = 1 << 20
"""Rows that are padded on disk pass through this much memory, small enough to stay in cache."""

_PREFAULTED_BYTES: Final = range(512, (16 << 10) + 1)
"""Sizes of rows that are touched before they are copied: 0.6 of the time at 2 KiB, 0.93 at 16 KiB;
rows that are smaller or larger gain nothing by it."""
_PREFAULTED_ROWS: Final = 512
"""Rows that are touched and then copied: a third of the pages that processors keep track of."""


class MappedRows:
    """A column of many files in one range of addresses, which it owns until `close`.

    Every shard has a part of the range, into which its file's is put.

    Args:
        stride, row_bytes: from one row to the next, and without padding.
        starts, counts: the dataset's row number of each shard's first row, and how many it has.
    """

    def __init__(self, stride: int, row_bytes: int, starts: Rows, counts: Rows) -> None:
        self._use_range(ColumnRange(stride, counts.tolist()), stride, row_bytes)
        self._shift = self._range.slots - starts

    def _use_range(self, parts: ColumnRange, stride: int, row_bytes: int) -> None:
        """Copy from this range."""
        self.maps_per_shard = parts.maps_per_shard
        """How many maps a shard takes that is put."""
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
        """Map what the file of a shard has.

        Raises:
            ShardNotFound, ShardChanged, UnsupportedEnvironment: as `ColumnRange.map`.
        """
        self._range.map(shard, place)

    def detach(self, shard: int) -> None:
        """Let go of the file of a shard."""
        self._range.unmap(shard)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Where in the address range `rows` of the dataset, which lie in `shards`, are."""
        slots: Rows = rows + self._shift.take(shards)
        return slots

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: Lines) -> None:
        """Copy rows into the lines of out, one after the other; `slots` is what `place` gave."""
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
        """Have the kernel read no more than the pages that are touched."""
        self._range.disable_readahead()

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._range.close()


class PooledRows(MappedRows):
    """Likewise, where too many files have a column for all to be mapped at a time.

    The range has as many parts as there may be, and a shard has one only for as long as its file is
    put there: so rows are found when they are copied, not before.

    Args:
        stride, row_bytes, starts, counts: as above.
        most: how many shards may have been put at a time.
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
        """Map what the file of a shard has, into any part that is free."""
        if not self._free:  # Ctrl-C may have cost some
            taken = self._parts.values()
            self._free = [part for part in range(len(self._range.slots)) if part not in taken]
        part = self._free[-1]
        self._range.map(part, place)
        self._parts[shard] = self._free.pop()
        self._shift[shard] = self._range.slots[part] - self._starts[shard]

    def detach(self, shard: int) -> None:
        """Let go of the file of a shard; its part is free for another."""
        if (part := self._parts.pop(shard, None)) is not None:
            self._range.unmap(part)
            self._free.append(part)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Give `rows` as they are: `copy` finds their places itself."""
        return rows

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: Lines) -> None:
        """Copy rows, of shards that are put, into the lines of out, one after the other."""
        super().copy(rows + self._shift.take(shards), rows, shards, out)


class FileRows:
    """A column of many files that are not mapped; borrows them.

    Args:
        stride: from one row to the next.
        starts: the dataset's row number of each shard's first row.
    """

    maps_per_shard: Final = 0
    """How many maps a shard takes that is put."""

    def __init__(self, stride: int, starts: Rows) -> None:
        self._stride, self._starts = stride, starts
        self._places: dict[int, tuple[PreadFile, int]] = {}

    def attach(self, shard: int, file: PreadFile, offset: int) -> None:
        """Read a shard's rows from this file, in which the column begins there."""
        self._places[shard] = file, offset

    def detach(self, shard: int) -> None:
        """Let go of the file of a shard."""
        self._places.pop(shard, None)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Give `rows` as they are: `copy` finds their places itself."""
        return rows

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: Lines) -> None:
        """Copy rows into the lines of out, one after the other.

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
        """Do nothing: nothing is read beyond what is asked for."""

    def close(self) -> None:
        """Let go of all files. Idempotent."""
        self._places.clear()


def read_hashes(hashes: MappedRows | FileRows, rows: Rows, shards: Rows) -> npt.NDArray[np.uint64]:
    """The stored hashes of rows of the dataset."""
    out = np.empty((len(rows), 8), np.uint8)
    hashes.copy(hashes.place(rows, shards), rows, shards, out)
    return out.reshape(-1).view("<u8")
