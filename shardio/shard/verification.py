"""The verification state of a shard: one byte, the *mark*, for each unit (bytes with one hash).

`format/checksum` defines units. *Index sections* are sections that locate and describe data, such
as the index and the sections of hashes. Marks are in the order of the sections that contain the
hashes of the units; the mark of a verified unit is 1. A loader's processes share the marks of all
shards without a lock: at worst, a unit is verified more than once.
"""

from __future__ import annotations

import functools
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from shardio._base.statistics import CHECK, PHASE_TIMES, TIMED_EVERY, now_ns
from shardio.errors import ChecksumMismatch, ClosedError, ShardChanged, ShardCorrupt
from shardio.format.checksum import (
    BLOCK_BYTES,
    blocks_touched,
    distinct,
    format_hashes,
    hash_bytes,
    rows_per_unit,
)
from shardio.format.layout import NO_FIELD, Kind, Section
from shardio.format.schema import Schema
from shardio.format.sections import HASH_SECTION_UNITS, Sections
from shardio.storage.content import Content

Verify = Literal["off", "first", "always"]
VERIFY: Final[tuple[str, ...]] = get_args(Verify)
Rows = npt.NDArray[np.int64]
HASH_DTYPE: Final = np.dtype("<u8")


_HASHED_KINDS: Final[dict[int, int]] = {
    Kind.COLUMN_HASHES: Kind.COLUMN,
    Kind.INDEX: Kind.PAYLOAD,
    Kind.CHUNK_HASHES: Kind.PAYLOAD,
}
"""A dict from the kind of a section that contains hashes to the kind of the section that is hashed.
For BLOCK_HASHES, the latter is `Section.of_kind`."""


