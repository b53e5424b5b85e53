"""Merge neighbouring small shards of a dataset.

Samples keep their indices. The dataset gets a new generation. Files of older generations are kept
for their readers, unless --remove-old is given. Shards are verified before they are rewritten;
damaged shards are refused.

Examples:
    shardio compact out/
    shardio compact out/ --remove-old             # and delete old shards
"""

from __future__ import annotations

import argparse

from shardio.maintenance import compact
from shardio_tools.arguments import add_rewrite_arguments
from shardio_tools.output import format_count, inspect_step, print_report, run_rewrite, shown_path


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
    steps = [inspect_step(options.path)]
    if report.n_rewritten and not options.remove_old:
        command = f"shardio compact {shown_path(options.path)} --remove-old"
        steps = [(command, "delete the old shards")]
    print_report(report, options, did, *steps)
    return 0
