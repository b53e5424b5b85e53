"""Records of lists: how many arrays, their dimensions as far as they vary, then all their bytes.

    | count: u64 | count x varying dimensions: u64 | zeros up to a multiple of 64 | the arrays |

The arrays lie back to back in C order. A record tells its own shapes, so that it can be copied and
decoded without any other section.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import ShardCorrupt
from shardio.format.fields import Array
from shardio.format.index import RECORD_ALIGNMENT, full_shape

_NUMBER: Final = struct.Struct("<Q")


def pack_list(element: Array, arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    """The record of arrays that fit `element`."""
    varying = [d for d, n in enumerate(element.shape) if n is None]
    numbers = [len(arrays), *(array.shape[d] for array in arrays for d in varying)]
    head = struct.pack(f"<{len(numbers)}Q", *numbers)
    gap = -len(head) % RECORD_ALIGNMENT
    return b"".join([head, bytes(gap), *(array.tobytes() for array in arrays)])


def unpack_list(element: Array, record: bytes | memoryview) -> list[npt.NDArray[Any]]:
    """The arrays of a record, as views of it.

    Raises:
        ShardCorrupt: the numbers do not account for the record's bytes. It names no place.
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
    """The bytes of all arrays of a record, back to back, as a view of it.

    Raises:
        ShardCorrupt: as `unpack_list`, of the numbers before them.
    """
    return record[_head(element, record)[0] :]


def _head(element: Array, record: bytes | memoryview) -> tuple[int, npt.NDArray[np.uint64]]:
    """Where the arrays begin, and the varying dimensions of each, (count, varying)."""
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
    """The shape of the next array, and its bytes, of which n_left are there."""
    rest = iter(varying.tolist())
    shape = tuple(next(rest) if d is None else d for d in element.shape)
    n_bytes = 0 if 0 in shape else element.numpy.itemsize * int(np.prod(shape, dtype=object))
    if n_bytes > n_left:
        raise _refuse(f"an array of shape {shape} in a list is cut off", n_bytes, n_left)
    return full_shape(element, varying, n_bytes), n_bytes


def _refuse(what: str, expected: object, found: object) -> ShardCorrupt:
    return ShardCorrupt(what, code="list", expected=expected, found=found)
