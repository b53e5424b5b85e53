"""Strict JSON parsing, which rejects values that shardio would not return unchanged."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

import numpy as np

from shardio import MediaError

_MAX_DEPTH: Final = 256  # the limit of a Json field
_INFINITY: Final = float("inf")
_RUN: Final = 96  # any 200 consecutive digits contain a block of 96 that starts at a multiple of 96
_DIGITS: Final = np.frombuffer(b"\1" * 8, np.uint64)[0]  # eight True bytes as one word
_PART: Final = (
    1 << 15
)  # characters to search at a time; larger arrays are allocated anew, at a third of the speed
_PADDING: Final = b"    "  # room for lookups after an "e" at the end of a text
_MAX_SHOWN: Final = 40


class OutOfRange(ValueError):
    """A number that float64 can only represent as infinity, or as 0 although it is not 0."""


def float_of(text: str) -> float:
    """Return the float64 nearest to a decimal number.

    Raises:
        OutOfRange: the number is outside the range of float64.
        ValueError: the text is not a number.
    """
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

    Such a number has a three-digit exponent or about 200 digits. Searching for both takes 5 % of
    the time needed to parse lists of floats; calling `float_of` for each number takes 50 %.
    """
    return any(
        _has_long_number(text[start : start + _PART + 3 * _RUN])
        for start in range(0, len(text), _PART)
    )


def _has_long_number(text: str) -> bool:
    """Return True if a text may contain a three-digit exponent or 200 digits in a row."""
    data = np.frombuffer(text.encode() + _PADDING, np.uint8)
    is_digit = (data - np.uint8(ord("0"))) < 10
    eights = is_digit[: len(data) // _RUN * _RUN].view(np.uint64) == _DIGITS
    if eights.reshape(-1, _RUN // 8).all(axis=1).any():
        return True
    at = np.flatnonzero((data[: -len(_PADDING)] | 0x20) == ord("e")) + 1
    if not at.size:
        return False
    at += (data[at] == ord("-")) | (data[at] == ord("+"))
    for _ in range(3):
        at = at[is_digit[at]] + 1
    return at.size > 0


def is_out_of_range(text: str, value: float) -> bool:
    """Return True if `value` is infinite or 0, although the number in `text` is not."""
    if value == 0:
        return bool(text.lower().partition("e")[0].strip("+-0. "))
    return value in (_INFINITY, -_INFINITY) and "n" not in text.lower()


def read_json(data: bytes) -> Any:
    """Return the value of a JSON text, as `json.loads` does."""
    try:
        value = json.loads(data, parse_constant=_refuse, parse_float=float_of)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except OutOfRange as error:
        raise MediaError(str(error)) from error
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
    raise ValueError(f"{name} is not a JSON number")
