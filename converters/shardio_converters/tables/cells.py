"""Cells of CSV: what kind of value they hold, where none loses a digit by it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

INT: Final = "int"
FLOAT: Final = "float"
BOOL: Final = "bool"
TEXT: Final = "text"

_MAX_NUMBER: Final = 400  # characters: what is longer is no number, and Python would not read it
# Digits with a zero before them are no number: they are a postal code, or the like.
_WHOLE: Final = r"[+-]?(?:0|[1-9][0-9]*+)"
_TOKENS: Final = {
    BOOL: r"(?i:true|false)",
    INT: _WHOLE,
    FLOAT: (
        r"(?:[+-]?(?:[0-9]++\.[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?"
        rf"|{_WHOLE}(?:[eE][+-]?[0-9]++)?|[+-]?(?i:nan|inf|infinity))"
    ),
}
_COLUMNS: Final = {
    kind: re.compile(rf"(?:(?: *+{token} *+)?\n)*+", re.ASCII) for kind, token in _TOKENS.items()
}


def holds_only(kind: str, cells: Sequence[str]) -> bool:
    """Whether all cells are of a kind, or empty; spaces around numbers mean nothing."""
    text = "\n".join((*cells, ""))
    return (
        bool(_COLUMNS[kind].fullmatch(text))
        and text.count("\n") == len(cells)
        and max(map(len, cells), default=0) <= _MAX_NUMBER
    )


def cell_kind(cells: Sequence[str], known: str | None) -> str | None:
    """The narrowest kind of these cells and those that were found to be `known`.

    None where all are empty: they are of any kind.
    """
    kinds = (BOOL, INT, FLOAT) if known is None else (known, FLOAT) if known == INT else (known,)
    if known is None and not any(cells):
        return None
    return next((kind for kind in kinds if kind != TEXT and holds_only(kind, cells)), TEXT)
