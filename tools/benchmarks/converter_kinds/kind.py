"""A kind of file, as the case `converters` measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of file: its converter, and the functions `make` and `load`.

    `make` writes files into a folder; `load` reads a file with the library that it is made for.
    `least` is the minimum ratio of the converter's rate to that of `load`; `why` is the reason if
    this is less than 0.7.
    """

    converter: str
    make: Callable[[Path], None]
    load: Callable[[str], Iterable[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    least: float = 0.7
    why: str = ""
