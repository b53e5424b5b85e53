"""The field types: the kinds of value that a sample can have.

`schema.py` names and serializes them, `values.py` encodes their values. Codes are stable;
`docs/reference/format.md` lists them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, ClassVar, Final

import numpy as np

from shardio.errors import SchemaError
from shardio.format.codecs import SPECS

MAX_DIMS: Final = 16
MAX_RECORD_BYTES: Final = (1 << 48) - 1
"""The largest size of a record, a packet, or a row of a column: sizes have 48 bits."""
COLUMN_ALIGNMENT: Final = 64
MAX_PICTURE_SIDE: Final = (1 << 31) - 1
"""In pixels; PNG's limit, and no other format has a higher one."""
MAX_CHANNELS: Final = 4
CODECS: Final = tuple(SPECS)
"""The codec names of the public API."""


class FieldType(IntEnum):
    """Stable codes of all field types."""

    ARRAY = 1
    BYTES = 2
    TEXT = 3
    JSON = 4
    IMAGE = 5
    VIDEO = 6
    AUDIO = 7
    LIST = 8


class DType(IntEnum):
    """Stable codes of element types; those from FLOAT8_E4M3 on are reserved."""

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
"""The dtype names of the public API, for all element types that can be stored."""


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian NumPy dtype for elements of `name`; bfloat16 becomes uint16."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


@dataclass(frozen=True, slots=True)
class Array:
    """A field of numbers.

    Args:
        dtype: one of `DTYPES`. bfloat16 is uint16 (its bits) in NumPy and bitcast in tinygrad.
        shape: dimensions from 1 up; None for one that varies from sample to sample (it may be 0).
        codec: "raw", or per record "zstd" or "zstd_dictionary". A raw array of fixed shape is a
            column: read without touching other fields, delivered as one gather per batch.
        optional: True if a sample may have None here.

    Raises:
        SchemaError: an unknown dtype or codec, or an invalid dimension.
    """

    dtype: Any
    shape: tuple[int | None, ...] = ()
    codec: str = "raw"
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        name = _dtype_name(self.dtype)
        if name not in DTYPES:
            raise SchemaError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if not isinstance(self.shape, tuple | list):
            raise SchemaError(f"a shape is a tuple of dimensions; found {self.shape!r}")
        shape = tuple(None if d is None else _dimension(d) for d in self.shape)
        if len(shape) > MAX_DIMS:
            raise SchemaError(f"{len(shape)} dimensions; at most {MAX_DIMS} are possible")
        object.__setattr__(self, "dtype", name)
        object.__setattr__(self, "shape", shape)
        _check_options(self.codec, self.optional)
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
    def is_column(self) -> bool:
        """True if the field is stored as a column rather than record by record."""
        return self.is_fixed and self.codec == "raw"

    @property
    def row_bytes(self) -> int | None:
        """The size of one sample's array in bytes, or None if it varies."""
        if not self.is_fixed:
            return None
        return self.numpy.itemsize * math.prod(d for d in self.shape if d is not None)

    @property
    def stride(self) -> int:
        """The distance of consecutive rows of the column in bytes; from 64 up, a multiple of 64."""
        n_bytes = self.row_bytes
        if n_bytes is None:
            raise SchemaError("an array of varying shape has no stride")
        if n_bytes < COLUMN_ALIGNMENT:
            return n_bytes
        return -(-n_bytes // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT

    @property
    def n_varying(self) -> int:
        """The number of varying dimensions."""
        return self.shape.count(None)


@dataclass(frozen=True, slots=True)
class List:
    """A field of any number of arrays, all with one dtype and number of dimensions.

    Args:
        element: the type of each array; its shape may vary, its codec is set on the list.
        codec: "raw", "zstd" or "zstd_dictionary", for all arrays of a sample together.
        optional: True if a sample may have None here.

    Raises:
        SchemaError: `element` is not an Array, or has a codec or is optional itself.
    """

    element: Array
    codec: str = "raw"
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.element, Array):
            raise SchemaError(f"a List is of an Array; found {self.element!r}")
        if self.element.codec != "raw" or self.element.optional:
            raise SchemaError(
                f"{self.element!r} in a List: give codec and optional to the List itself"
            )
        _check_options(self.codec, self.optional)


@dataclass(frozen=True, slots=True)
class _AnyLength:
    """A field of byte values of any length, one record each, without further options."""

    codec: str = "raw"
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        _check_options(self.codec, self.optional)


@dataclass(frozen=True, slots=True)
class Bytes(_AnyLength):
    """A field of opaque bytes of any length; see Array for codec and optional."""


@dataclass(frozen=True, slots=True)
class Text(_AnyLength):
    """A field of text, stored as UTF-8; see Array for codec and optional."""


@dataclass(frozen=True, slots=True)
class Json(_AnyLength):
    """A field of JSON values, stored as canonical UTF-8; see Array for codec and optional.

    In an optional field None is a missing value; elsewhere it is JSON's null.
    """


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A field of media that are already encoded.

    They are stored unchanged and not compressed again.
    """

    codec: ClassVar[str] = "raw"
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        _check_options(self.codec, self.optional)


@dataclass(frozen=True, slots=True)
class Image(_Encoded):
    """A field of images, each the bytes of its file (JPEG, PNG, …); see Array for optional.

    Displayed height and width, and the number of channels, are available without decoding.
    """


@dataclass(frozen=True, slots=True)
class Video(_Encoded):
    """A field of videos, each the packets of one stream; see Array for optional.

    Any span of packets can be found, read and verified without the others.
    """


@dataclass(frozen=True, slots=True)
class Audio(_Encoded):
    """A field of audio, each the packets of one stream, as for Video; see Array for optional."""


Field = Array | Bytes | Text | Json | List | Image | Video | Audio

FIELD_TYPES: Final[dict[type, FieldType]] = {
    Array: FieldType.ARRAY,
    Bytes: FieldType.BYTES,
    Text: FieldType.TEXT,
    Json: FieldType.JSON,
    List: FieldType.LIST,
    Image: FieldType.IMAGE,
    Video: FieldType.VIDEO,
    Audio: FieldType.AUDIO,
}
MEDIA: Final = (Image, Video, Audio)
"""Types whose values are stored as they were encoded: raw records, never empty if present."""
STREAMED: Final = (Video, Audio)
"""Types stored as a stream of packets."""
PICTURE_DIMS: Final = 3
"""The dimensions of an image in a SHAPES section: height, width, channels."""


def array_of(field: Field) -> Array | None:
    """Return the array type of a field: itself, a list's element, or None for other types."""
    if isinstance(field, List):
        return field.element
    return field if isinstance(field, Array) else None


def n_stored_dims(field: Field) -> int:
    """Return the number of dimensions per sample in the SHAPES section.

    A list's record has its own.
    """
    if isinstance(field, Array):
        return field.n_varying
    return PICTURE_DIMS if isinstance(field, Image) else 0


def _dtype_name(dtype: Any) -> str | None:
    """Return the name of a dtype-like object; None if it is not one."""
    if isinstance(dtype, str):
        return dtype
    try:
        return None if dtype is None else np.dtype(dtype).name  # NumPy takes None for float64
    except TypeError:
        return None


def _dimension(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise SchemaError(f"a dimension must be an integer from 1 up, or None; found {value!r}")
    return int(value)


def _check_options(codec: object, optional: object) -> None:
    if codec not in SPECS:
        raise SchemaError(f"unknown codec {codec!r}; known: {', '.join(map(repr, SPECS))}")
    if not isinstance(optional, bool):
        raise SchemaError(f"optional must be True or False; found {optional!r}")
