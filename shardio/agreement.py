"""Which fields several datasets have alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardio.dataset import ShardDataset
from shardio.errors import InvalidArgument
from shardio.format.fields import Field


def common_fields(sources: Sequence[ShardDataset]) -> Mapping[str, Field]:
    """The fields that all sources have alike, in the order of the first."""
    first, *others = (source.schema for source in sources)
    return {
        name: field
        for name, field in first.items()
        if all(other.get(name) == field for other in others)
    }


def check_agreement(
    sources: Sequence[ShardDataset], fields: Iterable[str] | None
) -> Iterable[str] | None:
    """Make sure that all sources have some fields, by default every field, and alike.

    Returns `fields`, which may be something that gives its names only once.

    Raises:
        InvalidArgument: naming a field, two sources, and what each has.
    """
    known = dict.fromkeys(name for source in sources for name in source.schema)
    common = common_fields(sources)
    if isinstance(fields, Iterable) and not isinstance(fields, str):
        fields = list(fields)
    wanted = fields if isinstance(fields, list) else list(known)
    for name in known:
        groups = [name[:i] for i, letter in enumerate(name) if letter == "."]
        if name in common or not any(each in wanted for each in (name, *groups)):
            continue
        has = [source.schema.get(name) for source in sources]
        i = next(i for i, field in enumerate(has) if field != has[0])
        one, other = sources[0].path, sources[i].path
        raise InvalidArgument(
            f"a mixture has the fields that all of its sources have alike; field {name!r} is "
            f"{_named(has[0])} in {one} (source 0), and {_named(has[i])} in {other} (source "
            f"{i}): pass fields= without it; all have {', '.join(common) or 'none'}"
        )
    return fields


def _named(field: Field | None) -> str:
    return "absent" if field is None else repr(field)
