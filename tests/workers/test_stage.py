from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardio._workers.tasks.stage import SourceItem, Stage, StageJob, user_call


def _entry(i: int) -> tuple[SourceItem, int]:
    return SourceItem(i, i, i, i + 1), i


def _many(item: int) -> Iterator[int]:
    yield item


def _stage(concurrency: int = 2, function: Any = abs, **options: Any) -> Stage:
    return Stage("stage", user_call("function", function), concurrency, **options)


def _values(stage: Stage) -> list[Any]:
    """Take what is out of a stage."""
    found = [value for _, value in stage.outputs]
    stage.outputs.clear()
    return found


def _begin_two(stage: Stage, n_items: int) -> tuple[StageJob, StageJob]:
    """Put n items, and begin the jobs of the first two."""
    for i in range(n_items):
        stage.put(_entry(i))
    first, second = stage.begin(), stage.begin()
    assert first is not None and second is not None
    return first, second


def _drive(stage: Stage, n_items: int, draw: Any) -> list[Any]:
    """Put items through a stage, of which each gives `item % 3` results, in any order of events."""
    waiting, running, taken = list(range(n_items)), list[StageJob](), []
    while not (stage.is_over and stage.has_reported_end):
        events: list[Any] = []
        if waiting and stage.has_room:
            events.append("put")
        if not waiting and not stage.has_reported_end:
            events.append("end")
        if stage.has_work:
            events.append("begin")
        if stage.outputs:
            events.append("take")
        events += [("go on", job) for job in running]
        match draw(st.sampled_from(events)):
            case "put":
                stage.put(_entry(waiting.pop(0)))
            case "end":
                stage.end(None)
                stage.has_reported_end = True
            case "begin":
                job = stage.begin()
                assert job is not None
                running.append(job)
            case "take":
                taken.append(stage.outputs.popleft()[1])
            case (_, job):
                running.remove(job)
                if job.n_yielded == job.item % 3:
                    stage.finish(job)
                else:
                    stage.add_result(job, (job.item, job.n_yielded))
                    if stage.may_continue(job):
                        running.append(job)
    return taken + _values(stage)


@given(st.integers(1, 4), st.integers(0, 12), st.data())
def test_results_come_in_order(concurrency: int, n_items: int, data: st.DataObject) -> None:
    stage = _stage(concurrency, in_order=True, function=_many)
    expected = [(item, i) for item in range(n_items) for i in range(item % 3)]
    assert _drive(stage, n_items, data.draw) == expected


@given(st.integers(1, 4), st.integers(0, 12), st.data())
def test_results_without_order(concurrency: int, n_items: int, data: st.DataObject) -> None:
    stage = _stage(concurrency, function=_many)
    expected = [(item, i) for item in range(n_items) for i in range(item % 3)]
    assert sorted(_drive(stage, n_items, data.draw)) == expected


def test_in_order_a_slow_job_holds_up_as_many_as_may_be_under_way_and_no_more() -> None:
    stage = _stage(2, in_order=True)
    for i in range(9):
        stage.put(_entry(i))
    slow = stage.begin()
    n_done = 0
    while (job := stage.begin()) is not None:
        stage.add_result(job, job.item)
        stage.finish(job)
        n_done += 1
    assert (n_done, _values(stage)) == (3, [])
    assert slow is not None
    stage.add_result(slow, slow.item)
    stage.finish(slow)
    assert _values(stage) == [0, 1, 2, 3]


def test_behind_a_failure_no_generator_goes_on() -> None:
    stage = _stage(2, function=_many)
    first, second = _begin_two(stage, 2)
    for value in range(2):
        stage.add_result(first, value)
    assert not stage.may_continue(first)
    stage.fail(second, ValueError("x"))
    assert _values(stage) == [0, 1]
    assert (stage.is_over, stage.has_work, stage.begin()) == (True, False, None)
