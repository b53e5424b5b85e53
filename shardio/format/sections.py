"""The sections of a shard: their plan, and the entries of the payload's index.

`plan_sections` returns the sections that a shard must have. The writer writes them in this order,
except that one section of data may come first. A reader refuses any other section, unless its kind
is optional.

The *payload* is the section of all records. A sample has a record for each field that is not a
column. With m such fields, the record of the k-th field in row r has the index entry r * m + k.
"""

from __future__ import annotations

import functools
import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.format.checksum import BLOCK_BYTES, CHUNK_BYTES, distinct, n_blocks, n_units
from shardio.format.codecs import BY_CODE, SPECS, Codec
from shardio.format.layout import NO_FIELD, Kind, Section
from shardio.format.schema import Schema
from shardio.format.types.field import MAX_RECORD_BYTES, Field
from shardio.format.types.streams import PACKET, STREAM

ENTRY: Final = struct.Struct("<QQQQ")
"""An index entry: offset of the record in the payload; stored bytes | codec << 48; bytes after
decompression; hash of the stored bytes."""
ENTRY_DTYPE: Final = np.dtype(
    [("offset", "<u8"), ("stored", "<u8"), ("n_bytes", "<u8"), ("hash", "<u8")]
)
DIMENSION: Final = struct.Struct("<Q")

_SIZE_BITS: Final = 48
_SIZE_MASK: Final = np.uint64((1 << _SIZE_BITS) - 1)
Entries = npt.NDArray[np.void]


def pack_entry(offset: int, n_stored: int, codec: int, n_bytes: int, hash_: int) -> bytes:
    """Return an index entry."""
    return ENTRY.pack(offset, n_stored | codec << _SIZE_BITS, n_bytes, hash_)


def stored_bytes(entries: Entries) -> npt.NDArray[np.uint64]:
    """Return the stored size of each record, in bytes."""
    found: npt.NDArray[np.uint64] = np.bitwise_and(entries["stored"], _SIZE_MASK)
    return found


def codecs(entries: Entries) -> npt.NDArray[np.uint64]:
    """Return the codec of each record."""
    found: npt.NDArray[np.uint64] = np.right_shift(entries["stored"], np.uint64(_SIZE_BITS))
    return found


