"""The options that say where a command's work is done."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any


def add_engine_arguments(add: Callable[..., Any]) -> None:
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


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Give them as functions take them; standard output then is the command's alone."""
    if options.engine == "ray":
        # Ray prints the log of every machine that is lost, from this process.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    return {"engine": options.engine, "address": options.address}
