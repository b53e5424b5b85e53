"""What a line does by itself, while nobody takes its results."""

from __future__ import annotations

import time

import pytest

from shardio._engine.executors import hire
from shardio._engine.line import Line
from shardio._engine.steps import Piped
from shardio._engine.user_calls import user_call
from tests.loading import PATIENCE_S


def test_behind_a_failure_the_stages_before_it_begin_nothing_any_more() -> None:
    first, second = (
        Piped(user_call("function", function), "function", 1, in_order=True, crew=crew)
        for crew, function in (("a", lambda item: item), ("b", lambda item: 1 // item))
    )
    with Line([1, 0, 1], [first, second], hire=hire, n_buffered=3) as line:
        deadline_s = time.monotonic() + PATIENCE_S
        while not line.stats().stages[-1].n_failed and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert [stage.is_halted for stage in line._stages] == [True, True, True]
        assert line.take(None) is not None
        with pytest.raises(ZeroDivisionError):
            line.take(None)
