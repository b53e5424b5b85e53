"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.format.fields import FIELD_TYPES, Array, Field, List


def widened(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The numbers that bfloat16 stand for, given as their bits."""
    found: npt.NDArray[np.float32] = np.left_shift(bits.astype("<u4"), 16).view("<f4")
    return found


def dtype_out(field: Array) -> np.dtype[Any]:
    """The dtype that the numbers of a field have elsewhere: bfloat16 become float32, unchanged."""
    return np.dtype("<f4") if field.dtype == "bfloat16" else field.numpy


def numbers_out(field: Array) -> Callable[[Any], npt.NDArray[Any]]:
    """What makes of a field's numbers those of `dtype_out`."""
    return widened if field.dtype == "bfloat16" else np.asarray


def word_of(field: Field) -> str:
    """A field in a word, as converters take it: `float32[3,*]`, `text?`."""
    if isinstance(field, List):
        word = f"list[{word_of(field.element)}]"
    elif isinstance(field, Array):
        dims = ",".join("*" if n is None else str(n) for n in field.shape)
        word = f"{dtype_out(field).name}{f'[{dims}]' if field.shape else ''}"
    else:
        word = FIELD_TYPES[type(field)].name.lower()
    return f"{word}?" if field.optional else word
