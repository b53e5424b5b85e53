"""Changes that know what they change: numbers, bytes, JSON, and the parts of a shard.

All randomness comes from the generator that is handed in: a seed gives the same inputs again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import zstandard

from shardio import Schema
from shardio.format.checksum import chunk_hashes, hash_bytes, pack_hashes, rows_per_unit
from shardio.format.codecs import Codec
from shardio.format.layout import PAGE, Kind
from shardio.format.sections import ENTRY, ENTRY_DTYPE, codecs, pack_entry, stored_bytes
from shardio.format.types.streams import STREAM_DTYPE
from tests.fuzz.parts import Parts

_EDGES: Final = (0, 1, 2, 7, 8, 63, 64, 255, 4095, 4096, 65535, 1 << 16)
_POWERS: Final = (31, 32, 47, 48, 49, 53, 62, 63, 64)
_HEADER: Final = ("n_samples", "file_size", "table_offset", "table_size", "table_hash", "required")
_TABLE: Final = ("kind", "field", "of_kind", "offset", "size", "count", "stride", "hash")
_NARROW: Final = ("kind", "field", "of_kind")
_TEXTS: Final = ("", "a", "a.b", "\0", "../x", "/etc/passwd", "ä" * 300, "\ud800", "1e999", "NaN")
_MAX_BOMB: Final = 200_000


def number(rng: random.Random, near: int = 0, bits: int = 64) -> int:
    """Draw an integer that code may get wrong: an edge, a power of two, or one beside `near`."""
    how = rng.randrange(5)
    if how == 0:
        found = rng.choice(_EDGES)
    elif how == 1:
        found = (1 << rng.choice(_POWERS)) + rng.randint(-1, 1)
    elif how == 2:
        found = near + rng.choice((-4096, -64, -1, 1, 2, 64, 4096, 1 << 32, 1 << 48))
    elif how == 3:
        found = near ^ 1 << rng.randrange(bits)
    else:
        found = rng.getrandbits(bits)
    return found % (1 << bits)


def change_bytes(rng: random.Random, content: bytes, n_changes: int = 3) -> bytes:
    """Flip, overwrite, insert, remove or repeat a few bytes."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, n_changes)):
        at, n = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 8, 16))
        how = rng.randrange(6)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            changed[at : at + n] = rng.choice((b"\0", b"\xff", b"\x80", b"[", b"9", b'"')) * n
        elif how == 2:
            changed[at : at + n] = rng.randbytes(n)
        elif how == 3:
            changed[at:at] = rng.randbytes(n)
        elif how == 4:
            del changed[at : at + n]
        else:
            changed[at:at] = changed[at : at + 4 * n]
    return bytes(changed)


