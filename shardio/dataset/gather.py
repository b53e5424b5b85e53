"""Copy and verify the rows of one column that a batch needs, from all shards.

Rows of at least 2 KiB have one hash each, and are hashed after the copy, so that exactly the bytes
that the user receives are verified. Smaller rows share a hash with the other rows of their *run*;
the whole run is hashed before its rows are copied: a batch may contain only a part of the run.

If not all files of a dataset can be open at the same time, a batch that needs too many files is
copied in several parts.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.statistics import CHECK, PHASE_TIMES, now_ns
from shardio.dataset.files import DatasetFiles
from shardio.errors import ShardChanged, UnsupportedEnvironment
from shardio.format.checksum import BLOCK_BYTES, distinct, hash_bytes, rows_per_unit
from shardio.format.layout import Kind, Section
from shardio.format.sections import DIMENSION
from shardio.format.types import Array
from shardio.shard.reader import ShardReader
from shardio.shard.verification import HASH_DTYPE, Rows, Verify
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
        # False for one shard, or for shards without gaps
        self._is_shifted = bool(self._shift.any())
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
        fd = open_shard(reader.absolute_path)
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
        """Disable the kernel's read-ahead for all files, including files attached later."""
        self._is_readahead_disabled = True
        disable_readahead_at(self._address, self._n_bytes)

    def close(self) -> None:
        """Unmap the whole range. Idempotent."""
        self._close()


