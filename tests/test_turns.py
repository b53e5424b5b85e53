"""The global generators, where functions of the user run in this process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Schema, ShardLoader
from shardio._engine.turns import Turns

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

SCHEMA = Schema({"label": Array("int64")})
N = 24


@pytest.fixture
def folder(tmp_path: Path) -> str:
    with shardio.DatasetWriter(tmp_path / "set", SCHEMA) as writer:
        for i in range(N):
            writer.append({"label": i})
    return str(tmp_path / "set")


def draw(sample: dict[str, Any]) -> dict[str, Any]:
    """Two draws, between which other threads get a chance."""
    first = random.random()
    time.sleep(0)
    return {"label": sample["label"], "drawn": np.array([first, np.random.rand()])}


def loading(folder: str, **options: Any) -> ShardLoader:
    every: dict[str, Any] = {"transform": draw, "output": "numpy", "shuffle": True} | options
    return ShardLoader(folder, 4, **every)


def drawn(loader: ShardLoader) -> list[Any]:
    return [batch["drawn"].tolist() for batch in loader]


@pytest.mark.parametrize("here", [{"num_workers": 0}, {"num_workers": 2, "start_method": "thread"}])
def test_loaders_in_several_threads_do_not_draw_from_each_others_generators(
    folder: str, here: dict[str, Any]
) -> None:
    found: dict[int, list[list[Any]]] = {}

    def iterate(number: int, options: dict[str, Any]) -> None:
        with loading(folder, seed=number, **options) as loader:
            found[number] = [drawn(loader) for _ in range(3)]

    there = [{"num_workers": 1, "start_method": "thread"}, {"num_workers": 0}]
    others = [
        threading.Thread(target=iterate, args=(number, options))
        for number, options in enumerate(there, start=1)
    ]
    for thread in others:
        thread.start()
    iterate(0, here)
    for thread in others:
        thread.join()
    for number in range(3):
        with loading(folder, seed=number, num_workers=1) as loader:
            assert found[number] == [drawn(loader) for _ in range(3)]


@pytest.mark.parametrize(
    "outer", [{"num_workers": 0}, {"num_workers": 1, "start_method": "thread"}]
)
@pytest.mark.parametrize(
    "inner", [{"num_workers": 0}, {"num_workers": 1, "start_method": "thread"}]
)
def test_a_transform_may_iterate_another_loader(
    folder: str, outer: dict[str, Any], inner: dict[str, Any]
) -> None:
    with loading(folder, num_workers=1) as loader:
        expected = drawn(loader)
    nested: list[list[Any]] = []

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if not nested:
            with loading(folder, **inner) as loader:
                nested.append(drawn(loader))
        return draw(sample)

    with loading(folder, transform=transform, **outer) as loader:
        assert drawn(loader) == expected
    assert nested == [expected]


def held_by(turns: Turns) -> Iterator[Callable[[], None]]:
    """Another thread that has the turn, until it is told to end it."""
    has_it, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.one():
            has_it.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has_it.wait()
    yield may_end.set
    thread.join()


def test_who_does_not_want_it_any_more_gets_no_turn() -> None:
    turns = Turns()
    for end in held_by(turns):
        assert not turns.take(lambda: True)
        end()
    assert turns.take()
    turns.end(threading.current_thread())


def test_a_turn_leaves_the_generators_as_they_were_also_where_it_is_lent() -> None:
    turns = Turns()
    random.seed(7)
    np.random.seed(7)
    program = random.getstate()
    with turns.one():
        random.seed(1)
        with turns.one():
            random.seed(2)
        inner = random.getstate()
        with turns.lent():
            assert random.getstate() == program
            for end in held_by(turns):
                end()
        assert random.getstate() == inner
    assert random.getstate() == program
    assert np.random.rand() == np.random.RandomState(7).rand()


def test_a_turn_that_was_taken_away_is_not_given_back_twice() -> None:
    turns, thread = Turns(), threading.current_thread()
    turns.take()
    random.seed(1)
    turns.end(thread)
    state = random.getstate()
    turns.end(thread)
    assert random.getstate() == state, "what comes back late changes nothing"


def test_turns_are_had_in_the_order_of_asking() -> None:
    turns, order = Turns(), list[int]()

    def draw_twice(number: int) -> None:
        for _ in range(2):
            with turns.one():
                order.append(number)
                asked.wait()  # the first has asked again before the second is through

    asked = threading.Event()
    threads = [threading.Thread(target=draw_twice, args=(number,)) for number in range(3)]
    for n_waiting, thread in enumerate(threads):
        thread.start()
        while len(turns._waiting) < n_waiting:
            time.sleep(0.001)
        while not order:
            time.sleep(0.001)
    asked.set()
    for thread in threads:
        thread.join()
    assert order[:3] == [0, 1, 2]
    assert sorted(order[3:]) == [0, 1, 2]
