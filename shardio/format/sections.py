"""The plan of a shard: the sections that it must have, with their item counts and item sizes.

The writer writes these sections in this order, except that one data section may be streamed first.
A reader accepts no other sections. Verification numbers the units in this order.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.format.checksum import BLOCK_BYTES, CHUNK_BYTES, distinct, n_blocks, n_units
from shardio.format.codecs import SPECS
from shardio.format.index import DIMENSION, ENTRY
from shardio.format.layout import NO_FIELD, Kind
from shardio.format.schema import Schema
from shardio.format.types.streams import PACKET, STREAM

Key = tuple[int, int, int]
"""(kind of the section, field id, kind of the covered section for BLOCK_HASHES, else 0)."""
COUNTED: Final[dict[int, int]] = {Kind.PACKETS: PACKET.size, Kind.CHUNK_HASHES: DIMENSION.size}
"""The kinds whose item count cannot be computed from the schema, mapped to the bytes of an item."""
_HASH_BYTES: Final = DIMENSION.size
Counts = npt.NDArray[np.int64]


class SectionSpec(NamedTuple):
    """A section that a shard must have; `stride` is 0 if its items differ in size."""

    key: Key
    n_items: int
    stride: int


@functools.lru_cache(maxsize=64)  # shards of a dataset often have equally many samples
def plan(
    schema: Schema, n_samples: int, counts: tuple[tuple[Key, int], ...] = ()
) -> tuple[SectionSpec, ...]:
    """Return the sections of a shard of n_samples, in the order of the file.

    Each index section is followed by its BLOCK_HASHES section. `counts` has the item counts of
    `COUNTED` sections by key; missing ones are 0.
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
        _add_blocked(found, Kind.COLUMN_HASHES, ids(name), n_hashes, DIMENSION.size)
    if schema.records:
        _add_blocked(found, Kind.INDEX, NO_FIELD, n_records, ENTRY.size)
    for name, field in schema.records.items():
        if n_dims := len(field.stored_dims):
            _add_blocked(found, Kind.SHAPES, ids(name), n_samples, DIMENSION.size * n_dims)
    for name, field in schema.records.items():
        if field.is_streamed:
            _add_blocked(found, Kind.STREAMS, ids(name), n_samples, STREAM.size)
            for kind, stride in COUNTED.items():
                n_items = counted.get((kind, ids(name), 0), 0)
                _add_blocked(found, kind, ids(name), n_items, stride)
    for name in schema.optional:
        _add_blocked(found, Kind.VALIDITY, ids(name), -(-n_samples // 8), 1)
    for name, field in schema.records.items():
        if SPECS[field.codec].has_dictionary:
            found.append(SectionSpec((Kind.DICTIONARY, ids(name), 0), 1, 0))
    found.append(SectionSpec((Kind.SCHEMA, NO_FIELD, 0), 1, 0))
    return tuple(found)


def _add_blocked(
    found: list[SectionSpec], kind: int, field: int, n_items: int, stride: int
) -> None:
    """Add an index section and the section of its block hashes."""
    section = SectionSpec((kind, field, 0), n_items, stride)
    found.append(section)
    found.append(block_hashes_of(section))


def block_hashes_of(section: SectionSpec) -> SectionSpec:
    """Return the section of the block hashes of an index section."""
    (kind, field, _), n_items, stride = section
    return SectionSpec((Kind.BLOCK_HASHES, field, kind), n_blocks(n_items * stride), _HASH_BYTES)


HASHED_UNITS: Final[dict[int, int]] = {
    Kind.BLOCK_HASHES: 1,
    Kind.COLUMN_HASHES: 0,
    Kind.INDEX: 0,
    Kind.CHUNK_HASHES: 0,
}
"""The kinds with one verification unit per item, mapped to the count of additional units.

A section of block hashes is itself one unit, which comes before the units of its items.
"""


def max_units(schema: Schema, n_samples: Counts, n_bytes: Counts) -> Counts:
    """Return an upper bound of the number of verification units for each of several shards.

    Args:
        schema: the schema of all shards.
        n_samples, n_bytes: the number of samples and of bytes of each shard.
    """
    found: Counts = np.zeros(len(n_samples), np.int64)
    for n in distinct(n_samples).tolist():
        found[n_samples == n] = sum(
            n_items + HASHED_UNITS[kind]
            for (kind, _, _), n_items, _ in plan(schema, n)
            if kind in HASHED_UNITS
        )
    n_streams = sum(field.is_streamed for field in schema.records.values())
    chunks = n_bytes // CHUNK_BYTES + n_samples
    blocks = [chunks * DIMENSION.size // BLOCK_BYTES + 1, n_bytes // BLOCK_BYTES + 1]
    found += n_streams * (chunks + sum(blocks))
    return found
