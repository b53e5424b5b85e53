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
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from shardio._workers.processes.blocks import Bytes
from shardio._workers.processes.serialization import pickle_apart

_HEAD: Final = struct.Struct("<QQ")
_ALIGNMENT: Final = 64


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
    file, apart = io.BytesIO(), list[pickle.PickleBuffer]()
    pickle_apart(value, file, apart, least_bytes=0)
    skeleton, buffers = file.getvalue(), [buffer.raw() for buffer in apart]
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
    write_buffers(buffers, memory, _places(sizes, len(skeleton)))


def write_buffers(buffers: Sequence[memoryview], memory: Bytes, starts: Sequence[int]) -> None:
    """Copy what lies in each buffer to its place in memory; `starts` are those of `place`."""
    for start, buffer in zip(starts, buffers, strict=False):
        if buffer.nbytes:
            memory[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)


def read_value(memory: Bytes) -> Any:
    """The value that was written there; its arrays are views of the memory, which they keep."""
    n_buffers, n_skeleton = _HEAD.unpack_from(memory.data)
    n_head = _HEAD.size + 8 * n_buffers
    sizes = np.frombuffer(memory[_HEAD.size : n_head], "<u8").tolist() if n_buffers else []
    buffers = read_buffers(sizes, memory, _places(sizes, n_skeleton))
    # From our own worker, never from data.
    return pickle.loads(memory[n_head : n_head + n_skeleton].data, buffers=buffers)


def read_buffers(sizes: Sequence[int], memory: Bytes, starts: Sequence[int]) -> list[Bytes]:
    """What lies at each place in memory: views of it."""
    return [memory[start : start + n] for start, n in zip(starts, sizes, strict=False)]


def _places(sizes: Sequence[int], n_skeleton: int) -> list[int]:
    return place(sizes, _HEAD.size + 8 * len(sizes) + n_skeleton)


def place(sizes: Sequence[int], end: int = 0) -> list[int]:
    """Where buffers behind the first `end` bytes begin, and at last where all of it ends."""
    places = []
    for n_bytes in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(start)
        end = start + n_bytes
    return [*places, end]
