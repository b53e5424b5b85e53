"""Errors as JSON: the name of the class, what it says, and of a shard where. No code travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardio import errors
from shardio.errors import ShardCorrupt, ShardioError
from shardio.serving.client.wire import text

_PLACES: Final = ("path", "section", "field", "sample", "offset")
_VALUES: Final = ("expected", "found")
_MOST_CHARACTERS: Final = 1 << 16


def as_json(error: BaseException) -> dict[str, Any]:
    """What `from_json` makes an error from; one that is not of shardio says its class in words."""
    name = type(error).__name__
    if not isinstance(error, ShardioError) or name not in errors.__all__:
        return {"class": "ShardioError", "text": _cut(f"{name}: {error}")}
    if not isinstance(error, ShardCorrupt):
        return {"class": name, "text": _cut(str(error))}
    found: dict[str, Any] = {"class": name, "text": _cut(error.what), "code": error.code}
    found |= {each: getattr(error, each) for each in _PLACES}
    for each in _VALUES:
        value = getattr(error, each)
        found[each] = None if value is None else str(value)
    return found


def from_json(found: Mapping[str, Any]) -> ShardioError:
    """The error that a server has met.

    Raises:
        Garbled: it is none.
    """
    name, what = text(found, "class"), text(found, "text")
    kind: Any = getattr(errors, name) if name in errors.__all__ else ShardioError
    if issubclass(kind, ShardCorrupt):
        places = {each: found.get(each) for each in (*_PLACES, *_VALUES)}
        made: ShardioError = kind(what, code=text(found, "code"), **places)
    else:
        made = kind(what)
    return made


def _cut(said: str) -> str:
    """A text that is not longer than a message may be."""
    if len(said) <= _MOST_CHARACTERS:
        return said
    half = _MOST_CHARACTERS // 2
    return f"{said[:half]}\n[…]\n{said[-half:]}"
