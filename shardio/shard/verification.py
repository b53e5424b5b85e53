"""The verification state of a shard: one mark, a byte, per unit.

Units are the pieces with a hash of their own: the 4 KiB blocks of index sections, the rows or runs
of columns, records, and the chunks of streams. They are numbered in the order of the sections that
contain the hashes. `format/checksum` defines which bytes each hash covers. A loader keeps the marks
of all shards in one table that its processes share. If a race loses a mark, the unit is merely
verified twice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from shardio._base.statistics import CHECK, PHASE_TIMES, TIMED_EVERY, now_ns
from shardio.errors import ChecksumMismatch, ClosedError, ShardChanged, ShardCorrupt
from shardio.format.checksum import (
    BLOCK_BYTES,
    blocks_touched,
    distinct,
    hash_bytes,
    rows_per_unit,
    show_hashes,
)
from shardio.format.layout import NO_FIELD, Kind, Section
from shardio.format.schema import Schema
from shardio.format.sections import HASHED_UNITS, Key, Sections
from shardio.storage.content import Content

Verify = Literal["off", "first", "always"]
VERIFY: Final[tuple[str, ...]] = get_args(Verify)
Rows = npt.NDArray[np.int64]
HASH_DTYPE: Final = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class _Hashed:
    """A section, the section with its hashes, and the index of the first mark."""

    section: Section
    hashes: Section
    first_mark: int


class VerifiedUnits:
    """The content of one open shard, borrowed until `release`, with its units and their marks.

    `schema`, `sections` and `n_samples` are as validated by `open_sections`. With verify="off"
    every check returns immediately. Otherwise checks raise ChecksumMismatch for changed bytes,
    which names field, sample and offset or, for an index section, section, field and offset.
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
        """Return the error for a broken rule, with the path of the shard."""
        self._hashed: dict[tuple[int, int], _Hashed] = {}
        self._columns: dict[str, tuple[_Hashed, int, int, int]] = {}
        """For each column: its section, bytes per row, stride, and rows per unit."""
        self._n_records = len(schema.records)
        self._first_marks: dict[Key, int] = {}
        """For each section of hashes, the index of the first mark of its units."""
        self.n_marks = self._number()
        """The number of units."""
        self._records_mark = self._first_marks.get((Kind.INDEX, NO_FIELD, 0), 0)
        self.marks: npt.NDArray[np.uint8] = np.zeros(self.n_marks, np.uint8)
        """The marks, 1 for each verified unit; may be replaced by `n_marks` shared bytes."""

    def _number(self) -> int:
        """Assign numbers to all units; return how many there are."""
        place, sections = 0, self.sections
        for key, hashes in sections.items():
            n_further = HASHED_UNITS.get(hashes.kind)
            if n_further is None:
                continue
            self._first_marks[key] = place
            if n_further:
                target = sections[hashes.of_kind, hashes.field, 0]
                self._hashed[hashes.of_kind, hashes.field] = _Hashed(target, hashes, place)
            place += n_further + hashes.count
        for name, field in self.schema.columns.items():
            number = self.schema.field_id(name)
            key = (Kind.COLUMN_HASHES, number, 0)
            section = sections[Kind.COLUMN, number, 0]
            column = _Hashed(section, sections[key], self._first_marks[key])
            self._hashed[Kind.COLUMN, number] = column
            row_bytes, stride = field.row_bytes or 0, field.stride
            self._columns[name] = column, row_bytes, stride, rows_per_unit(row_bytes, stride)
        return place

    @property
    def content(self) -> Content:
        """The content of the file; raises ClosedError after `release`."""
        if self._content is None:
            raise ClosedError(f"{self.path}: the reader is closed")
        return self._content

    def release(self) -> None:
        """Release the content; every later read raises ClosedError."""
        self._content = None

    def column_mark(self, name: str) -> int:
        """Return the index of the first unit of a column."""
        return self._hashed[Kind.COLUMN, self.schema.field_id(name)].first_mark

    def hashes_mark(self, name: str) -> int:
        """Return the index of the first block of a column's hash section."""
        return self._hashed[Kind.COLUMN_HASHES, self.schema.field_id(name)].first_mark + 1

    def chunks_mark(self, name: str) -> int:
        """Return the index of the first chunk of a stream field."""
        return self._first_marks[Kind.CHUNK_HASHES, self.schema.field_id(name), 0]

    def is_checked(self, name: str, unit: int) -> bool:
        """Return True if a unit of a column has been verified."""
        return bool(self.marks[self.column_mark(name) + unit])

    def check_column(self, name: str, rows: Rows) -> None:
        """Verify the units of a column that contain `rows`, as `verify` requires."""
        if self._verify == "off" or not len(rows):
            return
        column, row_bytes, stride, per_unit = self._columns[name]
        units = self._unmarked(column.first_mark, rows // per_unit)
        if not len(units):
            return
        content, expected = self.content, self.column_hashes(name, units)
        start_ns = now_ns()
        for unit, hash_ in zip(units.tolist(), expected.tolist(), strict=True):
            first = unit * per_unit
            last = min(first + per_unit, self._n_samples)
            n_bytes = row_bytes if per_unit == 1 else (last - first) * stride
            offset = column.section.offset + first * stride
            try:
                found = hash_bytes(content[offset : offset + n_bytes])
            except ShardChanged as error:
                error.at(field=name, sample=first)
                raise
            if found != hash_:
                raise self.mismatch(name, first, offset, hash_, found)
            self.marks[column.first_mark + unit] = 1
        PHASE_TIMES.sums_ns[CHECK] += now_ns() - start_ns

    def check_row(self, name: str, row: int) -> None:
        """Verify the unit of a column that contains a row, as `check_column` does."""
        if self._verify == "off":
            return
        column, _, _, per_unit = self._columns[name]
        if self._verify != "first" or not self.marks[column.first_mark + row // per_unit]:
            self.check_column(name, np.array([row]))

    def column_hashes(self, name: str, units: Rows) -> npt.NDArray[np.uint64]:
        """Return the stored hashes of units of a column; the hashes are verified."""
        return self.items(Kind.COLUMN_HASHES, name, HASH_DTYPE, units)

    def are_records_checked(self, k: int, rows: Rows) -> bool:
        """Return True if `check_record` has nothing to do for `rows` of record field k."""
        if self._verify != "first":
            return self._verify == "off"
        return bool(self.marks[self._records_mark + rows * self._n_records + k].all())

    def check_record(
        self, name: str, k: int, row: int, offset: int, stored: memoryview, expected: int
    ) -> None:
        """Verify a row's stored record of record field k, unless it was verified before.

        `stored` are the bytes at `offset` in the file; `expected` is their hash.
        """
        if self._verify == "off":
            return
        mark = self._records_mark + row * self._n_records + k
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

    def fresh_chunks(self, name: str, first: int, n: int) -> Rows:
        """Return the indices of the chunks to verify, among n chunks from `first` on."""
        chunks = np.arange(first, first + n)
        if self._verify == "off":
            return chunks[:0]
        return self._unmarked(self.chunks_mark(name), chunks)

    def check_chunk(
        self, name: str, row: int, chunk: int, offset: int, stored: memoryview, expected: int
    ) -> None:
        """Verify a chunk of a row's stream: the bytes `stored` at `offset` in the file."""
        start_ns = now_ns()
        found = hash_bytes(stored)
        PHASE_TIMES.sums_ns[CHECK] += now_ns() - start_ns
        if found != expected:
            raise self.mismatch(name, row, offset, expected, found)
        self.marks[self.chunks_mark(name) + chunk] = 1

    def items(self, kind: Kind, name: str, dtype: np.dtype[Any], numbers: Rows) -> npt.NDArray[Any]:
        """Return verified copies of the items at the indices `numbers` of an index section.

        `name` is the field of the section or, if the section covers all fields, of the items.
        """
        content, size = self.content, dtype.itemsize  # `content` raises ClosedError
        number = NO_FIELD if kind == Kind.INDEX else self.schema.field_id(name)
        self.check_blocks(kind, number, numbers * size, size)
        return _take(content, self.sections[kind, number, 0], dtype, numbers, name)

    def check_blocks(self, kind: int, field: int, starts: Rows, n_bytes: int) -> None:
        """Verify the blocks of an index section that contain the n_bytes from each of `starts`."""
        if self._verify == "off" or not len(starts):
            return
        hashed = self._hashed[kind, field]
        if self._verify == "first":  # if all blocks are marked, return without listing them
            marks, lasts = self.marks[hashed.first_mark + 1 :], starts + (n_bytes - 1)
            if marks[starts // BLOCK_BYTES].all() and marks[lasts // BLOCK_BYTES].all():
                return
        blocks = self._unmarked(hashed.first_mark + 1, blocks_touched(starts, n_bytes))
        if not len(blocks):
            return
        table, section, start_ns = hashed.hashes, hashed.section, now_ns()
        if self._verify == "always" or not self.marks[hashed.first_mark]:
            self._check_bytes(table, table.offset, table.offset + table.size, table.hash)
            self.marks[hashed.first_mark] = 1
        stored = _take(self.content, table, HASH_DTYPE, blocks, self._field_of(table))
        for block, expected in zip(blocks.tolist(), stored.tolist(), strict=True):
            start = section.offset + block * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, section.offset + section.size)
            self._check_bytes(section, start, end, expected)
            self.marks[hashed.first_mark + 1 + block] = 1
        PHASE_TIMES.sums_ns[CHECK] += now_ns() - start_ns

    def read_whole(self, section: Section) -> bytes:
        """Return a section that is read once and kept, verified unless `verify` is "off"."""
        end = section.offset + section.size
        if self._verify == "off":
            return bytes(self.read(section, section.offset, end))
        return bytes(self._check_bytes(section, section.offset, end, section.hash))

    def _unmarked(self, first_mark: int, units: Rows) -> Rows:
        """Return the distinct `units` that need verification now."""
        if self._verify == "always":
            return distinct(units)
        marks = self.marks[first_mark + units]
        return units[:0] if marks.all() else distinct(units[marks == 0])

    def _check_bytes(self, section: Section, start: int, end: int, expected: int) -> memoryview:
        """Return the bytes of an index section from `start` to `end` in the file, verified."""
        stored = self.read(section, start, end)
        if (found := hash_bytes(stored)) != expected:
            field = self._field_of(section)
            raise self.mismatch(field, None, start, expected, found, section.name)
        return stored

    def read(self, section: Section, start: int, end: int) -> memoryview:
        """Return the bytes of a section from `start` to `end` in the file, unverified."""
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
        """Return the error for bytes of a sample, or of an index section, that were changed."""
        what = "the data of a sample does not match its hash"
        return ChecksumMismatch(
            what if section is None else "the bytes of an index do not match their hash",
            code="checksum",
            path=self.path,
            section=section,
            field=field,
            sample=row,
            offset=offset,
            **show_hashes(expected, found),
        )


def _take(
    content: Content, section: Section, dtype: np.dtype[Any], numbers: Rows, field: str | None
) -> npt.NDArray[Any]:
    """Copy some items of an index section; ShardChanged names section and field."""
    if isinstance(content, memoryview):
        return np.frombuffer(content, dtype, section.count, section.offset)[numbers]
    out = np.empty((len(numbers), dtype.itemsize), np.uint8)
    try:
        content.read_rows(section.offset, dtype.itemsize, numbers, out)
    except ShardChanged as error:
        error.sample = None  # `read_rows` set the index of an item, not of a sample
        error.at(section=section.name, field=field)
        raise
    return out.reshape(-1).view(dtype)
