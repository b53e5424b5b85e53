"""Verify the values of optional fields, of text fields, and of streams (video, audio).

A field of streams has three tables. The stream table has a row for each sample. The other tables
list the packets of all streams, and the hashes of the 64 KiB chunks of all streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.checksum import CHUNK_BYTES, hash_bytes, n_chunks
from shardio.format.layout import NO_FIELD, Kind, Required, Section
from shardio.format.schema import Schema
from shardio.format.sections import ENTRY, Entries, Sections
from shardio.format.types import Field
from shardio.format.types.streams import (
    PACKET,
    PACKET_DTYPE,
    STREAM,
    STREAM_DTYPE,
    Packets,
    check_parameters,
    invalid_streams,
    n_shown,
    packets_error,
    planes_error,
    required_by_codec,
)
from shardio.format.types.text import canonical_json, check_json, read_json
from shardio.maintenance.verify import Findings
from shardio.maintenance.verify.window import (
    U64,
    WINDOW_BYTES,
    ShardWindows,
    find_mismatches,
    pack_digests,
)


def are_utf8(parts: Iterable[Any]) -> bool:
    """Return True if all buffers in `parts` are UTF-8. The loop over the buffers runs in C."""
    try:
        deque(map(str, parts, repeat("utf-8")), maxlen=0)
    except UnicodeDecodeError:
        return False
    return True


def check_absent(dims: npt.NDArray[np.uint64] | None, n_bytes: int) -> None:
    """Raise ShardCorrupt if a missing value has stored dimensions, or a record of `n_bytes`."""
    if n_bytes or (dims is not None and dims.any()):
        what = "the sample lacks a value for the field, but has a record or a shape"
        raise ShardCorrupt(what, code="validity", expected=0, found=n_bytes)


_UNKNOWN: Final = -1


class StreamVerifier:
    """A check of all streams of the field `name`, row by row.

    `present` is a mask of the samples that have a value; None if all samples must have one.
    """

    def __init__(
        self,
        content: ShardWindows,
        schema: Schema,
        sections: Sections,
        name: str,
        present: npt.NDArray[np.bool_] | None,
        findings: Findings,
    ) -> None:
        number = schema.field_id(name)
        self._content, self._name, self._present, self._findings = content, name, present, findings
        self._field: Field = schema[name]
        self._payload = sections[Kind.PAYLOAD, NO_FIELD, 0]
        self._index = sections[Kind.INDEX, NO_FIELD, 0]
        self._n_fields, self._field_index = len(schema.records), list(schema.records).index(name)
        self._streams = sections[Kind.STREAMS, number, 0]
        self._packets = sections[Kind.PACKETS, number, 0]
        self._hashes = sections[Kind.CHUNK_HASHES, number, 0]
        self.features = Required(0)
        """The features that a reader must support for the codecs of the streams checked so far."""
        self._expected_next = {"first_packet": 0, "first_chunk": 0}
        """The values that the next row of the stream table must have.

        After an invalid row, they are _UNKNOWN, and the next row may have any values.
        """

    def check(self, first_row: int, entries: Entries, bad: npt.NDArray[np.bool_]) -> None:
        """Check the streams of consecutive rows; skip rows whose index entry is `bad`."""
        streams = self._content.items(self._streams, STREAM_DTYPE, first_row, len(entries)).copy()
        sizes = entries["n_bytes"]
        wrong = invalid_streams(streams, sizes, self._packets.count, self._hashes.count)
        for i, stream in enumerate(streams):
            row = first_row + i
            if bad[i]:
                self._expected_next = dict.fromkeys(self._expected_next, _UNKNOWN)
                continue
            n_bytes, offset = int(sizes[i]), self._payload.offset + int(entries["offset"][i])
            with self._findings.catching(**self._location(self._payload, row, offset)):
                self._check_validity(row, n_bytes)
            if wrong[i]:
                self._add_finding("stream", _INVALID_ROW, row, found=str(tuple(stream.tolist())))
                self._expected_next = dict.fromkeys(self._expected_next, _UNKNOWN)
                continue
            self._check_first_indices(row, stream, n_bytes)
            if n_bytes:
                self._check_stream(row, stream, offset, n_bytes, int(entries["hash"][i]))

    def close(self) -> None:
        """Check that no packet and no chunk hash is left after the last stream."""
        for key, section in (("first_packet", self._packets), ("first_chunk", self._hashes)):
            if self._expected_next[key] not in (_UNKNOWN, section.count):
                self._findings.add(
                    "counting",
                    "a table has items that belong to no stream",
                    section=section.name,
                    field=self._name,
                    offset=section.offset + self._expected_next[key] * section.stride,
                    expected=self._expected_next[key],
                    found=section.count,
                )

    def _check_validity(self, row: int, n_bytes: int) -> None:
        if self._present is not None and not self._present[row]:
            check_absent(None, n_bytes)
        elif not n_bytes:
            raise ShardCorrupt("a stream that is present has no bytes", code="validity", found=0)

    def _check_first_indices(self, row: int, stream: np.void, n_bytes: int) -> None:
        counts = {"first_packet": int(stream["n_packets"]), "first_chunk": n_chunks(n_bytes)}
        for key, count in counts.items():
            expected, found = self._expected_next[key], int(stream[key])
            if expected not in (_UNKNOWN, found):
                what = f"{key.replace('_', ' ')} of a stream does not follow the stream before"
                self._add_finding("counting", what, row, expected=expected, found=found)
            self._expected_next[key] = found + count

    def _location(self, section: Section, row: int, offset: int) -> dict[str, Any]:
        return {"section": section.name, "field": self._name, "sample": row, "offset": offset}

    def _add_finding(self, code: str, what: str, row: int, **numbers: Any) -> None:
        place = self._location(self._streams, row, self._streams.offset + row * STREAM.size)
        self._findings.add(code, what, **place, **numbers)

    def _check_stream(
        self, row: int, stream: np.void, offset: int, n_bytes: int, expected: int
    ) -> None:
        """Check a stream, given its valid row and the hash in its index entry."""
        n_before = self._findings.n_found
        self._check_hashes(row, int(stream["first_chunk"]), offset, n_bytes, expected)
        n_parameters = int(stream["parameter_bytes"])
        n_data = n_bytes - n_parameters - int(stream["extradata_bytes"])
        self._check_packets(row, stream, n_data)
        if self._findings.n_found != n_before:
            return  # the stream is damaged: do not interpret its bytes
        content = bytes(self._content.bytes[offset : offset + n_parameters])
        if (wrong := _parameters_error(content)) is not None:
            self._findings.add("parameters", wrong, **self._location(self._payload, row, offset))
            return
        features = required_by_codec(read_json(content.decode()))
        self.features |= features
        if features & Required.PLANES and self._field.has_frames:
            end = offset + n_bytes
            self._check_planes(row, stream, self._content.bytes[end - n_data : end])

    def _check_planes(self, row: int, stream: np.void, data: memoryview) -> None:
        """Check that each packet of a stream of planes is a picture or a difference."""
        width, height = int(stream["width"]), int(stream["height"])
        if wrong := planes_error(self._packets_of(stream), width, height, data):
            what, expected, found = wrong
            place = self._packets.offset + int(stream["first_packet"]) * PACKET.size
            where = self._location(self._packets, row, place)
            self._findings.add("planes", what, expected=expected, found=found, **where)

    def _check_hashes(
        self, row: int, first_chunk: int, offset: int, n_bytes: int, expected: int
    ) -> None:
        hashes = self._content.items(self._hashes, U64, first_chunk, n_chunks(n_bytes))
        if (found := hash_bytes(hashes.data)) != expected:
            place = self._index.offset + (row * self._n_fields + self._field_index) * ENTRY.size
            what = "the hash of a stream does not match its chunk hashes"
            where = self._location(self._index, row, place)
            self._findings.add_mismatch(found, expected, "chunks", what, **where)
        for at in range(0, n_bytes, WINDOW_BYTES):
            window = self._content.window(offset + at, offset + min(at + WINDOW_BYTES, n_bytes))
            starts = range(0, window.nbytes, CHUNK_BYTES)
            chunks = [window[start : start + CHUNK_BYTES] for start in starts]
            first = at // CHUNK_BYTES
            digests = pack_digests(hashes[first : first + len(chunks)])
            for i, wanted, actual in find_mismatches(chunks, digests):
                where = self._location(self._payload, row, offset + at + starts[i])
                self._findings.add_mismatch(wanted, actual, **where)

    def _check_packets(self, row: int, stream: np.void, n_bytes: int) -> None:
        packets = self._packets_of(stream)
        code, wrong, numbers = "packet", packets_error(packets, n_bytes), {}
        if wrong is None and self._field.has_frames:
            shown, n_frames = n_shown(packets), int(stream["n_frames"])
            if shown != n_frames:
                code, numbers = "frames", {"expected": shown, "found": n_frames}
                wrong = "the number of frames of a video differs from the number of shown packets"
        if wrong is not None:
            place = self._packets.offset + int(stream["first_packet"]) * PACKET.size
            where = self._location(self._packets, row, place)
            self._findings.add(code, wrong, **where, **numbers)

    def _packets_of(self, stream: np.void) -> Packets:
        first, count = int(stream["first_packet"]), int(stream["n_packets"])
        packets: Packets = self._content.items(self._packets, PACKET_DTYPE, first, count)
        return packets


_INVALID_ROW: Final = "the table row of a stream is invalid (packets, chunks, sizes or time base)"


def _parameters_error(content: bytes) -> str | None:
    try:
        found = check_parameters(read_json(content.decode("utf-8")))
        check_json(found)
        is_canonical = canonical_json(found) == content
    except ShardCorrupt as error:
        return error.what
    except (ValueError, RecursionError, SchemaError) as error:
        return f"the parameters of a stream are not valid JSON: {error}"
    return None if is_canonical else "the parameters of a stream are not in canonical form"
