"""Data frames and dicts of arrays as samples: each row is a sample, and each column is a field.

Frames of pandas are read directly, because Arrow would turn their NaN into null. All other frames
are read through Arrow's C stream interface. This module imports neither pandas nor polars.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

import numpy as np

from shardio.conversion.converter import converter_class, missing_package
from shardio.conversion.python_samples import is_pillow_image, to_plain
from shardio.errors import InvalidArgument, SchemaError, ShardioError
from shardio.format.schema import Schema
from shardio.format.types import DTYPES, Array, Bytes, Field, Image, Json, List, Text
from shardio.format.types.array_values import is_of, refuse_masked

_CHUNK_ROWS: Final = 4096  # the number of rows that are copied from a frame at a time
_CHUNK_ROWS_OF_FILES: Final = 64  # the same, if the rows may have pictures or other files


def is_data_frame(src: object) -> bool:
    """Return True for a DataFrame of pandas or polars, or an object that exports Arrow streams."""
    for package in ("pandas", "polars"):
        if is_of(src, package, "DataFrame"):
            return True
        if is_of(src, package, "Series"):
            raise InvalidArgument("found a Series; expected a DataFrame: call .to_frame()")
    if is_of(src, "polars", "LazyFrame"):
        raise InvalidArgument("found a LazyFrame; expected a DataFrame: call .collect()")
    return hasattr(type(src), "__arrow_c_stream__")


class FrameRows:
    """The rows of a data frame, or of a dict of arrays, as dicts.

    `schema` is the schema that can store all rows. `classes` are the class names of the column
    `label`, and `units` maps the names of columns with times to their units.
    """

    def __init__(self, frame: Any) -> None:
        self._columns: Sequence[FrameColumn]
        self._chunk_rows = _CHUNK_ROWS
        if isinstance(frame, Mapping):
            self._n_rows, self._columns = dict_columns(frame)
        elif is_hugging_face_table(frame):
            self._n_rows, self._columns = hugging_face_columns(frame)
            self._chunk_rows = _CHUNK_ROWS_OF_FILES
        elif is_of(frame, "pandas", "DataFrame"):
            self._n_rows, self._columns = len(frame), pandas_columns(frame)
        else:
            self._n_rows, self._columns = arrow_columns(frame)
        self.classes = next((each.classes for each in self._columns if each.name == "label"), ())
        self.units = {each.name: each.unit for each in self._columns if each.unit}
        # In pandas, any hashable object can be the name of a column.
        names: list[Any] = [column.name for column in self._columns]
        for name in names:
            if not isinstance(name, str) or names.count(name) > 1:
                what = "is not unique" if isinstance(name, str) else "is not a string"
                raise InvalidArgument(f"the name of column {name!r} {what}; rename it")
        try:
            self.schema = Schema({column.name: column.field for column in self._columns})
        except ShardioError as error:
            hint = "; rename or drop it" if names else ""
            raise InvalidArgument(
                f"cannot map the columns to field types: {error}{hint}"
            ) from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = [column.name for column in self._columns]
        for start in range(0, self._n_rows, self._chunk_rows):
            stop = min(start + self._chunk_rows, self._n_rows)
            columns = [column.values(start, stop) for column in self._columns]
            for row in zip(*columns, strict=True):
                yield dict(zip(names, row, strict=True))


class FrameColumn(NamedTuple):
    """A column of a data frame. `values(start, stop)` returns its values `[start:stop]`."""

    name: str
    field: Field
    values: Callable[[int, int], Sequence[Any]]
    classes: tuple[str, ...] = ()
    unit: str = ""


def _with_nulls(values: Sequence[Any], nulls: Sequence[bool]) -> list[Any]:
    return [None if null else value for value, null in zip(values, nulls, strict=True)]


def object_column(
    name: str, values: Callable[[int, int], Sequence[Any]], every: Iterable[Any]
) -> FrameColumn:
    """Return a column of Python objects, with a field that can store all of them.

    `values(start, stop)` returns the objects in rows `start` to `stop - 1`; `every` yields the
    objects of all rows.
    """
    known: _InferredType | None = None
    has_nulls = False
    for row, value in enumerate(every):
        if value is None:
            has_nulls = True
            continue
        found = _infer_type(name, row, value)
        merged = found if known is None else _merge_types(known, found)
        if merged is None:
            raise InvalidArgument(
                f"column {name!r}, row {row}: found {_type_name(found)}, "
                f"expected {_type_name(known)} as in earlier rows; convert the "
                "column to one type, for example to text with .astype(str)"
            )
        known = merged
    field = (known.field or Json() if known else Json()).as_optional(has_nulls)

    def stored(start: int, stop: int) -> list[Any]:
        return [
            _convert_value(name, row, field, v) for row, v in enumerate(values(start, stop), start)
        ]

    return FrameColumn(name, field, stored)


def _to_plain_value(name: str, row: int, value: Any, field: Field | None = None) -> Any:
    try:
        return to_plain(value, field)
    except SchemaError as error:
        raise InvalidArgument(f"column {name!r}, row {row}: {error}") from error


class _InferredType(NamedTuple):
    """The type of values of a column; `field` is None if they are all empty lists."""

    field: Field | None
    may_be_json: bool = False
    """True if a Json field can store these values, too."""


def _merge_types(known: _InferredType, found: _InferredType) -> _InferredType | None:
    """Return a type that can store the values of two types; None if there is no such type."""
    if known == found:
        return known
    may_be_json = known.may_be_json and found.may_be_json
    if known.field is None or found.field is None:
        return (known if found.field is None else found) if may_be_json else None
    if known.field.array and found.field.array:
        if (made := _merge_arrays(known.field.array, found.field.array)) is not None:
            return _InferredType(made, may_be_json)
    if known.field.item and found.field.item:
        if (made := _merge_arrays(known.field.item, found.field.item)) is not None:
            return _InferredType(List(made), may_be_json)
    return _JSON if may_be_json else None


def _merge_arrays(known: Array, found: Array) -> Array | None:
    """Return an Array field for the values of both fields, or None if no Array can store them.

    The dimensions in which the fields differ have a variable size in the result.
    """
    if len(known.shape) != len(found.shape):
        return None
    dtype = known.dtype
    if dtype != found.dtype:
        if {dtype, found.dtype} != {"int64", "float64"}:
            return None
        dtype = "float64"
    sizes = zip(known.shape, found.shape, strict=True)
    return Array(dtype, tuple(n if n == m else None for n, m in sizes))


def _type_name(found: _InferredType | None) -> str:
    field = found.field if found else None
    if field is None or field.is_json:
        return "lists or dicts"
    if field.item:
        return f"a list of {_type_name(_InferredType(field.item))}"
    if array := field.array:
        dims = ", ".join("*" if n is None else str(n) for n in array.shape)
        return f"{array.dtype}[{dims}]" if dims else array.dtype
    return type(field).__name__


def _infer_type(name: str, row: int, value: Any) -> _InferredType:
    refuse_masked(f"column {name!r}, row {row}", value)
    if isinstance(value, str | Decimal):
        return _TEXT
    if kind := _number_dtype(value):
        return _NUMBERS[kind]
    if isinstance(value, bytes | bytearray | memoryview):
        return _BYTES
    if isinstance(value, Mapping):
        return _JSON
    if isinstance(value, list | tuple):
        return _infer_list_type(value)
    if is_pillow_image(value):
        return _InferredType(Image())
    made = _to_plain_value(name, row, value)
    if isinstance(made, np.ndarray) and made.dtype.name in DTYPES:
        return _InferredType(Array(made.dtype.name, tuple(n or None for n in made.shape)))
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(made, np.ndarray):
        kind = f"an array of {made.dtype}"
    raise InvalidArgument(
        f"column {name!r}, row {row}: found {kind}; expected text, bytes, numbers, arrays, lists "
        "or dicts; convert the column first, for example times to a Series of datetime64"
    )


def _number_dtype(value: object) -> str:
    """Return the dtype that stores a Python or NumPy number; "" if it is not a number."""
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, int | np.integer):
        return "int64"
    return "float64" if isinstance(value, float | np.floating) else ""


def _infer_list_type(value: Sequence[Any]) -> _InferredType:
    """Return the type of a list or tuple.

    A list of numbers of one dtype needs an Array field. A list of arrays with the same dtype and
    number of dimensions needs a List field, and so does a list of non-empty lists of numbers of one
    dtype. The field of an empty list is not known yet. Every other list needs a Json field.
    """
    if not value:
        return _EMPTY
    kinds = {_number_dtype(each) for each in value}
    if len(kinds) == 1 and (kind := kinds.pop()):
        return _InferredType(Array(kind, (None,)), may_be_json=True)
    if all(isinstance(each, np.ndarray) for each in value):
        arrays = {(each.dtype.name, each.ndim) for each in value}
        dtype, n_dims = arrays.pop()
        if arrays or dtype not in DTYPES:
            return _JSON
        return _InferredType(List(Array(dtype, (None,) * n_dims)))
    if all(isinstance(each, list | tuple) and each for each in value):
        kinds = {_number_dtype(number) for each in value for number in each}
        if len(kinds) == 1 and (kind := kinds.pop()):
            return _InferredType(List(Array(kind, (None,))), may_be_json=True)
    return _JSON


def _convert_value(name: str, row: int, field: Field, value: Any) -> Any:
    if value is None:
        return None
    try:
        if field.item:
            return [_as_array(each, field.item) for each in value]
        if field.array and isinstance(value, int | list | tuple):
            return _as_array(value, field.array)
    except OverflowError as error:
        raise InvalidArgument(
            f"column {name!r}, row {row}: an integer is too large for int64; use floats or strings"
        ) from error
    return str(value) if field.is_utf8 else _to_plain_value(name, row, value, field)


def _as_array(value: Any, field: Array) -> Any:
    """Return an array of numbers; leave it to the writer to convert integers to floats.

    The writer raises an error if a float cannot represent an integer exactly.
    """
    return np.asarray(value, None if field.dtype == "float64" else field.numpy)


_TEXT: Final = _InferredType(Text())
_BYTES: Final = _InferredType(Bytes())
_JSON: Final = _InferredType(Json(), may_be_json=True)
_EMPTY: Final = _InferredType(None, may_be_json=True)
_NUMBERS: Final = {dtype: _InferredType(Array(dtype)) for dtype in ("bool", "int64", "float64")}


def pandas_columns(frame: Any) -> list[FrameColumn]:
    """Return the named levels of a pandas frame's index, followed by the columns of the frame."""
    index = frame.index
    named = [level for level, name in enumerate(index.names) if name is not None]
    found = [
        _pandas_column(index.names[level], index.get_level_values(level).to_series())
        for level in named
    ]
    return found + [
        _pandas_column(name, frame.iloc[:, position]) for position, name in enumerate(frame.columns)
    ]


