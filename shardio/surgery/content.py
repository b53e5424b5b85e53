"""The bytes of a shard under audit, read once from front to back without keeping them in memory."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.format.checksum import BLOCK_BYTES, hash_bytes
from shardio.format.layout import Section
from shardio.storage import forget_pages
from shardio.surgery.finding import Findings

CHUNK_BYTES: Final = 16 << 20
"""Bytes that are looked at between two calls of `forget`, but for longer rows and records."""


class Content:
    """Borrows a shard's bytes, usually its map; no view of them outlives an audit."""

    def __init__(self, whole: memoryview) -> None:
        self.bytes = whole
        self.n_bytes = whole.nbytes

    def forget(self) -> None:
        """Drop the pages read so far from this process's memory; they stay in the page cache."""
        forget_pages(self.bytes)

    def numbers(self, section: Section) -> npt.NDArray[np.uint64]:
        """A section of unsigned 64-bit integers, as a view of the map."""
        return np.frombuffer(self.bytes, "<u8", section.size // 8, section.offset)

    def hashes(
        self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint64]:
        """The hash of the bytes from each of `starts` to its end."""
        # Without a bytecode per unit, which takes as long as hashing a row of 3 KB.
        parts = map(self.bytes.__getitem__, map(slice, starts.tolist(), ends.tolist()))
        return np.array(list(map(hash_bytes, parts)), np.uint64)

    def check_hash(
        self, offset: int, n_bytes: int, expected: int, findings: Findings, section: str, **w: Any
    ) -> bool:
        """Compare bytes with their hash; returns whether they match."""
        found = hash_bytes(self.bytes[offset : offset + n_bytes])
        if found != expected:
            findings.add_hash(section, offset, expected, found, **w)
        return found == expected

    def check_zeros(
        self, start: int, end: int, findings: Findings, section: str, **where: Any
    ) -> None:
        """Check that bytes which mean nothing are zero."""
        padding = bytes(self.bytes[start:end])
        if padding.count(0) != len(padding):
            at = len(padding) - len(padding.lstrip(b"\0"))
            findings.add(
                "padding",
                "padding is not zero",
                section=section,
                offset=start + at,
                expected=0,
                found=padding[at],
                **where,
            )

    def check_blocks(
        self, target: Section, hashes: Section, findings: Findings, field: str | None
    ) -> None:
        """Compare every block of an index section with its hash."""
        expected, end = self.numbers(hashes), target.offset + target.size
        step = CHUNK_BYTES // BLOCK_BYTES
        for first in range(0, len(expected), step):
            part = expected[first : first + step]
            starts = target.offset + np.arange(first, first + len(part)) * BLOCK_BYTES
            found = self.hashes(starts, np.minimum(starts + BLOCK_BYTES, end))
            for i in np.flatnonzero(found != part).tolist():
                place, numbers = int(starts[i]), (int(part[i]), int(found[i]))
                findings.add_hash(target.name, place, *numbers, field=field)
            self.forget()
