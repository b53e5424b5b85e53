"""Which fields several datasets have alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardio.errors import InvalidArgument
from shardio.format.fields import Field
from shardio.format.schema import Schema


def common_fields(schemas: Sequence[Schema]) -> Mapping[str, Field]:
    """The fields that all have alike, in the order of the first."""
    first, *others = schemas
    return {
        name: field
        for name, field in first.items()
        if all(other.get(name) == field for other in others)
    }


def check_agreement(
    schemas: Sequence[Schema], paths: Sequence[str], fields: Iterable[str] | None
) -> Iterable[str] | None:
    """Make sure that datasets at `paths` have some fields, by default every field, and alike.

    Returns `fields`, which may be something that gives its names only once.

    Raises:
        InvalidArgument: naming a field, two datasets, and what each has.
    """
    known = dict.fromkeys(name for schema in schemas for name in schema)
    common = common_fields(schemas)
    if isinstance(fields, Iterable) and not isinstance(fields, str):
        fields = list(fields)
    wanted = fields if isinstance(fields, list) else list(known)
    for name in known:
        groups = [name[:i] for i, letter in enumerate(name) if letter == "."]
        if name in common or not any(each in wanted for each in (name, *groups)):
            continue
        has = [schema.get(name) for schema in schemas]
        i = next(i for i, field in enumerate(has) if field != has[0])
        one, other = paths[0], paths[i]
        raise InvalidArgument(
            f"a mixture has the fields that all of its sources have alike; field {name!r} is "
            f"{_named(has[0])} in {one} (source 0), and {_named(has[i])} in {other} (source "
            f"{i}): pass fields= without it; all have {', '.join(common) or 'none'}"
        )
    return fields


def _named(field: Field | None) -> str:
    return "absent" if field is None else repr(field)
