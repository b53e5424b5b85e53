"""A kind of file, as the case `converters` measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of file: its converter, what writes some into a folder, what reads all of one.

    `least` is what its quotient has to be, and `why` says for what reason that is less than 0.7.
    """

    converter: str
    make: Callable[[Path], None]
    load: Callable[[str], Iterable[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    least: float = 0.7
    why: str = ""
