"""Arrays that libraries read by slices, in blocks of rows that end where their chunks do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt

from shardio import MediaError

_BLOCK_BYTES: Final = 4 << 20
_MAX_BLOCK_BYTES: Final = 256 << 20  # of rows that share chunks: beyond, chunks are read again
_MAX_PLAIN_BYTES: Final = 1 << 30
_MAX_RATIO: Final = 1000  # about what deflate can do


@dataclass(frozen=True)
class BlockArray:
    """An array of which `read` gives the rows of a slice, or with `()` all.

    `chunk_rows`: how many rows are read and decoded together.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    read: Callable[[Any], Any]
    row_bytes: int
    chunk_rows: int

    def whole(self) -> npt.NDArray[Any]:
        """Read all of it.

        Raises:
            MediaError: it is damaged.
        """
        found: npt.NDArray[Any] = self.read(())
        return found

    def rows(self) -> Iterator[Any]:
        """Read its rows one by one: decoding a chunk for each row would take chunks many times.

        Raises:
            MediaError: it is damaged.
        """
        n_rows = self.shape[0] or 0
        row_bytes = max(1, self.row_bytes)
        n_block = max(1, _BLOCK_BYTES // row_bytes // self.chunk_rows) * self.chunk_rows
        n_block = max(1, min(n_block, _MAX_BLOCK_BYTES // row_bytes))
        for first in range(0, n_rows, n_block):
            yield from self.read(slice(first, min(first + n_block, n_rows)))


def refuse_bomb(what: str, n_bytes: int, n_stored: int) -> None:
    """Make sure that an array can be meant: one of a few bytes may say that it fills the disk.

    Raises:
        MediaError: it is not.
    """
    if n_bytes > max(_MAX_PLAIN_BYTES, n_stored * _MAX_RATIO):
        raise MediaError(
            f"{what}: says that it has {n_bytes:,} bytes, where {n_stored:,} are stored; expected "
            f"{_MAX_RATIO} times as many at most"
        )
