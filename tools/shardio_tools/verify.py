"""Check every byte of a dataset or of one shard.

Each finding is a line with file, section, field, sample and offset. Exit code 1 means that there
are findings.

Examples:
    shardio verify out/
    shardio verify out/000000-000.shard           # one file of a dataset
    shardio verify out/ --quiet && echo intact    # in a script
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

from shardio import InvalidArgument
from shardio._base.progress import format_size
from shardio.maintenance import Finding, verify_dataset, verify_shard
from shardio_tools.arguments import add_engine_arguments, add_output_arguments, engine_options
from shardio_tools.inspect.report import is_dataset
from shardio_tools.output import (
    escaped,
    format_count,
    format_duration,
    print_error,
    print_json,
    print_screen,
    shown_path,
    wants_progress,
)
from shardio_tools.screen import Cell, Done, Element, Next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a dataset (a folder) or one shard (a file)")
    add_engine_arguments(
        add, "processes for a dataset (default: one per usable CPU; none for less than 512 MiB)"
    )
    add_output_arguments(add, "print problems only")


def run(options: argparse.Namespace) -> int:
    """Check, report, and return the exit code."""
    start_s = time.monotonic()
    if is_dataset(options.path):
        verified = verify_dataset(
            options.path,
            workers=options.workers,
            progress=wants_progress(options),
            **engine_options(options),
        )
        report, findings = verified.as_json(), verified.findings
    elif options.engine != "local" or options.workers is not None:
        raise InvalidArgument("--engine and --workers are for datasets, not for one shard")
    else:
        report = {"path": options.path, "n_shards": 1, "n_bytes": os.path.getsize(options.path)}
        findings = tuple(verify_shard(options.path))
        report["findings"] = [finding.as_json() for finding in findings]
    if options.json:
        print_json({**report, "seconds": round(time.monotonic() - start_s, 3)})
        return 1 if findings else 0
    if options.quiet:
        for finding in findings:
            print_error(escaped(str(finding)))
    else:
        elapsed_s = time.monotonic() - start_s
        print_screen(_describe(report, findings, elapsed_s, options.path))
    return 1 if findings else 0


def _describe(
    report: dict[str, Any], findings: tuple[Finding, ...], elapsed_s: float, path: str
) -> Iterator[Element]:
    for finding in findings:
        yield Cell(escaped(str(finding)), "bad")
    for name in report.get("unknown", ()):
        yield Cell(f"not part of the dataset: {escaped(name)}", "warning")
    if findings:
        n_files = len({finding.path for finding in findings})
        verdict = (
            f"{format_count(_n_found(findings), 'finding')} in {format_count(n_files, 'file')}"
        )
    else:
        verdict = "no damage found"
    yield Done(
        f"verified {format_count(report['n_shards'], 'shard')}, {format_size(report['n_bytes'])}, "
        f"in {format_duration(elapsed_s)}: {verdict}: {escaped(str(report['path']))}",
        "bad" if findings else "good",
    )
    if findings:
        command = f"shardio repair {shown_path(path)} NEW"
        yield Next([(command, "save the undamaged samples as a new dataset")])


def _n_found(findings: tuple[Finding, ...]) -> int:
    """Count the findings. A finding "more" stands for `found` findings that are not listed."""
    more = [int(f.found or 0) - 1 for f in findings if f.code == "more"]
    return len(findings) + sum(more)
