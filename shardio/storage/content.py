"""The bytes of a whole file, as readers see them: a map's memoryview, or a `PreadFile`.

Both give slices, as read-only memoryviews, and have `nbytes`.

One column of one shard as arrays: views of its map, or copies of what is read.
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
    """Copy items, by number, of the array of `count` items of dtype that lies at `offset`.

    Raises:
        ShardChanged: naming section and field: the file has become shorter, and is not mapped.
    """
    if isinstance(content, memoryview):
        return np.frombuffer(content, dtype, count, offset)[numbers]
    size = np.dtype(dtype).itemsize
    out = np.empty((len(numbers), size), np.uint8)
    try:
        content.read_rows(offset, size, numbers, out)
    except ShardChanged as error:
        error.sample = None  # the number of an item, which need not be one of a sample
        error.at(section=section, field=field)
        raise
    return out.reshape(-1).view(dtype)


def open_content(path: str, access: Access) -> tuple[Content, FileState]:
    """A whole file for reading: mapped, or read by offset where `access` says or chooses so.

    Raises:
        InvalidArgument: `access` is not one of ACCESS.
        ShardNotFound, ShardIncomplete, UnsupportedEnvironment, OSError: as `map_known_file`.
    """
    if choose_access(path, access) == "mmap":
        return map_with_state(path)
    file = PreadFile(path)
    return file, file.state


class StoredColumn(NamedTuple):
    """`n_rows` rows of `shape` and dtype that lie `stride` bytes apart from `offset` on.

    Its methods raise ShardChanged, with the name and the row, where what is not mapped is gone.
    """

    name: str
    content: Content
    offset: int
    stride: int
    n_rows: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def whole(self) -> npt.NDArray[Any]:
        """All rows, read-only: a view of the map, or read into memory."""
        if not isinstance(self.content, memoryview):
            return _locked(self.rows(np.arange(self.n_rows)))
        strides = (self.stride, *np.empty(self.shape, self.dtype).strides)
        offset = self.offset if self.n_rows else 0
        return np.ndarray((self.n_rows, *self.shape), self.dtype, self.content, offset, strides)

    def rows(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Some rows, copied."""
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
        """One row, read-only; a NumPy scalar where the shape is ()."""
        if isinstance(self.content, memoryview):
            return self.whole()[number]
        return _locked(self.rows(np.array([number])))[0]


def _locked(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
