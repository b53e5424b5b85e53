"""Partition of an epoch among ranks: every position once, for every number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.order import RankPartition


def ranks(tail: Any, n: int, first: int, batch_size: int, world_size: int) -> list[RankPartition]:
    return [
        RankPartition(n, first, batch_size, rank, world_size, tail) for rank in range(world_size)
    ]


def shares(partition: RankPartition, step: int) -> list[int]:
    return list(range(*partition.share(step)))


cases = st.tuples(
    st.integers(0, 200), st.integers(0, 200), st.integers(1, 9), st.integers(1, 7)
).filter(lambda case: case[1] <= case[0])


@given(case=cases, tail=st.sampled_from(["short", "pad"]))
def test_all_ranks_together_visit_every_position_once_in_order(
    case: tuple[int, int, int, int], tail: str
) -> None:
    divided = ranks(tail, *case)
    steps = range(divided[0].first_step, max(each.last_step for each in divided))
    found = [p for step in steps for each in divided for p in shares(each, step)]
    assert found == list(range(case[1], case[0]))


@given(case=cases)
def test_drop_leaves_out_what_does_not_fill_a_step_of_all_ranks(
    case: tuple[int, int, int, int],
) -> None:
    n, first, batch_size, world_size = case
    divided = ranks("drop", *case)
    assert len({each.last_step for each in divided}) == 1
    steps = range(divided[0].first_step, divided[0].last_step)
    found = [p for step in steps for each in divided for p in shares(each, step)]
    stride = batch_size * world_size
    assert found == list(range(first, first + (n - first) // stride * stride))


@given(case=cases)
def test_pad_gives_all_ranks_as_many_steps(case: tuple[int, int, int, int]) -> None:
    n, first, batch_size, world_size = case
    divided = ranks("pad", *case)
    n_steps = -(-(n - first) // (batch_size * world_size))
    assert {each.last_step - each.first_step for each in divided} == {n_steps}


@given(case=cases)
def test_a_rank_has_no_step_without_a_sample_unless_it_is_padded(
    case: tuple[int, int, int, int],
) -> None:
    for each in ranks("short", *case):
        assert all(shares(each, step) for step in range(each.first_step, each.last_step))


@given(case=cases, tail=st.sampled_from(["short", "pad", "drop"]))
def test_a_rank_has_as_many_samples_of_a_step_as_any_other_or_one_less(
    case: tuple[int, int, int, int], tail: str
) -> None:
    divided = ranks(tail, *case)
    for step in range(divided[0].first_step, divided[0].last_step):
        counts = [len(shares(each, step)) for each in divided]
        assert max(counts) - min(counts) <= 1
        assert max(counts) <= case[2]


@given(case=cases, tail=st.sampled_from(["short", "pad", "drop"]), data=st.data())
def test_positions_are_those_of_the_steps_one_after_another(
    case: tuple[int, int, int, int], tail: str, data: st.DataObject
) -> None:
    for each in ranks(tail, *case):
        if each.first_step < each.last_step:
            first = data.draw(st.integers(each.first_step, each.last_step - 1))
            last = data.draw(st.integers(first + 1, each.last_step))
            every = data.draw(st.integers(1, 4))
            expected = [p for step in range(first, last, every) for p in range(*each.read(step))]
            assert each.positions(first, last, every).tolist() == expected
            assert each.positions(first, last, every).dtype == np.int64


def test_a_padded_step_without_a_share_reads_the_first_position_that_is_left() -> None:
    last = RankPartition(n=9, first=0, batch_size=4, rank=0, world_size=2, tail="pad")
    assert last.share(1) == (8, 8)
    assert last.read(1) == (8, 9)
    other = RankPartition(n=9, first=0, batch_size=4, rank=1, world_size=2, tail="pad")
    assert other.share(1) == other.read(1) == (8, 9)


@pytest.mark.parametrize(("first", "steps"), [(0, (0, 5)), (8, (2, 5)), (9, (2, 5)), (20, (5, 5))])
def test_steps_go_on_where_whole_ones_were_done(first: int, steps: tuple[int, int]) -> None:
    partition = RankPartition(n=20, first=first, batch_size=4)
    assert (partition.first_step, partition.last_step) == steps


@given(case=cases, tail=st.sampled_from(["short", "pad", "drop"]))
def test_the_position_of_a_step_is_the_same_for_all_ranks(
    case: tuple[int, int, int, int], tail: str
) -> None:
    divided = ranks(tail, *case)
    for step in range(divided[0].first_step, divided[0].last_step + 1):
        assert len({each.position(step) for each in divided}) == 1
        before = [
            p
            for s in range(divided[0].first_step, step)
            for each in divided
            for p in shares(each, s)
        ]
        assert divided[0].position(step) == case[1] + len(before)
