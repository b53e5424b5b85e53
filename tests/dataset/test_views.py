from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.dataset.selection import RowList, RowRuns, check_rows
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
    with pytest.raises(InvalidArgument) as caught:
        RowRuns.from_text(text, N_ROWS)
    message = str(caught.value)
    if not isinstance(text, str):
        assert message == f"expected runs of rows as a text; found {text!r}"
    elif message.startswith("expected"):
        assert message == f"expected separate runs within 100 rows; found {text!r:.99}"
    elif message.startswith("not runs"):
        assert message.startswith("not runs of rows: ") and len(message) > 30
    else:
        assert message == "the runs of rows are not in canonical form"


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.lists(st.integers(0, 60), max_size=9))
def test_rows_below_a_limit_are_counted_as_in_the_list_of_them(
    mask: list[bool], limits: list[int]
) -> None:
    runs = RowRuns.from_mask(np.array(mask, np.bool_))
    rows = runs.all_rows()
    expected = [int((rows < limit).sum()) for limit in limits]
    wanted = np.array(limits, np.int64)
    assert runs.n_below(wanted).tolist() == expected
    assert RowList(rows).n_below(wanted).tolist() == expected


def test_equal_rows_have_equal_identities_and_others_have_not() -> None:
    runs, same = RowRuns([0, 5], [2, 1]), RowRuns.from_text("0 2 3 1", 9)
    assert runs.identity == same.identity != RowRuns([0, 5], [2, 2]).identity
    assert len(runs.identity) == 16
    assert repr(runs) == "RowRuns(3 rows in 2 runs)"
    assert [each.tolist() for each in runs.runs] == [[0, 5], [2, 1]]
    listed = RowList(np.array([4, 4, 7]))
    assert listed.identity == RowList(np.array([4, 4, 7])).identity
    assert listed.identity != RowList(np.array([4, 7, 4])).identity
    assert listed.identity.startswith("list-")
    assert (repr(listed), len(listed)) == ("RowList(3 rows)", 3)
    assert listed.is_ascending
    assert not RowList(np.array([4, 7, 4])).is_ascending
    assert listed.rows(np.array([2, 0])).tolist() == [7, 4]


def test_a_choice_of_rows_is_checked_and_the_first_wrong_one_named() -> None:
    assert check_rows([2, 0, 2], 3).tolist() == [2, 0, 2]
    assert check_rows(np.array([], np.float64), 3).tolist() == []
    assert check_rows([False, True, True], 3).tolist() == [1, 2]
    for given_, text in (
        ([0, 3, -1], "picks must be integers from 0 to 2; found 3 at 1"),
        (
            [[0]],
            "picks must be a sequence of integers from 0 to 2; found int64 (1, 1): join the inner "
            "sequences with np.concatenate",
        ),
        (0, "picks must be a sequence of integers from 0 to 2; found 0"),
        ([True], "picks, a mask, must be 3 booleans, one for each sample; found bool (1,)"),
        (
            np.ma.masked_array([1]),
            "picks: found a masked array, which would lose its mask; fill it",
        ),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check_rows(given_, 3, "picks")
        assert str(caught.value) == text
