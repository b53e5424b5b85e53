"""The fields of tables, told from all of them, each read to its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from shardio import Input, InvalidArgument, MediaError
from shardio_converters.inference import SchemaProbe
from shardio_converters.schema_spec import check_names, parse_schema
from shardio_converters.tables.columns import TableInference
from shardio_converters.tabular.table_files import (
    RowBlock,
    file_spec,
    is_csv,
    is_table,
    read_blocks,
)


def infer_table_fields(inputs: Sequence[Input], references: Sequence[str]) -> dict[str, str]:
    """What the columns of all tables that can be read are, in a word each.

    Raises:
        InvalidArgument: there is none, or no table has a column of `references`.
    """
    found, named = TableInference(), {name: _Named() for name in references}
    n_files, looks = 0, SchemaProbe(inputs)
    for one in looks.files():
        if not is_table(one.name):
            continue
        with looks.at(one):
            columns, names = _look_at(one, references)
            if columns.names:
                check_names(dict.fromkeys([*found.names, *columns.names]), "columns")
            n_files += bool(columns.names)
            found.merge(columns)
            for name in references:
                named[name].merge(names[name])
    if not n_files:
        raise looks.none_of(
            "table in .csv, .tsv, .jsonl or .ndjson that can be read and has columns"
        )
    fields = found.as_specs()
    for name in references:
        if name not in fields:
            raise InvalidArgument(
                f"references: no table has a column {name!r}; there are {', '.join(sorted(fields))}"
            )
        is_optional = named[name].has_empty or fields[name].endswith("?")
        fields[name] = file_spec(named[name].suffixes) + "?" * is_optional
    parse_schema(fields)
    return fields


def values_by_name(block: RowBlock, name: str) -> Sequence[Any]:
    """A column, or what objects in one have by a dotted name; empty where there is none."""
    if name in block.columns:
        return block.columns[name]
    column, _, inner = name.partition(".")
    values = block.columns.get(column, ())
    while inner:
        key, _, inner = inner.partition(".")
        values = [each.get(key) if isinstance(each, dict) else None for each in values]
    return values


class _Named:
    """The files that a column names: their suffixes, and whether a row names none."""

    def __init__(self) -> None:
        self.suffixes: set[str] = set()
        self.has_empty = False

    def add(self, values: Sequence[Any]) -> None:
        names = [each for each in values if isinstance(each, str) and each]
        self.has_empty |= len(names) < len(values)
        self.suffixes |= {f"x{os.path.splitext(each)[1].lower()}" for each in names}

    def merge(self, other: _Named) -> None:
        self.suffixes |= other.suffixes
        self.has_empty |= other.has_empty


def _look_at(one: Input, references: Sequence[str]) -> tuple[TableInference, dict[str, _Named]]:
    """What a table has, if all of it can be read."""
    columns, named, n_names = TableInference(), {name: _Named() for name in references}, 0
    for block in read_blocks(one.path, one.name):
        columns.add(block, is_csv=is_csv(one.name))
        if len(columns.names) > n_names:
            check_names(columns.names, "columns")
            n_names = len(columns.names)
        for name, found in named.items():
            found.add(values_by_name(block, name))
    try:
        if columns.names:
            parse_schema(columns.as_specs())
    except InvalidArgument as error:
        raise MediaError(str(error)) from error
    return columns, named
