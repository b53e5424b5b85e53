"""Read one shard: samples, values, packets and columns, through a memory map or by offset."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio._base.callers import check_encodable, expand_home, row_index
from shardio._base.classes import Closing
from shardio.errors import InvalidArgument, ShardCorrupt
from shardio.format.layout import Kind, Section
from shardio.format.sections import stored_bytes
from shardio.format.types import Array, Field
from shardio.shard.opening import open_sections
from shardio.shard.records import Present, Records
from shardio.shard.verification import VERIFY, Rows, VerifiedUnits, Verify
from shardio.storage.content import Content, PreadFile, StoredColumn, open_content
from shardio.storage.file_access import Access, check_length


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

    _public = (
        "access array_part array_shape close column id lengths path present sample schema "
        "stored_sizes"
    )

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
        self.path = os.fspath(path := expand_home(path))
        self._mapped_columns: dict[str, npt.NDArray[Any]] = {}
        """If the file is mapped, views of the columns from which a row has been read."""
        self.absolute_path = os.path.abspath(path)
        """The path of the file, which is still valid after a chdir."""
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
        closed = ", closed" * self.units.is_released
        n_samples, n_fields = len(self), len(self.schema)
        return f"ShardReader({self.path!r}: {n_samples} samples of {n_fields} fields{closed})"

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
            check_length(self.absolute_path, self.file)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The entries of the section table, in file order."""
        return tuple(self.units.sections.values())

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return the sample in a row: a dict from dotted field names to values, None if missing."""
        return self.sample(row, self.schema)

    def sample(
        self, row: int, names: Iterable[str], *, check_truncated: bool = True
    ) -> dict[str, Any]:
        """Return the fields `names` of the sample in a row, without reading others.

        With `check_truncated`, raise ShardChanged if a mapped file was truncated.
        """
        self._check_open()
        try:
            row, n = operator.index(row), len(self)
        except TypeError:
            row_index("reader", row, "[reader[i] for i in indices], or reader.column(name)")
            raise
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

    def array_shape(self, name: str, row: int) -> tuple[int, ...] | None:
        """Return the shape of the array in a row, without reading it; None if it is missing.

        Raises:
            InvalidArgument: the field has no arrays.
            ShardCorrupt: the index is damaged.
        """
        array, rows = self._array(name), self._indices([row])
        if not self.present(name, rows)[0]:
            return None
        if array.row_bytes is not None:
            return tuple(n or 0 for n in array.shape)
        entry = self.records.entries(name, rows)[0]
        try:
            return array.shape_of(self.records.shapes(name, rows)[0], int(entry["n_bytes"]))
        except ShardCorrupt as error:
            offset = self.records.offset + int(entry["offset"])
            raise self.records.add_location(error, name, int(rows[0]), offset) from None

    def array_part(self, name: str, row: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return elements `start` to `stop`, along the first axis, of an uncompressed array.

        The rest of the array is not read. The result is **unverified**, because the hash is that of
        the whole array. It is a view of a mapped file, or a copy.

        Raises:
            InvalidArgument: the field has no arrays of at least one axis, or they are compressed;
                the array is missing or has no such elements.
            ShardCorrupt: the index is damaged, or the file was truncated.
        """
        array, shape = self._array(name), self.array_shape(name, row)
        if not shape or array.codec != "raw" or not 0 <= start <= stop <= shape[0]:
            raise InvalidArgument(
                f"{self.path}: elements {start} to {stop} of field {name!r}, sample {row}: "
                f"expected a part of an uncompressed array; found {array!r} of shape {shape}"
            )
        self.check_length()
        rows = self._indices([row])
        if array.column is not None:
            section = self.column_section(name)
            offset = section.offset + int(rows[0]) * section.stride
        else:
            entry = self.records.entries(name, rows)[0]
            offset = self.records.offset + int(entry["offset"])
        n_bytes = math.prod(shape[1:]) * array.numpy.itemsize
        stored = self.content[offset + start * n_bytes : offset + stop * n_bytes]
        found = np.frombuffer(stored, array.numpy).reshape(stop - start, *shape[1:])
        found.flags.writeable = False
        return found

    def _array(self, name: str) -> Array:
        field = self.schema.get(name)
        if field is None or field.array is None:
            arrays = [each for each, kind in self.schema.items() if kind.array is not None]
            raise InvalidArgument(
                f"{self.path}: field {name!r} has no arrays; fields with arrays: {arrays}"
            )
        return field.array

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

    def lengths(self, name: str, rows: Sequence[int] | Rows | None = None) -> Rows:
        """Return the length of each value of a field, read from the shard's tables alone.

        The length is the number of frames of a video, of samples of audio, or the size of an
        array's first varying dimension. For other values, it is the number of bytes before
        compression. The length of a missing value is 0. `rows` are the rows, by default all.

        Raises:
            InvalidArgument: there is no such field, or its values are stored in a column.
            IndexError: a row is out of range.
            ShardCorrupt: the tables are damaged.
        """
        field, indices = self._record_field(name), self._record_rows(rows)
        entries = self.records.entries(name, indices)
        if field.is_streamed:
            found = self.records.stream_table(name, indices, entries)["n_frames"]
        elif field.array is not None and field.stored_dims:
            found = self.records.shapes(name, indices)[:, 0]
        else:
            found = entries["n_bytes"]
        return np.where(self.records.present(name, indices), found, 0).astype(np.int64)

    def stored_sizes(self, name: str, rows: Sequence[int] | Rows | None = None) -> Rows:
        """Return the size of each value in the file, in bytes; see `lengths`."""
        self._record_field(name)
        return stored_bytes(self.records.entries(name, self._record_rows(rows))).astype(np.int64)

    def _record_field(self, name: str) -> Field:
        self._check_open()
        if name not in self.schema.records:
            records = ", ".join(self.schema.records) or "none"
            raise InvalidArgument(
                f"{self.path}: {name!r} is not stored as records; fields that are: {records}"
            )
        return self.schema[name]

    def _record_rows(self, rows: Sequence[int] | Rows | None) -> Rows:
        return np.arange(len(self)) if rows is None else self._indices(rows)

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
