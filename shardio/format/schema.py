"""Schema and the field types: what a sample is.

Reader and writer both stand on this module; `values` turns samples into bytes. A schema is stored
as canonical JSON (UTF-8, keys sorted, no spaces) with stable integer codes for types, dtypes and
codecs; `docs/reference/format.md` lists them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np

from shardio.errors import SchemaError, ShardUnsupported
from shardio.format.codec import Codec

MAX_FIELDS: Final = 1024
MAX_DIMS: Final = 16
MAX_NAME_BYTES: Final = 255
MAX_RECORD_BYTES: Final = 1 << 48
COLUMN_ALIGNMENT: Final = 64
VARYING: Final = -1
"""How a dimension that varies is written in the stored schema."""


class FieldType(IntEnum):
    """Stable codes of all field types; those from IMAGE on are reserved and not built yet."""

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
"""Names users give, of the element types that can be stored."""


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The little-endian NumPy dtype that holds elements of `name`; bfloat16 is held as uint16."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


@dataclass(frozen=True, slots=True)
class Array:
    """A field of numbers.

    Args:
        dtype: one of `DTYPES`. bfloat16 is uint16 in NumPy (bits) and bitcast in tinygrad.
        shape: dimensions from 1 up; None for one that varies from sample to sample (it may be 0).
        codec: "raw", or "zstd" per record. A raw array of fixed shape is a column: read without
            touching other fields, delivered as one gather per batch.

    Raises:
        SchemaError: an unknown dtype or codec, or a dimension that cannot be.
    """

    dtype: Any
    shape: tuple[int | None, ...] = ()
    codec: str = "raw"

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
        _known_codec(self.codec)
        n_bytes = self.numpy.itemsize * math.prod(d for d in shape if d is not None)
        if n_bytes > MAX_RECORD_BYTES:
            raise SchemaError(f"a row of {n_bytes} bytes; at most 2^48 are possible")

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype of its elements."""
        return numpy_dtype(self.dtype)

    @property
    def is_fixed(self) -> bool:
        """Whether all samples have the same shape."""
        return None not in self.shape

    @property
    def is_column(self) -> bool:
        """Whether it is stored as a column rather than record by record."""
        return self.is_fixed and self.codec == "raw"

    @property
    def row_bytes(self) -> int | None:
        """Bytes of one sample's array, or None where they vary."""
        if not self.is_fixed:
            return None
        return self.numpy.itemsize * math.prod(d for d in self.shape if d is not None)

    @property
    def stride(self) -> int:
        """Bytes from one row of the column to the next: multiples of 64 from 64 up."""
        n_bytes = self.row_bytes
        if n_bytes is None:
            raise SchemaError("an array of varying shape has no stride")
        if n_bytes < COLUMN_ALIGNMENT:
            return n_bytes
        return -(-n_bytes // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT

    @property
    def n_varying(self) -> int:
        """How many of its dimensions vary."""
        return self.shape.count(None)


@dataclass(frozen=True, slots=True)
class Bytes:
    """A field of opaque bytes of any length. codec: "raw" or "zstd"."""

    codec: str = "raw"

    def __post_init__(self) -> None:
        _known_codec(self.codec)


@dataclass(frozen=True, slots=True)
class Text:
    """A field of text, stored as UTF-8. codec: "raw" or "zstd"."""

    codec: str = "raw"

    def __post_init__(self) -> None:
        _known_codec(self.codec)


@dataclass(frozen=True, slots=True)
class Json:
    """A field of anything JSON can say, stored as canonical UTF-8. codec: "raw" or "zstd"."""

    codec: str = "raw"

    def __post_init__(self) -> None:
        _known_codec(self.codec)


Field = Array | Bytes | Text | Json

_TYPES: Final[dict[type, FieldType]] = {
    Array: FieldType.ARRAY,
    Bytes: FieldType.BYTES,
    Text: FieldType.TEXT,
    Json: FieldType.JSON,
}
_CLASSES: Final[dict[FieldType, type]] = {code: kind for kind, code in _TYPES.items()}


def _dtype_name(dtype: Any) -> str | None:
    """The name of what stands for a dtype; None if nothing does."""
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


def _known_codec(name: object) -> None:
    if name not in ("raw", "zstd"):
        raise SchemaError(f"unknown codec {name!r}; known: 'raw', 'zstd'")


class Schema(Mapping[str, Field]):
    """The fields of a sample, by name, in the order given. Immutable.

    Raises:
        SchemaError: no field, a name that is not allowed, or something that is no field type.
    """

    def __init__(self, fields: Mapping[str, Field]) -> None:
        if not fields:
            raise SchemaError("a schema needs at least one field")
        if len(fields) > MAX_FIELDS:
            raise SchemaError(f"{len(fields)} fields; at most {MAX_FIELDS} are possible")
        for name, field in fields.items():
            _check_name(name)
            if type(field) not in _TYPES:
                raise SchemaError(
                    f"field {name!r} is {field!r}; expected Array, Bytes, Text or Json"
                )
        self._fields = dict(fields)
        self._ids = {name: i for i, name in enumerate(self._fields)}
        self.columns: Final[dict[str, Array]] = {
            n: f for n, f in self._fields.items() if isinstance(f, Array) and f.is_column
        }
        """The fields stored as columns, in schema order."""
        self.records: Final[dict[str, Field]] = {
            n: f for n, f in self._fields.items() if n not in self.columns
        }
        """The fields stored record by record in the payload, in schema order."""

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"Schema({self._fields!r})"

    def field_id(self, name: str) -> int:
        """The stable integer that stands for the field in section tables."""
        return self._ids[name]

    def to_json(self) -> bytes:
        """The canonical bytes that a shard holds."""
        fields = [_describe(name, self._ids[name], field) for name, field in self.items()]
        return canonical_json({"fields": fields})

    @classmethod
    def from_json(cls, content: bytes) -> Schema:
        """Rebuild a schema from the bytes of a shard.

        Raises:
            SchemaError: it is not canonical JSON, or breaks a rule.
            ShardUnsupported: it uses a type, dtype or codec that this version does not read.
        """
        try:
            parsed = json.loads(content.decode("utf-8"))
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise SchemaError(f"the schema is not JSON in UTF-8: {error}") from error
        if not isinstance(parsed, dict) or set(parsed) != {"fields"}:
            raise SchemaError('the schema must be an object with the single key "fields"')
        if not isinstance(parsed["fields"], list):
            raise SchemaError('"fields" of the schema must be a list')
        fields: dict[str, Field] = {}
        for i, entry in enumerate(parsed["fields"]):
            name, field = _parse_field(i, entry)
            if name in fields:
                raise SchemaError(f"two fields are named {name!r}")
            fields[name] = field
        schema = cls(fields)
        if schema.to_json() != content:
            raise SchemaError("the schema is not in canonical form")
        return schema


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise SchemaError(f"a field's name must be a non-empty string; found {name!r}")
    if "." in name:
        raise SchemaError(f"field {name!r}: dotted names (nested records) are not built yet")
    try:
        n_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise SchemaError(f"field {name!r} cannot be written in UTF-8") from error
    if n_bytes > MAX_NAME_BYTES or not name.isprintable():
        raise SchemaError(
            f"field {name!r}: at most {MAX_NAME_BYTES} bytes of printable characters are allowed"
        )


def _describe(name: str, field_id: int, field: Field) -> dict[str, object]:
    entry: dict[str, object] = {
        "codec": int(Codec[field.codec.upper()]),
        "id": field_id,
        "name": name,
        "type": int(_TYPES[type(field)]),
    }
    if isinstance(field, Array):
        entry["dtype"] = int(DTYPES[field.dtype])
        entry["shape"] = [VARYING if d is None else d for d in field.shape]
    return entry


def _parse_field(position: int, entry: object) -> tuple[str, Field]:
    if not isinstance(entry, dict):
        raise SchemaError(f"field {position} of the schema is not an object")
    name = entry.get("name")
    for key in ("codec", "id", "type"):
        if type(entry.get(key)) is not int:
            raise SchemaError(f"field {name!r} of the schema: {key!r} must be an integer")
    if entry["id"] != position:
        raise SchemaError(f"field {name!r}: expected id {position}, found {entry['id']}")
    codec = _named("codec", entry["codec"], {Codec.RAW: "raw", Codec.ZSTD: "zstd"}, name)
    kind = _named("field type", entry["type"], _CLASSES, name)
    if kind is not Array:
        return str(name), kind(codec=codec)
    if type(entry.get("dtype")) is not int:
        raise SchemaError(f"field {name!r} of the schema: 'dtype' must be an integer")
    dtype = _named("dtype", entry["dtype"], {v: k for k, v in DTYPES.items()}, name)
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(d) is int for d in shape):
        raise SchemaError(f"field {name!r}: the shape must be a list of integers")
    return str(name), Array(dtype, tuple(None if d == VARYING else d for d in shape), codec)


def _named(what: str, code: object, known: Mapping[Any, Any], name: object) -> Any:
    if code not in known:
        raise ShardUnsupported(
            f"field {name!r} has {what} {code!r}, which this version cannot read"
        )
    return known[code]


def canonical_json(value: object) -> bytes:
    """JSON as shardio stores it: UTF-8, keys sorted, no spaces, no NaN.

    Raises:
        SchemaError: JSON cannot say it.
    """
    try:
        text = json.dumps(
            value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"a value cannot be written as JSON: {error}") from error
