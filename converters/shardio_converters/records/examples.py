"""Parse tf.train.Example in protobuf's wire format without TensorFlow; map features to fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio import Array, MediaError, Schema
from shardio_converters.files import media_value
from shardio_converters.inference import DtypeShape, SchemaInference
from shardio_converters.parsing import read_text
from shardio_converters.schema_spec import are_compatible_names, format_spec

Values = list[bytes] | npt.NDArray[Any]
"""The values of a feature: byte strings, or a float32 or int64 array."""

_BYTES, _FLOATS, _INTS = 1, 2, 3  # fields of a Feature
_VARINT, _I64, _LENGTH, _I32 = 0, 1, 2, 5  # wire types
_FIRST: Final = 0x0A  # the tag of field 1 with a length: a message, a string or packed numbers
_SECOND: Final = 0x12  # the tag of field 2 with a length
_LISTS: Final = {0x0A: _BYTES, 0x12: _FLOATS, 0x1A: _INTS}
_FEW: Final = 16  # up to this number of bytes, Python decodes varints faster than NumPy
_MAX_VARINT: Final = 10  # bytes
_TOO_EARLY: Final = "the message ends within a field"


def read_example(record: bytes) -> dict[bytes, Values]:
    """Return the features of a tf.train.Example by name; features without a list are omitted.

    As in protobuf, unknown fields are skipped; if features have the same name, the last is used.
    """
    found: dict[bytes, Values] = {}
    try:
        for number, wire, start, end in _fields(record, 0, len(record)):
            if number == 1 and wire == _LENGTH:
                _read_features(record, start, end, found)
            elif number == 2 and wire == _LENGTH:
                raise MediaError("found a SequenceExample")
    except IndexError:
        raise MediaError(f"not a tf.train.Example: {_TOO_EARLY}") from None
    except ValueError as error:
        raise MediaError(f"not a tf.train.Example: {error}") from error
    return found


def is_example(record: bytes) -> bool:
    """Return True if a record is a tf.train.Example: it has features and nothing else."""
    try:
        fields = [field[:2] for field in _fields(record, 0, len(record))]
        return {*fields} <= {(1, _LENGTH)} and bool(read_example(record))
    except (MediaError, IndexError, ValueError):
        return False


def _read_features(data: bytes, at: int, end: int, found: dict[bytes, Values]) -> None:
    """Parse a map of named features, and add its entries to `found`.

    Entries in the usual form, a name and one list with consistent lengths, take a path that is
    two to four times as fast.
    """
    while at < end:
        if data[at] != _FIRST:
            at = _skip_other(data, at, end)
            continue
        n_bytes, inner = _length(data, at + 1)
        at = stop = inner + n_bytes
        if stop > end:
            raise ValueError(_TOO_EARLY)
        if data[inner] != _FIRST or (n_name := data[inner + 1]) > 0x7F:
            _read_entry(data, inner, stop, found)
            continue
        after = inner + 2 + n_name
        if after + 4 > stop or data[after] != _SECOND:
            _read_entry(data, inner, stop, found)
            continue
        n_feature, feature = _length(data, after + 1)
        n_list, first = _length(data, feature + 1)
        kind = _LISTS.get(data[feature])
        if feature + n_feature != stop or first + n_list != stop or kind is None:
            _read_entry(data, inner, stop, found)
            continue
        found[data[inner + 2 : after]] = _values(data, first, stop, kind)


def _read_entry(data: bytes, start: int, end: int, found: dict[bytes, Values]) -> None:
    name, values = b"", None
    for number, wire, first, stop in _fields(data, start, end):
        if number == 1 and wire == _LENGTH:
            name = data[first:stop]
        elif number == 2 and wire == _LENGTH:
            values = _read_feature(data, first, stop, values)
    found.pop(name, None)
    if values is not None:
        found[name] = values


def _read_feature(data: bytes, start: int, end: int, values: Values | None) -> Values | None:
    """Parse a feature; return its list, appended to `values` if the kind of values is the same."""
    for number, wire, first, stop in _fields(data, start, end):
        if number not in (_BYTES, _FLOATS, _INTS) or wire != _LENGTH:
            continue
        more = _values(data, first, stop, number)
        if isinstance(values, list) and isinstance(more, list):
            values = values + more
        elif isinstance(values, np.ndarray) and values.dtype == getattr(more, "dtype", None):
            values = np.concatenate([values, more])
        else:
            values = more
    return values


def _values(data: bytes, start: int, end: int, kind: int) -> Values:
    if kind == _BYTES:
        return _strings(data, start, end)
    if start == end:
        return np.empty(0, np.float32 if kind == _FLOATS else np.int64)
    if data[start] == _FIRST:  # packed, usually in one piece
        n_bytes, first = _length(data, start + 1)
        if first + n_bytes == end:
            return _floats(data, first, end) if kind == _FLOATS else _ints(data, first, end)
    parts = []
    single = _I32 if kind == _FLOATS else _VARINT
    for number, wire, first, stop in _fields(data, start, end):
        if number == 1 and wire in (single, _LENGTH):
            read = _floats if kind == _FLOATS else _ints
            parts.append(read(data, first, stop))
    return np.concatenate([np.empty(0, np.float32 if kind == _FLOATS else np.int64), *parts])


def _strings(data: bytes, at: int, end: int) -> list[bytes]:
    found = []
    while at < end:
        if data[at] != _FIRST:
            at = _skip_other(data, at, end)
            continue
        n_bytes, at = _length(data, at + 1)
        if at + n_bytes > end:
            raise ValueError(_TOO_EARLY)
        found.append(data[at : at + n_bytes])
        at += n_bytes
    return found


def _floats(data: bytes, start: int, end: int) -> npt.NDArray[Any]:
    if (end - start) % 4:
        raise ValueError(f"{end - start} bytes of floats, expected a multiple of 4")
    # Copy the numbers: a view would keep the whole record in memory.
    return np.frombuffer(data, "<f4", (end - start) // 4, start).astype(np.float32)


def _ints(data: bytes, start: int, end: int) -> npt.NDArray[Any]:
    """Decode varints: 7 bits per byte, lowest first, the high bit set in all but the last byte."""
    if end - start <= _FEW:
        few = []
        while start < end:
            value, start = _varint(data, start)
            few.append(value)
        if start != end:
            raise ValueError(_TOO_EARLY)
        return np.array(few, np.uint64).view(np.int64)
    raw = np.frombuffer(data, np.uint8, end - start, start)
    (ends,) = (raw < 0x80).nonzero()
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise ValueError(_TOO_EARLY)
    if len(ends) == len(raw):
        return raw.astype(np.int64)
    lengths = ends - np.concatenate(([-1], ends[:-1]))
    if (most := int(lengths.max())) > _MAX_VARINT:
        raise ValueError(f"a number of {most} bytes, expected {_MAX_VARINT} at most")
    values = np.zeros(len(ends), np.uint64)
    starts = ends - lengths + 1
    for place in range(most):
        (there,) = (lengths > place).nonzero()
        part = raw[starts[there] + place] & np.uint8(0x7F)
        values[there] |= part.astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, start and end of each field of a message.

    Raise ValueError or IndexError if the bytes are not a message.
    """
    while at < end:
        field = _field(data, at, end)
        if not field[0]:
            raise ValueError("a field has number 0")
        yield field
        at = field[3]