class PooledRows(MappedRows):
    """One column of all shards; at most `max_parts` shards can be attached at the same time.

    `counts` are the numbers of rows of all shards. The other arguments are those of MappedRows.
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


_UNKNOWN: Final = -1
"""The value of `_mark_shift` for a shard whose file has not been opened yet."""


class ColumnGather:
    """An object that copies and verifies rows of one column of all shards. Owns the memory maps.

    `files` are borrowed. `shard_starts` contains the index of each shard's first row, followed by
    the total number of rows.
    """

    def __init__(
        self, name: str, field: Array, files: DatasetFiles, shard_starts: Rows, verify: Verify
    ) -> None:
        self._name, self._verify, self._files = name, verify, files.open_files
        self._first_file, self._is_mapped = files.first_file(name), files.access == "mmap"
        self._starts, self._counts = shard_starts[:-1], np.diff(shard_starts)
        counts = self._counts
        self._marks, self._mark_starts = files.marks_of(name)
        self._row_bytes, self._stride = field.row_bytes or 0, field.stride
        self._all_verified = verify == "off"
        self._n_verified_batches, self._next_check = 0, 32
        self._rows = self._new_rows(self._stride, self._row_bytes)
        self._rows_per_unit = rows_per_unit(self._row_bytes, self._stride)
        self._has_row_hashes = self._rows_per_unit == 1
        self._hashes: MappedRows | FileRows | None = None
        if self._has_row_hashes and verify != "off":
            self._hashes = self._new_rows(DIMENSION.size, DIMENSION.size)
        # Each of the three arrays has one number per shard. This number, plus an index, is the
        # position of a mark. `_mark_shift` is added to the index of a unit in the shard's column,
        # `_row_mark_shift` to the index of a row in the dataset, and `_block_shift` to the index of
        # a 4 KiB block of the column's hashes.
        self._mark_shift: Rows = np.full(len(counts), _UNKNOWN)
        self._row_mark_shift, self._block_shift = self._mark_shift.copy(), self._mark_shift.copy()
        self._is_open = np.zeros(len(counts), np.bool_)
        self._is_partial = files.is_partial
        """True if files may have to be opened before rows are copied."""
        if self._is_partial:
            n_maps = 0 if self._hashes is None else self._hashes.maps_per_shard
            self._files.add_listener(self._on_evict, self._rows.maps_per_shard + n_maps)
            return
        for shard in range(len(counts)):
            self._open_shard(shard)

    def _new_rows(self, stride: int, row_bytes: int) -> MappedRows | FileRows:
        if not self._is_mapped:
            return FileRows(stride, self._starts)
        if self._files.max_open is None:
            return MappedRows(stride, row_bytes, self._starts, self._counts.tolist())
        return PooledRows(stride, row_bytes, self._starts, self._counts, self._files.max_open)

    def _open(self, shard: int) -> ShardReader:
        return self._files.reader(self._first_file + shard)

    def _open_shard(self, shard: int) -> None:
        reader, name = self._open(shard), self._name
        for rows, section in (
            (self._rows, reader.column_section(name)),
            (self._hashes, reader.hashes_section(name)),
        ):
            if rows is not None:
                rows.detach(shard)  # Ctrl-C in an earlier call may have left the shard attached
                rows.attach(shard, reader, section)
        start, first_mark = self._mark_starts[shard], reader.units.first_mark
        self._block_shift[shard] = start + first_mark(Kind.COLUMN_HASHES, name)
        self._mark_shift[shard] = start + first_mark(Kind.COLUMN, name)
        self._row_mark_shift[shard] = self._mark_shift[shard] - self._starts[shard]
        self._is_open[shard] = True

    def _on_evict(self, file: int) -> None:
        shard = file - self._first_file
        if 0 <= shard < len(self._counts):
            self._is_open[shard] = False
            for rows in (self._rows, self._hashes):
                if rows is not None:
                    rows.detach(shard)

    def _open_shards(self, shards: Rows) -> bool:
        """Open and attach all `shards`; return False if not all of them can be open together."""
        if self._is_open.take(shards).all():
            self._files.mark_used(shards + self._first_file)
            return True
        wanted = distinct(shards)
        if len(wanted) > self._max_shards_per_copy:
            return False
        self._files.mark_used(wanted + self._first_file)
        for shard in wanted[~self._is_open[wanted]].tolist():
            while True:
                try:
                    self._open_shard(shard)
                    break
                except UnsupportedEnvironment:  # the kernel's limit on memory maps is reached
                    if not self._files.halve():
                        raise
        return bool(self._is_open[wanted].all())

    @property
    def _max_shards_per_copy(self) -> int:
        """The maximum number of shards per copy: half of `max_open`, so that all stay open."""
        return max(1, (self._files.max_open or 1) // 2)

    def gather(self, rows: Rows, shards: Rows, out: npt.NDArray[Any]) -> None:
        """Copy rows of the dataset, whose indices the caller has checked, into `out`.

        `shards` contains the index of each row's shard. `out` is a C-contiguous uint8 array of the
        shape (number of rows, bytes per row).

        Raises:
            ChecksumMismatch: data is damaged. The error names file, field, sample and offset. `out`
                may contain the damaged data.
            ShardChanged: a file that is not mapped has changed. Reading a mapped file that was
                truncated kills the process.
        """
        if self._is_partial and not self._open_shards(shards):
            self._gather_in_parts(rows, shards, out)
            return
        if not (self._all_verified or self._has_row_hashes):
            self._verify_runs(rows, shards)
        try:
            self._rows.copy(rows, shards, out)
        except ShardChanged as error:
            error.at(field=self._name)
            raise
        if not self._all_verified and self._has_row_hashes:
            self._verify_rows(rows, shards, out)

    def _gather_in_parts(self, rows: Rows, shards: Rows, out: npt.NDArray[Any]) -> None:
        wanted = distinct(shards)
        numbers = np.searchsorted(wanted, shards) // min(self._max_shards_per_copy, len(wanted) - 1)
        for number in range(int(numbers.max()) + 1):
            part = np.flatnonzero(numbers == number)
            found = np.empty((len(part), self._row_bytes), np.uint8)
            self.gather(rows[part], shards[part], found)
            out[part] = found

    def _verify_rows(self, rows: Rows, shards: Rows, out: npt.NDArray[Any]) -> None:
        """Verify the copied rows in `out`; with verify="first", only rows not verified before."""
        marks = rows + self._row_mark_shift.take(shards)
        fresh = np.arange(len(rows))
        if self._verify == "first":
            known = self._marks.take(marks)
            if known.all():
                self._update_all_verified()
                return
            fresh = np.flatnonzero(known == 0)
            rows, shards, marks = rows[fresh], shards[fresh], marks[fresh]
        self._verify_hash_blocks(rows, shards)
        if self._hashes is None:
            raise AssertionError("rows that are checked one by one have hashes")
        start_ns = now_ns()
        stored = np.empty((len(rows), DIMENSION.size), np.uint8)
        self._hashes.copy(rows, shards, stored)
        expected = stored.reshape(-1).view(HASH_DTYPE)
        # `map` executes no bytecode for a row. It takes half the time of a generator expression.
        copied = out if len(fresh) == len(out) else map(out.__getitem__, fresh.tolist())
        found = np.fromiter(map(hash_bytes, copied), np.uint64, len(fresh))
        for i in np.flatnonzero(found != expected)[:1].tolist():
            shard = int(shards[i])
            reader, row = self._open(shard), int(rows[i] - self._starts[shard])
            offset = reader.column_section(self._name).offset + row * self._stride
            raise reader.units.mismatch(self._name, row, offset, int(expected[i]), int(found[i]))
        self._marks[marks] = 1
        PHASE_TIMES.sums_ns[CHECK] += now_ns() - start_ns

    def _update_all_verified(self) -> None:
        """Set `_all_verified` if all units are verified. Only calls 32, 64, 128, … check this."""
        self._n_verified_batches += 1
        if self._n_verified_batches < self._next_check:
            return
        self._next_check *= 2
        if (self._mark_shift == _UNKNOWN).any():
            return
        n_units = -(-self._counts // self._rows_per_unit)
        self._all_verified = all(
            self._marks[first : first + n].all()
            for first, n in zip(self._mark_shift.tolist(), n_units.tolist(), strict=True)
        )

    def _verify_hash_blocks(self, rows: Rows, shards: Rows) -> None:
        """Verify the stored hashes of `rows` with the hashes of the 4 KiB blocks that hold them."""
        local = rows - self._starts[shards]
        blocks = local * DIMENSION.size // BLOCK_BYTES + self._block_shift[shards]
        if self._verify == "first" and self._marks[blocks].all():
            return
        for shard in distinct(shards).tolist():
            self._open(shard).units.column_hashes(self._name, local[shards == shard])

    def _verify_runs(self, rows: Rows, shards: Rows) -> None:
        local = rows - self._starts[shards]
        marks = local // self._rows_per_unit + self._mark_shift[shards]
        if self._verify == "first" and self._marks.take(marks).all():
            self._update_all_verified()
            return
        for shard in distinct(shards).tolist():
            self._open(shard).units.check_column(self._name, local[shards == shard])

    def disable_readahead(self) -> None:
        """Disable the kernel's read-ahead for mapped files, because the loader prefetches them."""
        for part in (self._rows, self._hashes):
            if part is not None:
                part.disable_readahead()

    def close(self) -> None:
        """Unmap all files, or drop the references to files that are read. Idempotent."""
        self._rows.close()
        if self._hashes is not None:
            self._hashes.close()
