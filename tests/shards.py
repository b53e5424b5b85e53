"""Schemas and samples that many tests share: one field of every kind, made from a seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from shardio import (
    Array,
    Audio,
    Bytes,
    EncodedStream,
    Image,
    Json,
    List,
    Schema,
    ShardWriter,
    Text,
    Video,
)
from shardio.format.types import EncodedImage
from shardio.format.types.streams import PacketFlag, pack_packets
from shardio.media import PlanesEncoder

EVERY_FIELD = Schema(
    {
        "frames": Array("uint8", (4, 24, 24, 3)),  # 6,912 bytes: a hash per row
        "odd": Array("uint8", (2100,)),  # a hash per row, and padding between rows
        "vector": Array("float32", (25,)),  # 100 bytes: runs of rows, padded
        "label": Array("int64"),
        "tiny": Array("bool", (3,)),
        "bits": Array("bfloat16", (3,)),
        "packed": Array("int32", (16, 16), codec="zstd"),
        "points": Array("int16", (None, 2)),
        "cloud": Array("float64", (None, 3, None), codec="zstd"),
        "blob": Bytes(codec="zstd"),
        "raw": Bytes(),
        "note": Text(),
        "meta": Json(),
        "maybe": Array("float32", (30,), optional=True),
        "hint": Text(optional=True),
        "mask": Array("uint8", (None,), optional=True),
        "tight": Array("int16", (9, 9), codec="zstd", optional=True),
        "boxes": List(Array("float32", (None, 4))),
        "parts": List(Array("uint8", (3,)), codec="zstd", optional=True),
        "camera.id": Text(codec="zstd_dictionary"),
        "camera.lens.focus": Array("float64"),
    }
)


def every_field_sample(i: int) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    return {
        "frames": rng.integers(0, 255, (4, 24, 24, 3), np.uint8),
        "odd": rng.integers(0, 255, 2100, np.uint8),
        "vector": rng.random(25, np.float32),
        "label": i,
        "tiny": np.array([True, i % 2 == 0, False]),
        "bits": rng.integers(0, 1 << 16, 3, np.uint16),
        "packed": np.full((16, 16), i, np.int32) if i % 3 else rng.integers(-9, 9, (16, 16), "i4"),
        "points": rng.integers(-100, 100, (i % 5, 2), np.int16),
        "cloud": np.zeros((i % 3, 3, i % 4)) + i,
        "blob": b"abc" * i,
        "raw": rng.bytes(i % 70),
        "note": f"sample {i}: größer als 名前 " * (i % 3),
        "meta": {"i": i, "tags": ["ü", None, 1.5], "nested": {"b": True}},
        "maybe": rng.random(30, np.float32) if i % 3 else None,
        "hint": f"hint {i}" * (i % 4) if i % 2 else None,
        "mask": np.arange(i % 6, dtype=np.uint8) if i % 5 else None,
        "tight": np.full((9, 9), i, np.int16) if i % 4 else None,
        "boxes": [rng.random((k, 4), np.float32) for k in range(i % 4)],
        "parts": [np.full(3, i % 256, np.uint8)] * (i % 9) if i % 8 else None,
        "camera.id": f"camera number {i % 10}, in the hall on the left, behind the door",
        "camera.lens.focus": i / 8,
    }


def samples(n: int) -> Iterator[dict[str, Any]]:
    return (every_field_sample(i) for i in range(n))


MEDIA_FIELDS = Schema(
    {
        "video": Video(),
        "image": Image(optional=True),
        "label": Array("int64"),
        "sound": Audio(optional=True),
        "note": Text(codec="zstd"),
    }
)


def made_stream(i: int, n_packets: int = 12, mean_bytes: int = 40) -> EncodedStream:
    """Make a stream of packets that no decoder would take.

    Every fourth is a key, the second hidden.
    """
    rng = np.random.default_rng(i)
    sizes = rng.integers(1, 2 * mean_bytes, n_packets)
    flags = np.where(np.arange(n_packets) % 4, PacketFlag.DISPOSABLE, PacketFlag.KEY)
    flags[1:2] |= PacketFlag.HIDDEN
    return EncodedStream(
        parameters={"codec": "h264", "ü": [1, None]},
        extradata=b"extra" * (i % 3),
        packets=pack_packets(sizes, flags, 512 * np.arange(n_packets) - 1024, [512] * n_packets),
        data=rng.bytes(int(sizes.sum())),
        time_base=Fraction(1, 12_800),
        n_frames=n_packets - (n_packets > 1),
        width=64 + i,
        height=48,
        duration=512 * n_packets,
    )


def planes_stream(i: int, n_frames: int, **options: Any) -> EncodedStream:
    """Make a small video of planes; if `i` is odd, its pictures are noise."""
    rng, (height, width) = np.random.default_rng(i), (6 + 2 * i, 8)
    encoder = PlanesEncoder(width, height, Fraction(1, 25), **options)
    for n in range(n_frames):
        noise = rng.integers(0, 256, (height * 3 // 2, width), np.uint8)
        encoder.add(n, noise if i % 2 else np.full_like(noise, 16 + n))
    return encoder.finish()


def media_sample(i: int, mean_bytes: int = 40) -> dict[str, Any]:
    return {
        "video": made_stream(i, 5 + i % 9, mean_bytes),
        "image": EncodedImage(b"a picture" * (1 + i), 30 + i, 40, 1 + i % 4) if i % 3 else None,
        "label": i,
        "sound": made_stream(100 + i, 3 + i % 2, mean_bytes) if i % 4 else None,
        "note": f"sample {i} " * (i % 5),
    }


def flip(path: str | Path, *places: int, mask: int = 1) -> None:
    """Change a byte of a file at each of these offsets."""
    with open(path, "r+b") as file:
        for at in places:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ mask]))


def write_media(
    path: Path, n: int, schema: Schema = MEDIA_FIELDS, mean_bytes: int = 40
) -> list[dict[str, Any]]:
    """Write n samples of MEDIA_FIELDS, cut down to the fields of `schema`; returns them as read."""
    made = [media_sample(i, mean_bytes) for i in range(n)]
    made = [{name: sample[name] for name in schema} for sample in made]
    write_samples(path, schema, made)
    return [as_read(sample, schema) for sample in made]


def write_shard(path: Path, n: int, schema: Schema = EVERY_FIELD) -> Path:
    """Write n samples of EVERY_FIELD, cut down to the fields of `schema`."""
    return write_samples(path, schema, ({name: s[name] for name in schema} for s in samples(n)))


def write_samples(path: Path, schema: Schema, made: Iterable[Mapping[str, Any]]) -> Path:
    """Write samples to a shard; return its path."""
    with ShardWriter(path, schema) as writer:
        for sample in made:
            writer.append(sample)
    return path


def same_value(a: Any, b: Any) -> bool:
    """Return True if two values of a sample are equal, in dtype and shape too."""
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, EncodedStream) and isinstance(b, EncodedStream):
        names = [field.name for field in fields(EncodedStream)]
        return all(same_value(_plain(a, name), _plain(b, name)) for name in names)
    if isinstance(a, EncodedImage) and isinstance(b, EncodedImage):
        return a.shape == b.shape and bytes(a) == bytes(b)
    return type(a) is type(b) and bool(a == b)


def _plain(stream: EncodedStream, name: str) -> Any:
    return bytes(stream.data[:]) if name == "data" else getattr(stream, name)


def same_in_batch(found: Any, expected: Any) -> bool:
    """Return True if a batch has this value of a sample; an absent one is zeros or None."""
    if expected is None:
        return found is None or (isinstance(found, np.ndarray) and not found.any())
    return same_value(found, expected)


def same_sample(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(same_value(a[name], b[name]) for name in a)


def as_read(sample: Mapping[str, Any], schema: Schema = EVERY_FIELD) -> dict[str, Any]:
    """Return a sample given to a writer in the form that a reader returns."""
    return {
        name: np.asarray(value, field.numpy)[()]
        if isinstance(field := schema[name], Array) and value is not None
        else value
        for name, value in sample.items()
    }
