"""The content of a file, mapped (a memoryview) or read by offset (a PreadFile), and its columns.

Slices of both are read-only memoryviews, and both have `nbytes`.

A PreadFile is read into buffers and never mapped. Reading a truncated file then raises an
exception; reading a truncated map would kill the process. Datasets may have more shards than a
process may have open files, so only a quarter of that limit is used for open descriptors. A file
that is reopened must still be the same shard.
"""

from __future__ import annotations

import errno
import os
import resource
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.errors import ShardChanged, ShardIncomplete
from shardio.storage.file_access import (
    Access,
    FileState,
    choose_access,
    map_file,
    open_shard,
    resized_error,
)

Rows = npt.NDArray[np.int64]

_HEAD_BYTES: Final = 128
"""The size of a shard's header fields, which include the file size, the hash of the section table
and the content id."""

_GAP_BYTES: Final = 8 << 10
"""Rows separated by gaps of fewer bytes are read by one call, because copying this many bytes takes
about as long as a system call."""
_SPAN_BYTES: Final = 256 << 10
"""The maximum size of one read of several rows, so that its buffer stays in the CPU cache."""
_SMALL_ROW_BYTES: Final = 2 << 10
_MIN_ROWS_IN_SPAN: Final = 4
"""The minimum number of rows for a joint read. With fewer rows, each is read by its own call,
because picking rows from a buffer takes as long as a few calls."""
_MAX_BUFFERS: Final = os.sysconf("SC_IOV_MAX")

_MAX_OPEN: Final = 4096
_MIN_OPEN: Final = 4


