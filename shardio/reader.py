"""ShardReader: one shard, opened and checked, read from its map.

Paired with `writer`; what both must agree on is in `format/`. Opening validates everything that
does not depend on the number of samples; a hash is checked when the bytes it covers are first
met (`units`).
"""

from __future__ import annotations

import operator
import os
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardio.access.columns import Column
from shardio.access.content import Content, take
from shardio.access.files import check_length
from shardio.access.filesystems import Access
from shardio.errors import InvalidArgument, LoaderClosed, ShardChanged, ShardCorrupt
from shardio.format.codec import Dictionary, decode, known_dictionary
from shardio.format.index import (
    ENTRY,
    ENTRY_DTYPE,
    Entries,
    codecs,
    first_broken,
    full_shape,
    stored_bytes,
)
from shardio.format.layout import NO_FIELD, PAGE, Kind, Section
from shardio.format.schema import Array
from shardio.format.values import decode_record
from shardio.opening import open_sections
from shardio.storage import open_content
from shardio.units import VERIFY, Rows, Units, Verify

Present = npt.NDArray[np.bool_]


class ShardReader:
    """Reads one shard; owns its map until `close()` and until the last view of it is gone.

    Without a map, what it hands out are copies, and it owns a descriptor at most.

    Args:
        path: the file.
        verify: "first" checks every hash when its bytes are first met, "always" each time, "off"
            never. Structure is checked in any case.
        access: "mmap" maps the file, "pread" reads it by offset, "auto" maps it unless it lies on a
            network file system. A mapped file that is cut short can kill this process.

    Raises:
        ShardNotFound, ShardIncomplete, ShardUnsupported, ShardCorrupt: see `shardio.errors`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "first",
        access: Access = "auto",
    ) -> None:
        if verify not in VERIFY:
            raise InvalidArgument(f"verify must be one of {', '.join(VERIFY)}; found {verify!r}")
        self.path = os.fspath(path)
        self._is_open = True
        self._place = os.path.abspath(path)  # looked at later, whatever chdir did meanwhile
        self._bytes, self.file = open_content(self.path, access)
        self.header, self.schema, self._sections = open_sections(self._bytes, self.path)
        self._verify = verify
        self._record_ids = {name: k for k, name in enumerate(self.schema.records)}
        self.units = Units(
            self._bytes, self.schema, self._sections, len(self), path=self.path, verify=verify
        )
        """What has been checked; the dataset's gather uses it too."""
        self.access: Access = "mmap" if isinstance(self._bytes, memoryview) else "pread"
        """What `access` came to."""
        self._dictionaries: dict[str, Dictionary | None] = {}

    def __len__(self) -> int:
        return self.header.n_samples

    @property
    def id(self) -> str:
        """The shard's content-derived id, in hex."""
        return self.header.id.hex()

    @property
    def content(self) -> Content:
        """The bytes of the file."""
        return self._bytes

    def check_length(self) -> None:
        """Make sure that a mapped file was not cut short since: reading it would kill.

        Raises:
            ShardChanged: it was. Between this and the reading it still can be.
        """
        if isinstance(self._bytes, memoryview):
            check_length(self._place, self.file)

    @property
    def payload_offset(self) -> int:
        """Where in the file the records begin."""
        return self._sections[Kind.PAYLOAD, NO_FIELD, 0].offset

    @property
    def sections(self) -> tuple[Section, ...]:
        """The section table, in file order."""
        return tuple(self._sections.values())

    def __getitem__(self, row: int) -> dict[str, Any]:
        """One sample, by (dotted) names; arrays are read-only, where they are raw views of any map.

        An optional field that the sample lacks is None.
        """
        return self.sample(row, self.schema)

    def sample(self, row: int, names: Iterable[str]) -> dict[str, Any]:
        """Some fields of one sample; nothing is read of the others."""
        rows = np.array([self._in_range(operator.index(row))], np.int64)
        self.check_length()
        sample: dict[str, Any] = {}
        for name in names:
            field = self.schema.get(name)
            if field is None:
                known = ", ".join(self.schema)
                raise InvalidArgument(f"{self.path}: no field {name!r}; there are {known}")
            if not isinstance(field, Array) or not field.is_column:
                sample[name] = next(self.values(name, rows))
            elif field.optional and not self.present(name, rows)[0]:
                sample[name] = None
            else:
                self.units.check_column(name, rows)
                sample[name] = self._column(name).row(int(rows[0]))
        return sample

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def _in_range(self, row: int) -> int:
        self._check_open()
        n = len(self)
        if not -n <= row < n:
            raise IndexError(f"{self.path}: row {row} of {n}")
        return row + n if row < 0 else row

    def column(
        self,
        name: str,
        rows: Sequence[int] | npt.NDArray[Any] | None = None,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """A fixed raw field of many samples as one array.

        Without `rows`: the whole column over the map (or read into memory), read-only,
        **unverified** unless the reader was opened with verify="always"; it keeps the map alive.
        With `rows`: those rows, verified, copied into `out` or a new array of shape
        (len(rows), *field.shape). Samples that lack an optional field have zeros; `present` tells
        which.

        Raises:
            InvalidArgument: no such column, or an `out` that does not fit.
            IndexError: a row out of range.
            ChecksumMismatch: the bytes changed since they were written.
            ShardChanged: the file was cut short while in use.
        """
        if name not in self.schema.columns:
            columns = ", ".join(self.schema.columns) or "none"
            raise InvalidArgument(f"{self.path}: {name!r} is no column; columns are: {columns}")
        column = self._column(name)
        self.check_length()
        if rows is None:
            if self._verify == "always":
                self.units.check_column(name, np.arange(len(self)))
            return column.whole()
        places = self._places(rows)
        shape = (len(places), *column.shape)
        if out is not None and out.shape != shape:
            raise InvalidArgument(f"out has shape {out.shape}, expected {shape}")
        if out is not None and out.dtype != column.dtype:
            raise InvalidArgument(f"out has dtype {out.dtype}, expected {column.dtype}")
        self.units.check_column(name, places)
        found = column.rows(places)
        if out is None:
            return found
        out[...] = found
        return out

    def _places(self, rows: Sequence[int] | npt.NDArray[Any]) -> Rows:
        """Row numbers as given by a user, counted from the start."""
        given = np.asarray(rows)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InvalidArgument(
                f"rows must be integers in one dimension; found {given.dtype}, {given.ndim} "
                "dimensions"
            )
        n = len(self)
        if given.size and (given.min() < -n or given.max() >= n):
            raise IndexError(f"{self.path}: a row is out of range of {n}")
        places = given.astype(np.int64)
        places[places < 0] += n
        return places

    def present(self, name: str, rows: Sequence[int] | Rows | None = None) -> Present:
        """Which of `rows` (all samples by default) have a value of a field, verified.

        Raises:
            InvalidArgument: no such field.
            IndexError: a row out of range.
            ChecksumMismatch: the bytes changed since they were written.
        """
        field = self.schema.get(name)
        if field is None:
            raise InvalidArgument(f"{self.path}: no field {name!r}; there are {list(self.schema)}")
        places = np.arange(len(self)) if rows is None else self._places(rows)
        if not field.optional:
            return np.ones(len(places), np.bool_)
        self._check_open()
        number = self.schema.field_id(name)
        section = self._sections[Kind.VALIDITY, number, 0]
        at = places >> 3
        self.units.check_blocks(Kind.VALIDITY, number, at, 1)
        place = section.size, section.offset
        stored = take(self._bytes, np.uint8, *place, at, section=section.name, field=name)
        found: Present = (stored >> (places & 7).astype(np.uint8) & 1).astype(np.bool_)
        return found

    def _check_open(self) -> None:
        if not self._is_open:
            raise LoaderClosed(f"{self.path}: the reader is closed")

    def _column(self, name: str) -> Column:
        self._check_open()
        field, section = self.schema.columns[name], self.column_section(name)
        shape = tuple(d for d in field.shape if d is not None)
        place = section.offset, section.stride, section.count
        return Column(name, self._bytes, *place, field.numpy, shape)

    def column_section(self, name: str) -> Section:
        """Where a column lies in the file."""
        return self._sections[Kind.COLUMN, self.schema.field_id(name), 0]

    def hashes_section(self, name: str) -> Section:
        """Where the hashes of a column's units lie in the file."""
        return self._sections[Kind.COLUMN_HASHES, self.schema.field_id(name), 0]

    def entries(self, name: str, rows: Rows) -> Entries:
        """The index entries of a record field for `rows`, checked: hashes, bounds, sizes.

        Raises:
            ShardCorrupt: naming the first sample whose entry cannot be right.
        """
        self._check_open()
        k, n_records = self._record_ids[name], len(self._record_ids)
        section = self._sections[Kind.INDEX, NO_FIELD, 0]
        numbers = rows * n_records + k
        self.units.check_blocks(Kind.INDEX, NO_FIELD, numbers * ENTRY.size, ENTRY.size)
        place = section.count, section.offset
        found: Entries = take(
            self._bytes, ENTRY_DTYPE, *place, numbers, section=section.name, field=name
        )
        payload = self._sections[Kind.PAYLOAD, NO_FIELD, 0]
        broken = first_broken(found, self.schema[name], payload.size)
        if broken is not None:
            raise ShardCorrupt(
                "an index entry cannot be right (codec, offset, sizes or alignment)",
                code="index_entry",
                path=self.path,
                field=name,
                sample=int(rows[broken]),
                offset=section.offset + int(numbers[broken]) * ENTRY.size,
                found=tuple(found[broken].tolist()),
            )
        return found

    def records(self, name: str, rows: Rows, entries: Entries) -> Iterator[bytes | memoryview]:
        """The decoded record of each row in order, verified; raw ones are views of any map.

        Raises:
            ShardCorrupt: ChecksumMismatch for changed bytes; otherwise what does not decode.
        """
        self._check_open()
        payload = self.payload_offset
        content = self._bytes  # close() lets go of the map; this iterator goes on
        dictionary = self._dictionary(name)
        k = self._record_ids[name]
        columns = (
            rows.tolist(),
            (entries["offset"] + np.uint64(payload)).tolist(),
            stored_bytes(entries).tolist(),
            codecs(entries).tolist(),
            entries["n_bytes"].tolist(),
            entries["hash"].tolist(),
        )
        for row, offset, n_stored, codec, n_bytes, expected in zip(*columns, strict=True):
            try:
                stored = content[offset : offset + n_stored]
            except ShardChanged as error:
                raise error.at(field=name, sample=row) from error
            self.units.check_record(name, k, row, offset, stored, expected)
            try:
                yield decode(stored, codec, n_bytes, dictionary)
            except ShardCorrupt as error:
                raise self.placed(error, name, row, offset) from error

    def _dictionary(self, name: str) -> Dictionary | None:
        """What a field's records are compressed with; None if with nothing. Read once."""
        if self.schema[name].codec != "zstd_dictionary":
            return None
        if name not in self._dictionaries:
            section = self._sections[Kind.DICTIONARY, self.schema.field_id(name), 0]
            try:
                content = bytes(self._bytes[section.offset : section.offset + section.size])
            except ShardChanged as error:
                raise error.at(section=section.name, field=name) from error
            self.units.check_whole(section, content)
            try:
                self._dictionaries[name] = known_dictionary(content) if content else None
            except ShardCorrupt as error:
                raise self.placed(error, name, None, section.offset) from error
        return self._dictionaries[name]

    def shapes(self, name: str, rows: Rows) -> npt.NDArray[np.uint64]:
        """The varying dimensions of an array field for `rows`: (len(rows), n_varying), checked."""
        field = self.schema[name]
        if not isinstance(field, Array) or not field.n_varying:
            return np.empty((len(rows), 0), np.uint64)
        self._check_open()
        number = self.schema.field_id(name)
        section = self._sections[Kind.SHAPES, number, 0]
        self.units.check_blocks(Kind.SHAPES, number, rows * section.stride, section.stride)
        line = np.dtype([("dims", "<u8", (field.n_varying,))])
        place = section.count, section.offset
        found = take(self._bytes, line, *place, rows, section=section.name, field=name)
        dims: npt.NDArray[np.uint64] = found["dims"]
        return dims

    def values(self, name: str, rows: Rows) -> Iterator[Any]:
        """The value of a record field for each row, in order; raw arrays are views of any map.

        None where a sample has none.

        Raises:
            ShardCorrupt: bytes that changed, or a record that is not what its field promises.
        """
        field = self.schema[name]
        entries = self.entries(name, rows)
        dims = self.shapes(name, rows)
        payload = self.payload_offset
        absent = self.absent(name, rows, entries)
        for i, record in enumerate(self.records(name, rows, entries)):
            n_bytes, offset = int(entries["n_bytes"][i]), payload + int(entries["offset"][i])
            if i in absent:
                yield None
                continue
            try:
                shape = full_shape(field, dims[i], n_bytes) if isinstance(field, Array) else ()
                value = decode_record(field, record, shape)
            except ShardCorrupt as error:
                raise self.placed(error, name, int(rows[i]), offset) from error
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
                broken = ShardCorrupt(f"a record cannot be decoded: {error}", code="value")
                raise self.placed(broken, name, int(rows[i]), offset) from error
            for array in value if isinstance(value, list) else [value]:
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False
            yield value

    def absent(self, name: str, rows: Rows, entries: Entries) -> frozenset[int]:
        """The places in `rows` of samples that lack a record field; `entries` are theirs.

        Raises:
            ShardCorrupt: such a sample has a record all the same; or a fixed array has no bytes.
        """
        field = self.schema[name]
        if not field.optional:
            return frozenset()
        is_absent = ~self.present(name, rows)
        wrong = is_absent & (entries["n_bytes"] != 0)
        if isinstance(field, Array) and field.is_fixed:
            wrong |= ~is_absent & (entries["n_bytes"] == 0)
        for i in np.flatnonzero(wrong)[:1].tolist():
            what = "a record is there although the sample lacks the field, or the other way round"
            error = ShardCorrupt(what, code="validity", found=int(entries["n_bytes"][i]))
            offset = self.payload_offset + int(entries["offset"][i])
            raise self.placed(error, name, int(rows[i]), offset)
        return frozenset(np.flatnonzero(is_absent).tolist())

    def placed(self, error: ShardCorrupt, field: str, row: int | None, offset: int) -> ShardCorrupt:
        """The same error, with its place."""
        return ShardCorrupt(
            error.what,
            code=error.code,
            path=self.path,
            field=field,
            sample=row,
            offset=offset,
            expected=error.expected,
            found=error.found,
        )

    def close(self) -> None:
        """Let go of the map; it is unmapped when the last view of it is gone. Idempotent."""
        self._is_open = False
        self._bytes = memoryview(bytes(PAGE))
        self.units.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()
