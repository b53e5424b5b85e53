"""Read and verify records: the values of a shard that are not in columns; the index locates them.

`reader` and the engine read through this module; `section_writers` writes the records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio._base.statistics import DECODE, PHASE_TIMES, TIMED_EVERY, now_ns
from shardio.errors import ShardChanged, ShardCorrupt
from shardio.format.codecs import SPECS, Dictionary, cached_dictionary, decode
from shardio.format.layout import NO_FIELD, Kind
from shardio.format.sections import ENTRY, ENTRY_DTYPE, Entries, codecs, first_invalid, stored_bytes
from shardio.shard.streams import StreamRecords
from shardio.shard.verification import Rows, VerifiedUnits

Present = npt.NDArray[np.bool_]


class Records:
    """The records of one open shard, whose content and verification state `units` owns.

    For changed or invalid data, methods raise ChecksumMismatch or ShardCorrupt, which name field,
    sample and offset.
    """

    def __init__(self, units: VerifiedUnits) -> None:
        self._units, self._schema = units, units.schema
        self._ids = {name: k for k, name in enumerate(units.schema.records)}
        self._dictionaries: dict[str, Dictionary | None] = {}
        self.streams = StreamRecords(units)
        """The records of video and audio fields."""

    @property
    def offset(self) -> int:
        """The offset of the payload in the file."""
        return self._units.sections[Kind.PAYLOAD, NO_FIELD, 0].offset

    def present(self, name: str, rows: Rows) -> Present:
        """Return a bool for each of `rows`: True if the row has a value of the field, verified."""
        if not self._schema[name].optional:
            return np.ones(len(rows), np.bool_)
        stored = self._units.items(Kind.VALIDITY, name, np.uint8, rows >> 3)
        found: Present = (stored >> (rows & 7).astype(np.uint8) & 1).astype(np.bool_)
        return found

    def entries(self, name: str, rows: Rows) -> Entries:
        """Return the index entries of a record field for `rows`, verified.

        Bounds, sizes, codecs and alignment of the entries are checked too.
        """
        numbers = rows * len(self._ids) + self._ids[name]
        found: Entries = self._units.items(Kind.INDEX, name, ENTRY_DTYPE, numbers)
        payload = self._units.sections[Kind.PAYLOAD, NO_FIELD, 0]
        broken = first_invalid(found, self._schema[name], payload.size)
        if broken is not None:
            section = self._units.sections[Kind.INDEX, NO_FIELD, 0]
            raise self._units.corrupt(
                "an index entry is invalid (codec, offset, sizes or alignment)",
                code="index_entry",
                field=name,
                sample=int(rows[broken]),
                offset=section.offset + int(numbers[broken]) * ENTRY.size,
                found=tuple(found[broken].tolist()),
            )
        return found

    def read(self, name: str, rows: Rows, entries: Entries) -> Iterator[bytes | memoryview]:
        """Yield the verified, decoded record of each row, in order.

        Raw records are views of the map, if the file is mapped.
        """
        payload = self.offset
        content = self._units.content  # kept, so that this iterator continues after `release`
        dictionary = self._dictionary(name)
        k = self._ids[name]
        is_checked = self._units.are_records_checked(k, rows)
        if is_checked and isinstance(content, memoryview) and self._schema[name].codec == "raw":
            starts, sizes = (entries["offset"] + np.uint64(payload)).tolist(), entries["n_bytes"]
            for start, size in zip(starts, sizes.tolist(), strict=True):
                yield content[start : start + size]
            return
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
                error.at(field=name, sample=row)
                raise
            if not is_checked:
                self._units.check_record(name, k, row, offset, stored, expected)
            try:
                if row % TIMED_EVERY:
                    record = decode(stored, codec, n_bytes, dictionary)
                else:
                    start_ns = now_ns()
                    record = decode(stored, codec, n_bytes, dictionary)
                    PHASE_TIMES.sums_ns[DECODE] += TIMED_EVERY * (now_ns() - start_ns)
            except ShardCorrupt as error:
                raise self.placed(error, name, row, offset) from error
            yield record

    def _dictionary(self, name: str) -> Dictionary | None:
        """Return the dictionary of a field, read on first use; None if the field has none."""
        if not SPECS[self._schema[name].codec].has_dictionary:
            return None
        if name not in self._dictionaries:
            section = self._units.sections[Kind.DICTIONARY, self._schema.field_id(name), 0]
            content = self._units.read_whole(section)
            try:
                self._dictionaries[name] = cached_dictionary(content) if content else None
            except ShardCorrupt as error:
                raise self.placed(error, name, None, section.offset) from error
        return self._dictionaries[name]

    def shapes(self, name: str, rows: Rows) -> npt.NDArray[np.uint64]:
        """Return the verified stored dimensions for `rows`, as an array of shape (len(rows), n).

        An array stores its varying dimensions, an image all three, other fields none: n is 0.
        """
        n_dims = len(self._schema[name].stored_dims)
        if not n_dims:
            return np.empty((len(rows), 0), np.uint64)
        line = np.dtype([("dims", "<u8", (n_dims,))])
        dims: npt.NDArray[np.uint64] = self._units.items(Kind.SHAPES, name, line, rows)["dims"]
        return dims

    def values(self, name: str, rows: Rows) -> Iterator[Any]:
        """Yield the value of a record field for each row, in order; None for a missing value.

        Raw arrays are views of the map, if the file is mapped. The packets of a stream are read and
        verified when its `data` is sliced.
        """
        field = self._schema[name]
        entries = self.entries(name, rows)
        absent = self.absent(name, rows, entries)
        if field.is_streamed:
            for i, stream in enumerate(self.streams.streams(name, rows, entries)):
                yield None if i in absent else stream
            return
        dims = self.shapes(name, rows)
        payload = self.offset
        for i, record in enumerate(self.read(name, rows, entries)):
            n_bytes, offset = int(entries["n_bytes"][i]), payload + int(entries["offset"][i])
            if i in absent:
                yield None
                continue
            try:
                value = field.decode(record, field.shape_of(dims[i], n_bytes))
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
        """Return the positions in `rows` of the samples without a value, given their entries.

        A sample without a value must have no record; a present fixed array, image or stream has
        bytes.
        """
        field = self._schema[name]
        if not field.optional:
            return frozenset()
        is_absent = ~self.present(name, rows)
        wrong = is_absent & (entries["n_bytes"] != 0)
        if field.is_never_empty:
            wrong |= ~is_absent & (entries["n_bytes"] == 0)
        for i in np.flatnonzero(wrong)[:1].tolist():
            what = "a sample lacks the field but has a record, or has the field but no record"
            error = ShardCorrupt(what, code="validity", found=int(entries["n_bytes"][i]))
            offset = self.offset + int(entries["offset"][i])
            raise self.placed(error, name, int(rows[i]), offset)
        return frozenset(np.flatnonzero(is_absent).tolist())

    def placed(self, error: ShardCorrupt, field: str, row: int | None, offset: int) -> ShardCorrupt:
        """Return the error with path, field, sample and offset added."""
        return ShardCorrupt(
            error.what,
            code=error.code,
            path=self._units.path,
            field=field,
            sample=row,
            offset=offset,
            expected=error.expected,
            found=error.found,
        )
