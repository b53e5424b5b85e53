"""Represent the published states of a dataset, called *generations*, and convert them to JSON.

A *view* is the kind of sample that a loader returns by default. With the view `ROWS`, every row is
a sample. With the view `{"kind": "clips", "frames": 16, "stride": 1, "step": 16}`, every clip of 16
frames is a sample, and the dataset must have exactly one video field; with the additional entry
`"size": [height, width]`, frames get this size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardio.dataset.external_lists import (
    INPUTS,
    MAX_NAME_BYTES,
    SHARDS,
    ExternalList,
    InputList,
    ShardList,
    add_external_list,
    check_inputs,
    external_list_names,
    is_hex,
    is_long,
    pack_inputs,
    parse_external_list,
)
from shardio.dataset.selection import RowRuns
from shardio.errors import DatasetCorrupt, InvalidArgument, SchemaError, ShardUnsupported
from shardio.format.checksum import hash_bytes
from shardio.format.layout import MAJOR, MAX_SAMPLES, MINOR
from shardio.format.schema import Schema
from shardio.format.types import Field
from shardio.format.types.text import canonical_json
from shardio.shard.writer import ShardSummary

ROWS: Final[Mapping[str, Any]] = {"kind": "rows"}

_NUMBERS: Final = {"frames": 1 << 31, "stride": 1 << 31, "step": 1 << 62}
_MAX_SIDE: Final = 16384


def is_known_view(view: Any) -> bool:
    """Return True if this version of shardio supports the kind and all keys of a view."""
    if not isinstance(view, Mapping):
        return False
    if view.get("kind") == "clips":
        return view.keys() <= {"kind", "size", *_NUMBERS}
    return dict(view) == ROWS


def view_error(view: Mapping[str, Any], schema: Schema) -> str | None:
    """Return the reason why a view of a known kind is invalid for a schema; None if it is valid."""
    if view["kind"] == "rows":
        return None
    for name, most in _NUMBERS.items():
        if not _is_number(view.get(name), most):
            return f"{name} must be a whole number from 1 up to {most:,}; found {view.get(name)!r}"
    size = view.get("size", [1, 1])
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or not all(_is_number(side, _MAX_SIDE) for side in size):
        return f"size must be [height, width], each from 1 to {_MAX_SIDE}; found {size!r}"
    if (n := sum(field.medium == "video" for field in schema.values())) != 1:
        return f"clips need one field of videos; the schema has {n}"
    return None


def _is_number(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


_MAX_BYTES: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """A column that was added to a finished dataset, with a file for each shard. Immutable."""

    schema: Schema
    shards: ShardList

    @property
    def name(self) -> str:
        """The name of the column."""
        return next(iter(self.schema))

    def fits(self, shards: ShardList) -> bool:
        """Return True if the column's shards have the same sample counts as `shards`."""
        return np.array_equal(self.shards.samples, shards.samples)


def full_schema(schema: Schema, column_groups: Sequence[ColumnGroup]) -> Schema:
    """Return the schema of complete samples: first the fields in `schema`, then the added columns.

    Raises SchemaError if two fields have the same name, or conflicting names such as `a` and `a.b`.
    """
    if not column_groups:
        return schema
    fields: dict[str, Field] = dict(schema)
    for group in column_groups:
        if group.name in fields:
            raise SchemaError(f"there is a field {group.name!r} already")
        fields |= group.schema
    return Schema(fields)


def describe_shards(
    shards: ShardList, external_lists: dict[str, bytes]
) -> list[dict[str, Any]] | dict[str, Any]:
    """Return shards as JSON; add a long list to `external_lists`, which maps names to contents."""
    if is_long(shards):
        return add_external_list(external_lists, SHARDS, shards.content, len(shards))
    return [
        {"name": s.name, "samples": s.n_samples, "bytes": s.n_bytes, "id": s.id} for s in shards
    ]


def parse_shards(content: Any, path: Path) -> ShardList:
    """Parse the output of `describe_shards`.

    Raises DatasetCorrupt, KeyError or TypeError if the output is damaged.
    """
    if isinstance(content, dict):
        file = parse_external_list(content, SHARDS, path)
        return ShardList.parse(file, file.read())
    return ShardList.of(_parse_shard(entry, path) for entry in content)


