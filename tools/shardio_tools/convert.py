"""Convert a folder of videos, pictures, sound, arrays, tables or datasets of others into a dataset.

Every file below SRC is looked at and accounted for. The name of the folder that holds a file is its
class. Exit code 1 means that some files are broken, or have changed since they were converted; they
are listed, and all others are converted. The code is also 1 if no file gave a sample.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import shardio
from shardio.measuring import StoredReport, estimate, measure_stored
from shardio_tools import convert_report
from shardio_tools._convert_options import CONVERTER_OPTIONS, add_arguments
from shardio_tools.arguments import engine_options, is_url
from shardio_tools.convert_report import describe_stored, stored_json
from shardio_tools.output import (
    OUTCOMES,
    ProgressLine,
    escaped,
    format_count,
    format_duration,
    format_size,
    print_error,
    print_json,
    print_out,
)

__all__ = ["CONVERTER_OPTIONS", "add_arguments", "run"]


def _read_fields(path: str) -> Any:
    """What a file of JSON says; a field that is there twice is refused."""

    def named_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if twice := [name for name, n in counts.items() if n > 1]:
            raise shardio.InvalidArgument(f"{path}: {twice[0]!r} is there {counts[twice[0]]} times")
        return dict(pairs)

    try:
        with open(path, encoding="utf-8-sig") as file:
            return json.load(file, object_pairs_hook=named_once)
    except shardio.InvalidArgument:  # which is a ValueError
        raise
    except (ValueError, RecursionError) as error:
        raise shardio.InvalidArgument(f"{path}: not JSON: {error}") from error


def run(options: argparse.Namespace) -> int:
    """Convert, report, and return the exit code."""
    given = {n: v for n in CONVERTER_OPTIONS if (v := getattr(options, n)) is not None}
    if options.schema is not None:
        given["fields"] = _read_fields(options.schema)
    if options.estimate:
        return _estimate(options, given)
    if options.out is None:
        raise shardio.InvalidArgument("OUT is missing: the folder of the dataset")
    with ProgressLine("converting", is_silent=options.quiet or options.json) as line:
        report = shardio.convert(
            options.src,
            options.out,
            kind=options.kind,
            workers=options.workers,
            on_error=options.on_error,
            keep_partial=options.keep_partial,
            resume=options.resume,
            overwrite=options.overwrite,
            append=options.append,
            labels=options.labels,
            **engine_options(options),
            progress=lambda state: line.show(state.n_bytes_done, state.n_bytes, _note(state)),
            **given,
        )
    code = 1 if report.broken or report.modified or not report.generation else 0
    if options.quiet and not options.json:
        for source in (*report.modified, *report.broken):
            print_error(f"{source.outcome}: {escaped(source.name)}: {escaped(source.reason)}")
        if not report.generation:
            print_error(convert_report.no_samples_line(report))
        return code
    stored = _measured(report, options)
    if options.json:
        print_json({**convert_report.report_as_json(report), **stored_json(report, stored)})
    else:
        lines = convert_report.describe_report(
            report, has_file=options.labels is not None, appends=options.append
        )
        *before, last = lines
        print_out(
            "\n".join(
                [
                    *before,
                    *convert_report.field_lines(report),
                    *describe_stored(report, stored),
                    last,
                ]
            )
        )
    return code


def _measured(report: shardio.ConversionReport, options: argparse.Namespace) -> StoredReport | None:
    """What a sample of the result is like; None where there is nothing, or it is gone already.

    In an object store, it is not read again.
    """
    if is_url(report.dataset):
        return None
    try:
        return measure_stored(report, options.src)
    except (shardio.ShardioError, OSError) as error:
        is_unchecked = options.store == "packets" and not options.check
        hint = "; --check finds such files, and leaves them out" if is_unchecked else ""
        print_error(f"the result is not measured: {escaped(str(error))}{hint}")
        return None


def _estimate(options: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Say what a conversion would come to."""
    if options.engine != "local":
        raise shardio.InvalidArgument("--estimate and --engine: a few files are converted here")
    for name in ("resume", "overwrite", "append"):
        if getattr(options, name):
            raise shardio.InvalidArgument(
                f"--estimate and --{name}: an estimate is of a new dataset; leave one of them out"
            )
    found = estimate(
        options.src,
        kind=options.kind,
        workers=options.workers,
        keep_partial=options.keep_partial,
        **given,
    )
    if options.json:
        facts = stored_json(found.sample, found.stored)
        print_json(
            {
                **facts,
                "files": found.n_inputs,
                "files_converted": len(found.sample.inputs),
                "estimated_bytes": found.n_bytes,
                "estimated_seconds": round(found.elapsed_s, 1),
            }
        )
        return 0
    n_tried = len(found.sample.inputs)
    outcomes = (f"{n:,} {OUTCOMES[kind]}" for kind, n in found.sample.counts.items())
    lines = [
        f"tried {n_tried:,} of {format_count(found.n_inputs, 'file')}: {', '.join(outcomes)}",
        *describe_stored(found.sample, found.stored),
        f"estimated: {format_size(found.n_bytes)} from {format_size(found.n_source_bytes)}, in "
        f"{format_duration(found.elapsed_s)}; nothing was written",
    ]
    print_out("\n".join(lines))
    return 0


def _note(state: Any) -> str:
    """How far a conversion is, in files and samples."""
    note = f"{state.n_inputs_done:,} of {format_count(state.n_inputs, 'file')}"
    note += f", {format_count(state.n_samples, 'sample')}"
    return f"{note}, {state.n_broken} broken" if state.n_broken else note
