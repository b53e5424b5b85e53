"""Messages, ends and restarts of workers, seen from the pool's owner."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest

from shardio._workers.processes.worker_main import MAX_MESSAGE_BYTES, Channel
from shardio._workers.processes.worker_pool import Event, Failed, Message, WorkerExit, WorkerPool
from shardio.errors import ClosedError, InvalidArgument, WorkerDied

pytestmark = pytest.mark.usefixtures("warm_zygote")

# Generous: reached only by a test that is about to fail.
PATIENCE_S = 30.0


def _echo() -> Callable[[Channel], None]:
    def echo(channel: Channel) -> None:
        while (received := channel.recv()) is not None:
            channel.send(received[0])

    return echo


def _events(pool: WorkerPool, n_events: int) -> list[Event]:
    """Wait for at least `n_events` events."""
    events: list[Event] = []
    while len(events) < n_events:
        some = pool.wait(PATIENCE_S)
        assert some, f"no event came after {events}"
        events += some
    return events


def _until_dead(pool: WorkerPool) -> list[Event]:
    """Wait until every worker of the pool has died; give all events, the deaths among them."""
    events: list[Event] = []
    while sum(isinstance(event, WorkerExit) for event in events) < len(pool):
        events += _events(pool, 1)
    return events


def _open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_send_keeps_what_a_worker_does_not_read_yet_and_wait_sends_it() -> None:
    def read_when_told(channel: Channel) -> None:
        (told,) = channel.fds
        os.read(told, 1)
        for n in range(3000):
            received = channel.recv()
            if received != (b"%d" % n + b"." * 1000, ()):
                channel.send(b"at %d came %r" % (n, received))
        channel.send(b"all")

    told, tell = os.pipe()
    with WorkerPool(1, read_when_told, fds=[told]) as pool:
        for n in range(3000):
            pool.send(0, b"%d" % n + b"." * 1000)
        os.write(tell, b"x")
        assert _until_dead(pool)[:-1] == [Message(0, b"all")]
    os.close(told)
    os.close(tell)


@pytest.mark.usefixtures("swept")
def test_descriptors_travel_both_ways_and_with_queued_messages() -> None:
    def give_back(channel: Channel) -> None:
        for _ in range(600):
            received = channel.recv()
            if received is not None:
                channel.send(received[0], received[1])
                for fd in received[1]:
                    os.close(fd)

    before = _open_fds()
    with WorkerPool(1, give_back) as pool:
        read_end, write_end = os.pipe()
        for n in range(600):
            pool.send(0, b"%d" % n, fds=[write_end])
        os.close(write_end)
        for n, event in enumerate(_events(pool, 600)[:600]):
            assert isinstance(event, Message)
            assert event.data == b"%d" % n
            os.write(event.fds[0], b"%d " % n)
            os.close(event.fds[0])
        # Every copy of the write end is closed, so the pipe ends.
        assert os.read(read_end, 100_000).split() == [b"%d" % n for n in range(600)]
        assert os.read(read_end, 1) == b""
        os.close(read_end)
    assert _open_fds() == before


@pytest.mark.usefixtures("swept")
def test_descriptors_of_events_that_nobody_waited_for_are_closed() -> None:
    def give(channel: Channel) -> None:
        channel.send(b"take", [channel._socket.fileno()])
        channel.recv()

    before = _open_fds()
    pool = WorkerPool(1, give)
    assert select.select([pool._state.workers[0].socket], [], [], PATIENCE_S)[0]
    pool._state._receive(pool._state.workers[0])
    pool.close()
    assert _open_fds() == before


def test_a_message_of_the_wrong_size_is_refused_and_the_largest_is_echoed() -> None:
    with WorkerPool(1, _echo()) as pool:
        for message in (b"", b"x" * (MAX_MESSAGE_BYTES + 1)):
            with pytest.raises(InvalidArgument, match=f"has {len(message)}"):
                pool.send(0, message)
        pool.send(0, message[1:])
        assert _events(pool, 1) == [Message(0, message[1:])]


def test_all_messages_of_a_worker_come_before_its_death() -> None:
    def leave_at_once(channel: Channel) -> None:
        for n in range(200):
            channel.send(b"%d" % n)
        os._exit(0)

    with WorkerPool(3, leave_at_once) as pool:
        for index in range(3):
            pool.send(index, b"never read: the worker's end is then reset, not closed")
        events = _until_dead(pool)
    for index in range(3):
        own = [event for event in events if event.worker == index]
        assert own[:-1] == [Message(index, b"%d" % n) for n in range(200)]
        assert isinstance(own[-1], WorkerExit)


@pytest.mark.parametrize(
    ("end", "death"),
    [
        ("pass", (None, 0)),
        ("os._exit(0)", (None, 0)),
        ("os._exit(7)", (None, 7)),
        ("os.kill(os.getpid(), 9)", (9, None)),
        ("os.abort()", (6, None)),
    ],
)
def test_an_end_without_exception(end: str, death: tuple[int | None, int | None]) -> None:
    with WorkerPool(1, lambda channel: exec(end, {"os": os})) as pool:
        (died,) = _until_dead(pool)
        assert isinstance(died, WorkerExit)
        assert (died.signal, died.exit_code) == death
        assert [died.pid] == pool.pids()


@pytest.mark.parametrize(
    ("end", "last_line"),
    [
        ("sys.exit(3)", "SystemExit: 3"),
        ("raise SystemExit", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise StopIteration", "StopIteration"),
        ("raise ValueError('x' * 500_000)", "ValueError: " + "x" * 500_000),
        ("raise ValueError(lambda: 0)", "ValueError: <function <lambda> at "),
        ("raise ValueError('\\udcff')", "ValueError: \\udcff"),
    ],
)
def test_an_exception_comes_with_its_traceback(end: str, last_line: str) -> None:
    with WorkerPool(1, lambda channel: exec(end, {"sys": __import__("sys")})) as pool:
        failed, died = _until_dead(pool)
    assert isinstance(failed, Failed)
    assert failed.text.startswith("Traceback (most recent call last):")
    assert failed.text.splitlines()[-1].startswith(last_line)
    assert isinstance(died, WorkerExit)
    assert (died.signal, died.exit_code) == (None, 1)


@pytest.mark.usefixtures("swept")
def test_a_function_that_cannot_be_pickled_is_refused_and_nothing_is_left_open() -> None:
    before = _open_fds()
    lock = threading.Lock()
    with pytest.raises(InvalidArgument, match="cannot be sent to worker processes.*lock"):
        WorkerPool(1, lambda channel: lock.acquire())
    assert _open_fds() == before


def test_a_worker_that_closes_its_channel_is_not_dead_yet() -> None:
    def close_and_stay(channel: Channel) -> None:
        os.write(channel.fds[0], b"%d" % os.getpid())
        channel._socket.close()
        time.sleep(1000)

    read_end, write_end = os.pipe()
    with WorkerPool(1, close_and_stay, fds=[write_end]) as pool:
        pid = int(os.read(read_end, 100))
        assert pool.wait(0.1) == []
        os.kill(pid, signal.SIGTERM)
        assert _until_dead(pool) == [WorkerExit(0, pid, signal.SIGTERM, None)]
    os.close(read_end)
    os.close(write_end)


def test_a_restarted_worker_has_the_same_place_function_and_descriptors() -> None:
    def count_up(channel: Channel) -> None:
        n = int(os.pread(channel.fds[0], 10, 0) or b"0") + 1
        os.pwrite(channel.fds[0], b"%d" % n, 0)
        channel.send(b"life %d of worker %d" % (n, channel.index))

    memory = os.memfd_create("lives")
    with WorkerPool(1, count_up, fds=[memory]) as pool:
        os.close(memory)
        with pytest.raises(InvalidArgument, match="not reported dead"):
            pool.restart(0)
        pids = set()
        for n in range(1, 4):
            message, died = _until_dead(pool)
            assert message == Message(0, b"life %d of worker 0" % n)
            assert isinstance(died, WorkerExit)
            pids.add(died.pid)
            with pytest.raises(WorkerDied, match="worker 0 has died and was not restarted"):
                pool.send(0, b"x")
            pool.restart(0)
        assert len(pids) == 3


def test_a_message_queued_for_a_dead_worker_does_not_reach_its_successor() -> None:
    def answer(channel: Channel) -> None:
        message = channel.recv()
        channel.send(message[0] if message else b"none")

    with WorkerPool(1, answer) as pool:
        pool.send(0, b"first")
        for _ in range(50):  # more than the socket takes, fewer than a process may have open
            pool.send(0, b"unread" * 10_000, fds=[0])
        assert _until_dead(pool)[0] == Message(0, b"first")
        pool.restart(0)
        pool.send(0, b"second")
        assert _until_dead(pool)[0] == Message(0, b"second")


def _stuck(kind: str) -> Callable[[Channel], None]:
    def stuck(channel: Channel) -> None:
        import collections
        import itertools

        channel.send(b"up")
        if kind == "in C":
            collections.deque(itertools.repeat(0), maxlen=0)
        elif kind == "sending":
            while True:
                with contextlib.suppress(BrokenPipeError):
                    channel.send(b"x" * 1000)
        elif kind == "asleep":
            time.sleep(1000)
        elif kind == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(1000)

    return stuck


def _pidfds(pool: WorkerPool) -> list[int]:
    """Take copies of the pidfds of all workers, which have each sent a message."""
    _events(pool, len(pool))
    end_s = time.monotonic() + PATIENCE_S
    while None in pool.pids():
        assert time.monotonic() < end_s, f"workers are still unknown: {pool.pids()}"
        pool.wait(0.01)
    return [os.dup(worker.pidfd) for worker in pool._state.workers if worker.pidfd is not None]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `close` wait for killed workers: a busy machine may take more than its limit."""
    monkeypatch.setattr("shardio._workers.processes.pool_state._KILL_TIMEOUT_S", PATIENCE_S)


