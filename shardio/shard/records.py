"""Read and verify records: the values that are not stored in columns.

The index has an entry for each record of the payload, with its offset, codec, sizes and hash. A
video or audio is a *stream* of packets, which are described by tables in separate sections. Streams
are verified chunk by chunk, so that a part of a stream can be read without the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.statistics import DECODE, PHASE_TIMES, TIMED_EVERY, now_ns
from shardio.errors import InvalidArgument, ShardChanged, ShardCorrupt
from shardio.format.checksum import BLOCK_BYTES, CHUNK_BYTES, n_chunks
from shardio.format.codecs import SPECS, Dictionary, cached_dictionary, decode
from shardio.format.layout import NO_FIELD, Kind, Section
from shardio.format.sections import ENTRY, ENTRY_DTYPE, Entries, codecs, first_invalid, stored_bytes
from shardio.format.types.streams import (
    PACKET,
    PACKET_DTYPE,
    STREAM,
    STREAM_DTYPE,
    EncodedStream,
    Packets,
    Streams,
    StreamTables,
    check_parameters,
    invalid_streams,
    n_shown,
    packets_error,
    with_first_indices,
)
from shardio.format.types.text import read_json
from shardio.media.values import StoredVideo, value_decoder
from shardio.shard.verification import HASH_DTYPE, Rows, VerifiedUnits
from shardio.storage.content import Content

Present = npt.NDArray[np.bool_]
_BITS_DTYPE: Final = np.dtype(np.uint8)


class Records:
    """The records of one open shard.

    The methods raise ChecksumMismatch or ShardCorrupt for changed or invalid data. These errors
    name the field, the offset and, if only one sample is affected, the sample.
    """

    def __init__(self, units: VerifiedUnits) -> None:
        self.units, self._schema = units, units.schema
        self._ids = {name: k for k, name in enumerate(units.schema.records)}
        self._dictionaries: dict[str, Dictionary | None] = {}

    def _section(self, kind: Kind, name: str) -> Section:
        return self.units.sections[kind, self._schema.field_id(name), 0]

    @property
    def offset(self) -> int:
        """The offset of the payload in the file."""
        return self.units.sections[Kind.PAYLOAD, NO_FIELD, 0].offset

    def present(self, name: str, rows: Rows) -> Present:
        """Return a bool for each of `rows`, from verified bits: True if the sample has a value."""
        if not self._schema[name].optional:
            return np.ones(len(rows), np.bool_)
        stored = self.units.items(Kind.VALIDITY, name, _BITS_DTYPE, rows >> 3)
        found: Present = (stored >> (rows & 7).astype(np.uint8) & 1).astype(np.bool_)
        return found

    def entries(self, name: str, rows: Rows) -> Entries:
        """Return the verified and valid index entries of a field's records, one for each row."""
        numbers = rows * len(self._ids) + self._ids[name]
        found: Entries = self.units.items(Kind.INDEX, name, ENTRY_DTYPE, numbers)
        payload = self.units.sections[Kind.PAYLOAD, NO_FIELD, 0]
        broken = first_invalid(found, self._schema[name], payload.size)
        if broken is not None:
            section = self.units.sections[Kind.INDEX, NO_FIELD, 0]
            raise self.units.corrupt(
                "an index entry is invalid (codec, offset, sizes or alignment)",
                code="index_entry",
                field=name,
                sample=int(rows[broken]),
                offset=section.offset + int(numbers[broken]) * ENTRY.size,
                found=tuple(found[broken].tolist()),
            )
        return found

    def read(self, name: str, rows: Rows, entries: Entries) -> Iterator[bytes | memoryview]:
        """Yield the record of each row, verified and decompressed.

        `entries` are the index entries for `rows`. Uncompressed records of a mapped file are views.
        """
        payload = self.offset
        content = self.units.content  # keep the content, even if the reader is closed meanwhile
        dictionary = self._dictionary(name)
        k = self._ids[name]
        is_checked = self.units.are_records_checked(k, rows)
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
                self.units.check_record(name, k, row, offset, stored, expected)
            try:
                if row % TIMED_EVERY:
                    record = decode(stored, codec, n_bytes, dictionary)
                else:
                    start_ns = now_ns()
                    record = decode(stored, codec, n_bytes, dictionary)
                    PHASE_TIMES.sums_ns[DECODE] += TIMED_EVERY * (now_ns() - start_ns)
            except ShardCorrupt as error:
                self.add_location(error, name, row, offset)
                raise
            yield record

    def _dictionary(self, name: str) -> Dictionary | None:
        """Return a field's dictionary, read on first use; None if there is none or it is empty."""
        if not SPECS[self._schema[name].codec].has_dictionary:
            return None
        if name not in self._dictionaries:
            section = self._section(Kind.DICTIONARY, name)
            content = self.units.read_section(section)
            try:
                self._dictionaries[name] = cached_dictionary(content) if content else None
            except ShardCorrupt as error:
                self.add_location(error, name, None, section.offset)
                raise
        return self._dictionaries[name]

    def shapes(self, name: str, rows: Rows) -> npt.NDArray[np.uint64]:
        """Return the verified stored dimensions of the values in `rows`: an array (len(rows), n).

        n is the number of varying dimensions of an array, 3 for images, and 0 for other fields.
        """
        n_dims = len(self._schema[name].stored_dims)
        if not n_dims:
            return np.empty((len(rows), 0), np.uint64)
        row_dtype = np.dtype([("dims", "<u8", (n_dims,))])
        dims: npt.NDArray[np.uint64] = self.units.items(Kind.SHAPES, name, row_dtype, rows)["dims"]
        return dims

    def values(self, name: str, rows: Rows) -> Iterator[Any]:
        """Yield the value for each row of a field stored as records; None if it is missing.

        Uncompressed arrays are views of a mapped file. An image is a StoredImage, a video is a
        StoredVideo, and audio is an EncodedStream. The packets of a stream are read and verified
        only when its `data` is sliced.
        """
        field = self._schema[name]
        entries = self.entries(name, rows)
        absent = self.absent(name, rows, entries)
        if field.is_streamed:
            for i, stream in enumerate(self.streams(name, rows, entries)):
                yield None if i in absent else stream
            return
        dims = self.shapes(name, rows)
        payload, decode_value = self.offset, value_decoder(field)
        for i, record in enumerate(self.read(name, rows, entries)):
            n_bytes, offset = int(entries["n_bytes"][i]), payload + int(entries["offset"][i])
            if i in absent:
                yield None
                continue
            try:
                value = decode_value(record, field.shape_of(dims[i], n_bytes))
            except ShardCorrupt as error:
                self.add_location(error, name, int(rows[i]), offset)
                raise
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
                broken = ShardCorrupt(f"a record cannot be decoded: {error}", code="value")
                raise self.add_location(broken, name, int(rows[i]), offset) from error
            for array in value if isinstance(value, list) else [value]:
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False
            yield value

    def absent(self, name: str, rows: Rows, entries: Entries) -> frozenset[int]:
        """Return the positions in `rows` of missing values.

        Raises ShardCorrupt if a missing value has bytes, or a present value lacks required bytes.
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
            raise self.add_location(error, name, int(rows[i]), offset)
        return frozenset(np.flatnonzero(is_absent).tolist())

    def add_location(
        self, error: ShardCorrupt, field: str, row: int | None, offset: int
    ) -> ShardCorrupt:
        """Add path, field, sample and offset to `error`, and return it."""
        return error.at(path=self.units.path, field=field, sample=row, offset=offset)

    def stream_table(self, name: str, rows: Rows, entries: Entries) -> Streams:
        """Return the verified rows of the stream table for `rows`, whose entries are `entries`."""
        found: Streams = self.units.items(Kind.STREAMS, name, STREAM_DTYPE, rows)
        n_packets = self._section(Kind.PACKETS, name).count
        n_hashes = self._section(Kind.CHUNK_HASHES, name).count
        bad = invalid_streams(found, entries["n_bytes"], n_packets, n_hashes)
        if bad.any():
            i, section = int(np.argmax(bad)), self._section(Kind.STREAMS, name)
            raise self.units.corrupt(
                "the table row of a stream is invalid (packets, chunks, sizes or time base)",
                code="stream",
                section=section.name,
                field=name,
                sample=int(rows[i]),
                offset=section.offset + int(rows[i]) * STREAM.size,
                found=tuple(found[i].tolist()),
            )
        return found

    def streams(self, name: str, rows: Rows, entries: Entries) -> Iterator[EncodedStream]:
        """Yield the stream of each row; an empty stream if the value is missing.

        Packets are read only when the `data` of a stream is sliced.
        """
        table = self.stream_table(name, rows, entries)
        for row, stream, entry in zip(rows.tolist(), table, entries, strict=True):
            n_bytes, offset = int(entry["n_bytes"]), self.offset + int(entry["offset"])
            if n_bytes:
                first = int(stream["first_chunk"])
                data = StreamData(self.units, name, row, offset, n_bytes, first)
                yield self._stream(name, row, stream, data)
            else:
                yield EncodedStream({}, b"", np.zeros(0, PACKET_DTYPE), b"", Fraction(1), 0, 0, 0)

    def tables(self, name: str, rows: Rows, entries: Entries) -> Iterator[StreamTables]:
        """Yield the tables of each row's stream; equal streams have equal tables in all shards.

        To achieve this, the indices of the first packet and the first chunk are set to 0.
        """
        table = self.stream_table(name, rows, entries)
        for row, stream, entry in zip(rows.tolist(), table, entries, strict=True):
            head = int(stream["parameter_bytes"]) + int(stream["extradata_bytes"])
            packets = self._packets(name, row, stream, int(entry["n_bytes"]) - head)
            yield StreamTables(with_first_indices(stream.tobytes(), 0, 0), packets.tobytes())

    def _stream(self, name: str, row: int, stream: np.void, record: StreamData) -> EncodedStream:
        n_parameters, n_extradata = int(stream["parameter_bytes"]), int(stream["extradata_bytes"])
        head = record[: n_parameters + n_extradata]
        packets = self._packets(name, row, stream, len(record) - len(head))
        try:
            parameters = check_parameters(read_json(str(head[:n_parameters], "utf-8")))
        except (ShardCorrupt, ValueError, RecursionError) as error:
            what, found = f"the parameters of a stream are not valid JSON: {error}", None
            if isinstance(error, ShardCorrupt):
                what, found = error.what, error.found
            where: Any = {"field": name, "sample": row, "offset": record.offset}
            raise self.units.corrupt(what, code="parameters", **where, found=found) from error
        extradata, data = bytes(head[n_parameters:]), replace(record, n_head_bytes=len(head))
        time_base = Fraction(int(stream["numerator"]), int(stream["denominator"]))
        numbers = (int(stream[key]) for key in ("n_frames", "width", "height", "duration"))
        kind = StoredVideo if self._schema[name].has_frames else EncodedStream
        return kind(parameters, extradata, packets, data, time_base, *numbers)

    def _packets(self, name: str, row: int, stream: np.void, n_bytes: int) -> Packets:
        """Return the verified packet table of a stream whose packets have `n_bytes` in total."""
        section = self._section(Kind.PACKETS, name)
        first, count = int(stream["first_packet"]), int(stream["n_packets"])
        start, end = first * PACKET.size, (first + count) * PACKET.size
        blocks = np.arange(start // BLOCK_BYTES, -(-end // BLOCK_BYTES) if count else 0)
        self.units.check_blocks(Kind.PACKETS, section.field, blocks * BLOCK_BYTES, 1)
        offset = section.offset + start
        stored = self.units.read(section, offset, offset + end - start)
        packets = np.frombuffer(stored, PACKET_DTYPE, count)
        where: Any = {"section": section.name, "field": name, "sample": row, "offset": offset}
        if (wrong := packets_error(packets, n_bytes)) is not None:
            raise self.units.corrupt(wrong, code="packet", **where)
        expected = int(stream["n_frames"])
        if self._schema[name].has_frames and (found := n_shown(packets)) != expected:
            what = "the number of frames of a video differs from the number of shown packets"
            raise self.units.corrupt(what, code="frames", **where, expected=expected, found=found)
        return packets


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StreamData:
    """The packets of one stream: bytes that are read and verified, chunk by chunk, when sliced.

    Slicing needs an open reader; slices stay valid after the reader is closed.

    Args:
        units: the verification state of the shard.
        name, row: the field and the row of the record.
        offset, n_bytes: the offset and size of the record in the file.
        first_chunk: the index of the record's first chunk among all chunks of the field.
        n_head_bytes: the size of the parameters and the extradata, which precede the packets.
    """

    units: VerifiedUnits
    name: str
    row: int
    offset: int
    n_bytes: int
    first_chunk: int
    n_head_bytes: int = 0

    def __len__(self) -> int:
        return self.n_bytes - self.n_head_bytes

    def __getitem__(self, part: slice) -> memoryview:
        """Return the bytes from `part.start` to `part.stop`, verified and read-only."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise InvalidArgument(f"a slice of a stream's data cannot have a step; found {step}")
        content = self.units.content
        if stop <= start:
            return memoryview(b"")
        try:
            return self._read_verified(content, self.n_head_bytes + start, self.n_head_bytes + stop)
        except ShardChanged as error:
            error.at(field=self.name, sample=self.row)
            raise

    def _read_verified(self, content: Content, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop` of the record, verified.

        Without a map, bytes are read only once, so that the verified and the returned bytes are the
        same.
        """
        units, base = self.units, self.offset
        first, last = start // CHUNK_BYTES, n_chunks(stop)
        unverified = units.unverified_chunks(self.name, self.first_chunk + first, last - first)
        if not len(unverified):
            return content[base + start : base + stop]
        begin, end = first * CHUNK_BYTES, min(last * CHUNK_BYTES, self.n_bytes)
        read = content[base + begin : base + end]
        hashes = units.items(Kind.CHUNK_HASHES, self.name, HASH_DTYPE, unverified).tolist()
        for chunk, expected in zip(unverified.tolist(), hashes, strict=True):
            at = (chunk - self.first_chunk) * CHUNK_BYTES
            stored = read[at - begin : at - begin + CHUNK_BYTES]
            units.check_chunk(self.name, self.row, chunk, base + at, stored, expected)
        return read[start - begin : stop - begin]

    def __bytes__(self) -> bytes:
        return bytes(self[:])

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (bytes(self),)
