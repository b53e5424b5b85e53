"""What a repair is about: the shards of a dataset, or of what is left of one, and their fields."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardio.dataset.generation import Generation, parse_generation
from shardio.dataset.manifest import GENERATIONS, POINTER, load, load_generation
from shardio.errors import DataError, DatasetCorrupt, DatasetNotFound
from shardio.format.schema import Schema
from shardio.maintenance.mending import schema_of
from shardio.shard.writer import ShardSummary
from shardio.storage.checksummed_json import read_checksummed_json


@dataclass(frozen=True, slots=True)
class Part:
    """A file that samples lie in, and what the generation says of it, if it can be read."""

    path: str
    schema: Schema
    named: ShardSummary | None = None

    @property
    def name(self) -> str:
        """The file's name."""
        return os.path.basename(self.path)


@dataclass(frozen=True, slots=True)
class Patient:
    """What is to be repaired: shards, each with what lies beside it, and the fields of samples.

    `unnamed` are shards that a generation named which cannot be read any more, each with the
    reason why it is given up. Of a `generation` whose list of shards is damaged they are those in
    the folder, and it has none itself.
    """

    shards: tuple[tuple[Part, ...], ...]
    schema: Schema
    generation: Generation | None = None
    unnamed: Mapping[str, str] = field(default_factory=dict)


def admit(source: str) -> Patient:
    """Find out which shards there are, and which fields they have.

    Raises:
        DatasetNotFound, ShardNotFound: there is nothing at `source`.
        DatasetCorrupt: nothing can be told of it, not even the fields.
    """
    if not os.path.isdir(source):
        schema = _schema_of([source])
        return Patient(((Part(source, schema),),), schema)
    root, generation, unnamed = Path(source), None, {}
    with contextlib.suppress(DataError, DatasetNotFound):
        generation = load(root)
    if generation is None and (generation := _last_readable(root)) is not None:
        unnamed = _unnamed(root, generation)
    if generation is not None:
        parts = [Part(os.path.join(source, s.name), schema, s) for s, schema in generation.files]
        n = len(generation.shards)
        shards = tuple(tuple(parts[k::n]) for k in range(n))
        return Patient(shards, generation.whole_schema, generation, unnamed)
    names = sorted(name for name in os.listdir(source) if name.endswith(".shard"))
    if not names:
        raise DatasetNotFound(f"{source}: holds neither a dataset nor any shard")
    paths = [os.path.join(source, name) for name in names]
    generation = _without_shards(root)
    schema = _schema_of(paths) if generation is None else generation.schema
    return Patient(tuple((Part(path, schema),) for path in paths), schema, generation)


def _last_readable(root: Path) -> Generation | None:
    """The last generation that can be read."""
    for number in sorted(_numbers(root), reverse=True):
        with contextlib.suppress(DataError):
            return load_generation(root, number)
    return None


def _without_shards(root: Path) -> Generation | None:
    """What the last generation says besides its lists: those that lie in parts can be damaged."""
    for number in sorted(_numbers(root), reverse=True):
        place = root / GENERATIONS / f"{number:06d}.json"
        with contextlib.suppress(DataError, OSError):
            said = read_checksummed_json(place)
            for key in ("required", "column_groups", "subsets"):
                said.pop(key, None)
            return parse_generation({**said, "shards": [], "inputs": []}, place)
    return None


def _numbers(root: Path) -> set[int]:
    """The numbers of all generations of which there is a file, and the one that is published."""
    files = (root / GENERATIONS).glob("[0-9]*.json")
    numbers = {int(path.stem) for path in files if path.stem.isdecimal()}
    with contextlib.suppress(DataError, OSError):
        published = read_checksummed_json(root / POINTER).get("generation")
        numbers |= {published} if type(published) is int else set()
    return numbers


def _unnamed(root: Path, generation: Generation) -> dict[str, str]:
    """Shards that only generations after this one can have named, and why they are given up."""
    later = [number for number in _numbers(root) if number > generation.number]
    if not later:
        return {}
    names = {name for name in os.listdir(root) if name.endswith(".shard")}
    for number in range(1, generation.number + 1):
        with contextlib.suppress(DataError):
            names -= {shard.name for shard, _ in load_generation(root, number).files}
    reason = (
        f"only generation {min(later)}, or a later one, names it, and those cannot be read: what "
        f"generation {generation.number} has was repaired; shardio repair"
    )
    return {name: f"{reason} {name} saves its samples" for name in sorted(names)}


def _schema_of(paths: list[str]) -> Schema:
    """The schema of the first shard that has one."""
    reason: Exception | None = None
    for path in paths:
        try:
            return schema_of(path)
        except DataError as error:
            reason = reason or error
    raise DatasetCorrupt(f"nothing can be told of the data: {reason}") from reason
