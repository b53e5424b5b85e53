"""Give every sample of a dataset one more field, as its next generation.

The values come from a file, in the order of the samples: .npy (an array with a row for each),
.jsonl (a JSON value in each line) or .csv (the column of that name). Or a function in a Python
file computes them. Nothing that is there is changed: they go into shards beside the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from shardio import InvalidArgument
from shardio.maintenance import add_column
from shardio_tools._columns import Kind, parse_field, read_column, read_function
from shardio_tools._engines import add_engine_arguments, engine_options
from shardio_tools.output import StepProgress, escaped, print_report, utf8_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset that is to have the field")
    add(
        "name",
        type=utf8_name,
        metavar="NAME",
        help="of the field; with dots, of one in a nested record",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--from", dest="file", metavar="FILE", help="its values: .npy, .jsonl, .csv"
    )
    source.add_argument(
        "--function",
        metavar="FILE.py:NAME",
        help="computes them: called with a sample, or with lists of samples",
    )
    add(
        "--field",
        metavar="TYPE",
        help="its type, such as 'float32[3]' or 'text, optional' (default: that of the array)",
    )
    add("--batch-size", type=int, metavar="N", help="call the function with so many samples")
    add("--workers", type=int, metavar="N", help="processes that call the function (default: none)")
    add_engine_arguments(add)
    add("--gpus", type=float, default=0, metavar="N", help="of the cluster, for each process")
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Add the column, report, and return the exit code."""
    given = None if options.field is None else parse_field(options.field)
    field, values = _field_and_values(options, given)
    with StepProgress(options) as steps:
        report = add_column(
            options.path,
            options.name,
            field,
            values,
            batch_size=options.batch_size,
            workers=options.workers,
            gpus=options.gpus,
            **engine_options(options),
            progress=steps.show,
        )
    print_report(report, options, f"added {escaped(options.name)}")
    return 0


def _field_and_values(
    options: argparse.Namespace, given: Kind | None
) -> tuple[Kind, Iterable[Any] | Callable[[Any], Any]]:
    if options.function is None:
        return read_column(options.file, options.name, given)
    if given is None:
        raise InvalidArgument(
            f"--function: does not tell the type of {options.name}; say it with --field"
        )
    return given, read_function(options.function)
