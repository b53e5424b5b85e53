"""Convert a folder of videos, images, audio, arrays, tables or other datasets into a dataset.

Every file below SRC is read and accounted for. The folder that holds a file is its class. Exit code
1 means that some files are broken, or have changed since they were converted; they are listed, and
all others are converted. The code is also 1 if no file gave a sample.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import shardio
from shardio.measuring import StoredReport, measure_stored
from shardio_tools import convert_report
from shardio_tools.arguments import add_engine_arguments, engine_options, is_url
from shardio_tools.convert_report import describe_stored, stored_json
from shardio_tools.output import (
    ProgressLine,
    escaped,
    format_count,
    print_error,
    print_json,
    print_out,
    utf8_name,
)

__all__ = ["CONVERTER_OPTIONS", "add_arguments", "run"]


# Options of converters, beside those of every conversion. They are passed on only if given: the
# converter alone states the defaults.
CONVERTER_OPTIONS: Final = (
    "frames",
    "stride",
    "step",
    "size",
    "fps",
    "store",
    "codec",
    "gop",
    "quality",
    "check",
    "audio",
    "columns",
    "rows",
    "records",
    "dtype",
    "eot",
    "length",
    "references",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add(
        "src",
        metavar="SRC",
        help=(
            "a folder of videos, images, audio, arrays or other datasets; one file; or a "
            "quoted pattern of these"
        ),
    )
    add(
        "out",
        metavar="OUT",
        help=(
            "the dataset to write: a URL, or a folder that is missing or empty (except "
            "for --append)"
        ),
    )
    add(
        "--kind",
        type=utf8_name,
        help=(
            "videos, images, audio, arrays, tables, arrow, webdataset, hdf5, … (default: "
            "guessed from file names)"
        ),
    )
    add("--labels", metavar="FILE", help="CSV or JSON Lines with columns path and label")
    add("--workers", type=int, metavar="N", help="processes (default: one per usable CPU)")
    add_engine_arguments(add)
    _add_clips(parser.add_argument_group("clips and images"))
    _add_stores(parser.add_argument_group("storage"))
    _add_arrays(parser.add_argument_group("arrays, tables and records"))
    _add_tokens(parser.add_argument_group("tokens"))
    _add_ends(parser.add_argument_group("errors, resuming and overwriting"))
    add("--quiet", action="store_true", help="print problems only")
    add("--json", action="store_true", help="print the report as JSON")


def _add_clips(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--frames", type=int, metavar="N", help="frames per clip (default: 16)")
    add("--stride", type=int, metavar="N", help="use every N-th frame for a clip (default: 1)")
    add(
        "--step",
        type=int,
        metavar="N",
        help="frames from one clip's start to the next (default: frames x stride, no overlap)",
    )
    add("--size", type=int, metavar="N", help="height and width of a frame (default: 112)")
    add("--fps", metavar="RATE", help="frame rate to sample, such as 10 or 30000/1001")


def _add_stores(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--store",
        metavar="HOW",
        help="videos: h264 (default), raw, jpeg, packets; images: original (default), jpeg, raw",
    )
    add("--codec", metavar="NAME", help="codec for --store h264: h264 (default), hevc or av1")
    add(
        "--gop",
        type=int,
        metavar="N",
        help=("for --store h264: a keyframe every N frames (default: 16)"),
    )
    add(
        "--quality",
        type=int,
        metavar="N",
        help=(
            "for h264: crf, lower is better (default: 19, hevc 20, av1 30); for jpeg: 1 "
            "to 100 (default: 90)"
        ),
    )
    add(
        "--check",
        action="store_true",
        default=None,
        help="for packets and LeRobot: decode every frame once, to find damage",
    )
    add(
        "--audio",
        action="store_true",
        default=None,
        help="for videos: also store the audio, its packets untouched",
    )


def _add_arrays(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--rows",
        action=argparse.BooleanOptionalAction,
        help=(
            "for arrays, HDF5 and Zarr: one sample per row; with --no-rows one per file "
            "(default: rows for a single file; for HDF5 and Zarr also for several)"
        ),
    )
    add(
        "--column",
        type=utf8_name,
        action="append",
        dest="columns",
        metavar="NAME",
        help=(
            "for Arrow tables and LeRobot: convert this column or feature; repeatable "
            "(default: all)"
        ),
    )
    add(
        "--records",
        choices=("example", "bytes"),
        help=(
            "for TFRecord and ArrayRecord: tf.train.Example, or bytes (default: as the "
            "first record)"
        ),
    )
    add(
        "--schema",
        metavar="FILE",
        help="JSON file with the field types (default: inferred from the files)",
    )
    add(
        "--reference",
        type=utf8_name,
        dest="references",
        metavar="COLUMN",
        action="append",
        help="for CSV and JSON Lines: a column of file names; the files are stored instead",
    )


def _add_tokens(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dtype", metavar="NAME", help="dtype in the files: uint8, uint16, uint32, int32, int64")
    add(
        "--eot",
        type=int,
        metavar="ID",
        help=("the token between documents; each document is a sample"),
    )
    add("--length", type=int, metavar="N", help="tokens per sample (default: 1024)")


def _add_ends(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--keep-partial",
        action="store_true",
        help="keep the samples before the damage of a broken file",
    )
    add(
        "--on-error",
        choices=("skip", "stop"),
        default="skip",
        help="at a broken file: skip it, or stop and keep what is done (default: skip)",
    )
    add(
        "--resume",
        action="store_true",
        help="resume an interrupted conversion in OUT",
    )
    add(
        "--overwrite",
        action="store_true",
        help="start again; a dataset in OUT is replaced once the new one is complete",
    )
    add(
        "--append",
        action="store_true",
        help=(
            "add new files to the dataset in OUT; other options default to those it was made with"
        ),
    )


def _read_fields(path: str) -> Any:
    """Return the content of a JSON file; repeated keys are refused."""

    def named_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if twice := [name for name, n in counts.items() if n > 1]:
            raise shardio.InvalidArgument(f"{path}: {twice[0]!r} is there {counts[twice[0]]} times")
        return dict(pairs)

    try:
        with open(path, encoding="utf-8-sig") as file:
            return json.load(file, object_pairs_hook=named_once)
    except shardio.InvalidArgument:  # it is a ValueError, too
        raise
    except (ValueError, RecursionError) as error:
        raise shardio.InvalidArgument(f"{path}: not JSON: {error}") from error


def run(options: argparse.Namespace) -> int:
    """Convert, report, and return the exit code."""
    given = {n: v for n in CONVERTER_OPTIONS if (v := getattr(options, n)) is not None}
    if options.schema is not None:
        given["fields"] = _read_fields(options.schema)
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
    """Return measurements of a sample of the result; None if there is nothing or it cannot be read.

    A result in an object store is not read again.
    """
    if is_url(report.dataset):
        return None
    try:
        return measure_stored(report, options.src)
    except (shardio.ShardioError, OSError) as error:
        is_unchecked = options.store == "packets" and not options.check
        hint = "; --check finds such files, and leaves them out" if is_unchecked else ""
        print_error(f"the result was not measured: {escaped(str(error))}{hint}")
        return None


def _note(state: Any) -> str:
    """Return the progress in files and samples."""
    note = f"{state.n_inputs_done:,} of {format_count(state.n_inputs, 'file')}"
    note += f", {format_count(state.n_samples, 'sample')}"
    return f"{note}, {state.n_broken} broken" if state.n_broken else note
