"""Values of Arrow's columns, as fields of samples take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardio import Array, Audio, Bytes, Image, Json, List, MediaError, Text, Video
from shardio.media import demux, probe
from shardio_converters.arrow.types import ArrowColumn, is_list, is_struct, is_tensor, is_text
from shardio_converters.inference import widen
from shardio_converters.json_values import read_json
from shardio_converters.schema_spec import Field, fits

_MEDIA_FIELDS: Final = (Image, Audio, Video)


def values_of(
    batch: pa.RecordBatch, column: ArrowColumn, field: Field, first_row: int
) -> Sequence[Any]:
    """The value of every row of a batch, whose first one is the `first_row` of the file.

    Raises:
        MediaError: one is missing, or is not what the field has; it names column and row.
    """
    place = f"column {column.name!r}, rows {first_row:,} to {first_row + batch.num_rows - 1:,}"
    array = array_at(batch, column)
    try:
        if isinstance(field, _MEDIA_FIELDS):
            found: Sequence[Any] = _files(array, field)
        elif isinstance(field, Json):
            is_written = column.word == "json" and is_text(array.type)
            found = _parsed(array) if is_written else _said(array)
        elif isinstance(field, Bytes):
            found = array.to_pylist()
        elif isinstance(field, Text):
            found = array.cast(pa.string()).to_pylist()
        elif array.type == pa.null():
            found = [None] * len(array)
        else:
            if has_nulls_inside(array):
                raise MediaError("a null in a list; expected numbers alone")
            if isinstance(field, List):
                found = _lists(array, field.element)
            else:
                found = _arrays(array, column, field)
            if array.null_count:
                is_null = array.is_null().to_numpy(zero_copy_only=False).tolist()
                found = [None if no else one for no, one in zip(is_null, found, strict=True)]
    except MediaError as error:
        raise MediaError(f"{place}: {error}") from error
    except ValueError as error:  # as of text that is not UTF-8
        raise MediaError(f"{place}: damaged: {error}") from error
    if not (field.optional or isinstance(field, Json)) and _is_missing(array, found):
        row = first_row + [one is None for one in found].index(True)
        raise MediaError(f"column {column.name!r}, row {row:,}: found null, expected a value")
    return found


def array_at(batch: pa.RecordBatch, column: ArrowColumn) -> pa.Array:
    """What a batch has of a column; where a struct is null, so is what lies in it."""
    array = _unpacked(batch.column(batch.schema.get_field_index(column.top)))
    for position in column.path:
        array = _unpacked(pc.struct_field(array, [position]))
    return array


def has_nulls_inside(array: pa.Array) -> bool:
    """Whether a list that is there has an element that is not."""
    while is_list(array.type):
        array = _unpacked(array.flatten())
        if array.null_count:
            return True
    return False


def _is_missing(array: pa.Array, found: Sequence[Any]) -> bool:
    return bool(array.null_count) or (is_struct(array.type) and None in found)


def _unpacked(array: pa.Array) -> pa.Array:
    """The values themselves, of a dictionary, of runs, of an extension's storage."""
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        elif isinstance(array, pa.RunEndEncodedArray):
            array = pc.run_end_decode(array)
        else:
            return array


def _arrays(array: pa.Array, column: ArrowColumn, field: Array) -> Sequence[Any]:
    """An array of each row, of the field's shape."""
    found = _blocks(array, field.dtype)
    if is_tensor(column.type):  # it lies flat
        found = np.reshape(found, (len(array), *column.type.shape))
    dims = field.shape
    if isinstance(found, np.ndarray) and fits(found.shape[1:], dims):
        return list(found)
    null = array.is_null().to_numpy(zero_copy_only=False)
    return [
        None if is_null else _shaped(one, dims) for one, is_null in zip(found, null, strict=True)
    ]