def invalid_entries(entries: Entries, field: Field, payload_bytes: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the invalid entries; the checks cannot overflow.

    A valid record has an allowed codec and is inside the payload. A raw record is aligned, and its
    two sizes are equal. A compressed record is smaller than its content, but not by more than the
    codec's maximum ratio. The content has a size that is possible for a value of the field; in an
    optional field, the size may also be 0.
    """
    stored, found_codes, offsets = stored_bytes(entries), codecs(entries), entries["offset"]
    raw, spec = found_codes == Codec.RAW, SPECS[field.codec]
    bad = ~raw
    for code in {spec.code, *spec.other_codes} - {Codec.RAW}:
        has_code = found_codes == np.uint64(code)
        bad &= ~has_code
        bad |= has_code & (entries["n_bytes"] > stored * np.uint64(BY_CODE[code].max_ratio))
    bad |= stored > payload_bytes
    bad |= offsets > np.uint64(payload_bytes) - np.minimum(stored, np.uint64(payload_bytes))
    bad |= entries["n_bytes"] > MAX_RECORD_BYTES
    bad |= raw & (entries["n_bytes"] != stored)
    bad |= ~raw & (entries["n_bytes"] <= stored)
    if field.alignment > 1:
        bad |= raw & (offsets % np.uint64(field.alignment) != 0)
    if (n_bytes := field.record_bytes) is not None:
        is_absent = (entries["n_bytes"] == 0) & field.optional
        bad |= ~is_absent & (entries["n_bytes"] != n_bytes)
    if field.is_never_empty and not field.optional:
        bad |= stored == 0
    found: npt.NDArray[np.bool_] = bad
    return found


def first_invalid(entries: Entries, field: Field, payload_bytes: int) -> int | None:
    """Return the index of the first invalid entry; None if all entries are valid."""
    if field.codec == "raw" and _are_raw(entries, field, payload_bytes):
        return None
    bad = invalid_entries(entries, field, payload_bytes)
    return int(np.argmax(bad)) if bad.any() else None


def _are_raw(entries: Entries, field: Field, payload_bytes: int) -> bool:
    """Return True only if all entries are raw and valid.

    This takes half the time of `invalid_entries`. In the entry of a raw record, `stored` is the
    size, because the codec is 0. Sums of two numbers below 2^48 do not overflow.
    """
    sizes, offsets = entries["n_bytes"], entries["offset"]
    if not len(entries) or payload_bytes > _SIZE_MASK or field.alignment > 1:
        return False
    if field.is_never_empty and not sizes.all():
        return False  # allowed only in an optional field, which `invalid_entries` checks
    fit = max(sizes.max(), offsets.max()) <= payload_bytes
    return bool(
        fit and (offsets + sizes).max() <= payload_bytes and (entries["stored"] == sizes).all()
    )


Key = tuple[int, int, int]
"""The kind of a section, its field id or NO_FIELD, and its `of_kind`; see `Section`."""
Sections = dict[Key, Section]
VARIABLE_COUNT_STRIDES: Final[dict[int, int]] = {
    Kind.PACKETS: PACKET.size,
    Kind.CHUNK_HASHES: DIMENSION.size,
}
"""The kinds of sections whose number of items depends on the streams, with the size of an item."""
Counts = npt.NDArray[np.int64]


class SectionSpec(NamedTuple):
    """A section that a shard must have; `stride` is the size of an item in bytes, 0 if varying."""

    key: Key
    n_items: int
    stride: int


@functools.lru_cache(maxsize=64)  # many shards of a dataset have the same number of samples
def plan_sections(
    schema: Schema, n_samples: int, counts: tuple[tuple[Key, int], ...] = ()
) -> tuple[SectionSpec, ...]:
    """Return the sections of a shard with n_samples, in the order in which they are in the file.

    `counts` contains the number of items of each section whose kind is in `VARIABLE_COUNT_STRIDES`.
    A section that is missing there has no items.
    """
    counted = dict(counts)
    ids, n_records = schema.field_id, n_samples * len(schema.records)
    found: list[SectionSpec] = []
    for name, column in schema.columns.items():
        found.append(SectionSpec((Kind.COLUMN, ids(name), 0), n_samples, column.stride))
    if schema.records:
        found.append(SectionSpec((Kind.PAYLOAD, NO_FIELD, 0), n_records, 0))
    for name, column in schema.columns.items():
        n_hashes = n_units(n_samples, column.row_bytes or 0, column.stride)
        _add_with_hashes(found, Kind.COLUMN_HASHES, ids(name), n_hashes, DIMENSION.size)
    if schema.records:
        _add_with_hashes(found, Kind.INDEX, NO_FIELD, n_records, ENTRY.size)
    for name, field in schema.records.items():
        if n_dims := len(field.stored_dims):
            _add_with_hashes(found, Kind.SHAPES, ids(name), n_samples, DIMENSION.size * n_dims)
    for name, field in schema.records.items():
        if field.is_streamed:
            _add_with_hashes(found, Kind.STREAMS, ids(name), n_samples, STREAM.size)
            for kind, stride in VARIABLE_COUNT_STRIDES.items():
                n_items = counted.get((kind, ids(name), 0), 0)
                _add_with_hashes(found, kind, ids(name), n_items, stride)
    for name in schema.optional:
        _add_with_hashes(found, Kind.VALIDITY, ids(name), -(-n_samples // 8), 1)
    for name, field in schema.records.items():
        if SPECS[field.codec].has_dictionary:
            found.append(SectionSpec((Kind.DICTIONARY, ids(name), 0), 1, 0))
    found.append(SectionSpec((Kind.SCHEMA, NO_FIELD, 0), 1, 0))
    return tuple(found)


def _add_with_hashes(
    found: list[SectionSpec], kind: int, field: int, n_items: int, stride: int
) -> None:
    section = SectionSpec((kind, field, 0), n_items, stride)
    found.append(section)
    found.append(block_hashes_of(section))


def block_hashes_of(section: SectionSpec) -> SectionSpec:
    """Return the section of the block hashes of an index section."""
    (kind, field, _), n_items, stride = section
    n_hashes = n_blocks(n_items * stride)
    return SectionSpec((Kind.BLOCK_HASHES, field, kind), n_hashes, DIMENSION.size)


HASH_SECTION_UNITS: Final[dict[int, int]] = {
    Kind.BLOCK_HASHES: 1,
    Kind.COLUMN_HASHES: 0,
    Kind.INDEX: 0,
    Kind.CHUNK_HASHES: 0,
}
"""The kinds of sections that contain the hashes of units. The value is 1 if a section of the kind
is itself a unit, which is verified as a whole before its hashes are used; otherwise 0."""


def max_units(schema: Schema, n_samples: Counts, n_bytes: Counts) -> Counts:
    """Return, for each of several shards, an upper bound on the number of its units."""
    found: Counts = np.zeros(len(n_samples), np.int64)
    for n in distinct(n_samples).tolist():
        found[n_samples == n] = sum(
            n_items + HASH_SECTION_UNITS[kind]
            for (kind, _, _), n_items, _ in plan_sections(schema, n)
            if kind in HASH_SECTION_UNITS
        )
    n_streams = sum(field.is_streamed for field in schema.records.values())
    chunks = n_bytes // CHUNK_BYTES + n_samples
    blocks = [chunks * DIMENSION.size // BLOCK_BYTES + 1, n_bytes // BLOCK_BYTES + 1]
    found += n_streams * (chunks + sum(blocks))
    return found
