"""Any Python value in a block or in a message: arrays are copied there once, and read in place.

What pickle calls out-of-band buffers lie beside the pickled rest, each where 64 bytes begin:

    head    number of buffers, bytes of the pickle     two uint64
            bytes of each buffer                       uint64 each
    pickle
    buffers
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, Final, NamedTuple

import cloudpickle  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import numpy.typing as npt

_HEAD: Final = struct.Struct("<QQ")
_ALIGNMENT: Final = 64
_PROTOCOL: Final = 5

Bytes = npt.NDArray[np.uint8]


class Packed(NamedTuple):
    """A value that is ready to be written: its pickle, and the memory of its arrays, in place."""

    skeleton: bytes
    buffers: list[memoryview]
    n_bytes: int
    """How much all of it takes."""


def pack_value(value: Any) -> Packed:
    """Pickle a value, all but the memory of its arrays.

    Raises whatever the value's own parts raise when they are pickled.
    """
    file, buffers = io.BytesIO(), list[memoryview]()
    pickler = _Pickler(file, _PROTOCOL, lambda buffer: buffers.append(buffer.raw()))
    pickler.dump(value)
    skeleton = file.getvalue()
    ends = _places([buffer.nbytes for buffer in buffers], len(skeleton))
    return Packed(skeleton, buffers, ends[-1])


def write_value(packed: Packed, memory: Bytes) -> None:
    """Write what was packed to the beginning of memory, which has room for it."""
    skeleton, buffers, _ = packed
    sizes = [buffer.nbytes for buffer in buffers]
    head = _HEAD.pack(len(buffers), len(skeleton)) + np.array(sizes, "<u8").tobytes()
    target = memory.data
    target[: len(head)] = head
    target[len(head) : len(head) + len(skeleton)] = skeleton
    for start, buffer in zip(_places(sizes, len(skeleton)), buffers, strict=False):
        if buffer.nbytes:
            memory[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)


def read_value(memory: Bytes) -> Any:
    """The value that was written there; its arrays are views of the memory, which they keep."""
    n_buffers, n_skeleton = _HEAD.unpack_from(memory.data)
    n_head = _HEAD.size + 8 * n_buffers
    sizes = np.frombuffer(memory[_HEAD.size : n_head], "<u8").tolist() if n_buffers else []
    starts = _places(sizes, n_skeleton)
    buffers = [memory[start : start + n] for start, n in zip(starts, sizes, strict=False)]
    # From our own worker, never from data.
    return pickle.loads(memory[n_head : n_head + n_skeleton].data, buffers=buffers)


def _places(sizes: list[int], n_skeleton: int) -> list[int]:
    """Where each buffer begins, and at last where all of it ends."""
    end = _HEAD.size + 8 * len(sizes) + n_skeleton
    places = []
    for n_bytes in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(start)
        end = start + n_bytes
    return [*places, end]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles the memory of every plain array out of band, however the array lies."""

    def reducer_override(self, obj: Any) -> Any:
        """Have arrays that are no one stretch of memory copied into one, instead of pickled."""
        kind = type(obj)
        if (kind is np.ndarray or kind is np.memmap) and not obj.dtype.hasobject:
            # Of a memory-mapped file nothing but its values can travel.
            plain = obj if kind is np.ndarray else obj.view(np.ndarray)
            if not plain.flags.forc:
                plain = np.ascontiguousarray(plain)
            if plain is not obj:
                return plain.__reduce_ex__(_PROTOCOL)
        return super().reducer_override(obj)
