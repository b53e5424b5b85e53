"""Copy rows of one column from many shards, for `ColumnGather`: from maps, or by reading files."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.errors import UnsupportedEnvironment
from shardio.format.layout import Section
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.storage.content import PreadFile
from shardio.storage.file_access import (
    FileState,
    clear_reserved,
    disable_readahead_at,
    map_fixed,
    open_shard,
    reserve,
    unmap,
)

RowBytes = npt.NDArray[np.uint8]

_SCRATCH_BYTES: Final = 1 << 20
"""The size of the buffer into which rows with padding are copied first; it fits into the CPU
cache."""

_PREFAULTED_BYTES: Final = range(512, (16 << 10) + 1)
"""For rows of these sizes, in bytes, a byte of each row is read before the copy, to load the page
addresses. The total time falls to 60% for rows of 2 KiB, and to 93% for rows of 16 KiB."""
_PREFAULTED_ROWS: Final = 512
"""The number of rows that are touched, and then copied, at a time: a third of the number of entries
of a CPU's TLB, which caches page addresses."""


class MappedRows:
    """One column of all shards, mapped into an address range that the object owns.

    Each shard has a part of the range. All parts start at multiples of `stride`, so the range is
    one array of rows, and one `np.take` copies rows of any number of files. Reading an address at
    which no file is mapped kills the process.

    Args:
        stride: the size of a row with its padding, in bytes.
        row_bytes: the size of a row without padding, in bytes.
        starts: for each shard, the index of its first row in the dataset.
        counts: the number of rows for which each part has room.

    Raises:
        InsufficientMemory: this process has no free address range of the required size.
        UnsupportedEnvironment: memory pages are larger than 4096 bytes, the alignment of columns.
    """

    def __init__(self, stride: int, row_bytes: int, starts: Rows, counts: Sequence[int]) -> None:
        if mmap.PAGESIZE > 4096:
            raise UnsupportedEnvironment(
                f"memory pages of this kernel have {mmap.PAGESIZE} bytes; "
                "shardio maps columns on 4096-byte boundaries only"
            )
        granule = math.lcm(stride, mmap.PAGESIZE)
        n_granules = [max(1, -(-n * stride // granule)) for n in counts]
        self._n_bytes = max(1, sum(n_granules)) * granule
        used = -(-max(counts, default=0) * stride // mmap.PAGESIZE) * mmap.PAGESIZE
        self.maps_per_shard = 1 if used == max(n_granules, default=1) * granule else 2
        """The number of memory maps of the largest part: the file, and any unused rest."""
        self._stride, self._row_bytes, self._is_readahead_disabled = stride, row_bytes, False
        self._address = reserve(self._n_bytes)
        self._close = weakref.finalize(self, unmap, self._address, self._n_bytes)
        self._close.atexit = False  # at exit, other threads may still be reading the range
        ends: Rows = np.cumsum(np.array(n_granules, np.int64))
        self._part_starts: Rows = (ends - n_granules) * (granule // stride)
        """For each part, the index of its first row in the array `_rows`."""
        self._shift = self._part_starts - starts
        """For each shard: the index of a row in `_rows`, minus the row's index in the dataset."""
        self._is_shifted = bool(
            self._shift.any()
        )  # False for one shard, or for shards without gaps
        self._mapped: dict[int, int] = {}
        """For each part into which a file is mapped, the number of mapped bytes."""
        raw = (ctypes.c_ubyte * self._n_bytes).from_address(self._address)
        n_rows = self._n_bytes // stride
        whole = np.frombuffer(memoryview(raw), np.uint8)
        self._rows: RowBytes = whole[: n_rows * stride].reshape(n_rows, stride)
        self._prefaulted, self._n_at_once = None, sys.maxsize
        if row_bytes in _PREFAULTED_BYTES:
            self._prefaulted, self._n_at_once = self._rows[:, row_bytes // 2], _PREFAULTED_ROWS
        self._scratch: RowBytes | None = None
        if stride != row_bytes:
            self._n_at_once = min(self._n_at_once, max(1, _SCRATCH_BYTES // stride))
            self._scratch = np.empty((self._n_at_once, stride), np.uint8)

    def attach(self, shard: int, reader: ShardReader, section: Section) -> None:
        """Map `section` of the open file of a shard, which must not be attached yet.

        Raises:
            ShardNotFound: the file is missing.
            ShardChanged: another file is at the path now, or the size of the file has changed.
            UnsupportedEnvironment: the kernel's limit on the number of maps is reached.
        """
        if not section.size:
            return
        address = self._address + int(self._part_starts[shard]) * self._stride
        fd = open_shard(reader.path)
        try:
            # Reading a mapped page after the end of a truncated file would kill the process.
            reader.file.check(FileState.of(os.fstat(fd)), reader.path)
            map_fixed(address, section.size, fd, section.offset, reader.path)
        finally:
            os.close(fd)
        self._mapped[shard] = section.size
        if self._is_readahead_disabled:
            disable_readahead_at(address, section.size)

    def detach(self, shard: int) -> None:
        """Unmap the file of a shard, if it is attached."""
        if n_bytes := self._mapped.pop(shard, 0):
            clear_reserved(self._address + int(self._part_starts[shard]) * self._stride, n_bytes)

    def copy(self, rows: Rows, shards: Rows, out: RowBytes) -> None:
        """Copy row `rows[i]`, of the attached shard `shards[i]`, to `out[i]`, for all i."""
        indices, n = rows, self._n_at_once
        if self._is_shifted:
            indices = rows + self._shift.take(shards)
        if len(indices) <= n:
            self._copy_slice(indices, out)
            return
        for i in range(0, len(indices), n):
            self._copy_slice(indices[i : i + n], out[i : i + n])

    def _copy_slice(self, indices: Rows, out: RowBytes) -> None:
        if self._prefaulted is not None:
            # Read one byte of each row first. The CPU then waits for many pages at the same time,
            # whereas a copy waits for one page after another. Read a byte in the middle of the row,
            # because the copy prefetches the start of the row anyway.
            self._prefaulted[indices]
        if self._scratch is None:
            self._rows.take(indices, axis=0, out=out, mode="clip")
            return
        # Copy the rows with their padding to the scratch buffer. An array of the rows without their
        # padding is not contiguous, and np.take would first copy this whole array.
        scratch = self._scratch[: len(indices)]
        self._rows.take(indices, axis=0, out=scratch, mode="clip")
        out[:] = scratch[:, : self._row_bytes]

    def disable_readahead(self) -> None:
        """Disable the kernel's read-ahead for all files, also for those attached later."""
        self._is_readahead_disabled = True
        disable_readahead_at(self._address, self._n_bytes)

    def close(self) -> None:
        """Unmap the whole range. Idempotent."""
        self._close()


class PooledRows(MappedRows):
    """One column of all shards; at most `max_parts` shards can be attached at the same time.

    `counts` has the number of rows of each shard. The other arguments are those of MappedRows.
    """

    def __init__(
        self, stride: int, row_bytes: int, starts: Rows, counts: Rows, max_parts: int
    ) -> None:
        n_parts = min(max_parts, len(counts))
        largest = int(counts.max(initial=0))
        super().__init__(stride, row_bytes, starts[:n_parts], [largest] * n_parts)
        self._starts, self._shift = starts, np.zeros(len(starts), np.int64)
        self._is_shifted = True
        self._parts: dict[int, int] = {}
        """The part of each attached shard."""
        self._free = list(range(n_parts))

    def attach(self, shard: int, reader: ShardReader, section: Section) -> None:
        """Map `section` of the open file of a shard into a free part."""
        if not self._free:  # rebuild the list of free parts: Ctrl-C may have interrupted `attach`
            taken = self._parts.values()
            self._free = [part for part in range(len(self._part_starts)) if part not in taken]
        part = self._free[-1]
        super().attach(part, reader, section)
        self._parts[shard] = self._free.pop()
        self._shift[shard] = self._part_starts[part] - self._starts[shard]

    def detach(self, shard: int) -> None:
        """Unmap a shard's file and free its part, if the shard is attached."""
        if (part := self._parts.pop(shard, None)) is not None:
            super().detach(part)
            self._free.append(part)


class FileRows:
    """One column of all shards, read from borrowed files that are not mapped."""

    maps_per_shard: Final = 0
    """The number of memory maps per attached shard."""

    def __init__(self, stride: int, starts: Rows) -> None:
        self._stride, self._starts = stride, starts
        self._sections: dict[int, tuple[PreadFile, int]] = {}

    def attach(self, shard: int, reader: ShardReader, section: Section) -> None:
        """Record the open file and the `section` from which `copy` reads the rows of a shard."""
        if isinstance(reader.content, PreadFile):  # true for every file that is not mapped
            self._sections[shard] = reader.content, section.offset

    def detach(self, shard: int) -> None:
        """Drop the reference to the file of a shard."""
        self._sections.pop(shard, None)

    def copy(self, rows: Rows, shards: Rows, out: RowBytes) -> None:
        """Read row `rows[i]` into `out[i]`, for all i; raise ShardChanged if a file has changed."""
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        ends = np.flatnonzero(np.diff(shards[order])) + 1
        start = 0
        for end in (*ends.tolist(), len(rows)):
            if start == end:
                return
            shard, part = int(shards[order[start]]), slice(start, end)
            local = ascending[part] - self._starts[shard]
            file, offset = self._sections[shard]
            file.read_ascending(offset, self._stride, local, out, order[part])
            start = end

    def disable_readahead(self) -> None:
        """Do nothing, because only the requested bytes are read."""

    def close(self) -> None:
        """Drop the references to all files. Idempotent."""
        self._sections.clear()
