from __future__ import annotations

import pytest

from shardio._engine.sizing import n_blocks_wanted

MIB = 1 << 20


@pytest.mark.parametrize(
    ("n_workers", "prefetch", "n_bytes", "n_blocks"),
    [
        (0, None, 1, 2),
        (0, 7, 1, 2),
        (2, 0, 1, 3),
        (2, 4, 1, 7),
        (2, 4, 9 * MIB, 7),
        (2, None, 9 * MIB, 5),
        (2, None, MIB + 1, 5),
        (2, None, MIB, 8),
        (8, None, 4096, 20),
        (1, None, 4096, 6),
    ],
)
def test_small_blocks_are_more_unless_their_number_is_given(
    n_workers: int, prefetch: int | None, n_bytes: int, n_blocks: int
) -> None:
    assert n_blocks_wanted(n_workers, prefetch, n_bytes) == n_blocks
