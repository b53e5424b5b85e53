"""A shard that stays in its store, and is read by ranges: for a look at it, or single samples.

Its end is read first, in one request, and kept: there lie the header page again, section table and
schema, which is all that opening an ordinary shard needs. The first page is taken to be like the
last: whoever downloads the shard compares them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from shardio.errors import ShardIncomplete
from shardio.format.layout import PAGE
from shardio.storage.file_access import FileState
from shardio.storage.pread import PreadFile
from shardio.storage.remote.object_store import Objects

TAIL_BYTES: Final = 64 << 10
BLOCK_BYTES: Final = 64 << 10
"""What is asked for around a small read; a larger one is asked for as it is."""
_BLOCKS_KEPT: Final = 64


class RangeFile(PreadFile):
    """Reads one object by ranges; keeps its end, and some blocks that were read last.

    Used from several threads at a time.

    Args:
        objects: what the name is of.
        name: of the object.

    Raises:
        ShardNotFound, StoreAccessDenied, StoreUnavailable: as `Objects` says, also from every read.
        ShardChanged: (from every read) another object is in its place.
    """

    def __init__(self, objects: Objects, name: str) -> None:
        self.path = f"{objects.url}/{name}"
        self._objects, self._name = objects, name
        tail = objects.read_tail(name, TAIL_BYTES)
        self.nbytes, self._tag = tail.n_bytes, tail.tag
        if self.nbytes == 0:
            raise ShardIncomplete(f"{self.path}: the object is empty: its writer did not finish")
        self._tail, self._tail_start = tail.data, self.nbytes - len(tail.data)
        self.state = FileState(0, 0, self.nbytes, 0)
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        self._mutex = threading.Lock()

    def __getitem__(self, part: slice) -> memoryview:
        """Read a part of the object."""
        start, stop, _ = part.indices(self.nbytes)
        if stop <= start:
            return memoryview(b"")
        if stop <= PAGE <= len(self._tail):  # the first page: the last one is the same
            return self._tail[len(self._tail) - PAGE :][start:stop]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if first == last:
            return self._block(first)[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]
        if last - first == 1 and stop - start <= BLOCK_BYTES:
            return memoryview(
                bytes(self[start : last * BLOCK_BYTES]) + self[last * BLOCK_BYTES : stop]
            )
        return self._objects.read_range(self._name, start, stop - start, self._tag)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer from `offset` on."""
        view[:] = self[offset : offset + view.nbytes]

    def _read_all(self, views: list[memoryview], n_bytes: int, offset: int) -> None:
        whole = self[offset : offset + n_bytes]
        done = 0
        for view in views:
            view[:] = whole[done : done + view.nbytes]
            done += view.nbytes

    def _block(self, number: int) -> memoryview:
        with self._mutex:
            found = self._blocks.get(number)
            if found is not None:
                self._blocks.move_to_end(number)
                return found
        start = number * BLOCK_BYTES
        n_bytes = min(BLOCK_BYTES, self.nbytes - start)
        found = self._objects.read_range(self._name, start, n_bytes, self._tag)
        with self._mutex:
            self._blocks[number] = found
            while len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return found