def _pandas_column(name: str, series: Any) -> FrameColumn:
    dtype = series.dtype
    if hasattr(series, "sparse") and hasattr(dtype, "fill_value"):
        return _pandas_column(name, series.sparse.to_dense())
    if isinstance(dtype, np.dtype) and dtype.kind in "biufc":
        return _pandas_numbers(name, series.to_numpy(), None)
    nulls = series.isna().to_numpy()
    if getattr(dtype, "kind", "O") in "biuf" and hasattr(dtype, "numpy_dtype"):
        zero = dtype.numpy_dtype.type(0)
        return _pandas_numbers(name, series.to_numpy(dtype.numpy_dtype, na_value=zero), nulls)
    # Only columns of timestamps and durations have `asi8`: the values as integers, in the unit of
    # the column. Timestamps are in UTC.
    if hasattr(series.array, "asi8"):
        values = np.asarray(series.array.asi8)
        return _pandas_numbers(name, values, nulls)._replace(unit=_pandas_unit(dtype))
    return _pandas_objects(name, series, nulls)


def _pandas_unit(dtype: Any) -> str:
    """Return the unit of times as Arrow writes it, such as `timestamp[us, tz=UTC]`."""
    if dtype.kind not in "mM":
        return str(dtype)  # such as `period[M]`
    zone = getattr(dtype, "tz", None)
    unit = getattr(dtype, "unit", None) or np.datetime_data(dtype)[0]
    name = "duration" if dtype.kind == "m" else "timestamp"
    return f"{name}[{unit}{f', tz={zone}' if zone else ''}]"


