"""A pipeline runner by itself, while no loop takes its results."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shardio._workers.tasks.pipeline_runner import PipelineRunner
from shardio.errors import ClosedError
from tests.loading import PATIENCE_S


@pytest.mark.parametrize("how", ["record_internal_error", "close"])
def test_the_end_of_a_line_between_a_look_at_it_and_the_wait_is_seen(how: str) -> None:
    held = threading.Event()

    def nothing_yet() -> Iterator[int]:
        held.wait()
        yield 1

    line = PipelineRunner(nothing_yet(), [], n_buffered=1)
    look, looks = line._check_open, list[int]()

    def look_and_end() -> None:
        look()
        looks.append(1)
        if len(looks) == 2:  # the last one before it waits
            line.close() if how == "close" else line.record_internal_error(ValueError("broken"))

    line._check_open = look_and_end  # type: ignore[method-assign]
    try:
        with pytest.raises(ClosedError if how == "close" else ValueError):
            line.take(PATIENCE_S)
    finally:
        held.set()
        line.close()
