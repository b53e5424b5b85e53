"""A converter step that never ends breaks its input, not the conversion."""

from __future__ import annotations

import signal
from collections.abc import Generator
from typing import Any

import pytest

from shardio import Input
from shardio.conversion.worker import cpu_limit_s, limit_cpu


def left_s() -> float:
    return signal.getitimer(signal.ITIMER_PROF)[0]


def samples(n: int) -> Generator[dict[str, Any], None, str]:
    for number in range(n):
        assert left_s() > 1000
        yield {"n": number}
    return "done"


def test_samples_and_outcome_are_unchanged_and_each_step_has_its_own_limit() -> None:
    made = limit_cpu(samples(3), 2000)
    found = []
    while True:
        try:
            found.append(next(made))
        except StopIteration as end:
            assert end.value == "done"
            break
        assert left_s() > 1000
    assert found == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert left_s() == 0


@pytest.mark.parametrize("n_steps", [0, 1])
def test_the_limit_ends_with_the_samples(n_steps: int) -> None:
    made = limit_cpu(samples(2), 2000)
    for _ in range(n_steps):
        next(made)
    made.close()
    assert left_s() == 0


def test_large_inputs_have_a_higher_limit() -> None:
    part = Input("b", "b", 3 << 20, -1)
    assert cpu_limit_s(60, Input("a", "a", 5 << 20, -1, parts=(part,))) == 68
