"""Encode the values of a sample as bytes, and decode them, by field type.

Values are never changed, only refused. `row_encoder` and `record_encoder` return functions for one
field that recognize common values by their type alone and take a tenth of the time; all others go
through `encode_array`, `encode_record` and `encode_stream`, with the same bytes as a result.

A list of arrays is stored as

    | count: u64 | count x varying dimensions: u64 | zeros up to a multiple of 64 | the arrays |

with the arrays back to back in C order. The record has its own shapes, so it can be copied and
decoded without any other section.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.checksum import ROW_HASH_MIN
from shardio.format.index import RECORD_ALIGNMENT, extent, full_shape, is_picture
from shardio.format.schema import canonical_json, read_json
from shardio.format.types import (
    MAX_RECORD_BYTES,
    STREAMED,
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
from shardio.format.types.arrays import encode_array
from shardio.format.types.streams import (
    EncodedStream,
    StreamRecord,
    StreamTables,
    check_parameters,
    stream_tables,
)


class EncodedImage(bytes):
    """The bytes of an image file; `bytes` in every other respect.

    `height` and `width` are those of the displayed image, in pixels; `channels` are those of the
    encoded one, 1 to 4.
    """

    height: int
    width: int
    channels: int

    def __new__(
        cls, data: bytes | bytearray | memoryview, height: int, width: int, channels: int
    ) -> Self:
        """Create the image; the data is copied unless it is `bytes`."""
        found = super().__new__(cls, data)
        found.height, found.width, found.channels = height, width, channels
        return found

    def __getnewargs__(self) -> tuple[bytes, int, int, int]:  # type: ignore[override]
        """Return the arguments for pickle and copy."""
        return bytes(self), self.height, self.width, self.channels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels, in the order of the decoded array."""
        return self.height, self.width, self.channels


_NUMBER: Final = struct.Struct("<Q")


def pack_list(element: Array, arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    """Return the record of arrays that fit `element`."""
    varying = [d for d, n in enumerate(element.shape) if n is None]
    numbers = [len(arrays), *(array.shape[d] for array in arrays for d in varying)]
    head = struct.pack(f"<{len(numbers)}Q", *numbers)
    gap = -len(head) % RECORD_ALIGNMENT
    return b"".join([head, bytes(gap), *(array.tobytes() for array in arrays)])


def unpack_list(element: Array, record: bytes | memoryview) -> list[npt.NDArray[Any]]:
    """Return the arrays of a record, as views of it.

    Raises:
        ShardCorrupt: the numbers do not match the record's bytes. The error has no place.
    """
    place, dims = _head(element, record)
    arrays = []
    for varying in dims:
        n_left = len(record) - place
        shape, n_bytes = _shape(element, varying, n_left)
        data = record[place : place + n_bytes]
        arrays.append(np.frombuffer(data, element.numpy).reshape(shape)[()])
        place += n_bytes
    if place != len(record):
        raise _refuse("a list of arrays does not account for its bytes", place, len(record))
    return arrays


def items_of(element: Array, record: bytes | memoryview) -> bytes | memoryview:
    """Return the bytes of all arrays of a record, back to back, as a view of it.

    Raises:
        ShardCorrupt: the numbers before them are invalid, as for `unpack_list`.
    """
    return record[_head(element, record)[0] :]


def _head(element: Array, record: bytes | memoryview) -> tuple[int, npt.NDArray[np.uint64]]:
    """Return the offset of the arrays, and the varying dimensions of each, (count, varying)."""
    if len(record) < RECORD_ALIGNMENT:
        raise _refuse("a list of arrays has no head", RECORD_ALIGNMENT, len(record))
    (count,) = _NUMBER.unpack_from(record)
    # An array of fixed shape takes bytes, one of varying shape has numbers: count is bounded.
    smallest = element.row_bytes or _NUMBER.size * element.n_varying
    if count > len(record) // smallest:
        raise _refuse("a list has more arrays than bytes", len(record) // smallest, count)
    end = _NUMBER.size * (1 + count * element.n_varying)
    start = -(-end // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    if start > len(record) or any(record[end:start]):
        raise _refuse("the head of a list is cut off, or its padding is not zero", start, end)
    dims = np.frombuffer(record, "<u8", count * element.n_varying, _NUMBER.size)
    return start, dims.reshape(count, element.n_varying)


def _shape(
    element: Array, varying: npt.NDArray[np.uint64], n_left: int
) -> tuple[tuple[int, ...], int]:
    """Return the shape of the next array and its bytes; n_left remain in the record."""
    rest = iter(varying.tolist())
    shape = tuple(next(rest) if d is None else d for d in element.shape)
    n_bytes = 0 if 0 in shape else element.numpy.itemsize * int(np.prod(shape, dtype=object))
    if n_bytes > n_left:
        raise _refuse(f"an array of shape {shape} in a list is cut off", n_bytes, n_left)
    return full_shape(element, varying, n_bytes), n_bytes


def _refuse(what: str, expected: object, found: object) -> ShardCorrupt:
    return ShardCorrupt(what, code="list", expected=expected, found=found)


MAX_JSON_DEPTH: Final = 256
"""The maximum nesting of a Json value: parsable with any remaining part of Python's stack."""


def encode_record(name: str, field: Field, value: object) -> tuple[memoryview, tuple[int, ...]]:
    """Return the bytes of a value that is stored as a record, and its stored dimensions, if any.

    None of an optional field has no bytes and, for an array, dimensions of 0. Streams go through
    `encode_stream`.

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
            record = canonical_json(value)  # first: it rejects values that contain themselves
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
    """Return the record of a stream with its tables; an empty one for None in an optional field.

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
    tables = stream_tables(name, field, value, len(head))
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
    """Check that a value survives a round trip through JSON.

    Keys that are not strings are refused: JSON would turn 1 into "1". So is deep nesting, which
    could be read or not depending on the stack.

    Raises:
        SchemaError: it does not. The message names no field.
    """
    waiting, depth = [value], -1
    while waiting:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise SchemaError(f"nested more than {MAX_JSON_DEPTH} deep")
        waiting = _nested(waiting)


_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
"""The types of most values without nested ones, for a quick test."""


def _nested(values: list[object]) -> list[object]:
    """Return the values directly inside of dicts and lists."""
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
    """Return the value of a record; arrays, also those of a list, are views of `record`.

    Raises:
        ShardCorrupt: the numbers of a list are invalid. The error has no place.
        ValueError: invalid text or JSON (UnicodeDecodeError is one).
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


Content = bytes | memoryview
Record = tuple[Content, tuple[int, ...]] | StreamRecord
"""The bytes of one value with the shape of an array or image; or a stream."""

_COPIED_BYTES: Final = 4 << 10
"""Smaller arrays are copied, which is faster than a view."""
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
"""The Python numbers that `struct` packs as NumPy does, refusing values out of range."""


def row_encoder(name: str, field: Array) -> Callable[[Any], Content | None]:
    """Return a function that encodes a value of a column, or returns None for a missing one.

    Rows without a hash of their own are copies.

    Raises:
        SchemaError: (from the returned function) the value does not fit the field.
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
        elif kind is number and value == value:  # not NaN, which has many representations
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
    """Return a function that encodes a value of a field that is not a column.

    Raises:
        SchemaError: (from the returned function) the value does not fit the field.
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
