"""What turns the values of one field into bytes, made once for all samples.

`values` says what becomes of any value, and does it. Most values are of the very type that is
stored, or a plain number: those are known by their type alone, and take a tenth of the time here.
What is anything else is left to `values`; both ways give the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.format.arrays import encode_array
from shardio.format.checksum import ROW_HASH_MIN
from shardio.format.fields import STREAMED, Array, Bytes, Field, Text
from shardio.format.streams import StreamRecord
from shardio.format.values import encode_record, encode_stream

Content = bytes | memoryview
Record = tuple[Content, tuple[int, ...]] | StreamRecord
"""The bytes of one value, and its shape if it is an array or a picture; or a stream."""

_COPIED_BYTES: Final = 4 << 10
"""Arrays below this are copied: it takes less than to view them."""
_NUMBERS: Final[dict[str, tuple[type, str]]] = {
    "bool": (bool, "<?"),
    "int8": (int, "<b"),
    "int16": (int, "<h"),
    "int32": (int, "<i"),
    "int64": (int, "<q"),
    "uint8": (int, "<B"),
    "uint16": (int, "<H"),
    "uint32": (int, "<I"),
    "uint64": (int, "<Q"),
    "float32": (float, "<f"),
    "float64": (float, "<d"),
}
"""Which of Python's numbers `struct` packs as NumPy does, refusing what is out of range."""


def row_encoder(name: str, field: Array) -> Callable[[Any], Content | None]:
    """What gives the bytes of a value of a column, and None for one that is not there.

    Rows without a hash of their own are copies.

    Raises:
        SchemaError: (what is given, when called) the value does not fit the field.
    """
    if (field.row_bytes or 0) >= ROW_HASH_MIN:
        return _large_rows(name, field)
    wanted, shape, is_bool, optional = field.numpy, field.shape, _is_bool(field), field.optional
    # A scalar's bytes are in the machine's order.
    scalar = wanted.type if wanted.isnative and not shape else None
    number, layout = _NUMBERS.get(field.dtype, (None, "<")) if not shape else (None, "<")
    pack = struct.Struct(layout).pack

    def encode(value: Any) -> Content | None:
        kind = type(value)
        if kind is np.ndarray:
            if value.dtype == wanted and value.shape == shape:
                row: bytes = value.tobytes()
                if not (is_bool and row.strip(b"\0\1")):
                    return row
        elif kind is scalar:
            return value.tobytes()  # type: ignore[no-any-return]
        elif kind is number and value == value:  # no NaN: of those there are many
            try:
                return pack(value)
            except (struct.error, OverflowError):
                pass  # the reason is told by:
        elif value is None and optional:
            return None
        return encode_array(name, field, value).tobytes()

    return encode


def _large_rows(name: str, field: Array) -> Callable[[Any], Content | None]:
    wanted, shape, is_bool, optional = field.numpy, field.shape, _is_bool(field), field.optional

    def encode(value: Any) -> Content | None:
        if (
            type(value) is np.ndarray
            and value.dtype == wanted
            and value.shape == shape
            and value.flags.c_contiguous
            and not is_bool
        ):
            return value.data
        return None if value is None and optional else _view(encode_array(name, field, value))

    return encode


def record_encoder(name: str, field: Field) -> Callable[[Any], Record]:
    """What gives the record of a value that is not in a column.

    Raises:
        SchemaError: (what is given, when called) the value does not fit the field.
    """
    if isinstance(field, STREAMED):
        return lambda value: encode_stream(name, field, value)
    if isinstance(field, Array):
        return _array_records(name, field)
    if not isinstance(field, Text | Bytes):
        return lambda value: encode_record(name, field, value)
    is_text = isinstance(field, Text)

    def encode(value: Any) -> Record:
        if is_text and type(value) is str:
            try:
                return value.encode(), ()
            except UnicodeEncodeError:
                pass  # the reason is told by:
        elif not is_text and type(value) is bytes:
            return value, ()
        return encode_record(name, field, value)

    return encode


def _array_records(name: str, field: Array) -> Callable[[Any], Record]:
    wanted, n_dims = field.numpy, len(field.shape)
    fixed = [(d, n) for d, n in enumerate(field.shape) if n is not None]
    is_bool = _is_bool(field)

    def encode(value: Any) -> Record:
        if (
            type(value) is np.ndarray
            and value.dtype == wanted
            and value.ndim == n_dims
            and 0 < value.nbytes < _COPIED_BYTES
            and not is_bool
        ):
            shape = value.shape
            if not fixed or all(shape[d] == n for d, n in fixed):
                return value.tobytes(), shape
        return encode_record(name, field, value)

    return encode


def _is_bool(field: Array) -> bool:
    return bool(field.dtype == "bool")


def _view(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
