"""Partition of an epoch among ranks: every position once, for every number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.order.ranks import RankPartition


def ranks(tail: Any, n: int, first: int, batch_size: int, world_size: int) -> list[RankPartition]:
    return [
        RankPartition(n, first, batch_size, rank, world_size, tail) for rank in range(world_size)
    ]


def shares(partition: RankPartition, step: int) -> list[int]:
    return list(range(*partition.own_range(step)))


cases = st.tuples(
    st.integers(0, 200), st.integers(0, 200), st.integers(1, 9), st.integers(1, 7)
).filter(lambda case: case[1] <= case[0])


@pytest.mark.parametrize("tail", ["short", "pad", "drop"])
@given(case=cases)
def test_ranks_visit_every_position_in_order(case: tuple[int, int, int, int], tail: str) -> None:
    n, first, batch_size, world_size = case
    divided, stride = ranks(tail, *case), batch_size * world_size
    found, first_step = list[int](), divided[0].first_step
    for step in range(first_step, max(each.stop_step for each in divided)):
        assert {each.position(step) for each in divided} == {first + len(found)}
        parts = [shares(each, step) for each in divided]
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1 and max(counts) <= batch_size
        found += [position for part in parts for position in part]
    n_dropped = (n - first) % stride if tail == "drop" else 0
    assert found == list(range(first, n - n_dropped))
    n_steps = [each.stop_step - first_step for each in divided]
    assert {each.position(first_step + max(n_steps)) for each in divided} == {first + len(found)}
    if tail == "short":  # a rank has no step without a sample
        assert all(shares(each, s) for each in divided for s in range(first_step, each.stop_step))
    else:
        whole = (n - first) // stride if tail == "drop" else -(-(n - first) // stride)
        assert set(n_steps) == {whole}


@given(case=cases, tail=st.sampled_from(["short", "pad", "drop"]), data=st.data())
def test_positions_are_those_of_the_steps_one_after_another(
    case: tuple[int, int, int, int], tail: str, data: st.DataObject
) -> None:
    for each in ranks(tail, *case):
        if each.first_step < each.stop_step:
            first = data.draw(st.integers(each.first_step, each.stop_step - 1))
            last = data.draw(st.integers(first + 1, each.stop_step))
            every = data.draw(st.integers(1, 4))
            expected = [
                p for step in range(first, last, every) for p in range(*each.read_range(step))
            ]
            assert each.positions(first, last, every).tolist() == expected
            assert each.positions(first, last, every).dtype == np.int64


def test_a_padded_step_without_a_share_reads_the_first_position_that_is_left() -> None:
    last = RankPartition(n=9, first=0, batch_size=4, rank=0, world_size=2, tail="pad")
    assert last.own_range(1) == (8, 8)
    assert last.read_range(1) == (8, 9)
    other = RankPartition(n=9, first=0, batch_size=4, rank=1, world_size=2, tail="pad")
    assert other.own_range(1) == other.read_range(1) == (8, 9)


@pytest.mark.parametrize(("first", "steps"), [(0, (0, 5)), (8, (2, 5)), (9, (2, 5)), (20, (5, 5))])
def test_steps_go_on_where_whole_ones_were_done(first: int, steps: tuple[int, int]) -> None:
    partition = RankPartition(n=20, first=first, batch_size=4)
    assert (partition.first_step, partition.stop_step) == steps
