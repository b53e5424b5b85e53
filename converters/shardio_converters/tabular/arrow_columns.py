"""Columns of Arrow tables: the fields of shardio that they become, and their values."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from shardio import Array, MediaError
from shardio_converters.files import media_value
from shardio_converters.inference import UNKNOWN, widen
from shardio_converters.parsing import read_json
from shardio_converters.schema_spec import Field, check_names, fits, format_spec

_MAX_DEPTH: Final = 32  # the maximum nesting depth of lists and structs; more than any field allows
# Hugging Face features of files
_MEDIA: Final = {"Image": "image", "Audio": "audio", "Video": "video"}

_RENAME: Final = "rename it or leave it out (--column, or columns=, selects columns)"
_LISTS: Final = (
    *(pa.ListType, pa.LargeListType, pa.FixedSizeListType),
    *(pa.ListViewType, pa.LargeListViewType),
)


@dataclass(frozen=True)
class ArrowColumn:
    """A column, or a member of a struct column, that becomes one field.

    `top` is the column in the table, and `path` lists the index of a member for each level of
    structs. `spec` is the field spec. Times are stored as integers in `unit`, which is "" for other
    columns.
    """

    name: str
    top: str
    path: tuple[int, ...]
    type: pa.DataType
    spec: str
    unit: str = ""
    classes: tuple[str, ...] = ()


def columns_of(
    schema: pa.Schema, only: Sequence[str] | None = None, whole: Mapping[str, str] | None = None
) -> list[ArrowColumn]:
    """Return the columns of a table, or only those in `only`; struct members have dotted names.

    A struct whose name is in `whole` becomes one field.
    """
    names = list(schema.names)
    if missing := [name for name in only or () if name not in names]:
        raise MediaError(f"column {missing[0]!r} is missing, found {', '.join(names)}")
    features = features_of(schema)
    found: list[ArrowColumn] = []
    for field in schema:
        if only is None or field.name in only:
            about = features.get(field.name)
            found += columns_of_type(field.name, field.type, whole or {}, about)
    check_names((column.name for column in found), "columns", _RENAME)
    return found


def columns_of_type(
    name: str,
    type_: pa.DataType,
    whole: Collection[str] = (),
    about: Any = None,
    path: tuple[int, ...] = (),
    top: str = "",
) -> Iterator[ArrowColumn]:
    """Yield the `ArrowColumn` of a column or, for a struct, one per member.

    `about` is Hugging Face's feature of the column. `path` and `top` are those of `ArrowColumn`.
    """
    top = top or name
    feature = about if isinstance(about, dict) else {}
    is_json = getattr(type_, "extension_name", "") == "arrow.json"
    kind = str(feature.get("_type", ""))
    type_ = _plain(type_)
    if len(path) > _MAX_DEPTH:
        raise MediaError(f"column {top!r}: structs nested more than {_MAX_DEPTH} deep")
    is_file = kind in _MEDIA and _holds_files(type_)
    if types.is_struct(type_) and not is_file and name not in whole:
        if not type_.num_fields:
            raise MediaError(f"column {name!r}: a struct without fields")
        for position in range(type_.num_fields):
            inner = type_.field(position)
            yield from columns_of_type(
                f"{name}.{inner.name}",
                inner.type,
                whole,
                feature.get(inner.name),
                (*path, position),
                top,
            )
        return
    if is_file:
        spec = _MEDIA[kind]
    elif is_json:
        spec = "json"
    else:
        spec = _spec(name, type_, _shape_of(feature))
    names = feature.get("names") if kind == "ClassLabel" else None
    classes = tuple(map(str, names)) if isinstance(names, list) else ()
    if len({*classes}) < len(classes):
        raise MediaError(f"column {name!r}: two classes have the same name: {classes}")
    _, element = dims_of(name, type_)
    unit = str(element) if _is_time(element) else ""
    yield ArrowColumn(name, top, path, type_, spec, unit, classes)


def _spec(name: str, type_: pa.DataType, shape: tuple[int | None, ...] | None) -> str:
    dims, element = dims_of(name, type_)
    if dtype := _dtype_of(element):
        dims = shape if shape is not None and len(shape) == len(dims) else dims
        is_list = None in dims[1:]
        return f"list[{format_spec(dtype, dims[1:])}]" if is_list else format_spec(dtype, dims)
    if not dims:
        if _is_text(element) or types.is_decimal(element):
            return "text"
        if _is_bytes(element):
            return "bytes"
        if types.is_null(element):
            return UNKNOWN
        if not types.is_struct(element):
            raise MediaError(f"column {name!r}: {_why_not(element)}")
    check_json(name, element)
    return "json"


def check_json(name: str, type_: pa.DataType, depth: int = 0) -> None:
    """Check that nested lists and structs can be represented in JSON."""
    type_ = _plain(type_)
    if depth > _MAX_DEPTH:
        raise MediaError(f"column {name!r}: lists and structs more than {_MAX_DEPTH} deep")
    if types.is_struct(type_):
        inner = [type_.field(position) for position in range(type_.num_fields)]
        if len({field.name for field in inner}) < len(inner):
            raise MediaError(f"column {name!r}: a struct has two fields of the same name: {type_}")
        for field in inner:
            check_json(name, field.type, depth + 1)
    elif is_list(type_):
        check_json(name, type_.value_type, depth + 1)
    elif _is_time(type_) or not (_dtype_of(type_) or _is_text(type_) or types.is_null(type_)):
        raise MediaError(f"column {name!r}: {_why_not(type_, ' in a list or in JSON')}")


def _why_not(type_: pa.DataType, where: str = "") -> str:
    hint = "leave the column out (columns), or write it as another type"
    return f"{type_} cannot be stored{where}: {hint}"


def dims_of(name: str, type_: pa.DataType) -> tuple[tuple[int | None, ...], pa.DataType]:
    """Return the dimensions of nested lists (None if they vary) and the innermost type."""
    dims: tuple[int | None, ...] = ()
    type_ = _plain(type_)
    if _is_tensor(type_):
        if type_.permutation not in (None, [*range(len(type_.shape))]):
            raise MediaError(f"column {name!r}: {type_} is permuted; write it in row-major order")
        return tuple(int(n) or None for n in type_.shape), type_.value_type
    while is_list(type_):
        dims += (getattr(type_, "list_size", None) or None,)
        type_ = _plain(type_.value_type)
        if len(dims) > _MAX_DEPTH:
            raise MediaError(f"column {name!r}: lists nested more than {_MAX_DEPTH} deep")
    return dims, type_


def _plain(type_: pa.DataType) -> pa.DataType:
    """Unwrap dictionary, run-end-encoded and extension types, except fixed-shape tensors.

    An extension type of another package, such as Hugging Face's Array2D, is replaced by the type
    in which its values are stored.
    """
    while True:
        if types.is_dictionary(type_) or types.is_run_end_encoded(type_):
            type_ = type_.value_type
        elif isinstance(type_, pa.BaseExtensionType) and not _is_tensor(type_):
            type_ = type_.storage_type
        else:
            return type_


def _is_tensor(type_: pa.DataType) -> bool:
    return isinstance(type_, pa.FixedShapeTensorType)


def _is_time(type_: pa.DataType) -> bool:
    return bool(types.is_temporal(type_) and not types.is_interval(type_))


def _is_bytes(type_: pa.DataType) -> bool:
    is_other = types.is_fixed_size_binary(type_) or types.is_binary_view(type_)
    return bool(is_other or types.is_binary(type_) or types.is_large_binary(type_))


def _dtype_of(type_: pa.DataType) -> str | None:
    """Return the dtype of numbers; for times, the dtype of the integers that store them."""
    if _is_time(type_):
        return f"int{type_.bit_width}"
    if types.is_boolean(type_) or types.is_integer(type_) or types.is_floating(type_):
        return str(np.dtype(type_.to_pandas_dtype()))
    return None


def _is_text(type_: pa.DataType) -> bool:
    is_view = types.is_string_view(type_)
    return bool(is_view or types.is_large_string(type_) or types.is_string(type_))


def is_list(type_: pa.DataType) -> bool:
    """Return True if values of a type are lists of any kind."""
    return isinstance(type_, _LISTS)


def _holds_files(type_: pa.DataType) -> bool:
    """Return True for Hugging Face's storage of files: a struct of bytes and path."""
    return types.is_struct(type_) and {field.name for field in type_} == {"bytes", "path"}


