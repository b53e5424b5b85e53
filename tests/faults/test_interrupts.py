"""An interrupt in the middle of a loader's bookkeeping ends the loop it strikes and no other."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from shardio import ShardLoader
from shardio._engine.dispatch import backends, dispatcher, engine
from shardio._workers.processes import blocks
from shardio._workers.processes.blocks import BlockPool
from shardio._workers.processes.linux import Finalizer, interrupts_held
from shardio._workers.processes.worker_pool import WorkerPool
from shardio._workers.tasks import schedule
from shardio.errors import UnsupportedEnvironment
from shardio.order import Sequential
from tests.loading import PATIENCE_S, TWO_FIELDS, two_fields, write_dataset

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N = 64
# Methods that an epoch goes through, each of which ends in the middle of something.
PLACES: list[tuple[Any, str]] = [
    (backends.WorkerBackend, "wait"),
    (backends.InlineWorker, "wait"),
    (backends.WorkerBackend, "queue_task"),
    (backends.InlineWorker, "queue_task"),
    (dispatcher.Dispatcher, "_handle_result"),
    (dispatcher.Dispatcher, "apply_finalizers"),
    (dispatcher.Dispatcher, "assign_tasks"),
    (engine.Engine, "lease"),
    (blocks.BlockPool, "take_back_returned"),
    (blocks.BlockPool, "lease"),
    (blocks.BlockPool, "take_idle"),
    (schedule.Schedule, "assign"),
    (schedule.Schedule, "complete"),
    (schedule.Schedule, "deliver"),
    (Sequential, "at"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("interrupts") / "set"
    return write_dataset(made, N, 2, TWO_FIELDS, two_fields(N))


def interrupting(call: Callable[..., Any], when: int, *, after: bool) -> Callable[..., Any]:
    """Wrap a call so that Ctrl-C strikes its invocation number `when`, before or after it."""
    n_calls = 0

    def struck(*given: Any, **named: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == when and not after:
            raise KeyboardInterrupt
        found = call(*given, **named)
        if n_calls == when:
            raise KeyboardInterrupt
        return found

    return struck


def interrupt_now() -> None:
    """Send SIGINT to this thread and reach a point at which Python calls its handler.

    Sent to the process, another thread might take it, and it would arrive in a later test.
    """
    signal.raise_signal(signal.SIGINT)
    for _ in range(1000):
        pass


def epoch_of(loader: ShardLoader) -> list[int]:
    return [int(label) for batch in loader for label in batch["label"]]


@pytest.mark.parametrize(("num_workers", "reuse"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda p: getattr(p, "__name__", p))
def test_after_an_interrupt_anywhere_the_next_epochs_are_whole(
    folder: str, owner: Any, name: str, *, reuse: bool, num_workers: int
) -> None:
    call = getattr(owner, name)
    with ShardLoader(
        folder, 4, output="numpy", num_workers=num_workers, reuse=reuse, prefetch=2
    ) as loader:
        for when in (4,) if num_workers and reuse else (1, 4):
            for after in (False, True):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(owner, name, interrupting(call, when, after=after))
                    try:
                        found = epoch_of(loader)
                    except KeyboardInterrupt:
                        found = list(range(N))
                    assert found == list(range(N))
                assert epoch_of(loader) == list(range(N))
        # No block was lost on the way: the pool is as small as at first.
        assert len(loader._engine.pool) <= num_workers + 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_another_pass_goes_on_after_an_interrupted_one(folder: str, num_workers: int) -> None:
    with ShardLoader(folder, 4, output="numpy", num_workers=num_workers) as loader:
        other = iter(loader)
        found = [int(label) for _ in range(3) for label in next(other)["label"]]
        with pytest.MonkeyPatch.context() as patch:
            route = interrupting(dispatcher.Dispatcher._handle_result, 3, after=False)
            patch.setattr(dispatcher.Dispatcher, "_handle_result", route)
            with pytest.raises(KeyboardInterrupt):
                epoch_of(loader)
        found += [int(label) for batch in other for label in batch["label"]]
        assert found == list(range(N))


def test_a_loader_works_again_after_its_workers_could_not_be_replaced(folder: str) -> None:
    with ShardLoader(folder, 4, output="numpy", num_workers=2) as loader:
        for _ in range(2):
            with pytest.MonkeyPatch.context() as patch:

                def refuse(pool: WorkerPool, timeout_s: float | None = None) -> Any:
                    raise UnsupportedEnvironment("workers crash before they do anything")

                patch.setattr(WorkerPool, "wait", refuse)
                with pytest.raises(UnsupportedEnvironment):
                    epoch_of(loader)
            assert epoch_of(loader) == list(range(N))


def test_an_interrupt_is_held_back_whichever_thread_the_kernel_gives_it_to() -> None:
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)  # one that does not hold it back
    other.start()
    is_through = False
    heard, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            assert heard.recv(1)  # the other thread has taken it, whenever it came to run
            is_through = True
    finally:
        signal.set_wakeup_fd(before)
        is_over.set()
        other.join()
        heard.close()
        told.close()
    assert is_through
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_interrupt_that_was_held_back_reaches_the_handler() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        with interrupts_held(), interrupts_held():
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


class _Owner:
    """An object that is finalized."""


def _be_interrupted() -> None:
    """Let time pass in which Python calls handlers, up to the limit of a test."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        time.sleep(0.001)


