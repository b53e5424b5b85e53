"""The field types of bytes, text and JSON, and shardio's canonical JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

import numpy as np
import numpy.typing as npt

from shardio._base.callers import refuses
from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.types.field import (
    FIELD_ADVICE,
    Content,
    Dims,
    FieldType,
    RecordField,
    type_mismatch,
)

if TYPE_CHECKING:
    from shardio.format.types.streams import Record


@refuses(FIELD_ADVICE)
@dataclass(frozen=True, slots=True, repr=False)
class Bytes(RecordField):
    """A field of bytes of any length. See `Array` for `codec` and `optional`."""

    code: ClassVar[int] = FieldType.BYTES
    is_opaque: ClassVar[bool] = True
    things: ClassVar[str] = "byte strings"

    def record_encoder(self, name: str) -> Callable[[Any], Record]:
        """Return a function that encodes a value; plain bytes take a fast path."""

        def encode(value: Any) -> Record:
            return (value, ()) if type(value) is bytes else self.encode_record(name, value)

        return encode

    def _encode(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise type_mismatch(name, "bytes", value)
        return memoryview(bytes(value)), ()

    def are_valid(self, dims: Dims) -> npt.NDArray[np.bool_]:
        """Return a mask that is True for all records, because any bytes are valid."""
        return np.ones(len(dims), np.bool_)


@refuses(FIELD_ADVICE)
@dataclass(frozen=True, slots=True, repr=False)
class Text(RecordField):
    """A field of text, stored as UTF-8. See `Array` for `codec` and `optional`."""

    code: ClassVar[int] = FieldType.TEXT
    is_utf8: ClassVar[bool] = True
    things: ClassVar[str] = "texts"

    def record_encoder(self, name: str) -> Callable[[Any], Record]:
        """Return a function that encodes a value; a plain str takes a fast path."""

        def encode(value: Any) -> Record:
            if type(value) is str:
                try:
                    return value.encode(), ()
                except UnicodeEncodeError:
                    pass  # `encode_record` raises the error
            return self.encode_record(name, value)

        return encode

    def _encode(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        if not isinstance(value, str):
            raise type_mismatch(name, "str", value)
        try:
            return memoryview(value.encode("utf-8")), ()
        except UnicodeEncodeError as error:
            raise SchemaError(f"field {name!r}: the text is not valid Unicode: {error}") from error

    def decode(self, record: Content, shape: tuple[int, ...]) -> str:
        """Return the text."""
        return str(record, "utf-8")

    def decode_batch(self, records: Sequence[Content]) -> list[Any]:
        """Return the texts."""
        return [str(record, "utf-8") for record in records]


@refuses(FIELD_ADVICE)
@dataclass(frozen=True, slots=True, repr=False)
class Json(RecordField):
    """A field of JSON values, stored as canonical JSON. See `Array` for `codec` and `optional`.

    In an optional field, None is a missing value; in any other field, it is JSON's null.
    """

    code: ClassVar[int] = FieldType.JSON
    is_json: ClassVar[bool] = True
    things: ClassVar[str] = "JSON values"

    def _encode(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        try:
            # `canonical_json` is first, because it refuses values that contain themselves.
            record = canonical_json(value)
            check_json(value)
        except SchemaError as error:
            raise SchemaError(f"field {name!r}: {error}") from error
        return memoryview(record), ()

    def decode(self, record: Content, shape: tuple[int, ...]) -> Any:
        """Return the parsed value."""
        return read_json(str(record, "utf-8"))

    def decode_batch(self, records: Sequence[Content]) -> list[Any]:
        """Return the parsed values; in an optional field, return None for an empty record."""
        texts = [str(record, "utf-8") for record in records]
        return [read_json(text) if text or not self.optional else None for text in texts]

    def check_record(self, record: Content, dims: Dims) -> None:
        """Raise ShardCorrupt unless a record is the canonical JSON of a storable value."""
        try:
            value = self.decode(record, ())
            is_canonical = canonical_json(value) == record
            check_json(value)
        except (ValueError, RecursionError, SchemaError) as error:
            raise ShardCorrupt(f"a record cannot be decoded: {error}", code="value") from error
        if not is_canonical:
            raise ShardCorrupt("JSON is not in canonical form", code="value")


_CANONICAL: Final = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
)


def canonical_json(value: object) -> bytes:
    """Return a value as shardio's canonical JSON: UTF-8, keys sorted, no spaces, no NaN."""
    try:
        return _CANONICAL.encode(value).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"a value cannot be written as JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


read_json: Final = json.JSONDecoder(parse_constant=_refuse_constant).decode
"""Parse JSON text. Raises ValueError for invalid text, including NaN and Infinity."""


MAX_JSON_DEPTH: Final = 256
"""The maximum nesting depth of a JSON value, far below Python's limit."""


def check_json(value: object) -> None:
    """Raise SchemaError for a key that is not a str, or nesting deeper than MAX_JSON_DEPTH.

    JSON would change the key 1 to "1".
    """
    waiting, depth = [value], -1
    while waiting:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise SchemaError(f"nested more than {MAX_JSON_DEPTH} deep")
        waiting = _nested(waiting)


_PLAIN: Final = frozenset({str, int, float, bool, type(None)})


def _nested(values: list[object]) -> list[object]:
    waiting: list[object] = []
    for found in values:
        if type(found) in _PLAIN:
            continue
        if isinstance(found, dict):
            for key in found:
                if not isinstance(key, str):
                    raise SchemaError(f"keys must be str, found {key!r}")
            waiting += found.values()
        elif isinstance(found, list | tuple):
            waiting += found
    return waiting
