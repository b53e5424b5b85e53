"""The field types of numbers: arrays, and lists of arrays.

The functions that `row_encoder` and `record_encoder` return encode values of common types directly,
and other values with `encode_array`, which takes ten times as long.

The record of a list of arrays is

    | count: u64 | each array's varying dimensions: u64 each | zeros to a multiple of 64 | arrays |

with the arrays back to back, in C order.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from shardio._base.callers import did_you_mean, refuses
from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.checksum import ROW_HASH_MIN
from shardio.format.layout import Required
from shardio.format.types.array_values import encode_array, is_of
from shardio.format.types.field import (
    FIELD_ADVICE,
    MAX_RECORD_BYTES,
    Content,
    Dims,
    Field,
    FieldType,
    check_options,
    look_up,
    type_mismatch,
)

if TYPE_CHECKING:
    from shardio.format.types.streams import Record

MAX_DIMS: Final = 16
COLUMN_ALIGNMENT: Final = 64
RECORD_ALIGNMENT: Final = 64
"""The alignment of uncompressed records of arrays, in bytes, so that views are aligned."""
VARYING: Final = -1


class DType(IntEnum):
    """The codes of dtypes in stored schemas. FLOAT8_E4M3 and all later codes are not used yet."""

    BOOL = 1
    INT8 = 2
    INT16 = 3
    INT32 = 4
    INT64 = 5
    UINT8 = 6
    UINT16 = 7
    UINT32 = 8
    UINT64 = 9
    FLOAT16 = 10
    FLOAT32 = 11
    FLOAT64 = 12
    BFLOAT16 = 13
    FLOAT8_E4M3 = 14
    FLOAT8_E5M2 = 15
    COMPLEX64 = 16
    COMPLEX128 = 17


DTYPES: Final[dict[str, DType]] = {d.name.lower(): d for d in DType if d < DType.FLOAT8_E4M3}
"""The dtypes that can be stored, by their names in the public API."""


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian dtype of NumPy for a name in DTYPES; uint16 for bfloat16."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


_MAX_COPIED_BYTES: Final = 4 << 10
"""The size below which copying an array is faster than creating a view."""
_SCALAR_FORMATS: Final[dict[str, tuple[type, str]]] = {
    **{"bool": (bool, "<?"), "float32": (float, "<f"), "float64": (float, "<d")},
    **{f"int{8 << i}": (int, f"<{letter}") for i, letter in enumerate("bhiq")},
    **{f"uint{8 << i}": (int, f"<{letter}") for i, letter in enumerate("BHIQ")},
}
"""For each dtype, a Python type, and the `struct` format that packs it as NumPy does."""


@refuses(FIELD_ADVICE)
@dataclass(frozen=True, slots=True, repr=False)
class Array(Field):
    """A field of numbers.

    Args:
        dtype: one of `DTYPES`, or a dtype of NumPy or torch with such a name. NumPy arrays of
            bfloat16 are uint16 with the bits of the numbers; tensors of torch, JAX and tinygrad are
            bfloat16.
        shape: dimensions from 1 up; None for a dimension that varies between samples and may be 0.
        codec: "raw", "zstd" or "zstd_dictionary". Each value is compressed separately. A "raw"
            field of fixed shape is a column, whose rows for a batch are read in one operation.
        optional: True if a sample may lack a value of the field; the value is None then.

    Raises:
        SchemaError: an unknown dtype or codec, or an invalid dimension.
    """

    code: ClassVar[int] = FieldType.ARRAY
    alignment: ClassVar[int] = RECORD_ALIGNMENT

    dtype: Any
    shape: tuple[int | None, ...] = ()
    codec: str = "raw"
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        name = _dtype_name(self.dtype)
        if name not in DTYPES:
            if isinstance(self.dtype, tuple | list):
                given = _dtype_name(self.shape)
                right = (given if given in DTYPES else "uint8", self.dtype)
                raise SchemaError(f"Array takes the dtype before the shape: write Array{right}")
            raise SchemaError(f"unknown dtype {self.dtype!r}; {_dtype_hint(self.dtype)}")
        if not isinstance(self.shape, tuple | list):
            raise SchemaError(
                f"a shape is a tuple of dimensions, such as (3,) or (None, 3); found {self.shape!r}"
            )
        shape = tuple(None if d is None else _dimension(d) for d in self.shape)
        if len(shape) > MAX_DIMS:
            raise SchemaError(f"{len(shape)} dimensions; at most {MAX_DIMS} are possible")
        object.__setattr__(self, "dtype", name)
        object.__setattr__(self, "shape", shape)
        check_options(self.codec, self.optional)
        n_bytes = self.numpy.itemsize * math.prod(d for d in shape if d is not None)
        if n_bytes > MAX_RECORD_BYTES:
            raise SchemaError(f"a row of {n_bytes} bytes; fewer than 2^48 are possible")

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype of the elements."""
        return numpy_dtype(self.dtype)

    @property
    def is_fixed(self) -> bool:
        """True if all samples have the same shape."""
        return None not in self.shape

    @property
    def column(self) -> Array | None:
        """This type itself if the field is stored as a column; None if it is stored as records."""
        return self if self.is_fixed and self.codec == "raw" else None

    @property
    def array(self) -> Array:
        """This type itself, because each value is an array."""
        return self

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The positions of the varying dimensions."""
        return tuple(d for d, n in enumerate(self.shape) if n is None)

    @property
    def record_bytes(self) -> int | None:
        """The size of one sample's array in bytes, or None if it varies."""
        if not self.is_fixed:
            return None
        return self.numpy.itemsize * math.prod(d for d in self.shape if d is not None)

    row_bytes = record_bytes

    @property
    def is_never_empty(self) -> bool:
        """True if the shape is fixed."""
        return self.is_fixed

    @property
    def stride(self) -> int:
        """The size of a row in bytes; if it is above 64, it is rounded up to a multiple of 64."""
        n_bytes = self.row_bytes
        if n_bytes is None:
            raise SchemaError("an array of varying shape has no stride")
        if n_bytes < COLUMN_ALIGNMENT:
            return n_bytes
        return -(-n_bytes // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT

    def describe(self) -> dict[str, object]:
        """Return the codes of dtype and shape."""
        shape = [VARYING if d is None else d for d in self.shape]
        return {"dtype": int(DTYPES[self.dtype]), "shape": shape}

    @classmethod
    def parse(cls, name: object, entry: dict[str, Any], codec: str, *, optional: bool) -> Self:
        """Return the array that an entry of a stored schema describes."""
        if type(entry.get("dtype")) is not int:
            raise SchemaError(f"field {name!r} of the schema: 'dtype' must be an integer")
        dtype = look_up("dtype", entry["dtype"], {v: k for k, v in DTYPES.items()}, name)
        shape = entry.get("shape")
        if not isinstance(shape, list) or not all(type(d) is int for d in shape):
            raise SchemaError(f"field {name!r}: the shape must be a list of integers")
        dims = tuple(None if d == VARYING else d for d in shape)
        return cls(dtype, dims, codec, optional=optional)

    def _encode(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        array = encode_array(name, self, value)
        if self._extent(array.shape) > MAX_RECORD_BYTES:
            raise SchemaError(f"field {name!r}: shape {array.shape} is not below 2^48 bytes")
        return _view(array), array.shape

    def _missing_shape(self) -> tuple[int, ...]:
        return (0,) * len(self.shape)

    def filled_shape(self, dims: Dims) -> tuple[int, ...]:
        """Return the shape with `dims` as the varying dimensions, which are not checked."""
        rest = iter(dims.tolist())
        return tuple(next(rest) if d is None else d for d in self.shape)

    def shape_of(self, dims: Dims, n_bytes: int) -> tuple[int, ...]:
        """Return the shape of one sample's array from its varying dimensions."""
        shape = self.filled_shape(dims)
        extent = self._extent(shape)
        needed = 0 if 0 in shape else extent
        if needed != n_bytes or extent > MAX_RECORD_BYTES:
            raise ShardCorrupt(
                f"the stored shape {shape} does not fit the record",
                code="shape",
                expected=n_bytes,
                found=needed,
            )
        return shape

    def _extent(self, shape: tuple[int, ...]) -> int:
        """Return the size in bytes, with each 0 counted as 1: NumPy limits this size."""
        return self.numpy.itemsize * math.prod(d or 1 for d in shape)

    def decode(self, record: Content, shape: tuple[int, ...]) -> Any:
        """Return the array as a view of its record; read-only if the record is read-only."""
        return np.frombuffer(record, self.numpy).reshape(shape)[()]

    def check_record(self, record: Content, dims: Dims) -> None:
        """Check the shape, and that each bool is 0 or 1."""
        shape = self.shape_of(dims, len(record))
        if self.dtype == "bool" and (np.frombuffer(record, np.uint8) > 1).any():
            raise ShardCorrupt(f"a bool of {shape} is neither 0 nor 1", code="value")

    def value_bytes(self, value: Any) -> bytes:
        """Return dtype, shape and bytes of an array or scalar."""
        found: bytes = f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
        return found

    def row_encoder(self, name: str) -> Callable[[Any], Content | None]:
        """Return a function that encodes a value as a row of a column; a missing value gives None.

        Rows of fewer than ROW_HASH_MIN bytes are copies; others may be views.
        """
        if (self.row_bytes or 0) >= ROW_HASH_MIN:
            return self._large_row_encoder(name)
        wanted, shape, optional = self.numpy, self.shape, self.optional
        is_bool = self.dtype == "bool"
        # `tobytes` of a NumPy scalar returns bytes in native order; shards are little-endian.
        scalar = wanted.type if wanted.isnative and not shape else None
        number, layout = _SCALAR_FORMATS.get(self.dtype, (None, "<")) if not shape else (None, "<")
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
            elif kind is number and value == value:  # not NaN, which has many representations
                try:
                    return pack(value)
                except (struct.error, OverflowError):
                    pass  # `encode_array` raises the error
            elif value is None and optional:
                return None
            return encode_array(name, self, value).tobytes()

        return encode

    def _large_row_encoder(self, name: str) -> Callable[[Any], Content | None]:
        wanted, shape, optional = self.numpy, self.shape, self.optional
        is_bool = self.dtype == "bool"

        def encode(value: Any) -> Content | None:
            if (
                type(value) is np.ndarray
                and value.dtype == wanted
                and value.shape == shape
                and value.flags.c_contiguous
                and not is_bool
            ):
                return value.data
            return None if value is None and optional else _view(encode_array(name, self, value))

        return encode

    def record_encoder(self, name: str) -> Callable[[Any], Record]:
        """Return a function that encodes a value as a record, quickly if it is a small array."""
        wanted, n_dims = self.numpy, len(self.shape)
        fixed = [(d, n) for d, n in enumerate(self.shape) if n is not None]
        is_bool = self.dtype == "bool"

        def encode(value: Any) -> Record:
            if (
                type(value) is np.ndarray
                and value.dtype == wanted
                and value.ndim == n_dims
                and 0 < value.nbytes < _MAX_COPIED_BYTES
                and not is_bool
            ):
                shape = value.shape
                if not fixed or all(shape[d] == n for d, n in fixed):
                    return value.tobytes(), shape
            return self.encode_record(name, value)

        return encode


def _dtype_name(dtype: Any) -> str | None:
    if isinstance(dtype, str):
        return dtype
    if is_of(dtype, "torch", "dtype"):
        return str(dtype).removeprefix("torch.")
    try:
        return None if dtype is None else np.dtype(dtype).name  # NumPy reads None as float64
    except TypeError:
        return None


def _dtype_hint(dtype: Any) -> str:
    """Return advice for a dtype that cannot be stored or has another name in DTYPES."""
    word = str(_dtype_name(dtype) or dtype).rpartition(".")[2].lower()
    if word.rstrip("0123456789") in ("object", "str", "string", "text"):
        return "for text, write Text()"
    if word == "float":
        return "write 'float32', or 'float64' for the precision of Python's float"
    meant = word
    with contextlib.suppress(TypeError), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of aliases, such as "a"
        meant = np.dtype(word).name
    close = f"did you mean {meant!r}?" if meant in DTYPES else did_you_mean(word, DTYPES)
    return close or f"known: {', '.join(DTYPES)}"


def _dimension(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise SchemaError(
            "a dimension must be an integer from 1 up, or None if it varies between samples; "
            f"found {value!r}"
        )
    return int(value)


def _view(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@refuses(FIELD_ADVICE | {"element": 'an array, such as shardio.Array("float32", (None,))'})
@dataclass(frozen=True, slots=True, repr=False)
class List(Field):
    """A field of lists of arrays, which all have the same dtype and number of dimensions.

    Args:
        element: the type of each array; its shape may have varying dimensions.
        codec: "raw", "zstd" or "zstd_dictionary"; all arrays of a sample are compressed together.
        optional: True if a sample may lack a value of the field; the value is None then.

    Raises:
        SchemaError: `element` is not an Array, is optional, or has a codec.
    """

    code: ClassVar[int] = FieldType.LIST
    required: ClassVar[Required] = Required.LISTS
    alignment: ClassVar[int] = RECORD_ALIGNMENT

    element: Array
    codec: str = "raw"
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.element, Array):
            raise SchemaError(
                f"the element of a List must be an Array; found {self.element!r}: for lists of "
                "other values, such as texts, write Json()"
            )
        if self.element.codec != "raw" or self.element.optional:
            raise SchemaError(
                f"{self.element!r} in a List: give codec and optional to the List itself"
            )
        check_options(self.codec, self.optional)

    @property
    def item(self) -> Array:
        """The type of each array."""
        return self.element

    def describe(self) -> dict[str, object]:
        """Return the codes of the arrays' dtype and shape."""
        return self.element.describe()

    @classmethod
    def parse(cls, name: object, entry: dict[str, Any], codec: str, *, optional: bool) -> Self:
        """Return the list that an entry of a stored schema describes."""
        return cls(Array.parse(name, entry, "raw", optional=False), codec, optional=optional)

    def _encode(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        if not isinstance(value, list | tuple):
            raise type_mismatch(name, "a list of arrays", value)
        if any(each is None for each in value):
            raise SchemaError(f"field {name!r}: expected a list of arrays, found None in it")
        arrays = [encode_array(f"{name}[{i}]", self.element, each) for i, each in enumerate(value)]
        record = pack_list(self.element, arrays)
        if len(record) > MAX_RECORD_BYTES:
            raise SchemaError(f"field {name!r}: {len(record)} bytes are not below 2^48")
        return memoryview(record), ()

    def decode(self, record: Content, shape: tuple[int, ...]) -> list[npt.NDArray[Any]]:
        """Return the arrays, as views of the record."""
        return unpack_list(self.element, record)

    def decode_batch(self, records: Sequence[Content]) -> list[Any]:
        """Return the lists; an empty list for the empty record of a missing value."""
        return [unpack_list(self.element, record) if len(record) else [] for record in records]

    def check_record(self, record: Content, dims: Dims) -> None:
        """Raise ShardCorrupt unless the arrays fill the record, and each bool is 0 or 1."""
        unpack_list(self.element, record)
        if self.element.dtype != "bool":
            return
        # Compare the bytes, because NumPy reads the invalid bool 2 as True.
        start, _ = _unpack_head(self.element, record)
        if (np.frombuffer(record[start:], np.uint8) > 1).any():
            raise ShardCorrupt("a bool in a list is neither 0 nor 1", code="value")


_NUMBER: Final = struct.Struct("<Q")


def pack_list(element: Array, arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    """Return the record for a list of arrays, which must fit `element`."""
    varying = [d for d, n in enumerate(element.shape) if n is None]
    numbers = [len(arrays), *(array.shape[d] for array in arrays for d in varying)]
    head = struct.pack(f"<{len(numbers)}Q", *numbers)
    gap = -len(head) % RECORD_ALIGNMENT
    return b"".join([head, bytes(gap), *(array.tobytes() for array in arrays)])


def unpack_list(element: Array, record: bytes | memoryview) -> list[npt.NDArray[Any]]:
    """Return the arrays in the record of a list, as views; raise ShardCorrupt, without a path."""
    offset, dims = _unpack_head(element, record)
    arrays = []
    for varying in dims:
        shape, n_left = element.filled_shape(varying), len(record) - offset
        n_bytes = element.numpy.itemsize * math.prod(shape)
        if n_bytes > n_left:
            raise _corrupt(f"an array of shape {shape} in a list is cut off", n_bytes, n_left)
        element.shape_of(varying, n_bytes)
        data = record[offset : offset + n_bytes]
        arrays.append(np.frombuffer(data, element.numpy).reshape(shape)[()])
        offset += n_bytes
    if offset != len(record):
        raise _corrupt("the arrays of a list do not fill its record", offset, len(record))
    return arrays


def _unpack_head(element: Array, record: bytes | memoryview) -> tuple[int, npt.NDArray[np.uint64]]:
    """Return the offset of the first array, and the varying dimensions: a row for each array."""
    if len(record) < RECORD_ALIGNMENT:
        raise _corrupt("a list of arrays has no head", RECORD_ALIGNMENT, len(record))
    (count,) = _NUMBER.unpack_from(record)
    # Check `count` before it is used: an array of fixed shape takes `row_bytes` bytes of the
    # record, any other array at least 8 bytes for each varying dimension.
    n_varying = element.shape.count(None)
    smallest = element.row_bytes or _NUMBER.size * n_varying
    if count > len(record) // smallest:
        raise _corrupt("a list has too many arrays for its size", len(record) // smallest, count)
    end = _NUMBER.size * (1 + count * n_varying)
    start = -(-end // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    if start > len(record) or any(record[end:start]):
        raise _corrupt("the head of a list is cut off, or its padding is not zero", start, end)
    dims = np.frombuffer(record, "<u8", count * n_varying, _NUMBER.size)
    return start, dims.reshape(count, n_varying)


def _corrupt(what: str, expected: object, found: object) -> ShardCorrupt:
    return ShardCorrupt(what, code="list", expected=expected, found=found)
