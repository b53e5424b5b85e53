"""Compute mean, deviation and range of fields, and count classes.

The result is stored in the next generation of the dataset; shardio inspect and dataset.stats return
it.

Examples:
    shardio stats out/
    shardio stats out/ --subset train --json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from shardio.maintenance import compute_stats
from shardio_tools.arguments import add_engine_arguments, add_output_arguments, engine_options
from shardio_tools.output import (
    StepProgress,
    escaped,
    format_count,
    format_list,
    format_table,
    generation_text,
    print_result,
    utf8_name,
)

_COLUMNS = ("mean", "std", "min", "max", "count")


def describe_stats(stats: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about stored statistics of the whole dataset and of subsets."""
    if "whole" in stats:
        yield "statistics"
        yield from describe_counts(stats["whole"])
    of_subsets = stats.get("subsets")
    for name, found in of_subsets.items() if isinstance(of_subsets, Mapping) else ():
        yield f"statistics of subset {escaped(name)}"
        yield from describe_counts(found)


def describe_counts(found: Any) -> Iterator[str]:
    """Yield a table of mean, deviation and range per field, and the classes."""
    fields = found.get("fields") if isinstance(found, Mapping) else None
    if not isinstance(fields, Mapping) or not fields:
        yield "  none"
        return
    rows = [["field", *_COLUMNS, ""]]
    for name, values in fields.items():
        if isinstance(values, Mapping):
            cells = [_number(values.get(key)) for key in _COLUMNS]
            rows.append([escaped(name), *cells, _remarks(values)])
    yield format_table(rows, indent="  ")
    if isinstance(classes := found.get("classes"), Mapping):
        lines = [f"{escaped(name)}: {_number(n)}" for name, n in classes.items()]
        yield f"samples of {format_count(len(lines), 'class', 'classes')}"
        yield format_list(lines, "--json lists all")


def _remarks(values: Mapping[str, Any]) -> str:
    parts = []
    for key, words in (("not_finite", "not finite"), ("missing", "missing")):
        if n := values.get(key):
            parts.append(f"{_number(n)} {words}")
    smallest, largest = values.get("smallest"), values.get("largest")
    if smallest != largest:
        parts.append(f"{_shape(smallest)} to {_shape(largest)}")
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
    add("--subset", type=utf8_name, metavar="NAME", help="compute statistics of one of its subsets")
    add_engine_arguments(add)
    add_output_arguments(add, json="print the statistics as JSON")


def run(options: argparse.Namespace) -> int:
    """Compute, report, and return the exit code."""
    with StepProgress(options) as steps:
        report = compute_stats(
            options.path, subset=options.subset, progress=steps.show, **engine_options(options)
        )
    part = "" if report.subset is None else f" of subset {escaped(report.subset)}"
    n_samples = format_count(report.stats["samples"], "sample")
    last = f"computed statistics of {n_samples}{part}, stored in {generation_text(report)}"
    print_result(report, options, [*describe_counts(report.stats), last])
    return 0
