"""Save the undamaged samples as a new dataset.

The new dataset has every readable sample whose hashes match; all others are listed with the reason.
SRC is not changed. Exit code 1 means that samples are lost.

Examples:
    shardio repair damaged/ repaired/
    shardio repair damaged/000000-000.shard repaired/
"""

from __future__ import annotations

import argparse

from shardio.maintenance import Loss, RepairReport, repair
from shardio_tools.arguments import add_output_arguments
from shardio_tools.output import (
    escaped,
    format_count,
    print_error,
    print_json,
    print_out,
    wants_progress,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("src", metavar="SRC", help="a dataset (a folder) or one shard (a file), damaged or not")
    add("out", metavar="OUT", help="the dataset to make: a folder that is missing or empty")
    add_output_arguments(add, "print losses only")


def run(options: argparse.Namespace) -> int:
    """Repair, report, and return the exit code."""
    report = repair(options.src, options.out, progress=wants_progress(options))
    if options.json:
        print_json(report.as_json())
        return 0 if report.is_whole else 1
    print_line = print_error if options.quiet else print_out
    for shard in report.shards:
        if not options.quiet:
            for note in shard.mended:
                print_out(f"{escaped(shard.name)}: repaired: {escaped(note)}")
        for loss in shard.losses:
            where = f"{escaped(shard.name)}: lost: {_which(loss)}"
            print_line(f"{where}: {escaped(loss.reason)}")
    if not options.quiet:
        print_out(_summary(report))
    return 0 if report.is_whole else 1


def _which(loss: Loss) -> str:
    if loss.first is None:
        return "all samples"
    if loss.first == loss.last:
        return f"sample {loss.first}"
    return f"samples {loss.first} to {loss.last}"


def _summary(report: RepairReport) -> str:
    lost = "nothing lost" if report.is_whole else f"{report.n_lost:,} lost"
    if not report.is_whole and any(
        loss.n_samples is None for shard in report.shards for loss in shard.losses
    ):
        lost = f"{report.n_lost:,} or more lost"
    return (
        f"repaired {format_count(len(report.shards), 'shard')}: "
        f"{format_count(report.n_samples, 'sample')} saved, {lost}: {escaped(str(report.dataset))}"
    )
