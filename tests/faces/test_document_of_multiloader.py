"""The document of webdataset's MultiLoader holds for ours, with its additions."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import InvalidArgument, MultiLoader, WorkerDied
from shardio._workers.processes import stack_dumps
from shardio.errors import BatchTimeout, ClosedError, TooManySkipped, UnsupportedEnvironment
from shardio.multi import WorkerInfo, worker_info
from tests.faces.multi_datasets import (
    NEEDS_ZEROMQ,
    Broken,
    Count,
    Endless,
    Given,
    Half,
    Made,
    Odd,
    OneArray,
    Shared,
    die,
    fail,
    hang,
)
from tests.faults.scene import PATIENCE_S

pytestmark = [NEEDS_ZEROMQ, pytest.mark.usefixtures("warm_zygote")]


# From 3.12 on Python says so where this process has threads, as those of NumPy.
FORKS = pytest.mark.filterwarnings("ignore:.*is multi-threaded:DeprecationWarning")


# --- the document ---------------------------------------------------------------------------


def test_its_parameters_are_those_of_the_document() -> None:
    found = inspect.signature(MultiLoader).parameters.values()
    documented = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert documented[0].default is inspect.Parameter.empty
    assert ", ".join(f"{p.name}={p.default!r}" for p in documented[1:]) == (
        "workers=4, verbose=False, nokill=False, prefix='/tmp/_multi-'"
    )
    assert {p.kind for p in found if p not in documented} == {inspect.Parameter.KEYWORD_ONLY}


def test_every_worker_iterates_all_of_the_dataset_in_its_order() -> None:
    class Named:
        def __iter__(self) -> Iterator[tuple[WorkerInfo | None, int]]:
            return ((worker_info(), number) for number in range(50))

    samples = list(MultiLoader(Named(), 3))
    assert len(samples) == 150
    for worker in range(3):
        assert [n for here, n in samples if here == WorkerInfo(worker, 3)] == list(range(50))


def test_iterating_again_begins_again_with_the_dataset_as_it_is_then() -> None:
    dataset = Count(3)
    loader = MultiLoader(dataset, 1)
    assert list(loader) == [0, 1, 2]
    dataset.n = 2
    assert list(loader) == [0, 1]


@pytest.mark.parametrize(
    "end",
    [
        lambda loader: next(iter(loader)),
        lambda loader: loader.kill(),
        lambda loader: loader.__exit__(None, None, None),
    ],
    ids=["iterating again", "kill", "end of a with"],
)
def test_an_iteration_that_was_ended_raises_closed_error(end: Callable[[Any], object]) -> None:
    loader = MultiLoader(Endless(), 1)
    iteration = iter(loader)
    assert next(iteration) == 0
    end(loader)
    for _ in range(2):
        with pytest.raises(ClosedError, match="ended, by kill"):
            next(iteration)
    loader.kill()


def test_nokill_lets_the_iteration_before_go_on() -> None:
    loader = MultiLoader(Count(100), 1, nokill=True)
    first, second = iter(loader), iter(loader)
    assert list(zip(first, second, strict=True)) == [(i, i) for i in range(100)]


def test_kill_ends_all_iterations_and_another_may_follow() -> None:
    with MultiLoader(Endless(), 1, nokill=True) as loader:
        iterations = [iter(loader), iter(loader)]
        assert [next(iteration) for iteration in iterations] == [0, 0]
        loader.kill()
        for iteration in iterations:
            with pytest.raises(ClosedError):
                next(iteration)
        assert next(iter(loader)) == 0


def test_verbose_names_socket_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "multi-")
    list(MultiLoader(Count(3), 1, False, False, prefix))
    assert capsys.readouterr() == ("", "")
    loader = MultiLoader(Count(3), 1, True, False, prefix)
    list(loader)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"# ipc://{prefix}")
    assert said[1:] == ["# worker 0 has finished: 3 samples"]


# --- what ours adds -------------------------------------------------------------------------


def test_a_worker_s_environment_says_what_webdataset_reads() -> None:
    class Environment:
        def __iter__(self) -> Iterator[tuple[str, str]]:
            import os

            yield os.environ["WORKER"], os.environ["NUM_WORKERS"]

    assert sorted(MultiLoader(Environment(), 2)) == [("0", "2"), ("1", "2")]


@dataclasses.dataclass
class Point:
    x: int
    at: Any


def test_samples_of_any_kind_arrive_as_they_were() -> None:
    local = dataclasses.make_dataclass("Local", ["y"])
    samples = [None, 5, "é", b"x" * 100_000, Point(1, [np.float32(2), {3}]), (), local(4)]
    *found, array = MultiLoader(Given([*samples, np.arange(3)]), 1)
    assert found == samples
    assert array.tolist() == [0, 1, 2]


def test_a_worker_goes_no_further_ahead_than_the_budget_allows(tmp_path: Path) -> None:
    class Noted:
        def __iter__(self) -> Iterator[Any]:
            with (tmp_path / "made").open("ab", 0) as made:
                for _ in range(150):
                    made.write(b".")
                    yield np.zeros(20_000, np.uint8)

    samples = MultiLoader(Noted(), 1, memory_bytes=100_000)
    for n_taken, _ in enumerate(samples):
        assert (tmp_path / "made").stat().st_size < n_taken + 20


def test_one_sample_may_be_larger_than_the_budget() -> None:
    n_seen = 0
    for sample in MultiLoader(OneArray(5, 200_000), 2, memory_bytes=1000):
        assert (sample["pixels"][0] == sample["number"]).all()
        n_seen += 1
    assert n_seen == 10


def test_a_sample_that_does_not_come_in_time_is_an_error_that_says_what_workers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_dumps, "_ANSWER_TIMEOUT_S", PATIENCE_S)  # however busy the machine is
    reached = tmp_path / "reached"
    loader: Any = iter(MultiLoader(Count(6, 5, partial(hang, reached)), 1, timeout_s=PATIENCE_S))
    assert [next(loader) for _ in range(5)] == list(range(5))
    end_s = time.monotonic() + PATIENCE_S
    while not reached.exists():
        assert time.monotonic() < end_s
        time.sleep(0.001)
    loader._timeout_s = 0.05
    with pytest.raises(BatchTimeout) as caught:
        next(loader)
    said = str(caught.value)
    assert "a sample of Count did not arrive within 0.05 s" in said
    assert "worker 0 (process" in said
    assert "in hang" in said
    assert "zeromq.py" not in said  # shardio's own frames are left out
    assert "Thread " not in said  # so is its thread that sends held samples


def test_failing_samples_are_skipped_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    loader = MultiLoader(Odd(), 2, verbose=True, on_error="skip", max_skips=10)
    assert sorted(loader) == sorted([1, 3, 5, 7, 9] * 2)
    skipped = loader.skipped
    told = [(s.item, s.index, s.error, s.text) for s in skipped]
    assert sorted(told) == [
        (repr(WorkerInfo(worker, 2)), number, "ValueError", f"{number} is even")
        for worker in range(2)
        for number in range(0, 10, 2)
    ]
    assert "# worker 1 has finished: 5 samples, and 5 skipped" in capsys.readouterr().err
    assert len(list(loader)) == 10  # an iteration has skips of its own
    assert len(loader.skipped) == 10
    assert f">{skipped[0].text}</td>" in loader._repr_html_()


def test_one_more_failure_than_may_be_skipped_is_an_error() -> None:
    arrived: list[int] = []
    with pytest.raises(TooManySkipped, match=r"3 items failed.*item 4 \(WorkerInfo") as caught:
        arrived.extend(MultiLoader(Odd(), 1, on_error="skip", max_skips=2))
    assert isinstance(caught.value.__cause__, ValueError)
    assert arrived == [1, 3]


def test_samples_that_cannot_travel_are_skipped_too() -> None:
    samples = [1, threading.Lock, 2, Half, 3]
    loader = MultiLoader(Made(samples), 1, on_error="skip", max_skips=2)
    assert list(loader) == [1, 2, 3]
    assert [(s.index, s.error) for s in loader.skipped] == [(n, "TransformError") for n in (1, 3)]


def test_of_a_generator_that_fails_the_other_workers_go_on_and_a_warning_says_so() -> None:
    loader = MultiLoader(Count(9, 3, fail, worker=1), 2, on_error="skip", max_skips=1)
    with pytest.warns(RuntimeWarning, match="worker 1 ended after its sample 3 was skipped"):
        assert sorted(loader) == sorted([*range(9), *range(3)])
    assert [s.error for s in loader.skipped] == ["KeyError"]


def test_what_is_no_sample_s_failure_is_not_skipped() -> None:
    with pytest.raises(OSError, match="no such folder"):
        list(MultiLoader(Broken(), 1, on_error="skip", max_skips=9))
    with pytest.raises(WorkerDied):
        list(MultiLoader(Count(9, 3, die), 1, on_error="skip", max_skips=9))


def test_a_generator_is_refused_with_the_way_out() -> None:
    loader = MultiLoader((i * i for i in range(4)), 2)
    with pytest.raises(InvalidArgument, match="cannot pickle 'generator' object.*in its __iter__"):
        iter(loader)


@FORKS
@pytest.mark.parametrize("start_method", ["zygote", "spawn"])
def test_workers_that_know_their_number_share_the_dataset(start_method: Any) -> None:
    assert worker_info() is None
    assert sorted(MultiLoader(Shared(101), 3, start_method=start_method)) == list(range(101))


def test_an_iteration_that_nobody_holds_is_ended() -> None:
    before = threading.active_count()
    loader = MultiLoader(Endless(), 1)
    for _ in loader:
        break
    gc.collect()
    assert len(loader._iterations) == 0
    assert threading.active_count() == before


@FORKS
def test_a_fork_in_the_midst_of_an_iteration_cannot_go_on_with_it() -> None:
    iteration = iter(MultiLoader(Count(50), 1))
    assert next(iteration) == 0
    pid = os.fork()
    if pid == 0:
        try:
            next(iteration)
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert list(iteration) == list(range(1, 50))


def test_another_thread_may_kill_what_this_one_waits_for() -> None:
    loader = MultiLoader(Count(3, 1, hang), 1)
    iteration = iter(loader)
    next(iteration)
    threading.Timer(0.05, loader.kill).start()
    with pytest.raises(ClosedError):
        next(iteration)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset": "out/"}, r"dataset must be an iterable.*ShardLoader\('out/', batch_size\)"),
        ({"dataset": 5}, "dataset must be iterable; found 5"),
        ({"workers": 0}, "workers must be at least 1.* found 0: iterate the dataset itself"),
        ({"workers": 251}, "workers must be an integer from 1 to 250; found 251"),
        ({"prefix": 5}, "prefix must be the beginning of a path; found 5"),
        ({"prefix": "/nowhere/x"}, "there is no folder /nowhere"),
        ({"prefix": "/tmp/" + "x" * 100}, "121 bytes long; the maximum is 107"),
        ({"memory_bytes": 0}, "memory_bytes must be an integer from 1 up; found 0"),
        ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0"),
        ({"on_error": "skip"}, "on_error='skip' needs max_skips"),
        ({"start_method": "thread"}, "start_method must be one of 'zygote', 'spawn'"),
    ],
)
def test_what_is_not_acceptable_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        MultiLoader(**{"dataset": itertools.count(), **options})


def test_without_zeromq_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UnsupportedEnvironment, match=r"pip install '\.\[zmq\]'"):
        MultiLoader([1])
