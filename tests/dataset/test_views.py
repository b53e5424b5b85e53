from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.dataset.selection import RowRuns
from shardio.errors import InvalidArgument

N_ROWS = 100


@given(st.lists(st.booleans(), max_size=200))
def test_runs_hold_the_rows_of_a_mask_and_come_back_from_their_text(mask: list[bool]) -> None:
    runs = RowRuns.from_mask(np.array(mask, np.bool_))
    expected = np.flatnonzero(np.array(mask, np.bool_))
    assert runs.all_rows().tolist() == expected.tolist()
    assert len(runs) == len(expected)
    back = RowRuns.from_text(runs.to_text(), len(mask))
    assert back == runs
    assert back.all_rows().tolist() == expected.tolist()


def test_positions_are_looked_up_in_any_order() -> None:
    runs = RowRuns([5, 20, 90], [2, 1, 10])
    assert runs.rows(np.array([12, 0, 2, 1, 3])).tolist() == [99, 5, 20, 6, 90]


def test_the_text_says_how_many_are_skipped_and_how_many_are_taken() -> None:
    assert RowRuns([0, 20, 90], [2, 1, 10]).to_text() == "0 2 18 1 69 10"
    assert RowRuns([], []).to_text() == ""
    assert RowRuns([1], [2]) == RowRuns([1], [2]) != RowRuns([1], [3])


@pytest.mark.parametrize(
    "text",
    [
        *(None, 7, "1", "0 2 0 3", "0 0", "-1 5", "0 101", "90 11", "0 5 95 1", f"0 {1 << 80}"),
        *(" ".join(["1 99"] * 200), "a b", "00 5", "0  5", " 0 5", "0 5\n", "+0 5", "0 1_0", "٠ 5"),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_a_text_that_is_no_runs_of_these_rows_is_refused(text: Any) -> None:
    with pytest.raises(InvalidArgument):
        RowRuns.from_text(text, N_ROWS)