def _field(data: bytes, at: int, end: int) -> tuple[int, int, int, int]:
    """Return number, wire type, start and end of the field that begins at `at`."""
    tag, start = _varint(data, at)
    wire = tag & 7
    if wire == _VARINT:
        _, stop = _varint(data, start)
    elif wire == _LENGTH:
        n_bytes, start = _length(data, start)
        stop = start + n_bytes
    elif wire in (_I64, _I32):
        stop = start + (8 if wire == _I64 else 4)
    else:
        raise ValueError(f"found wire type {wire}, expected one of 0, 1, 2, 5")
    if stop > end:
        raise ValueError(_TOO_EARLY)
    return tag >> 3, wire, start, stop


def _skip_other(data: bytes, at: int, end: int) -> int:
    number, wire, _, stop = _field(data, at, end)
    if number == 1:
        raise ValueError(f"field 1 has wire type {wire}, or its tag is too long")
    return stop


def _length(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    return (value, at + 1) if value < 0x80 else _varint(data, at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Parse an unsigned varint of up to 64 bits; return its value and the offset of its end."""
    value = 0
    for shift in range(0, 7 * _MAX_VARINT, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise ValueError(f"a number of more than {_MAX_VARINT} bytes")


STRINGS: Final = "list[uint8[*]]"  # several byte strings, unless a schema states another spec

Maker = Callable[[Values], Any]


def facts_of(features: Mapping[bytes, Values]) -> dict[str, DtypeShape]:
    """Return the dtype and shape of each feature; names that are not UTF-8 are escaped."""
    return {
        name.decode("utf-8", "surrogateescape"): (_dtype_of(each), (len(each),))
        for name, each in features.items()
    }


def merge_file(found: SchemaInference, of_file: SchemaInference) -> None:
    """Add a file's records to `found`; if they contradict it, raise an error and add none."""
    before, names = found.facts(), sorted({*found.facts(), *of_file.facts()})
    if before and are_compatible_names(before) and not are_compatible_names(names):
        raise MediaError(f"features {', '.join(names)}: one sample cannot have them all")
    found.merge(of_file)


def specs_of(found: SchemaInference) -> dict[str, str]:
    """Return the field specs; a feature with one value in all records is a scalar, not an array."""
    specs = {}
    for name, (dtype, shape) in found.facts().items():
        shape = () if shape == (1,) else shape
        is_list = dtype == "bytes" and shape
        spec = STRINGS if is_list else format_spec(dtype, shape)
        text = _text_of(name.encode(errors="surrogateescape"))
        specs[text] = spec + "?" * found.is_optional(name)
    return specs


def _dtype_of(values: Values) -> str:
    return "bytes" if isinstance(values, list) else values.dtype.name


def _text_of(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise MediaError(f"feature {name!r}: a name must be text in UTF-8") from error


def makers(schema: Schema) -> dict[bytes, Maker]:
    """Return the functions that make the values of fields, by feature name."""
    return {
        name.encode(): partial(_MAKERS[field.spec_name()], field) for name, field in schema.items()
    }


def fits(field: Any) -> bool:
    """Return True if features can provide a field; an array may have one varying dimension."""
    if field.item:
        return bool(field.item == Array("uint8", (None,)))
    return field.spec_name() in _MAKERS and getattr(field, "shape", ()).count(None) <= 1


def _array(field: Array, values: Values) -> Any:
    numbers = _raw(field, _one(values)) if isinstance(values, list) else values
    if not isinstance(values, list) and numbers.dtype != field.dtype:
        raise MediaError(f"expected {field.dtype}, found {numbers.dtype}")
    shape = field.shape
    if not shape and len(numbers) == 1:
        return numbers[0]
    if len(shape) == 1 and shape[0] in (None, len(numbers)):
        return numbers
    n_fixed = math.prod(n for n in shape if n is not None)
    if len(numbers) % n_fixed or (None not in shape and len(numbers) != n_fixed):
        raise MediaError(
            f"expected {format_spec(field.dtype, shape)}, found {len(numbers):,} values"
        )
    return numbers.reshape([-1 if n is None else n for n in shape])


def _raw(field: Array, data: bytes) -> Any:
    """Return the little-endian numbers in a byte string."""
    if len(data) % field.numpy.itemsize:
        raise MediaError(f"{len(data):,} bytes are not a whole number of {field.dtype}")
    numbers = np.frombuffer(data, field.numpy.newbyteorder("<"))
    if field.dtype == "bool" and (np.frombuffer(data, np.uint8) > 1).any():
        raise MediaError("expected bytes that are 0 or 1, for bool")
    return numbers


def _one(values: Values) -> bytes:
    if not isinstance(values, list) or len(values) != 1:
        raise MediaError(
            f"expected one string of bytes, found {len(values)} of {_dtype_of(values)}"
        )
    return values[0]


def _all(values: Values) -> list[bytes]:
    if not isinstance(values, list):
        raise MediaError(f"expected bytes, found {values.dtype}")
    return values


_MAKERS: Final[dict[str, Callable[[Any, Values], Any]]] = {
    "array": _array,
    "bytes": lambda _, values: _one(values),
    "image": lambda field, values: media_value(field, _one(values)),
    "json": lambda _, values: [*map(read_text, _all(values))],
    "list": lambda _, values: [np.frombuffer(each, np.uint8) for each in _all(values)],
    "text": lambda _, values: read_text(_one(values)),
}