def _parse_shard(entry: dict[str, Any], path: Path) -> ShardSummary:
    name, counts = entry["name"], (entry["samples"], entry["bytes"])
    inside = isinstance(name, str) and name.endswith(".shard") and os.path.basename(name) == name
    if not inside or "\0" in name or len(name.encode()) > MAX_NAME_BYTES:
        raise DatasetCorrupt(f"{path}: {name!r} is not a shard name in the dataset's folder")
    if any(type(n) is not int or not 0 <= n <= _MAX_BYTES for n in counts):
        raise DatasetCorrupt(f"{path}: shard {name}: samples and bytes must be counts")
    if not is_hex(entry["id"], 32):
        raise DatasetCorrupt(
            f"{path}: shard {name}: expected an id of 32 hex digits, found {entry['id']!r}"
        )
    return ShardSummary(name, entry["samples"], entry["bytes"], entry["id"])


def describe_column_group(group: ColumnGroup, external_lists: dict[str, bytes]) -> dict[str, Any]:
    """Return a column group as JSON; see `describe_shards`."""
    return {
        "schema": json.loads(group.schema.to_json()),
        "shards": describe_shards(group.shards, external_lists),
    }


def parse_column_groups(content: Any, shards: ShardList, path: Path) -> tuple[ColumnGroup, ...]:
    """Parse the column groups in the generation file `path`; `shards` are the dataset's shards."""
    found = []
    for entry in content:
        if type(entry) is not dict or type(entry.get("shards")) not in (list, dict):
            raise DatasetCorrupt(
                f"{path}: a column group must be a dict with shards; found {entry!r}"
            )
        schema = Schema.from_json(canonical_json(entry["schema"]))
        group = ColumnGroup(schema, parse_shards(entry["shards"], path))
        if len(group.schema) != 1:
            raise DatasetCorrupt(
                f"{path}: a column group has one field; found {', '.join(map(repr, group.schema))}"
            )
        if not group.fits(shards):
            raise DatasetCorrupt(
                f"{path}: field {group.name!r}: expected {len(shards)} shards, with the sample "
                "counts of the dataset's shards; found "
                f"{len(group.shards)} shards, or other sample counts"
            )
        found.append(group)
    return tuple(found)


_COLUMN_GROUPS: Final = "column_groups"
"""The entry for column groups in `required`, the list of features that a reader must support."""
_EXTERNAL_LISTS: Final = "external_lists"
"""The entry for external lists in `required`."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One published state of a dataset. Immutable.

    Attributes:
        lineage: the id that all generations of the dataset share; see `lineage_of`.
        schema, shards: the fields and shards without those of `column_groups`.
        classes: the names of the classes. A label is an index into this tuple.
        inputs: the files that the conversion read, each with the outcome. `inputs` and `converter`
            contain no absolute paths, times or names of hosts.
        converter: the converter's name, its versions, and its options that affect the data.
        versions: the versions of the libraries that affect the stored bytes.
        operation: the command that wrote this generation, its options, and its source datasets.
            Empty for a new dataset that `shardio convert` wrote.
        column_groups: the columns that were added to the finished dataset, oldest first.
        view: the kind of sample that a loader returns by default, such as rows or clips.
    """

    number: int
    lineage: str
    schema: Schema
    shards: ShardList
    classes: tuple[str, ...] = ()
    inputs: Sequence[Mapping[str, Any]] = ()
    converter: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    subsets: Mapping[str, RowRuns] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    operation: Mapping[str, Any] = field(default_factory=dict)
    column_groups: tuple[ColumnGroup, ...] = ()
    view: Mapping[str, Any] = field(default_factory=lambda: ROWS)

    @property
    def full_schema(self) -> Schema:
        """The schema of complete samples: the fields of `shards`, then the added columns."""
        return full_schema(self.schema, self.column_groups)

    @property
    def files(self) -> Iterator[tuple[ShardSummary, Schema]]:
        """The files in `shards`, followed by those of each column group; each with its schema."""
        groups: tuple[Generation | ColumnGroup, ...] = (self, *self.column_groups)
        return ((shard, group.schema) for group in groups for shard in group.shards)

    @property
    def description(self) -> dict[str, Any]:
        """The attributes that stay valid if the same samples are stored in other shards."""
        names = ("classes", "inputs", "converter", "versions", "view")
        return {name: getattr(self, name) for name in names}

    @property
    def names(self) -> list[str]:
        """The file names of all shards, including the shards of column groups."""
        lists = (self.shards, *(group.shards for group in self.column_groups))
        return [name for shards in lists for name in shards.names()]

    @property
    def external_lists(self) -> tuple[ExternalList, ...]:
        """References to the external lists that were read together with this generation."""
        lists = (self.shards, *(group.shards for group in self.column_groups), self.inputs)
        files = (each.file for each in lists if isinstance(each, ShardList | InputList))
        return tuple(file for file in files if file is not None)

    def check_inputs(self) -> None:
        """Raise DatasetCorrupt if the inputs, which the next generation needs, are damaged."""
        if isinstance(self.inputs, InputList):
            self.inputs.file.read()

    @property
    def n_samples(self) -> int:
        """The total number of samples."""
        return self.shards.n_samples


