"""The content of a shard's file, and the columns in it.

The content is a memoryview if the file is mapped, or a PreadFile if it is read by offset
(pread(2)). Both have the attribute `nbytes`, and their slices are read-only memoryviews. If a file
was truncated, reading a PreadFile raises an exception; reading a map would kill the process.

All PreadFiles together keep at most a quarter of the allowed number of descriptors open. Beyond
that, the descriptor that was opened first is *evicted*: it is closed, and the next read of its file
opens the file again.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import weakref
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.classes import undo_on_error
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
"""The number of bytes at the start of a shard that contain all header fields, such as the id. If
these bytes are equal, a reopened file is the same shard."""

_GAP_BYTES: Final = 8 << 10
"""The maximum distance between the starts of two small rows that are read with one call. Reading
the bytes between them takes at most about as long as a second system call."""
_SPAN_BYTES: Final = 256 << 10
"""The maximum number of bytes that one call reads for several small rows. These bytes stay in the
CPU cache until the rows are copied."""
_SMALL_ROW_BYTES: Final = 2 << 10
"""Rows with fewer bytes are called small."""
_MIN_ROWS_IN_SPAN: Final = 4
"""Fewer small rows than this are read one by one: copying from a buffer takes as long as a few
calls."""
_MAX_BUFFERS: Final = os.sysconf("SC_IOV_MAX")
"""The maximum number of buffers that one call of preadv(2) can fill."""

_MAX_OPEN: Final = 4096
_MIN_OPEN: Final = 4


class _Descriptor:
    """A descriptor of an open file, closed when no thread refers to this object any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False


