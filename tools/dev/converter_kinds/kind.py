"""A kind of file, as bench_converters measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of file: its converter, what writes some into a folder, what reads all of one."""

    converter: str
    make: Callable[[Path], None]
    load: Callable[[str], Iterable[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
