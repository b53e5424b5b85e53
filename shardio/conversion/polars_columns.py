"""Columns of a frame of polars, by their types. polars itself is not imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from shardio.conversion.frame_columns import Column, number_field, object_column, with_nulls
from shardio.errors import InvalidArgument
from shardio.format.fields import DTYPES, Array, Bytes, Field, Json, List, Text

_TIMES: Final = {"Date": "int32", "Datetime": "int64", "Duration": "int64", "Time": "int64"}
_TEXTS: Final = ("String", "Utf8", "Categorical", "Enum")


def polars_columns(frame: Any) -> list[Column]:
    """The columns of a frame, those of structs under dotted names.

    Raises:
        InvalidArgument: a column is of a type that no field has.
    """
    return [column for series in frame for column in _polars_columns(series.name, series)]


def _polars_columns(name: str, series: Any) -> Iterator[Column]:
    kind = _kind(series.dtype)
    if kind == "Struct":
        inner = [field.name for field in series.dtype.fields]
        if not inner:
            raise InvalidArgument(f"column {name!r}: a struct without fields; drop the column")
        for each in inner:
            yield from _polars_columns(f"{name}.{each}", series.struct.field(each))
    elif dtype := _TIMES.get(kind):
        yield _polars_numbers(name, series.to_physical(), dtype)
    elif dtype := _number(series.dtype):
        yield _polars_numbers(name, series, dtype)
    elif kind == "Object":
        yield object_column(name, lambda a, b: series[a:b].to_list(), iter(series))
    elif kind in ("List", "Array"):
        yield _lists(name, series)
    else:
        yield _others(name, series, kind)


def _kind(dtype: Any) -> str:
    return str(dtype.base_type().__name__)


def _number(dtype: Any) -> str:
    """The dtype of an array that takes numbers of a type; "" for none."""
    name = "bool" if _kind(dtype) == "Boolean" else _kind(dtype).lower()
    return name if name in DTYPES else ""


def _polars_numbers(name: str, series: Any, dtype: str) -> Column:
    field = number_field(name, dtype, optional=series.null_count() > 0)
    if not field.optional:
        return Column(name, field, lambda start, stop: series[start:stop].to_numpy())

    def values(start: int, stop: int) -> Sequence[Any]:
        part = series[start:stop]
        zero = False if dtype == "bool" else 0
        return with_nulls(part.fill_null(zero).to_numpy(), part.is_null())

    return Column(name, field, values)


def _others(name: str, series: Any, kind: str) -> Column:
    optional = series.null_count() > 0
    field: Field
    values: Callable[[int, int], Sequence[Any]] = lambda a, b: series[a:b].to_list()  # noqa: E731
    if kind in _TEXTS:
        field = Text(optional=optional)
    elif kind == "Decimal":
        field = Text(optional=optional)
        return Column(
            name, field, lambda a, b: [None if v is None else str(v) for v in series[a:b]]
        )
    elif kind == "Binary":
        field = Bytes(optional=optional)
    elif kind == "Null":
        field = Json(optional=optional)
    else:
        raise InvalidArgument(
            f"column {name!r}: found {series.dtype}, which no field has; cast it to another type"
        )
    return Column(name, field, values)


def _lists(name: str, series: Any) -> Column:
    """Lists of numbers are arrays, lists of those a List of arrays; JSON says all else."""
    dims, inner = _dims(series.dtype)
    optional = series.null_count() > 0
    dtype = _number(inner)
    if not dtype or _has_nulls_within(series):
        _check_json(name, series.dtype)
        return Column(name, Json(optional=optional), lambda a, b: series[a:b].to_list())
    if None not in dims[1:]:
        shape = tuple(dims)
        numpy = Array(dtype).numpy
        return Column(
            name,
            Array(dtype, shape, optional=optional),
            lambda a, b: [None if v is None else _array(v, numpy, shape) for v in series[a:b]],
        )
    if len(dims) == 2:
        return Column(
            name,
            List(Array(dtype, (None,)), optional=optional),
            lambda a, b: [
                None if v is None else [each.to_numpy() for each in v] for v in series[a:b]
            ],
        )
    return Column(name, Json(optional=optional), lambda a, b: series[a:b].to_list())


def _array(value: Any, dtype: Any, shape: tuple[int | None, ...]) -> Any:
    array = np.asarray(value.to_numpy() if len(shape) == 1 else value.to_list(), dtype)
    return array.reshape(-1, *shape[1:]) if len(shape) > 1 else array


def _dims(dtype: Any) -> tuple[list[int | None], Any]:
    """The dimensions of lists in one another, None where they vary, and what the innermost has."""
    dims: list[int | None] = []
    while _kind(dtype) in ("List", "Array"):
        dims.append(dtype.size or None if _kind(dtype) == "Array" else None)
        dtype = dtype.inner
    return dims, dtype


def _has_nulls_within(series: Any) -> bool:
    """Whether there are nulls among what lists hold, at any depth."""
    while (kind := _kind(series.dtype)) in ("List", "Array"):
        series = series.drop_nulls()
        if kind == "List":
            series = series.filter(series.list.len() > 0)
        series = series.explode()
        if series.null_count():
            return True
    return False


def _check_json(name: str, dtype: Any) -> None:
    kind = _kind(dtype)
    if kind in ("List", "Array"):
        _check_json(name, dtype.inner)
    elif kind == "Struct":
        for field in dtype.fields:
            _check_json(name, field.dtype)
    elif not (kind in (*_TEXTS, "Null") or _number(dtype)):
        raise InvalidArgument(
            f"column {name!r}: in a list, or in JSON, {dtype} cannot be stored; cast it to text"
        )