class PreadFile:
    """A file that is read by offset. Owns a descriptor of the file. Thread-safe.

    Raises:
        ShardNotFound: there is no such file.
        ShardIncomplete: the file is empty.
        OSError: (also from every read) the file cannot be opened or read.
        ShardChanged: (from every read) the file was truncated or replaced by another shard.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._absolute = os.path.abspath(path)  # the file may be opened again after a chdir
        self._descriptor: _Descriptor | None = None
        fd = _open(self._absolute, path)
        # Close the descriptor at once after an error, because an error may be kept for long.
        with undo_on_error(os.close, fd):
            self.state = FileState.of(os.fstat(fd))
            self.nbytes = self.state.n_bytes
            if self.nbytes == 0:
                raise ShardIncomplete(f"{path}: the file is empty: its writer did not finish")
            self._head = os.pread(fd, _HEAD_BYTES, 0)
        self._register_descriptor(_Descriptor(fd))

    def __getitem__(self, part: slice) -> memoryview:
        """Return a part of the file, which is read into new memory."""
        start, stop, _ = part.indices(self.nbytes)
        n_bytes = max(0, stop - start)
        descriptor = self._descriptor or self._open_again()
        try:
            found = os.pread(descriptor.fd, n_bytes, start)
        except OSError as error:
            self._drop_stale_descriptor(error)
            found = b""
        if len(found) == n_bytes:
            return memoryview(found)
        # The call failed or read too few bytes: read the whole part again.
        buffer = bytearray(n_bytes)
        self.read_into(memoryview(buffer), start)
        return memoryview(buffer).toreadonly()

    def read_rows(self, offset: int, stride: int, rows: Rows, out: npt.NDArray[np.uint8]) -> None:
        """Read row `rows[i]` of a table in the file into `out[i]`, for each i.

        `offset` is the file offset of row 0, and `stride` the distance between the starts of two
        rows, in bytes. `out` is a C-contiguous 2-D array; its width is the number of bytes to read
        per row.
        """
        if len(rows):
            out_rows = np.argsort(rows, kind="stable")
            self.read_ascending(offset, stride, rows[out_rows], out, out_rows)

    def read_ascending(
        self, offset: int, stride: int, rows: Rows, out: npt.NDArray[np.uint8], out_rows: Rows
    ) -> None:
        """Read row `rows[i]`, as `read_rows` does, into `out[out_rows[i]]`.

        `rows` contains at least one index, and the indices ascend. Rows of 2 KiB and more that
        follow each other in the file are read with one call, directly into `out`. Smaller rows that
        are close together are read into a buffer with one call, and then copied.
        """
        n_bytes = out.shape[1]
        try:
            if n_bytes < _SMALL_ROW_BYTES:
                self._read_small(offset, stride, rows, out, out_rows)
            elif stride == n_bytes and len(rows) > 1 and (rows[1:] - rows[:-1] == 1).any():
                self._read_sequences(offset, rows, out, out_rows)
            else:
                self._read_each(offset + rows * stride, out, out_rows)
        except ShardChanged as error:
            if error.offset is None:
                raise
            is_lost = offset + rows * stride + n_bytes > error.offset
            error.at(sample=int(rows[int(np.argmax(is_lost))]))
            raise

    def _read_small(
        self, offset: int, stride: int, rows: Rows, out: npt.NDArray[np.uint8], out_rows: Rows
    ) -> None:
        span = int(rows[-1] - rows[0]) * stride
        if span <= _SPAN_BYTES and span <= _GAP_BYTES * len(rows):
            self._read_span(offset, stride, rows, out, out_rows)
            return
        is_far = (rows[1:] - rows[:-1]) * stride > _GAP_BYTES
        is_far |= np.diff(rows * stride // _SPAN_BYTES) != 0
        ends = np.append(np.flatnonzero(is_far) + 1, len(rows))
        sizes = np.diff(ends, prepend=0)
        is_alone = np.repeat(sizes < _MIN_ROWS_IN_SPAN, sizes)
        for end, size in zip(ends.tolist(), sizes.tolist(), strict=True):
            if size >= _MIN_ROWS_IN_SPAN:
                part = slice(end - size, end)
                self._read_span(offset, stride, rows[part], out, out_rows[part])
        self._read_each(offset + rows[is_alone] * stride, out, out_rows[is_alone])

    def _read_span(
        self, offset: int, stride: int, rows: Rows, out: npt.NDArray[np.uint8], out_rows: Rows
    ) -> None:
        first, size = int(rows[0]), out.shape[1]
        n_rows = int(rows[-1]) - first + 1
        span = np.empty((n_rows, stride), np.uint8)
        needed = (n_rows - 1) * stride + size
        self.read_into(span.reshape(-1).data[:needed], offset + first * stride)
        out[out_rows] = (span if stride == size else span[:, :size])[rows - first]

    def _read_each(self, offsets: Rows, out: npt.NDArray[np.uint8], out_rows: Rows) -> None:
        size, flat = out.shape[1], out.reshape(-1).data
        for start, offset in zip((out_rows * size).tolist(), offsets.tolist(), strict=True):
            self._read_all([flat[start : start + size]], size, offset)

    def _read_sequences(
        self, offset: int, rows: Rows, out: npt.NDArray[np.uint8], out_rows: Rows
    ) -> None:
        """Read rows whose stride is the width of `out`; read consecutive rows with one call."""
        size, flat = out.shape[1], out.reshape(-1).data
        ends = [*(np.flatnonzero(rows[1:] - rows[:-1] != 1) + 1).tolist(), len(rows)]
        for begin, end in itertools.pairwise([0, *ends]):
            start, numbers = offset + int(rows[begin]) * size, out_rows[begin:end].tolist()
            if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
                whole = flat[numbers[0] * size : (numbers[-1] + 1) * size]
                self._read_all([whole], len(numbers) * size, start)
                continue
            views = [flat[line * size : (line + 1) * size] for line in numbers]
            for i in range(0, len(views), _MAX_BUFFERS):
                some = views[i : i + _MAX_BUFFERS]
                self._read_all(some, len(some) * size, start + i * size)

    def _read_all(self, views: list[memoryview], n_bytes: int, offset: int) -> None:
        """Fill `views`, which have `n_bytes` in total, with the bytes of the file at `offset`."""
        descriptor = self._descriptor or self._open_again()
        try:
            n_read = os.preadv(descriptor.fd, views, offset)
        except OSError as error:
            self._drop_stale_descriptor(error)
            n_read = 0
        if n_read == n_bytes:
            return
        for view in views:
            if n_read < view.nbytes:
                self.read_into(view[n_read:], offset + n_read)
            n_read = max(0, n_read - view.nbytes)
            offset += view.nbytes

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes of the file at `offset`, with as many calls as needed."""
        done, n_failures = 0, 0
        while done < view.nbytes:
            descriptor = self._descriptor or self._open_again()
            try:
                rest = view[done:] if done else view
                n_read = os.preadv(descriptor.fd, [rest], offset + done)
            except OSError as error:
                self._drop_stale_descriptor(error, n_failures)
                n_failures += 1
                continue
            if n_read == 0:
                raise self._truncation_error(offset + done, descriptor)
            done += n_read

    def _truncation_error(self, offset: int, descriptor: _Descriptor) -> ShardChanged:
        found = os.fstat(descriptor.fd).st_size
        error = resized_error(self.path, self.nbytes, found)
        if found >= self.nbytes:
            what = "the file was truncated while it was read, and restored"
            error = ShardChanged(what, code="changed", path=self.path)
        return error.at(offset=offset)

    def _drop_stale_descriptor(self, error: OSError, n_failures: int = 0) -> None:
        """Drop the descriptor after the first ESTALE, with which a network file system rejects it.

        Raise any other error again, with the path.
        """
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
        self._register_descriptor(descriptor)
        return descriptor

    def _register_descriptor(self, descriptor: _Descriptor) -> None:
        self._descriptor = descriptor
        _files_with_descriptor.append(weakref.ref(self))
        most = _max_open()
        while len(_files_with_descriptor) > most:
            _evict_descriptor()


