"""Convert a folder of videos, images, tables or other files.

Every file below SRC that is not hidden is read and reported. A file's folder is its class. Exit
code 1 means that some files are broken, or have changed since they were converted: these files are
listed, and all others are converted. The exit code is also 1 if there is no sample.

Examples:
    shardio convert videos/ out/                  # one folder of videos per class
    shardio convert videos/ out/ --frames 32 --size 128
    shardio convert photos/ out/ --labels labels.csv
    shardio convert 'train-*.parquet' out/ --overwrite
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import shardio
from shardio.conversion import known_kinds
from shardio.measuring import StoredReport, measure_stored
from shardio_tools.arguments import (
    add_engine_arguments,
    add_output_arguments,
    add_shard_bytes_argument,
    engine_options,
    is_url,
    parse_shares,
)
from shardio_tools.convert_report import describe_report, no_samples_line, report_as_json
from shardio_tools.converter_options import add_converter_options, given_options
from shardio_tools.output import (
    escaped,
    print_error,
    print_json,
    print_screen,
    utf8_name,
    wants_progress,
)

_MAIN_OPTIONS: Final = ("--size", "--store")
"""Options of converters that the help lists with the main options, not in a group of a kind."""


def add_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str] = ()) -> None:
    """Add the arguments of the command and the options of converters to the command's parser.

    The options of a third-party converter are added only if `arguments` selects it with --kind.
    """
    add = parser.add_argument
    add(
        "src",
        metavar="SRC",
        help=(
            "a folder of videos, images, audio, arrays or other data; a single file; or a "
            "pattern, in quotes, that matches files or folders"
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
    add(
        "--overwrite",
        action="store_true",
        help="start again; a dataset in OUT is replaced once the new one is complete",
    )
    _add_subsets(parser.add_argument_group("subsets"))
    _add_ends(parser.add_argument_group("appending, resuming and broken files"))
    add = parser.add_argument_group("shard size, processes and machines").add_argument
    add_shard_bytes_argument(add)
    add_engine_arguments(add, "processes (default: one per usable CPU)")
    add_output_arguments(parser.add_argument_group("output").add_argument, "print problems only")
    add_converter_options(parser, _kind_in(arguments), _MAIN_OPTIONS)


def _kind_in(arguments: Sequence[str]) -> str | None:
    """Return the value of --kind in `arguments`; None if it is missing or unknown."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--kind")
    try:
        kind: str | None = parser.parse_known_args(arguments)[0].kind
    except argparse.ArgumentError:  # reported by the parser of the command
        return None
    return kind if kind in known_kinds() else None


def _add_subsets(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--split",
        type=parse_shares,
        metavar="NAME=SHARE,…",
        help="assign samples to subsets at random, for example train=0.9,val=0.1",
    )
    add("--split-seed", type=int, metavar="N", default=0, help="random seed (default: 0)")
    add(
        "--split-folders",
        action=argparse.BooleanOptionalAction,
        help=(
            "make each folder named train, val, test or similar a subset, and not a part of a "
            "class; if there are no such folders, make subsets of tables, records and tars with "
            "such names, as in train.csv (default: if two or more lie side by side)"
        ),
    )


def _add_ends(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--append",
        action="store_true",
        help="add new files to the dataset in OUT; options default to those of the dataset",
    )
    add("--resume", action="store_true", help="resume an interrupted conversion in OUT")
    add(
        "--on-error",
        choices=("skip", "stop"),
        default="skip",
        help="at a broken file: skip it, or stop and keep what is done (default: skip)",
    )
    add(
        "--keep-partial",
        action="store_true",
        help="keep those samples of a broken file that come before the damage",
    )


def run(options: argparse.Namespace) -> int:
    """Convert, report, and return the exit code."""
    given = given_options(options)
    report = shardio.convert(
        options.src,
        options.out,
        kind=options.kind,
        workers=options.workers,
        on_error=options.on_error,
        keep_partial=options.keep_partial,
        shard_bytes=options.shard_bytes,
        resume=options.resume,
        overwrite=options.overwrite,
        append=options.append,
        labels=options.labels,
        split=options.split,
        split_seed=options.split_seed,
        split_folders=options.split_folders,
        **engine_options(options),
        progress=wants_progress(options),
        **given,
    )
    code = 1 if report.broken or report.modified or not report.generation else 0
    if options.quiet and not options.json:
        for source in (*report.modified, *report.broken):
            print_error(f"{source.outcome}: {escaped(source.name)}: {escaped(source.reason)}")
        if not report.generation:
            print_error(no_samples_line(report))
        return code
    stored = _measured(report, options)
    if options.json:
        print_json(report_as_json(report, stored))
    else:
        print_screen(describe_report(report, stored, options))
    return code


def _measured(report: shardio.ConversionReport, options: argparse.Namespace) -> StoredReport | None:
    if is_url(report.dataset):
        return None
    try:
        return measure_stored(report, options.src)
    except (shardio.ShardioError, OSError) as error:
        given = given_options(options)
        is_unchecked = given.get("store") == "packets" and not given.get("check")
        hint = "; with --check, shardio leaves such files out" if is_unchecked else ""
        print_error(f"the result was not measured: {escaped(str(error))}{hint}")
        return None
