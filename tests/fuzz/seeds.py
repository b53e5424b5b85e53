"""The sound shards and documents that a fuzzer begins with: small, of every kind."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardio.format.schema import Array, Bytes, Json, Schema, Text
from shardio.writer import ShardWriter
from tests.corruption.forge import RULES, SMALL, rules_samples, small_samples

_FIXED: Final = Schema({"image": Array("uint8", (40, 60)), "flag": Array("bool", (2,))})
_TEXTS: Final = Schema({"note": Text(codec="zstd"), "meta": Json(codec="zstd"), "raw": Bytes()})
_CLOUDS: Final = Schema(
    {"cloud": Array("float32", (None, 2, None), codec="zstd"), "mask": Array("bool", (None,))}
)


def _fixed_samples(n: int) -> list[dict[str, Any]]:
    return [
        {"image": np.full((40, 60), i, np.uint8), "flag": np.array([i % 2 == 0, True])}
        for i in range(n)
    ]


def _text_samples(n: int) -> list[dict[str, Any]]:
    return [
        {"note": f"größer {i} " * 20, "meta": {"i": [i] * 40, "of": None}, "raw": b"\xff" * i}
        for i in range(n)
    ]


def _cloud_samples(n: int) -> list[dict[str, Any]]:
    return [{"cloud": np.ones((i, 2, 9), "f4"), "mask": np.ones(i, np.bool_)} for i in range(n)]


def shard_of(folder: Path, schema: Schema, samples: Iterable[dict[str, Any]]) -> bytes:
    """The bytes of a shard of these samples."""
    path = folder / "seed.shard"
    with ShardWriter(path, schema) as writer:
        for sample in samples:
            writer.append(sample)
    content = path.read_bytes()
    path.unlink()
    return content


@functools.cache
def shards() -> dict[str, bytes]:
    """Sound shards by name. Not larger than they must be: an input costs what it weighs."""
    wanted: dict[str, tuple[Schema, list[dict[str, Any]]]] = {
        "small": (SMALL, small_samples()[:2]),
        "rules": (RULES, rules_samples()[:2]),
        "fixed": (_FIXED, _fixed_samples(3)),
        "texts": (_TEXTS, _text_samples(2)),
        "clouds": (_CLOUDS, _cloud_samples(3)),
        "empty": (SMALL, []),
        "one-text": (Schema({"a": Text()}), [{"a": "ä"}]),
        "many-rows": (Schema({"a": Array("int8"), "b": Bytes()}), [{"a": 1, "b": b"b"}] * 150),
    }
    with tempfile.TemporaryDirectory() as folder:
        return {name: shard_of(Path(folder), *made) for name, made in wanted.items()}
