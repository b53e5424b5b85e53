"""Convert CSV cells and JSON values to values of fields, without loss of digits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio import Array, MediaError
from shardio_converters.parsing import float_of
from shardio_converters.schema_spec import Field, format_spec
from shardio_converters.tabular.table_files import NESTED, inside, load

INT: Final = "int"
FLOAT: Final = "float"
BOOL: Final = "bool"
TEXT: Final = "text"

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


def holds_only(kind: str, cells: Sequence[str]) -> bool:
    """Return True if all cells are empty or of this kind; spaces around numbers are ignored."""
    text = "\n".join((*cells, ""))
    return (
        bool(_COLUMNS[kind].fullmatch(text))
        and text.count("\n") == len(cells)
        and max(map(len, cells), default=0) <= _MAX_NUMBER
    )


def cell_kind(cells: Sequence[str], known: str | None) -> str | None:
    """Return the narrowest kind that covers `cells` and the earlier cells, whose kind is `known`.

    Return None if all cells so far are empty, because such cells can be of any kind.
    """
    kinds = (BOOL, INT, FLOAT) if known is None else (known, FLOAT) if known == INT else (known,)
    if known is None and not any(cells):
        return None
    return next((kind for kind in kinds if kind != TEXT and holds_only(kind, cells)), TEXT)


MAX_EXACT: Final = 1 << 53
"""The largest magnitude up to which float64 represents every integer."""
_MAX_DIMS: Final = 17  # the maximum number of dimensions of a field, plus one for rows


def as_numbers(values: list[Any]) -> npt.NDArray[Any] | None:
    """Return nested lists as an array of bool, int64, uint64 or float64.

    Return None if there is no such array: for other or mixed kinds of values, ragged lengths, or
    integers that float64 or the dtype of the other integers cannot represent.
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
        if types == {bool}:
            return np.array(values, np.bool_)
        if types == {int}:
            return _whole_numbers(values, flat)
        found = np.array(values, np.float64)
    except (ValueError, OverflowError):
        return None
    if int in types and any(abs(each) > MAX_EXACT for each in flat if type(each) is int):
        return None
    return found


def _whole_numbers(values: list[Any], flat: list[int]) -> npt.NDArray[Any]:
    """Return an int64 array, or uint64 if a value is too large for int64 and none is negative."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        if min(flat) < 0:
            raise
        return np.array(values, np.uint64)


def cast(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the numbers in another dtype; a float dtype rounds them.

    Raises:
        ValueError: the dtype cannot represent them.
    """
    if array.dtype == dtype or not array.size:
        return array.astype(dtype, copy=False)
    if array.dtype.kind not in {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.kind]:
        raise ValueError(f"found {array.dtype.name}")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        least, most = int(array.min()), int(array.max())
        if least < limits.min or most > limits.max:
            far = least if least < limits.min else most
            raise ValueError(f"found {far}, outside {limits.min} to {limits.max}")
        return array.astype(dtype)
    with np.errstate(over="ignore"):
        found = array.astype(dtype)
    if (np.isinf(found) & np.isfinite(array)).any():
        raise ValueError("found a number out of range")
    return found


_MAX_DEPTH: Final = 256  # the limit of a Json field
_MAX_SHOWN: Final = 40
_KIND_BY_DTYPE: Final = {"b": BOOL, "i": INT, "u": INT, "f": FLOAT}
_ODD: Final = frozenset((float("inf"), float("-inf"), 0.0))
"""`float` rounds each number outside the range of float64 to one of these values."""

Column = Sequence[Any]