def _pandas_numbers(name: str, values: Any, nulls: Any) -> FrameColumn:
    if values.dtype.name not in DTYPES:
        raise InvalidArgument(_unsupported_dtype(name, values.dtype.name))
    if nulls is None or not nulls.any():
        field = Array(values.dtype.name)
        return FrameColumn(name, field, lambda start, stop: values[start:stop])
    field = Array(values.dtype.name, optional=True)
    return FrameColumn(
        name, field, lambda start, stop: _with_nulls(values[start:stop], nulls[start:stop])
    )


def _unsupported_dtype(name: str, dtype: str) -> str:
    is_time = dtype.startswith(("datetime64", "timedelta64"))
    return (
        f"column {name!r}: unsupported dtype {dtype}; expected one of {', '.join(DTYPES)}, or "
        f"text; {'pass a Series of pandas' if is_time else 'convert the column first'}"
    )


def _pandas_objects(name: str, series: Any, nulls: Any) -> FrameColumn:
    values = series.to_numpy(dtype=object)
    # `to_numpy` converts integer categories to floats if a value is missing. Therefore look the
    # categories up by code here; the code of a missing value is -1.
    if hasattr(series, "cat"):
        classes, codes = series.cat.categories.tolist(), series.cat.codes.to_numpy()
        if name == "label" and classes and all(isinstance(each, str) for each in classes):
            return _pandas_numbers(name, codes.astype(np.int64), nulls)._replace(
                classes=tuple(classes)
            )
        values = np.array([None, *classes, None], object)[1:][codes]
    every = (None if null else value for value, null in zip(values, nulls, strict=True))
    return object_column(
        name, lambda start, stop: _with_nulls(values[start:stop], nulls[start:stop]), every
    )


