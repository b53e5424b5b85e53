"""Convert CSV cells and JSON values to values of fields, without loss of digits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio import Array, MediaError
from shardio_converters.parsing import TOO_DEEP, float_of, is_out_of_range, is_too_deep
from shardio_converters.schema_spec import Field, fits, format_spec
from shardio_converters.tabular.table_files import load

INT: Final = "int"
FLOAT: Final = "float"
BOOL: Final = "bool"
TEXT: Final = "text"
KIND_BY_DTYPE: Final = {"b": BOOL, "i": INT, "u": INT, "f": FLOAT}  # by the kinds of NumPy's dtypes

_MAX_NUMBER: Final = 400  # the maximum length of a number in characters; Python also has a limit
# Digits with a leading zero are not a number; they may be a postal code.
_WHOLE: Final = r"[+-]?(?:0|[1-9][0-9]*+)"
_TOKENS: Final = {
    BOOL: r"(?i:true|false)",
    INT: _WHOLE,
    FLOAT: (
        r"(?:[+-]?(?:[0-9]++\.[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?"
        rf"|{_WHOLE}(?:[eE][+-]?[0-9]++)?|[+-]?(?i:nan|inf|infinity))"
    ),
}
_COLUMNS: Final = {
    kind: re.compile(rf"(?:(?: *+{token} *+)?\n)*+", re.ASCII) for kind, token in _TOKENS.items()
}


def _holds_only(kind: str, cells: Sequence[str]) -> bool:
    """Return True if all cells are empty or of this kind; spaces are ignored."""
    text = "\n".join((*cells, ""))
    return (
        bool(_COLUMNS[kind].fullmatch(text))
        and text.count("\n") == len(cells)
        and max(map(len, cells), default=0) <= _MAX_NUMBER
    )


def cell_kind(cells: Sequence[str]) -> str:
    """Return the narrowest kind that covers all cells that are not empty."""
    kind = next((kind for kind in (BOOL, INT, FLOAT) if _holds_only(kind, cells)), TEXT)
    if kind == FLOAT and any(is_out_of_range(cell, float(cell)) for cell in cells if cell):
        return TEXT
    return kind


MAX_EXACT: Final = 1 << 53  # the largest magnitude up to which float64 represents every integer
_MAX_DIMS: Final = 17  # the maximum number of dimensions of a field, plus one for rows


def as_numbers(values: list[Any]) -> npt.NDArray[Any] | None:
    """Return nested lists as an array of bool, int64, uint64 or float64, or None.

    None stands for mixed kinds of values, ragged lengths, or integers that the array would change.
    """
    types = {*map(type, values)}
    flat, n_dims = values, 1
    while types == {list} and n_dims < _MAX_DIMS:
        flat = [*chain.from_iterable(flat)]
        types = {*map(type, flat)}
        n_dims += 1
    if not (types <= {int, float} or types == {bool}):
        return None
    try:
        if types == {int}:
            with suppress(OverflowError):
                return np.array(values, np.int64)
            return np.array(values, np.uint64) if min(flat) >= 0 else None
        found = np.array(values, np.bool_ if types == {bool} else np.float64)
    except (ValueError, OverflowError):
        return None
    if int in types and any(abs(each) > MAX_EXACT for each in flat if type(each) is int):
        return None
    return found


def _cast(field: Array, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert numbers to a field's dtype; a float dtype may round them."""
    dtype = field.numpy
    if array.dtype == dtype or not array.size:
        return array.astype(dtype, copy=False)
    if array.dtype.kind not in {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.kind]:
        raise ValueError(f"expected {_spec(field)}, found {array.dtype.name}")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        for far in (int(array.min()), int(array.max())):
            if not limits.min <= far <= limits.max:
                raise ValueError(
                    f"expected {_spec(field)}, found {far}, outside {limits.min} to {limits.max}"
                )
        return array.astype(dtype)
    with np.errstate(over="ignore"):
        found = array.astype(dtype)
    if (np.isinf(found) & np.isfinite(array)).any():
        raise ValueError(f"expected {_spec(field)}, found a number out of range")
    return found


