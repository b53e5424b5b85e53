"""Digests of values: 64 bits that tell one sample's field from another's.

A *stored* digest is made of the hashes that the shard holds, without reading or decoding the data
where that can be; equal ones mean equal values, different ones may not (another codec, another
version of it). A *value* digest is made of the value, and is the same however it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.format.checksum import hash_bytes, rows_per_unit
from shardio.format.codec import Codec
from shardio.format.fields import (
    MEDIA,
    STREAMED,
    Array,
    Bytes,
    Field,
    Json,
    List,
    Text,
)
from shardio.format.images import EncodedImage
from shardio.format.index import Entries, codecs
from shardio.format.schema import canonical_json
from shardio.format.streams import EncodedStream
from shardio.format.values import encode_stream
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows

Digests = npt.NDArray[np.uint64]
DigestsOf = Callable[[ShardReader, str, Rows], Digests]

_WORD: Final = 8
_PLAIN: Final = (Array, Bytes, Text, Json, List, *MEDIA)
"""Field types whose values are told by their stored bytes, tables and validity."""


def stored_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    """A digest of a field of each row, of stored hashes where there are any."""
    field = reader.schema[name]
    if name in reader.schema.columns:
        return _column_digests(reader, name, rows)
    if type(field) not in _PLAIN:
        return value_digests(reader, name, rows)
    entries = reader.records.entries(name, rows)
    kinds = codecs(entries)
    if (kinds > Codec.ZSTD).any():  # what the stored bytes mean depends on more than them
        return value_digests(reader, name, rows)
    digests = mix(entries["hash"].astype(np.uint64), kinds)
    if isinstance(field, STREAMED):
        digests = mix(digests, _table_digests(reader, name, rows, entries))
    return mix(digests, *reader.records.shapes(name, rows).T, reader.present(name, rows))


def _table_digests(reader: ShardReader, name: str, rows: Rows, entries: Entries) -> Digests:
    """A digest of what the tables have of each row's stream."""
    tables = reader.records.streams.tables(name, rows, entries)
    return np.array([hash_bytes(each.line + each.packets) for each in tables], np.uint64)


def value_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    """A digest of the value of a field of each row."""
    field = reader.schema[name]
    samples = (reader.sample(row, [name])[name] for row in rows.tolist())
    return np.array([hash_bytes(_bytes_of(value, field)) for value in samples], np.uint64)


def exact_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    """A digest that is the same for the same value, wherever fields are defined the same."""
    of = _column_digests if name in reader.schema.columns else value_digests
    return of(reader, name, rows)


def mix(digests: Digests, *others: npt.NDArray[Any]) -> Digests:
    """One digest of several, row by row."""
    mixed = digests.copy()
    for other in others:
        mixed ^= other.astype(np.uint64)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _column_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    digests = _row_digests(reader, name, rows)
    if reader.schema.columns[name].optional:  # a row that is not there is zeros
        return mix(digests, reader.present(name, rows))
    return digests


def _row_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    """Of large rows their hashes; of small ones, which share hashes, their bytes."""
    field = reader.schema.columns[name]
    n_bytes = field.row_bytes or 0
    if rows_per_unit(n_bytes, field.stride) == 1:
        return reader.units.column_hashes(name, rows).astype(np.uint64)
    found = reader.column(name, rows)
    values = np.ascontiguousarray(found).reshape(len(rows), -1).view(np.uint8)
    if n_bytes <= _WORD:
        words = np.zeros((len(rows), _WORD), np.uint8)
        words[:, :n_bytes] = values
        return words.view("<u8").reshape(-1).astype(np.uint64)
    return np.array([hash_bytes(value.data) for value in values], np.uint64)


def _bytes_of(value: Any, field: Field | None) -> bytes:
    """Bytes that differ whenever values do."""
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
    if isinstance(field, Json):
        return canonical_json(value)
    if isinstance(value, EncodedStream) and isinstance(field, STREAMED):
        record = encode_stream("", field, value)
        return record.tables.line + record.tables.packets + bytes(record)
    if isinstance(value, EncodedImage):
        return f"i{value.shape}".encode() + value
    if isinstance(value, str):
        return b"t" + value.encode()
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, list | tuple):
        parts = [_bytes_of(part, None) for part in value]
        return b"".join(f"l{len(part)},".encode() + part for part in parts)
    return repr(value).encode()
