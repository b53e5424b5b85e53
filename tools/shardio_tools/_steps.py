"""How commands that rewrite datasets show how far they are, and say what they did."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack

from shardio.maintenance import MaintenanceProgress, MaintenanceReport
from shardio_tools._render import (
    ProgressLine,
    escaped,
    format_count,
    format_size,
    print_json,
    print_out,
)


def add_rewrite_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all of these commands take."""
    add = parser.add_argument
    add(
        "--shard-bytes",
        type=int,
        metavar="N",
        default=256 << 20,
        help="how much data goes into one new shard (default: 268435456, that is 256 MiB)",
    )
    add("--workers", type=int, metavar="N", help="processes that verify (default: one per CPU)")
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--json", action="store_true", help="print the report as JSON")


class StepProgress(ExitStack):
    """Shows a progress line for one step after the other; call `show` with each state."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self._is_silent = options.quiet or options.json
        self._step, self._line = "", ProgressLine("", is_silent=True)

    def show(self, state: MaintenanceProgress) -> None:
        """Say how far the step is."""
        if state.step != self._step:
            self.close()
            self._step = state.step
            self._line = self.enter_context(ProgressLine(state.step, is_silent=self._is_silent))
        note = f"{state.n_shards_done:,} of {format_count(state.n_shards, 'shard')}"
        self._line.show(state.n_bytes_done, state.n_bytes, note)


def run_rewrite(
    surgery: Callable[..., MaintenanceReport],
    options: argparse.Namespace,
    *places: str,
    **more: object,
) -> MaintenanceReport:
    """Call a surgery with the options that all of these commands take; shows how far it is."""
    with StepProgress(options) as steps:
        return surgery(
            *places,
            shard_bytes=options.shard_bytes,
            workers=options.workers,
            progress=steps.show,
            **more,
        )


def print_report(report: MaintenanceReport, options: argparse.Namespace, did: str) -> None:
    """Say what came of it: `did` begins the sentence."""
    if options.json:
        print_json(report.as_json())
    elif not options.quiet:
        shards = format_count(report.n_shards, "shard")
        print_out(
            f"{did}: {format_count(report.n_samples, 'sample')} in {shards}, "
            f"{format_size(report.n_bytes)}, "
            f"generation {report.generation}: {escaped(str(report.dataset))}"
        )