_MAX_SHOWN: Final = 40
# `float` returns one of these for a number out of range
_ODD: Final = frozenset((float("inf"), float("-inf"), 0.0))

Column = Sequence[Any]


def values_of(
    name: str, field: Field, column: Column, lines: Sequence[int], *, is_csv: bool
) -> Iterable[Any]:
    """Return the values of a field for some rows; None if an optional value is missing.

    `column` holds the cells or JSON values, and `lines` the line number of each row.
    """
    make = partial(_of_cells if is_csv else _of_values, field)
    try:
        return make(column)
    except (ValueError, RecursionError) as error:
        for line, value in zip(lines, column, strict=True):
            try:
                make([value])
            except (ValueError, RecursionError) as reason:
                raise MediaError(f"line {line}, column {name!r}: {reason}") from error
        raise MediaError(f"column {name!r}: {error}") from error


def _of_cells(field: Field, cells: Column) -> Iterable[Any]:
    """Return the values of CSV cells; an empty cell is empty text in a required text field."""
    if field.is_utf8:
        return [cell or None for cell in cells] if field.optional else cells
    if field.is_json or field.shape:
        return _of_values(field, [load(cell) if cell else None for cell in cells])
    kind = KIND_BY_DTYPE[field.numpy.kind]
    if not _holds_only(kind, cells):
        raise ValueError(_expected(field, cells[0]))
    make = _MAKERS[kind]
    values = [*map(make, cells)] if all(cells) else [make(one) if one else None for one in cells]
    if kind == FLOAT and not _ODD.isdisjoint(values):
        for cell, value in zip(cells, values, strict=True):
            if value in _ODD:
                float_of(cell)  # raises OutOfRange, unless the cell is written as 0 or infinity
    return _of_values(field, values)


_MAKERS: Final[dict[str, Callable[[str], Any]]] = {
    BOOL: lambda cell: cell.strip().lower() == "true",
    INT: int,
    FLOAT: float,
}


def _of_values(field: Field, values: Column) -> Iterable[Any]:
    if field.is_json:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()  # NaN, lone surrogates
        if is_too_deep(values):
            raise ValueError(TOO_DEEP)
        return values
    if None in values:
        if not field.optional:
            raise ValueError(f"is missing; expected {_spec(field)}")
        there = iter(_of_values(field, [each for each in values if each is not None]))
        return [None if each is None else next(there) for each in values]
    if field.is_utf8:
        if {*map(type, values)} - {str}:
            raise ValueError(_expected(field, values[0]))
        "".join(values).encode()  # raises an error for lone surrogates, which JSON may contain
        return values
    return _arrays(field, values)


def _arrays(field: Array, values: Column) -> Sequence[Any] | npt.NDArray[Any]:
    """Return arrays or numbers; rows are converted together if possible, for speed."""
    if field.shape == (None,) and {*map(type, values)} == {list}:
        flat = [*chain.from_iterable(values)]
        found = as_numbers(flat) if flat else np.empty(0, field.numpy)
        if found is not None and found.ndim == 1:
            whole = _cast(field, found)
            ends = [*accumulate(map(len, values), initial=0)]
            return [whole[start:end] for start, end in pairwise(ends)]
    elif (found := as_numbers([*values])) is not None and found.ndim == 1 + len(field.shape):
        if not fits(shape := found.shape[1:], field.shape):
            raise ValueError(f"expected {_spec(field)}, found {format_spec(field.dtype, shape)}")
        return _cast(field, found)
    if len(values) != 1:
        return [_arrays(field, [each])[0] for each in values]
    (value,) = values
    if value == [] and len(field.shape) > 1:  # [] may have any number of dimensions
        return [np.empty((0, *(n or 0 for n in field.shape[1:])), field.numpy)]
    raise ValueError(_expected(field, value))


def _spec(field: Field) -> str:
    return format_spec(field.dtype, field.shape) if field.array else field.spec_name()


def _expected(field: Field, value: Any) -> str:
    text = repr(value)
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    return f"expected {_spec(field)}, found {shown}"
