"""The sound shards and documents that a fuzzer begins with: small, of every kind."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardio import Array, Bytes, Json, List, Schema, ShardWriter, Text
from shardio.dataset.external_lists import ShardList, pack_inputs
from shardio.dataset.generation import ColumnGroup, describe_column_group
from shardio.shard.writer import ShardSummary
from tests.corruption import forge
from tests.shards import MEDIA_FIELDS, media_sample

_FIXED: Final = Schema({"image": Array("uint8", (40, 60)), "flag": Array("bool", (2,))})
_TEXTS: Final = Schema({"note": Text(codec="zstd"), "meta": Json(codec="zstd"), "raw": Bytes()})
_CLOUDS: Final = Schema(
    {"cloud": Array("float32", (None, 2, None), codec="zstd"), "mask": Array("bool", (None,))}
)
_MAYBE: Final = Schema(
    {
        "image": Array("uint8", (9, 9), optional=True),
        "flag": Array("bool", optional=True),
        "hint": Text(codec="zstd", optional=True),
        "parts": List(Array("float32", (2,)), codec="zstd", optional=True),
        "boxes": List(Array("bool", (None, None))),
    }
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


def _maybe_samples(n: int) -> list[dict[str, Any]]:
    return [
        {
            "image": np.full((9, 9), i, np.uint8) if i % 2 else None,
            "flag": None if i % 2 else True,
            "hint": "a hint " * 9 * i if i % 3 else None,
            "parts": [np.ones(2, "f4")] * i if i else None,
            "boxes": [np.ones((k, 2), np.bool_) for k in range(i)],
        }
        for i in range(n)
    ]


def shard_of(folder: Path, schema: Schema, samples: Iterable[dict[str, Any]]) -> bytes:
    return bytes(forge.content_of(folder / "seed.shard", schema, samples))


@functools.cache
def shards() -> dict[str, bytes]:
    """Sound shards by name. Not larger than they must be: an input costs what it weighs."""
    wanted: dict[str, tuple[Schema, list[dict[str, Any]]]] = {
        "small": (forge.SMALL, forge.small_samples()[:2]),
        "rules": (forge.RULES, forge.rules_samples()[:2]),
        "fixed": (_FIXED, _fixed_samples(3)),
        "texts": (_TEXTS, _text_samples(2)),
        "maybe": (_MAYBE, _maybe_samples(4)),
        "clouds": (_CLOUDS, _cloud_samples(3)),
        "media": (MEDIA_FIELDS, [media_sample(i, 20) for i in range(5)]),
        "videos": (forge.SMALL_VIDEOS, forge.small_videos()),
        "planes": (forge.SMALL_VIDEOS, forge.small_planes()),
        "empty": (forge.SMALL, []),
        "one-text": (Schema({"a": Text()}), [{"a": "ä"}]),
        "many-rows": (Schema({"a": Array("int8"), "b": Bytes()}), [{"a": 1, "b": b"b"}] * 150),
    }
    with tempfile.TemporaryDirectory() as folder:
        return {name: shard_of(Path(folder), *made) for name, made in wanted.items()}


def beside(folder: Path, n_samples: Iterable[int]) -> dict[str, Any]:
    """Write shards of an added field beside those of so many samples; what a generation says."""
    side = Schema({"deep.er": Text(codec="zstd", optional=True)})
    shards = []
    for k, n in enumerate(n_samples):
        with ShardWriter(folder / f"beside-{k}.shard", side) as writer:
            for i in range(n):
                writer.append({"deep.er": None if i % 2 else f"{i}" * 90})
            shards.append(writer.close())
    return {
        "column_groups": [describe_column_group(ColumnGroup(side, ShardList.of(shards)), {})],
        "required": ["column_groups"],
    }


N_IN_PARTS: Final = 3


def parts() -> tuple[bytes, bytes]:
    """Return the content of an external list of shards, and of one of inputs."""
    shards = [ShardSummary(f"größe {i}.shard", i, 4096, f"{i:032x}") for i in range(N_IN_PARTS)]
    inputs = [
        {"path": f"a/{i}", "outcome": "converted", "samples": i, "detail": {"ü": [0.5, None]}}
        for i in range(N_IN_PARTS)
    ]
    return ShardList.of(shards).content, pack_inputs(inputs)