def test_an_interrupt_in_a_finalizer_is_not_lost_and_comes_when_that_is_through() -> None:
    is_through = threading.Event()

    def end() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
        is_through.set()

    owner = _Owner()
    finalizer = Finalizer(owner, end)
    with pytest.raises(KeyboardInterrupt):
        del owner
        _be_interrupted()
    assert is_through.is_set()
    assert not finalizer.alive


def test_an_interrupt_in_a_finalizer_ends_what_is_waited_for_after_it() -> None:
    def ends_a_wait() -> bool:
        owner = _Owner()
        Finalizer(owner, signal.raise_signal, signal.SIGINT)
        end_s = time.monotonic() + PATIENCE_S / 3
        with pytest.raises(KeyboardInterrupt):
            del owner
            threading.Event().wait(PATIENCE_S / 3)
        return time.monotonic() < end_s

    # A signal that comes when Python has looked for one, and does not wait yet, is seen after it.
    assert any(ends_a_wait() for _ in range(3))


def test_an_interrupt_where_a_finalizer_is_called_comes_from_there() -> None:
    owner = threading.Event()
    finalizer = Finalizer(owner, signal.raise_signal, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        finalizer()


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize(
    ("owner", "num_workers"),
    [(backends.WorkerBackend, 2), (backends.InlineWorker, 0), (BlockPool, 0), (BlockPool, 2)],
)
def test_an_interrupted_close_leaves_nothing(folder: str, owner: Any, num_workers: int) -> None:
    def n_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with ShardLoader(folder, 4, output="numpy", num_workers=num_workers) as kept:
        next(iter(kept))  # a zygote of this process stays
        before = n_files()
        with pytest.MonkeyPatch.context() as patch:
            close = owner.close

            def struck(self: Any) -> None:
                interrupt_now()
                close(self)

            loader = ShardLoader(folder, 4, output="numpy", num_workers=num_workers)
            next(iter(loader))
            patch.setattr(owner, "close", struck)
            with pytest.raises(KeyboardInterrupt):
                loader.close()
        assert n_files() == before


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("owner", [blocks.Block, os])
def test_interrupted_block_setup(folder: str, monkeypatch: pytest.MonkeyPatch, owner: Any) -> None:
    name = "dup" if owner is os else "__init__"
    before = len(os.listdir("/proc/self/fd"))
    loader = ShardLoader(folder, 4, output="numpy", num_workers=2, start_method="thread")
    call = getattr(owner, name)

    def struck(*given: Any) -> Any:
        found = call(*given)
        interrupt_now()
        return found

    monkeypatch.setattr(owner, name, struck)
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    monkeypatch.undo()
    loader.close()
    end_s = time.monotonic() + PATIENCE_S  # a thread ends when it comes to it
    while len(os.listdir("/proc/self/fd")) != before and time.monotonic() < end_s:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_end_where_one_cannot_start(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    start = threading.Thread.start

    def start_first(thread: threading.Thread) -> None:
        if thread.name == "shardio-worker-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_first)
    with pytest.raises(RuntimeError, match="new thread"):
        ShardLoader(folder, 4, output="numpy", num_workers=2, start_method="thread")
    assert set(threading.enumerate()) <= before


def test_a_handler_that_closes_the_loader_within_a_batch_ends_the_loop(folder: str) -> None:
    loader = ShardLoader(folder, 4, output="numpy", num_workers=0)
    with pytest.MonkeyPatch.context() as patch:
        at = Sequential.at

        def close_first(order: Sequential, positions: Any) -> Any:
            loader.close()  # as a handler of SIGTERM would, in this thread
            return at(order, positions)

        patch.setattr(Sequential, "at", close_first)
        with pytest.raises(RuntimeError, match="closed"):
            epoch_of(loader)
