"""JSON as others write it, of which a dataset takes what it gives back unchanged."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from shardio import MediaError

_MAX_DEPTH: Final = 256  # what a Json field holds


def read_json(data: bytes) -> Any:
    """The value of a text of JSON, as `json.loads` gives it.

    Raises:
        MediaError: it is none, or says what standard JSON cannot: NaN, Infinity, half a character.
    """
    try:
        value = json.loads(data, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise MediaError(f"not JSON: {error or 'nested too deep'}") from error
    if data.count(b"[") + data.count(b"{") > _MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    waiting = [value]
    for _ in range(_MAX_DEPTH + 1):
        inside = [each for each in waiting if isinstance(each, dict | list)]
        waiting = [
            one for each in inside for one in (each.values() if isinstance(each, dict) else each)
        ]
    if waiting:
        raise MediaError(f"nested more than {_MAX_DEPTH} deep")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
