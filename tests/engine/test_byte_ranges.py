"""Ranges of bytes, rounded and merged: against the same worked out byte by byte."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardio.samples.extents import NOTHING, Ranges, blocks_of, joined, merged

PAIRS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=12)
SIZES = st.sampled_from([1, 4, 16, 64])


def ranges_of(pairs: list[tuple[int, int]]) -> Ranges:
    starts = np.array([start for start, _ in pairs], np.int64)
    return Ranges(starts, starts + np.array([n for _, n in pairs], np.int64))


@given(PAIRS, SIZES)
def test_merged_ranges_are_the_blocks_that_are_reached_into_each_once(
    pairs: list[tuple[int, int]], size: int
) -> None:
    expected = sorted({at // size for start, n in pairs for at in range(start, start + n)})
    found = ranges_of(pairs)
    assert blocks_of(found, size).tolist() == expected
    parts = merged(found, size)
    covered = [
        block
        for start, end in zip(parts.starts.tolist(), parts.ends.tolist(), strict=True)
        for block in range(start // size, end // size)
    ]
    assert covered == expected
    assert (parts.starts[1:] > parts.ends[:-1]).all()  # what touches is one


def test_ranges_are_put_together_as_they_are() -> None:
    found = joined([ranges_of([(5, 2)]), NOTHING, ranges_of([(1, 9), (0, 0)])])
    assert (found.starts.tolist(), found.ends.tolist()) == ([5, 1, 0], [7, 10, 0])
    assert found.n_bytes == 11
