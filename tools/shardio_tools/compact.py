"""Put neighbouring small shards of a dataset together, as its next generation.

Samples keep their numbers. Files of older generations stay for who has those open, unless
--remove-old is given. What is rewritten is verified first; damaged shards are refused.
"""

from __future__ import annotations

import argparse

from shardio.maintenance import compact
from shardio_tools._render import counted
from shardio_tools._steps import add_options, rewrite, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset to tidy up")
    add("--remove-old", action="store_true", help="remove shards that only older generations name")
    add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Compact, report, and return the exit code."""
    report = rewrite(compact, options, options.path, remove_old=options.remove_old)
    did = f"compacted into {counted(report.n_rewritten, 'new shard')}"
    if not report.n_rewritten:
        did = "nothing to put together"
    if options.remove_old:
        did += f", {counted(report.n_removed, 'old shard')} removed"
    tell(report, options, did)
    return 0
