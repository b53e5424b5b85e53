"""A dataset with every field type, and functions that compare its samples."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

import shardio
from shardio import Array, Audio, Bytes, Image, Json, List, Schema, Text, Video
from tests.media_made import scene, write_sound, write_video

N = 7
CLASSES = ("cat", "d\u00f6g")
FIELDS: dict[str, Any] = {
    "x": Array("float32", (2, 3)),
    "moved": Array("int16", (None, 2)),
    "packed": Array("uint8", (3,), "zstd"),
    "big": Array("uint8", (40, 40)),
    "pair": Array("float64", (2,), optional=True),
    "label": Array("int64"),
    "brain": Array("bfloat16", (2,)),
    "text": Text(),
    "note": Text(optional=True),
    "raw": Bytes(),
    "meta": Json(),
    "picture": Image(),
    "mask": Image(optional=True),
    "film": Video(),
    "sound": Audio(optional=True),
    "camera": {"id": Text(), "on": Array("bool", (2,), optional=True)},
    "source": Text(),
    "lines": List(Array("float32", (None, 2))),
    "boxes": List(Array("int64", (3,)), optional=True),
}
PGM = b"P5 2 3 255 abcdef"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000002000000010800000000d14920560000000b49444154789c6364"
    "67000000140009eef237d00000000049454e44ae426082"
)


def sample(i: int, film: bytes, sound: bytes) -> dict[str, Any]:
    """Return the i-th sample."""
    return {
        "x": np.full((2, 3), i / 3, np.float32),
        "moved": np.full((i % 3, 2), i, np.int16),
        "packed": [i, 1, 2],
        "big": np.full((40, 40), i, np.uint8),
        "pair": None if i % 2 else np.array([i, np.nan]),
        "label": i % 3 - 1,
        "brain": np.array([0x3F80 + i, 0xC000], np.uint16),
        "text": f"\u00fc\n{i}\U0001f600",
        "note": None if i % 3 else "",
        "raw": bytes([i, 0, 255]),
        "meta": {"a": [i, None, "\u00df"]} if i else None,
        "picture": PNG if i % 2 else PGM,
        "mask": PNG if i == 2 else None,
        "film": film,
        "sound": sound if i in (1, 4) else None,
        "camera": {"id": "c", "on": None if i == 3 else [True, False]},
        "source": f"cats/../\u00e9 {i // 2}.jpg",
        "lines": [np.full((n, 2), i, np.float32) for n in range(i % 4)],
        "boxes": None if i == 2 else [np.arange(3)] * (i % 3),
    }


def make(folder: Path) -> Path:
    """Write the dataset, in several shards."""
    scratch = folder.with_name(f"{folder.name}-media")
    scratch.mkdir(parents=True)
    write_video(scratch / "a.mp4", scene(5))
    write_sound(scratch / "a.wav")
    film, sound = (scratch / "a.mp4").read_bytes(), (scratch / "a.wav").read_bytes()
    with shardio.DatasetWriter(folder, Schema(FIELDS), shard_bytes=9000, classes=CLASSES) as writer:
        for i in range(N):
            writer.append(sample(i, film, sound))
    return folder


def widen(value: Any) -> Any:
    """Return bfloat16 numbers, given as their bits, as float32."""
    return (np.asarray(value).astype("<u4") << 16).view("<f4")


def same(field: Any, value: Any, found: Any) -> bool:
    """Return True if a value is unchanged after export and conversion back."""
    if value is None or found is None:
        return value is None and found is None
    if isinstance(field, Video | Audio):
        times = [one.packets["pts"] * one.time_base for one in (value, found)]
        return bytes(value.data[:]) == bytes(found.data[:]) and bool((times[0] == times[1]).all())
    if isinstance(field, List):
        return len(value) == len(found) and all(map(equal, value, found))
    if isinstance(field, Array):
        return equal(widen(value) if field.dtype == "bfloat16" else value, found)
    return bool(value == found)


def equal(value: Any, found: Any) -> bool:
    """Return True if two arrays have the same dtype, shape and numbers."""
    one, other = np.asarray(value), np.asarray(found)
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def load_npy(data: bytes) -> Any:
    """Return the array in the bytes of a .npy."""
    return np.load(io.BytesIO(data), allow_pickle=False)
