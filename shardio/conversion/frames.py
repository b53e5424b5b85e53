"""Data frames of pandas and polars as samples: a row each, a field of each column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from shardio.conversion.frame_columns import Column
from shardio.conversion.pandas_columns import pandas_columns
from shardio.conversion.polars_columns import polars_columns
from shardio.errors import InvalidArgument, ShardioError
from shardio.format.arraylike import is_of
from shardio.format.schema import Schema

_AT_ONCE: Final = 4096
"""Rows that are taken out of a frame at a time: a copy of these is in memory."""


def is_frame(src: object) -> bool:
    """Whether it is a data frame.

    Raises:
        InvalidArgument: it is something of pandas or polars that is none.
    """
    for package in ("pandas", "polars"):
        if is_of(src, package, "DataFrame"):
            return True
        if is_of(src, package, "Series"):
            raise InvalidArgument("a Series has no names of fields; expected a frame: .to_frame()")
    if is_of(src, "polars", "LazyFrame"):
        raise InvalidArgument("a LazyFrame has no rows yet; expected a DataFrame: .collect()")
    return False


class FrameRows:
    """The rows of a frame as dicts, and their schema, for which every row was looked at.

    Raises:
        InvalidArgument: a column is of a type that no field has, or its name is that of no field.
    """

    def __init__(self, frame: Any) -> None:
        self._n_rows = len(frame)
        is_pandas = is_of(frame, "pandas", "DataFrame")
        self._columns: Sequence[Column] = (pandas_columns if is_pandas else polars_columns)(frame)
        names: list[Any] = [column.name for column in self._columns]  # pandas takes any object
        for name in names:
            if not isinstance(name, str) or names.count(name) > 1:
                what = "is there twice" if isinstance(name, str) else "is no string"
                raise InvalidArgument(f"the name of column {name!r} {what}; rename it")
        try:
            self.schema = Schema({column.name: column.field for column in self._columns})
        except ShardioError as error:
            hint = "; rename or drop it" if names else ""
            raise InvalidArgument(f"the columns are no fields: {error}{hint}") from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = [column.name for column in self._columns]
        for start in range(0, self._n_rows, _AT_ONCE):
            stop = min(start + _AT_ONCE, self._n_rows)
            parts = [column.values(start, stop) for column in self._columns]
            for row in zip(*parts, strict=True):
                yield dict(zip(names, row, strict=True))
