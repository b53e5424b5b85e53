"""Read a shard for verification; large sections are read in windows, from front to back."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from shardio.format.checksum import BLOCK_BYTES, digest_bytes, hash_bytes
from shardio.format.layout import PAGE, Section
from shardio.maintenance.verify import Findings
from shardio.storage.content import Content

DIGEST_BYTES: Final = 8
"""The size of a hash in the form that `find_mismatches` compares."""

WINDOW_BYTES: Final = 512 << 10
"""The approximate size of a window. A window of this size stays in the CPU cache.

A row or record that is longer than this forms a window of its own.
"""

U64: Final = np.dtype("<u8")
_SEGMENTS: Final = getattr(zstandard, "BufferWithSegments", None)


class ShardWindows:
    """The bytes of a shard in memory, or in an open file that the caller owns."""

    def __init__(self, shard: Content) -> None:
        self.bytes = shard
        self.n_bytes = shard.nbytes
        self._buffer = self._buffer_part = self._window = memoryview(b"")
        self._window_start = 0

    def window(self, start: int, end: int) -> memoryview:
        """Return the bytes of the shard from `start` to `end`.

        The bytes of a file are read into a buffer, which the next call overwrites. If the next
        call returns the same memoryview object, slices of this object can be used again: they show
        the new bytes.

        Raises ShardChanged if the file has become shorter, and OSError if it cannot be read.
        """
        if isinstance(self.bytes, memoryview):
            return self.bytes[start:end]
        # Start reading at the start of a page of the file, and write to the start of a page of the
        # buffer. Otherwise, some processors copy at a quarter of the speed.
        skipped = start % PAGE
        n_bytes = skipped + end - start
        if self._buffer.nbytes < n_bytes:
            size, flags = 2 * max(n_bytes, WINDOW_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            buffer = mmap.mmap(-1, size, flags=flags)  # starts at a page
            with contextlib.suppress(OSError):  # the kernel may have no huge pages
                buffer.madvise(mmap.MADV_HUGEPAGE)  # saves 1 ms of page faults
            self._buffer = memoryview(buffer)
        if (skipped, n_bytes) != (self._window_start, self._buffer_part.nbytes):
            self._window_start, self._buffer_part = skipped, self._buffer[:n_bytes]
            self._window = self._buffer_part[skipped:].toreadonly()
        self.bytes.read_into(self._buffer_part, start - skipped)
        return self._window

    def items(
        self, section: Section, dtype: Any, first: int = 0, n: int | None = None
    ) -> npt.NDArray[Any]:
        """Return `n` items of a section, beginning with item `first`, as a read-only array.

        If `n` is None, return all items that follow.
        """
        size = np.dtype(dtype).itemsize
        n = section.size // size - first if n is None else n
        start = section.offset + first * size
        return np.frombuffer(self.bytes[start : start + n * size], dtype, n)

    def check_hash(self, section: Section, findings: Findings, field: str | None) -> None:
        """Add a finding if a section does not match its hash."""
        found = hash_bytes(self.bytes[section.offset : section.offset + section.size])
        if found != section.hash:
            findings.add_mismatch(
                section.hash, found, section=section.name, field=field, offset=section.offset
            )

    def check_zeros(self, start: int, end: int, findings: Findings, **where: Any) -> None:
        """Add a finding if the bytes from `start` to `end`, which are padding, are not all zero."""
        padding = bytes(self.bytes[start:end])
        if padding.count(0) != len(padding):
            at = len(padding) - len(padding.lstrip(b"\0"))
            where |= {"offset": start + at, "expected": 0, "found": padding[at]}
            findings.add("padding", "padding is not zero", **where)

    def check_blocks(
        self, target: Section, hashes: Section, findings: Findings, field: str | None
    ) -> None:
        """Add a finding for each 4 KiB block of `target` that differs from its hash in `hashes`."""
        expected, end = self.items(hashes, U64), target.offset + target.size
        step = WINDOW_BYTES // BLOCK_BYTES
        for first in range(0, len(expected), step):
            start, here = target.offset + first * BLOCK_BYTES, expected[first : first + step]
            window = self.window(start, min(start + WINDOW_BYTES, end))
            starts = range(0, window.nbytes, BLOCK_BYTES)
            blocks = [window[at : at + BLOCK_BYTES] for at in starts]
            for i, wanted, found in find_mismatches(blocks, pack_digests(here)):
                place = start + starts[i]
                findings.add_mismatch(wanted, found, section=target.name, field=field, offset=place)


def pack_digests(hashes: npt.NDArray[np.uint64]) -> bytes:
    """Return hashes in the form that `find_mismatches` compares: DIGEST_BYTES for each hash."""
    return hashes.astype(">u8").tobytes()


def slice_window(window: memoryview, ranges: npt.NDArray[np.uint64]) -> Iterable[Any]:
    """Return parts of a window, given their starts and lengths, as buffers.

    zstandard's BufferWithSegments makes the parts, if available: it is four times as fast as
    slicing the memoryview.
    """
    if _SEGMENTS is not None:
        parts: Iterable[Any] = _SEGMENTS(window, ranges)
        return parts
    ends = ranges.sum(axis=1, dtype=np.uint64)
    return map(window.__getitem__, map(slice, ranges[:, 0].tolist(), ends.tolist()))


def find_mismatches(parts: Iterable[Any], expected: bytes) -> list[tuple[int, int, int]]:
    """Return the index, the expected hash and the actual hash of each part that does not match.

    `expected` is a result of `pack_digests`. The loop runs in C (`map`): in Python, each iteration
    would take as long as hashing 3 KB.
    """
    found = b"".join(map(digest_bytes, parts))
    if found == expected:
        return []
    wanted, actual = np.frombuffer(expected, ">u8"), np.frombuffer(found, ">u8")
    return [(i, int(wanted[i]), int(actual[i])) for i in np.flatnonzero(wanted != actual).tolist()]
