"""Strict parsing of JSON, text and numbers: values that cannot be stored exactly are rejected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NoReturn

import numpy as np

from shardio import MediaError

NESTED: Final = frozenset((dict, list))  # the types of JSON values that contain other values

_MAX_DEPTH: Final = 256  # the maximum nesting depth of a value in a Json field
TOO_DEEP: Final = f"nested more than {_MAX_DEPTH} deep"
_INFINITY: Final = float("inf")
_SHAPES: Final = bytes.maketrans(b"023456789E", b"1" * 9 + b"e")  # every digit becomes 1
_MAX_SHOWN: Final = 40


class OutOfRange(ValueError):
    """A number that float64 can only represent as infinity, or as 0 although it is not 0."""


def float_of(text: str) -> float:
    """Return the nearest float64; raise OutOfRange, or ValueError for text that is not a number."""
    value = float(text)
    if value and -_INFINITY < value < _INFINITY:  # the usual case
        return value
    if is_out_of_range(text, value):
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
        raise OutOfRange(
            f"expected a number in the range of float64, found {shown}, which would become "
            f"{value}; store it as text"
        )
    return value


def may_be_out_of_range(text: str) -> bool:
    """Return True if a text may contain a number that `float_of` rejects.

    Such a number has an exponent of three digits, or 200 digits and more. The search takes 12 % of
    the time that parsing takes; calling `float_of` for each number would take 50 %.
    """
    shape = text.encode().translate(_SHAPES, b"+-")
    # `rfind` compares the first character of the pattern first, an "e", which is rare.
    return shape.rfind(b"e111") >= 0 or b"1" * 200 in shape


def is_out_of_range(text: str, value: float) -> bool:
    """Return True if `value` is infinite or 0, although the number in `text` is not."""
    if value == 0:
        return bool(text.lower().partition("e")[0].strip("+-0. "))
    return value in (_INFINITY, -_INFINITY) and "n" not in text.lower()


def read_json(data: bytes) -> Any:
    """Return the value of a JSON text; reject NaN, numbers out of range and deep nesting."""
    try:
        value = json.loads(data, parse_constant=_refuse, parse_float=float_of)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except OutOfRange as error:
        raise MediaError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise MediaError(f"not JSON: {error or 'nested too deep'}") from error
    if data.count(b"[") + data.count(b"{") > _MAX_DEPTH and is_too_deep([value]):
        raise MediaError(TOO_DEEP)
    return value


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object; raise ValueError if it repeats a name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object repeats a name")
    return found


def inside(values: Sequence[Any]) -> list[Any]:
    """Return the direct members of the objects and lists among values."""
    nested = [each for each in values if type(each) in NESTED]
    return [*chain.from_iterable([e.values() if type(e) is dict else e for e in nested])]


def is_too_deep(values: Sequence[Any]) -> bool:
    """Return True if a value is nested deeper than a Json field can store."""
    for _ in range(_MAX_DEPTH + 1):
        if NESTED.isdisjoint(map(type, values)):
            return False
        values = inside(values)
    return True


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def read_text(data: bytes) -> str:
    """Decode UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise MediaError(f"not UTF-8: {error.reason} at byte {error.start}") from error


def read_int(data: bytes, hint: str = "") -> np.int64:
    """Parse a whole number of 64 bits; `hint` ends the message of the error."""
    try:
        return np.int64(int(data))
    except (ValueError, OverflowError) as error:
        what = f"found {data[:40]!r}{hint}"
        raise MediaError(f"expected a whole number of 64 bits, {what}") from error
