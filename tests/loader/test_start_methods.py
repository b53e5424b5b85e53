"""However workers start, batches are the same; what they share with the program differs."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import ShardLoader, WeightedSampler
from shardio._workers.processes import stack_dumps
from shardio.errors import BatchTimeout, ClosedError
from tests.loading import PATIENCE_S, bits

N = 60
PROCESSES = ("zygote", "spawn")
METHODS = (*PROCESSES, "thread")
Sample = dict[str, Any]


def _loader(folder: str, **options: Any) -> ShardLoader:
    return ShardLoader(folder, 8, **{"output": "numpy", "num_workers": 2, **options})


def _told(loader: ShardLoader) -> set[Any]:
    return {each for batch in loader for each in batch["told"]}


def draw(sample: Sample, rng: np.random.Generator) -> Sample:
    return {"label": sample["label"], "drawn": rng.random(3)}


def draw_globally(sample: Sample) -> Sample:
    drawn = [random.random(), float(np.random.rand()), random.gauss(0, 1)]
    return {"label": sample["label"], "drawn": np.array(drawn)}


def _hashes(folder: str, **options: Any) -> list[str]:
    """Return a hash of all content of each batch of an epoch: values, indices and origins."""
    with _loader(folder, shuffle=True, seed=3, **options) as loader:
        return [hashlib.sha256(repr(bits(batch)).encode()).hexdigest() for batch in loader]


# num_workers, prefetch, reuse. Interpreters are slow to start: of them fewer.
_MANY = [(1, 3, False), (7, 0, True), (2, 5, False)]
WAYS = {"zygote": _MANY, "thread": _MANY, "spawn": _MANY[2:]}


@pytest.mark.parametrize(
    ("start_method", "transform"),
    # A test of killed workers has `draw` in new interpreters.
    [
        way
        for way in itertools.product(METHODS, [None, draw, draw_globally])
        if way != ("spawn", draw)
    ],
)
def test_batches_are_the_same_bit_for_bit_whatever_the_start_method(
    every: str, folder: str, start_method: str, transform: Callable[..., Sample] | None
) -> None:
    of = every if transform is None else folder
    expected = _hashes(of, num_workers=0, transform=transform)
    assert len(set(expected)) == len(expected)
    given: dict[str, Any] = {"start_method": start_method, "transform": transform}
    assert _hashes(of, num_workers=0, **given) == expected
    ways = WAYS[start_method] if transform is None else WAYS[start_method][-1:]
    for num_workers, prefetch, reuse in ways:
        options = {"num_workers": num_workers, "prefetch": prefetch, "reuse": reuse}
        assert _hashes(of, **options, **given) == expected, options


@pytest.mark.parametrize("start_method", METHODS)
def test_weights_and_selections_reach_every_kind_of_worker(folder: str, start_method: str) -> None:
    with shardio.open(folder) as whole:
        odd = whole.select(np.arange(1, N, 2))
        found = []
        for num_workers in (0, 2):
            options: dict[str, Any] = {"output": "numpy", "num_workers": num_workers}
            options |= {"sampler": WeightedSampler(np.arange(1, 31)), "start_method": start_method}
            with ShardLoader(odd, 4, **options) as loader:
                found.append([bits(batch) for _ in range(3) for batch in loader])
    assert found[0] == found[1]


@pytest.mark.parametrize("start_method", PROCESSES)
def test_a_killed_worker_is_replaced_in_the_same_way(folder: str, start_method: str) -> None:
    options = {"start_method": start_method, "transform": draw}
    with _loader(folder, **options) as loader, _loader(folder, num_workers=0, **options) as other:
        pool: Any = loader._engine._backend._pool  # type: ignore[union-attr]
        for is_killing in (False, True, True):
            steps = iter(loader)
            found = [bits(next(steps))]
            pid = pool.pids()[0]
            if is_killing:
                os.kill(pid, signal.SIGKILL)
            found += [bits(batch) for batch in steps]
            assert found == [bits(batch) for batch in other]
            while is_killing and pool.pids()[0] in (pid, None):  # it had answered all it was asked
                assert [bits(batch) for batch in loader] == [bits(batch) for batch in other]


def test_each_start_method_says_where_its_workers_come_from(folder: str) -> None:
    def where(sample: Sample) -> Sample:
        code = sys.orig_argv[-1]
        begins = "served" if "serve(" in code else "begun" if "begin(" in code else "main's"
        is_main = os.getpid() == pid
        return {"told": f"{begins} {'here' if is_main else 'there'}"}

    pid = os.getpid()
    found = {}
    for start_method in METHODS:
        with _loader(folder, start_method=start_method, transform=where) as loader:
            found[start_method] = _told(loader)
    assert found == {
        "zygote": {"served there"},
        "spawn": {"begun there"},
        "thread": {"main's here"},
    }


def test_module_import_counts(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "imports"
    (tmp_path / "needed_by_transform.py").write_text(
        f"import threading\nwith open({str(log)!r}, 'a') as log: print('once', file=log)\n"
        "def prepare(sample): return {'told': threading.get_native_id()}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("needed_by_transform")
    found = {}
    try:
        for start_method in METHODS:
            log.write_text("")
            options = {"start_method": start_method, "num_workers": 3, "transform": module.prepare}
            with _loader(folder, **options) as loader:
                who: set[int] = set()
                while len(who) < 3:  # all have begun
                    who |= _told(loader)
            found[start_method] = len(log.read_text().splitlines())
    finally:
        del sys.modules["needed_by_transform"]
    assert found == {"zygote": 3, "spawn": 3, "thread": 0}


def test_transforms_in_threads_have_the_global_generators_in_turn(folder: str) -> None:
    n_at_once, most = 0, 0

    def count(sample: Sample) -> Sample:
        nonlocal n_at_once, most
        n_at_once += 1
        most = max(most, n_at_once)
        time.sleep(0.001)
        n_at_once -= 1
        return {"label": sample["label"]}

    with _loader(folder, start_method="thread", num_workers=4, transform=count) as loader:
        list(loader)
    assert most == 1


def _sticking(stuck: threading.Event, free: threading.Event, label: int) -> Callable[..., Sample]:
    """Make a transform that hangs at a sample for as long as `free` is not set."""

    def stick(sample: Sample) -> Sample:
        if sample["label"] == label and not free.is_set():
            stuck.set()
            free.wait()
        return {"label": sample["label"], "drawn": np.random.rand()}

    return stick


def _epoch(loader: ShardLoader) -> list[Any]:
    return [bits(batch)[2:] for batch in loader]


def test_hanging_thread_is_reported_overdue(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dumps, "_ANSWER_TIMEOUT_S", PATIENCE_S)
    stuck, free = threading.Event(), threading.Event()
    transform = _sticking(stuck, free, 20)
    with _loader(folder, num_workers=0, transform=_sticking(stuck, stuck, 20)) as loader:
        stuck.set()
        loader.load_state_dict({**loader.state_dict(), "epoch": 1})
        expected = _epoch(loader)
    stuck.clear()
    try:
        with _loader(folder, start_method="thread", transform=transform) as loader:
            with pytest.raises(BatchTimeout) as caught:
                for _ in loader:
                    assert stuck.wait(PATIENCE_S)
                    loader._engine._timeout_s = 0.05
            assert "(shardio-worker-0)" in str(caught.value)
            assert "in stick" in str(caught.value)
            assert "fill.py" not in str(caught.value), "frames that are not the user's"
            loader._engine._timeout_s = None
            stuck.clear()
            with pytest.MonkeyPatch.context() as patch:
                # The thread that was given up stays where it is; the next ones do not stick.
                patch.setattr(free, "is_set", lambda: True)
                assert _epoch(loader) == expected
    finally:
        free.set()


def test_closing_while_a_thread_is_in_a_long_transform_does_not_wait_for_it(folder: str) -> None:
    stuck, free = threading.Event(), threading.Event()
    before = _workers()
    try:
        # One worker: another could have to wait for its turn with the first batch.
        transform = _sticking(stuck, free, 8)
        loader = _loader(folder, start_method="thread", transform=transform, num_workers=1)
        steps = iter(loader)
        next(steps)
        assert stuck.wait(PATIENCE_S)
        loader.close()  # returns, though the transform has not
        with pytest.raises(ClosedError):
            next(steps)
        (left,) = _workers() - before
    finally:
        free.set()
    left.join(PATIENCE_S)
    assert not left.is_alive(), "it ends when its transform has returned"


def _workers() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("shardio-worker")}
