"""Infer schemas from values: results of transforms, and samples written without a schema."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from shardio.errors import SchemaError
from shardio.format.schema import Schema
from shardio.format.types import DTYPES, Array, Bytes, Field, Json, List, Text
from shardio.format.types.array_values import format_dtype, is_bfloat16_bits, is_of

_NUMBERS: Final = np.ndarray | np.generic | bool | int | float
_ARRAYS: Final = (np.ndarray, np.generic)
_CONVERSIONS: Final = (
    (os.PathLike, "str(path)"),
    ((frozenset, range, set), "list(x)"),
)
"""Types that no field holds, and what to return instead."""
_DTYPE_HINTS: Final = {
    **dict.fromkeys("SU", "; return a list of str"),
    **dict.fromkeys("mM", "; return integers, value.astype('int64')"),
}
"""For kinds of dtypes that no field holds, what to return instead."""
_SHAPES_HINT: Final = '; collate="pad", "ragged" or "list" takes arrays of different shapes'
_SIZES_HINT: Final = (
    ". Pictures are stacked if the transform gives them one size, such as "
    "shardio.transforms.Resize((height, width)) or torchvision's v2.Resize((height, width))"
)


def infer_schema(sample: object, source: Schema | None = None) -> Schema:
    """Infer the schema of one sample; raise SchemaError if no field type fits a value.

    Arrays and scalars of NumPy, bool, int (int64) and float (float64) become an Array, str becomes
    Text, bytes becomes Bytes, and a list of arrays becomes a List. A dict, another list, a tuple
    and None become Json.

    `source` is the schema before a transform. A field stays optional, or of varying shape, if it is
    so in `source`; a bfloat16 field stays bfloat16 if its values are uint16, and a Json field stays
    Json if its values are JSON values.
    """
    if not isinstance(sample, Mapping):
        raise SchemaError(
            f"a sample must be a dict of fields, found {type(sample).__name__}; to change a field, "
            'return {**sample, "name": value}; to leave samples out, select them beforehand'
        )
    if not sample:
        raise SchemaError(
            'a sample has no fields: return the fields to keep, as {"label": sample["label"]}'
        )
    known = source if source is not None else {}
    return Schema({name: _infer(name, value, known.get(name)) for name, value in sample.items()})


def _infer(name: str, value: object, source: Field | None) -> Field:
    if source is None or not source.optional:
        return _infer_present(name, value, source)
    return source if value is None else _infer_present(name, value, source).as_optional()


def _infer_present(name: str, value: object, source: Field | None) -> Field:
    plain = value is None or isinstance(value, str | bool | int | float | Mapping | list | tuple)
    if source and source.is_json and plain and not isinstance(value, np.generic):
        return Json()
    if isinstance(value, str):
        return Text()
    if isinstance(value, bytes | bytearray | memoryview):
        return Bytes()
    for kinds, hint in _CONVERSIONS:
        if isinstance(value, kinds):
            kind = type(value).__name__
            raise SchemaError(f"field {name!r}: a {kind} cannot be put into a batch; return {hint}")
    if isinstance(value, list | tuple) and (value or (source and source.item)):
        if all(isinstance(each, np.ndarray | np.generic) for each in value):
            return _infer_list(name, value, source)
    if isinstance(value, Mapping):
        _check_no_arrays(name, value)
    if value is None or isinstance(value, Mapping | list | tuple):
        return Json()
    if isinstance(value, _NUMBERS):
        return _infer_array(name, np.asarray(value), source)
    hint = "NumPy arrays, tensors of torch, numbers, str, bytes, or JSON values"
    if is_of(value, "PIL", "Image"):
        hint = "its pixels, numpy.asarray(image)"
    elif hasattr(type(value), "isoformat"):
        hint = "a text, its .isoformat(), or a number"
    raise SchemaError(
        f"field {name!r}: a {type(value).__module__}.{type(value).__name__} cannot be put into a "
        f"batch; return {hint}"
    )


def _check_no_arrays(name: str, value: Mapping[Any, Any]) -> None:
    """Raise SchemaError for a dict with arrays or tensors, which cannot be JSON."""
    for key, each in value.items():
        if hasattr(each, "dtype") and hasattr(each, "shape") and not isinstance(each, np.generic):
            raise SchemaError(
                f"field {name!r}: a dict is stored as JSON, which has no {type(each).__name__}: "
                f"return its arrays as fields of the sample, {name}.{key!s}; "
                f"batch[{name!r}] is then a dict of them"
            )


def _infer_list(name: str, value: Sequence[Any], source: Field | None) -> List:
    known = source.item if source else None
    if value:
        element = _infer_array(name, np.asarray(value[0]), known)
    else:
        element = known or Array("float64", (None,))
    return List(Array(element.dtype, (None,) * len(element.shape)))


def _infer_array(name: str, value: np.ndarray[Any, Any], source: Field | None) -> Array:
    dtype = "bfloat16" if is_bfloat16_bits(value.dtype) else value.dtype.name
    if dtype not in DTYPES:
        hint = _DTYPE_HINTS.get(value.dtype.kind, "")
        raise SchemaError(
            f"field {name!r}: dtype {value.dtype} is not one of {', '.join(DTYPES)}{hint}"
        )
    shape: tuple[int | None, ...] = tuple(n if n else None for n in value.shape)
    if known := source.array if source else None:
        if dtype == "uint16" and known.dtype == "bfloat16":
            dtype = "bfloat16"
        if known.dtype == dtype and len(known.shape) == value.ndim and not known.is_fixed:
            shape = (None,) * value.ndim
    return Array(dtype, shape)


def _is_dtype(found: np.dtype[Any], field: Array) -> bool:
    """Return True if `field` has the dtype `found`, regardless of the byte order."""
    if is_bfloat16_bits(found):
        return bool(field.dtype == "bfloat16")
    wanted = field.numpy
    return bool(found == wanted or found.name == wanted.name)  # comparing names takes 5 µs


def infer_batch(batch: object, n_rows: int, source: Schema) -> tuple[Schema, frozenset[str]]:
    """Infer the schema of a batch function's result; also return the names of its arrays.

    An array or number is for the whole batch; every dimension of its field is None. Any other
    value must be a list of n_rows values. See `infer_schema` for `source`.
    """
    if not isinstance(batch, Mapping):
        raise SchemaError(f"a batch must be a dict of fields, found {type(batch).__name__}")
    fields, whole = dict[str, Field](), set[str]()
    for name, value in batch.items():
        known = source.get(name)
        if _is_column(value):
            fields[name] = _infer_column(name, value, n_rows, known)
            continue
        if not isinstance(value, _NUMBERS | list | tuple):
            raise SchemaError(
                f"field {name!r}: a {type(value).__name__} cannot be put into a batch; return "
                "NumPy arrays, tensors of torch, numbers, or lists with a value for each sample"
            )
        array = _infer_array(name, np.asarray(value), known)
        fields[name] = Array(array.dtype, (None,) * len(array.shape))
        whole.add(name)
    return Schema(fields), frozenset(whole)


def _is_column(value: object) -> bool:
    """Return True for a list with a value per sample; a list of numbers counts as an array."""
    if not isinstance(value, list | tuple):
        return False
    return not all(isinstance(each, _NUMBERS) and np.ndim(each) == 0 for each in value)


def _infer_column(name: str, values: Any, n_rows: int, known: Field | None) -> Field:
    _check_column(name, values, n_rows)
    first = next((value for value in values if value is not None), None)
    if first is None:
        return known if known is not None and known.optional else Json()
    found = _infer_present(name, first, known)
    if array := found.array:
        found = Array(array.dtype, (None,) * len(array.shape))
    is_sparse = any(value is None for value in values) and not found.is_json
    return found.as_optional(is_sparse or (known is not None and known.optional))


def _check_column(name: str, values: Any, n_rows: int) -> None:
    if not isinstance(values, list | tuple) or len(values) != n_rows:
        n = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
        raise SchemaError(f"field {name!r}: expected a list of {n_rows} values, found {n}")


def check_batch(batch: object, n_rows: int, schema: Schema, whole: Iterable[str]) -> None:
    """Raise SchemaError unless a batch function's result matches that for the first batch."""
    if not isinstance(batch, Mapping):
        raise SchemaError(f"a batch must be a dict of fields, found {type(batch).__name__}")
    if batch.keys() != schema.keys():
        raise SchemaError(f"the first batch had fields {list(schema)}, this has {list(batch)}")
    arrays = set(whole)
    for name, kind in schema.items():
        value, field = batch[name], kind.array
        if name not in arrays or field is None:
            _check_column(name, value, n_rows)
        else:
            accepted = _NUMBERS if _is_column(value) else _NUMBERS | list | tuple
            _check_array(name, value, field, accepted, "the first batch")


