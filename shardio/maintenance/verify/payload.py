"""Verify the payload of a shard, and the index of the payload.

The payload is the section with the values of varying size. A stored value is called a record. The
index has one entry per record: its hash, offset, codec, and its sizes before and after compression.
The records of a row, one for each such field, are next to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.errors import ShardCorrupt
from shardio.format.checksum import Hasher, distinct
from shardio.format.codecs import (
    BY_CODE,
    RECORD_FEATURES,
    SPECS,
    Codec,
    Dictionary,
    check_dictionary,
    decode,
)
from shardio.format.layout import NO_FIELD, Header, Kind, Required, Section
from shardio.format.schema import Schema
from shardio.format.sections import (
    ENTRY,
    ENTRY_DTYPE,
    Entries,
    Sections,
    codecs,
    invalid_entries,
    stored_bytes,
)
from shardio.format.types import Field
from shardio.format.types.arrays import RECORD_ALIGNMENT
from shardio.maintenance.verify import Findings
from shardio.maintenance.verify.streams import StreamAudit, are_texts, check_absent
from shardio.maintenance.verify.window import (
    DIGEST_BYTES,
    U64,
    WINDOW_BYTES,
    Content,
    differing,
    digests_of,
    parts_of,
)

CHUNK_ENTRIES: Final = 1 << 14
"""The number of index entries that are processed at a time."""


Present = dict[str, npt.NDArray[Any]]
"""A dict from the name of each optional field to a mask of the samples that have a value."""


@dataclass(frozen=True, slots=True)
class _Payload:
    """The arguments that all checks in this module share.

    `section` is the section of the payload, and `index` the section of the index. `shapes` has the
    stored dimensions of the records of each field, with one row per sample.
    """

    content: Content
    schema: Schema
    section: Section
    index: Section
    shapes: dict[str, npt.NDArray[np.uint64]]
    present: Present
    dictionaries: dict[str, Dictionary | None]
    findings: Findings
    fields: list[tuple[str, Field]]

    def place(self, first_row: int, i: int, offset: int) -> dict[str, Any]:
        """Return the details of a finding about a record at `offset` in the file.

        `i` is the index of the record, counted from the first record of the row `first_row`.
        """
        row, number = divmod(first_row * len(self.fields) + i, len(self.fields))
        where = {"field": self.fields[number][0], "sample": row}
        return {"section": self.section.name, **where, "offset": offset}


@dataclass(slots=True)
class _Walk:
    """The state that is passed from one chunk of index entries to the next."""

    end: int = 0
    """The offset in the payload at which the last record ends; -1 if its entry is invalid."""
    features: Required = Required(0)
    """The features that a reader must support to decode the records so far."""


def verify_payload(
    content: Content,
    schema: Schema,
    sections: Sections,
    header: Header,
    present: Present,
    findings: Findings,
) -> None:
    """Verify the payload and its index; add the findings to `findings`.

    All sections must have valid offsets and sizes.
    """
    shapes = {}
    for name, field in schema.records.items():
        shapes[name] = np.empty((header.n_samples, 0), np.uint64)
        if n_dims := len(field.stored_dims):
            dims = content.items(sections[Kind.SHAPES, schema.field_id(name), 0], U64)
            shapes[name] = dims.reshape(-1, n_dims)
    section, index = sections[Kind.PAYLOAD, NO_FIELD, 0], sections[Kind.INDEX, NO_FIELD, 0]
    dictionaries = _dictionaries(content, schema, sections, findings)
    fields = list(schema.records.items())
    payload = _Payload(
        content, schema, section, index, shapes, present, dictionaries, findings, fields
    )
    hasher, walk = Hasher(), _Walk()
    streams = {
        k: StreamAudit(content, schema, sections, name, present.get(name), findings)
        for k, (name, field) in enumerate(fields)
        if field.is_streamed
    }
    for first_row, entries in _chunks(content, index, len(schema.records)):
        hasher.update(np.ascontiguousarray(entries["hash"]).data)
        bad = _broken(payload, first_row, entries)
        _check_tiling(payload, walk, first_row, entries, bad)
        for k, verifier in streams.items():
            verifier.check(first_row, entries[k :: len(fields)], bad[k :: len(fields)])
            bad[k :: len(fields)] = True  # `_check_records` must skip streams: they are checked now
        _check_records(payload, walk, first_row, entries, bad)
    for verifier in streams.values():
        verifier.close()
    _check_whole(walk, section, hasher.intdigest(), header, findings)


def _check_whole(
    walk: _Walk, section: Section, digest: int, header: Header, findings: Findings
) -> None:
    """Check the end of the last record, the hash of all hashes, and the required features."""
    if walk.end not in (-1, section.size):
        findings.add(
            "tiling",
            "the payload holds bytes that belong to no record",
            section=section.name,
            offset=section.offset + walk.end,
            expected=walk.end,
            found=section.size,
        )
    if digest != section.hash:
        what = "the payload's hash does not match its records' hashes"
        findings.add_hash(section.hash, digest, "section_hash", what, section=section.name)
    for feature in (walk.features ^ Required(header.required)) & RECORD_FEATURES:
        codec = str(feature.name).lower()
        findings.add(
            "feature",
            f"the {codec} feature bit must be set if, and only if, a record is compressed with "
            f"{codec}",
            section="header",
            expected=int(feature in walk.features),
            found=int(feature not in walk.features),
        )


def _dictionaries(
    content: Content, schema: Schema, sections: Sections, findings: Findings
) -> dict[str, Dictionary | None]:
    """Return the compression dictionary of each field whose codec can have one.

    The value is None if the field has no dictionary, or if the dictionary is invalid. In the second
    case, a finding is added.
    """
    found: dict[str, Dictionary | None] = {}
    for name, field in schema.records.items():
        if SPECS[field.codec].has_dictionary:
            section = sections[Kind.DICTIONARY, schema.field_id(name), 0]
            learned = content.items(section, np.uint8).tobytes()
            found[name] = None
            with findings.catching(section=section.name, field=name, offset=section.offset):
                found[name] = Dictionary(learned) if learned else None
    return found


def _chunks(content: Content, index: Section, n_fields: int) -> Iterator[tuple[int, Entries]]:
    """Yield the entries of the index in chunks, each with the row at which it begins.

    A chunk has the entries of whole rows. The entries are a copy, which may be modified.
    """
    n_rows = max(1, CHUNK_ENTRIES // n_fields)
    for first in range(0, index.count, n_rows * n_fields):
        n_entries = min(n_rows * n_fields, index.count - first)
        yield first // n_fields, content.items(index, ENTRY_DTYPE, first, n_entries).copy()


def _broken(payload: _Payload, first_row: int, entries: Entries) -> npt.NDArray[np.bool_]:
    """Return a mask of the invalid entries; add a finding for each invalid entry."""
    fields = payload.fields
    bad = np.zeros(len(entries), np.bool_)
    for k, (_, field) in enumerate(fields):
        bad[k :: len(fields)] = invalid_entries(
            entries[k :: len(fields)], field, payload.section.size
        )
    for i in np.flatnonzero(bad).tolist():
        place = payload.index.offset + (first_row * len(fields) + i) * ENTRY.size
        payload.findings.add(
            "index_entry",
            "an index entry is invalid (codec, offset, sizes or alignment)",
            found=str(tuple(entries[i].tolist())),
            **{**payload.place(first_row, i, place), "section": payload.index.name},
        )
    return bad


def _check_tiling(
    payload: _Payload, walk: _Walk, first_row: int, entries: Entries, bad: npt.NDArray[np.bool_]
) -> None:
    """Check that each record begins where the previous record ends.

    Padding is allowed between two records if the second record must be aligned. The padding must be
    zero.
    """
    fields = payload.fields
    offsets = entries["offset"].astype(np.int64)
    ends = offsets + stored_bytes(entries).astype(np.int64)
    ends[bad] = -1
    before = np.concatenate([[walk.end], ends[:-1]])
    kinds = codecs(entries)
    aligned = np.ones(len(entries), np.int64)
    for k, (_, field) in enumerate(fields):
        raw = kinds[k :: len(fields)] == Codec.RAW
        aligned[k :: len(fields)][raw] = field.alignment
    starts = before + -before % aligned
    known = ~bad & (before >= 0)
    base = payload.section.offset
    for i in np.flatnonzero(known & (offsets != starts)).tolist():
        payload.findings.add(
            "tiling",
            "a record does not begin where the previous one ends",
            expected=int(starts[i]),
            found=int(offsets[i]),
            **payload.place(first_row, i, base + int(offsets[i])),
        )
    for i in np.flatnonzero(known & (offsets == starts) & (starts > before)).tolist():
        where, end = payload.place(first_row, i, base), base + int(starts[i])
        payload.content.check_zeros(base + int(before[i]), end, payload.findings, **where)
    walk.end = int(ends[-1])


def _check_records(
    payload: _Payload, walk: _Walk, first_row: int, entries: Entries, bad: npt.NDArray[np.bool_]
) -> None:
    """Check the hash of each record, and that the record can be decoded to a value of its field.

    Records whose entries are invalid according to the mask `bad` are skipped.
    """
    fields, content, numbers = payload.fields, payload.content, np.flatnonzero(~bad)
    if not len(numbers):
        return
    sound = entries[numbers] if len(numbers) < len(entries) else entries
    kinds, sizes = codecs(sound), stored_bytes(sound).astype(np.int64)
    for code in distinct(kinds.astype(np.int64)).tolist():
        walk.features |= BY_CODE[code].required_by_record
    starts = payload.section.offset + sound["offset"].astype(np.int64)
    ends, digests = starts + sizes, digests_of(sound["hash"])
    is_raw = kinds == Codec.RAW
    needs_decoding = ~(is_raw & _need_only_hash(payload, first_row, numbers))
    is_text = is_raw & _need_only_utf8(payload, numbers) if needs_decoding.any() else None
    parts, bases = _parts(starts, ends, WINDOW_BYTES)
    ranges = np.stack([starts - bases, sizes], axis=1).astype(np.uint64)
    for first, last, start, end in parts:
        window = content.window(start, end)
        expected = digests[first * DIGEST_BYTES : last * DIGEST_BYTES]
        for i, wanted, found in differing(parts_of(window, ranges[first:last]), expected):
            where = payload.place(first_row, int(numbers[first + i]), int(starts[first + i]))
            payload.findings.add_hash(wanted, found, **where)
            needs_decoding[first + i] = False
        if is_text is None:
            continue
        texts = first + np.flatnonzero(is_text[first:last])
        if are_texts(parts_of(window, ranges[texts])):
            needs_decoding[texts] = False
        for k in (first + np.flatnonzero(needs_decoding[first:last])).tolist():
            row, number = divmod(first_row * len(fields) + int(numbers[k]), len(fields))
            at, n_stored = ranges[k].tolist()
            stored, n_bytes = window[at : at + n_stored], int(sound["n_bytes"][k])
            _check_content(payload, number, row, int(starts[k]), stored, int(kinds[k]), n_bytes)


def _need_only_hash(
    payload: _Payload, first_row: int, numbers: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the records of which only the hash must be checked.

    The mask is correct only for records that are stored without compression. It is False for all
    records of optional fields, because these need another check: a record may be stored only if the
    sample has a value.
    """
    fields, found = payload.fields, np.zeros(len(numbers), np.bool_)
    for k, (name, field) in enumerate(fields):
        if name not in payload.present:
            here = np.flatnonzero(numbers % len(fields) == k)
            rows = first_row + numbers[here] // len(fields)
            found[here] = field.are_valid(payload.shapes[name][rows])
    return found


