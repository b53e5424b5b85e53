"""Values of a sample to bytes and back, by field type. Values are never changed, only refused."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.arrays import encode_array
from shardio.format.fields import (
    MAX_RECORD_BYTES,
    Array,
    Audio,
    Bytes,
    Field,
    Image,
    Json,
    List,
    Text,
    Video,
    n_stored_dims,
)
from shardio.format.images import EncodedImage
from shardio.format.index import extent, is_picture
from shardio.format.lists import pack_list, unpack_list
from shardio.format.schema import canonical_json, read_json
from shardio.format.streams import (
    EncodedStream,
    StreamRecord,
    StreamTables,
    check_parameters,
    tables_of,
)

MAX_JSON_DEPTH: Final = 256
"""How deep a Json value may be nested: readable with whatever is left of Python's stack."""


def encode_record(name: str, field: Field, value: object) -> tuple[memoryview, tuple[int, ...]]:
    """The bytes of a value that is stored record by record, and its stored dimensions, if any.

    None of an optional field has no bytes and, if it is an array, dimensions of 0. For streams
    there is `encode_stream`.

    Raises:
        SchemaError: the value does not fit the field.
    """
    if value is None and field.optional:
        n_dims = len(field.shape) if isinstance(field, Array) else n_stored_dims(field)
        return memoryview(b""), (0,) * n_dims
    if isinstance(field, Image):
        return _encode_image(name, value)
    if isinstance(field, List):
        return _encode_list(name, field.element, value), ()
    if isinstance(field, Array):
        array = encode_array(name, field, value)
        if extent(field.numpy.itemsize, array.shape) > MAX_RECORD_BYTES:
            raise SchemaError(f"field {name!r}: shape {array.shape} is not below 2^48 bytes")
        return array.reshape(-1).view(np.uint8).data, array.shape
    if isinstance(field, Json):
        try:
            record = canonical_json(value)  # first: it refuses what refers to itself
            check_json(value)
        except SchemaError as error:
            raise SchemaError(f"field {name!r}: {error}") from error
        return memoryview(record), ()
    if isinstance(field, Bytes):
        if not isinstance(value, bytes | bytearray | memoryview):
            raise SchemaError(f"field {name!r}: expected bytes, found {_kind_of(value)}")
        return memoryview(bytes(value)), ()
    if not isinstance(value, str):
        raise SchemaError(f"field {name!r}: expected str, found {_kind_of(value)}")
    try:
        return memoryview(value.encode("utf-8")), ()
    except UnicodeEncodeError as error:
        raise SchemaError(f"field {name!r}: the text is not valid Unicode: {error}") from error


def _encode_image(name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
    if not isinstance(value, EncodedImage):
        raise SchemaError(f"field {name!r}: expected a picture's bytes, found {_kind_of(value)}")
    if not value or not is_picture(*value.shape):
        raise SchemaError(
            f"field {name!r}: no picture has {len(value)} bytes, height {value.height}, width "
            f"{value.width} and {value.channels} channels"
        )
    return memoryview(value), value.shape


def encode_stream(name: str, field: Video | Audio, value: object) -> StreamRecord:
    """The record of a stream, with what other sections have of it; nothing of None, if it may be.

    Raises:
        SchemaError: the value does not fit the field.
    """
    if value is None and field.optional:
        return StreamRecord(b"", b"", StreamTables())
    if not isinstance(value, EncodedStream):
        raise SchemaError(f"field {name!r}: expected an EncodedStream, found {_kind_of(value)}")
    try:
        parameters = dict(value.parameters)
        check_parameters(parameters)
        head = canonical_json(parameters)
        check_json(parameters)
    except (ShardCorrupt, SchemaError, TypeError, ValueError) as error:
        raise SchemaError(f"field {name!r}: {error}") from error
    tables = tables_of(name, field, value, len(head))
    return StreamRecord(b"".join((head, value.extradata)), value.data[:], tables)


def _encode_list(name: str, element: Array, value: object) -> memoryview:
    if not isinstance(value, list | tuple):
        raise SchemaError(f"field {name!r}: expected a list of arrays, found {_kind_of(value)}")
    arrays = [encode_array(f"{name}[{i}]", element, each) for i, each in enumerate(value)]
    record = pack_list(element, arrays)
    if len(record) > MAX_RECORD_BYTES:
        raise SchemaError(f"field {name!r}: {len(record)} bytes are not below 2^48")
    return memoryview(record)


def _kind_of(value: object) -> str:
    return type(value).__name__


def check_json(value: object) -> None:
    """Refuse what would not come back the same.

    Dicts with keys that are no strings: JSON would turn 1 into "1". And what is nested so deep that
    it depends on the stack whether it can be read.

    Raises:
        SchemaError: it would not. It names no field.
    """
    waiting, depth = [value], -1
    while waiting:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise SchemaError(f"nested more than {MAX_JSON_DEPTH} deep")
        waiting = _nested(waiting)


_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
"""Types of which nearly all values are that have nothing inside: told quickly."""


def _nested(values: list[object]) -> list[object]:
    """What is directly inside of dicts and lists."""
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


def decode_record(field: Field, record: bytes | memoryview, shape: tuple[int, ...]) -> Any:
    """The value in a record; an array is a view of `record`, and so are those of a list.

    Raises:
        ShardCorrupt: a list whose numbers cannot be right. It names no place.
        ValueError: text or JSON that is not what it should be (UnicodeDecodeError is one).
    """
    if isinstance(field, List):
        return unpack_list(field.element, record)
    if isinstance(field, Array):
        return np.frombuffer(record, field.numpy).reshape(shape)[()]
    if isinstance(field, Image):
        return EncodedImage(record, *shape)
    if isinstance(field, Text):
        return str(record, "utf-8")
    if isinstance(field, Json):
        return read_json(str(record, "utf-8"))
    return bytes(record)
