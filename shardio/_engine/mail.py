"""Samples as messages of ZeroMQ: what pickle says of one, and the memory of its arrays beside it.

The first frame of a message is

    head    kind, number of the worker, number of the sample    uint32, uint32, uint64
    pickle  of the sample, without the memory of its larger arrays

and each frame behind it is the memory of one array, as the worker has it: nothing copies it but the
kernel, on its way through the socket.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any, Final

import cloudpickle  # type: ignore[import-untyped]  # it has no annotations
import numpy as np

from shardio.errors import EnvironmentUnsuitable

_HEAD: Final = struct.Struct("<IIQ")
_PROTOCOL: Final = 5

LEAST_APART_BYTES: Final = 16 << 10
"""Arrays from so many bytes up travel in frames of their own, which ZeroMQ receives each into
memory of its own. It has a buffer of 8 KiB, of which shorter ones would be pieces, at any place."""

_OVERHEAD_BYTES: Final = 256
"""What a sample is counted for beyond its bytes: a small one is mostly that."""


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1  # the worker is connected
    SAMPLE = 2
    FAILED = 3  # an exception follows, as of `wire.pack_error`, and ended the worker's iteration
    END = 4  # there is no more: the number is that of all samples of this worker


def pack_head(kind: Kind, worker: int, number: int) -> bytes:
    """The beginning of a message."""
    return _HEAD.pack(kind, worker, number)


unpack_head = _HEAD.unpack_from
"""Kind, worker and number of a message, of its first frame."""


def pack_sample(sample: Any, worker: int, number: int) -> list[Any]:
    """The frames of a sample, which has to stay as it is until they are sent.

    Raises whatever the sample's own parts raise when they are pickled.
    """
    head = pack_head(Kind.SAMPLE, worker, number)
    try:
        return _pack(pickle.Pickler, head, sample)
    except Exception:  # noqa: BLE001  # what pickle does not know, cloudpickle may: it has the say
        return _pack(cloudpickle.Pickler, head, sample)


def _pack(kind: Any, head: bytes, sample: Any) -> list[Any]:
    file, apart = io.BytesIO(), list[pickle.PickleBuffer]()
    file.write(head)

    def stays_in(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LEAST_APART_BYTES:
            return True
        apart.append(buffer)
        return False

    pickler = kind(file, _PROTOCOL, buffer_callback=stays_in)
    # Half the time of a method `reducer_override`, which is asked about everything.
    pickler.dispatch_table = {**copyreg.dispatch_table, np.ndarray: _reduce_array}
    pickler.dump(sample)
    return [file.getvalue(), *apart]


def _reduce_array(array: Any) -> Any:
    """What pickle makes of an array, but apart also where it is no one stretch of memory."""
    if not array.flags.forc and not array.dtype.hasobject:
        array = np.ascontiguousarray(array)
    return array.__reduce_ex__(_PROTOCOL)


def unpack_sample(message: Sequence[Any]) -> Any:
    """The sample of a message; its larger arrays are views of the frames' memory, and keep it."""
    # From our own worker, never from data.
    return pickle.loads(rest_of(message), buffers=[frame.buffer for frame in message[1:]])


def rest_of(message: Sequence[Any]) -> memoryview:
    """What follows the head."""
    return memoryview(message[0])[_HEAD.size :]


def counted_bytes(sizes: Iterable[int]) -> int:
    """What a sample counts for in the budget, of the sizes of its frames."""
    return sum(sizes) + _OVERHEAD_BYTES


def zeromq() -> ModuleType:
    """Load pyzmq.

    Raises:
        EnvironmentUnsuitable: it is not installed.
    """
    try:
        import zmq
    except ImportError as error:
        raise EnvironmentUnsuitable(
            f"MultiLoader needs pyzmq ({error}): pip install 'shardio[zmq]'"
        ) from error
    module: ModuleType = zmq
    return module
