"""The options that say where a command's work is done.

Datasets in object stores, as far as commands have to do with them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import shardio


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


_READS_URLS = ("inspect", "serve")
"""Commands that take the URL of a dataset."""
_WRITES_URLS = ("convert",)
"""Commands whose result may be at a URL."""
_ADDRESS_OPTIONS = ("address", "bind")
"""Options that say where others are reached, in what looks like a URL."""


def is_url(text: object) -> bool:
    """Whether it is the URL of something in an object store."""
    return isinstance(text, str) and "://" in text and not text.lower().startswith("file://")


def refuse_urls(options: argparse.Namespace) -> None:
    """Make sure that no command is given a URL that works on folders.

    Raises:
        InvalidArgument: it is; the message says how to have the folder.
    """
    for name, value in vars(options).items():
        if name in _ADDRESS_OPTIONS:
            continue
        for each in value if isinstance(value, list) else [value]:
            is_taken = options.command in _READS_URLS and name == "path"
            is_taken |= options.command in _WRITES_URLS and name == "out"
            if is_url(each) and not is_taken:
                raise shardio.InvalidArgument(
                    f"{each}: shardio {options.command} works on a folder: copy the dataset to "
                    "one first, as by `aws s3 sync` or `gcloud storage rsync`"
                )
