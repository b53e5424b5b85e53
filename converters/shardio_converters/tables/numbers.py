"""Numbers of tables, in lists within lists, as arrays; none is changed."""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MAX_EXACT: Final = 1 << 53
"""Whole numbers up to it, and down to its negative, are numbers of float64 as well."""
_MAX_DIMS: Final = 17  # of a field, and rows


def as_numbers(values: list[Any]) -> npt.NDArray[Any] | None:
    """The array that lists within lists are: bool, int64, uint64 or float64.

    None where they are none: other values, several kinds of them, lengths that differ, or whole
    numbers that have no place beside the others.
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
    """Signed numbers, unless unsigned ones are needed, and do."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        if min(flat) < 0:
            raise
        return np.array(values, np.uint64)


def cast(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The same numbers in another dtype; a floating-point one rounds them.

    Raises:
        ValueError: it cannot hold them.
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
            raise ValueError(f"found {far}, which is not from {limits.min} to {limits.max}")
        return array.astype(dtype)
    with np.errstate(over="ignore"):
        found = array.astype(dtype)
    if (np.isinf(found) & np.isfinite(array)).any():
        raise ValueError("found a number that is too large")
    return found
