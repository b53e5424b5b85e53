"""dataset.json and its generations: the only commit point of a dataset.

A generation is created exclusively under its number, then `dataset.json` is renamed to point to
it: two concurrent writers cannot lose one another's work. Both files are JSON in one canonical
form with a digest of the rest inside, so that a change of any byte shows. Nothing that is
published is ever modified.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardio.errors import (
    DatasetConflict,
    DatasetCorrupt,
    DatasetExists,
    DatasetNotFound,
    InvalidArgument,
    SchemaError,
    ShardUnsupported,
)
from shardio.format.checksum import hash_bytes
from shardio.format.layout import MAJOR, MINOR
from shardio.format.schema import Schema
from shardio.opening import MAX_SAMPLES
from shardio.sealed import read_sealed, sealed, write_sealed
from shardio.version import __version__
from shardio.writer import ShardSummary

POINTER: Final = "dataset.json"
GENERATIONS: Final = "generations"
_FORMAT: Final = "shardio dataset"
_VERSION: Final = 1
_VIEW: Final = {"kind": "rows"}
_MAX_NUMBER: Final = 999_999
_MAX_BYTES: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Generation:
    """One published state of a dataset. Immutable.

    `inputs` are what a conversion looked at, each with its outcome; `converter` is the name,
    versions and those options that change the data; neither holds absolute paths, times or hosts.
    """

    number: int
    lineage: str
    schema: Schema
    shards: tuple[ShardSummary, ...]
    classes: tuple[str, ...] = ()
    inputs: tuple[Mapping[str, Any], ...] = ()
    converter: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.n_samples for shard in self.shards)


def lineage_of(schema: Schema, shards: Sequence[ShardSummary]) -> str:
    """The lineage that a first generation founds: a hash of its schema and its shards' ids."""
    ids = b"".join(bytes.fromhex(shard.id) for shard in shards)
    return f"{hash_bytes(schema.to_json() + ids):016x}"


def holds_dataset(folder: str | os.PathLike[str]) -> bool:
    """Whether a dataset is published in `folder`."""
    return (Path(folder) / POINTER).exists()


