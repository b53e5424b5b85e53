"""A typed program: the options of `convert` depend on the kind."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, assert_type

import numpy as np

import shardio
from shardio import Array, Converter, Input, Outcome, Schema, Text
from shardio.conversion import ConversionReport, StoreChoice


@dataclass(frozen=True)
class Lines(Converter):
    min_length: int = 1

    def schema(self) -> Schema:
        return Schema({"text": Text()})

    def samples(self, source: Input) -> Generator[dict[str, Any], None, Outcome]:
        yield {"text": source.name}
        return Outcome("converted")


def files(kind: str, options: dict[str, Any]) -> None:
    found = shardio.convert("videos/", "clips/", frames=8, size=32, workers=2)
    assert_type(found, ConversionReport)
    shardio.convert("videos/", "clips/", kind="videos", frames=8, fps="30000/1001", audio=True)
    chosen = shardio.convert("videos/", "clips/", store="auto", disk=200 * 10**9, rate=2000)
    assert_type(chosen.choice, StoreChoice | None)
    shardio.convert("images/", "out/", kind="images", store="pixels", size=64, quality=90)
    shardio.convert("arrays/", "out/", kind="arrays", rows=True, fields={"x": "float32[3]"})
    shardio.convert("sound/", "out/", kind="audio", labels="labels.csv", overwrite=True)
    shardio.convert("tokens/", "out/", kind="tokens", dtype="uint16", eot=0)
    shardio.convert("tables/", "out/", kind="arrow", columns=["x"], append=True)
    assert_type(shardio.convert("x/", "out/", kind=kind, on_error="stop"), ConversionReport)
    assert_type(shardio.convert("x/", "out/", kind="videos", **options), ConversionReport)


def third_party(options: dict[str, Any]) -> None:
    """Pass the class, or a dict: a type checker cannot know the options of a name."""
    report = shardio.convert("notes/", "out/", kind=Lines, min_length=3, workers=0)
    assert_type(report.n_samples, int)
    shardio.convert("notes/", "out/", kind="lines", resume=True)
    shardio.convert("notes/", "out/", kind="lines", **options)


def objects() -> None:
    rows = ({"x": np.zeros(3), "y": i} for i in range(10))
    shardio.convert(rows, "numbers/", schema=Schema({"x": Array("float32", (3,))}))
    shardio.convert(range(10), "items/", samples=lambda i: {"y": i}, names=["y"], workers=0)
