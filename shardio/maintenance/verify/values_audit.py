"""Check that a record whose hash is right is a value of its field, in the form that is allowed."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.fields import Array, Bytes, Field, Image, Json, List
from shardio.format.index import are_pictures, full_shape, picture_shape
from shardio.format.lists import items_of, unpack_list
from shardio.format.schema import canonical_json
from shardio.format.values import check_json, decode_record


def are_texts(parts: Iterable[Any]) -> bool:
    """Whether all of these buffers are UTF-8.

    Without a bytecode for each: of the first that is not, the caller finds the place.
    """
    try:
        deque(map(str, parts, repeat("utf-8")), maxlen=0)
    except UnicodeDecodeError:
        return False
    return True


def are_sound_pictures(
    fields: Sequence[tuple[str, Field]],
    lacking: Container[str],
    shapes: Mapping[str, npt.NDArray[np.uint64]],
    first_row: int,
    numbers: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Which records are pictures of possible dimensions, of a field that no sample lacks.

    Args:
        fields: those stored record by record.
        lacking: the fields that a sample may lack.
        shapes: the stored dimensions of all samples.
        first_row: of the records.
        numbers: of the records, counted from the first of that row.
    """
    found = np.zeros(len(numbers), np.bool_)
    for k, (name, field) in enumerate(fields):
        if isinstance(field, Image) and name not in lacking:
            here = np.flatnonzero(numbers % len(fields) == k)
            rows = first_row + numbers[here] // len(fields)
            found[here] = are_pictures(shapes[name][rows])
    return found


def check_absent(dims: npt.NDArray[np.uint64] | None, n_bytes: int) -> None:
    """Check that a sample which lacks a field has nothing of it.

    Raises:
        ShardCorrupt: it has. The place is the caller's to add.
    """
    if n_bytes or (dims is not None and dims.any()):
        what = "a sample lacks the field, and has a record or a shape of it"
        raise ShardCorrupt(what, code="validity", expected=0, found=n_bytes)


def check_value(
    field: Field, record: bytes | memoryview, dims: npt.NDArray[np.uint64] | None, n_bytes: int
) -> None:
    """Check that a decoded record is a value of its field, in the only form that is allowed.

    Args:
        field: its field.
        record: the decoded bytes.
        dims: the varying dimensions of an array's sample, if any vary; those of a picture.
        n_bytes: the record's size as the index has it.

    Raises:
        ShardCorrupt: it is not. The place is the caller's to add.
    """
    if isinstance(field, Array):
        shape = full_shape(field, np.empty(0, np.uint64) if dims is None else dims, n_bytes)
        if field.dtype == "bool" and (np.frombuffer(record, np.uint8) > 1).any():
            raise ShardCorrupt(f"a bool of {shape} is neither 0 nor 1", code="value")
        return
    if isinstance(field, Bytes):
        return
    if isinstance(field, Image):
        if not n_bytes:
            raise ShardCorrupt("a picture that is there has no bytes", code="validity")
        picture_shape(np.zeros(3, np.uint64) if dims is None else dims)
        return
    if isinstance(field, List):
        unpack_list(field.element, record)
        # The bytes themselves: of a bool of 2 that is no array, NumPy makes 1.
        items = np.frombuffer(items_of(field.element, record), np.uint8)
        if field.element.dtype == "bool" and (items > 1).any():
            raise ShardCorrupt("a bool in a list is neither 0 nor 1", code="value")
        return
    try:
        value = decode_record(field, record, ())
        is_canonical = not isinstance(field, Json) or canonical_json(value) == record
        if isinstance(field, Json):
            check_json(value)
    except (ValueError, RecursionError, SchemaError) as error:
        raise ShardCorrupt(f"a record cannot be decoded: {error}", code="value") from error
    if not is_canonical:
        raise ShardCorrupt("JSON is not in canonical form", code="value")
