"""`Field`, the base class of all field types.

Other code only uses the methods and attributes of `Field`: a new type is a frozen dataclass derived
from `Field`, with an entry in `types.FIELD_TYPES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from shardio.errors import SchemaError, ShardCorrupt, ShardUnsupported
from shardio.format.codecs import SPECS
from shardio.format.layout import Required

if TYPE_CHECKING:
    from shardio.format.types.arrays import Array
    from shardio.format.types.streams import Record

MAX_RECORD_BYTES: Final = (1 << 48) - 1
"""The maximum size in bytes of a record, a packet and a row: the format stores sizes in 48 bits."""
CODECS: Final = tuple(SPECS)
"""The codec names of the public API."""

Content = bytes | memoryview
Dims = npt.NDArray[np.uint64]


class FieldType(IntEnum):
    """The codes of all field types in stored schemas. A code never changes its meaning."""

    ARRAY = 1
    BYTES = 2
    TEXT = 3
    JSON = 4
    IMAGE = 5
    VIDEO = 6
    AUDIO = 7
    LIST = 8


class Field(ABC):
    """The type of a field, which validates, encodes, decodes and verifies the field's values.

    A value is stored as a row of a column or as a record; None is the missing value of an optional
    field. Methods raise SchemaError for a value that does not fit, and ShardCorrupt, without a
    path, for an invalid record.
    """

    __slots__ = ()

    code: ClassVar[int]
    """The stable code in a stored schema."""
    required: ClassVar[Required] = Required(0)
    """The features that a reader needs for fields of this type."""
    medium: ClassVar[str | None] = None
    """"image", "video" or "audio" if values are encoded media; otherwise None."""
    is_streamed: ClassVar[bool] = False
    """True if records are streams of packets, described by tables in sections of their own."""
    has_frames: ClassVar[bool] = False
    """True if each packet that is not hidden has one frame to show (video)."""
    is_utf8: ClassVar[bool] = False
    """True if records are valid exactly when they are valid UTF-8."""
    is_json: ClassVar[bool] = False
    """True if values are JSON values, which include None (JSON's null)."""
    is_opaque: ClassVar[bool] = False
    """True if values are bytes without a format."""
    things: ClassVar[str] = "values"
    """A noun for several values of the field, in texts for users."""
    alignment: ClassVar[int] = 1
    """The alignment, in bytes, of uncompressed records, and of values in a batch."""

    @property
    @abstractmethod
    def codec(self) -> str:
        """The name of the codec with which records are compressed, or "raw"."""

    @property
    @abstractmethod
    def optional(self) -> bool:
        """True if a sample may lack a value of the field; the value is None then."""

    def __repr__(self) -> str:
        values = ((each, getattr(self, each.name)) for each in fields(self))  # type: ignore[arg-type]
        given = [(each.name, value) for each, value in values if value != each.default]
        positional = ("dtype", "shape", "element")
        shown = (repr(v) if name in positional else f"{name}={v!r}" for name, v in given)
        return f"{type(self).__name__}({', '.join(shown)})"

    def as_optional(self, optional: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Return a copy of the field with the given value of `optional`."""
        return replace(self, optional=optional)  # type: ignore[type-var]

    @classmethod
    def spec_name(cls) -> str:
        """Return the name of the type in field specifications, such as "image"."""
        return cls.__name__.lower()

    @property
    def column(self) -> Array | None:
        """The type of the column in which the values are stored; None if they are records."""
        return None

    @property
    def array(self) -> Array | None:
        """The type of the values if they are arrays; otherwise None."""
        return None

    @property
    def item(self) -> Array | None:
        """The type of the listed arrays if values are lists of arrays; otherwise None."""
        return None

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The positions, in a value's shape, of the dimensions that the section SHAPES stores."""
        return ()

    @property
    def record_bytes(self) -> int | None:
        """The size in bytes of the record of any present value; None if it varies."""
        return None

    @property
    def is_never_empty(self) -> bool:
        """True if only the records of missing values are empty."""
        return self.medium is not None

    def describe(self) -> dict[str, object]:
        """Return the members of a schema's entry that only this type has, such as a dtype."""
        return {}

    @classmethod
    @abstractmethod
    def parse(cls, name: object, entry: dict[str, Any], codec: str, *, optional: bool) -> Self:
        """Return the field for an entry of a stored schema.

        Raises SchemaError for an invalid entry, and ShardUnsupported for an unknown code.
        """

    def record_encoder(self, name: str) -> Callable[[Any], Record]:
        """Return a function that encodes a value as a record."""
        return lambda value: self.encode_record(name, value)

    def encode_record(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        """Return a value's record and shape; for a missing value, an empty record and zeros."""
        if value is None and self.optional:
            return memoryview(b""), self._missing_shape()
        return self._encode(name, value)

    def _missing_shape(self) -> tuple[int, ...]:
        return (0,) * len(self.stored_dims)

    @abstractmethod
    def _encode(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        """Encode a value that is not missing."""

    def shape_of(self, dims: Dims, n_bytes: int) -> tuple[int, ...]:
        """Return the shape of a value from its stored dimensions and the size of its record."""
        return ()

    def decode(self, record: Content, shape: tuple[int, ...]) -> Any:
        """Return the value in a record; arrays are views of the record.

        Raises ValueError or RecursionError for an invalid record.
        """
        return bytes(record)

    def decode_batch(self, records: Sequence[Content]) -> list[Any]:
        """Return the values of records that need no shape; for a missing value, return anything."""
        return list(map(bytes, records))

    def are_valid(self, dims: Dims) -> npt.NDArray[np.bool_]:
        """Return a mask that is True for each record whose `dims` alone prove that it is valid."""
        return np.zeros(len(dims), np.bool_)

    def check_record(self, record: Content, dims: Dims) -> None:
        """Raise ShardCorrupt unless a record with the stored dimensions `dims` is canonical."""
        try:
            self.decode(record, self.shape_of(dims, len(record)))
        except (ValueError, RecursionError) as error:
            raise ShardCorrupt(f"a record cannot be decoded: {error}", code="value") from error

    def value_bytes(self, value: Any) -> bytes:
        """Return bytes that differ for different values."""
        record, shape = self.encode_record("", value)
        return f"{shape}".encode() + record


FIELD_ADVICE: Final = {"compression": 'write codec="zstd"', "nullable": "write optional=True"}
"""Options that other libraries' fields have, and what to write instead."""


@dataclass(frozen=True, slots=True, repr=False)
class RecordField(Field):
    """A field that is stored as records, without further options."""

    codec: str = "raw"
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        check_options(self.codec, self.optional)

    @classmethod
    def parse(cls, name: object, entry: dict[str, Any], codec: str, *, optional: bool) -> Self:
        """Return the field, which has no options besides `codec` and `optional`."""
        return cls(codec, optional=optional)


def check_options(codec: object, optional: object) -> None:
    """Raise SchemaError if the codec is unknown, or `optional` is not a bool."""
    if codec not in SPECS:
        raise SchemaError(f"unknown codec {codec!r}; known: {', '.join(map(repr, SPECS))}")
    if not isinstance(optional, bool):
        raise SchemaError(f"optional must be True or False; found {optional!r}")


def type_mismatch(name: str, expected: str, value: object) -> SchemaError:
    """Return the error for a value of a wrong class."""
    found = type(value).__name__
    if value is None:
        found = "None, which only a field with optional=True takes"
    return SchemaError(f"field {name!r}: expected {expected}, found {found}")


def look_up(what: str, code: object, known: Mapping[Any, Any], name: object) -> Any:
    """Return the meaning of a code, or raise ShardUnsupported.

    The message contains `what`, which is the kind of the code, and the `name` of the field.
    """
    if code not in known:
        raise ShardUnsupported(
            f"field {name!r} has {what} {code!r}, which this version cannot read"
        )
    return known[code]