def values_of(
    name: str, field: Field, column: Column, lines: Sequence[int], *, is_csv: bool
) -> Iterable[Any]:
    """Return the values of a field for some rows; None if an optional value is missing.

    `column` has the cells or JSON values, `lines` the line of each row, for messages.
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
    """Return the values of CSV cells.

    The value of an empty cell is None. Only in a required text field, it is the empty text.
    """
    if field.is_utf8:
        return [cell or None for cell in cells] if field.optional else cells
    if field.is_json or field.shape:
        return _of_values(field, [load(cell) if cell else None for cell in cells])
    kind = _KIND_BY_DTYPE[field.numpy.kind]
    make = _MAKERS[kind]
    if not holds_only(kind, cells):
        raise ValueError(_expected(field, cells[0]))
    values = [*map(make, cells)] if all(cells) else [make(one) if one else None for one in cells]
    if kind == FLOAT and not _ODD.isdisjoint(values):
        for cell, value in zip(cells, values, strict=True):
            if value in _ODD:
                float_of(cell)  # raises OutOfRange, unless the cell is 0 or infinity itself
    return _of_values(field, values)


def _is_true(cell: str) -> bool:
    return cell.strip().lower() == "true"


_MAKERS: Final[dict[str, Callable[[str], Any]]] = {BOOL: _is_true, INT: int, FLOAT: float}


def _of_values(field: Field, values: Column) -> Iterable[Any]:
    """Return the field values of JSON values."""
    if field.is_json:
        _check_json(values)
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


def _arrays(field: Array, values: Column) -> Iterable[npt.NDArray[Any]]:
    """Return arrays or numbers; if all rows have the same shape, convert them together."""
    if field.shape == (None,) and {*map(type, values)} == {list}:
        return _rows(field, values)
    found = as_numbers([*values])
    if found is None or found.ndim != 1 + len(field.shape):
        return [_array(field, each) for each in values]
    _check_shape(field, found.shape[1:])
    try:
        return cast(found, field.numpy)
    except ValueError as error:
        raise ValueError(f"expected {field.dtype}, {error}") from error


def _rows(field: Array, values: Column) -> Iterable[npt.NDArray[Any]]:
    """Return one-dimensional arrays of any lengths, as views of one array of all numbers."""
    flat = [*chain.from_iterable(values)]
    found = as_numbers(flat) if flat else np.empty(0, field.numpy)
    if found is None or found.ndim != 1:
        return [_array(field, each) for each in values]
    try:
        whole = cast(found, field.numpy)
    except ValueError as error:
        raise ValueError(f"expected {_spec(field)}, {error}") from error
    ends = [*accumulate(map(len, values), initial=0)]
    return [whole[start:end] for start, end in pairwise(ends)]


def _array(field: Array, value: Any) -> npt.NDArray[Any]:
    found = as_numbers([value]) if type(value) is list or not field.shape else None
    if value == [] and len(field.shape) > 1:  # [] may have any number of dimensions
        return np.empty((0, *(n or 0 for n in field.shape[1:])), field.numpy)
    if found is None or found.ndim != 1 + len(field.shape):
        raise ValueError(_expected(field, value))
    _check_shape(field, found.shape[1:])
    try:
        whole: npt.NDArray[Any] = cast(found, field.numpy)[0]
    except ValueError as error:
        raise ValueError(f"expected {_spec(field)}, {error}") from error
    return whole


def _check_shape(field: Array, shape: tuple[int, ...]) -> None:
    if any(want not in (None, n) for n, want in zip(shape, field.shape, strict=True)):
        raise ValueError(f"expected {_spec(field)}, found {format_spec(field.dtype, shape)}")


def _check_json(values: Column) -> None:
    """Check that values can be stored: no NaN, no lone surrogates, not nested too deep."""
    json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    inner = values
    for _ in range(_MAX_DEPTH + 1):
        if NESTED.isdisjoint(map(type, inner)):
            return
        inner = inside(inner)
    raise ValueError(f"nested more than {_MAX_DEPTH} deep")


def _spec(field: Field) -> str:
    return format_spec(field.dtype, field.shape) if field.array else field.word()


def _expected(field: Field, value: Any) -> str:
    text = repr(value)
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    return f"expected {_spec(field)}, found {shown}"
