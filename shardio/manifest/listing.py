"""The shards that a generation lists: those of whole samples, and columns added later beside them.

A *side* is a column that was added to a finished dataset: a shard of its own beside each shard,
with as many samples, and the new field alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardio.errors import DatasetCorrupt, SchemaError
from shardio.format.fields import Field
from shardio.format.schema import Schema, canonical_json
from shardio.manifest.lists import (
    MAX_NAME_BYTES,
    SHARDS,
    ShardList,
    is_long,
    pack_shards,
    parse_part,
    put_aside,
    samples_of,
)
from shardio.shard.writer import ShardSummary

_MAX_BYTES: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Side:
    """A column that was added later. Immutable.

    Args:
        schema: of its shards: the one field.
        shards: the side shards, in the order of the shards that they lie beside.
    """

    schema: Schema
    shards: Sequence[ShardSummary]

    @property
    def name(self) -> str:
        """The name of the field."""
        return next(iter(self.schema))

    def fits(self, shards: Sequence[ShardSummary]) -> bool:
        """Whether it has a shard beside each of `shards`, with as many samples."""
        return np.array_equal(samples_of(self.shards), samples_of(shards))


def whole_schema(schema: Schema, sides: Sequence[Side]) -> Schema:
    """The fields of whole samples: those of the shards, then the added ones.

    Raises:
        SchemaError: two have the same name, or one is the nested record of another.
    """
    if not sides:
        return schema
    fields: dict[str, Field] = dict(schema)
    for side in sides:
        for name, field in side.schema.items():
            if name in fields:
                raise SchemaError(f"there is a field {name!r} already")
            fields[name] = field
    return Schema(fields)


def is_hex(value: object, n_digits: int) -> bool:
    """Whether it is a text of so many hex digits, in lower case."""
    return isinstance(value, str) and len(value) == n_digits and not value.strip("0123456789abcdef")


def describe_schema(schema: Schema) -> Any:
    """A schema as the JSON of a generation says it."""
    return json.loads(schema.to_json())


def parse_schema(content: object) -> Schema:
    """The schema that `describe_schema` wrote down.

    Raises:
        SchemaError, ShardUnsupported: it breaks a rule, or was written by a newer version.
    """
    return Schema.from_json(canonical_json(content))


def describe_shards(
    shards: Sequence[ShardSummary], parts: dict[str, bytes]
) -> list[dict[str, Any]] | dict[str, Any]:
    """Shards as the JSON of a generation lists them, or names the part that it adds to `parts`."""
    if is_long(shards):
        return put_aside(parts, SHARDS, pack_shards(shards), len(shards))
    return [
        {"name": s.name, "samples": s.n_samples, "bytes": s.n_bytes, "id": s.id} for s in shards
    ]


def parse_shards(content: Any, place: Path) -> Sequence[ShardSummary]:
    """The shards that `describe_shards` wrote down in `place`, whose parts lie beside it.

    Raises:
        DatasetCorrupt, KeyError, TypeError: it breaks a rule.
    """
    if isinstance(content, dict):
        part = parse_part(content, SHARDS, place)
        return ShardList(part, part.read())
    return tuple(_parse_shard(entry, place) for entry in content)


def _parse_shard(entry: dict[str, Any], place: Path) -> ShardSummary:
    name, counts = entry["name"], (entry["samples"], entry["bytes"])
    inside = isinstance(name, str) and name.endswith(".shard") and os.path.basename(name) == name
    if not inside or "\0" in name or len(name.encode()) > MAX_NAME_BYTES:
        raise DatasetCorrupt(f"{place}: {name!r} is no name of a shard in the dataset's folder")
    if any(type(n) is not int or not 0 <= n <= _MAX_BYTES for n in counts):
        raise DatasetCorrupt(f"{place}: shard {name}: samples and bytes must be counts")
    if not is_hex(entry["id"], 32):
        raise DatasetCorrupt(
            f"{place}: shard {name}: expected an id of 32 hex digits, found {entry['id']!r}"
        )
    return ShardSummary(name, entry["samples"], entry["bytes"], entry["id"])


def describe_side(side: Side, parts: dict[str, bytes]) -> dict[str, Any]:
    """A side as the JSON of a generation says it; see `describe_shards`."""
    return {"schema": describe_schema(side.schema), "shards": describe_shards(side.shards, parts)}


def parse_sides(content: Any, shards: Sequence[ShardSummary], place: Path) -> tuple[Side, ...]:
    """The sides of `shards` that `describe_side` wrote down in `place`.

    Raises:
        DatasetCorrupt, SchemaError, ShardUnsupported, KeyError, TypeError: it breaks a rule.
    """
    found = []
    for entry in content:
        if type(entry) is not dict or type(entry.get("shards")) not in (list, dict):
            raise DatasetCorrupt(f"{place}: a side must be a dict with shards; found {entry!r}")
        side = Side(parse_schema(entry["schema"]), parse_shards(entry["shards"], place))
        if len(side.schema) != 1:
            raise DatasetCorrupt(
                f"{place}: a side has one field; found {', '.join(map(repr, side.schema))}"
            )
        if not side.fits(shards):
            raise DatasetCorrupt(
                f"{place}: field {side.name!r}: expected a shard beside each of the "
                f"{len(shards)}, with as many samples; found {len(side.shards)}, or other counts"
            )
        found.append(side)
    return tuple(found)