def lineage_of(schema: Schema, shards: Iterable[ShardSummary]) -> str:
    """Return the lineage of a dataset: a hash of its first generation's schema and shard ids."""
    return f"{hash_bytes(schema.to_json() + ShardList.of(shards).ids):016x}"


def describe_generation(generation: Generation, external_lists: dict[str, bytes]) -> dict[str, Any]:
    """Return a generation as JSON, without optional entries that are empty.

    Each external list is added to `external_lists`, which maps file names to contents. Raises
    SchemaError if an input cannot be represented in JSON.
    """
    inputs = generation.inputs
    content = {
        "format_version": f"{MAJOR}.{MINOR}",
        "generation": generation.number,
        "lineage": generation.lineage,
        "schema": json.loads(generation.schema.to_json()),
        "shards": describe_shards(generation.shards, external_lists),
        "classes": list(generation.classes),
        "inputs": add_external_list(external_lists, INPUTS, pack_inputs(inputs), len(inputs))
        if is_long(inputs)
        else [dict(entry) for entry in inputs],
        "converter": dict(generation.converter),
        "versions": dict(generation.versions),
        "view": dict(generation.view),
    }
    extras = {
        "subsets": {
            name: {"samples": len(rows), "rows": rows.to_text()}
            for name, rows in generation.subsets.items()
        },
        "stats": dict(generation.stats),
        "operation": dict(generation.operation),
        "column_groups": [
            describe_column_group(group, external_lists) for group in generation.column_groups
        ],
    }
    found = content | {key: value for key, value in extras.items() if value}
    required = _required(found)
    return found | ({"required": required} if required else {})


def _required(content: Mapping[str, Any]) -> list[str]:
    """Return the features that a reader must support to read a generation's JSON."""
    lists = [_EXTERNAL_LISTS] if external_list_names(content) else []
    return [*lists, _COLUMN_GROUPS] if content.get("column_groups") else lists


def parse_generation(content: dict[str, Any], path: Path) -> Generation:
    """Parse `content`, the JSON of the generation file `path`, and read external lists of shards.

    Raises:
        DatasetCorrupt: the generation, or an external list of shards, is damaged or invalid.
        ShardUnsupported: the generation was written by a newer version.
    """
    _check_readable(content, path)
    _check_kinds(content, path)
    try:
        shards = parse_shards(content["shards"], path)
        generation = Generation(
            number=content["generation"],
            lineage=content["lineage"],
            schema=Schema.from_json(canonical_json(content["schema"])),
            shards=shards,
            classes=tuple(content["classes"]),
            inputs=_parse_inputs(content["inputs"], path),
            converter=content["converter"],
            versions=content["versions"],
            subsets=_parse_subsets(content, shards.n_samples, path),
            stats=content.get("stats", {}),
            operation=content.get("operation", {}),
            column_groups=parse_column_groups(content.get("column_groups", []), shards, path),
            view=content["view"],
        )
        _ = generation.full_schema  # raises SchemaError if names of columns conflict
    except (KeyError, TypeError, SchemaError) as error:
        raise DatasetCorrupt(f"{path}: not a generation: {error!r}") from error
    except ShardUnsupported as error:
        raise ShardUnsupported(f"{path}: {error}") from error
    if wrong := view_error(generation.view, generation.schema):
        raise DatasetCorrupt(f"{path}: view {dict(generation.view)!r}: {wrong}")
    names = generation.names
    if len(set(names)) != len(names):
        raise DatasetCorrupt(f"{path}: a shard is named twice")
    if generation.n_samples > MAX_SAMPLES:
        raise DatasetCorrupt(f"{path}: {generation.n_samples} samples; at most 2^48 are possible")
    return generation


