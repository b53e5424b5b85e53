"""Python values in blocks and messages; arrays are copied once and read in place.

A value is pickled, and the memory of its arrays (the buffers) follows the pickle. Each buffer
starts at a multiple of 64 bytes:

    head    number of buffers, bytes of the pickle     two uint64
            bytes of each buffer                       uint64 each
    pickle
    buffers

`ValueBlocks` is the main process's pool of the blocks to which workers write values. A worker of a
TaskPool receives a block with each item. A worker that iterates over a dataset by itself requests
a block for its first large sample; from then on, the main process (`BlockLender`) sends the worker
(`LentBlocks`) a few blocks in advance. A block is lent to a worker until its content is handed over
to the loop; it is then leased by the arrays that are views of the content.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from mmap import PAGESIZE
from typing import Any, Final, NamedTuple

from shardio._base.classes import Closing
from shardio._workers.processes.blocks import Block, BlockMap, BlockPool, Bytes
from shardio._workers.processes.limits import require
from shardio._workers.processes.serialization import ValuePickler

_HEAD: Final = struct.Struct("<QQ")
_ALIGNMENT: Final = 64


class PackedValue(NamedTuple):
    """A value that is ready to be written: its pickle, and the memory of its arrays, not copied."""

    head: bytes  # the sizes and the pickle
    buffers: list[memoryview]
    n_bytes: int  # of the head and all buffers, with the gaps between them

    def to_bytes(self) -> bytes | bytearray:
        if not self.buffers:
            return self.head
        memory = bytearray(self.n_bytes)
        write_value(self, memoryview(memory))
        return memory


def pack_value(value: Any, pickler: ValuePickler | None = None) -> PackedValue:
    """Pack a value; raise any exception of the value's own pickling code."""
    skeleton, apart = (pickler or ValuePickler(0)).dumps(value)
    if not apart:
        head = _HEAD.pack(0, len(skeleton)) + skeleton
        # This takes half the time of PackedValue(…).
        return tuple.__new__(PackedValue, (head, [], len(head)))
    buffers = [buffer.raw() for buffer in apart]
    sizes = [buffer.nbytes for buffer in buffers]
    head = struct.pack(f"<{2 + len(sizes)}Q", len(sizes), len(skeleton), *sizes) + skeleton
    *_, n_bytes = _places(sizes, len(head))
    return PackedValue(head, buffers, n_bytes)


def write_value(packed: PackedValue, target: memoryview) -> None:
    """Write a packed value to the start of memory with room for it."""
    head, buffers, _ = packed
    target[: len(head)] = head
    starts = _places([buffer.nbytes for buffer in buffers], len(head))
    for start, buffer in zip(starts, buffers, strict=False):
        target[start : start + buffer.nbytes] = buffer


def write_to_block(packed: PackedValue, block: BlockMap, what: str, hint: str) -> None:
    """Write a value to a block, which may grow; errors contain `what` and `hint`."""
    # Check here although `grow` checks, too: the message of `grow` would name a batch.
    if (n_lacking := packed.n_bytes - block.backed_bytes()) > 0:
        require(n_lacking, what, hint)
    block.grow(packed.n_bytes)
    write_value(packed, block.bytes.data)


def read_value(memory: Bytes | bytes | memoryview) -> Any:
    """Return the value in memory; its arrays are views that keep the memory alive.

    Read-only memory is copied first, because the caller may write to the arrays.
    """
    view = memoryview(memory)  # type: ignore[arg-type]  # an array has memory, too
    n_buffers, n_skeleton = _HEAD.unpack_from(view)
    # Unpickling is safe here and below: a worker wrote the pickle, and it is never stored data.
    if not n_buffers:
        return pickle.loads(view[_HEAD.size :])
    if view.readonly:
        memory = view = memoryview(bytearray(view))
    sizes = struct.unpack_from(f"<{n_buffers}Q", view, _HEAD.size)
    begin = _HEAD.size + 8 * n_buffers
    end = begin + n_skeleton
    places = zip(_places(sizes, end), sizes, strict=False)
    buffers = [memory[place : place + n] for place, n in places]
    return pickle.loads(view[begin:end], buffers=buffers)


