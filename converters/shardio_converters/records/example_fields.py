"""Fields of features: found in all records, and filled from those of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from shardio import Array, Bytes, Image, Json, List, MediaError, Schema, Text
from shardio.media import probe
from shardio_converters.field_specs import go_together, spec_of
from shardio_converters.records.examples import Values

STRINGS: Final = "list[uint8[*]]"
"""What a feature of several strings of bytes is, unless a schema says it."""

Maker = Callable[[Values], Any]


@dataclass
class _Seen:
    """What is known of a feature: its dtype, how many values it has, in how many records it is."""

    dtype: str
    n_values: int | None
    n_records: int = 1


class FoundFeatures:
    """The features of many records; the first one that has a feature says what it is."""

    def __init__(self) -> None:
        self._seen: dict[bytes, _Seen] = {}
        self.n_records = 0

    def add(self, features: Mapping[bytes, Values]) -> None:
        """Take those of a record in.

        Raises:
            MediaError: one is of another kind than before.
        """
        self.n_records += 1
        for name, values in features.items():
            dtype, n_values = dtype_of(values), len(values)
            seen = self._seen.get(name)
            if seen is None:
                self._seen[name] = _Seen(dtype, n_values)
                continue
            _compare(name, seen.dtype, dtype)
            seen.n_records += 1
            if n_values != seen.n_values:
                seen.n_values = None

    def merge(self, others: FoundFeatures) -> None:
        """Take in those of a file, all or none.

        Raises:
            MediaError: as of `add`.
        """
        for name in others._seen.keys() & self._seen.keys():
            _compare(name, self._seen[name].dtype, others._seen[name].dtype)
        if self._seen and go_together(map(text_of, self._seen)):
            names = sorted(map(text_of, {*self._seen, *others._seen}))
            if not go_together(names):
                raise MediaError(f"features {', '.join(names)}: no sample can have them all")
        self.n_records += others.n_records
        for name, other in others._seen.items():
            seen = self._seen.setdefault(name, _Seen(other.dtype, other.n_values, 0))
            seen.n_records += other.n_records
            if seen.n_values != other.n_values:
                seen.n_values = None

    def as_specs(self) -> dict[str, str]:
        """The fields in a word each, in the order of their names.

        One value in every record is a scalar, as many in all of them an array of this size; what
        some records lack is optional.

        Raises:
            MediaError: a name is not text.
        """
        found = {}
        for name, seen in self._seen.items():
            optional = seen.n_records < self.n_records
            # A dimension of 0 is none that a field can have.
            shape = () if seen.n_values == 1 else (seen.n_values or None,)
            if seen.dtype == "bytes" and shape:
                spec = STRINGS + "?" * optional
            else:
                spec = spec_of(seen.dtype, shape, optional=optional)
            found[text_of(name)] = spec
        return dict(sorted(found.items()))


def dtype_of(values: Values) -> str:
    """Give bytes, float32 or int64."""
    return "bytes" if isinstance(values, list) else values.dtype.name


def text_of(name: bytes) -> str:
    """A name as text.

    Raises:
        MediaError: it is none.
    """
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise MediaError(f"feature {name!r}: a name must be text in UTF-8") from error


def makers(schema: Schema) -> dict[bytes, Maker]:
    """What makes the value of each field from the values of the feature of its name.

    All raise MediaError where the values are not those of the field.
    """
    return {name.encode(): partial(_MAKERS[type(field)], field) for name, field in schema.items()}


def fits(field: Any) -> bool:
    """Whether features can fill a field: arrays with one dimension that varies, at most."""
    if isinstance(field, List):
        return field.element == Array("uint8", (None,))
    return type(field) in _MAKERS and getattr(field, "shape", ()).count(None) <= 1


def _compare(name: bytes, expected: str, found: str) -> None:
    if expected != found:
        raise MediaError(f"feature {text_of(name)!r}: expected {expected}, found {found}")


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
        raise MediaError(f"expected {spec_of(field.dtype, shape)}, found {len(numbers):,} values")
    return numbers.reshape([-1 if n is None else n for n in shape])


def _raw(field: Array, data: bytes) -> Any:
    """The numbers that lie in a string of bytes, in little-endian."""
    if len(data) % field.numpy.itemsize:
        raise MediaError(f"{len(data):,} bytes are no whole number of {field.dtype}")
    numbers = np.frombuffer(data, field.numpy.newbyteorder("<"))
    if field.dtype == "bool" and (np.frombuffer(data, np.uint8) > 1).any():
        raise MediaError("expected bytes that are 0 or 1, for bool")
    return numbers


def _one(values: Values) -> bytes:
    if not isinstance(values, list) or len(values) != 1:
        raise MediaError(f"expected one string of bytes, found {len(values)} of {dtype_of(values)}")
    return values[0]


def _all(values: Values) -> list[bytes]:
    if not isinstance(values, list):
        raise MediaError(f"expected bytes, found {values.dtype}")
    return values


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise MediaError(f"not text in UTF-8: {error.reason} at byte {error.start}") from error


def _image(_: Image, values: Values) -> bytes:
    data = _one(values)
    probe(data)
    return data


_MAKERS: Final[dict[type, Callable[[Any, Values], Any]]] = {
    Array: _array,
    Bytes: lambda _, values: _one(values),
    Image: _image,
    Json: lambda _, values: [_decoded(each) for each in _all(values)],
    List: lambda _, values: [np.frombuffer(each, np.uint8) for each in _all(values)],
    Text: lambda _, values: _decoded(_one(values)),
}