def check_sample(sample: object, schema: Schema, first: str = "the first sample") -> None:
    """Raise SchemaError unless a sample matches `schema`.

    Messages use `first` as the name of the sample from which the schema was inferred.
    """
    # Checking for dict first is ten times as fast as checking only for Mapping.
    if not isinstance(sample, dict | Mapping):
        raise SchemaError(f"a sample must be a dict of fields, found {type(sample).__name__}")
    if sample.keys() != schema.keys():
        raise SchemaError(f"{first} had fields {list(schema)}, this has {list(sample)}")
    for name, kind in schema.items():
        field = kind.array
        if field is None or (field.optional and sample[name] is None):
            continue
        item = sample[name]
        if isinstance(item, _ARRAYS) and item.shape == field.shape and _is_dtype(item.dtype, field):
            continue  # a fast path for the common case: the code below takes ten times as long
        hint = _SHAPES_HINT + _SIZES_HINT * (3 in field.shape and len(field.shape) in (3, 4))
        _check_array(name, item, field, _NUMBERS, first, hint)


def _check_array(
    name: str, value: Any, field: Array, accepted: Any, first: str, hint: str = ""
) -> None:
    """Raise SchemaError unless a value is of the `accepted` types, and as `field` describes it.

    Any byte order is accepted, because writing to the block converts it. If only the shape is
    wrong, the message ends with `hint`.
    """
    if isinstance(value, accepted):
        array = np.asarray(value)
        is_same, shape = _is_dtype(array.dtype, field), field.shape
        if is_same and len(array.shape) == len(shape):
            if all(d is None or d == n for d, n in zip(shape, array.shape, strict=True)):
                return
        found = f"{format_dtype(array.dtype)} of shape {array.shape}"
        found += hint if is_same and shape else ""
    else:
        found = f"a {type(value).__name__}"
    raise SchemaError(
        f"field {name!r}: {first} had {field.dtype} of shape {field.shape}, this has {found}"
    )
