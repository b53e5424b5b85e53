"""Promises of DataLoader and Pipeline beyond those of SPDL."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardio import DataLoader, InvalidArgument, Pipeline, WorkerDied
from shardio._workers.processes import stack_dumps
from shardio._workers.tasks import executors, pipeline_runner
from shardio.errors import BatchTimeout, ClosedError, TransformError
from shardio.pipeline import MapIterator
from tests.loading import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.usefixtures("warm_zygote")

POOL = ThreadPoolExecutor(1)


def _plus_one(item: int) -> int:
    return item + 1


def _twice(item: int) -> Iterator[tuple[int, int]]:
    yield item, 0
    yield item, 1


async def _plus_one_awaited(item: int) -> int:
    await asyncio.sleep(0)
    return item + 1


async def _twice_awaited(item: int) -> AsyncIterator[tuple[int, int]]:
    for i in range(2):
        await asyncio.sleep(0)
        yield item, i


# --- what goes through --------------------------------------------------------------------------


PAIRS = [(item, i) for item in range(50) for i in range(2)]


@pytest.mark.parametrize(
    ("function", "executor", "expected"),
    [
        (_plus_one, None, list(range(1, 51))),
        (_plus_one_awaited, None, list(range(1, 51))),
        (_twice, None, PAIRS),
        (_twice_awaited, None, PAIRS),
        (_twice, "process", PAIRS),
    ],
)
@pytest.mark.parametrize("order", ["input", "completion"])
def test_a_function_is_called_for_every_item_and_every_result_goes_on_by_itself(
    function: Any, executor: Any, expected: list[Any], order: Any
) -> None:
    pipeline = Pipeline(range(50)).pipe(function, concurrency=4, order=order, executor=executor)
    found = list(pipeline)
    assert (found if order == "input" else sorted(found)) == expected


def test_a_source_may_be_async() -> None:
    async def source() -> AsyncIterator[int]:
        for item in range(20):
            await asyncio.sleep(0)
            yield item

    class Source:
        def __aiter__(self) -> AsyncIterator[int]:
            return source()

    pipeline = Pipeline(Source()).pipe(_plus_one)
    assert list(pipeline) == list(pipeline) == list(range(1, 21))


def test_an_async_source_without_end_is_left_at_once() -> None:
    async def source() -> AsyncIterator[int]:
        for item in itertools.count():
            await asyncio.sleep(3600 if item == 3 else 0)
            yield item

    assert list(itertools.islice(Pipeline(source()).pipe(_plus_one), 3)) == [1, 2, 3]
    assert _all_gone()


def test_lists_are_gathered_and_taken_apart() -> None:
    pipeline = Pipeline(range(10)).aggregate(3).pipe(sorted).disaggregate().aggregate(4).sink(2)
    assert list(pipeline) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(Pipeline(range(5)).aggregate(2, drop_last=True)) == [[0, 1], [2, 3]]


def test_results_come_as_they_are_ready_unless_an_order_is_asked_for() -> None:
    let_go = threading.Event()

    def first_one_waits(item: int) -> int:
        if item == 0:
            let_go.wait(PATIENCE_S)
        return item

    iterator = iter(DataLoader(range(3), preprocessor=first_one_waits, num_threads=2))
    assert next(iterator) == 1
    let_go.set()
    assert sorted(iterator) == [0, 2]


def test_none_drops_an_item_and_is_counted() -> None:
    loader = DataLoader(range(10), preprocessor=lambda item: item if item % 2 else None)
    assert sorted(loader) == [1, 3, 5, 7, 9]
    assert loader.stats().stages[1].n_dropped == 5


def test_a_mapping_looks_items_up() -> None:
    assert list(Pipeline(["a", "b"]).pipe({"a": 1, "b": 2})) == [1, 2]


def test_a_pipeline_is_not_changed_by_what_is_added_to_it() -> None:
    base = Pipeline(range(4))
    longer = base.pipe(_plus_one)
    assert (list(base), list(longer)) == ([0, 1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("options", [{}, {"on_error": "skip", "max_skips": 9}])
def test_what_the_source_raises_comes_behind_what_it_has_given(options: dict[str, Any]) -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise OSError("gone")

    found = []
    with pytest.raises(OSError, match="gone") as caught:
        for items in Pipeline(source(), **options).pipe(_plus_one, concurrency=3).aggregate(2):
            found += items
    assert len(found) == 4 and {*found} < {1, 2, 3, 4, 5}  # a list that lacks items is dropped
    assert caught.value.__notes__ == ["in source, item 5"]


@pytest.mark.parametrize("argument", ["aggregator", "transfer_fn"])
def test_a_list_of_which_a_later_function_fails_is_skipped_whole(argument: str) -> None:
    def fail(items: list[int]) -> int:
        return sum(items) // (items[0] - 2)

    options: dict[str, Any] = {argument: fail, "on_error": "skip", "max_skips": 1}
    loader = DataLoader(range(6), batch_size=2, output_order="input", **options)
    assert list(loader) == [-1, 4]
    assert [(s.index, s.item, s.error) for s in loader.stats().skipped] == [
        (3, "[2, 3]", "ZeroDivisionError")
    ]


@pytest.mark.parametrize("executor", [None, "process"])
def test_a_coroutine_that_nobody_would_await_is_an_error(executor: Any) -> None:
    with pytest.raises(TransformError, match="define it with `async def`"):
        list(Pipeline(range(3)).pipe(lambda item: _plus_one_awaited(item), executor=executor))


@pytest.mark.parametrize("order", ["input", "completion"])
def test_only_a_few_items_are_taken_ahead_of_the_loop(order: Any) -> None:
    taken = []

    def source() -> Iterator[int]:
        for i in range(10_000):
            taken.append(i)
            yield i

    pipeline = Pipeline(source()).pipe(_plus_one, concurrency=2, order=order).sink(1)
    for n_got, _ in zip(range(1, 300), pipeline, strict=False):
        assert len(taken) < n_got + 20


def test_a_generator_without_end_is_not_run_ahead_of_the_loop() -> None:
    given = []

    def count_up(item: int) -> Iterator[int]:
        while True:
            given.append(item)
            yield item

    pipeline = Pipeline(range(4)).pipe(count_up, concurrency=4, order="input").sink(1)
    for _, found in zip(range(100), pipeline, strict=False):
        assert found == 0
    assert len(given) < 100 + 4 * 20


def test_threads_may_each_iterate_one_loader_or_share_an_iterator_to_its_end() -> None:
    loader = DataLoader(range(60), preprocessor=_plus_one, batch_size=7, output_order="input")
    expected = list(loader)
    iterator = iter(Pipeline(range(300)).pipe(_plus_one).sink(1))
    with ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(lambda _: list(loader), range(8)))
        shares = list(pool.map(lambda _: list(iterator), range(3)))
    assert sorted(itertools.chain(*shares)) == list(range(1, 301))


def test_preprocessor_and_aggregator_have_so_many_threads_together() -> None:
    barrier = threading.Barrier(3)
    idents = set()

    def note(item: Any) -> Any:
        idents.add(threading.get_ident())
        return item

    def meet(item: int) -> int:
        barrier.wait(PATIENCE_S)  # all three are needed
        note(item)
        return item

    loader = DataLoader(range(30), preprocessor=meet, batch_size=2, aggregator=note, num_threads=3)
    assert len(list(loader)) == 15
    assert len(idents) == 3


@pytest.mark.parametrize("buffer_size", [1, 40])
def test_so_many_results_wait_for_the_loop_and_no_more(buffer_size: int) -> None:
    n_made, is_full = 0, threading.Event()

    def transfer(item: int) -> int:
        nonlocal n_made
        n_made += 1
        if n_made == 1 + buffer_size:
            is_full.set()
        return item

    loader = DataLoader(range(100), transfer_fn=transfer, buffer_size=buffer_size)
    for n_got, _ in enumerate(loader, 1):
        assert is_full.wait(PATIENCE_S)
        assert n_made <= n_got + buffer_size + 2  # one is out, one is being made


def test_all_calls_of_an_async_function_run_at_once() -> None:
    n_inside = 0

    async def meet(item: int) -> int:
        nonlocal n_inside
        n_inside += 1
        while n_inside % 5:
            await asyncio.sleep(0)
        return item

    assert list(Pipeline(range(5)).pipe(meet, concurrency=5, order="input")) == list(range(5))


# --- in processes, and in executors -------------------------------------------------------------


def _array(item: int) -> tuple[np.ndarray[Any, Any], int]:
    return np.full((200, 200), item), os.getpid()


def test_arrays_of_processes_come_in_the_order_of_input(tmp_path: Path) -> None:
    def meet(item: int) -> tuple[np.ndarray[Any, Any], int]:
        (tmp_path / str(item)).touch()
        end_s = time.monotonic() + PATIENCE_S
        while item < 2 and not (tmp_path / str(1 - item)).exists():  # both workers are needed
            assert time.monotonic() < end_s
            time.sleep(0.001)
        return _array(item)

    loader = DataLoader(
        range(12), preprocessor=meet, num_threads=2, executor="process", output_order="input"
    )
    found = list(loader)
    assert [int(array[0, 0]) for array, _ in found] == list(range(12))
    assert os.getpid() not in {pid for _, pid in found}


def test_a_long_generator_in_a_process_is_not_run_ahead_of_the_loop(tmp_path: Path) -> None:
    def count_up(item: int) -> Iterator[int]:
        with (tmp_path / str(item)).open("ab", 0) as given:
            for number in range(100_000):
                given.write(b".")
                yield number

    pipeline = Pipeline(range(3)).pipe(count_up, executor="process", order="input").sink(1)
    assert list(itertools.islice(pipeline, 1000)) == list(range(1000))
    n_given = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert n_given.pop("0") < 1000 + 300
    assert all(n < 300 for n in n_given.values())


class LateLock:
    """A lock, for which a thread that has called `hold_next` waits until `released` is set."""

    def __init__(self) -> None:
        self._lock, self._local = threading.Lock(), threading.local()
        self.is_held, self.released = threading.Event(), threading.Event()
        self.locked = self._lock.locked

    def hold_next(self) -> None:
        self._local.waits = True

    def __enter__(self) -> None:
        if self._local.__dict__.pop("waits", False):
            self.is_held.set()
            assert self.released.wait(PATIENCE_S)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("fails", [False, True])
def test_results_that_are_ready_together_keep_their_order(
    *, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = LateLock()

    def function(item: int) -> int:
        if item == 0:
            lock.hold_next()  # the result is ready, but its thread cannot deliver it yet
        elif item == 1:
            assert lock.is_held.wait(PATIENCE_S)
            if fails:
                raise KeyError("1")
        return item

    made = [lock]
    fake = SimpleNamespace(
        Lock=lambda: made.pop() if made else threading.Lock(), RLock=threading.RLock
    )
    monkeypatch.setattr(pipeline_runner, "threading", fake)
    found = iter(DataLoader(range(2), preprocessor=function, num_threads=2))
    try:
        assert next(found) == 0
    finally:
        lock.released.set()
    if fails:
        with pytest.raises(KeyError):
            next(found)
    else:
        assert next(found) == 1


@pytest.mark.parametrize("order", ["input", "completion"])
def test_the_results_of_long_generators_in_processes_all_come(order: Any) -> None:
    def many(item: int) -> Iterator[tuple[int, Any]]:
        for i in range(40 * item):
            yield item, np.full(5000 if i % 9 == 5 else 2, i)

    pipeline = Pipeline(range(8)).pipe(many, concurrency=2, executor="process", order=order)
    found = [(item, int(array[-1])) for item, array in pipeline]
    assert (found if order == "input" else sorted(found)) == [
        (item, i) for item in range(8) for i in range(40 * item)
    ]


@pytest.mark.parametrize("n", [10, 50_000])
def test_an_array_that_a_generator_uses_again_arrives_as_it_was(n: int) -> None:
    def refill(item: int) -> Iterator[Any]:
        array = np.empty(n, np.uint8)
        for i in range(20):
            array[:] = i
            yield array

    found = [int(array.max()) for array in Pipeline([0]).pipe(refill, executor="process")]
    assert found == list(range(20))


@pytest.mark.parametrize("at", ["at work", "suspended"])
def test_a_generator_whose_worker_is_killed_goes_on_in_another(tmp_path: Path, at: str) -> None:
    def count_up(item: int) -> Iterator[tuple[int, int]]:
        for i in range(500):
            if at == "at work" and i == 300 and item == 2 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield item * 500 + i, os.getpid()

    found = []
    pipeline = Pipeline(range(4)).pipe(count_up, concurrency=2, executor="process", order="input")
    for number, pid in pipeline.sink(1):
        found.append(number)
        if at == "suspended" and len(found) in (10, 700):  # with those of later items
            (tmp_path / "killed").touch()
            os.kill(pid, signal.SIGKILL)
    assert found == list(range(2000))
    assert (tmp_path / "killed").exists()


def _breaks_at_one(item: int) -> Iterator[tuple[int, int]]:
    yield item, 0
    if item == 1:
        raise ValueError("broken")
    yield item, 1


def _breaks_by_its_result(item: int) -> Iterator[Any]:
    yield item, 0
    yield threading.Lock() if item == 1 else (item, 1)


async def _breaks_at_one_awaited(item: int) -> AsyncIterator[tuple[int, int]]:
    for each in _breaks_at_one(item):
        yield each


@pytest.mark.parametrize(
    ("function", "executor"),
    [
        (_breaks_at_one, None),
        (_breaks_at_one, "process"),
        (_breaks_at_one, POOL),
        (_breaks_at_one_awaited, None),
    ],
    ids=["thread", "process", "executor", "async"],
)
def test_what_a_generator_gave_before_it_failed_is_delivered(function: Any, executor: Any) -> None:
    before = [(0, 0), (0, 1), (1, 0)]
    options: dict[str, Any] = {"executor": executor, "order": "input"}
    lenient = Pipeline(range(3), on_error="skip", max_skips=1).pipe(function, **options)
    assert list(lenient) == [*before, (2, 0), (2, 1)]
    assert [(s.index, s.item, s.text) for s in lenient.stats().skipped] == [(1, "1", "broken")]
    found = []
    with pytest.raises(ValueError, match="broken") as caught:
        for each in Pipeline(range(3)).pipe(function, **options):
            found.append(each)
    assert found == before
    assert caught.value.__notes__[-1] == f"in {function.__name__}, item 1 (1)"


def test_results_before_one_that_cannot_be_pickled_are_delivered() -> None:
    lenient = Pipeline(range(3), on_error="skip", max_skips=1)
    pipeline = lenient.pipe(_breaks_by_its_result, executor="process", order="input")
    assert list(pipeline) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert [(s.index, s.error) for s in pipeline.stats().skipped] == [(1, "TypeError")]


@dataclass(frozen=True)
class _Frozen(Exception):
    field: int = 1


class _Untold(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("in its text")


@pytest.mark.parametrize("is_async", [False, True])
def test_exceptions_of_any_class_are_raised_or_skipped(*, is_async: bool) -> None:
    def fail(item: int) -> int:
        if item < 2:
            raise [_Frozen, _Untold][item]
        return item

    async def fail_awaited(item: int) -> int:
        return fail(item)

    function: Any = fail_awaited if is_async else fail
    lenient = DataLoader(range(4), preprocessor=function, on_error="skip", max_skips=2, timeout=60)
    assert sorted(lenient) == [2, 3]
    assert sorted(s.error for s in lenient.stats().skipped) == ["TransformError", "_Frozen"]
    with pytest.raises(_Frozen) as caught:
        list(DataLoader([0], preprocessor=function, timeout=60))
    assert caught.value.__notes__ == ["in preprocessor, item 0 (0)"]
    with pytest.raises(TransformError, match="raised _Untold: <its text is not available"):
        list(DataLoader([1], preprocessor=function, timeout=60))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_what_is_no_exception_is_a_failure_of_its_item_in_a_process(kind: Any) -> None:
    def end(item: int) -> int:
        if item == 1:
            raise kind
        return item

    def end_midway(item: int) -> Iterator[int]:
        yield end(item)

    lenient = Pipeline(range(3), on_error="skip", max_skips=2)
    pipeline = lenient.pipe(end, executor="process").pipe(end_midway, executor="process")
    assert sorted(pipeline) == [0, 2]
    (skipped,) = pipeline.stats().skipped
    assert (skipped.item, skipped.text) == ("1", f"end raised {kind.__name__}")


class _Exiting:
    """An item that ends whoever pickles it."""

    def __reduce__(self) -> Any:
        raise SystemExit(5)


def test_what_ends_the_pickling_of_an_item_is_a_failure_of_it() -> None:
    items = [1, _Exiting(), 3]
    options: Any = {"executor": "process", "num_threads": 1, "output_order": "input"}
    with pytest.raises(TransformError, match="SystemExit: 5") as caught:
        list(DataLoader(items, preprocessor=lambda item: item, **options))
    assert "preprocessor, item 1 (" in caught.value.__notes__[0]
    options |= {"on_error": "skip", "max_skips": 1}
    assert list(DataLoader(items, preprocessor=lambda item: item, **options)) == [1, 3]


def test_what_a_thread_of_a_pipeline_dies_of_does_not_end_the_program() -> None:
    class Odd:
        def __repr__(self) -> str:
            if threading.current_thread() is threading.main_thread():
                return "Odd"
            raise SystemExit(5)

    with pytest.raises(TransformError, match="SystemExit: 5"):
        list(Pipeline([Odd()]).pipe(lambda item: 1 // 0))


def _stuck_in_a_process(marker: str) -> int:
    if marker:
        Path(marker).touch()
        time.sleep(3600)
    return 0


def test_overdue_process_calls_show_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dumps, "_ANSWER_TIMEOUT_S", PATIENCE_S)  # however busy the machine is
    monkeypatch.setattr(executors, "_STACKS_TIMEOUT_S", PATIENCE_S)
    marker = tmp_path / "stuck"
    pipeline = Pipeline(["", str(marker)]).pipe(_stuck_in_a_process, executor="process")
    iterator: Any = iter(pipeline)
    assert next(iterator) == 0
    end_s = time.monotonic() + PATIENCE_S
    while not marker.exists():
        assert time.monotonic() < end_s
        time.sleep(0.001)
    iterator._timeout_s = 0.05
    late = r"\n_stuck_in_a_process, item 1 \(.*\), for \d"
    with pytest.raises(
        BatchTimeout, match=rf"(?s){late}.*\nworker 0 \(process \d+\):\n.* in _stuck"
    ):
        next(iterator)


def _dies_of_three(item: int) -> int:
    if item == 3:
        os._exit(0)
    return item


def test_a_worker_that_dies_is_an_error_that_names_the_item_or_is_skipped() -> None:
    pipeline = Pipeline(range(6)).pipe(_dies_of_three, executor="process", order="input")
    found = []
    with pytest.raises(WorkerDied, match=r"item 3 \(3\)"):
        for item in pipeline:
            found.append(item)
    assert found == [0, 1, 2]
    lenient = Pipeline(range(6), on_error="skip", max_skips=1)
    assert sorted(lenient.pipe(_dies_of_three, executor="process")) == [0, 1, 2, 4, 5]


def test_an_executor_of_the_program_does_the_work_and_is_not_ended() -> None:
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as executor:
        pipeline = Pipeline(range(20)).pipe(
            lambda item: (item, threading.current_thread().name[:4]),
            concurrency=3,
            executor=executor,
            order="input",
        )
        assert list(pipeline) == [(item, "mine") for item in range(20)]
        assert executor.submit(int, 5).result() == 5
    with pytest.raises(RuntimeError, match="after shutdown"):
        list(pipeline)


def test_calls_that_an_executor_has_not_begun_are_not_made_once_a_loader_is_closed() -> None:
    began, may_end, called = threading.Event(), threading.Event(), list[int]()

    def wait(item: int) -> None:
        called.append(item)
        began.set()
        may_end.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as executor:
        options: dict[str, Any] = {"num_threads": 4, "executor": executor}
        with DataLoader(range(9), preprocessor=wait, **options) as loader:
            iterator = iter(loader)
            assert began.wait(PATIENCE_S)
        may_end.set()
    assert called == [0]
    with pytest.raises(ClosedError):
        next(iterator)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda P: P("out/"), r"source must be an iterable.*ShardLoader\('out/', batch_size\)"),
        (lambda P: P(5), "source must be iterable"),
        (lambda P: P(MapIterator), "found <class 'shardio"),
        (lambda P: P([1], max_skips=1), "max_skips is for on_error='skip'"),
        (lambda P: P([1]).pipe(None), "function must be a function"),
        (lambda P: P([1]).pipe(str, concurrency=0), "concurrency must be an integer"),
        (lambda P: P([1]).pipe(str, order="random"), "order must be one of"),
        (lambda P: P([1]).pipe(str, executor="thread"), "executor must be None"),
        (lambda P: P([1]).pipe(str, name=5), "name must be a string"),
        (
            lambda P: P([1]).pipe(_plus_one_awaited, executor="process"),
            "runs in an event loop.*'process'",
        ),
        (lambda P: P([1]).pipe(_plus_one_awaited, executor=POOL), "event loop; found executor=<"),
        (lambda P: P([1]).aggregate(0), "n must be an integer from 1"),
        (lambda P: P([1]).aggregate(2, drop_last=None), "drop_last must be"),
        (lambda P: P([1]).sink(0), "buffer must be an integer from 1"),
        (lambda P: P([1]).sink(timeout=0), "timeout must be a number of seconds"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_runs(make: Any, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        make(Pipeline)


# --- the end ------------------------------------------------------------------------------------


def _ours() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("shardio ")}


def _all_gone() -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while _ours() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return not _ours()


@pytest.mark.parametrize("function", [_plus_one, _plus_one_awaited, _twice, _twice_awaited])
def test_no_thread_is_left_of_an_iteration_that_is_left(function: Any) -> None:
    for _ in Pipeline(range(100)).pipe(function, concurrency=3):
        break
    for _ in Pipeline(range(10)).pipe(function, concurrency=3):
        pass
    assert _all_gone()


@pytest.mark.parametrize("where", ["source", "function"])
def test_what_a_generator_does_at_its_end_does_not_hold_up_break(where: str) -> None:
    may_end, ended_by = threading.Event(), list[tuple[str, bool]]()

    def endless(item: int = 0) -> Iterator[int]:
        try:
            while True:
                yield item
        finally:
            ended_by.append((threading.current_thread().name, may_end.wait(PATIENCE_S)))

    class Source:
        def __iter__(self) -> Iterator[int]:
            return endless()

    pipeline = Pipeline(Source()) if where == "source" else Pipeline(range(3)).pipe(endless)
    for _ in pipeline.sink(1):
        break
    may_end.set()
    assert _all_gone()
    name = f"shardio {'source' if where == 'source' else 'endless'}"
    assert ended_by == [(name, True)]


def test_a_generator_that_gives_a_result_after_the_iteration_was_left_ends_in_its_thread() -> None:
    may_go_on, ended_by = threading.Event(), list[str]()

    def two(item: int) -> Iterator[int]:
        try:
            yield item
            may_go_on.wait(PATIENCE_S)
            yield item
        finally:
            ended_by.append(threading.current_thread().name)

    for _ in Pipeline(range(1)).pipe(two).sink(1):
        break
    may_go_on.set()
    assert _all_gone()
    assert ended_by == ["shardio two"]


@pytest.mark.parametrize("where", ["source", "function"])
def test_an_async_generator_comes_to_its_end_when_its_iteration_is_left(where: str) -> None:
    has_ended = threading.Event()

    async def endless(item: int = 0) -> AsyncIterator[int]:
        try:
            while True:
                yield item
        finally:
            await asyncio.sleep(0)
            has_ended.set()

    pipeline = Pipeline(endless()) if where == "source" else Pipeline(range(3)).pipe(endless)
    for _ in pipeline.sink(1):
        break
    assert has_ended.wait(PATIENCE_S)


def test_an_iterator_in_a_cycle_is_ended_by_the_collector() -> None:
    class Holder:
        pass

    holder: Any = Holder()
    holder.itself, holder.iterator = holder, iter(Pipeline(range(100)).pipe(_plus_one))
    next(holder.iterator)
    del holder
    gc.collect()
    assert _all_gone()


def test_nothing_of_the_programs_is_kept_once_it_is_over() -> None:
    class Item:
        pass

    items = [Item() for _ in range(20)]
    refs = [weakref.ref(item) for item in items]
    loader = DataLoader(items, preprocessor=lambda item: item, batch_size=2)
    next(iter(loader))
    assert _all_gone()
    items.clear()
    gc.collect()
    assert [ref for ref in refs if ref()] == []


class _Seen:
    """The local values of a function when it fails."""


def _failing(refs: list[weakref.ref[_Seen]]) -> None:
    seen = _Seen()
    refs.append(weakref.ref(seen))
    raise ValueError(id(seen))


@pytest.mark.parametrize("where", ["source", "function", "coroutine", "aggregator"])
def test_nothing_that_an_error_has_seen_is_kept_once_it_was_raised(where: str) -> None:
    refs: list[weakref.ref[_Seen]] = []

    def source() -> Iterator[int]:
        yield 0
        if where == "source":
            _failing(refs)

    async def await_failure(item: int) -> None:
        _failing(refs)

    functions: dict[str, dict[str, Any]] = {
        "source": {},
        "function": {"preprocessor": lambda item: _failing(refs)},
        "coroutine": {"preprocessor": await_failure},
        "aggregator": {"aggregator": lambda batch: _failing(refs), "batch_size": 1},
    }
    loader: Any = DataLoader(source(), **functions[where])
    gc.disable()  # it would find what leads to itself, some time
    try:
        with contextlib.suppress(ValueError):
            list(loader)
        assert _all_gone()
        assert [ref() for ref in refs] == [None]
    finally:
        gc.enable()
    assert loader.stats().stages


def test_an_iterator_is_over_after_an_error_and_closing_ends_what_is_under_way() -> None:
    failing = iter(Pipeline([1, 0, 1]).pipe(lambda item: 1 // item))
    assert next(failing) == 1
    with pytest.raises(ZeroDivisionError):
        next(failing)
    assert list(failing) == []
    with Pipeline(range(100)).pipe(_plus_one) as pipeline:
        iterator = iter(pipeline)
        assert next(iterator) == 1
    with pytest.raises(ClosedError):
        next(iterator)
    with pytest.raises(ClosedError):
        iter(pipeline)


# An iteration is under way, in functions that do not end, or only its threads wait.
ENDS = """
import asyncio, threading, time
from shardio import Pipeline

