"""Compare two datasets, or two shards.

Fields, classes and samples are compared. Samples are compared by the hashes stored in the shards.
If both sides have the same number of samples, samples with the same index are compared; otherwise,
the order of samples is ignored. Exit code 1 means that there are differences.

Examples:
    shardio diff old/ new/
    shardio diff old/ new/ --quiet && echo same   # in a script
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from shardio.maintenance import DiffReport, diff
from shardio_tools.arguments import add_output_arguments
from shardio_tools.inspect.report import is_dataset
from shardio_tools.output import escaped, format_count, print_result
from shardio_tools.screen import Done, Element, Heading, Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="A", help="a dataset (a folder) or one shard (a file)")
    add("other", metavar="B", help="the dataset or shard to compare with A")
    add_output_arguments(add, "print nothing; the exit code is the result")


def run(options: argparse.Namespace) -> int:
    """Compare, report, and return the exit code."""
    for path in (options.path, options.other):
        is_dataset(path)  # checks that it exists and is not a pipe
    report = diff(options.path, options.other)
    print_result(report, options, _differences(report))
    return 0 if report.is_same else 1


def _differences(report: DiffReport) -> Iterator[Element]:
    for side, names in (("A", report.fields_only_a), ("B", report.fields_only_b)):
        if names:
            yield f"fields only in {side}: {escaped(', '.join(names))}"
    if report.fields_redefined:
        yield f"fields with different types: {escaped(', '.join(report.fields_redefined))}"
    if report.classes_differ:
        yield "the classes differ"
    rest = "--json lists more"
    if report.changed:
        yield Heading("Samples that differ")
        rows = [[f"{row:,}", escaped(", ".join(names))] for row, names in report.changed]
        yield Table(rows, ("sample", "fields"), ">", rest)
    for side, numbers in (("A", report.only_a), ("B", report.only_b)):
        if numbers:
            yield Heading(f"Samples only in {side}")
            yield Table([[f"{row:,}"] for row in numbers], align=">", rest=rest)
    yield Done(_summary(report), "good" if report.is_same else "warning")


def _summary(report: DiffReport) -> str:
    if report.n_a == report.n_b:
        numbers = format_count(report.n_a, "sample")
        verdict = f"{report.n_changed:,} differ" if report.n_changed else "all the same"
    else:
        numbers = f"{report.n_a:,} and {format_count(report.n_b, 'sample')}"
        verdict = f"{report.n_only_a:,} only in A, {report.n_only_b:,} only in B"
    if report.n_changed + report.n_only_a + report.n_only_b == 0 and not report.is_same:
        verdict = "the samples' common fields are the same"
    return f"compared {escaped(report.a)} with {escaped(report.b)}: {numbers}: {verdict}"
