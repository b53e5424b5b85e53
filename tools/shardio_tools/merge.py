"""Put the samples of several datasets together, as a new dataset.

All must have the same fields. Where class names differ, the new dataset has all of them, and the
labels are adapted. Every byte is verified first; damaged datasets are refused.
"""

from __future__ import annotations

import argparse

from shardio.surgery import merge
from shardio_tools._render import counted
from shardio_tools._steps import Steps, add_common, add_size, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("out", metavar="OUT", help="the dataset to make: a folder that is missing or empty")
    add("sources", metavar="SRC", nargs="+", help="the datasets to put together, in their order")
    add_size(parser)
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Merge, report, and return the exit code."""
    with Steps(options) as steps:
        report = merge(
            options.out,
            *options.sources,
            shard_bytes=options.shard_bytes,
            workers=options.workers,
            progress=steps.show,
        )
    tell(report, options, f"merged {counted(len(options.sources), 'dataset')}")
    return 0
