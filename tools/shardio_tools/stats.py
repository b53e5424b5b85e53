"""Count a dataset: mean, deviation, range and shapes of each numeric field, and the classes.

The result is kept in the next generation, where shardio inspect and dataset.stats find it.
"""

from __future__ import annotations

import argparse

from shardio.maintenance import compute_stats
from shardio_tools._engines import add_engine_arguments, engine_options
from shardio_tools._numbers import describe_counts
from shardio_tools.output import (
    StepProgress,
    escaped,
    format_count,
    print_json,
    print_out,
    utf8_name,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset to count")
    add("--subset", type=utf8_name, metavar="NAME", help="count one of its subsets instead")
    add_engine_arguments(add)
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--json", action="store_true", help="print the statistics as JSON")


def run(options: argparse.Namespace) -> int:
    """Count, report, and return the exit code."""
    with StepProgress(options) as steps:
        report = compute_stats(
            options.path,
            subset=options.subset,
            progress=steps.show,
            **engine_options(options),
        )
    if options.json:
        print_json(report.as_json())
    elif not options.quiet:
        for line in describe_counts(report.stats):
            print_out(line)
        part = "" if report.subset is None else f" of subset {escaped(report.subset)}"
        n_samples = format_count(report.stats["samples"], "sample")
        place = f"generation {report.generation}: {escaped(str(report.dataset))}"
        print_out(f"counted {n_samples}{part}, kept in {place}")
    return 0
