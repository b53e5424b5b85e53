"""A second reader, from docs/reference/format.md alone, with the standard library only.

It shares nothing with shardio: where both say the same of a file, the specification says enough.
Hashes are not checked (XXH3 is not in the standard library), and zstd frames are given back as they
are stored. A value is: an array `(dtype code, shape, bytes)`, bytes, text, what JSON says, a list
of arrays, None, a `Picture`, a `Stream`, or of a compressed record `Stored(codec, bytes, n_bytes)`.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

PAGE, NO_FIELD = 4096, 65535
SCHEMA, COLUMN, COLUMN_HASHES, PAYLOAD, INDEX, SHAPES, BLOCK_HASHES, DICTIONARY, VALIDITY = range(
    1, 10
)
CHUNK_HASHES, PACKETS, STREAMS = 10, 11, 12
ARRAY, BYTES, TEXT, JSON, IMAGE, VIDEO, AUDIO, LIST = range(1, 9)
HIDDEN, ANY_FLAG, CHUNK = 2, 7, 65536
OF_RECORDS = 1 | 1 << 11  # the feature bits that depend on records
ITEM_SIZES = dict(enumerate([1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2], start=1))


class RefusedError(Exception):
    """The file breaks a rule."""


class Stored(NamedTuple):
    codec: int
    content: bytes
    n_bytes: int


class Picture(NamedTuple):
    content: bytes
    shape: tuple[int, ...]


class Stream(NamedTuple):
    """A stream: `packets` are (bytes, flags, time, duration) each; `numbers` those of its line.

    The numbers are: frames, time base (two), width, height, duration.
    """

    parameters: dict[str, Any]
    extradata: bytes
    packets: list[tuple[bytes, int, int, int]]
    numbers: tuple[int, ...]


class Section(NamedTuple):
    offset: int
    size: int
    n_items: int
    stride: int
    hash: int


def require(rule: object, what: str) -> None:
    """Refuse the file unless the rule holds."""
    if not rule:
        raise RefusedError(what)


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class SecondReader:
    """One shard, read whole."""

    def __init__(self, path: Path) -> None:
        self.content = content = path.read_bytes()
        require(len(content) >= 3 * PAGE, "too short")
        head = struct.unpack_from("<8sHHIQQQQQQ", content)
        magic, major, _, page, required, _, self.n, size, table, table_size = head
        require(magic == b"\x89SHD\r\n\x1a\n" and major == 1 and page == PAGE, "no shard")
        require(size == len(content) and content[:PAGE] == content[-PAGE:], "size or last page")
        require(not any(content[96:PAGE]), "padding of the header")
        require(table % PAGE == 0 and table + up(table_size, PAGE) + PAGE == size, "table")
        self.sections = self._table(table, table_size)
        schema = self.sections[SCHEMA, NO_FIELD, 0]
        text = content[schema.offset : schema.offset + schema.size].decode()
        self.fields: list[dict[str, Any]] = json.loads(text)["fields"]
        self.records = [f for f in self.fields if not is_column(f)]
        require(required & ~OF_RECORDS == self._features(), "feature bits")
        self._check_sections()

    def _table(self, table: int, table_size: int) -> dict[tuple[int, int, int], Section]:
        found, place = {}, PAGE
        for at in range(table, table + table_size, 48):
            kind, field, of_kind, zero, *numbers = struct.unpack_from(
                "<HHHHQQQQQ", self.content, at
            )
            section = Section(*numbers)
            require((kind, field, of_kind) not in found and zero == 0, "key of a section")
            require(section.offset == place, "hole or overlap")
            place = up(section.offset + section.size, PAGE)
            require(place <= table, "a section reaches into the table")
            require(not any(self.content[section.offset + section.size : place]), "padding")
            found[kind, field, of_kind] = section
        require(place == table and not any(self.content[table + table_size : -PAGE]), "hole")
        return found

    def _features(self) -> int:
        bits = (
            (1, any(f["codec"] == 2 for f in self.fields)),
            (2, any("optional" in f for f in self.fields)),
            (3, any("." in f["name"] for f in self.fields)),
            (4, any(f["type"] == LIST for f in self.fields)),
            (5, any(f["type"] == IMAGE for f in self.fields)),
            (6, any(f["type"] == VIDEO for f in self.fields)),
            (7, any(f["type"] == AUDIO for f in self.fields)),
        )
        return sum(1 << bit for bit, is_set in bits if is_set)

    def _check_sections(self) -> None:
        """Compare the table with what schema and number of samples ask for."""
        n, m = self.n, len(self.records)
        wanted = {(SCHEMA, NO_FIELD): (1, 0)}
        if m:
            wanted |= {(PAYLOAD, NO_FIELD): (n * m, 0), (INDEX, NO_FIELD): (n * m, 32)}
        for f in self.fields:
            number = f["id"]
            if is_column(f):
                stride, per_unit = stride_of(f), rows_per_unit(f)
                wanted[COLUMN, number] = (n, stride)
                wanted[COLUMN_HASHES, number] = (-(-n // per_unit), 8)
            if n_dims := dims_of(f):
                wanted[SHAPES, number] = (n, 8 * n_dims)
            if f["type"] in (VIDEO, AUDIO):
                wanted[STREAMS, number] = (n, 64)
                for kind, stride in ((PACKETS, 32), (CHUNK_HASHES, 8)):
                    section = self.sections.get((kind, number, 0))
                    wanted[kind, number] = (section.n_items if section else 0, stride)
            if f["codec"] == 2:
                wanted[DICTIONARY, number] = (1, 0)
            if "optional" in f:
                wanted[VALIDITY, number] = (-(-n // 8), 1)
        found = {}
        for (kind, number, of_kind), section in self.sections.items():
            require(not section.stride or section.size == section.n_items * section.stride, "size")
            if kind != BLOCK_HASHES:
                found[kind, number] = (section.n_items, section.stride)
                continue
            covered = self.sections[of_kind, number, 0]
            require(section.n_items == -(-covered.size // PAGE) and section.stride == 8, "blocks")
        require(
            found == wanted, "sections that the schema does not ask for, or the other way round"
        )

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {f["name"]: self.value(f, row) for f in self.fields}

    def value(self, field: dict[str, Any], row: int) -> Any:
        if "optional" in field:
            bits = self.sections[VALIDITY, field["id"], 0].offset
            if not self.content[bits + row // 8] >> row % 8 & 1:
                return None
        if is_column(field):
            at = self.sections[COLUMN, field["id"], 0].offset + row * stride_of(field)
            return array_of(field, field["shape"], self.content[at : at + row_bytes(field)])
        return self._record(field, row)

    def _record(self, field: dict[str, Any], row: int) -> Any:
        payload = self.sections[PAYLOAD, NO_FIELD, 0]
        at = self.sections[INDEX, NO_FIELD, 0].offset
        at += 32 * (row * len(self.records) + self.records.index(field))
        offset, packed, n_bytes, _ = struct.unpack_from("<QQQQ", self.content, at)
        codec, stored = packed >> 48, packed & (1 << 48) - 1
        require(offset + stored <= payload.size, "a record reaches behind the payload")
        content = self.content[payload.offset + offset : payload.offset + offset + stored]
        if codec:
            return Stored(codec, content, n_bytes)
        require(n_bytes == stored, "a raw record of another size")
        if field["type"] == ARRAY:
            return array_of(field, self._shape(field, row), content)
        if field["type"] == LIST:
            return list_of(field, content)
        if field["type"] == BYTES:
            return content
        if field["type"] == IMAGE:
            shape = self._dims(field, row)
            require(content and min(shape) > 0 and shape[2] <= 4, "a picture")
            return Picture(content, shape)
        if field["type"] in (VIDEO, AUDIO):
            return self._stream(field, row, content)
        return content.decode() if field["type"] == TEXT else json.loads(content)

    def _shape(self, field: dict[str, Any], row: int) -> list[int]:
        return filled(field, self._dims(field, row)) if dims_of(field) else list(field["shape"])

    def _dims(self, field: dict[str, Any], row: int) -> tuple[int, ...]:
        n_dims = dims_of(field)
        at = self.sections[SHAPES, field["id"], 0].offset + 8 * n_dims * row
        return struct.unpack_from(f"<{n_dims}Q", self.content, at)

    def _stream(self, field: dict[str, Any], row: int, record: bytes) -> Stream:
        lines, packets, chunks = (
            self.sections[kind, field["id"], 0] for kind in (STREAMS, PACKETS, CHUNK_HASHES)
        )
        line = struct.unpack_from("<QQQQIIIIIIQ", self.content, lines.offset + 64 * row)
        first, n_packets, first_chunk, n_frames, *numbers, n_head, n_extra, duration = line
        require(first + n_packets <= packets.n_items and min(numbers) > 0, "line of a stream")
        require(first_chunk + up(len(record), CHUNK) // CHUNK <= chunks.n_items, "chunks")
        require(0 < n_head and n_head + n_extra <= len(record), "parameters and extradata")
        parameters = json.loads(record[:n_head])
        require(isinstance(parameters, dict) and parameters.get("codec"), "parameters")
        found, place, data = [], 0, record[n_head + n_extra :]
        for i in range(first, first + n_packets):
            at = packets.offset + 32 * i
            offset, stored, pts, ticks = struct.unpack_from("<QQqQ", self.content, at)
            size, flags = stored & (1 << 48) - 1, stored >> 48
            require(offset == place and flags & ANY_FLAG == flags, "a packet")
            found.append((data[place : place + size], flags, pts, ticks))
            place += size
        require(place == len(data), "packets do not tile the record")
        n_shown = sum(not flags & HIDDEN for _, flags, _, _ in found)
        require(field["type"] == AUDIO or n_shown == n_frames, "frames")
        content = record[n_head : n_head + n_extra]
        return Stream(parameters, content, found, (n_frames, *numbers, duration))


def listed_shards(folder: Path, said: Any) -> list[dict[str, Any]]:
    """Shards of a dataset, as its generation lists them, or as the part does that it names."""
    if isinstance(said, list):
        return said
    content, n = part(folder, said, "shards"), said["count"]
    numbers = struct.unpack_from(f"<{2 * n}q", content)
    ids = [content[at : at + 16].hex() for at in range(16 * n, 32 * n, 16)]
    *names, rest = content[32 * n :].split(b"\0")
    require(len(names) == n and not rest, "names")
    columns = zip(names, numbers[:n], numbers[n:], ids, strict=True)
    keys = ("name", "samples", "bytes", "id")
    return [dict(zip(keys, (name.decode(), *line), strict=True)) for name, *line in columns]


def listed_inputs(folder: Path, said: Any) -> list[dict[str, Any]]:
    if isinstance(said, list):
        return said
    found = [json.loads(line) for line in part(folder, said, "inputs").split(b"\n")[:-1]]
    require(len(found) == said["count"], "count")
    return found


def part(folder: Path, said: dict[str, Any], kind: str) -> bytes:
    content = (folder / "generations" / f"{said['id']}.{kind}").read_bytes()
    require(len(content) == said["bytes"], "size")
    return content


def dims_of(field: dict[str, Any]) -> int:
    if field["type"] == IMAGE:
        return 3
    return field["shape"].count(-1) if field["type"] == ARRAY else 0


def is_column(field: dict[str, Any]) -> bool:
    """Return True if the values of a field are rows of a column, not records."""
    return field["type"] == ARRAY and field["codec"] == 0 and -1 not in field["shape"]


def row_bytes(field: dict[str, Any]) -> int:
    n_items: int = math.prod(field["shape"])
    return ITEM_SIZES[field["dtype"]] * n_items


def stride_of(field: dict[str, Any]) -> int:
    """Bytes from one row of a column to the next."""
    b = row_bytes(field)
    return b if b < 64 else up(b, 64)


def rows_per_unit(field: dict[str, Any]) -> int:
    """Return how many rows of a column share one hash."""
    return 1 if row_bytes(field) >= 2048 else max(1, 65536 // stride_of(field))


def filled(field: dict[str, Any], varying: tuple[int, ...]) -> list[int]:
    rest = iter(varying)
    return [next(rest) if d == -1 else d for d in field["shape"]]


def array_of(
    field: dict[str, Any], shape: list[int], content: bytes
) -> tuple[int, tuple[int, ...], bytes]:
    require(ITEM_SIZES[field["dtype"]] * math.prod(shape) == len(content), "shape")
    return field["dtype"], tuple(shape), content


def list_of(field: dict[str, Any], record: bytes) -> list[Any]:
    (count,) = struct.unpack_from("<Q", record)
    v = field["shape"].count(-1)
    dims = struct.unpack_from(f"<{count * v}Q", record, 8)
    place, found = up(8 + 8 * count * v, 64), []
    for i in range(count):
        shape = filled(field, dims[i * v : (i + 1) * v])
        n_bytes = ITEM_SIZES[field["dtype"]] * math.prod(shape)
        found.append(array_of(field, shape, record[place : place + n_bytes]))
        place += n_bytes
    require(place == len(record), "a list does not account for its bytes")
    return found