async def sleep(item):
    await asyncio.sleep(3600 * item)
    return item

def stuck(item):
    time.sleep(3600 * item)
    return 1

for function, executor in [
    (stuck, None), (sleep, None), (lambda item: item + 1, None), (stuck, "process")
]:
    iterator = iter(Pipeline(range(9)).pipe(function, concurrency=2, executor=executor))
    next(iterator)
    globals()[f"kept_{id(iterator)}"] = iterator
print("done")
"""


def test_a_program_ends_whatever_is_under_way() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", ENDS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_fork_in_the_midst_of_an_iteration_cannot_go_on_with_it() -> None:
    iterator = iter(Pipeline(range(100)).pipe(_plus_one))
    next(iterator)
    pid = os.fork()
    if pid == 0:
        try:
            next(iterator)
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert next(iterator) == 2


# --- position -----------------------------------------------------------------------------------


def _resumed(make: Any, n_taken: int) -> tuple[list[Any], list[Any]]:
    """Return a loader's results, and those of one left midway and another that resumes."""
    first, second = make(), make()
    iterator = iter(first)
    taken = [next(iterator) for _ in range(n_taken)]
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    return list(make()), taken + list(second)


class Counter:
    """A source that can say where it is, and can only go on from there."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 20:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> int:
        return self.at

    def load_state_dict(self, state: int) -> None:
        self.at = state


LETTERS = dict(enumerate("abcdefghijklmnopqrst"))
SOURCES: dict[str, Any] = {
    "sequence": lambda: range(20),
    "map": lambda: MapIterator(LETTERS),
    "state": Counter,
}
FUNCTIONS: dict[str, Any] = {
    "one": lambda item: [item],
    "many": _twice,
    "dropped": lambda item: None if item in (1, 4, 7, "b", "e", "h") else item,
}


@pytest.mark.parametrize("n_taken", [0, 1, 3, 6])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_loader_goes_on_behind_the_last_result(source: str, function: str, n_taken: int) -> None:
    def make() -> DataLoader:
        options: dict[str, Any] = {"batch_size": 3, "transfer_fn": tuple, "output_order": "input"}
        return DataLoader(SOURCES[source](), preprocessor=FUNCTIONS[function], **options)

    whole, resumed = _resumed(make, n_taken)
    assert resumed == whole


@pytest.mark.parametrize("executor", [None, "process"])
def test_resuming_within_the_results_of_a_failed_generator(executor: Any) -> None:
    def make() -> DataLoader:
        options: dict[str, Any] = {"num_threads": 1, "on_error": "skip", "max_skips": 1}
        options |= {"executor": executor, "output_order": "input"}
        return DataLoader(range(4), preprocessor=_breaks_at_one, **options)

    whole, resumed = _resumed(make, 3)
    assert resumed == whole == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]


def test_the_position_is_that_of_the_latest_iteration() -> None:
    loader = DataLoader(range(9), output_order="input")
    earlier, latest = iter(loader), iter(loader)
    assert [next(latest), next(earlier), next(earlier)] == [0, 0, 1]
    loader.load_state_dict(loader.state_dict())
    assert [next(latest), next(iter(loader))] == [1, 1]


def test_after_its_end_a_loader_is_at_its_beginning() -> None:
    loader = DataLoader(range(4), output_order="input")
    assert list(loader) == [0, 1, 2, 3]
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("source", "options", "found"),
    [
        (range(3), {"output_order": "completion"}, "output_order='input'"),
        ((i for i in range(3)), {"output_order": "input"}, "cannot resume in the middle"),
    ],
)
def test_position_needs_order_and_a_resumable_source(source: Any, options: Any, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        DataLoader(source, **options).state_dict()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"n_items": 5}, "a source of 5 items; this one has 3"),
        ({"version": 2}, r"state must be a result of DataLoader.state_dict\(\); found"),
        ({"item": -1}, "state\\['item'\\] must be"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], found: str) -> None:
    loader = DataLoader(range(3), output_order="input")
    with pytest.raises(InvalidArgument, match=found):
        loader.load_state_dict(loader.state_dict() | change)


# --- length, figures, mappings ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "preprocessor", "found"),
    [
        ((i for i in range(3)), None, "the source has no length"),
        (range(3), _twice, "a generator function"),
    ],
)
def test_unknown_length_is_a_type_error(source: Any, preprocessor: Any, found: str) -> None:
    loader = DataLoader(source, preprocessor=preprocessor)
    with pytest.raises(TypeError, match=found):
        len(loader)
    assert loader


def test_the_figures_of_a_pass_count_what_went_through_each_stage() -> None:
    loader = DataLoader(
        range(10), preprocessor=_plus_one, batch_size=4, aggregator=sum, transfer_fn=str
    )
    assert loader.stats().stages == ()
    assert len(list(loader)) == 3
    stats = loader.stats()
    assert [(stage.name, stage.n_in, stage.n_out) for stage in stats.stages] == [
        ("source", 10, 10),
        ("preprocessor", 10, 10),
        ("aggregator", 3, 3),
        ("transfer_fn", 3, 3),
    ]
    assert (stats.n_results, stats.n_skipped) == (3, 0)
    assert 0 < stats.waiting_s <= stats.elapsed_s
    assert all(stage.busy_s > 0 and stage.waiting_s >= 0 for stage in stats.stages)
    assert stats.as_json()["stages"][1]["n_busy"] == stats.stages[1].n_busy


def test_a_map_iterator_gives_values_in_the_order_of_its_sampler() -> None:
    values = {"a": 1, "b": 2, "c": 3}
    assert list(MapIterator(values)) == [1, 2, 3]
    backwards = MapIterator(values, ["c", "a"])
    assert list(backwards) == list(backwards) == [3, 1]
    assert len(MapIterator(values, ["c", "a"])) == 2
    assert list(MapIterator([5, 6, 7])) == [5, 6, 7]
    loader = DataLoader(MapIterator(values, "cab"), preprocessor=_plus_one, num_threads=1)
    assert list(loader) == [4, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((5,), "mapping must be"),
        ((dict,), "mapping must be"),
        (({}, 5), "sampler must be iterable"),
        (({}, list), "sampler must be iterable"),
    ],
)
def test_a_map_iterator_refuses_what_it_cannot_use(arguments: Any, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        MapIterator(*arguments)
