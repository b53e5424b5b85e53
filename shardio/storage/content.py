"""The content of a file, mapped (a memoryview) or read by offset (a PreadFile), and its columns.

Slices of either are read-only memoryviews, and both have `nbytes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.errors import (
    ShardChanged,
)
from shardio.storage.file_access import Access, FileState, choose_access
from shardio.storage.mmap import map_with_state
from shardio.storage.pread import PreadFile

Content = memoryview | PreadFile


def take_items(
    content: Content,
    dtype: npt.DTypeLike,
    count: int,
    offset: int,
    numbers: npt.NDArray[np.int64],
    *,
    section: str,
    field: str | None,
) -> npt.NDArray[Any]:
    """Copy items, by number, of an array of `count` items at `offset`.

    Raises:
        ShardChanged: naming section and field: the file, which is not mapped, got shorter.
    """
    if isinstance(content, memoryview):
        return np.frombuffer(content, dtype, count, offset)[numbers]
    size = np.dtype(dtype).itemsize
    out = np.empty((len(numbers), size), np.uint8)
    try:
        content.read_rows(offset, size, numbers, out)
    except ShardChanged as error:
        error.sample = None  # the number of an item, not of a sample
        error.at(section=section, field=field)
        raise
    return out.reshape(-1).view(dtype)


def open_content(path: str, access: Access) -> tuple[Content, FileState]:
    """Open a whole file: mapped or read by offset, as `access` says or the file system suggests.

    Raises:
        InvalidArgument: `access` is not one of ACCESS.
        ShardNotFound, ShardIncomplete, UnsupportedEnvironment, OSError: as `map_with_state`.
    """
    if choose_access(path, access) == "mmap":
        return map_with_state(path)
    file = PreadFile(path)
    return file, file.state


class StoredColumn(NamedTuple):
    """A column of one shard: `n_rows` rows of `shape` and `dtype`, `stride` bytes apart.

    Its methods raise ShardChanged, with name and row, if the file is not mapped and got shorter.
    """

    name: str
    content: Content
    offset: int
    stride: int
    n_rows: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def whole(self) -> npt.NDArray[Any]:
        """Return all rows, read-only: a view of the map, or a copy."""
        if not isinstance(self.content, memoryview):
            return _locked(self.rows(np.arange(self.n_rows)))
        strides = (self.stride, *np.empty(self.shape, self.dtype).strides)
        offset = self.offset if self.n_rows else 0
        return np.ndarray((self.n_rows, *self.shape), self.dtype, self.content, offset, strides)

    def rows(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Copy some rows."""
        if isinstance(self.content, memoryview):
            found: npt.NDArray[Any] = self.whole()[numbers]
            return found
        n_bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        out = np.empty((len(numbers), n_bytes), np.uint8)
        try:
            self.content.read_rows(self.offset, self.stride, numbers, out)
        except ShardChanged as error:
            error.at(field=self.name)
            raise
        return out.reshape(-1).view(self.dtype).reshape(len(numbers), *self.shape)

    def row(self, number: int) -> Any:
        """Return one row, read-only; a NumPy scalar if the shape is ()."""
        if isinstance(self.content, memoryview):
            return self.whole()[number]
        return _locked(self.rows(np.array([number])))[0]


def _locked(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
