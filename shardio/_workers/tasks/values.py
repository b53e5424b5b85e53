"""Python values in blocks and messages: arrays are copied once and read in place.

Pickle's out-of-band buffers follow the rest of the pickle, each aligned to 64 bytes:

    head    number of buffers, bytes of the pickle     two uint64
            bytes of each buffer                       uint64 each
    pickle
    buffers

`ValueBlocks` is the pool of blocks that the values of workers arrive in.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
from collections import deque
from collections.abc import Sequence
from mmap import PAGESIZE
from typing import Any, Final, NamedTuple

import numpy as np

from shardio._base.callers import caller_stacklevel
from shardio._base.classes import Closing
from shardio._workers.processes.blocks import Block, BlockPool, Bytes
from shardio._workers.processes.serialization import pickle_out_of_band

_HEAD: Final = struct.Struct("<QQ")
_ALIGNMENT: Final = 64


class PackedValue(NamedTuple):
    """A value that is ready to be written: its pickle, and the memory of its arrays, in place."""

    skeleton: bytes
    buffers: list[memoryview]
    n_bytes: int
    """The total size in bytes."""


def pack_value(value: Any) -> PackedValue:
    """Pickle a value, all but the memory of its arrays.

    Raises whatever the value's own parts raise when they are pickled.
    """
    file, apart = io.BytesIO(), list[pickle.PickleBuffer]()
    pickle_out_of_band(value, file, apart, least_bytes=0)
    skeleton, buffers = file.getvalue(), [buffer.raw() for buffer in apart]
    ends = _places([buffer.nbytes for buffer in buffers], len(skeleton))
    return PackedValue(skeleton, buffers, ends[-1])


def write_value(packed: PackedValue, memory: Bytes) -> None:
    """Write a packed value to the beginning of memory that has room for it."""
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
    """Return the value written to memory; its arrays are views that keep the memory."""
    n_buffers, n_skeleton = _HEAD.unpack_from(memory.data)
    n_head = _HEAD.size + 8 * n_buffers
    sizes = np.frombuffer(memory[_HEAD.size : n_head], "<u8").tolist() if n_buffers else []
    buffers = read_buffers(sizes, memory, _places(sizes, n_skeleton))
    # From our own worker, never from data.
    return pickle.loads(memory[n_head : n_head + n_skeleton].data, buffers=buffers)


def read_buffers(sizes: Sequence[int], memory: Bytes, starts: Sequence[int]) -> list[Bytes]:
    """Return a view of each buffer in memory."""
    return [memory[start : start + n] for start, n in zip(starts, sizes, strict=False)]


def _places(sizes: Sequence[int], n_skeleton: int) -> list[int]:
    return place(sizes, _HEAD.size + 8 * len(sizes) + n_skeleton)


def place(sizes: Sequence[int], end: int = 0) -> list[int]:
    """Return the start of each buffer after the first `end` bytes, and the end of the last one."""
    places = []
    for n_bytes in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(start)
        end = start + n_bytes
    return [*places, end]


_FIRST_BYTES: Final = 1 << 18
"""Of a block, before it is known how large values are."""
_N_RECENT: Final = 32
"""The number of recent values that predict the size of the next."""


class ValueBlocks(Closing):
    """A pool of blocks that grow with the values; each block is in one known place.

    A block is idle; or under way, from `take` to `give_back` or `hand_over`; or leased by the
    memory that was handed over. It keeps the memory of its largest value while the budget has room
    for that.

    Args:
        n_enough: with more blocks under way, workers have enough whatever is leased; None if their
            number does not tell.
        memory_bytes: the budget of all blocks.
    """

    def __init__(self, n_enough: int | None, memory_bytes: int) -> None:
        self._n_enough, self._budget = n_enough, memory_bytes
        first_bytes = min(_FIRST_BYTES, memory_bytes)
        self._pool = BlockPool(first_bytes, memory_bytes, is_trimmed=True)
        self._n_under_way = 0
        self._is_closed = False
        self._recent: deque[int] = deque([self._pool.block_bytes], _N_RECENT)

    @property
    def n_copies(self) -> int:
        """The number of values that were copied out of their blocks."""
        return self._pool.n_copies

    @property
    def n_leased(self) -> int:
        """The number of blocks that handed-over memory holds."""
        self._pool.take_back_returned(None)
        return len(self._pool) - self._pool.n_idle - self._n_under_way

    @property
    def _most(self) -> int:
        """Return how many blocks may be under way if all are as large as the largest recent."""
        return max(1, self._budget // self._pool.block_bytes)

    def take(self, *, is_needed: bool = False) -> Block | None:
        """Return a block for a value; None if as many are under way as memory allows.

        Also None after `close`: a block created then would leak.

        Args:
            is_needed: create one beyond that limit, because nothing else could finish.

        Raises:
            InsufficientMemory: there is no memory for a single one.
        """
        pool = self._pool
        pool.take_back_returned(None)
        if self._is_closed or (self._n_under_way >= self._most and not is_needed):
            return None
        number = pool.take_idle()
        if number is None:
            number = pool.make()
        if number is None:
            if self._n_under_way and not is_needed:
                return None
            number = pool.make_extra()  # no block is out that could be waited for
        self._n_under_way += 1
        return pool[number]

    def see(self, block: Block, n_bytes: int) -> None:
        """Record that a worker wrote n_bytes to a block and may have grown it."""
        self._pool.note_growth(block.number, n_bytes)
        self._recent.append(n_bytes)
        self._pool.block_bytes = -(-max(self._recent) // PAGESIZE) * PAGESIZE

    def give_back(self, block: Block) -> None:
        """Return a block whose content is not needed."""
        self._pool.give_back(block.number)
        self._n_under_way -= 1

    def hand_over(self, block: Block, n_bytes: int, *, is_spare: bool) -> Bytes:
        """Return the first n_bytes of a block, leased for as long as they are held, or a copy.

        It is copied if workers would have too few blocks left, unless it is known to be spare.

        Raises:
            InsufficientMemory: there is no memory for the copy.
        """
        pool = self._pool
        if self._n_enough is not None and self._n_under_way > min(self._n_enough, self._most):
            is_spare = True
        if is_spare or pool.has_room:
            self._n_under_way -= 1
            pool.trim(block.number, n_bytes)
            return pool.lease(block.number)[:n_bytes]
        memory = pool.copy(block.number, n_bytes)
        self.give_back(block)
        if pool.n_copies == 1:
            warnings.warn(
                f"values are copied: the program holds all {len(pool)} blocks that memory_bytes, "
                "or the limit of open files, allows; release values, or raise that limit",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
        return memory

    def forget(self, worker: int) -> None:
        """Record that a worker has exited: its successor knows no block."""
        for number in range(len(self._pool)):
            self._pool[number].known_to.discard(worker)

    def close(self) -> None:
        """Release all blocks; memory that was handed over stays valid."""
        self._is_closed = True
        self._pool.close()