def _all_ended(pidfds: list[int]) -> bool:
    ended = [bool(select.select([pidfd], [], [], 0)[0]) for pidfd in pidfds]
    for pidfd in pidfds:
        os.close(pidfd)
    return len(ended) > 0 and all(ended)


@pytest.mark.parametrize("kind", ["idle", "in C", "sending", "asleep", "deaf"])
def test_all_workers_are_gone_when_close_returns(kind: str) -> None:
    pool = WorkerPool(2, _stuck(kind))
    pidfds = _pidfds(pool)
    pool.close()
    assert _all_ended(pidfds)
    pool.close()


def test_a_closed_crew_says_so() -> None:
    pool = WorkerPool(1, _echo())
    pool.close()
    for use in (lambda: pool.wait(0), lambda: pool.send(0, b"x"), lambda: pool.restart(0)):
        with pytest.raises(ClosedError, match="stopped by close"):
            use()


def test_close_in_a_signal_handler_ends_the_wait_that_it_interrupts() -> None:
    pool = WorkerPool(1, _stuck("asleep"))
    _events(pool, 1)

    def close(number: int, frame: FrameType | None) -> None:
        pool.close()

    before = signal.signal(signal.SIGALRM, close)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(ClosedError):
            pool.wait(PATIENCE_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it would kill this process after a failure
        signal.signal(signal.SIGALRM, before)


def test_close_in_several_threads_at_once_returns_when_the_workers_are_gone() -> None:
    pool = WorkerPool(2, _stuck("asleep"))
    pidfds = _pidfds(pool)
    ended = []

    def close() -> None:
        pool.close()
        ended.append(all(select.select([pidfd], [], [], 0)[0] for pidfd in pidfds))

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ended == [True] * 4
    assert _all_ended(pidfds)


@pytest.mark.usefixtures("swept")
def test_sixty_crews_one_after_the_other_leak_no_descriptor() -> None:
    before = _open_fds()
    for n in range(60):
        pool = WorkerPool(1, _echo())
        if n % 2:
            pool.send(0, b"x")
            _events(pool, 1)
        if n % 3:
            pool.close()  # for some, before the workers exist
        del pool
    assert _open_fds() == before


def test_ctrl_c_inside_wait_loses_and_doubles_no_message() -> None:
    """Interrupts `wait` some hundred times, wherever the timer strikes inside it."""

    def count(channel: Channel) -> None:
        for n in range(20_000):
            channel.send(b"%d" % n)

    n_interrupts = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal n_interrupts
        while frame is not None:
            if frame.f_code is WorkerPool.wait.__code__:
                n_interrupts += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    numbers: list[int] = []
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with WorkerPool(1, count) as pool:
            # In the finalizer of another test's garbage, the exception would not reach this test.
            gc.collect()
            gc.disable()
            # Far above what one `wait` takes, or none would ever get through.
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            is_dead, end_s = False, time.monotonic() + PATIENCE_S
            while not is_dead:
                assert time.monotonic() < end_s, f"only {len(numbers)} messages came"
                with contextlib.suppress(KeyboardInterrupt):
                    events = pool.wait()
                    numbers += [int(event.data) for event in events if isinstance(event, Message)]
                    is_dead = any(isinstance(event, WorkerExit) for event in events)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert n_interrupts > 0
    assert numbers == list(range(20_000))


@pytest.mark.parametrize("kind", ["idle", "in C"])
def test_a_crew_that_is_collected_ends_its_workers(kind: str) -> None:
    pool = WorkerPool(2, _stuck(kind))
    pidfds = _pidfds(pool)
    cycle: list[object] = [pool]
    cycle.append(cycle)
    del pool, cycle
    gc.collect()
    assert _all_ended(pidfds)