_files_with_descriptor: Final[deque[weakref.ref[Any]]] = deque()
"""Weak references to the files that keep a descriptor open, in the order of opening."""


def _max_open() -> int:
    """Return the number of descriptors to keep open: a quarter of the limit of this process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    share = _MAX_OPEN if soft == resource.RLIM_INFINITY else soft // 4
    return max(_MIN_OPEN, min(share, _MAX_OPEN))


def _evict_descriptor() -> bool:
    """Evict the descriptor that was opened first; return False if no descriptor is kept."""
    try:
        file = _files_with_descriptor.popleft()()
    except IndexError:
        return False
    if file is not None:
        file._descriptor = None
    return True


def _open(absolute: str, path: str) -> int:
    """Open a file; while the limit on open files is reached, evict a descriptor and try again."""
    while True:
        try:
            return open_shard(absolute, path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not _evict_descriptor():
                raise


Content = memoryview | PreadFile


def open_content(path: str, access: Access) -> tuple[Content, FileState]:
    """Open a file with the method that `choose_access` returns; return its content and state."""
    if choose_access(path, access) == "mmap":
        return map_file(path)
    file = PreadFile(path)
    return file, file.state


class StoredColumn(NamedTuple):
    """A column of one shard: the values of a field whose values all have the same size.

    The column has `n_rows` rows, which are arrays of `shape` and `dtype`. `offset` is the file
    offset of row 0, and `stride` is the distance between the starts of two rows, in bytes. If the
    file is not mapped and was truncated, the methods raise ShardChanged with field and row.
    """

    name: str
    content: Content
    offset: int
    stride: int
    n_rows: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def all_rows(self) -> npt.NDArray[Any]:
        """Return all rows as a read-only array: a view if the file is mapped, otherwise a copy."""
        if not isinstance(self.content, memoryview):
            return _read_only(self.rows(np.arange(self.n_rows)))
        strides = (self.stride, *np.empty(self.shape, self.dtype).strides)
        offset = self.offset if self.n_rows else 0
        return np.ndarray((self.n_rows, *self.shape), self.dtype, self.content, offset, strides)

    def rows(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return copies of the rows with these indices."""
        if isinstance(self.content, memoryview):
            found: npt.NDArray[Any] = self.all_rows()[indices]
            return found
        n_bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        out = np.empty((len(indices), n_bytes), np.uint8)
        try:
            self.content.read_rows(self.offset, self.stride, indices, out)
        except ShardChanged as error:
            error.at(field=self.name)
            raise
        return out.reshape(-1).view(self.dtype).reshape(len(indices), *self.shape)

    def row(self, index: int) -> Any:
        """Return the row with this index, read-only; a NumPy scalar if the shape is ()."""
        if isinstance(self.content, memoryview):
            return self.all_rows()[index]
        return _read_only(self.rows(np.array([index])))[0]


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
