"""Ranges of bytes, many at a time: joined, rounded and merged. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from shardio.format.checksum import distinct
from shardio.shard.verification import Rows


class Ranges(NamedTuple):
    """Places from `starts` up to `ends`."""

    starts: Rows
    ends: Rows

    @property
    def n_bytes(self) -> int:
        """How many bytes they have together; what two of them share counts twice."""
        return int((self.ends - self.starts).sum())


NOTHING: Final = Ranges(np.empty(0, np.int64), np.empty(0, np.int64))


def joined(parts: Sequence[Ranges]) -> Ranges:
    """All of them."""
    if not parts:
        return NOTHING
    starts = [each.starts for each in parts]
    return Ranges(np.concatenate(starts), np.concatenate([each.ends for each in parts]))


def merged(ranges: Ranges, grain: int) -> Ranges:
    """The same places ascending and each once, rounded out to multiples of a power of 2.

    Ranges that touch or overlap then are one.
    """
    filled = ranges.ends > ranges.starts
    starts = ranges.starts[filled] & -grain
    if not len(starts):
        return NOTHING
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate((ranges.ends[filled][order] + (grain - 1)) & -grain)
    is_first = np.concatenate([[True], starts[1:] > ends[:-1]])
    return Ranges(starts[is_first], ends[np.append(is_first[1:], True)])


def blocks_of(ranges: Ranges, size: int) -> Rows:
    """The numbers of all blocks of a size that ranges reach into, ascending and each once."""
    filled = ranges.ends > ranges.starts
    firsts, lasts = ranges.starts[filled] // size, (ranges.ends[filled] - 1) // size
    counts = lasts - firsts + 1
    before = np.cumsum(counts) - counts
    numbers: Rows = np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))
    return distinct(numbers)
