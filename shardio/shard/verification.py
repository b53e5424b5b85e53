"""The verification state of a shard: for each unit, one byte that is called the mark of the unit.

A unit is a piece of a shard that has its own hash: a 4 KiB block of an index section, a large row
or a run of small rows of a column, a record, or a 64 KiB chunk of a stream. `format/checksum`
defines the bytes that each hash covers. *Index sections* are the small sections that locate and
describe the data, such as the index of the records and the sections of hashes.

The marks have the order of the sections that contain the hashes of the units. A mark is 1 if the
unit has been verified. A loader keeps the marks of all its shards in one table, which its processes
share without a lock. If a process does not see the mark that another process just set, it only
verifies the unit once more. With verify="always", units are verified again although they have
marks.
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
    """A section with units, the section that contains their hashes, and the index of a mark.

    `first_mark` is the index of the first mark for the units of `section`. If `section` is an index
    section, the first mark is that of `hashes` itself, and the marks of the blocks follow.
    """

    section: Section
    hashes: Section
    first_mark: int


class VerifiedUnits:
    """The units of one open shard, the marks of the units, and the content of the file.

    The content is borrowed until `release`. `open_sections` has validated `schema`, `sections` and
    `n_samples`. With verify="first", a check verifies the units that have no mark yet, and marks
    them. With verify="always", a check verifies units with a mark too. With verify="off", a check
    does nothing. If the bytes of a unit do not match its hash, a check raises ChecksumMismatch. The
    error has the name of the field, the index of the sample and the offset of the bytes; if the
    unit is a part of an index section, the error has the name of the section but no sample.
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
        """ShardCorrupt with the argument `path` filled in already."""
        self._hashed: dict[tuple[int, int], _Hashed] = {}
        self._columns: dict[str, tuple[_Hashed, int, int, int]] = {}
        """For each column, by name: its `_Hashed`, the size of a row in bytes, the stride, and the
        number of rows per unit."""
        self._n_records = len(schema.records)
        self._first_marks: dict[Key, int] = {}
        """For each section of hashes, by key: the index of the first mark that belongs to it."""
        self.n_marks = self._number()
        """The number of units, and thus of marks."""
        self._records_mark = self._first_marks.get((Kind.INDEX, NO_FIELD, 0), 0)
        self.marks: npt.NDArray[np.uint8] = np.zeros(self.n_marks, np.uint8)
        """The mark of each unit: 1 if the unit has been verified, otherwise 0. A loader replaces
        this array by an array of `n_marks` bytes in shared memory."""

    def _number(self) -> int:
        """Assign a mark to each unit; return the number of units."""
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
        """Return the index of the mark of a column's first unit."""
        return self._hashed[Kind.COLUMN, self.schema.field_id(name)].first_mark

    def hashes_mark(self, name: str) -> int:
        """Return the index of the mark of the first block in a column's section of hashes."""
        return self._hashed[Kind.COLUMN_HASHES, self.schema.field_id(name)].first_mark + 1

    def chunks_mark(self, name: str) -> int:
        """Return the index of the mark of the first chunk of a field of streams."""
        return self._first_marks[Kind.CHUNK_HASHES, self.schema.field_id(name), 0]

    def is_checked(self, name: str, unit: int) -> bool:
        """Return True if the unit with the index `unit` of a column has been verified."""
        return bool(self.marks[self.column_mark(name) + unit])

    def check_column(self, name: str, rows: Rows) -> None:
        """Verify the units of a column that contain the rows at the indices `rows`.

        The docstring of the class says which units are verified.
        """
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
        """Verify the unit of a column that contains the row at the index `row`.

        This method has the same effect as `check_column` for one row, but is faster if the unit has
        a mark.
        """
        if self._verify == "off":
            return
        column, _, _, per_unit = self._columns[name]
        if self._verify != "first" or not self.marks[column.first_mark + row // per_unit]:
            self.check_column(name, np.array([row]))

    def column_hashes(self, name: str, units: Rows) -> npt.NDArray[np.uint64]:
        """Return the stored hashes of those units of a column whose indices are `units`.

        The blocks of the section from which the hashes are read are verified.
        """
        return self.items(Kind.COLUMN_HASHES, name, HASH_DTYPE, units)

    def are_records_checked(self, k: int, rows: Rows) -> bool:
        """Return True if `check_record` would verify none of the records of a field for `rows`.

        `k` is the position of the field among the fields of the schema that are stored as records.
        """
        if self._verify != "first":
            return self._verify == "off"
        return bool(self.marks[self._records_mark + rows * self._n_records + k].all())

    def check_record(
        self, name: str, k: int, row: int, offset: int, stored: memoryview, expected: int
    ) -> None:
        """Verify the record of one field of one row, as the docstring of the class says.

        `name` is the name of the field, and `k` its position among the fields of the schema that
        are stored as records. `stored` has the bytes of the record, which begin at `offset` in the
        file. `expected` is the hash of these bytes according to the index.
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
        """Return the indices of the chunks that must be verified, among `n` chunks from `first` on.

        The index of a chunk is its position among all chunks of the field.
        """
        chunks = np.arange(first, first + n)
        if self._verify == "off":
            return chunks[:0]
        return self._unmarked(self.chunks_mark(name), chunks)

    def check_chunk(
        self, name: str, row: int, chunk: int, offset: int, stored: memoryview, expected: int
    ) -> None:
        """Verify a chunk of the stream of a row.

        `chunk` is the position of the chunk among all chunks of the field. `stored` has the bytes
        of the chunk, which begin at `offset` in the file. `expected` is the stored hash.
        """
        start_ns = now_ns()
        found = hash_bytes(stored)
        PHASE_TIMES.sums_ns[CHECK] += now_ns() - start_ns
        if found != expected:
            raise self.mismatch(name, row, offset, expected, found)
        self.marks[self.chunks_mark(name) + chunk] = 1

    def items(self, kind: Kind, name: str, dtype: np.dtype[Any], numbers: Rows) -> npt.NDArray[Any]:
        """Return verified copies of the items at the indices `numbers` of an index section.

        `name` is the field to which the items belong. There is one section of each kind per field;
        only the section of the kind INDEX has the items of all fields. `dtype` is that of an item.
        """
        content, size = self.content, dtype.itemsize  # raises ClosedError after `release`
        number = NO_FIELD if kind == Kind.INDEX else self.schema.field_id(name)
        self.check_blocks(kind, number, numbers * size, size)
        return _take(content, self.sections[kind, number, 0], dtype, numbers, name)

    def check_blocks(self, kind: int, field: int, starts: Rows, n_bytes: int) -> None:
        """Verify the 4 KiB blocks of an index section that contain some items of the section.

        `kind` and `field` (a field id or NO_FIELD) are those of the section. The items begin at
        `starts`, in bytes from the start of the section, and have `n_bytes` each. An item must not
        be larger than a block.
        """
        if self._verify == "off" or not len(starts):
            return
        hashed = self._hashed[kind, field]
        if self._verify == "first":  # a short test for the common case: all blocks have marks
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
        """Return the bytes of a section that has no unit and no mark, such as a dictionary.

        The bytes are read and verified at each call (unless `verify` is "off"). A caller that needs
        them again should keep them.
        """
        end = section.offset + section.size
        if self._verify == "off":
            return bytes(self.read(section, section.offset, end))
        return bytes(self._check_bytes(section, section.offset, end, section.hash))

    def _unmarked(self, first_mark: int, units: Rows) -> Rows:
        """Return the distinct `units` that must be verified now: those without a mark.

        With verify="always", return all distinct units. `first_mark` is the index of the mark of
        unit 0.
        """
        if self._verify == "always":
            return distinct(units)
        marks = self.marks[first_mark + units]
        return units[:0] if marks.all() else distinct(units[marks == 0])

    def _check_bytes(self, section: Section, start: int, end: int, expected: int) -> memoryview:
        """Return a part of a section; raise ChecksumMismatch unless its hash is `expected`.

        `start` and `end` are offsets in the file.
        """
        stored = self.read(section, start, end)
        if (found := hash_bytes(stored)) != expected:
            field = self._field_of(section)
            raise self.mismatch(field, None, start, expected, found, section.name)
        return stored

    def read(self, section: Section, start: int, end: int) -> memoryview:
        """Return a part of a section without verifying it; `start` and `end` are file offsets."""
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
        """Return the error for bytes that do not match their hash.

        `row` is the index of the sample to which the bytes belong, and `section` is None. For bytes
        of an index section, `row` is None, and `section` is the name of the section.
        """
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
    """Return copies of the items at the indices `numbers` of an index section, unverified.

    Raises ShardChanged, with the names of the section and the field, if the file was truncated.
    """
    if isinstance(content, memoryview):
        return np.frombuffer(content, dtype, section.count, section.offset)[numbers]
    out = np.empty((len(numbers), dtype.itemsize), np.uint8)
    try:
        content.read_rows(section.offset, dtype.itemsize, numbers, out)
    except ShardChanged as error:
        error.sample = None  # `read_rows` has set it to the index of an item of the section
        error.at(section=section.name, field=field)
        raise
    return out.reshape(-1).view(dtype)
