"""Copy and verify the rows of one column that a batch needs, from all shards.

Rows of at least 2 KiB have one hash each, and are hashed after the copy, so that exactly the bytes
that the user receives are verified. Smaller rows share a hash with the other rows of their *run*;
the whole run is hashed before its rows are copied: a batch may contain only a part of the run.

If not all files of a dataset can be open at the same time, a batch that needs too many files is
copied in several parts.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.statistics import CHECK, PHASE_TIMES, now_ns
from shardio.dataset.column_rows import (
    FileRows,
    MappedRows,
    PooledRows,
)
from shardio.dataset.files import DatasetFiles
from shardio.errors import ShardChanged, UnsupportedEnvironment
from shardio.format.checksum import BLOCK_BYTES, distinct, hash_bytes, rows_per_unit
from shardio.format.layout import Kind
from shardio.format.sections import DIMENSION
from shardio.format.types import Array
from shardio.shard.reader import ShardReader
from shardio.shard.verification import HASH_DTYPE, Rows, Verify

_UNKNOWN: Final = -1
"""The value of `_mark_shift` for a shard whose file has not been opened yet."""


class ColumnGather:
    """An object that copies and verifies rows of one column of all shards. Owns the memory maps.

    `files` are borrowed. `shard_starts` has the index of each shard's first row, then the number of
    rows.
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
        """The maximum number of shards per copy: half of `max_open`, so none evicts another."""
        return max(1, (self._files.max_open or 1) // 2)

    def gather(self, rows: Rows, shards: Rows, out: npt.NDArray[Any]) -> None:
        """Copy rows of the dataset, whose indices the caller has checked, into `out`.

        `shards` has the index of each row's shard. `out` is a C-contiguous uint8 array of the shape
        (number of rows, bytes per row).

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
        """Verify the stored hashes of `rows`, which are themselves hashed in blocks of 4 KiB."""
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
