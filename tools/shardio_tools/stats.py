"""Count a dataset: mean, deviation, range and shapes of each numeric field, and the classes.

The result is kept in the next generation, where shardio inspect and dataset.stats find it.
"""

from __future__ import annotations

import argparse

from shardio.maintenance import compute_stats
from shardio_tools._engines import add_engine, engine_of
from shardio_tools._numbers import describe_counts
from shardio_tools._render import counted, plain, say, say_json, utf8_name
from shardio_tools._steps import Steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset to count")
    add("--subset", type=utf8_name, metavar="NAME", help="count one of its subsets instead")
    add_engine(add)
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--json", action="store_true", help="print the statistics as JSON")


def run(options: argparse.Namespace) -> int:
    """Count, report, and return the exit code."""
    with Steps(options) as steps:
        report = compute_stats(
            options.path,
            subset=options.subset,
            progress=steps.show,
            **engine_of(options),
        )
    if options.json:
        say_json(report.as_json())
    elif not options.quiet:
        for line in describe_counts(report.stats):
            say(line)
        part = "" if report.subset is None else f" of subset {plain(report.subset)}"
        n_samples = counted(report.stats["samples"], "sample")
        place = f"generation {report.generation}: {plain(str(report.dataset))}"
        say(f"counted {n_samples}{part}, kept in {place}")
    return 0
