"""Blocks of shared memory, the pool that owns them, and leases on blocks.

Workers write batches and other values to blocks. A block is an anonymous memory file, which the
kernel frees even after a crash; the main process creates it and sends workers its descriptor.

While user code refers to the content of a block, the block is *leased*. The lease is an array over
the whole block, created from the memory map. NumPy makes the lease the `base` of all views, even of
views of views, so the lease lives as long as any view. (If the lease were a view of another array,
NumPy would keep only the other array alive.) When the last view is gone, the callback of a weak
reference appends the reference to a deque. The callback does nothing else, because it may run in
any thread at any time; the pool takes the block back later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.callers import warn
from shardio._base.classes import undo_on_error
from shardio._workers.processes.limits import require
from shardio._workers.processes.linux import (
    interrupts_held,
    translate_file_size_errors,
    translate_open_file_errors,
)
from shardio._workers.processes.shared_memory import (
    map_whole,
    reserve_memory_file,
    translate_memory_errors,
)
from shardio.batch.layout import BlockViews
from shardio.errors import InsufficientMemory
from shardio.storage.fs import max_file_bytes

_STAT_BLOCK: Final = 512
"""The unit of `st_blocks` in bytes, regardless of the file system's block size."""
_BYTE: Final = np.dtype(np.uint8)

Bytes = npt.NDArray[np.uint8]


