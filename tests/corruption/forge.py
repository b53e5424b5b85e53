"""The one helper of the corruption tests: a small shard, damaged or forged.

Damage changes bytes and nothing else. A forgery breaks one rule and gets all hashes right, so that
only the check of that rule can refuse it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zstandard

from shardio.errors import ShardioError
from shardio.format.checksum import chunk_hashes, hash_bytes, pack_hashes
from shardio.format.codecs import Codec
from shardio.format.layout import NO_FIELD, PAGE, Header, Kind, Section, unpack_header
from shardio.format.schema import Schema
from shardio.format.sections import ENTRY, ENTRY_DTYPE, pack_entry
from shardio.format.types import Array, Audio, Bytes, EncodedImage, Image, Json, List, Text, Video
from shardio.format.types.streams import STREAM_DTYPE, EncodedStream
from shardio.maintenance.verify.shard import verify_bytes
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardWriter
from tests.fuzz.parts import Key, Parts
from tests.shards import made_stream, planes_stream

INDEX: Key = (Kind.INDEX, NO_FIELD, 0)
PAYLOAD: Key = (Kind.PAYLOAD, NO_FIELD, 0)
SCHEMA: Key = (Kind.SCHEMA, NO_FIELD, 0)

SMALL = Schema(
    {
        "vector": Array("float32", (25,), optional=True),  # 100 bytes at a stride of 128
        "points": Array("int16", (None, 2)),
        "boxes": List(Array("uint8", (None, 3))),
        "note": Text(codec="zstd"),
        "meta": Json(),
        "camera.id": Bytes(codec="zstd_dictionary"),
    }
)
"""Every codec, every field type but media, and the sections of those, in as few pages as can be."""

SMALL_VIDEOS = Schema({"video": Video(optional=True)})
SMALL_SOUND = Schema({"sound": Audio(), "image": Image()})

RULES = Schema(
    {
        "long": Array("uint8", (2100,)),
        "flag": Array("bool", (3,)),
        "grid": Array("int32", (8, 8), codec="zstd"),
        "cloud": Array("float64", (None, 2, None)),
        "mask": Array("bool", (None,)),
        "note": Text(),
        "meta": Json(),
        "blob": Bytes(codec="zstd"),
    }
)
"""A field for every rule that a forgery can break."""


def small_samples() -> list[dict[str, Any]]:
    """Return the samples of the small shard, as a reader returns them."""
    return [
        {
            "vector": np.arange(25, dtype=np.float32) + i if i != 1 else None,
            "points": np.arange(6 * i, dtype=np.int16).reshape(-1, 2),
            "boxes": [np.full((k, 3), i, np.uint8) for k in range(2 * i)],
            "note": f"clip {i} " * 9 * i,
            "meta": {"i": i, "ü": [None, 0.5]},
            "camera.id": _camera(i),
        }
        for i in range(3)
    ]


def _camera(i: int) -> bytes:
    return f"camera number {i}, in hall {i * i % 7} on the left, behind door {i % 5}".encode()


def train_small(records: Sequence[memoryview]) -> bytes:
    """Train a dictionary on more records than the small shard has."""
    return zstandard.train_dictionary(512, [_camera(i) * 2 for i in range(200)]).as_bytes()


def small_videos() -> list[dict[str, Any]]:
    """Make samples of SMALL_VIDEOS: of some packets, of none, missing."""
    videos = (made_stream(2, 3, 20), made_stream(1, 0), None)
    return [{"video": video} for video in videos]


def small_planes() -> list[dict[str, Any]]:
    """Make samples of SMALL_VIDEOS: planes that are compressed, that are not, and none."""
    return [{"video": planes_stream(i, 3, gop=2)} for i in range(2)] + [{"video": None}]


def small_sound() -> list[dict[str, Any]]:
    return [
        {"sound": made_stream(i, 3, 20), "image": EncodedImage(b"a picture" * i, i, 4, 1 + i % 4)}
        for i in range(1, 4)
    ]


VICTIMS: dict[str, tuple[Schema, Callable[[], list[dict[str, Any]]]]] = {
    "small": (SMALL, small_samples),
    "videos": (SMALL_VIDEOS, small_videos),
    "planes": (SMALL_VIDEOS, small_planes),
    "sound": (SMALL_SOUND, small_sound),
}
"""Small shards that together have every kind of section, every field type and every codec."""


def everything() -> list[dict[str, Any]]:
    return [
        {name: value for sample in samples for name, value in sample.items()}
        for samples in zip(small_samples(), small_videos(), small_sound(), strict=True)
    ]


EVERYTHING = Schema({**SMALL, **SMALL_VIDEOS, **SMALL_SOUND})
"""All that the victims have, in one shard: of 31 pages, as each table and its hashes take one."""

MEDIA_RULES = Schema(
    {
        "video": Video(),
        "sound": Audio(optional=True),
        "image": Image(),
        "maybe": Image(optional=True),
    }
)
"""A field for every rule of media that a forgery can break."""


def media_rules_samples() -> list[dict[str, Any]]:
    """Make the samples of the media shard to forge; the last video has two chunks."""
    return [
        {
            "video": made_stream(i, 6, 30 if i < 3 else 20_000),
            "sound": made_stream(i, 4, 30) if i != 1 else None,
            "image": EncodedImage(b"a picture", 2 + i, 3, 3),
            "maybe": EncodedImage(b"maybe", 2, 3, 1) if i != 1 else None,
        }
        for i in range(4)
    ]


def rules_samples() -> list[dict[str, Any]]:
    return [
        {
            "long": np.full(2100, i, np.uint8),
            "flag": np.array([True, False, True]),
            "grid": np.full((8, 8), i, np.int32),
            "cloud": np.zeros((i, 2, 3)) + i,
            "mask": np.ones(i, np.bool_),
            "note": f"größer {i}",
            "meta": {"i": i, "of": [1, 2]},
            "blob": b"blob" * 50,
        }
        for i in range(4)
    ]


def content_of(path: Path, schema: Schema, samples: Iterable[dict[str, Any]]) -> bytearray:
    """Return the bytes of a shard of these samples, with a dictionary if it can have one."""
    with mock.patch("shardio.shard.section_writers.train_dictionary", train_small):
        with ShardWriter(path, schema) as writer:
            for sample in samples:
                writer.append(sample)
    content = bytearray(path.read_bytes())
    path.unlink()
    return content


@dataclass
class Forgery:
    """A shard taken apart, by the keys of its sections: change the attributes, then `seal`."""

    header: Header
    sections: dict[Key, Section]
    contents: dict[Key, bytes]
    header_changes: dict[str, Any] = field(default_factory=dict)
    table_changes: dict[Key, dict[str, Any]] = field(default_factory=dict)
    rehash_chunks: bool = True

    @classmethod
    def of(cls, content: bytes | bytearray) -> Forgery:
        parts = Parts.of(bytes(content))
        keys = [section.key for section in parts.sections]
        header = unpack_header(bytes(content[:PAGE]), "shard")
        sections = dict(zip(keys, parts.sections, strict=True))
        return cls(header, sections, dict(zip(keys, parts.contents, strict=True)))

    @property
    def schema(self) -> Schema:
        return Schema.from_json(self.contents[SCHEMA])

    def column(self, name: str, kind: Kind = Kind.COLUMN) -> Key:
        return (kind, self.schema.field_id(name), 0)

    def change(self, key: Key, at: int, new: bytes) -> None:
        old = self.contents[key]
        self.contents[key] = old[:at] + new + old[at + len(new) :]

    def entry(self, name: str, row: int) -> tuple[int, Any]:
        number = row * len(self.schema.records) + list(self.schema.records).index(name)
        return number * ENTRY.size, np.frombuffer(self.contents[INDEX], ENTRY_DTYPE)[number]

    def change_entry(self, name: str, row: int, **changes: int) -> None:
        """Overwrite numbers of an index entry: offset, n_stored, codec, n_bytes, hash_."""
        at, old = self.entry(name, row)
        stored = int(old["stored"])
        numbers = {
            "offset": int(old["offset"]),
            "n_stored": stored & (1 << 48) - 1,
            "codec": stored >> 48,
            "n_bytes": int(old["n_bytes"]),
            "hash_": int(old["hash"]),
            **changes,
        }
        codec: Any = numbers.pop("codec")
        self.change(INDEX, at, pack_entry(codec=codec, **numbers))

    def change_record(self, name: str, row: int, new: bytes, codec: Codec | None = None) -> None:
        """Overwrite a record by one of the same stored size, with the right hash."""
        _, entry = self.entry(name, row)
        n_stored = int(entry["stored"]) & (1 << 48) - 1
        if len(new) != n_stored:
            raise ValueError(f"{len(new)} bytes do not fit in the place of {n_stored}")
        self.change(PAYLOAD, int(entry["offset"]), new)
        changes = {} if codec is None else {"codec": int(codec)}
        self.change_entry(name, row, hash_=hash_bytes(new), **changes)

    def seal(self) -> bytes:
        """Put it together again, with all hashes right but for those that were changed."""
        if self.rehash_chunks:
            self._hash_chunks()
        keys, changes = list(self.sections), self.table_changes
        return Parts(
            self.header.n_samples,
            self.header.required,
            list(self.sections.values()),
            [self.contents[key] for key in keys],
            header=self.header_changes,
            table={i: changes[key] for i, key in enumerate(keys) if key in changes},
        ).seal()

    def _hash_chunks(self) -> None:
        """Rehash the chunks of streams whose first chunk is where it was, and their entries."""
        for name, kind in self.schema.records.items():
            if not kind.is_streamed:
                continue
            key = self.column(name, Kind.CHUNK_HASHES)
            lines = np.frombuffer(self.contents[self.column(name, Kind.STREAMS)], STREAM_DTYPE)
            for row, line in enumerate(lines):
                _, entry = self.entry(name, row)
                start = int(entry["offset"])
                record = self.contents[PAYLOAD][start : start + int(entry["n_bytes"])]
                packed = pack_hashes(chunk_hashes(memoryview(record)))
                at = 8 * int(line["first_chunk"])
                if at + len(packed) <= len(self.contents[key]):
                    self.change(key, at, packed)
                    self.change_entry(name, row, hash_=hash_bytes(packed))


def read_everything(path: Path, verify: Any = "first") -> list[dict[str, Any]] | ShardioError:
    """All samples, or the error of shardio that reading ends with; no other error is caught."""
    try:
        with ShardReader(path, verify=verify) as reader:
            samples = [{n: _whole(value) for n, value in sample.items()} for sample in reader]
            for name in reader.schema.columns:
                reader.column(name, np.arange(len(reader)))
            return samples
    except ShardioError as error:
        return error


def _whole(value: Any) -> Any:
    """Return a value with all of its data, which a stream reads on demand."""
    if isinstance(value, EncodedStream):
        return dataclasses.replace(value, data=bytes(value.data[:]))
    return value


def read_bytes(tmp_path: Path, content: bytes, verify: str = "first") -> Any:
    path = tmp_path / "r.shard"
    path.write_bytes(content)
    return read_everything(path, verify)


def codes_of(content: bytes | bytearray | memoryview) -> list[str]:
    return [finding.code for finding in verify_bytes(memoryview(content), "r.shard").findings]


Change = Callable[[Forgery], None]
