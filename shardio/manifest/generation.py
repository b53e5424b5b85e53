"""A generation: one published state of a dataset, and the JSON that it is written down as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardio.errors import DatasetCorrupt, InvalidArgument, SchemaError, ShardUnsupported
from shardio.format.checksum import hash_bytes
from shardio.format.layout import MAJOR, MINOR
from shardio.format.schema import Schema
from shardio.manifest.default_view import ROWS, is_known, why_wrong
from shardio.manifest.listing import (
    Side,
    describe_schema,
    describe_shards,
    describe_side,
    is_hex,
    parse_schema,
    parse_shards,
    parse_sides,
    whole_schema,
)
from shardio.opening import MAX_SAMPLES
from shardio.views import RowRuns
from shardio.writer import ShardSummary

_SIDE_COLUMNS: Final = "side_columns"
"""What a reader must know to read a generation that has sides."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One published state of a dataset. Immutable.

    `inputs` are what a conversion looked at, each with its outcome; `converter` is the name,
    versions and those options that change the data; neither holds absolute paths, times or hosts.
    `subsets` are named parts of the rows, `stats` what was counted of them, and `surgery` says
    what made this generation of an earlier one: its name and its options. `schema` is that of
    `shards`; `sides` are columns that were added later, in the order in which they were. `view` is
    what the samples of a loader are unless it is asked for others: see `default_view`.
    """

    number: int
    lineage: str
    schema: Schema
    shards: tuple[ShardSummary, ...]
    classes: tuple[str, ...] = ()
    inputs: tuple[Mapping[str, Any], ...] = ()
    converter: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    subsets: Mapping[str, RowRuns] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    surgery: Mapping[str, Any] = field(default_factory=dict)
    sides: tuple[Side, ...] = ()
    view: Mapping[str, Any] = field(default_factory=lambda: ROWS)

    @property
    def whole_schema(self) -> Schema:
        """The fields of its samples: those of the shards, then the added ones."""
        return whole_schema(self.schema, self.sides)

    @property
    def files(self) -> tuple[tuple[ShardSummary, Schema], ...]:
        """Every shard with its schema: `shards`, then those of each side, in the same order."""
        groups = [(self.schema, self.shards), *((s.schema, s.shards) for s in self.sides)]
        return tuple((shard, schema) for schema, shards in groups for shard in shards)

    @property
    def n_samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.n_samples for shard in self.shards)


def lineage_of(schema: Schema, shards: Sequence[ShardSummary]) -> str:
    """The lineage that a first generation founds: a hash of its schema and its shards' ids."""
    ids = b"".join(bytes.fromhex(shard.id) for shard in shards)
    return f"{hash_bytes(schema.to_json() + ids):016x}"


def describe(generation: Generation) -> dict[str, Any]:
    """The generation as JSON can say it; what only some have is left out where there is none."""
    content = {
        "format_version": f"{MAJOR}.{MINOR}",
        "generation": generation.number,
        "lineage": generation.lineage,
        "schema": describe_schema(generation.schema),
        "shards": describe_shards(generation.shards),
        "classes": list(generation.classes),
        "inputs": [dict(entry) for entry in generation.inputs],
        "converter": dict(generation.converter),
        "versions": dict(generation.versions),
        "view": dict(generation.view),
    }
    subsets = {
        name: {"samples": len(rows), "rows": rows.to_text()}
        for name, rows in generation.subsets.items()
    }
    extras = {
        "subsets": subsets,
        "stats": dict(generation.stats),
        "surgery": dict(generation.surgery),
        "sides": [describe_side(side) for side in generation.sides],
        "required": [_SIDE_COLUMNS] if generation.sides else [],
    }
    return content | {key: value for key, value in extras.items() if value}


