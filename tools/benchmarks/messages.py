"""Messages between the main process and the workers of a pool, and the starts of workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks import child
from benchmarks.harness import Bench, Lanes, Limit, case
from shardio._workers.processes.worker_pool import Message, WorkerExit, WorkerPool


@case(
    Limit("wait, one message ready", "µs", at_most=10),
    Limit("send", "µs", at_most=6),
    rounds=3,
)
def pool(bench: Bench, *, messages: int = 10_000) -> Lanes:
    """Measure messages of a worker pool, its start, and a restart."""
    yield {"first answer, cold": _first_answer}
    with WorkerPool(1, child.echo):
        yield {
            "first answer, warm": _first_answer,
            "restart, cost on main": _restart,
            "wait, one message ready": partial(_wait, messages),
            "send": partial(_send, messages),
            "round trip": partial(_round_trip, messages),
            "messages from two workers": partial(_flooded, messages),
        }


def _timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _median_us(seconds: list[float]) -> Mapping[str, float]:
    return {"µs": statistics.median(seconds) * 1e6}


def _first_answer() -> Mapping[str, float]:
    start_s = time.perf_counter()
    with WorkerPool(2, child.echo) as workers:
        workers.send(0, b"a")
        workers.wait()
        return {"ms": (time.perf_counter() - start_s) * 1e3}


def _wait(n: int) -> Mapping[str, float]:
    times: list[float] = []
    with WorkerPool(1, child.flood) as workers:
        while len(times) < n:
            workers.send(0, b"100")
            workers.wait()
            time.sleep(0.002)  # until the other 99 messages are in the socket
            times.extend(_timed(workers.wait) for _ in range(99))
    return _median_us(times)


def _send(n: int) -> Mapping[str, float]:
    times: list[float] = []
    with WorkerPool(1, child.swallow) as workers:
        while len(times) < n:
            times.extend(_timed(lambda: workers.send(0, b"x" * 32)) for _ in range(50))
            time.sleep(0.001)  # the socket is empty again
    return _median_us(times)


def _round_trip(n: int) -> Mapping[str, float]:
    with WorkerPool(1, child.echo) as workers:

        def ask() -> None:
            workers.send(0, b"x")
            workers.wait()

        return _median_us([_timed(ask) for _ in range(n)])


def _flooded(n: int) -> Mapping[str, float]:
    with WorkerPool(2, child.flood) as workers:
        workers.wait(0.5)
        for index in range(2):
            workers.send(index, b"%d" % n)
        start_s, n_messages = time.perf_counter(), 0
        while n_messages < 2 * n:
            n_messages += sum(isinstance(event, Message) for event in workers.wait())
        return {"messages/s": n_messages / (time.perf_counter() - start_s)}


def _restart() -> Mapping[str, float]:
    times = []
    with WorkerPool(1, child.leave) as workers:
        for _ in range(50):
            workers.send(0, b"go")
            while not any(isinstance(event, WorkerExit) for event in workers.wait()):
                continue
            times.append(_timed(lambda: workers.restart(0)))
    return _median_us(times)