def features_of(schema: pa.Schema) -> dict[str, Any]:
    """Return Hugging Face's features of a table by column; {} if the table has none."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise MediaError(f"the metadata of Hugging Face is damaged: {error}") from error
    return features if isinstance(features, dict) else {}


def _shape_of(feature: dict[str, Any]) -> tuple[int | None, ...] | None:
    """Return the shape of a Hugging Face feature of type Array2D to Array5D; None for others."""
    shape = feature.get("shape")
    if not isinstance(shape, list) or not str(feature.get("_type")).startswith("Array"):
        return None
    if not all(n is None or (type(n) is int and n >= 0) for n in shape):
        raise MediaError(f"the metadata of Hugging Face has the shape {shape}")
    return tuple(n or None for n in shape)


def values_of(
    batch: pa.RecordBatch, column: ArrowColumn, field: Field, first_row: int
) -> Sequence[Any]:
    """Return the values of all rows of a batch; `first_row` is the index of its first row."""
    place = f"column {column.name!r}, rows {first_row:,} to {first_row + batch.num_rows - 1:,}"
    array = array_at(batch, column)
    try:
        if field.medium:
            found: Sequence[Any] = _files(array, field)
        elif field.is_json:
            found = array.to_pylist()
            if column.spec == "json" and _is_text(array.type):  # written as JSON
                found = [None if text is None else read_json(text.encode()) for text in found]
            else:
                _check_no_nan(found)
        elif field.is_opaque:
            found = array.to_pylist()
        elif field.is_utf8:
            found = array.cast(pa.string()).to_pylist()
        elif array.type == pa.null():
            found = [None] * len(array)
        else:
            if has_nulls_inside(array):
                raise MediaError("a null in a list; expected numbers only")
            if field.item:
                found = _lists(array, field.item)
            else:
                found = _arrays(array, column, field)
            if array.null_count:
                is_null = array.is_null().to_numpy(zero_copy_only=False).tolist()
                found = [None if no else one for no, one in zip(is_null, found, strict=True)]
    except MediaError as error:
        raise MediaError(f"{place}: {error}") from error
    except ValueError as error:  # for example, text that is not UTF-8
        raise MediaError(f"{place}: damaged: {error}") from error
    has_nulls = array.null_count or (types.is_struct(array.type) and None in found)
    if has_nulls and not (field.optional or field.is_json):
        row = first_row + [one is None for one in found].index(True)
        raise MediaError(f"column {column.name!r}, row {row:,}: found null, expected a value")
    return found


def array_at(batch: pa.RecordBatch, column: ArrowColumn) -> pa.Array:
    """Return a column of a batch; members of a null struct are null."""
    array = _unpacked(batch.column(batch.schema.get_field_index(column.top)))
    for position in column.path:
        array = _unpacked(pc.struct_field(array, [position]))
    return array


def has_nulls_inside(array: pa.Array) -> bool:
    """Return True if a non-null list contains a null."""
    while is_list(array.type):
        array = _unpacked(array.flatten())
        if array.null_count:
            return True
    return False


def _unpacked(array: pa.Array) -> pa.Array:
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif isinstance(array, pa.DictionaryArray):
            if array.type.value_type == pa.string_view():  # pyarrow 26 cannot decode it
                array = array.cast(pa.dictionary(array.type.index_type, pa.large_string()))
            array = array.dictionary_decode()
        elif isinstance(array, pa.RunEndEncodedArray):
            array = pc.run_end_decode(array)
        else:
            return array


def _arrays(array: pa.Array, column: ArrowColumn, field: Array) -> Sequence[Any]:
    found = _blocks(array, field.dtype)
    if _is_tensor(column.type):  # each tensor is stored as a flat list
        found = np.reshape(found, (len(array), *column.type.shape))
    dims = field.shape
    if isinstance(found, np.ndarray) and fits(found.shape[1:], dims):
        return list(found)
    null = array.is_null().to_numpy(zero_copy_only=False)
    return [
        None if is_null else _shaped(one, dims) for one, is_null in zip(found, null, strict=True)
    ]


def _shaped(one: npt.NDArray[Any], dims: Sequence[int | None]) -> npt.NDArray[Any]:
    """Check an array against the shape of a field; give an empty array the sizes of the field."""
    if not one.size and one.ndim == len(dims):
        shape = tuple(n if want is None else want for n, want in zip(one.shape, dims, strict=True))
        one = one.reshape(shape) if 0 in shape else one
    if not fits(one.shape, dims):
        expected = ",".join("*" if n is None else str(n) for n in dims)
        raise MediaError(f"expected shape [{expected}], found {[*one.shape]}")
    return one


def _blocks(array: pa.Array, dtype: str) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
    """Return an array per row; if all have the same shape, one array of all rows."""
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
    offsets, values = _split(array)
    inner = _blocks(values, element.dtype)
    if [*element.shape] != [None]:  # every one-dimensional array fits [None]
        inner = [_shaped(one, element.shape) for one in inner]
    return [list(inner[start:end]) for start, end in pairwise(offsets.tolist())]


def _split(array: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array]:
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, array.flatten()


def _numbers(array: pa.Array, wanted: str) -> npt.NDArray[Any]:
    """Copy numbers or times to an array of dtype `wanted`; nulls become arbitrary numbers.

    A copy is made because a view of a memory-mapped file would change with the file.
    """
    if types.is_boolean(array.type):
        return np.array(array.fill_null(False).to_numpy(zero_copy_only=False))
    dtype = np.dtype(_dtype_of(array.type))
    if dtype != wanted and array.null_count:
        array = array.fill_null(0)  # the number for a null does not matter
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array), wanted)
    found = np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    return found.copy() if dtype == wanted else widen(found, wanted)


def _check_no_nan(found: Sequence[Any]) -> None:
    try:
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise MediaError("NaN or infinity, which JSON lacks") from error


def _files(array: pa.Array, field: Field) -> list[Any]:
    """Return the files in a column of bytes, or of structs of bytes and path; probe each."""
    paths: list[str | None] = [None] * len(array)
    if types.is_struct(array.type):
        paths = pc.struct_field(array, "path").to_pylist()
        array = pc.struct_field(array, "bytes")
    found: list[Any] = []
    for path, data in zip(paths, array.to_pylist(), strict=True):
        if data is None and path is not None:
            raise MediaError(
                f"expected the bytes of a file, found only its path, {path!r}: save the data set "
                "with its files in it, as save_to_disk of `datasets` does"
            )
        found.append(None if data is None else media_value(field, data))
    return found
