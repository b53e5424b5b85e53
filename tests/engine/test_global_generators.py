"""The global generators, where functions of the user run in this process."""

from __future__ import annotations

import importlib
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest

import shardio
from shardio import Array, Schema, ShardLoader, load_with_workers
from shardio._engine.dispatch.thread_workers import GeneratorLock
from tests.faces.loaders import loader_of

# Spawned workers would import pytest with this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = Schema({"label": Array("int64")})
N = 24
WAYS: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 2, "start_method": "thread"}]
HERE = pytest.mark.parametrize("here", WAYS)


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


@HERE
def test_loaders_in_threads_share_no_generators(folder: str, here: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("outer", WAYS)
@pytest.mark.parametrize("inner", WAYS)
def test_loader_in_a_transform(folder: str, outer: dict[str, Any], inner: dict[str, Any]) -> None:
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


def held_by(turns: GeneratorLock) -> Iterator[Callable[[], None]]:
    """Another thread that has the turn, until it is told to end it."""
    has_it, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.held():
            has_it.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has_it.wait()
    yield may_end.set
    thread.join()


def test_who_does_not_want_it_any_more_gets_no_turn() -> None:
    turns = GeneratorLock()
    for end in held_by(turns):
        assert not turns.acquire(lambda: True)
        end()
    assert turns.acquire()
    turns.release(threading.current_thread())


def test_a_turn_leaves_the_generators_as_they_were_also_where_it_is_lent() -> None:
    turns = GeneratorLock()
    random.seed(7)
    np.random.seed(7)
    program = random.getstate()
    with turns.held():
        random.seed(1)
        with turns.held():
            random.seed(2)
        inner = random.getstate()
        with turns.released():
            assert random.getstate() == program
            for end in held_by(turns):
                end()
        assert random.getstate() == inner
    assert random.getstate() == program
    assert np.random.rand() == np.random.RandomState(7).rand()


def test_a_turn_that_was_taken_away_is_not_given_back_twice() -> None:
    turns, thread = GeneratorLock(), threading.current_thread()
    turns.acquire()
    random.seed(1)
    turns.release(thread)
    state = random.getstate()
    turns.release(thread)
    assert random.getstate() == state, "what comes back late changes nothing"


def test_turns_are_had_in_the_order_of_asking() -> None:
    turns, order = GeneratorLock(), list[int]()

    def draw_twice(number: int) -> None:
        for _ in range(2):
            with turns.held():
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


STAND_IN = """
import random


class Generator:
    def __init__(self):
        self._random = random.Random(67280421310721)  # as torch does: the same in every process

    def manual_seed(self, seed):
        self._random.seed(seed)

    def seed(self):
        self._random.seed()

    def get_state(self):
        return self._random.getstate()

    def set_state(self, state):
        self._random.setstate(state)


default_generator = Generator()


def rand():
    return default_generator._random.random()
"""


def draw_from_stand_in(sample: dict[str, Any]) -> dict[str, Any]:
    import torch

    made: Any = torch
    return {"label": sample["label"], "drawn": np.array([made.rand(), made.rand()])}


def draw_for_item(item: int) -> Any:
    import torch

    made: Any = torch
    return made.rand()


def draw_for_batch(batch: dict[str, Any]) -> dict[str, Any]:
    import torch

    made: Any = torch
    return batch | {"drawn": np.array([made.rand() for _ in batch["label"]])}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a module called torch that workers find, and that nothing has imported yet."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "torch.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setitem(sys.modules, "torch", None)  # put back what there was, or nothing
    del sys.modules["torch"]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("function", ["transform", "batch_transform", "collate"])
def test_torch_draws_ignore_the_workers(folder: str, function: str, is_loaded: object) -> None:
    def gather(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return draw_for_batch({"label": np.stack([sample["label"] for sample in samples])})

    functions: dict[str, Any] = {
        "transform": draw_from_stand_in,
        "batch_transform": draw_for_batch,
        "collate": gather,
    }
    given = {"transform": None, function: functions[function]}
    found = []
    ways = [(0, "zygote"), (1, "zygote"), (2, "zygote"), (2, "thread")]
    if function == "transform":  # interpreters are slow to start
        ways.append((2, "spawn"))
    for num_workers, method in ways:
        sys.modules.pop("torch", None)
        if is_loaded:
            importlib.import_module("torch")
        options: Any = {"num_workers": num_workers, "start_method": method, **given}
        with loading(folder, **options) as loader:
            found.append([drawn(loader) for _ in range(2)])
    assert all(each == found[0] for each in found)
    numbers = np.ravel(found[0])
    assert len({*numbers.tolist()}) == len(numbers), "samples and epochs draw their own"


@pytest.mark.usefixtures("stand_in")
@HERE
@pytest.mark.parametrize("is_loaded", [True, False])
def test_main_torch_generator_is_kept(folder: str, here: dict[str, Any], is_loaded: object) -> None:
    expected: Any = types.ModuleType("expected")
    exec(STAND_IN, vars(expected))  # as in a program that has no loader
    if is_loaded:
        torch: Any = importlib.import_module("torch")
        torch.default_generator.manual_seed(5)
        expected.default_generator.manual_seed(5)
    finders = [*sys.meta_path]
    with loading(folder, transform=draw_from_stand_in, **here) as loader:
        drawn(loader)
    assert sys.modules["torch"].rand() == expected.rand()
    assert sys.meta_path == finders, "what waits for an import of torch is gone"


@pytest.mark.usefixtures("stand_in")
def test_torch_is_imported_as_without_a_loader_and_not_by_it(folder: str) -> None:
    finders = [*sys.meta_path]
    with loading(folder, num_workers=0) as loader:
        drawn(loader)
    assert "torch" not in sys.modules
    assert sys.meta_path == finders

    def look(sample: dict[str, Any]) -> dict[str, Any]:
        import torch

        assert torch.__spec__ is not None
        assert type(torch.__spec__.loader) is type(torch.__loader__) is SourceFileLoader
        return sample | {"drawn": 0}

    with loading(folder, transform=look, num_workers=0) as loader:
        drawn(loader)


@pytest.mark.usefixtures("stand_in")
def test_a_transform_that_imports_torch_inside_of_another_leaves_it_keyed(folder: str) -> None:
    with loading(folder, transform=draw_from_stand_in, num_workers=0) as loader:
        expected = drawn(loader)
    del sys.modules["torch"]
    nested: list[Any] = []

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if not nested:
            with loading(folder, transform=draw_from_stand_in, num_workers=0) as loader:
                nested.append(drawn(loader))
        return draw_from_stand_in(sample)

    with loading(folder, transform=transform, num_workers=0) as loader:
        assert drawn(loader) == expected
    assert nested == [expected]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("method", ["zygote", "spawn"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_workers_of_items_draw_differently_from_torch(method: Any, is_loaded: object) -> None:
    if is_loaded:
        importlib.import_module("torch")
    found = set[float]()
    for _ in range(2):
        with load_with_workers(
            loader_of(draw_for_item), range(4), 1, start_method=method
        ) as values:
            found.update(values)
    assert len(found) == 2 * 4
