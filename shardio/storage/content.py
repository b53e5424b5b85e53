"""The bytes of a whole file, as readers see them: a map's memoryview, or a `PreadFile`.

Both give slices, as read-only memoryviews, and have `nbytes`.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.errors import (
    ShardChanged,
)
from shardio.storage import mmap
from shardio.storage.content import Content
from shardio.storage.file_access import Access, FileState, choose_access
from shardio.storage.pread import PreadFile

Content = memoryview | PreadFile


def take(
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
        ShardNotFound, ShardIncomplete, UnsupportedEnvironment, OSError: as `mmap.map_known_file`.
    """
    if choose_access(path, access) == "mmap":
        return mmap.map_known_file(path)
    file = PreadFile(path)
    return file, file.state
