"""Parse and check a loader's option `collate`: how arrays of different shapes form a batch.

    "stack"    one array; all shapes must be equal
    "pad"      one array: each value is padded with zeros to the largest shape of the batch. Another
               field, `NAME_mask`, is True where the array has values and not padding
    "ragged"   one array: the values are concatenated along the first axis. Another field,
               `NAME_offsets`, has the start of each value on this axis, and the end of the last
    "list"     a list of arrays

One of these words alone applies to all arrays whose shapes may differ: the arrays of varying shape
in the dataset, and all arrays, except scalars, that a transform returns.

A *joined field* is a field whose arrays "stack", "pad" or "ragged" joins into one array. Its
*companion* is the other field, the mask or the offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.format.types import Array, Field

CollateKind = Literal["stack", "pad", "ragged", "list"]
KINDS: Final = get_args(CollateKind)
Sizes = tuple[int | None, ...]
_COMPANIONS: Final[dict[CollateKind, tuple[str, str, int]]] = {
    "pad": ("mask", "bool", 1),
    "ragged": ("offsets", "int64", 0),
}
"""The suffix and dtype of the companion that "pad" or "ragged" adds, and a flag: 1 if the companion
has the shape of the joined array, 0 if it has one dimension.
"""


@dataclass(frozen=True, slots=True)
class CollateRule:
    """The collation rule for one field.

    `sizes` is the shape to which "pad" pads; None stands for the largest size in the batch.
    """

    kind: CollateKind
    sizes: Sizes | None = None


class JoinedField(NamedTuple):
    """A field of arrays of varying shape that a batch joins into one array.

    `field` is its type in a single sample; `companion` is the name of its mask or offsets, or None.
    """

    name: str
    rule: CollateRule
    field: Array
    companion: str | None


@dataclass(frozen=True, slots=True)
class Collation:
    """The parsed option `collate`: rules by field and a default rule, or a `function`."""

    default: CollateRule = field(default_factory=lambda: CollateRule("stack"))
    by_field: Mapping[str, CollateRule] = field(default_factory=dict)
    function: Callable[[list[Mapping[str, Any]]], Any] | None = None

    def relax_shapes(self, schema: Schema) -> Schema:
        """Return a schema for all results of a transform, given the schema of the first.

        Arrays may have any shape if their rule allows this.
        """
        return Schema({name: self._relax_shape(name, each) for name, each in schema.items()})

    def _relax_shape(self, name: str, found: Field) -> Field:
        is_free = self.function is not None or self.by_field.get(name, self.default).kind != "stack"
        if not is_free or (array := found.array) is None or not array.shape:
            return found
        return replace(array, shape=(None,) * len(array.shape))

    def expand(self, schema: Schema) -> tuple[Schema, tuple[JoinedField, ...]]:
        """Return the schema of batches whose samples have `schema`, and the joined fields."""
        for name, rule in self.by_field.items():
            _check_rule(name, rule, schema)
        fields: dict[str, Field] = {}
        joins = []
        for name, found in schema.items():
            join = self._join(name, found)
            if join is None:
                fields[name] = found
                continue
            joins.append(join)
            n_dims = len(join.field.shape)
            whole = (None,) * (n_dims + (join.rule.kind != "ragged"))
            fields[name] = replace(join.field, shape=whole, codec="raw")
            if join.companion is not None:
                if join.companion in schema:
                    raise InvalidArgument(
                        f"collate={join.rule.kind!r} of {name!r} adds {join.companion!r}, which is "
                        "a field already: leave that field out with `fields`, or use another rule"
                    )
                _, dtype, has_dims = _COMPANIONS[join.rule.kind]
                fields[join.companion] = Array(dtype, (None,) * (1 + has_dims * n_dims))
        return (Schema(fields) if joins else schema), tuple(joins)

    def _join(self, name: str, found: Field) -> JoinedField | None:
        if (array := found.array) is None or array.is_fixed:
            return None
        rule = self.by_field.get(name) or self.default
        if rule.kind == "list" or (name not in self.by_field and rule.kind == "stack"):
            return None
        companion = _COMPANIONS.get(rule.kind)
        return JoinedField(name, rule, array, f"{name}_{companion[0]}" if companion else None)


DEFAULT_COLLATION: Final = Collation()


def parse_collate(option: object) -> Collation:
    """Parse a loader's option `collate`."""
    if isinstance(option, Mapping):
        return Collation(by_field={str(name): _parse_rule(each) for name, each in option.items()})
    if isinstance(option, str) and option in KINDS:
        return Collation(default=_parse_rule(option))
    if callable(option):
        return Collation(function=option)
    raise InvalidArgument(
        f"collate must be one of {', '.join(map(repr, KINDS))}, a dict from fields to these, or "
        f"a function of a list of samples; found {option!r}"
    )


def _parse_rule(rule: object) -> CollateRule:
    if isinstance(rule, tuple | list):
        are_sizes = [n is None or (isinstance(n, int | np.integer) and n >= 1) for n in rule]
        if rule and all(are_sizes) and not any(isinstance(n, bool) for n in rule):
            return CollateRule("pad", tuple(None if n is None else int(n) for n in rule))
    for kind in KINDS:
        if isinstance(rule, str) and rule == kind:
            return CollateRule(kind)
    advice = ". A function collates all fields of a batch: pass collate=f" if callable(rule) else ""
    raise InvalidArgument(
        f"collate must map a field to one of {', '.join(map(repr, KINDS))}, or the shape to pad "
        f"to, a tuple with None for the largest size in the batch; found {rule!r}{advice}"
    )


def _check_rule(name: str, rule: CollateRule, schema: Schema) -> None:
    """Raise InvalidArgument if the rule cannot be applied to the field `name`."""
    if name not in schema:
        raise InvalidArgument(
            f"collate names {name!r}; the fields of a sample are {', '.join(schema)}"
        )
    found = schema[name].array
    if found is None:
        if rule.kind != "list":
            kind = type(schema[name]).__name__
            text = f"collate: {name!r} is {kind}, which is always a list"
            if schema[name].is_json:
                text += (
                    "; for lists of numbers, convert with schema=shardio.Schema({…, "
                    f'{name!r}: shardio.Array("int64", (None,))}})'
                )
            raise InvalidArgument(text)
        return
    if rule.kind != "stack" and found.is_fixed:
        raise InvalidArgument(
            f"collate: {name!r} has the shape {found.shape} in every sample, so it is stacked"
        )
    sizes = rule.sizes
    if sizes is None:
        return
    if len(sizes) != len(found.shape) or any(
        size is not None and n is not None and size < n
        for size, n in zip(sizes, found.shape, strict=True)
    ):
        raise InvalidArgument(
            f"collate: {name!r} has the shape {found.shape}, where None varies, and cannot be "
            f"padded to {sizes}"
        )
