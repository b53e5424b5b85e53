"""Columns of a frame of pandas, by their dtypes. pandas itself is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardio.conversion.frame_columns import Column, number_field, object_column, with_nulls


def pandas_columns(frame: Any) -> list[Column]:
    """The columns of a frame, behind those of its index that have a name.

    Raises:
        InvalidArgument: a column is of a type that no field has.
    """
    index = frame.index
    named = [level for level, name in enumerate(index.names) if name is not None]
    found = [
        _pandas_column(index.names[level], index.get_level_values(level).to_series())
        for level in named
    ]
    return found + [
        _pandas_column(name, frame.iloc[:, position]) for position, name in enumerate(frame.columns)
    ]


def _pandas_column(name: str, series: Any) -> Column:
    dtype = series.dtype
    if hasattr(series, "sparse") and hasattr(dtype, "fill_value"):
        return _pandas_column(name, series.sparse.to_dense())
    if isinstance(dtype, np.dtype) and dtype.kind in "biufc":
        values = series.to_numpy()
        return Column(name, number_field(name, dtype.name), lambda start, stop: values[start:stop])
    if getattr(dtype, "kind", "O") in "biuf" and hasattr(dtype, "numpy_dtype"):
        return _nullable(name, series, dtype.numpy_dtype)
    if hasattr(series.array, "asi8"):
        return _times(name, series)
    return _objects(name, series)


def _nullable(name: str, series: Any, dtype: Any) -> Column:
    """Numbers of a dtype that has nulls beside them."""
    nulls = series.isna().to_numpy()
    values = series.to_numpy(dtype=dtype, na_value=dtype.type(0))
    return _pandas_numbers(name, values, nulls)


def _pandas_numbers(name: str, values: Any, nulls: Any) -> Column:
    if not nulls.any():
        field = number_field(name, values.dtype.name)
        return Column(name, field, lambda start, stop: values[start:stop])
    field = number_field(name, values.dtype.name, optional=True)
    return Column(
        name,
        field,
        lambda start, stop: with_nulls(values[start:stop], nulls[start:stop]),
    )


def _times(name: str, series: Any) -> Column:
    """Points and spans of time, as whole numbers of the column's unit; points in UTC."""
    return _pandas_numbers(name, np.asarray(series.array.asi8), series.isna().to_numpy())


def _objects(name: str, series: Any) -> Column:
    nulls = series.isna().to_numpy()
    values = series.to_numpy(dtype=object)
    if hasattr(series, "cat"):  # whole numbers beside a null would come as floating-point ones
        classes = [*series.cat.categories.tolist(), None]
        values = np.array([None, *classes], object)[1:][series.cat.codes.to_numpy()]
    every = (None if null else value for value, null in zip(values, nulls, strict=True))
    return object_column(
        name, lambda start, stop: with_nulls(values[start:stop], nulls[start:stop]), every
    )