def refuse_existing(folder: str | os.PathLike[str], *, but: str = "") -> None:
    """Make sure that a new dataset can be made in `folder`: it is missing or empty.

    Args:
        but: the name of an entry that may be there.

    Raises:
        DatasetExists: it is a file, or holds anything.
    """
    path = Path(folder)
    if path.is_dir():
        if holds_dataset(path):
            raise DatasetExists(f"{path}: already holds a dataset; choose another folder")
        if found := sorted({*os.listdir(path)} - {but}):
            raise DatasetExists(
                f"{path}: already holds data ({found[0]}, {len(found)} entries in all); "
                "choose another folder"
            )
    elif os.path.lexists(path):
        raise DatasetExists(f"{path}: is a file; a dataset is a folder")


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Class names as they are kept.

    Raises:
        InvalidArgument: they are no names, or one comes twice.
    """
    if not isinstance(classes, list | tuple) or not all(isinstance(n, str) for n in classes):
        raise InvalidArgument(f"classes must be a list of names; found {classes!r}")
    if twice := [name for name, n in Counter(classes).items() if n > 1]:
        raise InvalidArgument(f"classes must differ; {', '.join(map(repr, twice))} comes twice")
    return tuple(classes)


def publish(
    folder: str | os.PathLike[str],
    *,
    schema: Schema,
    shards: Sequence[ShardSummary],
    classes: Sequence[str] = (),
    inputs: Sequence[Mapping[str, Any]] = (),
    converter: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Generation:
    """Publish the first generation of a dataset whose shards lie finished in `folder`.

    Raises:
        DatasetConflict: another writer published in this folder meanwhile.
        InvalidArgument: a class name is no string.
        SchemaError: something given is nothing that JSON can say.
        OSError: the disk refuses; nothing is published.
    """
    generation = Generation(
        number=1,
        lineage=lineage_of(schema, shards),
        schema=schema,
        shards=tuple(shards),
        classes=check_classes(classes),
        inputs=tuple(inputs),
        converter=dict(converter or {}),
        versions={"shardio": __version__, **(versions or {})},
    )
    root = Path(folder)
    pointer = {
        "format": _FORMAT,
        "version": _VERSION,
        "generation": generation.number,
        "lineage": generation.lineage,
    }
    _publish(root, generation.number, sealed(_describe(generation)), sealed(pointer))
    return generation


def _publish(root: Path, number: int, generation: bytes, pointer: bytes) -> None:
    """Write both files, or neither."""
    place = root / GENERATIONS / f"{number:06d}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        try:
            write_sealed(place, generation, exclusive=True)
        except FileExistsError as error:
            raise DatasetConflict(
                f"{root}: generation {number} is there already: another writer published first, "
                "and nothing of theirs was changed; choose another folder"
            ) from error
        try:
            write_sealed(root / POINTER, pointer, exclusive=False)
        except BaseException:
            if not holds_dataset(root):
                place.unlink()
            raise
    except BaseException:
        with contextlib.suppress(OSError):  # somebody's generation is there
            place.parent.rmdir()
        raise


def withdraw(folder: str | os.PathLike[str], lineage: str) -> None:
    """Remove the first generation of a dataset that was never published, if it founds `lineage`."""
    root = Path(folder)
    with contextlib.suppress(DatasetCorrupt, ShardUnsupported, OSError):
        if load_generation(root, 1).lineage == lineage:
            (root / GENERATIONS / "000001.json").unlink()
    with contextlib.suppress(OSError):  # not there, or somebody's
        (root / GENERATIONS).rmdir()


def load(folder: str | os.PathLike[str]) -> Generation:
    """Read the generation that `dataset.json` points to.

    Raises:
        DatasetNotFound: there is none here.
        DatasetCorrupt: a file is damaged, or breaks a rule.
        ShardUnsupported: it was written by a newer version.
    """
    root = Path(folder)
    pointer_path = root / POINTER
    if not root.is_dir():
        raise DatasetNotFound(f"{root}: there is no such folder")
    if not pointer_path.exists():
        raise DatasetNotFound(f"{root}: holds no {POINTER}: not a dataset, or never finished")
    pointer = read_sealed(pointer_path)
    if pointer.get("format") != _FORMAT:
        raise DatasetCorrupt(f"{pointer_path}: expected format {_FORMAT!r}")
    if pointer.get("version") != _VERSION:
        raise ShardUnsupported(
            f"{pointer_path}: version {pointer.get('version')!r}, this shardio reads {_VERSION}"
        )
    number = pointer.get("generation")
    if type(number) is not int or not 1 <= number <= _MAX_NUMBER:
        raise DatasetCorrupt(
            f"{pointer_path}: expected a generation from 1 to {_MAX_NUMBER}, found {number!r}"
        )
    generation = load_generation(root, number)
    if generation.lineage != pointer.get("lineage"):
        raise DatasetCorrupt(
            f"{pointer_path}: expected lineage {generation.lineage} of generation {number}, "
            f"found {pointer.get('lineage')!r}"
        )
    return generation


def load_generation(folder: str | os.PathLike[str], number: int) -> Generation:
    """Read a generation by its number, whether or not it is the published one.

    Raises:
        DatasetCorrupt: it is missing, damaged, or breaks a rule.
        ShardUnsupported: it was written by a newer version.
    """
    place = Path(folder) / GENERATIONS / f"{number:06d}.json"
    if not place.exists():
        raise DatasetCorrupt(f"{place}: generation {number} is missing")
    generation = _parse(read_sealed(place), place)
    if generation.number != number:
        raise DatasetCorrupt(f"{place}: says that it is generation {generation.number}")
    return generation


def _describe(generation: Generation) -> dict[str, Any]:
    return {
        "format_version": f"{MAJOR}.{MINOR}",
        "generation": generation.number,
        "lineage": generation.lineage,
        "schema": json.loads(generation.schema.to_json()),
        "shards": [
            {"name": s.name, "samples": s.n_samples, "bytes": s.n_bytes, "id": s.id}
            for s in generation.shards
        ],
        "classes": list(generation.classes),
        "inputs": [dict(entry) for entry in generation.inputs],
        "converter": dict(generation.converter),
        "versions": dict(generation.versions),
        "view": _VIEW,
    }


def _parse(content: dict[str, Any], place: Path) -> Generation:
    _check_readable(content, place)
    _check_kinds(content, place)
    try:
        shards = tuple(_parse_shard(entry, place) for entry in content["shards"])
        raw = json.dumps(
            content["schema"], ensure_ascii=False, sort_keys=True, separators=(",", ":")
        )
        generation = Generation(
            number=content["generation"],
            lineage=content["lineage"],
            schema=Schema.from_json(raw.encode()),
            shards=shards,
            classes=tuple(content["classes"]),
            inputs=tuple(content["inputs"]),
            converter=content["converter"],
            versions=content["versions"],
        )
    except (KeyError, TypeError, SchemaError) as error:
        raise DatasetCorrupt(f"{place}: not a generation: {error!r}") from error
    except ShardUnsupported as error:
        raise ShardUnsupported(f"{place}: {error}") from error
    if len({shard.name for shard in shards}) != len(shards):
        raise DatasetCorrupt(f"{place}: a shard is named twice")
    if generation.n_samples > MAX_SAMPLES:
        raise DatasetCorrupt(f"{place}: {generation.n_samples} samples; at most 2^48 are possible")
    return generation


def _check_readable(content: dict[str, Any], place: Path) -> None:
    """Make sure that this version knows what a later one may have written."""
    wanted, view = content.get("format_version"), content.get("view")
    major = wanted.partition(".")[0] if isinstance(wanted, str) else ""
    if not (major.isascii() and major.isdigit()):
        raise DatasetCorrupt(f"{place}: {wanted!r} is no version of the format")
    if int(major) != MAJOR:
        raise ShardUnsupported(f"{place}: format {wanted}, this shardio reads {MAJOR}")
    if view != _VIEW:
        raise ShardUnsupported(f"{place}: view {view!r}, this shardio reads {_VIEW}")


def _check_kinds(content: dict[str, Any], place: Path) -> None:
    """Make sure that every entry is of the JSON type that it must have."""
    kinds = {"generation": int, "lineage": str, "shards": list, "classes": list, "inputs": list}
    for key, kind in {**kinds, "converter": dict, "versions": dict}.items():
        if type(content.get(key)) is not kind:  # exactly: true is an int, too
            raise DatasetCorrupt(
                f"{place}: {key!r} must be a {kind.__name__}; found {content.get(key)!r}"
            )
    for key, kind in (("classes", str), ("inputs", dict)):
        if not all(isinstance(entry, kind) for entry in content[key]):
            raise DatasetCorrupt(f"{place}: every entry of {key!r} must be a {kind.__name__}")
    for i, entry in enumerate(content["inputs"]):
        # The last two are left out where there is nothing to say.
        texts = [entry.get("path"), entry.get("outcome"), entry.get("reason", "")]
        n_samples = entry.get("samples", 0)
        if not all(isinstance(text, str) for text in texts) or type(n_samples) is not int:
            raise DatasetCorrupt(
                f"{place}: input {i} must have texts 'path' and 'outcome', and only a text as "
                f"'reason' and a count as 'samples'; found {entry!r}"
            )
    if not isinstance(options := content["converter"].get("options", {}), dict):
        raise DatasetCorrupt(f"{place}: the converter's options must be a dict; found {options!r}")


def _parse_shard(entry: dict[str, Any], place: Path) -> ShardSummary:
    name, counts = entry["name"], (entry["samples"], entry["bytes"])
    inside = isinstance(name, str) and name.endswith(".shard") and os.path.basename(name) == name
    if not inside or "\0" in name:
        raise DatasetCorrupt(f"{place}: {name!r} is no name of a shard in the dataset's folder")
    if any(type(n) is not int or not 0 <= n <= _MAX_BYTES for n in counts):
        raise DatasetCorrupt(f"{place}: shard {name}: samples and bytes must be counts")
    if not isinstance(entry["id"], str):
        raise DatasetCorrupt(f"{place}: shard {name}: expected an id, found {entry['id']!r}")
    return ShardSummary(name, entry["samples"], entry["bytes"], entry["id"])
