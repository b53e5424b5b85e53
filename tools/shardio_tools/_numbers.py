"""How statistics of a dataset are put into words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardio_tools.output import escaped, format_count, format_list, format_table

_COLUMNS = ("mean", "std", "min", "max", "count")


def describe_stats(stats: Mapping[str, Any]) -> Iterator[str]:
    """Describe what a generation keeps: of the whole dataset, and of subsets."""
    if "whole" in stats:
        yield "statistics"
        yield from describe_counts(stats["whole"])
    of_subsets = stats.get("subsets")
    for name, found in of_subsets.items() if isinstance(of_subsets, Mapping) else ():
        yield f"statistics of subset {escaped(name)}"
        yield from describe_counts(found)


def describe_counts(found: Any) -> Iterator[str]:
    """Put mean, deviation and range of each field, and the classes, into a table."""
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
    """Say what is unusual about a field: numbers that are none, dimensions that vary."""
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
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if _is_float(value) else "?"


def _is_float(value: Any) -> bool:
    return isinstance(value, float)
