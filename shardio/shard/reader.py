"""Open and read one shard: samples, values, packets, columns, from a memory map or by offset.

Opening validates the structure, in the same time for any number of samples. After `open_sections`,
a shard has all sections that its schema requires; any other section is of an optional kind. All are
inside the file, with valid sizes, counts and strides. Readers therefore check only hashes and
values in tables, such as index entries.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.callers import check_encodable
from shardio._base.classes import Closing
from shardio.errors import (
    InvalidArgument,
    SchemaError,
    ShardCorrupt,
    ShardIncomplete,
    ShardUnsupported,
)
from shardio.format.checksum import format_hashes, hash_bytes
from shardio.format.codecs import MAX_DICTIONARY_BYTES, RECORD_FEATURES
from shardio.format.layout import (
    FIRST_OPTIONAL_KIND,
    MAX_SAMPLES,
    MAX_SCHEMA_BYTES,
    NO_FIELD,
    PAGE,
    SUPPORTED,
    Header,
    Kind,
    Required,
    Section,
    check_header_fits,
    unpack_header,
    unpack_table,
)
from shardio.format.schema import Schema
from shardio.format.sections import VARIABLE_COUNT_STRIDES, Sections, plan_sections
from shardio.shard.records import Present, Records
from shardio.shard.verification import VERIFY, Rows, VerifiedUnits, Verify
from shardio.storage.content import Content, PreadFile, StoredColumn, open_content
from shardio.storage.file_access import Access, check_length

_KINDS: Final = frozenset(Kind)

_SCHEMA_FEATURES: Final = SUPPORTED & ~RECORD_FEATURES
"""The features that depend only on the schema."""

_parse_schema = functools.lru_cache(maxsize=64)(Schema.from_json)
"""Parse a schema. The result is cached, because all shards of a dataset have the same schema."""


def open_sections(content: Content, path: str) -> tuple[Header, Schema, Sections]:
    """Validate the structure of a shard; return its header, its schema, and its sections by key."""
    size = content.nbytes
    if size < PAGE:
        if not any(content[:size]):
            raise ShardIncomplete(f"{path}: {size} bytes and no header: its writer did not finish")
        what = "too short to be a shard"
        raise ShardCorrupt(what, code="file_size", path=path, expected=PAGE, found=size)
    first_page = bytes(content[:PAGE])
    header = unpack_header(first_page, path)
    check_header_fits(header, size, path)
    last = size - PAGE
    if (last_page := bytes(content[last:size])) != first_page:
        at = next(i for i in range(PAGE) if last_page[i] != first_page[i])
        raise ShardCorrupt(
            "the first and the last page differ",
            code="trailer",
            path=path,
            section="trailer",
            offset=last + at,
            expected=first_page[at],
            found=last_page[at],
        )
    table = bytes(content[header.table_offset : header.table_offset + header.table_size])
    sections = {s.key: s for s in unpack_table(table, header, path)}
    schema = read_schema(content, sections, path)
    check_sections(header, schema, sections, path)
    return header, schema, sections


def _corrupt(
    path: str, section: Section, what: str, expected: object, found: object
) -> ShardCorrupt:
    rest: Any = {"offset": section.offset, "expected": expected, "found": found}
    return ShardCorrupt(what, code="section", path=path, section=section.name, **rest)


def read_schema(content: Content, sections: Sections, path: str) -> Schema:
    """Return the schema of a shard; raise ShardCorrupt unless it matches its hash and is valid."""
    section = sections.get((Kind.SCHEMA, NO_FIELD, 0))
    if section is None:
        raise ShardCorrupt("there is no schema", code="section", path=path)
    if section is not list(sections.values())[-1]:
        # The schema must be the last section, so that one read of the file's end opens the shard.
        raise _corrupt(path, section, "the schema is not the last section", None, section.name)
    if section.size > MAX_SCHEMA_BYTES:
        raise _corrupt(path, section, "the schema is too large", MAX_SCHEMA_BYTES, section.size)
    raw = bytes(content[section.offset : section.offset + section.size])
    corrupt = functools.partial(ShardCorrupt, path=path, section="schema", offset=section.offset)
    if (found := hash_bytes(raw)) != section.hash:
        what, hashes = "the schema does not match its hash", format_hashes(section.hash, found)
        raise corrupt(what, code="schema_hash", **hashes)
    try:
        return _parse_schema(raw)
    except ShardUnsupported as error:
        raise ShardUnsupported(f"{path}: {error}") from error
    except SchemaError as error:
        raise corrupt(str(error), code="schema") from error


def check_sections(header: Header, schema: Schema, sections: Sections, path: str) -> None:
    """Raise ShardCorrupt unless the sections of a shard match its schema and number of samples.

    Any number of packets and chunks is accepted. Raises ShardUnsupported for an unknown kind that a
    reader must not skip.
    """
    for section in sections.values():
        if section.kind < FIRST_OPTIONAL_KIND and section.kind not in _KINDS:
            raise ShardUnsupported(
                f"{path}: has a section of kind {section.kind} at byte {section.offset}, which "
                "this version of shardio cannot read; read it with a newer shardio"
            )
    if (n := header.n_samples) > MAX_SAMPLES:
        what = "too many samples"
        raise ShardCorrupt(what, code="count", path=path, expected=MAX_SAMPLES, found=n)
    found_bits = Required(header.required & int(_SCHEMA_FEATURES))
    if found_bits != schema.required:
        what = "the feature bits of the header do not match the schema"
        bits: Any = {"expected": str(schema.required), "found": str(found_bits)}
        raise ShardCorrupt(what, code="feature", path=path, section="header", **bits)
    counts = tuple(
        (key, each.count) for key, each in sections.items() if each.kind in VARIABLE_COUNT_STRIDES
    )
    planned = plan_sections(schema, header.n_samples, counts)
    for key, n_items, stride in planned:
        if key not in sections:
            kind = Section(*key, 0, 0, 0, 0, 0).name
            raise ShardCorrupt(f"section {kind} is missing", code="section", path=path)
        section = sections[key]
        if (section.count, section.stride) != (n_items, stride):
            found = (section.count, section.stride)
            raise _corrupt(path, section, "wrong count or stride", (n_items, stride), found)
        if stride and section.size != n_items * stride:
            raise _corrupt(path, section, "wrong size", n_items * stride, section.size)
        if section.kind == Kind.DICTIONARY and section.size > MAX_DICTIONARY_BYTES:
            what = "the dictionary is too large"
            raise _corrupt(path, section, what, MAX_DICTIONARY_BYTES, section.size)
    if len(sections) == len(planned):
        return
    for key in sections.keys() - {spec.key for spec in planned}:
        section = sections[key]
        if section.kind < FIRST_OPTIONAL_KIND:
            what = "a section that does not match the schema"
            raise _corrupt(path, section, what, None, key)
        if section.of_kind:
            what = "a section of an optional kind must not belong to another section"
            raise _corrupt(path, section, what, 0, section.of_kind)
        if section.stride and section.size != (expected := section.count * section.stride):
            raise _corrupt(path, section, "wrong size", expected, section.size)


class ShardReader(Closing):
    """A reader of one shard. Owns the memory map of the file, or a descriptor if it is not mapped.

    If the file is mapped, uncompressed arrays are read-only views of the map. They stay valid after
    `close()`: the file is unmapped when the last view is gone. Otherwise, all values are copies.

    Args:
        path: the path of the file.
        verify: "first" checks each hash when its bytes are first read, "always" at every read, and
            "off" never. The structure of the file is validated in any case.
        access: "mmap" maps the file; truncating it may then kill this process. "pread" reads it by
            offset. "auto" maps the file unless it is on a network file system.
        content: an open file from which to read; None to open the file at `path`.

    Raises:
        ShardNotFound, ShardIncomplete, ShardUnsupported, ShardCorrupt: see `shardio.errors`.
    """

    _public = "access close column id path present sample schema"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "first",
        access: Access = "auto",
        content: PreadFile | None = None,
    ) -> None:
        if verify not in VERIFY:
            raise InvalidArgument(f"verify must be one of {', '.join(VERIFY)}; found {verify!r}")
        self.path = os.fspath(path)
        self._mapped_columns: dict[str, npt.NDArray[Any]] = {}
        """Columns of which a row was read, as views of the map."""
        self._absolute = os.path.abspath(path)  # still valid after a chdir
        found: Content
        if content is None:
            check_encodable(path, "path")
            found, self.file = open_content(self.path, access)
        else:
            found, self.file = content, content.state
        self.header, self.schema, sections = open_sections(found, self.path)
        self._optional = frozenset(self.schema.optional)
        self._verify = verify
        self.units = VerifiedUnits(
            found, self.schema, sections, len(self), path=self.path, verify=verify
        )
        """The content of the file and the verification state."""
        self.access: Access = "mmap" if isinstance(found, memoryview) else "pread"
        """The access method in use: "mmap" or "pread"."""
        self.records = Records(self.units)

    def __repr__(self) -> str:
        return f"ShardReader({self.path!r}: {len(self)} samples of {len(self.schema)} fields)"

    def __len__(self) -> int:
        return self.header.n_samples

    @property
    def id(self) -> str:
        """The id of the shard in hex: a hash of its content."""
        return self.header.id.hex()

    @property
    def content(self) -> Content:
        """The bytes of the file. Raises ClosedError after `close`."""
        return self.units.content

    def check_length(self) -> None:
        """Raise ShardChanged if a mapped file was truncated: reading it could kill the process."""
        if self.access == "mmap":
            check_length(self._absolute, self.file)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The entries of the section table, in file order."""
        return tuple(self.units.sections.values())

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return the sample in a row: each field's value by its dotted name; None if missing."""
        return self.sample(row, self.schema)

    def sample(
        self, row: int, names: Iterable[str], *, check_truncated: bool = True
    ) -> dict[str, Any]:
        """Return the fields `names` of the sample in a row, without reading others.

        With `check_truncated`, raise ShardChanged if a mapped file was truncated.
        """
        self._check_open()
        row, n = operator.index(row), len(self)
        if not -n <= row < n:
            raise IndexError(f"{self.path}: row {row} of {n}")
        row += n if row < 0 else 0
        if check_truncated:
            self.check_length()
        sample: dict[str, Any] = {}
        for name in names:
            whole = self._mapped_columns.get(name)
            if whole is None or name in self._optional:
                sample[name] = self._value(name, row)
            else:  # the common case is handled here, because `_value` takes five times as long
                self.units.check_row(name, row)
                sample[name] = whole[row]
        return sample

    def _value(self, name: str, row: int) -> Any:
        field, rows = self.schema.get(name), np.array([row], np.int64)
        if field is None:
            known = ", ".join(self.schema)
            raise InvalidArgument(f"{self.path}: no field {name!r}; fields: {known}")
        if field.column is None:
            return next(self.records.values(name, rows))
        if field.optional and not self.records.present(name, rows)[0]:
            return None
        self.units.check_row(name, row)
        whole = self._mapped_columns.get(name)
        if whole is not None:
            return whole[row]
        column = self._column(name)
        if self.access == "mmap":
            self._mapped_columns[name] = column.all_rows()
        return column.row(row)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def _check_open(self) -> None:
        _ = self.units.content  # raises ClosedError after `close`

    def column(
        self, name: str, rows: Sequence[int] | npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Return the values of a column (an uncompressed array of fixed shape) as one array.

        Without `rows`, return the whole column read-only: a view of the map, or a copy if the file
        is not mapped. It is **unverified** unless the reader was opened with verify="always".

        With `rows`, return a verified copy of shape (len(rows), *field.shape), in which the rows of
        missing values are zero; `present` finds them.

        Raises:
            InvalidArgument: there is no such column.
            IndexError: a row is out of range.
            ChecksumMismatch: the bytes were changed after they were written.
            ShardCorrupt: (for a verified whole column) the row of a missing value is not zero.
            ShardChanged: the file was truncated while in use.
        """
        if name not in self.schema.columns:
            columns = ", ".join(self.schema.columns) or "none"
            raise InvalidArgument(f"{self.path}: {name!r} is not a column; columns are: {columns}")
        column = self._column(name)
        self.check_length()
        if rows is None:
            whole = column.all_rows()
            if self._verify == "always":
                self.units.check_column(name, np.arange(len(self)))
                self._check_absent(name, whole)
            return whole
        indices = self._indices(rows)
        self.units.check_column(name, indices)
        found = column.rows(indices)
        if self.schema.columns[name].optional:
            found[~self.records.present(name, indices)] = 0
        return found

    def _check_absent(self, name: str, rows: npt.NDArray[Any]) -> None:
        absent = np.flatnonzero(~self.present(name))
        for row in absent.tolist():
            if any(rows[row].tobytes()):
                section = self.column_section(name)
                raise self.units.corrupt(
                    "a sample lacks the field, and its row is not zero",
                    code="validity",
                    field=name,
                    sample=row,
                    offset=section.offset + row * section.stride,
                )

    def _indices(self, rows: Sequence[int] | npt.NDArray[Any]) -> Rows:
        given = np.asarray(rows)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            shown = f"{given.dtype}, {given.ndim} dimensions"
            raise InvalidArgument(f"rows must be integers in one dimension; found {shown}")
        n = len(self)
        if given.size and (given.min() < -n or given.max() >= n):
            raise IndexError(f"{self.path}: a row is out of range of {n}")
        indices = given.astype(np.int64)
        indices[indices < 0] += n
        return indices

    def present(self, name: str, rows: Sequence[int] | Rows | None = None) -> Present:
        """Return a verified mask of `rows`, by default all: True if a row has a value of the field.

        Raises:
            InvalidArgument: there is no such field.
            IndexError: a row is out of range.
            ChecksumMismatch: the bytes were changed after they were written.
        """
        self._check_open()
        field = self.schema.get(name)
        if field is None:
            raise InvalidArgument(f"{self.path}: no field {name!r}; fields: {list(self.schema)}")
        indices = np.arange(len(self)) if rows is None else self._indices(rows)
        return self.records.present(name, indices)

    def _column(self, name: str) -> StoredColumn:
        field, section = self.schema.columns[name], self.column_section(name)
        shape = tuple(d for d in field.shape if d is not None)
        place = section.offset, section.stride, section.count
        return StoredColumn(name, self.content, *place, field.numpy, shape)

    def column_section(self, name: str) -> Section:
        """Return the section of a column."""
        return self.units.sections[Kind.COLUMN, self.schema.field_id(name), 0]

    def hashes_section(self, name: str) -> Section:
        """Return the section of the hashes of a column's units."""
        return self.units.sections[Kind.COLUMN_HASHES, self.schema.field_id(name), 0]

    def close(self) -> None:
        """Release the content; a mapped file is unmapped with the last view. Idempotent."""
        self._mapped_columns.clear()
        self.units.release()
