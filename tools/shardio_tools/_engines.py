"""The options that say where a command's work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def add_engine(add: Callable[..., Any]) -> None:
    """Add them to a parser, by its `add_argument`."""
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="who works: this machine (default: local), or those of a Ray cluster",
    )
    add(
        "--address",
        metavar="PLACE",
        help="of the Ray cluster (default: $RAY_ADDRESS, or Ray is started here)",
    )