def _shaped(one: npt.NDArray[Any], dims: Sequence[int | None]) -> npt.NDArray[Any]:
    """An array of the shape that a field has; an empty one does not say what it is empty of."""
    if not one.size and one.ndim == len(dims):
        shape = tuple(n if want is None else want for n, want in zip(one.shape, dims, strict=True))
        one = one.reshape(shape) if 0 in shape else one
    if not fits(one.shape, dims):
        expected = ",".join("*" if n is None else str(n) for n in dims)
        raise MediaError(f"expected shape [{expected}], found {[*one.shape]}")
    return one


def _blocks(array: pa.Array, dtype: str) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
    """An array of each row: in one block where all have one shape."""
    array = _unpacked(array)
    if not is_list(array.type):
        return _numbers(array, dtype)
    offsets, values = _split(array)
    inner = _blocks(values, dtype)
    lengths = np.diff(offsets)
    if isinstance(inner, np.ndarray):
        if len(lengths) and (lengths == lengths[0]).all():
            return inner.reshape(len(lengths), lengths[0], *inner.shape[1:])
        if len(lengths):
            return [inner[start:end] for start, end in pairwise(offsets.tolist())]
        return inner.reshape(0, 0, *inner.shape[1:])
    none = np.empty((0, *(0 for _ in inner[0].shape)), inner[0].dtype)
    pairs = pairwise(offsets.tolist())
    return [_stacked(inner[start:end]) if end > start else none for start, end in pairs]


def _stacked(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if len({one.shape for one in arrays}) > 1:
        shapes = sorted({one.shape for one in arrays})
        raise MediaError(f"expected lists of one length in an array, found {shapes[:3]}")
    return np.stack(arrays)


def _lists(array: pa.Array, element: Array) -> list[list[npt.NDArray[Any]]]:
    """A list of arrays of each row, each of the shape that the field's have."""
    offsets, values = _split(array)
    inner = _blocks(values, element.dtype)
    if [*element.shape] != [None]:  # which all have
        inner = [_shaped(one, element.shape) for one in inner]
    return [list(inner[start:end]) for start, end in pairwise(offsets.tolist())]


def _split(array: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Where the list of each row begins, and the last one ends, in the values of all of them."""
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, array.flatten()


def _numbers(array: pa.Array, wanted: str) -> npt.NDArray[Any]:
    """Numbers in the dtype of the field, of times too; anything where there is none.

    They are copied: what follows from a file is not to change with it.
    """
    if pa.types.is_boolean(array.type):
        return np.array(array.fill_null(False).to_numpy(zero_copy_only=False))
    dtype = np.dtype(f"int{array.type.bit_width}")
    if not pa.types.is_temporal(array.type):
        dtype = np.dtype(array.type.to_pandas_dtype())
    if dtype != wanted and array.null_count:
        array = array.fill_null(0)  # anything may lie there
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array), wanted)
    found = np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    return found.copy() if dtype == wanted else widen(found, wanted)


def _parsed(array: pa.Array) -> list[Any]:
    """What texts of JSON say; None where there is none."""
    return [None if text is None else read_json(text.encode()) for text in array.to_pylist()]


def _said(array: pa.Array) -> list[Any]:
    """What lists and structs hold, as JSON has it."""
    found: list[Any] = array.to_pylist()
    try:
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise MediaError("NaN or an infinite number, which JSON does not have") from error
    return found


def _files(array: pa.Array, field: Field) -> list[Any]:
    """The files in a column, which may lie beside their paths; each is looked into."""
    paths: list[str | None] = [None] * len(array)
    if is_struct(array.type):
        paths = pc.struct_field(array, "path").to_pylist()
        array = pc.struct_field(array, "bytes")
    found: list[Any] = []
    for path, data in zip(paths, array.to_pylist(), strict=True):
        if data is None and path is not None:
            raise MediaError(
                f"expected the bytes of a file, found its path alone, {path!r}: save the data set "
                "with its files in it, as save_to_disk and to_parquet of `datasets` do"
            )
        if data is not None and isinstance(field, Image):
            probe(data)
        elif data is not None:
            data = demux(data, "audio" if isinstance(field, Audio) else "video")
        found.append(data)
    return found
