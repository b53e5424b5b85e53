"""Check values that user code returns, before anything is made of them. Used by `fill`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardio.format.arraylike import refuse_masked

_DEPTH: Final = 2
"""Levels of lists: those of a batch have a value for each sample, which may be a list of arrays."""


def checked(made: Any) -> Any:
    """Return a sample or a batch of user code as it is, unless a value would lose its meaning.

    Raises:
        SchemaError: a value is a masked array, or a list that has one. It names the field.
    """
    if isinstance(made, Mapping):
        for name, value in made.items():
            refuse_masked(f"field {name!r}", value, _DEPTH)
    return made
