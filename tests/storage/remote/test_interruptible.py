"""Ctrl-C ends the wait for calls that hang, wherever they are made."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from shardio.storage.remote.object_store import ObjectStore, map_ordered, run_parallel
from tests.loading import PATIENCE_S
from tests.storage.remote.scene import Scene


class Hang:
    """A call that comes back when it is let; somebody presses Ctrl-C once it hangs.

    Args:
        met: set once it hangs.
        go_on: lets it come back.
    """

    def __init__(self, met: threading.Event, go_on: threading.Event) -> None:
        self._met, self._go_on, self._is_interrupted = met, go_on, threading.Event()
        self.was_waited_for = True
        self._thread = threading.Thread(target=self._press)

    def _press(self) -> None:
        self._met.wait(PATIENCE_S)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        self.was_waited_for = not self._is_interrupted.wait(PATIENCE_S / 4)
        self._go_on.set()

    def interrupts(self, call: Callable[[], object]) -> bool:
        """Return True if a hanging call is ended, not waited for."""
        self._thread.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        self._is_interrupted.set()
        self._thread.join()
        return not self.was_waited_for


@pytest.fixture
def ours() -> Iterator[None]:
    """Restore Python's handler of SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("how", ["read", "several", "download"])
def test_ctrl_c_does_not_wait_for_a_request(store: Scene, tmp_path: Path, how: str) -> None:
    store.put("hanging/a.shard", bytes(5000))
    options = {**store.options, "client_options": {"timeout": "60s"}}
    some, fault = ObjectStore(store.url("hanging"), options), store.fail("hold")

    with open(tmp_path / "a", "ab", buffering=0) as file:
        ways: dict[str, Callable[[], object]] = {
            "read": lambda: some.read("a.shard"),
            "several": lambda: run_parallel(1, some.read, ["a.shard"] * 9),
            "download": lambda: some.download("a.shard", file, 5000),
        }
        assert Hang(fault.met, fault.go_on).interrupts(ways[how])
    for thread in threading.enumerate():
        if thread.name == "shardio-request":
            thread.join(PATIENCE_S)
    assert store.proxy.requests["a.shard"] == 1


def test_after_an_error_no_call_begins() -> None:
    begun: list[int] = []

    def call(item: int) -> None:
        begun.append(item)
        if item == 3:
            raise ValueError("the fourth")

    with pytest.raises(ValueError, match="the fourth"):
        run_parallel(1, call, range(9))
    assert begun == [0, 1, 2, 3]


def test_what_is_under_way_at_an_error_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    both, goes_on, ended = threading.Barrier(2), threading.Event(), []
    wait = futures.wait

    def noted(running: list[futures.Future[None]], *given: Any) -> Any:
        if len(running) == 1:  # one has failed
            goes_on.set()
        return wait(running, *given)

    def call(item: int) -> None:
        both.wait(PATIENCE_S)
        if item == 0:
            raise ValueError("the first")
        goes_on.wait(PATIENCE_S)
        ended.append(item)

    monkeypatch.setattr("shardio.storage.remote.object_store.wait", noted)
    with pytest.raises(ValueError, match="the first"):
        run_parallel(2, call, [0, 1])
    assert ended == [1]


def test_calls_in_order_give_what_they_return_however_long_each_takes() -> None:
    threads, others_done = 3, threading.Event()
    done: list[int] = []

    def call(item: int) -> int:
        if item == 0:
            others_done.wait(PATIENCE_S)
        done.append(item)
        if item == 2:
            others_done.set()
        return item * item

    assert list(map_ordered(threads, call, range(20))) == [item * item for item in range(20)]
    assert done.index(2) < done.index(0)
    assert list(map_ordered(threads, call, [])) == []


def test_no_more_calls_are_begun_than_may_be_at_a_time() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(9):
            taken.append(item)
            yield item

    found = map_ordered(3, str, items())
    assert (next(found), taken) == ("0", [0, 1, 2])
    assert (next(found), taken) == ("1", [0, 1, 2, 3])


def test_an_error_is_raised_in_its_turn() -> None:
    def call(item: int) -> int:
        return 1 // (item - 2)

    found = map_ordered(4, call, range(9))
    assert [next(found), next(found)] == [-1, -1]
    with pytest.raises(ZeroDivisionError):
        next(found)