def arrow_columns(frame: Any) -> tuple[int, list[FrameColumn]]:
    """Return the number of rows and the columns of a frame that is read through Arrow."""
    converter: Any = converter_class("arrow")
    try:
        if not is_of(frame, "polars", "DataFrame"):
            n_rows, columns = converter.frame_columns(frame, "the data frame cannot be read")
            return n_rows, [FrameColumn(*each) for each in columns]
        return len(frame), [column for one in frame for column in _polars_columns(converter, one)]
    except ModuleNotFoundError as error:
        raise missing_package("arrow", error) from error


def _polars_columns(converter: Any, series: Any) -> Iterator[FrameColumn]:
    if str(series.dtype) == "Object":  # polars would export pointers to the objects
        yield object_column(series.name, lambda a, b: series[a:b].to_list(), iter(series))
        return
    refused = f"column {series.name!r}: unsupported type {series.dtype}; cast it to another type"
    yield from (
        FrameColumn(*each) for each in converter.frame_columns(series.to_frame(), refused)[1]
    )


def dict_columns(arrays: Mapping[str, Any]) -> tuple[int, list[FrameColumn]]:
    """Return the number of rows and the columns of a dict of arrays, tensors or lists."""
    if not arrays:
        raise InvalidArgument("found an empty dict; expected an array for each field")
    lengths: dict[str, int] = {}
    for name, values in arrays.items():
        is_rows = hasattr(type(values), "__len__") and hasattr(type(values), "__getitem__")
        is_scalar = isinstance(values, str | bytes | Mapping) or getattr(values, "ndim", 1) == 0
        if is_scalar or not is_rows:
            raise InvalidArgument(
                f"column {name!r}: found {type(values).__name__}; expected an array or list with a "
                "row for each sample; for a single sample, pass a list: [sample]"
            )
        lengths[name] = len(values)
    first = next(iter(lengths))
    for name, n_rows in lengths.items():
        if n_rows != lengths[first]:
            raise InvalidArgument(
                f"{first!r} has {lengths[first]:,} rows, {name!r} has {n_rows:,}; all arrays must "
                "have the same number of rows, one for each sample"
            )
    return lengths[first], [_dict_column(name, values) for name, values in arrays.items()]


