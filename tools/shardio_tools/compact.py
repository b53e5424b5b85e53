"""Merge neighbouring small shards of a dataset.

Samples keep their indices. The dataset gets a new generation. Files of older generations are kept
for their readers, unless --remove-old is given. Shards are verified before they are rewritten;
damaged shards are refused.

Examples:
    shardio compact out/
    shardio compact out/ --remove-old             # and delete what was merged
"""

from __future__ import annotations

import argparse

from shardio.maintenance import compact
from shardio_tools.arguments import add_rewrite_arguments
from shardio_tools.output import format_count, print_report, run_rewrite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset to compact")
    add("--remove-old", action="store_true", help="remove shards that only older generations use")
    add_rewrite_arguments(add)


def run(options: argparse.Namespace) -> int:
    """Compact, report, and return the exit code."""
    report = run_rewrite(compact, options, options.path, remove_old=options.remove_old)
    did = f"compacted into {format_count(report.n_rewritten, 'new shard')}"
    if not report.n_rewritten:
        did = "nothing to compact"
    if options.remove_old:
        did += f", {format_count(report.n_removed, 'old shard')} removed"
    print_report(report, options, did)
    return 0
