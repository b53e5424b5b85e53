"""Columns of MDS shards: what their encodings become, and their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio import Array, Bytes, Image, Json, MediaError, Text
from shardio.media import probe
from shardio_converters.field_specs import DTYPES, fits, spec_of
from shardio_converters.json_values import OutOfRange, float_of, read_json
from shardio_converters.records.found_fields import Facts

_SCALARS: Final = tuple(name for name in DTYPES if name != "bool")
_WORDS: Final = {
    "bytes": "bytes",
    "str": "text",
    "int": "int64",
    "json": "json",
    "jpeg": "image",
    "png": "image",
    "str_int": "int64",
    "str_float": "float64",
    "str_decimal": "text",
    **{name: name for name in _SCALARS},
}
_REFUSED: Final = {
    "pkl": "a pickle, which can run any code: write it as json, ndarray or bytes",
    "pil": "pixels of a picture: write it as png, which is as exact",
}
_ARRAY_DTYPES: Final = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"},
    **{33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
"""The byte that stands for the dtype of an array, where no column says it."""
_DIM_DTYPES: Final = ("<u1", "<u2", "<u4", "<u8")
_MAX_DIMS: Final = 16

Piece = bytes | memoryview
"""The bytes of a column of a sample; of an array a view of those of the sample."""


@dataclass(frozen=True)
class Column:
    """A column of a shard: its name, its encoding, and the bytes of a value if they are fixed.

    Raises:
        MediaError: no dataset can hold it.
        ValueError: no column is like this.
    """

    name: str
    encoding: str
    n_bytes: int | None

    def __post_init__(self) -> None:
        if self.n_bytes is not None and (type(self.n_bytes) is not int or self.n_bytes < 1):
            raise ValueError(f"a column has {self.n_bytes} bytes")
        if not self.is_array and self.encoding not in _WORDS:
            why = _REFUSED.get(self.encoding, f"expected ndarray, or one of {', '.join(_WORDS)}")
            raise MediaError(f"column {self.name!r}: found encoding {self.encoding!r}: {why}")
        dtype, shape = self._stated
        if self.is_array and dtype is not None and dtype not in _SCALARS:
            raise MediaError(f"column {self.name!r}: found encoding {self.encoding!r}")
        if shape is not None and (not 1 <= len(shape) <= _MAX_DIMS or min(shape) < 1):
            raise MediaError(f"column {self.name!r}: found encoding {self.encoding!r}")

    @property
    def facts(self) -> Facts | None:
        """What it is in a sample; None where the samples say it."""
        if not self.is_array:
            return _WORDS[self.encoding], ()
        dtype, shape = self._stated
        return None if dtype is None or shape is None else (dtype, shape)

    def facts_of(self, data: Piece) -> Facts:
        """What an array of a sample is.

        Raises:
            MediaError: it is damaged.
        """
        value = self._array(data)
        return value.dtype.name, value.shape

    def decoder(self, field: object) -> Callable[[Any], Any]:
        """What makes a value of a sample of the bytes in a shard.

        Raises:
            MediaError: the field is not for this encoding.
        """
        if isinstance(field, Bytes):
            return bytes
        if self.is_array and isinstance(field, Array):
            return partial(self._checked, field)
        wanted = {"text": Text, "json": Json, "image": Image}.get(self._word, Array)
        dtype = getattr(field, "dtype", None)
        if not isinstance(field, wanted) or (wanted is Array and dtype != self._word):
            raise MediaError(
                f"column {self.name!r}: expected {type(field).__name__} {dtype or ''}, found "
                f"encoding {self.encoding!r}"
            )
        named: dict[str, Callable[[bytes], Any]] = {
            **{"str": _text, "str_decimal": _text, "json": read_json, "jpeg": _picture},
            **{"png": _picture, "str_int": _whole_number, "str_float": _number},
        }
        if self.encoding in named:
            return named[self.encoding]
        return partial(_scalar, np.dtype(self._word).newbyteorder("<"))

    @property
    def _word(self) -> str:
        return _WORDS.get(self.encoding, "")

    @property
    def is_array(self) -> bool:
        """Whether its values are arrays, of which views are as good as bytes."""
        return self.encoding.partition(":")[0] == "ndarray"

    @property
    def _stated(self) -> tuple[str | None, tuple[int, ...] | None]:
        """Dtype and shape, as far as an encoding such as `ndarray:int32:2,3` says them."""
        _, _, stated = self.encoding.partition(":")
        dtype, _, shape = stated.partition(":")
        return dtype or None, tuple(map(int, shape.split(","))) if shape else None

    def _checked(self, field: Array, data: Piece) -> npt.NDArray[Any]:
        value = self._array(data)
        if value.dtype.name != field.dtype or not fits(value.shape, field.shape):
            raise MediaError(
                f"expected {spec_of(field.dtype, field.shape)}, "
                f"found {spec_of(value.dtype.name, value.shape)}"
            )
        return value

    def _array(self, data: Piece) -> npt.NDArray[Any]:
        dtype, shape = self._stated
        at = 0
        try:
            if dtype is None:
                dtype = _ARRAY_DTYPES[data[0]]
                at = 1
            if shape is None:
                n_dims, dim_dtype = data[at] >> 2, np.dtype(_DIM_DTYPES[data[at] & 3])
                end = at + 1 + n_dims * dim_dtype.itemsize
                shape = tuple(np.frombuffer(data[at + 1 : end], dim_dtype).tolist())
                if len(shape) != n_dims or not 1 <= n_dims <= _MAX_DIMS:
                    raise ValueError(f"{n_dims} dimensions")
                at = end
            numpy = np.dtype(dtype).newbyteorder("<")
            if math.prod(shape) * numpy.itemsize != len(data) - at:
                raise ValueError(f"{len(data) - at:,} bytes for shape {shape} of {dtype}")
            return np.frombuffer(data, numpy, offset=at).reshape(shape)
        except (ValueError, KeyError, IndexError) as error:
            raise MediaError(f"an array that is damaged: {error!r}") from error


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MediaError(f"not UTF-8: {error}") from error


def _picture(data: bytes) -> bytes:
    probe(data)
    return data


def _whole_number(data: bytes) -> np.int64:
    try:
        return np.int64(int(_text(data)))
    except (ValueError, OverflowError) as error:
        raise MediaError(f"expected a whole number of 64 bits, found {data[:40]!r}") from error


def _number(data: bytes) -> np.float64:
    try:
        return np.float64(float_of(_text(data)))
    except OutOfRange as error:
        raise MediaError(str(error)) from error
    except ValueError as error:
        raise MediaError(f"expected a number, found {data[:40]!r}") from error


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) != dtype.itemsize:
        raise MediaError(f"expected {dtype.itemsize} bytes, found {len(data)}")
    return np.frombuffer(data, dtype)[0]