def split_values(memory: memoryview) -> Iterator[memoryview]:
    """Yield the memory of each of several values; only the last value may have buffers."""
    start, end = 0, len(memory)
    while start < end:
        n_buffers, n_skeleton = _HEAD.unpack_from(memory, start)
        stop = end if n_buffers else start + _HEAD.size + n_skeleton
        yield memory[start:stop]
        start = stop


def _places(sizes: Sequence[int], end: int) -> list[int]:
    """Return the offset of each buffer after a head of `end` bytes, then the end of the last."""
    places = []
    for n_bytes in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(start)
        end = start + n_bytes
    return [*places, end]


_FIRST_BYTES: Final = 1 << 18  # the size of a block before the size of values is known
_N_RECENT: Final = 32  # the number of recent values from which the size of blocks is predicted


class ValueBlocks(Closing):
    """A pool of blocks that grow with the values; `memory_bytes` is the budget for all blocks.

    A block is idle, in use or leased. It is in use from `take` until `give_back` or `hand_over`,
    and leased while user code refers to content that was handed over. While more than `n_enough`
    blocks are in use, the workers have enough, and `hand_over` leases without copying. If
    `n_enough` is None, there is no such number.
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
        return self._pool.n_copies

    @property
    def n_leased(self) -> int:
        self._pool.take_back_returned(None)
        return len(self._pool) - self._pool.n_idle - self._n_under_way

    @property
    def _max_blocks(self) -> int:
        """The number of blocks that the budget allows if each has the size of a new block."""
        return max(1, self._budget // self._pool.block_bytes)

    def take(self, *, is_needed: bool = False) -> Block | None:
        """Return a block for a value; return None if the pool is closed, or has none to spare.

        With `is_needed`, the budget may be exceeded: otherwise no value could be finished.
        """
        pool = self._pool
        pool.take_back_returned(None)
        if self._is_closed or (self._n_under_way >= self._max_blocks and not is_needed):
            return None
        number = pool.take_idle()
        if number is None:
            number = pool.make()
        if number is None:
            if self._n_under_way and not is_needed:
                return None
            # Ignore the budget: a block is needed, or no block is in use and could come back.
            number = pool.make_extra()
        self._n_under_way += 1
        return pool[number]

    def note_filled(self, block: Block, n_bytes: int) -> None:
        """Record that a worker has written n_bytes to a block, and may have extended its file."""
        self._pool.note_growth(block.number, n_bytes)
        self._recent.append(n_bytes)
        self._pool.block_bytes = -(-max(self._recent) // PAGESIZE) * PAGESIZE

    def give_back(self, block: Block) -> None:
        self._pool.give_back(block.number)
        self._n_under_way -= 1

    def hand_over(self, block: Block, n_bytes: int, *, is_spare: bool) -> Bytes:
        """Return a lease of the first n_bytes of a block, or a copy if the workers need the block.

        Pass `is_spare=True` if they do not need it; the result is then a lease.
        """
        pool = self._pool
        if self._n_enough is not None and self._n_under_way > min(self._n_enough, self._max_blocks):
            is_spare = True
        if is_spare or pool.has_room:
            self._n_under_way -= 1
            pool.trim(block.number, n_bytes)
            return pool.lease(block.number)[:n_bytes]
        memory = pool.copy(block.number, n_bytes)
        self.give_back(block)
        pool.warn_of_copies("values")
        return memory

    def forget(self, worker: int) -> None:
        """Record that a worker has exited: its successor has no descriptors of blocks."""
        for number in range(len(self._pool)):
            self._pool[number].sent_to.discard(worker)

    def close(self) -> None:
        self._is_closed = True
        self._pool.close()


_FEW: Final = 4  # the initial number of blocks per worker: one is filled, others are in flight
_HELD: Final = 2  # any loop holds two samples, the current and the next; these are not copied

SendBlock = Callable[[int, int, Sequence[int]], object]


class BlockLender(Closing):
    """The blocks that the main process has lent to workers, for samples."""

    def __init__(self, n_workers: int, memory_bytes: int) -> None:
        self._blocks = ValueBlocks(None, memory_bytes)
        self._of_worker: list[dict[int, Block]] = [{} for _ in range(n_workers)]
        # {worker: number of blocks to lend}, for workers that have requested a block.
        self._n_each: dict[int, int] = {}
        # The workers that have requested a block since the last long wait of the loop.
        self._were_held_up = set[int]()
        self._are_known = False  # True once the size of samples is known

    def ask(self, worker: int) -> None:
        """Record that a worker has a large sample and no block."""
        self._n_each.setdefault(worker, _FEW)
        self._were_held_up.add(worker)

    def grant_more(self) -> None:
        """Double the number of blocks of workers that have lacked one; call this after a long wait.

        Workers can then work ahead for a dataset that yields many samples at once and then none for
        a while. For other datasets, few blocks are faster, because they stay in the CPU cache.
        """
        for worker in self._were_held_up:
            self._n_each[worker] *= 2
        self._were_held_up.clear()

    def give(self, send: SendBlock) -> None:
        """Send blocks to the workers that have requested one and have too few.

        `send` gets the worker, the block's index, and a list with the block's descriptor, or an
        empty list if the worker already has this descriptor.
        """
        for worker in self._n_each:
            # Give each worker one block even beyond the budget, because the blocks of other workers
            # may stay unused for long.
            if not self._of_worker[worker]:
                self._give(worker, send, is_needed=True)
        for worker, n in self._n_each.items() if self._are_known else ():
            while len(self._of_worker[worker]) < n and self._give(worker, send):
                pass

    def _give(self, worker: int, send: SendBlock, *, is_needed: bool = False) -> bool:
        block = self._blocks.take(is_needed=is_needed)
        if block is None:
            return False
        self._of_worker[worker][block.number] = block
        send(worker, block.number, [] if worker in block.sent_to else [block.fd])
        block.sent_to.add(worker)
        return True

    def hand_over(self, worker: int, number: int, n_bytes: int) -> Bytes:
        """Return a lease of the content of a block, or a copy if the workers need the block."""
        block = self._of_worker[worker].pop(number)
        self._blocks.note_filled(block, n_bytes)
        self._are_known = True
        is_spare = bool(self._of_worker[worker]) or self._blocks.n_leased < _HELD
        return self._blocks.hand_over(block, n_bytes, is_spare=is_spare)

    def stop_lending(self, worker: int) -> None:
        self._n_each.pop(worker, None)
        self._were_held_up.discard(worker)
        for block in self._of_worker[worker].values():
            self._blocks.give_back(block)
        self._of_worker[worker].clear()

    def close(self) -> None:
        self._n_each.clear()
        self._were_held_up.clear()
        self._blocks.close()


class LentBlocks:
    """The blocks that a worker has received, in the worker."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._maps: dict[int, BlockMap] = {}
        self._idle: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._idle)

    def add(self, number: int, fds: Sequence[int]) -> None:
        """Add a block that the main process has sent; the first time, `fds` has its descriptor."""
        if fds:
            self._fds[number] = fds[0]
        self._idle.append(number)

    def fill(self, packed: PackedValue) -> int:
        """Write a value to a block and return the block's index; on an error, keep the block."""
        number = self._idle[-1]
        # Map the block only now, so that an error is reported as the error of this sample.
        if number not in self._maps:
            self._maps[number] = BlockMap(self._fds[number])
        what, hint = "the arrays of a sample", "make the dataset yield smaller samples"
        write_to_block(packed, self._maps[number], what, hint)
        return self._idle.pop()