def _check_readable(content: dict[str, Any], path: Path) -> None:
    """Check a generation's format version, its view and the features that it requires."""
    wanted, view = content.get("format_version"), content.get("view")
    major = wanted.partition(".")[0] if isinstance(wanted, str) else ""
    if not (major.isascii() and major.isdigit()):
        raise DatasetCorrupt(f"{path}: {wanted!r} is not a version of the format")
    if int(major) != MAJOR:
        raise ShardUnsupported(f"{path}: format {wanted}, this shardio reads {MAJOR}")
    if not isinstance(view, dict) or not isinstance(view.get("kind"), str):
        raise DatasetCorrupt(f"{path}: expected a view with a kind, found {view!r}")
    if not is_known_view(view):
        raise ShardUnsupported(
            f"{path}: view {view!r}: this shardio reads views of rows, and of clips with frames, "
            "stride, step and size"
        )
    _check_required(content, path)


def _check_required(content: dict[str, Any], path: Path) -> None:
    """Check that the entry 'required' is correct, and that this version supports its features."""
    required = content.get("required", [])
    if type(required) is not list or not all(isinstance(name, str) for name in required):
        raise DatasetCorrupt(f"{path}: 'required' must be a list of names; found {required!r}")
    if unknown := [name for name in required if name not in (_EXTERNAL_LISTS, _COLUMN_GROUPS)]:
        raise ShardUnsupported(
            f"{path}: needs {', '.join(map(repr, unknown))}, which this shardio cannot read; "
            "a newer one may"
        )
    if content.get("required") != (_required(content) or None):
        raise DatasetCorrupt(
            f"{path}: 'required' must name {_EXTERNAL_LISTS!r} if a list is external, then "
            f"{_COLUMN_GROUPS!r} if there are column groups, each once, and be left out otherwise; "
            f"found {required!r}"
        )


_KINDS: Final = {
    **{"generation": int, "lineage": str, "shards": list, "classes": list, "inputs": list},
    **{"converter": dict, "versions": dict},
}
_OPTIONAL: Final = {"subsets": dict, "stats": dict, "operation": dict, "column_groups": list}
"""Keys that are left out if their values are empty. Equal generations thus have equal JSON."""


def _check_kinds(content: dict[str, Any], path: Path) -> None:
    """Check that every entry has exactly the expected type; a bool does not count as an int."""
    for key, kind in _KINDS.items():
        is_external = key in (SHARDS, INPUTS) and type(content.get(key)) is dict
        if type(content.get(key)) is not kind and not is_external:
            raise DatasetCorrupt(
                f"{path}: {key!r} must be a {kind.__name__}; found {content.get(key)!r}"
            )
    for key, kind in _OPTIONAL.items():
        if key in content and (type(content[key]) is not kind or not content[key]):
            raise DatasetCorrupt(
                f"{path}: {key!r} must be a {kind.__name__} that is not empty, or left out; "
                f"found {content[key]!r}"
            )
    if not all(isinstance(entry, str) for entry in content["classes"]):
        raise DatasetCorrupt(f"{path}: every entry of 'classes' must be a str")
    if not is_hex(content["lineage"], 16):
        found = content["lineage"]
        raise DatasetCorrupt(f"{path}: expected a lineage of 16 hex digits, found {found!r}")
    if not isinstance(options := content["converter"].get("options", {}), dict):
        raise DatasetCorrupt(f"{path}: the converter's options must be a dict; found {options!r}")


def _parse_inputs(content: Any, path: Path) -> Sequence[Mapping[str, Any]]:
    if isinstance(content, dict):
        return InputList(parse_external_list(content, INPUTS, path))
    check_inputs(content, path)
    return tuple(content)


def _parse_subsets(content: dict[str, Any], n_rows: int, path: Path) -> dict[str, RowRuns]:
    found = {}
    for name, entry in content.get("subsets", {}).items():
        text = entry.get("rows") if isinstance(entry, dict) else None
        try:
            rows = RowRuns.from_text(text, n_rows)
        except InvalidArgument as error:
            raise DatasetCorrupt(f"{path}: subset {name!r}: {error}") from error
        if type(entry.get("samples")) is not int or entry["samples"] != len(rows):
            raise DatasetCorrupt(
                f"{path}: subset {name!r}: expected {len(rows)} samples for its rows, found "
                f"{entry.get('samples')!r}"
            )
        found[name] = rows
    return found