class BlockMap:
    """A memory map of a block's file, renewed when the file has grown; borrows the descriptor.

    Views of an earlier, smaller map stay valid. `max_bytes` is the file's maximum size, or None.
    """

    def __init__(self, fd: int, max_bytes: int | None = None) -> None:
        self._fd, self._max_bytes = fd, max_bytes
        self._map()

    def _map(self) -> None:
        n_bytes = os.fstat(self._fd).st_size
        with translate_memory_errors(n_bytes, "the map of a block"):
            self.map, self.start = map_whole(self._fd, n_bytes, self.backed_bytes())
        self.bytes: Bytes = np.frombuffer(self.map, np.uint8, n_bytes, self.start)
        self.views: BlockViews | None = None

    def backed_bytes(self) -> int:
        """Return the number of bytes that have memory: the file's size, or less after `trim`."""
        status = os.fstat(self._fd)
        return min(status.st_size, status.st_blocks * _STAT_BLOCK)

    def note_growth(self, n_bytes: int | None = None) -> None:
        """Map the file again if it has outgrown the map.

        `n_bytes` is the known size of the file; None reads it with fstat.
        """
        if (os.fstat(self._fd).st_size if n_bytes is None else n_bytes) > len(self.bytes):
            self._map()

    def grow(self, n_bytes: int, preferred: int = 0) -> None:
        """Allocate memory for n_bytes or, as far as the limits allow, for `preferred` bytes."""
        size = self.backed_bytes()
        if n_bytes > size:
            if self._max_bytes is not None:
                if n_bytes > self._max_bytes:
                    raise InsufficientMemory(
                        f"a batch needs a block of {n_bytes} bytes; memory_bytes allows "
                        f"{self._max_bytes}: raise it, or lower batch_size"
                    )
                preferred = min(preferred, self._max_bytes)
            if (limit := max_file_bytes()) is not None:
                preferred = min(preferred, limit)
            page = mmap.PAGESIZE
            wanted = -(-max(n_bytes, preferred) // page) * page
            what = "a batch's values of varying size"
            require(wanted - size, what)
            with (
                translate_file_size_errors(wanted, what),
                translate_memory_errors(wanted - size, what),
            ):
                os.posix_fallocate(self._fd, 0, wanted)
        self.note_growth(n_bytes)


class Block(BlockMap):
    """A block in the main process; owns the descriptor `fd` until the pool closes it."""

    _unpin: Callable[[], None] | None = None

    def __init__(self, number: int, n_bytes: int, max_bytes: int | None = None) -> None:
        self.number = number
        self.fd = reserve_memory_file(n_bytes, "a block")
        with undo_on_error(os.close, self.fd):
            super().__init__(self.fd, max_bytes)
        self.use = 0  # the number of tasks sent for this block, modulo 2**32; results contain it
        self.n_counted = 0  # the part of the pool's `n_bytes` that is due to this block
        self.sent_to: set[int] = set()  # the indices of workers that have the descriptor

    def pin(self, pin: Callable[[Bytes], Callable[[], None]]) -> None:
        """Pin the mapped memory for a device, once for each map of the block.

        `pin` returns a function that unpins the memory. It is called before the block is unmapped:
        when the block is mapped again or closed. The block must not be trimmed meanwhile.
        """
        if self._unpin is None:
            # If Ctrl-C arrived between pinning and the assignment, the memory would stay pinned,
            # and a later map at the same address would be read as this one.
            with interrupts_held():
                self._unpin = pin(self.bytes)

    def unpin(self) -> None:
        """End `pin`. Idempotent."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()

    def _map(self) -> None:
        self.unpin()
        super()._map()

    def trim(self, n_bytes: int) -> None:
        """Free the memory after the first n_bytes; keep the file size. Call `grow` before use."""
        first = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        n_behind = len(self.bytes) - first
        if n_behind > 0:
            with contextlib.suppress(OSError):  # on failure the memory stays as it was
                self.map.madvise(mmap.MADV_REMOVE, self.start + first, n_behind)


class _Lease(weakref.ref[Any]):
    """A weak reference to a lease's array; a `weakref.finalize` would take three times as long."""

    __slots__ = ("memory", "number")

    number: int  # the index of the leased block; for a leased copy, a negative number
    memory: mmap.mmap  # the memory of a leased copy; a lease of a block lacks this attribute


class BlockPool:
    """A pool that creates and owns blocks, whose initial size is `block_bytes`.

    `make` creates blocks only within a total of `budget` bytes; `make_extra` ignores the budget.
    With `is_trimmed`, the memory of a returned block is freed while the pool exceeds its budget;
    call `grow` before you write to such a block again.
    """

    def __init__(self, block_bytes: int, budget: int, *, is_trimmed: bool = False) -> None:
        self.block_bytes = block_bytes
        self._budget, self._is_trimmed = budget, is_trimmed
        self.n_bytes = 0  # the memory of all blocks together
        # A block takes two descriptors in a process: one for the file, one for Python's map. Thus
        # all blocks together take at most a quarter of the limit of open files.
        self._max_blocks = max(2, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._blocks: list[Block] = []
        self._idle: list[int] = []
        self._returned: deque[_Lease] = deque()
        # The callback is a method of the deque. A method of the pool would keep the pool alive as
        # long as there is a lease, and a function in Python could be interrupted by Ctrl-C.
        self._end_lease = self._returned.append
        self.view_cache: dict[tuple[int, int], Any] = {}
        """A cache of arrays or tensors over the blocks, filled by the code that creates them."""
        self._leases: dict[int, _Lease] = {}
        self.n_copies = 0  # the number of calls of `copy`

    def __getitem__(self, number: int) -> Block:
        return self._blocks[number]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def n_idle(self) -> int:
        return len(self._idle)

    def take_idle(self) -> int | None:
        return self._idle.pop() if self._idle else None

    def make(self) -> int | None:
        """Create a block; return its index, or None if memory is short and other blocks exist."""
        try:
            return self.make_extra() if not self._blocks or self._has_budget else None
        except InsufficientMemory:
            if not self._blocks:
                raise
            return None

    def make_extra(self) -> int:
        with interrupts_held(), translate_open_file_errors():
            block = Block(len(self._blocks), self.block_bytes, self._budget)
            self._blocks.append(block)
            self._count(block)
        return block.number

    def note_growth(self, number: int, n_bytes: int) -> None:
        """Record that a worker has written n_bytes to a block, and may have extended its file."""
        block = self._blocks[number]
        block.note_growth(n_bytes)
        if n_bytes > block.n_counted:
            self._count(block)

    def trim(self, number: int, n_bytes: int) -> None:
        """Free the memory after the first n_bytes of a block if the pool exceeds its budget."""
        block = self._blocks[number]
        if self.n_bytes > self._budget and n_bytes + mmap.PAGESIZE <= block.n_counted:
            block.trim(n_bytes)
            self._count(block)

    def _count(self, block: Block) -> None:
        self.n_bytes -= block.n_counted
        block.n_counted = block.backed_bytes()
        self.n_bytes += block.n_counted

    @property
    def has_room(self) -> bool:
        return bool(self._idle) or self._has_budget

    @property
    def _has_budget(self) -> bool:
        # Compare the number of blocks first: with many workers, this comparison usually decides,
        # and the property is read often.
        return (
            len(self._blocks) < self._max_blocks and self.n_bytes + self.block_bytes <= self._budget
        )

    def give_back(self, number: int) -> None:
        """Make a block idle again; if `number` is negative, release a copy instead."""
        if number < 0:
            del self._leases[number]
        else:
            if self._is_trimmed:
                self.trim(number, 0)
            self._idle.append(number)

    def lease(self, number: int) -> Bytes:
        """Return an array over a block; the lease lasts as long as the array or a view of it."""
        block = self._blocks[number]
        leased: Bytes = np.ndarray(block.bytes.shape, _BYTE, block.map, block.start)
        self._leases[number] = lease = _Lease(leased, self._end_lease)
        lease.number = number
        return leased

    def copy(self, number: int, n_bytes: int) -> Bytes:
        """Return a copy of the first n_bytes of a block, leased like a block."""
        require(n_bytes, "copies of batches, because all blocks are held by batches still in use")
        memory = mmap.mmap(-1, n_bytes)
        np.frombuffer(memory, np.uint8)[:] = self._blocks[number].bytes[:n_bytes]
        leased: Bytes = np.ndarray((n_bytes,), np.uint8, memory)
        self.n_copies += 1
        self._leases[-self.n_copies] = lease = _Lease(leased, self._end_lease)
        lease.number, lease.memory = -self.n_copies, memory
        return leased

    def warn_of_copies(self, what: str) -> None:
        """Warn, after the first copy, that `what` are copied."""
        if self.n_copies == 1:
            warn(
                f"{what} are copied: the program holds all {len(self)} blocks that memory_bytes, "
                f"or the limit of open files, allows; release {what}, or raise that limit",
                RuntimeWarning,
            )

    def take_back_returned(self, synchronize: Callable[[], None] | None) -> None:
        """Take back blocks whose leases have ended, after `synchronize` has waited for devices."""
        # Only the pool's owner removes leases, in one thread at a time; any thread may append.
        if n_returned := len(self._returned):
            if synchronize is not None:
                synchronize()
            for _ in range(n_returned):
                self.give_back(self._returned.popleft().number)

    def close(self) -> None:
        """Close all descriptors; the memory of a lease stays valid as long as the lease."""
        for block in self._blocks:
            block.unpin()
            os.close(block.fd)
        self._blocks = []
        self.n_bytes = 0
        self.view_cache.clear()
