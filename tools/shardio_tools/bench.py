"""Measure how fast a dataset loads here, and find the bottleneck.

For each number of workers, samples are read for some seconds. The same samples are then read again
from the page cache: these warm readings are compared with the speed at which one thread per worker
copies memory, which no loader can exceed. To measure with a transform, call
shardio.measuring.measure_loading.

Examples:
    shardio bench out/
    shardio bench out/ --batch-size 64 --workers 2 4 8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import shardio
from shardio.measuring import Conclusion, LoadingReport, LoadingRun, measure_loading
from shardio_tools.arguments import add_output_arguments
from shardio_tools.inspect.report import count_clips
from shardio_tools.output import (
    escaped,
    format_count,
    print_now,
    print_out,
    print_result,
    utf8_name,
)
from shardio_tools.screen import Cell, Done, Element, Heading, Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset to load")
    add("--batch-size", type=int, default=32, metavar="N", help="samples per batch (default: 32)")
    add(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of worker processes to try (default: 0, 1, 2, 4, … up to the number of CPUs)",
    )
    add(
        "--seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="duration of the first reading, and of the warm readings (default: 2)",
    )
    add("--fields", type=utf8_name, metavar="NAME,…", help="read these fields only")
    add("--subset", type=utf8_name, metavar="NAME", help="load this subset only")
    add("--device", metavar="NAME", help="make tinygrad Tensors on this device (default: arrays)")
    add("--trace", metavar="FILE", help="write a trace of workers and batches for ui.perfetto.dev")
    add_output_arguments(add, json="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, report, and return the exit code."""
    more: dict[str, Any] = {}
    if options.fields is not None:
        more["fields"] = options.fields.split(",")
    if options.device is not None:
        more |= {"output": "tinygrad", "device": options.device}

    def show(n_workers: int) -> None:
        if not (options.quiet or options.json):
            print_now(f"measuring with {format_count(n_workers, 'worker')}", sys.stderr)

    with shardio.open(options.path, subset=options.subset) as dataset:
        report = measure_loading(
            dataset,
            options.batch_size,
            n_workers=options.workers,
            seconds=options.seconds,
            wants_trace=options.trace is not None,
            progress=show,
            **more,
        )
        n_clips = count_clips(dataset)
    print_result(report, options, _describe(report, n_clips))
    # Save the trace last: the result is then printed even if saving fails.
    if report.trace is not None:
        report.trace.save(options.trace)
        if not options.json and not options.quiet:
            print_out(f"traced: {escaped(options.trace)}; https://ui.perfetto.dev draws it")
    return 0


def _describe(report: LoadingReport, n_clips: int | None) -> Iterator[Element]:
    unit = "samples/s" if n_clips is None else "clips/s"
    head = ("workers", unit, "first", "GB/s", "limit", "of limit", "waiting", "ready")
    rows = [_row(run, is_best=run is report.best) for run in report.runs]
    yield Table(rows, head, ">>>>>>>>")
    yield (
        f"{unit} and GB/s: read from memory; first: {unit} of the first reading; limit: GB/s of "
        "copying memory; waiting: share of time that the loop waits for a batch; ready: batches "
        "that are ready for the loop, on average"
    )
    if report.cached_share is not None:
        yield f"the page cache held {report.cached_share:.0%} of the files at the start"
    workers = format_count(report.best.n_workers, "worker")
    yield from _describe_limit("First reading", report.first_conclusion)
    yield from _describe_limit(f"From memory, {workers}", report.conclusion)
    n_runs = format_count(len(report.runs), "run")
    measured = format_count(report.n_samples, "sample")
    if n_clips is not None:
        measured = f"{format_count(n_clips, 'clip')} of {format_count(report.n_samples, 'video')}"
    yield Done(
        f"measured {measured} in batches of {report.batch_size:,}, "
        f"{n_runs} on {format_count(report.n_cpus, 'CPU')}: {escaped(report.path)}"
    )


def _row(run: LoadingRun, *, is_best: bool) -> list[str]:
    elapsed_s = run.warm.elapsed_s or 1.0
    cells = (
        f"{run.n_workers}",
        f"{run.samples_per_s:,.0f}",
        f"{run.first_samples_per_s:,.0f}",
        f"{run.bytes_per_s / 1e9:.2f}",
        f"{run.limit_bytes_per_s / 1e9:.2f}",
        f"{run.bytes_per_s / run.limit_bytes_per_s:.0%}",
        f"{run.warm.waiting_s / elapsed_s:.0%}",
        f"{run.warm.queue_depth:.1f}",
    )
    return [Cell(cell, "good") for cell in cells] if is_best else [*cells]


def _describe_limit(what: str, conclusion: Conclusion) -> Iterator[Element]:
    yield Heading(f"{what}: limited by {conclusion.limit}")
    yield f"  {conclusion.because}"
    yield from (f"  → {line}" for line in conclusion.advice)
