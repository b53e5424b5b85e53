"""Results of a generator, chunk by chunk, as a worker would send them."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardio._workers.tasks import calls
from shardio._workers.tasks.calls import FailedCall, ResultChunks
from shardio._workers.tasks.values import pack_value, read_value, write_value
from shardio.errors import TransformError


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "now_ns", lambda: 0)


def _arrived(portion: list[Any] | FailedCall) -> Any:
    """Return a chunk as main has it."""
    packed = pack_value(portion)
    memory = np.empty(packed.n_bytes, np.uint8)
    write_value(packed, memory.data)
    return read_value(memory)


def _all(results: Iterator[Any]) -> list[list[Any]]:
    found, of = [], ResultChunks(results, "it")
    while not of.is_over:
        found.append(_arrived(of.take()))
    return found


def test_of_a_generator_without_end_so_many_results_are_a_portion() -> None:
    of = ResultChunks(itertools.count(), "it")
    assert [_arrived(of.take()) for _ in range(2)] == [[*range(64)], [*range(64, 128)]]
    assert not of.is_over


def test_the_last_portion_says_that_it_is_over() -> None:
    assert [len(portion) for portion in _all(iter(range(70)))] == [64, 6]
    assert _all(iter(())) == [[]]


def test_large_results_are_fewer_to_a_portion() -> None:
    assert [len(portion) for portion in _all(iter([b"x" * 30_000] * 5))] == [3, 2]


def test_a_result_with_a_large_array_is_a_portion_of_its_own() -> None:
    large = np.zeros(20_000, np.uint8)
    found = _all(iter([1, 2, (3, large), (4, large), 5]))
    assert [[r[0] if isinstance(r, tuple) else r for r in each] for each in found] == [
        [1, 2], [3], [4], [5],
    ]  # fmt: skip


def test_a_result_that_takes_long_does_not_wait_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0, 3_000_000)
    monkeypatch.setattr(calls, "now_ns", lambda: next(clock))
    assert [len(portion) for portion in _all(iter(range(8)))] == [3, 3, 2]


@pytest.mark.parametrize("n", [10, 50_000])
def test_an_array_that_the_generator_uses_again_arrives_as_it_was(n: int) -> None:
    def refill() -> Iterator[Any]:
        array = np.empty(n, np.uint8)
        for i in range(20):
            array[:] = i
            yield array

    found = [int(array.max()) for portion in _all(refill()) for array in portion]
    assert found == list(range(20))


class _Stops:
    def __reduce__(self) -> Any:
        raise StopIteration


@pytest.mark.parametrize(
    ("bad", "error"), [(None, KeyError), (threading.Lock, TypeError), (_Stops, TransformError)]
)
def test_results_before_a_failure_come_with_it(bad: Any, error: type[Exception]) -> None:
    def fail() -> Iterator[Any]:
        yield from range(3)
        if bad is None:
            raise KeyError("gone")
        yield bad()

    of = ResultChunks(fail(), "it")
    broken = _arrived(of.take())
    assert of.is_over
    assert isinstance(broken, FailedCall)
    assert broken.found == [0, 1, 2]
    assert isinstance(broken.error, error)


def test_a_failure_among_those_that_main_has_already_comes_alone() -> None:
    def fail() -> Iterator[int]:
        yield 0
        raise KeyError("gone")

    of = ResultChunks(fail(), "it")
    of.n_passed_over = 5
    broken = pickle.loads(pickle.dumps(of.take()))
    assert (broken.found, of.is_over) == ([], True)
