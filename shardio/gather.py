"""One gather per fixed field per batch, over all shards of a dataset, verified.

Mapped, all shards' parts of a column lie in one address range at one stride, and so do their
hashes: a batch is one `np.take` straight into its block. Otherwise it is read there (`rows`). What
was not checked before is hashed: rows of 2 KiB or more afterwards in the block, the very bytes that
the user gets; runs of smaller rows beforehand, since a run holds rows that the batch does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.access.pread import PreadFile
from shardio.errors import ShardChanged
from shardio.format.checksum import BLOCK_BYTES, distinct, hash_bytes, rows_per_unit
from shardio.format.fields import Array
from shardio.format.index import DIMENSION
from shardio.format.layout import Section
from shardio.reader import ShardReader
from shardio.rows import FileRows, MappedRows, read_hashes
from shardio.spent import CHECK, SPENT, now_ns
from shardio.storage import ColumnPlace
from shardio.units import Rows


class ColumnGather:
    """Copies rows of one column of many shards. Owns the address ranges, if it maps them.

    Args:
        name, field: the column.
        readers: all shards in order; borrowed.
        starts: the dataset's row number of each shard's first row.
        marks: the units of all shards that are checked, shared; see `units`.
        first_marks: where each shard's own marks begin.
        verify: "off", "first" or "always".
    """

    def __init__(
        self,
        name: str,
        field: Array,
        readers: Sequence[ShardReader],
        starts: Rows,
        marks: npt.NDArray[np.uint8],
        first_marks: Rows,
        verify: str,
    ) -> None:
        self._name, self._verify, self._readers, self._starts = name, verify, readers, starts
        self._row_bytes, self._stride = field.row_bytes or 0, field.stride
        self._marks = marks
        self._hashes: MappedRows | FileRows | None = None
        self._slices: list[slice] = []
        self._all_known = verify == "off"
        self._n_known_batches, self._next_look = 0, 32
        sections = [reader.column_section(name) for reader in readers]
        self._rows = self._open(self._stride, self._row_bytes, sections)
        self._rows_per_unit = rows_per_unit(self._row_bytes, self._stride)
        self._by_row = self._rows_per_unit == 1
        column_marks = np.array([reader.units.column_mark(name) for reader in readers], np.int64)
        self._mark_shift = first_marks + column_marks
        self._row_mark_shift = self._mark_shift - starts
        if self._by_row and verify != "off":
            self._open_hashes(first_marks)

    def _open(
        self, stride: int, row_bytes: int, sections: Sequence[Section]
    ) -> MappedRows | FileRows:
        """What copies rows that lie in these sections, one of each shard."""
        pairs = list(zip(self._readers, sections, strict=True))
        files = [(r.content, s.offset) for r, s in pairs if isinstance(r.content, PreadFile)]
        if len(files) == len(pairs):
            return FileRows(stride, files, self._starts)
        places = [ColumnPlace(r.path, s.offset, s.count, r.file) for r, s in pairs]
        return MappedRows(stride, row_bytes, places, self._starts)

    def _open_hashes(self, first_marks: Rows) -> None:
        readers, name = self._readers, self._name
        sections = [reader.hashes_section(name) for reader in readers]
        self._hashes = self._open(DIMENSION.size, DIMENSION.size, sections)
        block_marks = np.array([r.units.hashes_mark(name) for r in readers], np.int64)
        self._block_shift = first_marks + block_marks

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Where `rows` of the dataset, which lie in `shards`, are; for `gather`."""
        return self._rows.place(rows, shards)

    def gather(self, slots: Rows, rows: Rows, shards: Rows, out: npt.NDArray[Any]) -> None:
        """Copy rows of the dataset into out, one after the other.

        Args:
            slots: what `place` gave for them.
            rows: proved to be in range by the caller.
            shards: the number of each row's shard.
            out: C-contiguous uint8, (len(rows), row bytes).

        Raises:
            ChecksumMismatch: naming file, field, sample and offset; out then holds what was read.
            ShardChanged: likewise; mapped rows of a file that was cut short kill instead.
        """
        if not (self._all_known or self._by_row):
            self._check_runs(rows, shards)
        try:
            self._rows.copy(slots, rows, shards, out)
        except ShardChanged as error:
            error.at(field=self._name)
            raise
        if not self._all_known and self._by_row:
            self._check_rows(rows, shards, out)

    def _check_rows(self, rows: Rows, shards: Rows, out: npt.NDArray[Any]) -> None:
        """Hash the delivered rows that nobody has hashed before."""
        marks = rows + self._row_mark_shift.take(shards)
        fresh = np.arange(len(rows))
        if self._verify == "first":
            known = self._marks.take(marks)
            if known.all():
                self._look_whether_all_known()
                return
            fresh = np.flatnonzero(known == 0)
            rows, shards, marks = rows[fresh], shards[fresh], marks[fresh]
        self._check_hash_blocks(rows, shards)
        if self._hashes is None:
            raise AssertionError("rows that are checked one by one have hashes")
        start_ns = now_ns()
        expected = read_hashes(self._hashes, rows, shards)
        content = out.reshape(-1).data
        # Without a bytecode per row: half of the time of a generator expression.
        parts = map(content.__getitem__, self._row_slices(fresh, len(out)))
        found = np.array(list(map(hash_bytes, parts)), np.uint64)
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            self._refuse(int(wrong[0]), rows, shards, expected, found)
        self._marks[marks] = 1
        SPENT.sums_ns[CHECK] += now_ns() - start_ns

    def _look_whether_all_known(self) -> None:
        """After ever more batches that held nothing new, see whether anything new is left."""
        self._n_known_batches += 1
        if self._n_known_batches < self._next_look:
            return
        self._next_look *= 2
        counts = [-(-len(reader) // self._rows_per_unit) for reader in self._readers]
        firsts = self._mark_shift.tolist()
        self._all_known = all(
            self._marks[first : first + n].all() for first, n in zip(firsts, counts, strict=True)
        )

    def _row_slices(self, places: Rows, n_rows: int) -> list[slice]:
        """Where the bytes of delivered rows lie."""
        size = self._row_bytes
        for j in range(len(self._slices), n_rows):
            self._slices.append(slice(j * size, (j + 1) * size))
        if len(places) == len(self._slices):
            return self._slices
        return [self._slices[j] for j in places.tolist()]

    def _refuse(
        self,
        i: int,
        rows: Rows,
        shards: Rows,
        expected: npt.NDArray[np.uint64],
        found: npt.NDArray[np.uint64],
    ) -> None:
        shard = int(shards[i])
        reader = self._readers[shard]
        row = int(rows[i] - self._starts[shard])
        offset = reader.column_section(self._name).offset + row * self._stride
        raise reader.units.mismatch(self._name, row, offset, int(expected[i]), int(found[i]))

    def _check_hash_blocks(self, rows: Rows, shards: Rows) -> None:
        """Make sure that the stored hashes of these rows are themselves checked."""
        local = rows - self._starts[shards]
        blocks = local * DIMENSION.size // BLOCK_BYTES + self._block_shift[shards]
        if self._verify == "first" and self._marks[blocks].all():
            return
        for shard in distinct(shards).tolist():
            self._readers[shard].units.column_hashes(self._name, local[shards == shard])

    def _check_runs(self, rows: Rows, shards: Rows) -> None:
        """Check the runs that hold these rows: they are read whole, from the map."""
        local = rows - self._starts[shards]
        marks = local // self._rows_per_unit + self._mark_shift[shards]
        if self._verify == "first" and self._marks.take(marks).all():
            self._look_whether_all_known()
            return
        for shard in distinct(shards).tolist():
            self._readers[shard].units.check_column(self._name, local[shards == shard])

    def expect_scattered(self) -> None:
        """Have the kernel read no more than the pages that are touched: others are asked for."""
        for part in (self._rows, self._hashes):
            if part is not None:
                part.expect_scattered()

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._rows.close()
        if self._hashes is not None:
            self._hashes.close()
