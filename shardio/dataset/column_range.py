"""A column of many files in one reserved range of addresses. Used by `rows`."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardio.errors import UnsupportedEnvironment
from shardio.storage.file_access import FileState, open_shard, resized
from shardio.storage.mmap import empty, give_back, map_part, read_scattered, reserve

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Where one shard keeps a column: n_rows rows of the range's stride from `offset` on.

    The file at `path` must still be the one that `file` was.
    """

    path: str
    offset: int
    n_rows: int
    file: FileState | None = None


class ColumnRange:
    """Owns one reserved address range, into whose parts a column of many files is mapped.

    Each part begins a whole number of strides behind the first, so that one stride addresses every
    row of every file and a batch over any number of shards is one gather. What is not mapped, and
    the gaps between parts, must never be read: that kills. `slots[i]` is the range's own number of
    the first row of part i.

    The memory is valid until `close()` (or until the object is collected); no view of it may be
    handed on beyond that.

    Args:
        stride: from one row to the next.
        counts: how many rows each part has room for.

    Raises:
        InsufficientMemory: the addresses of this process do not suffice.
        UnsupportedEnvironment: memory pages are larger than the 4096 bytes that shards are aligned
            to.
    """

    def __init__(self, stride: int, counts: Sequence[int]) -> None:
        if mmap.PAGESIZE > 4096:
            raise UnsupportedEnvironment(
                f"this kernel has memory pages of {mmap.PAGESIZE} bytes; "
                "shardio maps columns on 4096-byte boundaries only"
            )
        step = math.lcm(stride, mmap.PAGESIZE)
        n_steps = [max(1, -(-n * stride // step)) for n in counts]
        self.n_bytes = max(1, sum(n_steps)) * step
        """Of addresses."""
        used = -(-max(counts, default=0) * stride // mmap.PAGESIZE) * mmap.PAGESIZE
        self.maps_of_each = 1 if used == max(n_steps, default=1) * step else 2
        """How many maps a part takes: of a file, and of the gap behind it."""
        self._stride, self._is_scattered = stride, False
        self._address = reserve(self.n_bytes)
        self._close = weakref.finalize(self, give_back, self._address, self.n_bytes)
        self._close.atexit = False  # other threads may still be reading
        ends: _Numbers = np.cumsum(np.array(n_steps, np.int64))
        self.slots: _Numbers = (ends - n_steps) * (step // stride)
        self._mapped: dict[int, int] = {}
        """Bytes of each part that are mapped."""
        raw = (ctypes.c_ubyte * self.n_bytes).from_address(self._address)
        n_slots = self.n_bytes // stride
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(memoryview(raw), np.uint8)[
            : n_slots * stride
        ].reshape(n_slots, stride)

    def map(self, part: int, place: ColumnPlace) -> None:
        """Map what a file has of the column into a part, which has room for it and is not mapped.

        Raises:
            ShardNotFound: the file is missing.
            ShardChanged: it is another one, or has another size.
            UnsupportedEnvironment: the kernel's limit on the number of maps is reached.
        """
        n_bytes = place.n_rows * self._stride
        if not n_bytes:
            return
        address = self._address + int(self.slots[part]) * self._stride
        fd = open_shard(place.path)
        try:
            now = FileState.of(os.fstat(fd))
            if place.file is not None:
                place.file.check(now, place.path)
            if now.n_bytes < place.offset + n_bytes:  # reading it would kill
                raise resized(place.path, place.offset + n_bytes, now.n_bytes)
            map_part(address, n_bytes, fd, place.offset, place.path)
        finally:
            os.close(fd)
        self._mapped[part] = n_bytes
        if self._is_scattered:
            read_scattered(address, n_bytes)

    def unmap(self, part: int) -> None:
        """Have a part hold nothing, if it is mapped."""
        if n_bytes := self._mapped.pop(part, 0):
            empty(self._address + int(self.slots[part]) * self._stride, n_bytes)

    def expect_scattered(self) -> None:
        """Have the kernel read no more than the pages that are touched, also of later maps."""
        self._is_scattered = True
        read_scattered(self._address, self.n_bytes)

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._close()