class VerifiedUnits:
    """The units of one open shard, their marks, and the content of the file.

    The content is borrowed until `release`. With verify="first", a check verifies units with the
    mark 0, and sets the mark to 1; "always" ignores marks, "off" checks nothing. A ChecksumMismatch
    names the field, the sample and the offset; for an index section, it names the section instead
    of a sample.
    """

    def __init__(
        self,
        content: Content,
        schema: Schema,
        sections: Sections,
        n_samples: int,
        *,
        path: str,
        verify: str,
    ) -> None:
        self._content: Content | None = content
        self.schema, self.sections, self.path = schema, sections, path
        self._n_samples, self._verify = n_samples, verify
        self.corrupt = functools.partial(ShardCorrupt, path=path)
        self._n_records = len(schema.records)
        self._first_marks: dict[tuple[int, int], int] = {}
        """The index of the mark of a section's first unit, by kind and field. The key of records
        is (PAYLOAD, NO_FIELD); the key of a field's chunks is (PAYLOAD, field). The mark just
        before the first mark of an index section is that of the section of its block hashes."""
        self.n_marks = 0
        for (_, field, of_kind), hashes in sections.items():
            if hashes.kind in HASH_SECTION_UNITS:
                self.n_marks += HASH_SECTION_UNITS[hashes.kind]
                kind = of_kind or _HASHED_KINDS[hashes.kind]
                self._first_marks[kind, field] = self.n_marks
                self.n_marks += hashes.count
        self._columns: dict[str, tuple[int, int, int, int, int]] = {}
        """For each column: the index of its first mark, its offset, the size of a row, the stride,
        and the number of rows per unit."""
        for name, column in schema.columns.items():
            offset = sections[Kind.COLUMN, schema.field_id(name), 0].offset
            row_bytes, stride = column.row_bytes or 0, column.stride
            mark, per_unit = self.first_mark(Kind.COLUMN, name), rows_per_unit(row_bytes, stride)
            self._columns[name] = mark, offset, row_bytes, stride, per_unit
        self._first_record_mark = self._first_marks.get((Kind.PAYLOAD, NO_FIELD), 0)
        self.marks: npt.NDArray[np.uint8] = np.zeros(self.n_marks, np.uint8)
        """The marks of all units. A loader replaces this array with one in shared memory."""

    @property
    def content(self) -> Content:
        """The content of the file; raises ClosedError after `release`."""
        if self._content is None:
            raise ClosedError(
                f"{self.path}: the reader is closed: decode values before you close it, or open it "
                "again"
            )
        return self._content

    @property
    def is_released(self) -> bool:
        """True after `release`."""
        return self._content is None

    def release(self) -> None:
        """Release the content; every later read raises ClosedError."""
        self._content = None

    def first_mark(self, kind: Kind, name: str) -> int:
        """Return the index of the first mark of a field's column, index section or chunks."""
        return self._first_marks[kind, self.schema.field_id(name)]

    def is_checked(self, name: str, unit: int) -> bool:
        """Return True if unit `unit` of a column has been verified."""
        return bool(self.marks[self.first_mark(Kind.COLUMN, name) + unit])

    def check_column(self, name: str, rows: Rows) -> None:
        """Verify the units of a column that contain `rows`."""
        if self._verify == "off" or not len(rows):
            return
        mark, column_offset, row_bytes, stride, per_unit = self._columns[name]
        units = self._unverified(mark, rows // per_unit)
        if not len(units):
            return
        content, expected = self.content, self.column_hashes(name, units)
        start_ns = now_ns()
        for unit, hash_ in zip(units.tolist(), expected.tolist(), strict=True):
            first = unit * per_unit
            last = min(first + per_unit, self._n_samples)
            n_bytes = row_bytes if per_unit == 1 else (last - first) * stride
            offset = column_offset + first * stride
            try:
                found = hash_bytes(content[offset : offset + n_bytes])
            except ShardChanged as error:
                error.at(field=name, sample=first)
                raise
            if found != hash_:
                raise self.mismatch(name, first, offset, hash_, found)
            self.marks[mark + unit] = 1
        PHASE_TIMES.sums_ns[CHECK] += now_ns() - start_ns

    def check_row(self, name: str, row: int) -> None:
        """Do the same as `check_column` for one row, faster if its unit was verified before."""
        if self._verify == "off":
            return
        mark, _, _, _, per_unit = self._columns[name]
        if self._verify != "first" or not self.marks[mark + row // per_unit]:
            self.check_column(name, np.array([row]))

    def column_hashes(self, name: str, units: Rows) -> npt.NDArray[np.uint64]:
        """Return the verified hashes of `units` of a column."""
        return self.items(Kind.COLUMN_HASHES, name, HASH_DTYPE, units)

    def are_records_checked(self, k: int, rows: Rows) -> bool:
        """Return True if `check_record` would verify none of the records for `rows`.

        `k` is the position of the field among those stored as records.
        """
        if self._verify != "first":
            return self._verify == "off"
        return bool(self.marks[self._first_record_mark + rows * self._n_records + k].all())

    def check_record(
        self, name: str, k: int, row: int, offset: int, stored: memoryview, expected: int
    ) -> None:
        """Verify the `stored` bytes of a record, at file offset `offset`; `expected` is their hash.

        `k` is the position of the field among those stored as records.
        """
        if self._verify == "off":
            return
        mark = self._first_record_mark + row * self._n_records + k
        if self._verify == "first" and self.marks[mark]:
            return
        if row % TIMED_EVERY:
            found = hash_bytes(stored)
        else:
            start_ns = now_ns()
            found = hash_bytes(stored)
            PHASE_TIMES.sums_ns[CHECK] += TIMED_EVERY * (now_ns() - start_ns)
        if found != expected:
            raise self.mismatch(name, row, offset, expected, found)
        self.marks[mark] = 1

    def unverified_chunks(self, name: str, first: int, n: int) -> Rows:
        """Return the chunks of a field from `first` to `first + n - 1` that must be verified."""
        chunks = np.arange(first, first + n)
        if self._verify == "off":
            return chunks[:0]
        return self._unverified(self.first_mark(Kind.PAYLOAD, name), chunks)

    def check_chunk(
        self, name: str, row: int, chunk: int, offset: int, stored: memoryview, expected: int
    ) -> None:
        """Verify the `stored` bytes of a chunk, at file offset `offset`; their hash is `expected`.

        `chunk` is the index of the chunk among all chunks of the field.
        """
        start_ns = now_ns()
        found = hash_bytes(stored)
        PHASE_TIMES.sums_ns[CHECK] += now_ns() - start_ns
        if found != expected:
            raise self.mismatch(name, row, offset, expected, found)
        self.marks[self.first_mark(Kind.PAYLOAD, name) + chunk] = 1

    def items(self, kind: Kind, name: str, dtype: np.dtype[Any], indices: Rows) -> npt.NDArray[Any]:
        """Return verified copies of the items `indices` of an index section of a field.

        The section of the kind INDEX contains the items of all fields.
        """
        content, size = self.content, dtype.itemsize  # raises ClosedError after `release`
        field_id = NO_FIELD if kind == Kind.INDEX else self.schema.field_id(name)
        self.check_blocks(kind, field_id, indices * size, size)
        return _copy_items(content, self.sections[kind, field_id, 0], dtype, indices, name)

    def check_blocks(self, kind: int, field: int, starts: Rows, n_bytes: int) -> None:
        """Verify the blocks of an index section that contain the items at the offsets `starts`.

        The size of an item is `n_bytes`, which is at most the size of a block. `field` is a field
        id or NO_FIELD.
        """
        if self._verify == "off" or not len(starts):
            return
        mark = self._first_marks[kind, field]
        if self._verify == "first":  # a short test for the common case: all marks are 1
            marks, lasts = self.marks[mark:], starts + (n_bytes - 1)
            if marks[starts // BLOCK_BYTES].all() and marks[lasts // BLOCK_BYTES].all():
                return
        blocks = self._unverified(mark, blocks_touched(starts, n_bytes))
        if not len(blocks):
            return
        section, start_ns = self.sections[kind, field, 0], now_ns()
        table = self.sections[Kind.BLOCK_HASHES, field, kind]
        if self._verify == "always" or not self.marks[mark - 1]:
            self._check_bytes(table, table.offset, table.offset + table.size, table.hash)
            self.marks[mark - 1] = 1
        stored = _copy_items(self.content, table, HASH_DTYPE, blocks, self._field_of(table))
        for block, expected in zip(blocks.tolist(), stored.tolist(), strict=True):
            start = section.offset + block * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, section.offset + section.size)
            self._check_bytes(section, start, end, expected)
            self.marks[mark + block] = 1
        PHASE_TIMES.sums_ns[CHECK] += now_ns() - start_ns

    def read_section(self, section: Section) -> bytes:
        """Return a section without marks, such as a dictionary; verify it unless verify="off"."""
        end = section.offset + section.size
        if self._verify == "off":
            return bytes(self.read(section, section.offset, end))
        return bytes(self._check_bytes(section, section.offset, end, section.hash))

    def _unverified(self, mark: int, units: Rows) -> Rows:
        """Return those of `units` that must be verified; `mark` is the index of unit 0's mark."""
        if self._verify == "always":
            return distinct(units)
        marks = self.marks[mark + units]
        return units[:0] if marks.all() else distinct(units[marks == 0])

    def _check_bytes(self, section: Section, start: int, end: int, expected: int) -> memoryview:
        """Return a section's bytes from `start` to `end` in the file; check that they match."""
        stored = self.read(section, start, end)
        if (found := hash_bytes(stored)) != expected:
            field = self._field_of(section)
            raise self.mismatch(field, None, start, expected, found, section.name)
        return stored

    def read(self, section: Section, start: int, end: int) -> memoryview:
        """Return a part of a section, unverified; `start` and `end` are file offsets."""
        try:
            return self.content[start:end]
        except ShardChanged as error:
            error.at(section=section.name, field=self._field_of(section))
            raise

    def _field_of(self, section: Section) -> str | None:
        return None if section.field == NO_FIELD else list(self.schema)[section.field]

    def mismatch(
        self,
        field: str | None,
        row: int | None,
        offset: int,
        expected: int,
        found: int,
        section: str | None = None,
    ) -> ChecksumMismatch:
        """Return the error for bytes of a sample or, with `section`, of an index section."""
        what = "the data of a sample does not match its hash"
        return ChecksumMismatch(
            what if section is None else "the bytes of an index do not match their hash",
            code="checksum",
            path=self.path,
            section=section,
            field=field,
            sample=row,
            offset=offset,
            **format_hashes(expected, found),
        )


def _copy_items(
    content: Content, section: Section, dtype: np.dtype[Any], indices: Rows, field: str | None
) -> npt.NDArray[Any]:
    """Return copies of the items `indices` of an index section, unverified."""
    if isinstance(content, memoryview):
        return np.frombuffer(content, dtype, section.count, section.offset)[indices]
    out = np.empty((len(indices), dtype.itemsize), np.uint8)
    try:
        content.read_rows(section.offset, dtype.itemsize, indices, out)
    except ShardChanged as error:
        error.sample = None  # the index that `read_rows` has set is not that of a sample
        error.at(section=section.name, field=field)
        raise
    return out.reshape(-1).view(dtype)