def parse(content: dict[str, Any], place: Path) -> Generation:
    """The generation that `describe` wrote down; `place` is for messages.

    Raises:
        DatasetCorrupt: it breaks a rule.
        ShardUnsupported: it was written by a newer version.
    """
    _check_readable(content, place)
    _check_kinds(content, place)
    try:
        shards = parse_shards(content["shards"], place)
        generation = Generation(
            number=content["generation"],
            lineage=content["lineage"],
            schema=parse_schema(content["schema"]),
            shards=shards,
            classes=tuple(content["classes"]),
            inputs=tuple(content["inputs"]),
            converter=content["converter"],
            versions=content["versions"],
            subsets=_parse_subsets(content, sum(shard.n_samples for shard in shards), place),
            stats=content.get("stats", {}),
            surgery=content.get("surgery", {}),
            sides=parse_sides(content.get("sides", []), shards, place),
            view=content["view"],
        )
        _ = generation.whole_schema  # whose names fit together, or this raises
    except (KeyError, TypeError, SchemaError) as error:
        raise DatasetCorrupt(f"{place}: not a generation: {error!r}") from error
    except ShardUnsupported as error:
        raise ShardUnsupported(f"{place}: {error}") from error
    if wrong := why_wrong(generation.view, generation.schema):
        raise DatasetCorrupt(f"{place}: view {dict(generation.view)!r}: {wrong}")
    names = [shard.name for shard, _ in generation.files]
    if len(set(names)) != len(names):
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
    if not isinstance(view, dict) or not isinstance(view.get("kind"), str):
        raise DatasetCorrupt(f"{place}: expected a view with a kind, found {view!r}")
    if not is_known(view):
        raise ShardUnsupported(
            f"{place}: view {view!r}, this shardio reads those of rows and of clips with frames, "
            "stride, step and size"
        )
    _check_required(content, place)


def _check_required(content: dict[str, Any], place: Path) -> None:
    """Make sure that whatever a reader must know is known, and said where it must be."""
    required = content.get("required", [])
    if type(required) is not list or not all(isinstance(name, str) for name in required):
        raise DatasetCorrupt(f"{place}: 'required' must be a list of names; found {required!r}")
    if unknown := [name for name in required if name != _SIDE_COLUMNS]:
        raise ShardUnsupported(
            f"{place}: needs {', '.join(map(repr, unknown))}, which this shardio cannot read; "
            "a newer one may"
        )
    if content.get("required") != ([_SIDE_COLUMNS] if content.get("sides") else None):
        raise DatasetCorrupt(
            f"{place}: 'required' must name {_SIDE_COLUMNS!r} once where there are sides, and "
            f"be left out elsewhere; found {required!r}"
        )


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
    if not is_hex(content["lineage"], 16):
        found = content["lineage"]
        raise DatasetCorrupt(f"{place}: expected a lineage of 16 hex digits, found {found!r}")
    for key, kind in {"subsets": dict, "stats": dict, "surgery": dict, "sides": list}.items():
        # Left out where there is nothing to say: one meaning, one file.
        if key in content and (type(content[key]) is not kind or not content[key]):
            raise DatasetCorrupt(
                f"{place}: {key!r} must be a {kind.__name__} that is not empty, or left out; "
                f"found {content[key]!r}"
            )
    for i, entry in enumerate(content["inputs"]):
        # All but the first two are left out where there is nothing to say.
        texts = [entry.get("path"), entry.get("outcome")]
        texts += [entry.get(key, "") for key in ("reason", "hash")]
        counts = [entry.get(key, 0) for key in ("samples", "bytes")]
        if not (all(type(t) is str for t in texts) and all(type(n) is int for n in counts)):
            raise DatasetCorrupt(
                f"{place}: input {i} must have texts 'path' and 'outcome', and only texts as "
                f"'reason' and 'hash', and counts as 'samples' and 'bytes'; found {entry!r}"
            )
    if not isinstance(options := content["converter"].get("options", {}), dict):
        raise DatasetCorrupt(f"{place}: the converter's options must be a dict; found {options!r}")


def _parse_subsets(content: dict[str, Any], n_rows: int, place: Path) -> dict[str, RowRuns]:
    found = {}
    for name, entry in content.get("subsets", {}).items():
        text = entry.get("rows") if isinstance(entry, dict) else None
        try:
            rows = RowRuns.from_text(text, n_rows)
        except InvalidArgument as error:
            raise DatasetCorrupt(f"{place}: subset {name!r}: {error}") from error
        if type(entry.get("samples")) is not int or entry["samples"] != len(rows):
            raise DatasetCorrupt(
                f"{place}: subset {name!r}: expected {len(rows)} samples, as its rows are, found "
                f"{entry.get('samples')!r}"
            )
        found[name] = rows
    return found
