"""Rewrite a dataset as a new one with larger or smaller shards.

Every byte is verified first; a damaged dataset is refused.

Examples:
    shardio reshard out/ small/ --shard-bytes 67108864     # 64 MiB per file
    shardio reshard out/ large/ --shard-bytes 1073741824   # 1 GiB per file
"""

from __future__ import annotations

import argparse

from shardio.maintenance import reshard
from shardio_tools.arguments import add_rewrite_arguments
from shardio_tools.output import inspect_step, print_report, run_rewrite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("src", metavar="SRC", help="the dataset to read")
    add("out", metavar="OUT", help="the dataset to make: a folder that is missing or empty")
    add_rewrite_arguments(add)


def run(options: argparse.Namespace) -> int:
    """Reshard, report, and return the exit code."""
    report = run_rewrite(reshard, options, options.src, options.out)
    print_report(report, options, "resharded", inspect_step(options.out))
    return 0
