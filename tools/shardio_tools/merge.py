"""Merge the samples of several datasets into a new dataset.

All datasets must have the same fields. If class names differ, the new dataset has all of them, and
labels are adjusted. Every byte is verified first; damaged datasets are refused.

Examples:
    shardio merge monday/ tuesday/ both/
    shardio merge parts/a parts/b parts/c all/ --workers 4
"""

from __future__ import annotations

import argparse

from shardio.maintenance import merge
from shardio_tools.arguments import add_rewrite_arguments
from shardio_tools.output import format_count, inspect_step, print_report, run_rewrite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("sources", metavar="SRC", nargs="+", help="the datasets to merge, in order")
    add("out", metavar="OUT", help="the dataset to make: a folder that is missing or empty")
    add_rewrite_arguments(add)


def run(options: argparse.Namespace) -> int:
    """Merge, report, and return the exit code."""
    report = run_rewrite(merge, options, options.out, *options.sources)
    did = f"merged {format_count(len(options.sources), 'dataset')}"
    print_report(report, options, did, inspect_step(options.out))
    return 0
