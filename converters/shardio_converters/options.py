"""Checks of converter options that several converters share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardio import InvalidArgument


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Check that the value of an option is one of `choices`."""
    if value not in choices:
        raise InvalidArgument(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def check_number(name: str, value: Any, least: int, most: int) -> None:
    """Check that an option is a whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgument(
            f"{name} is {value!r}; it must be a whole number from {least} up to {most:,}"
        )


def check_flag(name: str, value: Any) -> None:
    """Check that an option is True, False or None."""
    if not isinstance(value, bool | None):
        raise InvalidArgument(f"{name} is {value!r}; it must be True or False")


def column_names(columns: Any, what: str) -> list[str] | None:
    """Return the option `columns` as a list or None; `what` is the plural noun for messages."""
    if columns is None:
        return None
    if not isinstance(columns, list | tuple) or not columns:
        raise InvalidArgument(f"columns is {columns!r}; expected names of {what}")
    return [*map(str, columns)]
