"""One function called for item after item in workers, seen from whoever drives the flow."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio._workers.tasks.calls import ResultChunks
from shardio._workers.tasks.task_pool import TaskPool
from shardio.errors import InvalidArgument, TransformError, UnsupportedEnvironment, WorkerDied
from tests.serving.served import few_files

pytestmark = pytest.mark.usefixtures("warm_zygote")

# Generous: reached only by a test that is about to fail.
PATIENCE_S = 30.0


def drive(flow: TaskPool, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Return the values of all items, in order of completion."""
    waiting = iter(items)
    while True:
        while flow.has_room:
            try:
                flow.put(next(waiting))
            except StopIteration:
                flow.end()
        found = flow.take()
        if found is not None:
            yield found
        elif flow.is_over:
            return
        else:
            flow.wait(PATIENCE_S)


def values(function: Callable[[Any], Any], items: Iterable[Any], **options: Any) -> list[Any]:
    """All values, of two workers."""
    with TaskPool(function, 2, **options) as flow:
        found = list(drive(flow, items))
    numbers = [number for number, _ in found]
    assert len(set(numbers)) == len(numbers)
    return [value for _, value in found]


def test_items_and_values_may_be_longer_than_a_message() -> None:
    # The pickle and the header of those in the middle have about MAX_MESSAGE_BYTES.
    items = [os.urandom(n) for n in (10, *range(65_450, 65_530), 70_000, 3_000_000)]
    assert values(lambda item: item + b"!", items) == [item + b"!" for item in items]


def test_a_value_that_this_process_cannot_unpickle_is_an_error_that_says_of_which_item() -> None:
    class Unfit:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    with pytest.raises(TransformError, match=r"item 1 \(1\) cannot be unpickled.*ValueError"):
        values(lambda item: Unfit() if item else item, range(3))


def test_values_are_copied_with_one_warning_only_where_the_program_holds_all_blocks() -> None:
    with TaskPool(lambda item: np.full(300_000, item, np.uint8), 1, memory_bytes=1_500_000) as flow:
        found = drive(flow, range(40))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number, array in itertools.islice(found, 20):
                assert (array == number).all()
                del array
        assert flow.stats.n_copies == 0
        with pytest.warns(RuntimeWarning, match="values are copied: the program holds") as caught:
            kept = [array for _, array in found]
        assert len(caught) == 1
        assert 10 < flow.stats.n_copies < 20
    assert all((array == item).all() for item, array in enumerate(kept, 20))


def test_an_exception_is_raised_as_itself_with_the_item_and_the_traceback_there() -> None:
    def load(item: str) -> str:
        return {"a": item, "b": item}[item]

    with pytest.raises(KeyError, match="c") as caught:
        values(load, "abc")
    (note,) = caught.value.__notes__
    assert note.startswith("in worker ")
    assert "item 2 ('c')" in note
    assert 'return {"a": item' in note


def test_a_value_that_cannot_be_pickled_is_a_failure_of_its_item() -> None:
    with pytest.raises(TypeError, match="generator") as caught:
        values(lambda item: (each for each in item), ["abc"])
    assert "item 0 ('abc')" in caught.value.__notes__[0]


@pytest.mark.usefixtures("swept")
def test_where_no_more_files_may_be_open_it_says_so_and_leaves_none() -> None:
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    with TaskPool(str, 1):
        pass
    before = n_open()
    for n_more in range(0, 10, 2):
        with few_files(n_more), pytest.raises(UnsupportedEnvironment, match="open files"):
            TaskPool(str, 4)
        assert n_open() == before


def test_an_item_that_cannot_be_pickled_is_refused_in_few_words() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with TaskPool(lambda item: item, 1) as flow:
        for item in (threading.Lock(), [threading.Lock(), "x" * 100_000], nested):
            with pytest.raises(InvalidArgument, match="cannot be sent") as caught:
                flow.put(item)
            assert len(str(caught.value)) < 1000


def test_a_function_that_a_worker_cannot_unpickle_is_an_error_with_the_traceback_there() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            return int, ("no number",)

        def __call__(self, item: int) -> int:
            return item

    with pytest.raises(TransformError, match=r"cannot be loaded in a worker(.|\n)*no number"):
        values(Stubborn(), [1])


def test_what_two_workers_died_of_is_an_error_that_names_it(tmp_path: Path) -> None:
    def load(item: int) -> int:
        if item == 4:
            (tmp_path / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    pattern = r"2 workers crashed on item 4 \(4\) in the function; the last: worker . \(process"
    with pytest.raises(WorkerDied, match=pattern + r" \d+\) was killed by signal 9"):
        values(load, range(12))
    assert len(list(tmp_path.iterdir())) == 2


def test_any_number_of_items_that_workers_die_of_in_a_row_may_be_left_out() -> None:
    def load(item: int) -> int:
        return item if item == 5 else os._exit(3)

    with TaskPool(load, 1, max_skips=5) as flow:
        assert list(drive(flow, range(6))) == [(5, 5)]


def _taken(flow: TaskPool) -> tuple[int, Any]:
    while (found := flow.take()) is None:
        flow.wait(PATIENCE_S)
    return found


def _bury_one(flow: TaskPool) -> None:
    while not flow.stats.n_restarts:
        flow.wait(PATIENCE_S)


def test_a_generator_waiting_for_memory_outlives_its_worker(tmp_path: Path) -> None:
    def count_up(item: int) -> ResultChunks:
        (tmp_path / str(item)).touch()
        while item and not (tmp_path / "go").exists():
            time.sleep(0.001)
        return ResultChunks(zip(range(100), repeat(os.getpid())), "count_up")

    with TaskPool(count_up, 2, memory_bytes=1 << 18, in_order=False) as flow:  # of one block
        flow.put(0)
        _, portion = _taken(flow)
        flow.put(1)
        while not (tmp_path / "1").exists():
            flow.wait(0.001)
        flow.resume(0)
        os.kill(portion[0][1], signal.SIGKILL)
        _bury_one(flow)
        (tmp_path / "go").touch()
        found: dict[int, list[int]] = {0: [n for n, _ in portion], 1: []}
        while sum(map(len, found.values())) < 200:
            number, portion = _taken(flow)
            found[number] += [n for n, _ in portion]
            if flow.has_more(number):
                flow.resume(number)
    assert found == {0: [*range(100)], 1: [*range(100)]}


def test_a_nudge_is_remembered_and_takes_no_answer_away() -> None:
    with TaskPool(lambda item: item, 1) as flow:
        flow.nudge()
        flow.nudge()
        end_s = time.monotonic() + PATIENCE_S
        flow.wait(PATIENCE_S)  # there is nothing else to come
        assert time.monotonic() < end_s
        assert list(drive(flow, range(3))) == [(i, i) for i in range(3)]
    flow.nudge()  # of what is closed: nothing


@pytest.mark.usefixtures("swept")
def test_a_flow_that_is_dropped_leaves_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    flow = TaskPool(lambda item: (os.getpid(), np.zeros(100_000)), 2)
    found = drive(flow, count())
    _, (pid, array) = next(found)
    del flow, found
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
    assert not array.any()
    del array
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_worker_that_dies_idle_costs_nothing() -> None:
    with TaskPool(lambda item: os.getpid(), 1) as flow:
        found = drive(flow, count())
        _, pid = next(found)
        while flow.stats.n_put > flow.stats.n_taken:
            if flow.take() is None:
                flow.wait(PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        assert next(found)[1] != pid
