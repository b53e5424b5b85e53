"""Read the streams of a shard's Video and Audio fields: tables, and data verified in parts.

`section_writers` writes the streams. A *line* is a row of the STREAMS section, one per sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from shardio.errors import InvalidArgument, ShardChanged, ShardCorrupt
from shardio.format.checksum import BLOCK_BYTES, CHUNK_BYTES, n_chunks
from shardio.format.layout import NO_FIELD, Kind, Section
from shardio.format.sections import Entries
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
    pack_line,
    packets_error,
)
from shardio.format.types.text import read_json
from shardio.shard.verification import Rows, VerifiedUnits
from shardio.storage.content import Content


class StreamRecords:
    """The streams of one open shard, whose content and verification state `units` owns.

    For changed or invalid tables and parameters, methods raise ChecksumMismatch or ShardCorrupt,
    which name field and sample.
    """

    def __init__(self, units: VerifiedUnits) -> None:
        self.units = units

    def _section(self, kind: Kind, name: str) -> Section:
        return self.units.sections[kind, self.units.schema.field_id(name), 0]

    def lines(self, name: str, rows: Rows, entries: Entries) -> Streams:
        """Return the verified STREAMS lines of a field for `rows`, given their index entries."""
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
        """Yield the stream of each row, in order; an empty placeholder for a missing value.

        Packets are read only when `data` is sliced.
        """
        lines = self.lines(name, rows, entries)
        payload = self.units.sections[Kind.PAYLOAD, NO_FIELD, 0].offset
        for row, line, entry in zip(rows.tolist(), lines, entries, strict=True):
            n_bytes, offset = int(entry["n_bytes"]), payload + int(entry["offset"])
            if n_bytes:
                data = StreamData(self.units, name, row, offset, n_bytes, int(line["first_chunk"]))
                yield self._stream(name, row, line, data)
            else:
                yield EncodedStream({}, b"", np.zeros(0, PACKET_DTYPE), b"", Fraction(1), 0, 0, 0)

    def tables(self, name: str, rows: Rows, entries: Entries) -> Iterator[StreamTables]:
        """Yield the tables of each row's stream, with first packet and first chunk set to 0."""
        for row, line, entry in zip(
            rows.tolist(), self.lines(name, rows, entries), entries, strict=True
        ):
            head = int(line["parameter_bytes"]) + int(line["extradata_bytes"])
            packets = self._packets(name, row, line, int(entry["n_bytes"]) - head)
            yield StreamTables(pack_line(line.tobytes(), 0, 0), packets.tobytes())

    def _stream(self, name: str, row: int, line: np.void, whole: StreamData) -> EncodedStream:
        n_parameters, n_extradata = int(line["parameter_bytes"]), int(line["extradata_bytes"])
        head = whole[: n_parameters + n_extradata]
        packets = self._packets(name, row, line, len(whole) - len(head))
        try:
            parameters = check_parameters(read_json(str(head[:n_parameters], "utf-8")))
        except (ShardCorrupt, ValueError, RecursionError) as error:
            what, found = f"the parameters of a stream are not valid JSON: {error}", None
            if isinstance(error, ShardCorrupt):
                what, found = error.what, error.found
            place: Any = {"field": name, "sample": row, "offset": whole.offset}
            raise self.units.corrupt(what, code="parameters", **place, found=found) from error
        extradata, data = bytes(head[n_parameters:]), replace(whole, skipped=len(head))
        time_base = Fraction(int(line["numerator"]), int(line["denominator"]))
        numbers = (int(line[key]) for key in ("n_frames", "width", "height", "duration"))
        return EncodedStream(parameters, extradata, packets, data, time_base, *numbers)

    def _packets(self, name: str, row: int, line: np.void, n_bytes: int) -> Packets:
        """Return a stream's packets, which must cover n_bytes without gaps and match n_frames."""
        section = self._section(Kind.PACKETS, name)
        first, count = int(line["first_packet"]), int(line["n_packets"])
        start, end = first * PACKET.size, (first + count) * PACKET.size
        blocks = np.arange(start // BLOCK_BYTES, -(-end // BLOCK_BYTES) if count else 0)
        self.units.check_blocks(Kind.PACKETS, section.field, blocks * BLOCK_BYTES, 1)
        place = section.offset + start
        stored = self.units.read(section, place, place + end - start)
        packets = np.frombuffer(stored, PACKET_DTYPE, count)
        there: Any = {"section": section.name, "field": name, "sample": row, "offset": place}
        if (wrong := packets_error(packets, n_bytes)) is not None:
            raise self.units.corrupt(wrong, code="packet", **there)
        expected = int(line["n_frames"])
        if self.units.schema[name].has_frames and (found := n_shown(packets)) != expected:
            what = "the number of frames of a video differs from the number of shown packets"
            raise self.units.corrupt(what, code="frames", **there, expected=expected, found=found)
        return packets


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StreamData:
    """The bytes of one record, verified chunk by chunk when they are sliced.

    Slicing requires that the reader is open. A slice (without a step) is a view of the map, or
    bytes read from the file; it stays valid after the reader is closed.

    Args:
        units: the verification state of the shard.
        name, row: the field and the row of the record.
        offset, n_bytes: the offset and size of the record in the file.
        first_chunk: the index of the record's first chunk among the chunks of the field.
        skipped: the number of bytes at the start of the record that are not part of the data.
    """

    units: VerifiedUnits
    name: str
    row: int
    offset: int
    n_bytes: int
    first_chunk: int
    skipped: int = 0

    def __len__(self) -> int:
        return self.n_bytes - self.skipped

    def __getitem__(self, part: slice) -> memoryview:
        """Return the bytes from `part.start` to `part.stop`, verified and read-only.

        Raises:
            ChecksumMismatch: names field, sample and offset of the changed chunk.
            ClosedError: the reader is closed.
            InvalidArgument: the slice has a step.
        """
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise InvalidArgument(f"the data of a stream is cut without a step; found {step}")
        content = self.units.content
        if stop <= start:
            return memoryview(b"")
        try:
            return self._checked(content, self.skipped + start, self.skipped + stop)
        except ShardChanged as error:
            error.at(field=self.name, sample=self.row)
            raise

    def _checked(self, content: Content, start: int, stop: int) -> memoryview:
        """Return verified bytes of the record.

        Unmapped bytes are read only once, so that the returned bytes are the verified ones.
        """
        units, base = self.units, self.offset
        first, last = start // CHUNK_BYTES, n_chunks(stop)
        fresh = units.fresh_chunks(self.name, self.first_chunk + first, last - first)
        if not len(fresh):
            return content[base + start : base + stop]
        begin, end = first * CHUNK_BYTES, min(last * CHUNK_BYTES, self.n_bytes)
        read = content[base + begin : base + end]
        hashes = units.items(Kind.CHUNK_HASHES, self.name, "<u8", fresh).tolist()
        for chunk, expected in zip(fresh.tolist(), hashes, strict=True):
            at = (chunk - self.first_chunk) * CHUNK_BYTES
            stored = read[at - begin : at - begin + CHUNK_BYTES]
            units.check_chunk(self.name, self.row, chunk, base + at, stored, expected)
        return read[start - begin : stop - begin]

    def __bytes__(self) -> bytes:
        return bytes(self[:])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as plain bytes."""
        return bytes, (bytes(self),)