def change_file(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Damage of a whole file: as `change_bytes`, cut, lengthened, pages exchanged, two mixed."""
    how = rng.randrange(6)
    if how == 0:
        return content[: rng.randrange(len(content))]
    if how == 1:
        return content + rng.choice((b"\0", b"\xff", content[:1])) * rng.choice((1, 96, PAGE))
    pages = [content[i : i + PAGE] for i in range(0, len(content), PAGE)]
    if how == 2 and len(pages) > 1:
        i, j = rng.randrange(len(pages)), rng.randrange(len(pages))
        pages[i] = pages[j]
        return b"".join(pages)
    if how == 3:
        at = rng.randrange(1 + min(len(content), len(other)) // PAGE) * PAGE
        return content[:at] + other[at:]
    if how == 4:
        flipped = bytearray(content)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    return change_bytes(rng, content)


def change_json(rng: random.Random, value: Any) -> Any:
    """Replace, remove, repeat or move one value somewhere inside JSON."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        changed = dict(value)
        if rng.random() < 0.1:
            del changed[key]
        elif rng.random() < 0.1:
            changed[rng.choice((key + "x", "digest", "", "name"))] = changed[key]
        else:
            changed[key] = change_json(rng, changed[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        i, how = rng.randrange(len(value)), rng.randrange(10)
        if how == 0:
            return value[:i] + value[i + 1 :]
        if how == 1:
            return [*value, value[i]]
        if how == 2:
            return value[::-1]
        return [*value[:i], change_json(rng, value[i]), *value[i + 1 :]]
    if isinstance(value, int) and rng.random() < 0.6:
        return number(rng, value) - rng.choice((0, 0, 0, 1 << 63))
    if isinstance(value, str) and rng.random() < 0.4:
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(_TEXTS) + value[at + rng.randrange(3) :]
    leaves: list[Any] = [None, True, -1, 0, 1.5, "", [], {}, [[]], {"a": 1}, 10**30]
    return rng.choice([*leaves, rng.choice(_TEXTS)])


def dumped(rng: random.Random, value: Any) -> bytes:
    """JSON as shardio writes it in a schema; now and then in another form, or damaged."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    content = text.encode("utf-8", "surrogatepass")
    how = rng.random()
    if how < 0.05:
        return json.dumps(value).encode()
    if how < 0.1:
        return b"[" * rng.choice((100, 990, 20_000)) + content
    return change_bytes(rng, content) if how < 0.25 else content


class ShardMutator:
    """Makes broken shards of sound ones; `families` are the kinds of changes it knows."""

    def __init__(self, seeds: dict[str, bytes]) -> None:
        self._names = sorted(seeds)
        self._seeds = seeds
        self._parts = {name: Parts.of(content) for name, content in seeds.items()}
        self._schemas = {name: schema_of(parts) for name, parts in self._parts.items()}
        self._changes: dict[str, Callable[[random.Random, Parts, Schema], None]] = {
            "header": _change_header,
            "table": _change_table,
            "sections": _change_sections,
            "schema": _change_schema,
            "index": lambda rng, parts, _: _change_numbers(rng, parts, (Kind.INDEX, Kind.SHAPES)),
            "streams": _change_streams,
            "records": _change_records,
            "columns": _change_columns,
        }
        self.schemas = list(self._schemas.values())
        self.families = (*self._changes, "bytes")

    def make(self, rng: random.Random) -> tuple[str, bytes]:
        name, family = rng.choice(self._names), rng.choice(self.families)
        if family == "bytes":
            return family, change_file(rng, self._seeds[name], self._seeds[rng.choice(self._names)])
        parts, schema = self._parts[name].copy(), self._schemas[name]
        self._changes[family](rng, parts, schema)
        while rng.random() < 0.2:
            self._changes[rng.choice(self.families[:-1])](rng, parts, schema)
        parts.hashes, parts.blocks = rng.random() < 0.95, rng.random() < 0.95
        return family, parts.seal()


def schema_of(parts: Parts) -> Schema:
    place = parts.find(Kind.SCHEMA)
    return Schema.from_json(parts.contents[-1 if place is None else place])


def _change_header(rng: random.Random, parts: Parts, schema: Schema) -> None:
    name = rng.choice((*_HEADER, "optional", "minor", "id"))
    if name == "id":
        parts.header[name] = rng.randbytes(16)
    elif name == "required":
        parts.header[name] = parts.required ^ 1 << rng.randrange(64)
    else:
        near = parts.n_samples if name == "n_samples" else PAGE
        parts.header[name] = number(rng, near, 16 if name == "minor" else 64)


def _change_table(rng: random.Random, parts: Parts, schema: Schema) -> None:
    if not parts.sections:
        return
    i, name = rng.randrange(len(parts.sections)), rng.choice(_TABLE)
    near = getattr(rng.choice(parts.sections), name)
    same = rng.random() < 0.3
    new = near if same else number(rng, near, 16 if name in _NARROW else 64)
    parts.table.setdefault(i, {})[name] = new


def _change_sections(rng: random.Random, parts: Parts, schema: Schema) -> None:
    if not parts.sections:
        return
    i, j = rng.randrange(len(parts.sections)), rng.randrange(len(parts.sections))
    how = rng.randrange(6)
    if how == 0:
        del parts.sections[i], parts.contents[i]
    elif how == 1:
        parts.sections[i], parts.sections[j] = parts.sections[j], parts.sections[i]
        parts.contents[i], parts.contents[j] = parts.contents[j], parts.contents[i]
    elif how == 2:
        parts.contents[i] = parts.contents[j]
    elif how == 3:
        kind = rng.choice((0, 1, 8, 9, 10, 11, 12, 13, 0x8000, 0xFFFF))
        parts.sections.insert(i, replace(parts.sections[j], kind=kind))
        parts.contents.insert(i, parts.contents[j])
    elif how == 4:
        _resize(rng, parts, i)
    else:
        parts.contents[i] = change_bytes(rng, parts.contents[i])


def _resize(rng: random.Random, parts: Parts, i: int) -> None:
    """Give a section, or the whole shard, another number of items, and say so everywhere."""
    section, n = parts.sections[i], rng.randint(0, 9)
    parts.contents[i] = parts.contents[i][: n * section.stride].ljust(n * section.stride, b"\0")
    parts.sections[i] = replace(section, count=n)
    if rng.random() < 0.5:
        parts.n_samples = n


def _change_schema(rng: random.Random, parts: Parts, schema: Schema) -> None:
    place = parts.find(Kind.SCHEMA)
    if place is None:
        return
    value = change_json(rng, json.loads(schema.to_json()))
    parts.contents[place] = dumped(rng, value)


def _change_streams(rng: random.Random, parts: Parts, schema: Schema) -> None:
    """Another number in a table of streams; or more or fewer items of it than there should be."""
    kinds = (Kind.STREAMS, Kind.PACKETS, Kind.CHUNK_HASHES)
    if rng.random() < 0.7:
        _change_numbers(rng, parts, kinds)
    elif places := [i for i, s in enumerate(parts.sections) if s.kind in kinds]:
        n_samples = parts.n_samples
        _resize(rng, parts, rng.choice(places))
        parts.n_samples = n_samples


def _change_numbers(rng: random.Random, parts: Parts, kinds: tuple[Kind, ...]) -> None:
    """Another number in a section of these kinds, two exchanged, or two items."""
    places = [i for i, s in enumerate(parts.sections) if s.kind in kinds]
    places = [i for i in places if parts.contents[i]]
    if not places:
        return
    i = rng.choice(places)
    numbers = np.frombuffer(parts.contents[i].ljust(8, b"\0"), "<u8", len(parts.contents[i]) // 8)
    changed = numbers.copy()
    if not len(changed):
        return
    stride = max(1, parts.sections[i].stride // 8)
    at, other = rng.randrange(len(changed)), rng.randrange(len(changed))
    if rng.random() < 0.3:  # two items, or two dimensions of one
        changed[at], changed[other] = numbers[other], numbers[at]
    elif rng.random() < 0.2:
        a, b = at // stride * stride, other // stride * stride
        changed[a : a + stride] = numbers[b : b + stride][: len(changed[a : a + stride])]
    else:
        changed[at] = number(rng, int(numbers[at]))
    parts.contents[i] = changed.tobytes()


Record = tuple[bytes, int, int]
"""stored bytes, codec, bytes of the value."""


def records_of(parts: Parts) -> list[Record]:
    """All records of a payload in order; none where index or payload are broken already."""
    index, payload = parts.find(Kind.INDEX), parts.find(Kind.PAYLOAD)
    if index is None or payload is None or len(parts.contents[index]) % ENTRY.size:
        return []
    entries = np.frombuffer(parts.contents[index], ENTRY_DTYPE)
    content = parts.contents[payload]
    starts, sizes = entries["offset"].tolist(), stored_bytes(entries).tolist()
    stored = [content[at : at + n] for at, n in zip(starts, sizes, strict=True)]
    return list(zip(stored, codecs(entries).tolist(), entries["n_bytes"].tolist(), strict=True))


def set_records(parts: Parts, schema: Schema, records: list[Record]) -> None:
    """Lay records out in the payload as a writer does, with entries that are right for them."""
    index, payload = parts.find(Kind.INDEX), parts.find(Kind.PAYLOAD)
    names, fields = list(schema.records), list(schema.records.values())
    if index is None or payload is None or not fields:
        return
    content, entries = bytearray(), []
    for i, (stored, codec, n_bytes) in enumerate(records):
        content += bytes(-len(content) % (1 if codec else fields[i % len(fields)].alignment))
        named: Any = codec & 0xFFFF
        hash_ = hash_bytes(stored)
        if fields[i % len(fields)].is_streamed:
            number, row = schema.field_id(names[i % len(fields)]), i // len(fields)
            hash_ = _hash_chunks(parts, number, row, stored)
        entries.append(pack_entry(len(content), len(stored), named, n_bytes, hash_))
        content += stored
    parts.contents[payload], parts.contents[index] = bytes(content), b"".join(entries)


def _hash_chunks(parts: Parts, number: int, row: int, stored: bytes) -> int:
    """Put the hashes of a stream's chunks where its line has them; returns that of its entry."""
    packed = pack_hashes(chunk_hashes(memoryview(stored)))
    lines, chunks = parts.find(Kind.STREAMS, number), parts.find(Kind.CHUNK_HASHES, number)
    if lines is not None and chunks is not None:
        whole = len(parts.contents[lines]) // STREAM_DTYPE.itemsize
        table = np.frombuffer(parts.contents[lines], STREAM_DTYPE, whole)["first_chunk"]
        content = parts.contents[chunks]
        if row < whole and (at := 8 * int(table[row])) + len(packed) <= len(content):
            parts.contents[chunks] = content[:at] + packed + content[at + len(packed) :]
    return hash_bytes(packed)


def _change_records(rng: random.Random, parts: Parts, schema: Schema) -> None:
    records = records_of(parts)
    if not records:
        return
    for _ in range(rng.randint(1, 2)):
        i, j = rng.randrange(len(records)), rng.randrange(len(records))
        stored, codec, n_bytes = records[i]
        how = rng.randrange(6)
        if how == 0:
            records[i], records[j] = records[j], records[i]
        elif how == 1:
            records[i] = _compressed(rng, stored)
        elif how == 2:
            records[i] = (change_bytes(rng, stored), codec, n_bytes)
        elif how == 3:
            new = change_bytes(rng, stored)
            records[i] = (new, codec, len(new) if codec == Codec.RAW else n_bytes)
        elif how == 4:
            records[i] = (stored, codec, number(rng, n_bytes))
        else:
            records[i] = (stored, rng.randrange(4), n_bytes)
    set_records(parts, schema, records)


def _compressed(rng: random.Random, stored: bytes) -> Record:
    """Return a zstd frame of a record: sound, damaged, without a size, with a tail, or a bomb."""
    how = rng.randrange(5)
    if how == 0:
        n = rng.randrange(_MAX_BOMB)
        packed = zstandard.ZstdCompressor().compress(bytes(n))
        return packed, Codec.ZSTD, rng.choice((n, n, number(rng, n), 1 + len(packed)))
    sized = zstandard.ZstdCompressor(write_content_size=how != 1)
    packed = sized.compress(stored * 3)
    if how == 2:
        packed = change_bytes(rng, packed)
    elif how == 3:
        packed += rng.choice((b"\0", packed, b"\x50\x2a\x4d\x18\x04\0\0\0abcd"))
    elif how == 4:
        packed = b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + packed
    return packed, Codec.ZSTD, 3 * len(stored)


def _change_columns(rng: random.Random, parts: Parts, schema: Schema) -> None:
    if not schema.columns:
        return
    name = rng.choice(list(schema.columns))
    field, fid = schema.columns[name], schema.field_id(name)
    column, hashes = parts.find(Kind.COLUMN, fid), parts.find(Kind.COLUMN_HASHES, fid)
    if column is None or hashes is None or not parts.contents[column]:
        return
    old = parts.contents[column]
    content = bytearray(old)
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    parts.contents[column] = bytes(content)
    if rng.random() < 0.8:  # otherwise the hash of the unit refuses it
        row_bytes, stride = field.row_bytes or 0, field.stride
        per_unit = rows_per_unit(row_bytes, stride)
        n = row_bytes if per_unit == 1 else per_unit * stride
        starts = range(0, len(content), stride * per_unit)
        parts.contents[hashes] = pack_hashes(hash_bytes(content[at : at + n]) for at in starts)
