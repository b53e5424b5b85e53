"""Compute mean, deviation and range of fields; count each class.

The result is stored in the next generation of the dataset. `shardio inspect` shows the result, and
dataset.stats returns it in Python.

Examples:
    shardio stats out/ --decode
    shardio stats out/ --subset train --json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import shardio
from shardio.maintenance import compute_stats
from shardio_tools.arguments import add_engine_arguments, add_output_arguments, engine_options
from shardio_tools.output import (
    escaped,
    format_count,
    generation_text,
    print_result,
    shown_path,
    utf8_name,
    wants_progress,
)
from shardio_tools.screen import Cell, Done, Element, Heading, Next, Table

_COLUMNS = ("mean", "std", "min", "max", "count")


def describe_stats(stats: Mapping[str, Any], rest: str) -> Iterator[Element]:
    """Yield the elements for stored statistics of the whole dataset and of subsets."""
    if "whole" in stats:
        yield Heading("Statistics")
        yield from describe_counts(stats["whole"])
    of_subsets = stats.get("subsets")
    for name, found in of_subsets.items() if isinstance(of_subsets, Mapping) else ():
        yield Heading(f"Statistics of subset {escaped(name)}")
        yield from describe_counts(found)
        yield from describe_classes(found, rest)


def describe_counts(found: Any) -> Iterator[Element]:
    """Yield a table of mean, deviation and range per field."""
    fields = found.get("fields") if isinstance(found, Mapping) else None
    if not isinstance(fields, Mapping) or not fields:
        yield "  none"
        return
    known = {name: values for name, values in fields.items() if isinstance(values, Mapping)}
    rows = []
    for name, values in known.items():
        numbers = [_number(values.get(key)) for key in _COLUMNS]
        rows.append([escaped(name), *numbers, Cell(_remarks(values), "warning")])
    yield Table(rows, ("field", *_COLUMNS, ""), "<....>")
    pictured = {name: values for name, values in known.items() if _has_pixels(values)}
    for name, values in pictured.items():
        fields_option = f", fields={name!r}" if len(pictured) > 1 else ""
        mean, std = (_scaled(values["channels"][key]) for key in ("mean", "std"))
        yield f"  Normalize(mean=({mean}), std=({std}){escaped(fields_option)})"


def describe_classes(found: Any, rest: str) -> Iterator[Element]:
    """Yield a table of samples per class, if there are any."""
    classes = found.get("classes") if isinstance(found, Mapping) else None
    if isinstance(classes, Mapping):
        yield Heading("Classes")
        cells = [[escaped(name), _number(n)] for name, n in classes.items()]
        yield Table(cells, ("class", "samples"), "<>", rest)


def _has_pixels(values: Mapping[str, Any]) -> bool:
    """Return True if a field has statistics of pictures: three channels, levels from 0 to 255."""
    channels = values.get("channels")
    return bool(values.get("pictures") and values.get("count")) and isinstance(channels, Mapping)


def _scaled(levels: Sequence[float]) -> str:
    return ", ".join(f"{level / 255:.4f}" for level in levels)


def _remarks(values: Mapping[str, Any]) -> str:
    parts = []
    for key, words in (("not_finite", "not finite"), ("missing", "missing")):
        if n := values.get(key):
            parts.append(f"{_number(n)} {words}")
    if "frames_per_video" in values:
        n = values["frames_per_video"]
        parts.append("all frames" if n is None else f"{_number(n)} frames of each video")
    smallest, largest = values.get("smallest"), values.get("largest")
    if smallest != largest:
        is_picture = "pictures" in values and len(smallest or ()) == 3
        axes = " (height × width × channels)" if is_picture else ""
        parts.append(f"shapes {_shape(smallest)} to {_shape(largest)}{axes}")
    return ", ".join(parts)


def _shape(dims: Any) -> str:
    return " × ".join(map(str, dims)) if isinstance(dims, list) else str(dims)


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else "?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset")
    add("--subset", type=utf8_name, metavar="NAME", help="compute statistics of this subset only")
    add(
        "--decode",
        action="store_true",
        help="decode images and videos, for statistics of their pixels",
    )
    add(
        "--frames",
        type=_n_frames,
        default=8,
        metavar="N|all",
        help="maximum number of frames to decode of each video, evenly spread (default: 8)",
    )
    add_engine_arguments(
        add, "processes (default: with --decode one per CPU, else 0: the calling process)"
    )
    add_output_arguments(add, json="print the statistics as JSON")


def _n_frames(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 up, or all; found {text!r}")
    return int(text)


def _not_decoded(path: str, found: Mapping[str, Any]) -> Iterator[Element]:
    with shardio.open(path) as dataset:
        for name, field in dataset.schema.items():
            if field.medium in ("image", "video") and name not in found["fields"]:
                text = f"{escaped(name)}: no statistics of pixels; --decode computes them"
                yield Cell(text, "warning")


def run(options: argparse.Namespace) -> int:
    """Compute, report, and return the exit code."""
    report = compute_stats(
        options.path,
        subset=options.subset,
        decode=options.decode,
        frames=options.frames,
        workers=options.workers,
        progress=wants_progress(options),
        **engine_options(options),
    )
    part = "" if report.subset is None else f" of subset {escaped(report.subset)}"
    n_samples = format_count(report.stats["samples"], "sample")
    done = f"computed statistics of {n_samples}{part}"
    steps = Next(
        [(f"shardio inspect {shown_path(options.path)}", "show them again")],
        [(f"shardio.open({escaped(options.path)!r}).stats", "read them")],
    )
    end: list[Element] = [Done(f"{done}, stored in {generation_text(report, options)}"), steps]
    if report.not_stored:
        path = escaped(options.path)
        end = [Done(f"{done}, not stored: {path}: {report.not_stored}", "warning")]
    found = (
        *describe_counts(report.stats),
        *_not_decoded(options.path, report.stats),
        *describe_classes(report.stats, "--json lists all"),
    )
    print_result(report, options, [*found, *end])
    return 3 if report.not_stored else 0
