"""The interface of field types: everything that depends on the type of a field.

A type is a frozen dataclass derived from `Field`, with an entry in `types.FIELD_TYPES`. All other
code calls the methods of `Field`, so that a new type needs no change elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
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
"""The largest size of a record, a packet, or a row of a column: sizes have 48 bits."""
CODECS: Final = tuple(SPECS)
"""The codec names of the public API."""

Content = bytes | memoryview
Dims = npt.NDArray[np.uint64]


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


class Field(ABC):
    """The type of a field, which validates, encodes, decodes and verifies its values.

    A value is stored as a row of a column or as a record. Methods that take a value raise
    SchemaError if the value does not fit; the message starts with the field's name. Methods that
    take a decompressed record raise ShardCorrupt if the record breaks a rule; the error has no
    place, which the caller adds.
    """

    __slots__ = ()

    code: ClassVar[int]
    """The stable code in a stored schema."""
    required: ClassVar[Required] = Required(0)
    """The features that a reader needs for fields of this type."""
    medium: ClassVar[str | None] = None
    """The medium whose encoded files are the values: "image", "video" or "audio", or None."""
    is_streamed: ClassVar[bool] = False
    """True if records are streams of packets, which are described by tables in other sections."""
    has_frames: ClassVar[bool] = False
    """True if each shown packet of a stream is a frame."""
    is_utf8: ClassVar[bool] = False
    """True if records are valid exactly when they are valid UTF-8."""
    is_json: ClassVar[bool] = False
    """True if values are JSON values, null included."""
    is_opaque: ClassVar[bool] = False
    """True if values are bytes without a format."""
    alignment: ClassVar[int] = 1
    """The alignment of raw records and of values in a block, in bytes."""

    @property
    @abstractmethod
    def codec(self) -> str:
        """The codec of records."""

    @property
    @abstractmethod
    def optional(self) -> bool:
        """True if a sample may have None here."""

    def as_optional(self, optional: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Return the same field with another value of `optional`."""
        return replace(self, optional=optional)  # type: ignore[type-var]

    @classmethod
    def word(cls) -> str:
        """Return the name of the type in the field specs of converters."""
        return cls.__name__.lower()

    @property
    def column(self) -> Array | None:
        """The type of the column that stores the values; None if values are records."""
        return None

    @property
    def array(self) -> Array | None:
        """The type of array that each value is, or None."""
        return None

    @property
    def item(self) -> Array | None:
        """The type of the arrays in each value, which is a list; None for other types."""
        return None

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The dimensions of a value's shape that are stored in the SHAPES section."""
        return ()

    @property
    def record_bytes(self) -> int | None:
        """The size of each present record, or None if it varies."""
        return None

    @property
    def is_never_empty(self) -> bool:
        """True if each present record has at least one byte."""
        return self.medium is not None

    def describe(self) -> dict[str, object]:
        """Return the field's further entries in a stored schema, beyond those of all types."""
        return {}

    @classmethod
    @abstractmethod
    def parse(cls, name: object, entry: dict[str, Any], codec: str, *, optional: bool) -> Self:
        """Return the field that an entry of a stored schema describes.

        Raises:
            SchemaError: the entry breaks a rule.
            ShardUnsupported: the entry has a code that is unknown to this version.
        """

    def validate(self, name: str, value: object) -> None:
        """Raise SchemaError unless a value can be stored."""
        self.record_encoder(name)(value)

    def record_encoder(self, name: str) -> Callable[[Any], Record]:
        """Return a function that encodes a value as a record."""
        return lambda value: self.encode_record(name, value)

    def encode_record(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        """Return the bytes of a value, and its shape; for None, no bytes and dimensions of 0."""
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
        """Return the value of a record; arrays are views of it.

        Raises ValueError or RecursionError if the record does not contain a value of this type.
        """
        return bytes(record)

    def decode_batch(self, records: Sequence[Content]) -> list[Any]:
        """Return the values of a batch of records without shapes; raises errors as `decode`.

        The values for empty records, which belong to missing values, are unspecified.
        """
        return list(map(bytes, records))

    def are_valid(self, dims: Dims) -> npt.NDArray[np.bool_]:
        """Return a mask of the raw records whose dimensions alone prove that they are valid.

        `dims` are the stored dimensions, one row per record.
        """
        return np.zeros(len(dims), np.bool_)

    def check_record(self, record: Content, dims: Dims) -> None:
        """Check that a record is the canonical encoding of a value."""
        try:
            self.decode(record, self.shape_of(dims, len(record)))
        except (ValueError, RecursionError) as error:
            raise ShardCorrupt(f"a record cannot be decoded: {error}", code="value") from error

    def value_bytes(self, value: Any) -> bytes:
        """Return bytes that identify a value: different values give different bytes."""
        record, shape = self.encode_record("", value)
        return f"{shape}".encode() + record


@dataclass(frozen=True, slots=True)
class RecordField(Field):
    """A field whose values are records, with no options besides codec and optional."""

    codec: str = "raw"
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        check_options(self.codec, self.optional)

    @classmethod
    def parse(cls, name: object, entry: dict[str, Any], codec: str, *, optional: bool) -> Self:
        """Return the field with these options."""
        return cls(codec, optional=optional)


def check_options(codec: object, optional: object) -> None:
    """Raise SchemaError if the codec is unknown, or `optional` is not a bool."""
    if codec not in SPECS:
        raise SchemaError(f"unknown codec {codec!r}; known: {', '.join(map(repr, SPECS))}")
    if not isinstance(optional, bool):
        raise SchemaError(f"optional must be True or False; found {optional!r}")


def refuse(name: str, expected: str, value: object) -> SchemaError:
    """Return the error for a value of a wrong class."""
    return SchemaError(f"field {name!r}: expected {expected}, found {type(value).__name__}")


def look_up(what: str, code: object, known: Mapping[Any, Any], name: object) -> Any:
    """Return the meaning of a code in a stored schema; raise ShardUnsupported if unknown."""
    if code not in known:
        raise ShardUnsupported(
            f"field {name!r} has {what} {code!r}, which this version cannot read"
        )
    return known[code]