def _need_only_utf8(payload: _Payload, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return a mask of the records that are valid if their hash matches and they are UTF-8.

    The mask is correct only for records that are stored without compression.
    """
    fields = payload.fields
    plain = [field.is_utf8 and name not in payload.present for name, field in fields]
    found: npt.NDArray[np.bool_] = np.array(plain)[numbers % len(fields)]
    return found


class _Part(NamedTuple):
    """Consecutive records that are read together.

    `first` is the index of the first record, and `last` is the index after the last record. `start`
    and `end` are the offsets of the first byte in the file, and of the byte after the last byte.
    """

    first: int
    last: int
    start: int
    end: int


def _parts(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], n_bytes: int
) -> tuple[list[_Part], npt.NDArray[np.int64]]:
    """Divide records into parts of about n_bytes, in which the records are next to each other.

    Return the parts and, for each record, the offset in the file at which its part starts.
    """
    gaps = starts[1:] - ends[:-1]
    is_cut = np.diff(np.cumsum(ends - starts) // n_bytes) > 0
    is_cut |= (gaps < 0) | (gaps >= RECORD_ALIGNMENT)
    stops = np.append(np.flatnonzero(is_cut) + 1, len(starts))
    first = np.append(0, stops[:-1])
    numbers = first.tolist(), stops.tolist(), starts[first].tolist(), ends[stops - 1].tolist()
    return list(map(_Part, *numbers)), np.repeat(starts[first], stops - first)


def _check_content(
    payload: _Payload,
    number: int,
    row: int,
    place: int,
    stored: memoryview,
    codec: int,
    n_bytes: int,
) -> None:
    """Check that a record can be decoded to a value of its field. Its hash must be correct.

    `number` is the index of the field among the fields with records. `place` is the offset of the
    record in the file, `stored` its stored bytes, and `n_bytes` its size after decompression.
    """
    name, field = payload.fields[number]
    dims, dictionary = payload.shapes[name][row], payload.dictionaries.get(name)
    try:
        spec = BY_CODE[codec]
        if dictionary is not None and spec.compress and not spec.has_dictionary:
            raise ShardCorrupt("a record does not use its field's dictionary", code="codec")
        if name in payload.present and not payload.present[name][row]:
            check_absent(dims, n_bytes)
        else:
            record = decode(stored, codec, n_bytes, dictionary)
            if dictionary is not None and spec.has_dictionary:
                check_dictionary(stored, dictionary)
            field.check_record(record, dims)
    except ShardCorrupt as error:
        where = payload.place(row, number, place)
        numbers = {"expected": error.expected, "found": error.found}
        payload.findings.add(error.code, error.what, **where, **numbers)
