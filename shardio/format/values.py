"""Values of a sample to bytes and back, by field type. Values are never changed, only refused."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.arraylike import (
    is_bfloat16_bits,
    is_of,
    refuse_masked,
    shown_dtype,
    tensor_to_array,
)
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


def encode_array(name: str, field: Array, value: object) -> npt.NDArray[Any]:
    """`value` as a C-contiguous little-endian array of the field's dtype and shape.

    Values are never changed: what the dtype cannot hold (in kind and range; Python numbers are
    rounded to a floating-point field's precision) is refused.

    Raises:
        SchemaError: dtype or shape do not fit; the message names the field and both.
    """
    found = _as_dtype(name, field, value)
    fits = found.ndim == len(field.shape) and all(
        d is None or d == n for d, n in zip(field.shape, found.shape, strict=True)
    )
    if not fits:
        raise SchemaError(
            f"field {name!r}: expected shape {_show(field.shape)}, found {_show(found.shape)}"
        )
    whole: npt.NDArray[Any] = np.ascontiguousarray(found).reshape(found.shape)
    if field.dtype == "bool" and (whole.view(np.uint8) > 1).any():  # a view of other bytes
        raise SchemaError(f"field {name!r}: a bool in it is neither 0 nor 1")
    return whole


def _show(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if d is None else str(d) for d in shape) + ")"


def _as_dtype(name: str, field: Array, value: object) -> npt.NDArray[Any]:
    wanted = field.numpy
    refuse_masked(f"field {name!r}", value, len(field.shape))
    if is_of(value, "torch", "Tensor"):
        value = tensor_to_array(name, value)
    if isinstance(value, np.ndarray | np.generic):
        found = np.asarray(value)
        if field.dtype == "bfloat16":
            # Bits, not numbers: a wider cast would turn the number 1 into the smallest denormal.
            if found.dtype.name == "bfloat16":
                return found.view(wanted)
            if found.dtype.newbyteorder("<") == wanted:
                return found.astype(wanted, copy=False)
        elif not is_bfloat16_bits(found.dtype) and np.can_cast(found.dtype, wanted, "safe"):
            cast = found.astype(wanted, copy=False)
            # What NumPy calls safe rounds large integers.
            if found.dtype.itemsize == 8 and found.dtype.kind in "iu" and wanted.kind == "f":
                _refuse_rounding(name, found, cast)
            return cast
        raise SchemaError(
            f"field {name!r}: expected dtype {field.dtype}, found {shown_dtype(found.dtype)}"
        )
    try:
        return _converted(np.asarray(value), field)
    except MemoryError:
        raise
    except Exception as error:  # a class may raise anything in __array__
        is_of_numpy = isinstance(error, TypeError | ValueError | OverflowError | RuntimeError)
        reason = str(error) if is_of_numpy else f"{type(error).__name__}: {error}"
        raise SchemaError(
            f"field {name!r}: expected {field.dtype}, found {_kind_of(value)}: {reason}"
        ) from error


def _refuse_rounding(name: str, given: npt.NDArray[Any], cast: npt.NDArray[Any]) -> None:
    with np.errstate(invalid="ignore"):
        changed = cast.astype(given.dtype) != given
    if changed.any():
        value = given[changed].flat[0]
        raise SchemaError(f"field {name!r}: {cast.dtype} cannot hold {value} exactly")


def _converted(found: npt.NDArray[Any], field: Array) -> npt.NDArray[Any]:
    """Numbers that came as Python objects, in the field's dtype; NumPy itself would wrap some."""
    wanted = field.numpy
    if found.size == 0 and found.dtype.kind == "f":
        return found.astype(wanted)
    if field.dtype == "bfloat16":
        raise TypeError("bfloat16 is given as an array of uint16, its bits, or of bfloat16")
    if found.dtype.kind not in {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}[wanted.kind]:
        if found.dtype == object and all(type(n) is int for n in found.flat):
            raise OverflowError("a whole number has more than 64 bits")
        raise TypeError(f"its values are {found.dtype}")
    if found.dtype == wanted:
        return found
    if found.size and wanted.kind in "iu" and found.dtype.kind != "b":
        limits = np.iinfo(wanted)
        if int(found.min()) < limits.min or int(found.max()) > limits.max:
            raise OverflowError(f"a value lies outside {limits.min}..{limits.max}")
    with np.errstate(over="ignore"):
        cast = found.astype(wanted)
    if wanted.kind == "f" and np.isfinite(found[np.isinf(cast)]).any():
        raise OverflowError(f"a value is too large for {field.dtype}")
    return cast


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
