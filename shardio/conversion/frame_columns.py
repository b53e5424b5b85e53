"""Columns of data frames, and what is told of those that hold objects of Python by looking at all.

A column is what a row's value becomes, with the field that takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final, NamedTuple

import numpy as np

from shardio.conversion.python_samples import is_picture, plain
from shardio.errors import InvalidArgument, SchemaError
from shardio.format.arraylike import refuse_masked
from shardio.format.fields import DTYPES, Array, Bytes, Field, Image, Json, List, Text


class Column(NamedTuple):
    """A column of a frame; `values` gives those of rows from a first one to before another."""

    name: str
    field: Field
    values: Callable[[int, int], Sequence[Any]]


def number_field(name: str, dtype: str, *, optional: bool = False) -> Array:
    """The field of a column of numbers.

    Raises:
        InvalidArgument: there is no such dtype.
    """
    if dtype not in DTYPES:
        raise InvalidArgument(
            f"column {name!r}: found {dtype}, which no field has; expected one of "
            f"{', '.join(DTYPES)}, or text: convert it first"
        )
    return Array(dtype, optional=optional)


def with_nulls(values: Sequence[Any], nulls: Sequence[bool]) -> list[Any]:
    """Values with None in the place of nulls."""
    return [None if null else value for value, null in zip(values, nulls, strict=True)]


def object_column(
    name: str, values: Callable[[int, int], Sequence[Any]], every: Iterable[Any]
) -> Column:
    """The column of objects of Python: what `every` one is, None for nulls, says the field.

    Raises:
        InvalidArgument: rows have objects that no one field takes; it names the first such row.
        SchemaError: a row has a masked array.
    """
    known: _Found | None = None
    has_nulls = False
    for row, value in enumerate(every):
        if value is None:
            has_nulls = True
            continue
        found = _found(name, row, value)
        merged = found if known is None else _merged(known, found)
        if merged is None:
            raise InvalidArgument(
                f"column {name!r}, row {row}: found {_said(found)}, expected {_said(known)} as in "
                "the rows before; make the column one type, as text by .astype(str)"
            )
        known = merged
    field = replace(known.field or Json() if known else Json(), optional=has_nulls)

    def stored(start: int, stop: int) -> list[Any]:
        return [_as(name, row, field, v) for row, v in enumerate(values(start, stop), start)]

    return Column(name, field, stored)


def _plain(name: str, row: int, value: Any, field: Field | None = None) -> Any:
    """Return the value of a row as `plain` does.

    Raises:
        InvalidArgument: it cannot be stored; the error names column and row.
    """
    try:
        return plain(value, field)
    except SchemaError as error:
        raise InvalidArgument(f"column {name!r}, row {row}: {error}") from error


class _Found(NamedTuple):
    """What takes a value, or those of all rows so far; no field yet: lists, all of them empty."""

    field: Field | None
    is_listed: bool = False
    """Whether it was a list, which JSON could say as well."""


def _merged(known: _Found, found: _Found) -> _Found | None:
    """What takes the values of both; None where nothing does."""
    if known == found:
        return known
    if (known.is_listed or isinstance(known.field, Json)) and (
        found.is_listed or isinstance(found.field, Json)
    ):
        if known.field is None or found.field is None:
            return known if found.field is None else found
    if isinstance(known.field, Array) and isinstance(found.field, Array):
        if (made := _merged_arrays(known.field, found.field)) is not None:
            return _Found(made, known.is_listed and found.is_listed)
    if isinstance(known.field, List) and isinstance(found.field, List):
        if (made := _merged_arrays(known.field.element, found.field.element)) is not None:
            return _Found(List(made), known.is_listed and found.is_listed)
    may_be_json = all(each.is_listed or isinstance(each.field, Json) for each in (known, found))
    return _Found(Json()) if may_be_json else None


def _merged_arrays(known: Array, found: Array) -> Array | None:
    """An array of either size; of whole and other numbers, one of the latter."""
    if len(known.shape) != len(found.shape):
        return None
    dtype = known.dtype
    if dtype != found.dtype:
        if {dtype, found.dtype} != {"int64", "float64"}:
            return None
        dtype = "float64"
    sizes = zip(known.shape, found.shape, strict=True)
    return Array(dtype, tuple(n if n == m else None for n, m in sizes))


def _said(found: _Found | None) -> str:
    field = found.field if found else None
    if isinstance(field, List):
        return f"a list of {_said(_Found(field.element))}"
    if isinstance(field, Array):
        dims = ", ".join("*" if n is None else str(n) for n in field.shape)
        return f"{field.dtype}[{dims}]" if dims else field.dtype
    return "lists or dicts" if field is None or isinstance(field, Json) else type(field).__name__


def _found(name: str, row: int, value: Any) -> _Found:
    """What takes one value."""
    refuse_masked(f"column {name!r}, row {row}", value)
    if isinstance(value, str | Decimal):
        return _TEXT
    if kind := _kind_of(value):
        return _NUMBERS[kind]
    if isinstance(value, bytes | bytearray | memoryview):
        return _BYTES
    if isinstance(value, Mapping):
        return _JSON
    if isinstance(value, list | tuple):
        return _found_of_list(value)
    if is_picture(value):
        return _Found(Image())
    made = _plain(name, row, value)
    if isinstance(made, np.ndarray) and made.dtype.name in DTYPES:
        return _Found(Array(made.dtype.name, tuple(n or None for n in made.shape)))
    kind = f"an array of {made.dtype}" if isinstance(made, np.ndarray) else _class_of(value)
    raise InvalidArgument(
        f"column {name!r}, row {row}: found {kind}; expected text, bytes, numbers, arrays, lists "
        "or dicts: convert the column first, as times to datetime64 or text"
    )


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _kind_of(value: object) -> str:
    """The dtype that takes a number of Python or NumPy; "" of what is none."""
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, int | np.integer):
        return "int64"
    return "float64" if isinstance(value, float | np.floating) else ""


def _found_of_list(value: Sequence[Any]) -> _Found:
    """Numbers are an array, lists of numbers a list of arrays; JSON says what else there is."""
    if not value:
        return _EMPTY
    kinds = {_kind_of(each) for each in value}
    if len(kinds) == 1 and (kind := kinds.pop()):
        return _Found(Array(kind, (None,)), is_listed=True)
    if all(isinstance(each, np.ndarray) for each in value):
        arrays = {(each.dtype.name, each.ndim) for each in value}
        dtype, n_dims = arrays.pop()
        return (
            _JSON if arrays or dtype not in DTYPES else _Found(List(Array(dtype, (None,) * n_dims)))
        )
    if all(isinstance(each, list | tuple) and each for each in value):
        kinds = {_kind_of(number) for each in value for number in each}
        if len(kinds) == 1 and (kind := kinds.pop()):
            return _Found(List(Array(kind, (None,))), is_listed=True)
    return _JSON


def _as(name: str, row: int, field: Field, value: Any) -> Any:
    """A value of a row as the field of its column takes it."""
    if value is None:
        return None
    if isinstance(field, List):
        return [np.asarray(each, field.element.numpy) for each in value]
    if isinstance(field, Array) and isinstance(value, list | tuple):
        return np.asarray(value, field.numpy)
    return str(value) if isinstance(field, Text) else _plain(name, row, value, field)


_TEXT: Final = _Found(Text())
_BYTES: Final = _Found(Bytes())
_JSON: Final = _Found(Json())
_EMPTY: Final = _Found(None, is_listed=True)
_NUMBERS: Final = {dtype: _Found(Array(dtype)) for dtype in ("bool", "int64", "float64")}