class _Descriptor:
    """An open file, closed with its last reference: a running read may outlast its eviction."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False


class PreadFile:
    """A file that is read by offset. It owns its descriptor, which may be evicted and reopened.

    Thread-safe.

    Raises:
        ShardNotFound: there is no such file.
        ShardIncomplete: the file is empty.
        OSError: (also from every read) the file cannot be opened or read.
        ShardChanged: (from every read) the file was truncated or replaced by another shard.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._absolute = os.path.abspath(path)  # to be reopened after a chdir
        self._descriptor: _Descriptor | None = None
        descriptor = _Descriptor(_open(self._absolute, path))
        self.state = FileState.of(os.fstat(descriptor.fd))
        self.nbytes = self.state.n_bytes
        if self.nbytes == 0:
            raise ShardIncomplete(f"{path}: the file is empty: its writer did not finish")
        self._head = os.pread(descriptor.fd, _HEAD_BYTES, 0)
        self._keep(descriptor)

    def __getitem__(self, part: slice) -> memoryview:
        """Read a part of the file into memory that the caller owns."""
        start, stop, _ = part.indices(self.nbytes)
        n_bytes = max(0, stop - start)
        descriptor = self._descriptor or self._open_again()
        try:
            found = os.pread(descriptor.fd, n_bytes, start)
        except OSError as error:
            self._allow_reopen(error)
            found = b""
        if len(found) == n_bytes:
            return memoryview(found)
        # After a short read or a lost connection, read everything again.
        buffer = bytearray(n_bytes)
        self.read_into(memoryview(buffer), start)
        return memoryview(buffer).toreadonly()

    def read_rows(self, offset: int, stride: int, rows: Rows, out: npt.NDArray[np.uint8]) -> None:
        """Read rows of a table in the file, in any order, into the rows of `out`.

        `offset` is the file offset of row 0, and `stride` the distance between rows, in bytes.
        `out` is a C-contiguous 2-D array; its width is the number of bytes to read per row.
        """
        if len(rows):
            lines = np.argsort(rows, kind="stable")
            self.read_ascending(offset, stride, rows[lines], out, lines)

    def read_ascending(
        self, offset: int, stride: int, rows: Rows, out: npt.NDArray[np.uint8], lines: Rows
    ) -> None:
        """Read one or more ascending `rows` as `read_rows` does; `rows[i]` goes to `out[lines[i]]`.

        Large rows are read directly into `out`, consecutive rows by one call. Small rows that are
        close together are read into a buffer by one call, and copied.
        """
        n_bytes = out.shape[1]
        try:
            if n_bytes < _SMALL_ROW_BYTES:
                self._read_small(offset, stride, rows, out, lines)
            elif stride == n_bytes and len(rows) > 1 and (rows[1:] - rows[:-1] == 1).any():
                self._read_sequences(offset, rows, out, lines)
            else:
                self._read_each(offset + rows * stride, out, lines)
        except ShardChanged as error:
            if error.offset is None:
                raise
            is_lost = offset + rows * stride + n_bytes > error.offset
            error.at(sample=int(rows[int(np.argmax(is_lost))]))
            raise

    def _read_small(
        self, offset: int, stride: int, rows: Rows, out: npt.NDArray[np.uint8], lines: Rows
    ) -> None:
        """Read small rows together with the gaps between them, then copy the rows out."""
        span = int(rows[-1] - rows[0]) * stride
        if span <= _SPAN_BYTES and span <= _GAP_BYTES * len(rows):
            self._read_span(offset, stride, rows, out, lines)
            return
        is_far = (rows[1:] - rows[:-1]) * stride > _GAP_BYTES
        is_far |= np.diff(rows * stride // _SPAN_BYTES) != 0
        ends = np.append(np.flatnonzero(is_far) + 1, len(rows))
        sizes = np.diff(ends, prepend=0)
        is_alone = np.repeat(sizes < _MIN_ROWS_IN_SPAN, sizes)
        for end, size in zip(ends.tolist(), sizes.tolist(), strict=True):
            if size >= _MIN_ROWS_IN_SPAN:
                part = slice(end - size, end)
                self._read_span(offset, stride, rows[part], out, lines[part])
        self._read_each(offset + rows[is_alone] * stride, out, lines[is_alone])

    def _read_span(
        self, offset: int, stride: int, rows: Rows, out: npt.NDArray[np.uint8], lines: Rows
    ) -> None:
        first, size = int(rows[0]), out.shape[1]
        n_rows = int(rows[-1]) - first + 1
        span = np.empty((n_rows, stride), np.uint8)
        needed = (n_rows - 1) * stride + size
        self.read_into(span.reshape(-1).data[:needed], offset + first * stride)
        out[lines] = (span if stride == size else span[:, :size])[rows - first]

    def _read_each(self, offsets: Rows, out: npt.NDArray[np.uint8], lines: Rows) -> None:
        """Read scattered rows directly into `out`, by one call each."""
        size, flat = out.shape[1], out.reshape(-1).data
        for start, offset in zip((lines * size).tolist(), offsets.tolist(), strict=True):
            self._read_all([flat[start : start + size]], size, offset)

    def _read_sequences(
        self, offset: int, rows: Rows, out: npt.NDArray[np.uint8], lines: Rows
    ) -> None:
        """Read rows without padding by one call for each run of consecutive rows."""
        size, flat = out.shape[1], out.reshape(-1).data
        for part in _split_where(rows[1:] - rows[:-1] != 1):
            start, numbers = offset + int(rows[part.start]) * size, lines[part].tolist()
            if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
                whole = flat[numbers[0] * size : (numbers[-1] + 1) * size]
                self._read_all([whole], len(numbers) * size, start)
                continue
            views = [flat[line * size : (line + 1) * size] for line in numbers]
            for i in range(0, len(views), _MAX_BUFFERS):
                some = views[i : i + _MAX_BUFFERS]
                self._read_all(some, len(some) * size, start + i * size)

    def _read_all(self, views: list[memoryview], n_bytes: int, offset: int) -> None:
        """Fill buffers of `n_bytes` in total with the bytes at `offset`."""
        descriptor = self._descriptor or self._open_again()
        try:
            n_read = os.preadv(descriptor.fd, views, offset)
        except OSError as error:
            self._allow_reopen(error)
            n_read = 0
        if n_read == n_bytes:
            return
        for view in views:
            if n_read < view.nbytes:
                self.read_into(view[n_read:], offset + n_read)
            n_read = max(0, n_read - view.nbytes)
            offset += view.nbytes

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes at `offset`, in as many calls as needed."""
        done, n_failures = 0, 0
        while done < view.nbytes:
            descriptor = self._descriptor or self._open_again()
            try:
                rest = view[done:] if done else view
                n_read = os.preadv(descriptor.fd, [rest], offset + done)
            except OSError as error:
                self._allow_reopen(error, n_failures)
                n_failures += 1
                continue
            if n_read == 0:
                raise self._cut_short(offset + done, descriptor)
            done += n_read

    def _cut_short(self, offset: int, descriptor: _Descriptor) -> ShardChanged:
        found = os.fstat(descriptor.fd).st_size
        error = resized_error(self.path, self.nbytes, found)
        if found >= self.nbytes:
            what = "the file was truncated while it was read, and restored"
            error = ShardChanged(what, code="changed", path=self.path)
        return error.at(offset=offset)

    def _allow_reopen(self, error: OSError, n_failures: int = 0) -> None:
        """Drop the descriptor after ESTALE, to reopen it; raise any other error with the path."""
        if error.errno != errno.ESTALE or n_failures:
            raise OSError(error.errno, os.strerror(error.errno or 0), self.path) from error
        self._descriptor = None

    def _open_again(self) -> _Descriptor:
        descriptor = _Descriptor(_open(self._absolute, self.path))
        now = FileState.of(os.fstat(descriptor.fd))
        # Compare the header, not the inode: network file systems may change a file's device and
        # inode numbers.
        if now.n_bytes != self.nbytes and now[:2] == self.state[:2]:
            raise resized_error(self.path, self.nbytes, now.n_bytes)
        head = os.pread(descriptor.fd, _HEAD_BYTES, 0)
        if now.n_bytes != self.nbytes or head != self._head:
            raise ShardChanged(
                "the file was replaced by another shard after it was opened; reopen it",
                code="replaced",
                path=self.path,
                expected=f"{self.nbytes} bytes, header {self._head.hex()}",
                found=f"{now.n_bytes} bytes, header {head.hex()}",
            )
        self._keep(descriptor)
        return descriptor

    def _keep(self, descriptor: _Descriptor) -> None:
        """Keep a descriptor for further reads; evict the oldest beyond the limit."""
        self._descriptor = descriptor
        _files_with_descriptor.append(weakref.ref(self))
        most = _max_open()
        while len(_files_with_descriptor) > most:
            _evict_descriptor()


_files_with_descriptor: Final[deque[weakref.ref[Any]]] = deque()
"""The files that hold an open descriptor, in the order in which they were opened."""


def _split_where(is_cut: npt.NDArray[np.bool_]) -> Iterator[slice]:
    """Yield the slices of a sequence that is cut after each item marked in `is_cut`."""
    start = 0
    for end in (np.flatnonzero(is_cut) + 1).tolist():
        yield slice(start, end)
        start = end
    yield slice(start, len(is_cut) + 1)


def _max_open() -> int:
    """Return a quarter of the current limit on open files of this process, within bounds."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    share = _MAX_OPEN if soft == resource.RLIM_INFINITY else soft // 4
    return max(_MIN_OPEN, min(share, _MAX_OPEN))


def _evict_descriptor() -> bool:
    """Drop the oldest open descriptor; return False if there is none."""
    try:
        file = _files_with_descriptor.popleft()()
    except IndexError:
        return False
    if file is not None:
        file._descriptor = None
    return True


def _open(absolute: str, path: str) -> int:
    """Open a file, evicting kept descriptors if the limit on open files is reached."""
    while True:
        try:
            return open_shard(absolute, path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not _evict_descriptor():
                raise


Content = memoryview | PreadFile


def open_content(path: str, access: Access) -> tuple[Content, FileState]:
    """Open a whole file, mapped or read by offset according to `access` and the file system."""
    if choose_access(path, access) == "mmap":
        return map_file(path)
    file = PreadFile(path)
    return file, file.state


class StoredColumn(NamedTuple):
    """A column of one shard: `n_rows` rows of `shape` and `dtype`, `stride` bytes apart.

    If the file is not mapped and was truncated, methods raise ShardChanged; the error names field
    and row.
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
        """Return copies of some rows."""
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