def _dict_column(name: str, values: Any) -> FrameColumn:
    refuse_masked(f"column {name!r}", values)
    # NumPy would convert integers with nulls to floats.
    if any(is_of(values, "pandas", kind) for kind in ("Series", "ExtensionArray")):
        return _pandas_column(name, sys.modules["pandas"].Series(values))
    if is_of(values, "polars", "Series"):
        (column,) = arrow_columns(values.alias(name).to_frame())[1]
        return column
    if not hasattr(values, "dtype"):
        values = list(values)
    else:
        is_bfloat16 = str(getattr(values, "dtype", "")).endswith("bfloat16")
        values = _to_plain_value(name, 0, values)
        if values.dtype.kind in "biufcmM":
            dtype = "bfloat16" if is_bfloat16 else values.dtype.name
            if dtype not in DTYPES:
                raise InvalidArgument(_unsupported_dtype(name, dtype))
            field = Array(dtype, tuple(n or None for n in values.shape[1:]))
            return FrameColumn(name, field, lambda start, stop: values[start:stop])
        if values.dtype.names:
            parts = ", ".join(f"{part!r}: x[{part!r}]" for part in values.dtype.names)
            raise InvalidArgument(
                f"column {name!r}: found a structured array; pass each of its fields as an array: "
                f"{{{parts}}}"
            )
        values = values.tolist()
    return object_column(name, lambda start, stop: values[start:stop], values)


def is_hugging_face_table(src: object) -> bool:
    """Return True for a Hugging Face Dataset whose format does not change the rows of its table."""
    if not is_of(src, "datasets", "Dataset"):
        return False
    known: Any = src
    return known.format["type"] in (None, "arrow", "pandas", "polars")


def table_rows_at(dataset: Any, run: int | tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Dataset of Hugging Face at `run`, as `FrameRows` does.

    `run` is an index, or the first and the last index of a range.
    """
    first, last = (run, run) if isinstance(run, int) else run
    yield from FrameRows(dataset.select(range(first, last + 1)))


def hugging_face_splits(src: object) -> dict[str, Any]:
    """Return the splits in a dict of Hugging Face data sets; {} for any other source."""
    if not isinstance(src, Mapping):
        return {}
    kinds = ("Dataset", "IterableDataset")
    is_dict = all(any(is_of(each, "datasets", kind) for kind in kinds) for each in src.values())
    return {str(name): each for name, each in src.items()} if is_dict else {}


def class_names_of(src: object) -> tuple[str, ...]:
    """Return the class names of a data set, for the field `label`; () if there are none.

    Data sets of Hugging Face have them in the feature `label`; those of torchvision, such as
    ImageFolder, in `class_to_idx`, unless a `target_transform` changes the indices.
    """
    features = getattr(src, "features", None)
    label: Any = features.get("label") if isinstance(features, Mapping) else None
    if is_of(label, "datasets", "ClassLabel"):
        return tuple(label.names)
    numbers = getattr(src, "class_to_idx", None)
    if not isinstance(numbers, Mapping) or getattr(src, "target_transform", None) is not None:
        return ()
    is_complete = [*numbers.values()] == [*range(len(numbers))]
    return tuple(numbers) if is_complete and all(isinstance(name, str) for name in numbers) else ()


def hugging_face_columns(dataset: Any) -> tuple[int, list[FrameColumn]]:
    """Return the number of rows and the columns of a Dataset of Hugging Face.

    Pictures, sound and videos are stored as files in their own formats; they are not decoded.
    """
    known = dataset.format
    names = dataset.column_names if known["output_all_columns"] else known["columns"]
    metadata = dataset.features.arrow_schema.metadata
    rows = dataset.with_format("arrow", columns=names)

    def read(name: str, start: int, stop: int) -> Any:
        found = rows.select_columns([name])[start:stop].replace_schema_metadata(metadata)
        # Read the files that are given only by path. `datasets.table` is already imported, because
        # the data set is an object of `datasets`.
        return sys.modules["datasets.table"].embed_table_storage(found)

    converter: Any = converter_class("arrow")
    table = dataset.data.table.select(names).replace_schema_metadata(metadata)
    _, columns = converter.frame_columns(table, "the data set cannot be read", read)
    return len(dataset), [FrameColumn(*each) for each in columns]
