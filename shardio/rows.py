"""Rows of one column of many shards, copied to where they are wanted: from maps, or by reads.

Used by `gather`, for columns and for the hashes of their rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.access.pread import PreadFile
from shardio.storage import ColumnPlace, ColumnRange
from shardio.units import Rows

Lines = npt.NDArray[np.uint8]

_SCRATCH_BYTES: Final = 1 << 20
"""Rows that are padded on disk pass through this much memory, small enough to stay in cache."""

_TOUCHED: Final = range(512, (16 << 10) + 1)
"""Sizes of rows that are touched before they are copied: 0.6 of the time at 2 KiB, 0.93 at 16 KiB;
rows that are smaller or larger gain nothing by it."""
_ROWS_AT_ONCE: Final = 512
"""Rows that are touched and then copied: a third of the pages that processors keep track of."""


class MappedRows:
    """A column of many files in one range of addresses, which it owns until `close`.

    Args:
        stride, row_bytes: from one row to the next, and without padding.
        places: where each file keeps its part.
        starts: the dataset's row number of each part's first row.
    """

    def __init__(
        self, stride: int, row_bytes: int, places: Sequence[ColumnPlace], starts: Rows
    ) -> None:
        self._range = ColumnRange(stride, places)
        self._shift = self._range.slots - starts
        self._row_bytes = row_bytes
        self._touched, self._n_at_once = None, sys.maxsize
        if row_bytes in _TOUCHED:
            middle = row_bytes // 2
            self._touched, self._n_at_once = self._range.rows[:, middle], _ROWS_AT_ONCE
        self._scratch: Lines | None = None
        if stride != row_bytes:
            self._n_at_once = min(self._n_at_once, max(1, _SCRATCH_BYTES // stride))
            self._scratch = np.empty((self._n_at_once, stride), np.uint8)

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Where in the address range `rows` of the dataset, which lie in `shards`, are."""
        slots: Rows = rows + self._shift.take(shards)
        return slots

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: Lines) -> None:
        """Copy rows into the lines of out, one after the other; `slots` is what `place` gave."""
        step = self._n_at_once
        if len(slots) <= step:
            self._copy_some(slots, out)
            return
        for i in range(0, len(slots), step):
            self._copy_some(slots[i : i + step], out[i : i + step])

    def _copy_some(self, slots: Rows, out: Lines) -> None:
        """Copy at most `_n_at_once` rows."""
        if self._touched is not None:
            # One byte of each row: the processor waits for many pages at once, where a copy waits
            # at the start of every row for its page. One in the middle, as the start comes at once.
            self._touched[slots]
        if self._scratch is None:
            self._range.rows.take(slots, axis=0, out=out, mode="clip")
            return
        # np.take copies all of an array whose rows are not dense; so take padding along first.
        scratch = self._scratch[: len(slots)]
        self._range.rows.take(slots, axis=0, out=scratch, mode="clip")
        out[:] = scratch[:, : self._row_bytes]

    def expect_scattered(self) -> None:
        """Have the kernel read no more than the pages that are touched."""
        self._range.expect_scattered()

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._range.close()


class FileRows:
    """A column of many files that are not mapped; borrows them.

    Args:
        stride: from one row to the next.
        places: each file, and where in it the column begins.
        starts: the dataset's row number of each part's first row.
    """

    def __init__(self, stride: int, places: Sequence[tuple[PreadFile, int]], starts: Rows) -> None:
        self._stride, self._places, self._starts = stride, places, starts

    def place(self, rows: Rows, shards: Rows) -> Rows:
        """Give `rows` as they are: `copy` finds their places itself."""
        return rows

    def copy(self, slots: Rows, rows: Rows, shards: Rows, out: Lines) -> None:
        """Copy rows into the lines of out, one after the other.

        Raises:
            ShardChanged: naming file, row in it, and offset.
        """
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        ends = np.flatnonzero(np.diff(shards[order])) + 1
        start = 0
        for end in (*ends.tolist(), len(rows)):
            if start == end:
                return
            shard, part = int(shards[order[start]]), slice(start, end)
            local = ascending[part] - self._starts[shard]
            file, offset = self._places[shard]
            file.read_ascending(offset, self._stride, local, out, order[part])
            start = end

    def expect_scattered(self) -> None:
        """Do nothing: nothing is read beyond what is asked for."""

    def close(self) -> None:
        """Do nothing: nothing is its own."""


def read_hashes(hashes: MappedRows | FileRows, rows: Rows, shards: Rows) -> npt.NDArray[np.uint64]:
    """The stored hashes of rows of the dataset."""
    out = np.empty((len(rows), 8), np.uint8)
    hashes.copy(hashes.place(rows, shards), rows, shards, out)
    return out.reshape(-1).view("<u8")
