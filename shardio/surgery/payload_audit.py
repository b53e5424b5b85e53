"""Check every byte of the payload: index entries, that records tile it, their hashes and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.checksum import Hasher
from shardio.format.codec import Codec, Dictionary, decode
from shardio.format.fields import Array, Bytes, Field, Json, List
from shardio.format.index import (
    ENTRY,
    ENTRY_DTYPE,
    RECORD_ALIGNMENT,
    Entries,
    alignment,
    broken,
    codecs,
    full_shape,
    stored_bytes,
)
from shardio.format.layout import NO_FIELD, Header, Kind, Required, Section
from shardio.format.lists import unpack_list
from shardio.format.schema import Schema, canonical_json
from shardio.format.values import check_json, decode_record
from shardio.opening import Sections
from shardio.surgery.content import CHUNK_BYTES, WINDOW_BYTES, Content, differing
from shardio.surgery.finding import Findings
from shardio.surgery.validity_audit import Present

_CHUNK_ENTRIES: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class _Payload:
    """What the checks below share."""

    content: Content
    schema: Schema
    section: Section
    index: Section
    shapes: dict[str, npt.NDArray[np.uint64]]
    present: Present
    dictionaries: dict[str, Dictionary | None]
    findings: Findings
    fields: list[tuple[str, Field]]


@dataclass(slots=True)
class _Walk:
    """Where a walk over the payload has got to."""

    end: int = 0
    """Where the last record ended; -1 if that is unknown."""
    uses_zstd: bool = False


def audit_payload(
    content: Content,
    schema: Schema,
    sections: Sections,
    header: Header,
    present: Present,
    findings: Findings,
) -> None:
    """Check a payload whose sections have the places and sizes they must have."""
    shapes = {}
    for name, field in schema.records.items():
        if isinstance(field, Array) and field.n_varying:
            dims = content.numbers(sections[Kind.SHAPES, schema.field_id(name), 0])
            shapes[name] = dims.reshape(-1, field.n_varying)
    section, index = sections[Kind.PAYLOAD, NO_FIELD, 0], sections[Kind.INDEX, NO_FIELD, 0]
    dictionaries = _dictionaries(content, schema, sections, findings)
    fields = list(schema.records.items())
    payload = _Payload(
        content, schema, section, index, shapes, present, dictionaries, findings, fields
    )
    hasher, walk = Hasher(), _Walk()
    for first_row, entries in _chunks(content, index, len(schema.records)):
        hasher.update(np.ascontiguousarray(entries["hash"]).data)
        bad = _broken(payload, first_row, entries)
        _check_tiling(payload, walk, first_row, entries, bad)
        _check_records(payload, walk, first_row, entries, bad)
    if walk.end not in (-1, section.size):
        findings.add(
            "tiling",
            "the payload holds bytes that belong to no record",
            section=section.name,
            offset=section.offset + walk.end,
            expected=walk.end,
            found=section.size,
        )
    if hasher.intdigest() != section.hash:
        findings.add(
            "section_hash",
            "the payload's hash is not that of its records' hashes",
            section=section.name,
            expected=f"{section.hash:016x}",
            found=f"{hasher.intdigest():016x}",
        )
    if walk.uses_zstd != bool(header.required & Required.ZSTD):
        findings.add(
            "feature",
            "the zstd feature bit must be set if, and only if, a record is stored so",
            section="header",
            expected=int(walk.uses_zstd),
            found=int(bool(header.required & Required.ZSTD)),
        )


def _dictionaries(
    content: Content, schema: Schema, sections: Sections, findings: Findings
) -> dict[str, Dictionary | None]:
    """What records are compressed with; one that cannot be used is a finding."""
    found: dict[str, Dictionary | None] = {}
    for name, field in schema.records.items():
        if field.codec == "zstd_dictionary":
            section = sections[Kind.DICTIONARY, schema.field_id(name), 0]
            learned = bytes(content.bytes[section.offset : section.offset + section.size])
            found[name] = None
            with findings.catching(section=section.name, field=name, offset=section.offset):
                found[name] = Dictionary(learned) if learned else None
    return found


def _chunks(content: Content, index: Section, n_fields: int) -> Iterator[tuple[int, Entries]]:
    """The index in copies of whole rows, each with its first row's number."""
    n_rows = max(1, _CHUNK_ENTRIES // n_fields)
    for first in range(0, index.count, n_rows * n_fields):
        n_entries = min(n_rows * n_fields, index.count - first)
        place = index.offset + first * ENTRY.size
        stored = content.bytes[place : place + n_entries * ENTRY.size]
        yield first // n_fields, np.frombuffer(stored, ENTRY_DTYPE, n_entries).copy()


def _broken(payload: _Payload, first_row: int, entries: Entries) -> npt.NDArray[np.bool_]:
    """Which entries cannot be right, each with a finding."""
    fields = payload.fields
    bad = np.zeros(len(entries), np.bool_)
    for k, (_, field) in enumerate(fields):
        bad[k :: len(fields)] = broken(entries[k :: len(fields)], field, payload.section.size)
    for i in np.flatnonzero(bad).tolist():
        number = first_row * len(fields) + i
        payload.findings.add(
            "index_entry",
            "an index entry cannot be right (codec, offset, sizes or alignment)",
            section=payload.index.name,
            field=fields[i % len(fields)][0],
            sample=number // len(fields),
            offset=payload.index.offset + number * ENTRY.size,
            found=str(tuple(entries[i].tolist())),
        )
    return bad


def _check_tiling(
    payload: _Payload,
    walk: _Walk,
    first_row: int,
    entries: Entries,
    bad: npt.NDArray[np.bool_],
) -> None:
    """Check that each record begins where the one before ends, but for alignment by zeros."""
    fields = payload.fields
    offsets = entries["offset"].astype(np.int64)
    ends = offsets + stored_bytes(entries).astype(np.int64)
    ends[bad] = -1
    before = np.concatenate([[walk.end], ends[:-1]])
    kinds = codecs(entries)
    aligned = np.ones(len(entries), np.int64)
    for k, (_, field) in enumerate(fields):
        raw = kinds[k :: len(fields)] == Codec.RAW
        aligned[k :: len(fields)][raw] = alignment(field, Codec.RAW)
    starts = before + -before % aligned
    known = ~bad & (before >= 0)
    for i in np.flatnonzero(known & (offsets != starts)).tolist():
        payload.findings.add(
            "tiling",
            "a record does not begin where the one before it ends",
            section=payload.section.name,
            field=fields[i % len(fields)][0],
            sample=first_row + i // len(fields),
            offset=payload.section.offset + int(offsets[i]),
            expected=int(starts[i]),
            found=int(offsets[i]),
        )
    start = payload.section.offset
    for i in np.flatnonzero(known & (offsets == starts) & (starts > before)).tolist():
        payload.content.check_zeros(
            start + int(before[i]),
            start + int(starts[i]),
            payload.findings,
            payload.section.name,
            field=fields[i % len(fields)][0],
            sample=first_row + i // len(fields),
        )
    walk.end = int(ends[-1])


def _check_records(
    payload: _Payload,
    walk: _Walk,
    first_row: int,
    entries: Entries,
    bad: npt.NDArray[np.bool_],
) -> None:
    """Check each record's hash, and that it decodes to what its field promises."""
    fields, content = payload.fields, payload.content
    numbers = np.flatnonzero(~bad)
    if not len(numbers):
        return
    kinds, sizes = codecs(entries[numbers]), stored_bytes(entries[numbers]).astype(np.int64)
    walk.uses_zstd |= bool((kinds == Codec.ZSTD).any())
    starts = payload.section.offset + entries["offset"][numbers].astype(np.int64)
    ends, hashes = starts + sizes, entries["hash"][numbers]
    tells_more = _tells_more(payload, numbers, kinds)
    parts = list(_parts(starts, ends, CHUNK_BYTES if content.is_mapped else WINDOW_BYTES))
    # For all parts at once: a window has few records, and NumPy takes as long for few as for many.
    bases = np.repeat(
        starts[[first for first, _ in parts]], [last - first for first, last in parts]
    )
    places = list(map(slice, (starts - bases).tolist(), (ends - bases).tolist()))
    expected, is_asked = hashes.tolist(), bool(tells_more.any())
    for first, last in parts:
        start = int(starts[first])
        window = content.window(start, int(ends[last - 1]))
        here = places[first:last]
        for i, found in differing(map(window.__getitem__, here), expected[first:last]):
            k = first + i
            row, number = divmod(first_row * len(fields) + int(numbers[k]), len(fields))
            where: dict[str, Any] = {"field": fields[number][0], "sample": row}
            place = int(starts[k])
            payload.findings.add_hash(payload.section.name, place, expected[k], found, **where)
            tells_more[k] = False
        for i in np.flatnonzero(tells_more[first:last]).tolist() if is_asked else ():
            k = first + i
            row, number = divmod(first_row * len(fields) + int(numbers[k]), len(fields))
            codec, n_bytes = int(kinds[k]), int(entries["n_bytes"][numbers[k]])
            stored, place = window[here[i]], start + here[i].start
            _check_content(payload, number, row, place, stored, codec, n_bytes)


def _tells_more(
    payload: _Payload, numbers: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Which records can break a rule although their hash is right: all but raw bytes."""
    fields = payload.fields
    plain = [isinstance(field, Bytes) and name not in payload.present for name, field in fields]
    found: npt.NDArray[np.bool_] = ~np.array(plain)[numbers % len(fields)] | (kinds != Codec.RAW)
    return found


def _parts(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], n_bytes: int
) -> Iterator[tuple[int, int]]:
    """Pieces of about n_bytes of records that lie side by side: the first, and the one behind."""
    gaps = starts[1:] - ends[:-1]
    is_cut = np.diff(np.cumsum(ends - starts) // n_bytes) > 0
    is_cut |= (gaps < 0) | (gaps >= RECORD_ALIGNMENT)
    first = 0
    for last in (*(np.flatnonzero(is_cut) + 1).tolist(), len(starts)):
        yield first, last
        first = last


def _check_content(
    payload: _Payload,
    number: int,
    row: int,
    place: int,
    stored: memoryview,
    codec: int,
    n_bytes: int,
) -> None:
    """Check that a record whose hash is right decodes to what its field promises."""
    name, field = payload.fields[number]
    dims = payload.shapes[name][row] if name in payload.shapes else None
    dictionary = payload.dictionaries.get(name)
    try:
        if dictionary is not None and codec == Codec.ZSTD:
            raise ShardCorrupt("a record leaves out its field's dictionary", code="codec")
        if name in payload.present and not payload.present[name][row]:
            _check_absent(dims, n_bytes)
        else:
            record = decode(stored, codec, n_bytes, dictionary)
            check_value(field, record, dims, n_bytes)
    except ShardCorrupt as error:
        payload.findings.add(
            error.code,
            error.what,
            section=payload.section.name,
            field=name,
            sample=row,
            offset=place,
            expected=error.expected,
            found=error.found,
        )


def _check_absent(dims: npt.NDArray[np.uint64] | None, n_bytes: int) -> None:
    """Check that a sample which lacks a field has nothing of it.

    Raises:
        ShardCorrupt: it has. The place is the caller's to add.
    """
    if n_bytes or (dims is not None and dims.any()):
        what = "a sample lacks the field, and has a record or a shape of it"
        raise ShardCorrupt(what, code="validity", expected=0, found=n_bytes)


def check_value(
    field: Field, record: bytes | memoryview, dims: npt.NDArray[np.uint64] | None, n_bytes: int
) -> None:
    """Check that a decoded record is a value of its field, in the only form that is allowed.

    Args:
        field: its field.
        record: the decoded bytes.
        dims: the varying dimensions of an array's sample, if any vary.
        n_bytes: the record's size as the index has it.

    Raises:
        ShardCorrupt: it is not. The place is the caller's to add.
    """
    if isinstance(field, Array):
        shape = full_shape(field, np.empty(0, np.uint64) if dims is None else dims, n_bytes)
        if field.dtype == "bool" and (np.frombuffer(record, np.uint8) > 1).any():
            raise ShardCorrupt(f"a bool of {shape} is neither 0 nor 1", code="value")
        return
    if isinstance(field, Bytes):
        return
    if isinstance(field, List):
        for array in unpack_list(field.element, record):
            if field.element.dtype == "bool" and (np.atleast_1d(array).view(np.uint8) > 1).any():
                raise ShardCorrupt("a bool in a list is neither 0 nor 1", code="value")
        return
    try:
        value = decode_record(field, record, ())
        is_canonical = not isinstance(field, Json) or canonical_json(value) == record
        if isinstance(field, Json):
            check_json(value)
    except (ValueError, RecursionError, SchemaError) as error:
        raise ShardCorrupt(f"a record cannot be decoded: {error}", code="value") from error
    if not is_canonical:
        raise ShardCorrupt("JSON is not in canonical form", code="value")
