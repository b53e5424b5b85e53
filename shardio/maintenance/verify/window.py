"""Read the bytes of a shard once for verification, front to back, in a sliding window."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from shardio.format.checksum import BLOCK_BYTES, digest_bytes, hash_bytes
from shardio.format.layout import PAGE, Section
from shardio.maintenance.verify import Findings
from shardio.storage.content import Content as Bytes
from shardio.storage.file_access import Access, choose_access, drop_pages

CHUNK_BYTES: Final = 16 << 20
"""The number of mapped bytes after which `forget` is called; a longer record is finished first."""

DIGEST_BYTES: Final = 8
"""The number of bytes that `differing` compares at a time."""

WINDOW_BYTES: Final = 512 << 10
"""The number of bytes to process together, so that they stay in the CPU cache. A longer row or
record is processed as a whole."""

U64: Final = np.dtype("<u8")
_SEGMENTS: Final = getattr(zstandard, "BufferWithSegments", None)


def access_once(access: Access) -> Access:
    """Return the access mode for bytes that are read once: "pread" for "auto".

    For such bytes pread is as fast as mapping, and an unreadable page does not kill the process.
    """
    chosen = choose_access(os.curdir, access)
    return "pread" if access == "auto" else chosen


class Content:
    """A shard's bytes, mapped or read from a file; borrowed. No view may outlive this object."""

    def __init__(self, whole: Bytes) -> None:
        self.bytes = whole
        self.n_bytes = whole.nbytes
        self.is_mapped = isinstance(whole, memoryview)
        self._buffer = self._filled = self._window = memoryview(b"")
        self._window_start = 0
        self._unforgotten = 0

    def window(self, start: int, end: int) -> memoryview:
        """Return the bytes from start to end, valid until the next call overwrites them.

        If the next window is in the same memory, the next call returns the same view.

        Raises:
            ShardChanged: an unmapped file has become shorter.
            OSError: an unmapped file cannot be read.
        """
        if isinstance(self.bytes, memoryview):
            self._unforgotten += end - start
            if self._unforgotten > CHUNK_BYTES:
                self.forget()
            return self.bytes[start:end]
        # Start reading at a page boundary, in the file and in the buffer: otherwise some processors
        # copy at a quarter of the speed.
        skipped = start % PAGE
        n_bytes = skipped + end - start
        if self._buffer.nbytes < n_bytes:
            self._buffer = _new_buffer(2 * max(n_bytes, WINDOW_BYTES))
        if (skipped, n_bytes) != (self._window_start, self._filled.nbytes):
            self._window_start, self._filled = skipped, self._buffer[:n_bytes]
            self._window = self._filled[skipped:].toreadonly()
        self.bytes.read_into(self._filled, start - skipped)
        return self._window

    def forget(self) -> None:
        """Drop the pages read so far from this process's memory; they stay in the page cache."""
        self._unforgotten = 0
        if isinstance(self.bytes, memoryview):
            drop_pages(self.bytes)

    def items(
        self, section: Section, dtype: Any, first: int = 0, n: int | None = None
    ) -> npt.NDArray[Any]:
        """Return n items of a section, by default all from `first`; a view of the map, or read."""
        size = np.dtype(dtype).itemsize
        n = section.size // size - first if n is None else n
        start = section.offset + first * size
        return np.frombuffer(self.bytes[start : start + n * size], dtype, n)

    def check_hash(self, section: Section, findings: Findings, field: str | None) -> None:
        """Compare a section with its hash."""
        found = hash_bytes(self.bytes[section.offset : section.offset + section.size])
        if found != section.hash:
            findings.add_hash(
                section.hash, found, section=section.name, field=field, offset=section.offset
            )

    def check_zeros(self, start: int, end: int, findings: Findings, **where: Any) -> None:
        """Check that padding bytes are zero."""
        padding = bytes(self.bytes[start:end])
        if padding.count(0) != len(padding):
            at = len(padding) - len(padding.lstrip(b"\0"))
            where |= {"offset": start + at, "expected": 0, "found": padding[at]}
            findings.add("padding", "padding is not zero", **where)

    def check_blocks(
        self, target: Section, hashes: Section, findings: Findings, field: str | None
    ) -> None:
        """Compare each block of an index section with its hash."""
        expected, end = self.items(hashes, U64), target.offset + target.size
        step = WINDOW_BYTES // BLOCK_BYTES
        for first in range(0, len(expected), step):
            start, here = target.offset + first * BLOCK_BYTES, expected[first : first + step]
            window = self.window(start, min(start + WINDOW_BYTES, end))
            starts = range(0, window.nbytes, BLOCK_BYTES)
            blocks = [window[at : at + BLOCK_BYTES] for at in starts]
            for i, wanted, found in differing(blocks, digests_of(here)):
                place = start + starts[i]
                findings.add_hash(wanted, found, section=target.name, field=field, offset=place)


def _new_buffer(n_bytes: int) -> memoryview:
    """Return page-aligned memory, in huge pages if available, which saves 1 ms of page faults."""
    buffer = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not available on this system or kernel
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)


def digests_of(hashes: npt.NDArray[np.uint64]) -> bytes:
    """Return hashes in the form that `differing` compares, DIGEST_BYTES each."""
    return hashes.astype(">u8").tobytes()


def parts_of(window: memoryview, ranges: npt.NDArray[np.uint64]) -> Iterable[Any]:
    """Return the parts of a window at the (start, length) in each row of `ranges`.

    The parts are objects with the buffer interface, made by zstandard's BufferWithSegments if
    available: slicing a memoryview takes half as long as hashing 30 KB.
    """
    if _SEGMENTS is not None:
        parts: Iterable[Any] = _SEGMENTS(window, ranges)
        return parts
    ends = ranges.sum(axis=1, dtype=np.uint64)
    return map(window.__getitem__, map(slice, ranges[:, 0].tolist(), ends.tolist()))


def differing(parts: Iterable[Any], expected: bytes) -> list[tuple[int, int, int]]:
    """Return the index, expected hash and found hash of each part whose hash differs.

    The loop runs in C. Executing bytecode and creating an int for each part would take as long as
    hashing a row of 3 KB.
    """
    found = b"".join(map(digest_bytes, parts))
    if found == expected:
        return []
    wanted, actual = np.frombuffer(expected, ">u8"), np.frombuffer(found, ">u8")
    return [(i, int(wanted[i]), int(actual[i])) for i in np.flatnonzero(wanted != actual).tolist()]
