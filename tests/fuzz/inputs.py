"""Inputs without end: target, family of change, and bytes. A seed gives the same ones again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, Final

import zstandard

from shardio.format.types.text import canonical_json
from shardio.storage.fs import to_checksummed_json
from tests.fuzz import seeds
from tests.fuzz.converting import make_input
from tests.fuzz.judge import Target
from tests.fuzz.mutate import ShardMutator, change_bytes, change_json, dumped
from tests.fuzz.targets import SEPARATOR, DatasetFolder

_SHARES: Final = {
    "shard": 10,
    "dataset": 3,
    "schema": 2,
    "record": 3,
    "labels": 1,
    "journal": 1,
    "part": 1,
    "converter": 4,
}
"""The relative frequency of each target."""
_RECORDS: Final = (b"", b"text", "süß".encode(), b'{"a":[1,2.5,null],"b":{}}', b"\1\0\1", bytes(24))


class Inputs:
    """Makes inputs for `targets`; with `only`, for one of them."""

    def __init__(self, targets: dict[str, Target], seed: int, only: str | None = None) -> None:
        self._rng = random.Random(seed)
        names = [only] if only else list(_SHARES)
        self._names = [name for name in names for _ in range(_SHARES[name])]
        self._shards = ShardMutator(seeds.shards())
        dataset = targets["dataset"]
        if not isinstance(dataset, DatasetFolder):
            raise TypeError("the dataset's documents are those of its target")
        self._documents = dataset.pointer, dataset.generation
        self._schemas = [json.loads(s.to_json()) for s in self._shards.schemas]

    def __iter__(self) -> Iterator[tuple[str, str, bytes]]:
        while True:
            name = self._rng.choice(self._names)
            make = self._shards.make if name == "shard" else getattr(self, f"_{name}")
            family, content = make(self._rng)
            yield name, family, content

    def _dataset(self, rng: random.Random) -> tuple[str, bytes]:
        pointer, generation = self._documents
        if rng.random() < 0.3:
            pointer = change_json(rng, pointer)
        else:
            generation = change_json(rng, generation)
            if isinstance(generation, dict) and rng.random() < 0.5:  # else refused at once
                pointer = {**pointer, "lineage": generation.get("lineage")}
        files = [with_digest(rng, pointer), with_digest(rng, generation)]
        if rng.random() < 0.2:
            i = rng.randrange(2)
            files[i] = change_bytes(rng, files[i])
        return "documents", SEPARATOR.join(files)

    def _schema(self, rng: random.Random) -> tuple[str, bytes]:
        value = rng.choice(self._schemas)
        for _ in range(rng.randint(1, 3)):
            value = change_json(rng, value)
        return "schemas", dumped(rng, value)

    def _record(self, rng: random.Random) -> tuple[str, bytes]:
        content = rng.choice(_RECORDS)
        if rng.random() < 0.3:
            content = dumped(rng, change_json(rng, {"a": [1, 2.5, None], "b": {"ä": "\0"}}))
        elif rng.random() < 0.7:
            content = change_bytes(rng, content)
        codec = rng.randrange(2)
        if codec:
            sized = rng.random() < 0.9
            content = zstandard.ZstdCompressor(write_content_size=sized).compress(content * 9)
            content = change_bytes(rng, content) if rng.random() < 0.6 else content
        return "values", bytes([rng.randrange(256), codec]) + content

    def _labels(self, rng: random.Random) -> tuple[str, bytes]:
        if rng.random() < 0.5:
            return "labels", b"\0" + change_bytes(rng, _CSV)
        lines = change_json(rng, rng.choice(_LINES))
        entries = lines if isinstance(lines, list) else [lines]
        return "labels", b"\1" + b"\n".join(dumped(rng, entry) for entry in entries)

    def _converter(self, rng: random.Random) -> tuple[str, bytes]:
        return "files", make_input(rng)

    def _journal(self, rng: random.Random) -> tuple[str, bytes]:
        which = rng.randrange(2)
        content = with_digest(rng, change_json(rng, (_PLAN, _RECORD)[which]))
        return "journal", bytes([which]) + content

    def _part(self, rng: random.Random) -> tuple[str, bytes]:
        which = rng.randrange(2)
        content = seeds.parts()[which]
        count = seeds.N_IN_PARTS if rng.random() < 0.9 else rng.randrange(256)
        return "parts", bytes([which, count]) + change_bytes(rng, content)


_LINES: Final = (
    [{"path": "a/1.mp4", "label": "cat"}, {"path": "b/ü.mp4", "label": 7, "more": [1]}],
    [{"path": str(i), "label": str(i)} for i in range(9)],
)
_CSV: Final = b'path,label,"more, of it"\na/1.mp4,cat,\n"b\n2",,x\n./c,7,\n'
_PLAN: Final = {
    "version": 2,
    "settings": {"machine": "x86_64", "converter": {"options": {"size": [1]}}},
    "units": ["0", "1"],
    "replaces": False,
    "appends": False,
}
_RECORD: Final = {
    "inputs": [{"outcome": "broken", "reason": "why", "detail": {}, "samples": 0, "hash": ""}],
    "shards": [{"name": "a.shard", "samples": 1, "bytes": 4096, "id": "00"}],
    "stopped": False,
}


def with_digest(rng: random.Random, value: Any) -> bytes:
    """Return a document with the right digest, wherever it can have one."""
    if not isinstance(value, dict) or "digest" in value or rng.random() < 0.05:
        return dumped(rng, value)
    try:
        canonical_json(value)
        return to_checksummed_json(value)
    except ValueError:  # a surrogate
        return dumped(rng, value)
