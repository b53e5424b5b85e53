"""Data frames in memory, read through Arrow: their columns, by ranges of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from shardio import InvalidArgument, MediaError
from shardio_converters.schema_spec import Field, parse_field
from shardio_converters.tabular.arrow_columns import (
    UNKNOWN,
    ArrowColumn,
    array_at,
    check_json,
    columns_below,
    dims_of,
    has_nulls_inside,
    is_list,
    values_of,
)

FrameColumn = tuple[str, Field, Callable[[int, int], Sequence[Any]]]
"""The name, the field, and a function that returns the values of a range of rows."""


def read_frame(frame: Any, refused: str) -> pa.Table:
    """Return a data frame as a table, without a copy where its library allows it."""
    try:
        return pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidArgument(refused) from error


def frame_columns(table: pa.Table) -> Iterator[FrameColumn]:
    """Yield the columns of a table; members of structs have dotted names.

    Lists of times are refused, as the units would be lost. Arrays of several dimensions that all
    vary become JSON, because their rows may be ragged.
    """
    for place, (name, type_) in enumerate(zip(table.schema.names, table.schema.types, strict=True)):
        of_column = table.select([place])
        try:
            for column in columns_below(name, type_):
                field = _field_of(of_column, column)
                yield column.name, field, partial(_rows, of_column, column, field)
        except MediaError as error:
            raise InvalidArgument(str(error)) from error


def _field_of(table: pa.Table, column: ArrowColumn) -> Field:
    """Return the field that stores all values of a column."""
    if column.unit and is_list(column.type):
        _, element = dims_of(column.name, column.type)
        raise MediaError(
            f"column {column.name!r}: {element} cannot be stored in a list or in JSON; cast it to "
            "text"
        )
    arrays = [array_at(batch, column) for batch in table.to_batches()]
    word = column.word
    is_deep = word.startswith("list[") and "," in word
    if word == UNKNOWN or is_deep or any(map(has_nulls_inside, arrays)):
        check_json(column.name, column.type)
        word = "json"
    is_optional = any(array.null_count for array in arrays)
    return parse_field(column.name, f"{word}{'?' if is_optional else ''}")


def _rows(
    table: pa.Table, column: ArrowColumn, field: Field, start: int, stop: int
) -> Sequence[Any]:
    """Return the values of a range of rows."""
    (batch,) = table.slice(start, stop - start).combine_chunks().to_batches()
    try:
        return values_of(batch, column, field, start)
    except MediaError as error:
        raise InvalidArgument(str(error)) from error
