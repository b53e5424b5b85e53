"""Any Python value in a block or in a message: arrays are copied there once, and read in place.

What pickle calls out-of-band buffers lie beside the pickled rest, each where 64 bytes begin:

    head    number of buffers, bytes of the pickle     two uint64
            bytes of each buffer                       uint64 each
    pickle
    buffers

The blocks that values of workers arrive in: how many there are, how large, and who has them.
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
from shardio._workers.processes.serialization import pickle_apart

_HEAD: Final = struct.Struct("<QQ")
_ALIGNMENT: Final = 64


class PackedValue(NamedTuple):
    """A value that is ready to be written: its pickle, and the memory of its arrays, in place."""

    skeleton: bytes
    buffers: list[memoryview]
    n_bytes: int
    """How much all of it takes."""


def pack_value(value: Any) -> PackedValue:
    """Pickle a value, all but the memory of its arrays.

    Raises whatever the value's own parts raise when they are pickled.
    """
    file, apart = io.BytesIO(), list[pickle.PickleBuffer]()
    pickle_apart(value, file, apart, least_bytes=0)
    skeleton, buffers = file.getvalue(), [buffer.raw() for buffer in apart]
    ends = _places([buffer.nbytes for buffer in buffers], len(skeleton))
    return PackedValue(skeleton, buffers, ends[-1])


def write_value(packed: PackedValue, memory: Bytes) -> None:
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


_FIRST_BYTES: Final = 1 << 18
"""Of a block, before it is known how large values are."""
_N_RECENT: Final = 32
"""So many values say how large the next may be."""


class ValueBlocks(Closing):
    """Owns a pool of blocks that grow with the values; of each one place is known.

    A block is idle; or under way, from `take` to `give_back` or `hand_over`; or leased by what was
    handed over. It keeps the memory of its largest value while the budget has room for that.

    Args:
        n_enough: if more are under way, workers have enough whatever is leased; None where that is
            not to be told from their number.
        memory_bytes: budget of all blocks.
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
        """How many values have been copied out of their blocks."""
        return self._pool.n_copies

    @property
    def n_leased(self) -> int:
        """How many are held by what was handed over."""
        self._pool.take_back_returned(None)
        return len(self._pool) - self._pool.n_idle - self._n_under_way

    @property
    def _most(self) -> int:
        """How many may be under way, if all values are as large as the largest of late."""
        return max(1, self._budget // self._pool.block_bytes)

    def take(self, *, is_needed: bool = False) -> Block | None:
        """A block for a value, or None while those under way are as many as memory allows.

        None once closed, too: a block that were made then would never be let go of.

        Args:
            is_needed: make one beyond that rather than none: nothing else would come to an end.

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
            number = pool.make_extra()  # nothing would come back that could be waited for
        self._n_under_way += 1
        return pool[number]

    def see(self, block: Block, n_bytes: int) -> None:
        """A worker has written so much to a block, and perhaps made it grow."""
        self._pool.see_growth(block.number, n_bytes)
        self._recent.append(n_bytes)
        self._pool.block_bytes = -(-max(self._recent) // PAGESIZE) * PAGESIZE

    def give_back(self, block: Block) -> None:
        """What is in a block is not needed."""
        self._pool.give_back(block.number)
        self._n_under_way -= 1

    def hand_over(self, block: Block, n_bytes: int, *, is_spare: bool) -> Bytes:
        """The first bytes of a block for as long as they are held, or of a copy.

        It is copied where workers would have too few blocks left, unless it is known to be spare.

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
                "or the limit of open files, allows; let go of values, or raise that limit",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
        return memory

    def forget(self, worker: int) -> None:
        """A worker has died: another in its place knows no block."""
        for number in range(len(self._pool)):
            self._pool[number].known_to.discard(worker)

    def close(self) -> None:
        """Let go of all blocks; what was handed over stays valid."""
        self._is_closed = True
        self._pool.close()
