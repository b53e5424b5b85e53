"""Write the samples of a dataset as files of another format.

The folder appears once it is complete. Every byte is verified. A damaged sample stops the export;
with --on-error skip, it is left out and listed, and the exit code is 1.

Examples:
    shardio export out/ files/ --format files
    shardio export out/ tars/ --format webdataset --subset train
    shardio export out/ tables/ --format parquet --fields label,source
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from shardio._base.progress import format_size
from shardio.export import ExportReport, export
from shardio_tools.arguments import add_output_arguments, add_shard_bytes_argument
from shardio_tools.output import (
    escaped,
    format_count,
    print_error,
    print_json,
    print_screen,
    utf8_name,
    wants_progress,
)
from shardio_tools.screen import Done, Element, Heading, Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset to read")
    add("out", metavar="OUT", help="the folder to create; it may exist if it is empty")
    add("--format", required=True, choices=("webdataset", "parquet", "files"), help="output format")
    add("--fields", type=utf8_name, metavar="NAME,…", help="export these fields only")
    add("--subset", type=utf8_name, metavar="NAME", help="export this subset only")
    add_shard_bytes_argument(add, "tar or Parquet file")
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a damaged sample: stop, or skip it (default: stop)",
    )
    add("--overwrite", action="store_true", help="replace an export in OUT")
    add_output_arguments(add, "print skipped samples only")


def run(options: argparse.Namespace) -> int:
    """Export, report, and return the exit code."""
    report = export(
        options.path,
        options.out,
        options.format,
        fields=None if options.fields is None else options.fields.split(","),
        subset=options.subset,
        shard_bytes=options.shard_bytes,
        on_error=options.on_error,
        overwrite=options.overwrite,
        progress=wants_progress(options),
    )
    if options.json:
        print_json(report.as_json())
    elif options.quiet:
        for one in report.skipped:
            print_error(f"skipped: sample {one.sample}: {escaped(one.reason)}")
    else:
        print_screen(_describe(report))
    return 1 if report.skipped else 0


def _describe(report: ExportReport) -> Iterator[Element]:
    if report.skipped:
        yield Heading(f"Skipped: {format_count(len(report.skipped), 'damaged sample')}", "bad")
        rows = [[f"sample {one.sample:,}", escaped(one.reason)] for one in report.skipped]
        yield Table(rows, rest="--json lists them all")
    if report.subsets_dropped:
        names = escaped(", ".join(report.subsets_dropped))
        yield f"not exported: the subsets {names}; --subset NAME exports the samples of one"
    did = f"exported {format_count(report.n_samples, 'sample')} to "
    size = f"{format_count(report.n_files, 'file')}, {format_size(report.n_bytes)}"
    yield Done(f"{did}{size}: {escaped(report.out)}", "warning" if report.skipped else "good")
