"""Save the undamaged samples as a new dataset.

The new dataset has every readable sample whose hashes match; all others are listed with the reason.
SRC is not changed. Exit code 1 means that samples are lost.

Examples:
    shardio repair damaged/ repaired/
    shardio repair damaged/000000-000.shard repaired/
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from shardio.maintenance import Loss, RepairReport, ShardRepair, repair
from shardio_tools.arguments import add_output_arguments
from shardio_tools.output import (
    escaped,
    format_count,
    inspect_step,
    print_error,
    print_json,
    print_screen,
    wants_progress,
)
from shardio_tools.screen import Cell, Done, Element, Next


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
    if options.quiet:
        for shard in report.shards:
            for loss in shard.losses:
                print_error(_loss_text(shard, loss))
    else:
        print_screen(_describe(report, options.out))
    return 0 if report.is_whole else 1


def _describe(report: RepairReport, out: str) -> Iterator[Element]:
    for shard in report.shards:
        for note in shard.mended:
            yield Cell(f"{escaped(shard.name)}: repaired: {escaped(note)}", "warning")
        for loss in shard.losses:
            yield Cell(_loss_text(shard, loss), "bad")
    yield Done(_summary(report, out), "good" if report.is_whole else "warning")
    yield Next([inspect_step(out)])


def _loss_text(shard: ShardRepair, loss: Loss) -> str:
    return f"{escaped(shard.name)}: lost: {_which(loss)}: {escaped(loss.reason)}"


def _which(loss: Loss) -> str:
    if loss.first is None:
        return "all samples"
    if loss.first == loss.last:
        return f"sample {loss.first}"
    return f"samples {loss.first} to {loss.last}"


def _summary(report: RepairReport, out: str) -> str:
    lost = "nothing lost" if report.is_whole else f"{report.n_lost:,} lost"
    if not report.is_whole and any(
        loss.n_samples is None for shard in report.shards for loss in shard.losses
    ):
        lost = f"{report.n_lost:,} or more lost"
    return (
        f"repaired {format_count(len(report.shards), 'shard')}: "
        f"{format_count(report.n_samples, 'sample')} saved, {lost}: {escaped(out)}"
    )
