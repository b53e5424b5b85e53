"""The surroundings of a starting worker, and the life of the zygote."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest

from shardio._workers.processes import zygote as zygotes
from shardio._workers.processes.worker_pool import Channel, Event, Message, WorkerExit, WorkerPool
from shardio.errors import UnsupportedEnvironment

pytestmark = pytest.mark.process

PATIENCE_S = 30.0


@pytest.fixture
def warm_zygote() -> Iterator[int]:
    """Keep one pool open, so that the others find a zygote that is running; gives its pidfd."""
    with WorkerPool(1, lambda channel: channel.recv()) as pool:
        assert pool._state.zygote is not None
        yield pool._state.zygote.pidfd


def _asked(
    answer: Callable[[Channel], object], *, fds: tuple[int, ...] = (), preload: tuple[str, ...] = ()
) -> object:
    """Run `answer` in a worker and give what it returns, through JSON."""

    def work(channel: Channel) -> None:
        channel.send(json.dumps(answer(channel)).encode())

    with WorkerPool(1, work, fds=fds, preload=preload) as pool:
        event = pool.wait(PATIENCE_S)[0]  # its WorkerExit may be there as well
        assert isinstance(event, Message), event
        return json.loads(event.data)


@pytest.mark.usefixtures("warm_zygote")
def test_a_worker_has_mains_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDIO_TEST_LATE", "\udcff set after the zygote started")
    monkeypatch.delenv("PATH")
    monkeypatch.setattr(sys, "argv", ["program", "--option"])
    monkeypatch.syspath_prepend("/nowhere")
    old_umask = os.umask(0o027)
    try:
        found = _asked(lambda _: [os.getcwd(), dict(os.environ), sys.argv, sys.path, os.umask(0)])
    finally:
        os.umask(old_umask)
    assert found == [os.getcwd(), dict(os.environ), sys.argv, sys.path, 0o027]


@pytest.mark.usefixtures("warm_zygote")
def test_workers_start_in_a_deleted_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert _asked(lambda channel: "up") == "up"


@pytest.mark.usefixtures("warm_zygote")
def test_a_worker_ignores_ctrl_c_blocks_no_signal_and_reads_nothing_from_the_terminal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        found = _asked(
            lambda channel: [
                signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
                signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
                len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
                os.readlink("/proc/self/fd/0"),
            ]
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert found == [True, True, 0, "/dev/null"]


@pytest.mark.usefixtures("warm_zygote")
def test_a_worker_holds_no_descriptor_but_its_own() -> None:
    def held(channel: Channel) -> list[int]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                os.fstat(int(name))
            except OSError:  # that of the listing itself
                continue
            found.append(int(name))
        return sorted(set(found) - {0, 1, 2, channel._socket.fileno(), *channel.fds})

    others = [WorkerPool(2, lambda channel: channel.recv()) for _ in range(3)]
    assert _asked(held, fds=(0, 1)) == []
    for pool in others:
        pool.close()


@pytest.mark.usefixtures("warm_zygote")
def test_workers_draw_different_random_numbers() -> None:
    def draw(channel: Channel) -> None:
        import random

        channel.send(f"{np.random.randint(2**31)} {random.random()}".encode())

    draws: set[bytes] = set()
    with WorkerPool(4, draw) as pool:
        while len(draws) < 4:
            events = pool.wait(PATIENCE_S)
            assert events
            draws |= {event.data for event in events if isinstance(event, Message)}
    assert len({draw.split()[0] for draw in draws}) == 4
    assert len({draw.split()[1] for draw in draws}) == 4


def test_a_worker_has_neither_tinygrad_nor_mains_main_but_numpy() -> None:
    names = ("tinygrad", "pytest", "numpy", "xxhash", "zstandard", "cloudpickle")
    found = _asked(lambda channel: [name for name in names if name in sys.modules])
    assert found == ["numpy", "xxhash", "zstandard", "cloudpickle"]


@pytest.mark.usefixtures("warm_zygote")
def test_preloaded_modules_are_there_before_the_fork() -> None:
    def has_it(channel: Channel) -> bool:
        return "this_is_nothing" not in sys.modules and "colorsys" in sys.modules

    assert _asked(has_it) is False
    assert _asked(has_it, preload=("this_is_nothing", "colorsys")) is True


@pytest.mark.usefixtures("warm_zygote")
def test_functions_and_classes_of_a_module_that_is_not_on_the_path_arrive(tmp_path: Path) -> None:
    path = tmp_path / "hidden_module.py"
    path.write_text(
        "OFFSET = 40\n"
        "class Two:\n    value = 2\n"
        "def add(n): return OFFSET + n\n"
        "def work(channel): return add(Two().value)\n"
    )
    spec = importlib.util.spec_from_file_location("hidden_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hidden_module"] = module
    try:
        spec.loader.exec_module(module)
        assert _asked(module.work) == 42
        assert "hidden_module" not in cloudpickle.list_registry_pickle_by_value()
    finally:
        del sys.modules["hidden_module"]


def test_one_zygote_serves_all_crews_and_is_gone_with_the_last() -> None:
    first = WorkerPool(1, lambda channel: channel.recv())
    second = WorkerPool(1, lambda channel: channel.recv())
    zygote = first._state.zygote
    assert zygote is not None
    assert second._state.zygote is zygote
    pidfd = os.dup(zygote.pidfd)
    first.close()
    assert not select.select([pidfd], [], [], 0)[0]
    second.close()
    assert select.select([pidfd], [], [], 0)[0]
    os.close(pidfd)
    assert not Path(f"/proc/{zygote.pid}").exists()  # reaped too


def test_a_new_crew_after_the_loss_of_the_zygote_gets_a_new_one(warm_zygote: int) -> None:
    signal.pidfd_send_signal(warm_zygote, signal.SIGKILL)
    assert select.select([warm_zygote], [], [], PATIENCE_S)[0]
    assert _asked(lambda channel: "up") == "up"


def test_after_the_loss_of_the_zygote_every_worker_is_dead_and_can_be_restarted() -> None:
    def echo(channel: Channel) -> None:
        while (received := channel.recv()) is not None:
            channel.send(received[0])

    def answers(pool: WorkerPool) -> set[Event]:
        events: set[Event] = set()
        while len(events) < 2:
            some = pool.wait(PATIENCE_S)
            assert some
            events.update(some)
        return events

    with WorkerPool(2, echo) as pool:
        for lifetime in range(2):
            for index in range(2):
                pool.send(index, b"x")
            assert answers(pool) == {Message(0, b"x"), Message(1, b"x")}
            zygote = pool._state.zygote
            assert zygote is not None
            os.kill(zygote.pid, signal.SIGKILL)
            deaths = {(e.worker, e.signal) for e in answers(pool) if isinstance(e, WorkerExit)}
            assert deaths == {(0, signal.SIGKILL), (1, signal.SIGKILL)}, f"in lifetime {lifetime}"
            for index in range(2):
                pool.restart(index)


def test_a_release_inside_an_acquire_is_done_afterwards() -> None:
    """Release as a finalizer does that runs while its own thread is in `acquire`."""
    zygote = zygotes.acquire()
    pidfd = os.dup(zygote.pidfd)
    with zygotes._lock:
        zygotes.release(zygote)
        assert not select.select([pidfd], [], [], 0)[0]
    other = zygotes.acquire()  # took the old one once more, then let the release through
    zygotes.release(other)
    assert select.select([pidfd], [], [], 0)[0]
    os.close(pidfd)


def test_a_worker_that_is_started_after_its_pool_was_closed_is_killed(warm_zygote: int) -> None:
    read_end, write_end = os.pipe()
    signal.pidfd_send_signal(warm_zygote, signal.SIGSTOP)
    pool = WorkerPool(1, lambda channel: signal.pause(), fds=[write_end])
    os.close(write_end)
    pool.close()
    signal.pidfd_send_signal(warm_zygote, signal.SIGCONT)
    assert select.select([read_end], [], [], PATIENCE_S)[0]
    assert os.read(read_end, 1) == b""  # the last copy of the other end is closed
    os.close(read_end)


def test_an_interpreter_that_cannot_be_executed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(UnsupportedEnvironment, match="/nowhere/python"):
        WorkerPool(1, lambda channel: None)


def test_a_zygote_that_fails_to_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with WorkerPool(2, lambda channel: None) as pool:
        with pytest.raises(UnsupportedEnvironment, match="ended with exit code 1"):
            pool.wait(PATIENCE_S)


def test_a_kernel_without_pidfds_is_unsuitable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(UnsupportedEnvironment, match="pidfd_open.*Function not implemented"):
        WorkerPool(1, lambda channel: None)


@pytest.mark.usefixtures("warm_zygote")
def test_a_system_without_memory_files_is_unsuitable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsupportedEnvironment, match="memfd_create"):
        WorkerPool(1, lambda channel: None)
