"""A file that is read by offset into buffers, and never mapped.

What a map answers with a signal is an exception here: a file that has become shorter is a short
read. Datasets have more shards than a process may have open files, so descriptors are kept for as
many as a share of the limit allows; a file that is opened again must still be the same shard.
"""

from __future__ import annotations

import errno
import os
import resource
import weakref
from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.access.files import FileState, open_shard, resized
from shardio.errors import ShardChanged, ShardIncomplete

_HEAD_BYTES: Final = 128
"""The fields of a shard's header: its size, its table's hash, and an id of all its content."""

_GAP_BYTES: Final = 8 << 10
"""A call costs as much as copying this: rows that lie nearer are read together."""
_SPAN_BYTES: Final = 256 << 10
"""The most that is read together, so that what lies in the gaps stays in the cache."""
_SMALL_ROW_BYTES: Final = 2 << 10
_MAX_BUFFERS: Final = os.sysconf("SC_IOV_MAX")

_MOST_OPEN: Final = 4096
_FEWEST_OPEN: Final = 4


class _Descriptor:
    """Owns an open file until nothing refers to it: a read may outlast its place among the kept."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False


class PreadFile:
    """Reads one file. Its descriptor goes when the object does, or others need its place.

    Used from several threads at a time.

    Raises:
        ShardNotFound: there is no such file.
        ShardIncomplete: the file is empty.
        OSError: (also from every read) the system refuses.
        ShardChanged: (from every read) the file is shorter now, or another shard.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._place = os.path.abspath(path)  # opened again later, whatever chdir did meanwhile
        self._kept: _Descriptor | None = None
        descriptor = _Descriptor(_open(self._place, path))
        self.state = FileState.of(os.fstat(descriptor.fd))
        self.nbytes = self.state.n_bytes
        if self.nbytes == 0:
            raise ShardIncomplete(f"{path}: the file is empty: its writer did not finish")
        self._head = os.pread(descriptor.fd, _HEAD_BYTES, 0)
        self._keep(descriptor)

    def __getitem__(self, part: slice) -> memoryview:
        """Read a part of the file; its memory is nobody else's."""
        start, stop, _ = part.indices(self.nbytes)
        n_bytes = max(0, stop - start)
        descriptor = self._kept or self._open_again()
        try:
            found = os.pread(descriptor.fd, n_bytes, start)
        except OSError as error:
            self._withstand(error)
            found = b""
        if len(found) == n_bytes:
            return memoryview(found)
        buffer = bytearray(n_bytes)  # more than one call gives, or a connection that was lost
        self._read_into(memoryview(buffer), start)
        return memoryview(buffer).toreadonly()

    def read_rows(
        self,
        offset: int,
        stride: int,
        rows: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
        lines: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Copy rows that lie `stride` bytes apart, the first at `offset`, into lines of `out`.

        Large rows are read straight into their lines, rows in sequence by one call; small ones that
        lie close together pass through a buffer.

        Args:
            offset, stride: of the file.
            rows: their numbers, in any order.
            out: C-contiguous; as many bytes of each row as it has columns.
            lines: where in out each row goes; by default one after the other.
        """
        n_bytes = out.shape[1]
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        lines = order if lines is None else lines[order]
        jumps = np.diff(rows)
        if n_bytes < _SMALL_ROW_BYTES:
            spans = rows * stride // _SPAN_BYTES
            is_cut = (jumps * stride - n_bytes > _GAP_BYTES) | (np.diff(spans) != 0)
            read = self._read_span
        else:
            is_cut = (jumps != 1) if stride == n_bytes else np.ones(len(jumps), np.bool_)
            read = self._read_sequence
        ends = [*(np.flatnonzero(is_cut) + 1).tolist(), len(rows)]
        start = 0
        for end in ends:
            if start < end:
                read(offset, stride, rows[start:end], out, lines[start:end])
            start = end

    def _read_span(
        self,
        offset: int,
        stride: int,
        rows: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
        lines: npt.NDArray[np.int64],
    ) -> None:
        """Small rows that lie close together: read them and what lies between, then pick."""
        first, size = int(rows[0]), out.shape[1]
        n_rows = int(rows[-1]) - first + 1
        span = np.empty(n_rows * stride, np.uint8)
        needed = (n_rows - 1) * stride + size
        try:
            self._read_into(span[:needed].data, offset + first * stride)
        except ShardChanged as error:
            raise self._placed(error, offset, stride, rows, size) from error
        out[lines] = span.reshape(n_rows, stride)[rows - first, :size]

    def _read_sequence(
        self,
        offset: int,
        stride: int,
        rows: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
        lines: npt.NDArray[np.int64],
    ) -> None:
        """Large rows that follow one another: each straight into its line."""
        size = out.shape[1]
        flat = out.reshape(-1).data
        first = int(rows[0])
        if len(rows) > 1 and (np.diff(lines) == 1).all():
            start = int(lines[0]) * size
            views = [flat[start : start + len(rows) * size]]
            n_each = len(rows)
        else:
            views = [flat[line * size : (line + 1) * size] for line in lines.tolist()]
            n_each = 1
        try:
            for i in range(0, len(views), _MAX_BUFFERS):
                place = offset + (first + i * n_each) * stride
                self._read_all(views[i : i + _MAX_BUFFERS], place)
        except ShardChanged as error:
            raise self._placed(error, offset, stride, rows, size) from error

    def _read_all(self, views: list[memoryview], offset: int) -> None:
        """Fill several buffers with what follows from `offset` on."""
        descriptor = self._kept or self._open_again()
        try:
            n_read = os.preadv(descriptor.fd, views, offset)
        except OSError as error:
            self._withstand(error)
            n_read = 0
        for view in views:
            if n_read < view.nbytes:
                self._read_into(view[max(0, n_read) :], offset + max(0, n_read))
            n_read -= view.nbytes
            offset += view.nbytes

    def _read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer from `offset` on, by as many calls as it takes."""
        done, n_failures = 0, 0
        while done < view.nbytes:
            descriptor = self._kept or self._open_again()
            try:
                n_read = os.preadv(descriptor.fd, [view[done:]], offset + done)
            except OSError as error:
                self._withstand(error, n_failures)
                n_failures += 1
                continue
            if n_read == 0:
                raise self._cut_short(offset + done, descriptor)
            done += n_read

    def _cut_short(self, offset: int, descriptor: _Descriptor) -> ShardChanged:
        found = os.fstat(descriptor.fd).st_size
        error = resized(self.path, self.nbytes, found)
        if found >= self.nbytes:
            error = ShardChanged(
                "the file was cut short while it was read, and made whole again",
                code="changed",
                path=self.path,
            )
        return error.at(offset=offset)

    def _placed(
        self,
        error: ShardChanged,
        offset: int,
        stride: int,
        rows: npt.NDArray[np.int64],
        n_bytes: int,
    ) -> ShardChanged:
        """The same error, with the first of the rows that do not lie in the file whole."""
        if error.offset is None:
            return error
        ends = offset + rows * stride + n_bytes
        row = int(rows[int(np.argmax(ends > error.offset))])
        return error.at(sample=row)

    def _withstand(self, error: OSError, n_failures: int = 0) -> None:
        """Let a file be opened again that the server has forgotten; any other failure is one."""
        if error.errno != errno.ESTALE or n_failures:
            raise OSError(error.errno, os.strerror(error.errno or 0), self.path) from error
        self._kept = None

    def _open_again(self) -> _Descriptor:
        descriptor = _Descriptor(_open(self._place, self.path))
        now = FileState.of(os.fstat(descriptor.fd))
        # By content, as file systems of the kind that this is for give a file new numbers.
        if now.n_bytes != self.nbytes and now[:2] == self.state[:2]:
            raise resized(self.path, self.nbytes, now.n_bytes)
        head = os.pread(descriptor.fd, _HEAD_BYTES, 0)
        if now.n_bytes != self.nbytes or head != self._head:
            raise ShardChanged(
                "another shard has taken the place of the one that was opened; open it anew",
                code="replaced",
                path=self.path,
                expected=f"{self.nbytes} bytes, header {self._head.hex()}",
                found=f"{now.n_bytes} bytes, header {head.hex()}",
            )
        self._keep(descriptor)
        return descriptor

    def _keep(self, descriptor: _Descriptor) -> None:
        """Keep a descriptor for the next reads; the one kept longest makes room for it."""
        self._kept = descriptor
        _keeping.append(weakref.ref(self))
        most = _most_open()
        while len(_keeping) > most:
            _give_up_one()


_keeping: Final[deque[weakref.ref[Any]]] = deque()
"""The files that keep a descriptor, in the order in which they were opened."""


def _most_open() -> int:
    """A quarter of what this process may have open, which can change."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    share = _MOST_OPEN if soft == resource.RLIM_INFINITY else soft // 4
    return max(_FEWEST_OPEN, min(share, _MOST_OPEN))


def _give_up_one() -> bool:
    """Forget the descriptor kept longest; returns whether there was any."""
    try:
        file = _keeping.popleft()()
    except IndexError:
        return False
    if file is not None:
        file._kept = None
    return True


def _open(place: str, path: str) -> int:
    """Open a file, if need be in the place of those that are kept."""
    while True:
        try:
            return open_shard(place, path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not _give_up_one():
                raise
