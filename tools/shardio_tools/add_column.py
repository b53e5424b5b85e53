"""Give every sample of a dataset one more field, as its next generation.

The values come from a file, in the order of the samples: .npy (an array with a row for each),
.jsonl (a JSON value in each line) or .csv (the column of that name). Nothing that is there is
changed: they go into shards beside the others.
"""

from __future__ import annotations

import argparse

from shardio.surgery import add_column
from shardio_tools._columns import parse_field, read_column
from shardio_tools._render import plain
from shardio_tools._steps import Steps, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset that is to have the field")
    add("name", metavar="NAME", help="of the field; with dots, of one in a nested record")
    add("--from", dest="file", required=True, metavar="FILE", help="its values: .npy, .jsonl, .csv")
    add(
        "--field",
        metavar="TYPE",
        help="its type, such as 'float32[3]' or 'text, optional' (default: that of the array)",
    )
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Add the column, report, and return the exit code."""
    given = None if options.field is None else parse_field(options.field)
    field, values = read_column(options.file, options.name, given)
    with Steps(options) as steps:
        report = add_column(options.path, options.name, field, values, progress=steps.show)
    tell(report, options, f"added {plain(options.name)}")
    return 0
