"""Measure what a crew costs main: start, message, wait, restart, close. Prints figures.

    python tools/dev/bench_crew.py

Exits with 1 when a `wait` with one message ready costs 10 us or more, or a `send` 6 us or more.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from shardio._workers.processes.worker_pool import Channel, Message, WorkerExit, WorkerPool

N = 20_000


def _echo(channel: Channel) -> None:
    while (received := channel.recv()) is not None:
        channel.send(received[0])


def _flood(channel: Channel) -> None:
    while (received := channel.recv()) is not None:
        for _ in range(int(received[0])):
            channel.send(b"x" * 32)


def _swallow(channel: Channel) -> None:
    while channel.recv() is not None:
        pass


def _per_call_us(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e6


def _timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _first_answer_ms() -> float:
    start_s = time.perf_counter()
    with WorkerPool(2, _echo) as crew:
        crew.send(0, b"a")
        crew.wait()
        return (time.perf_counter() - start_s) * 1e3


def _wait_us() -> float:
    """Return a `wait` that finds one message in the socket, timed one by one."""
    with WorkerPool(1, _flood) as crew:
        times: list[float] = []
        while len(times) < N:
            crew.send(0, b"100")
            crew.wait()
            time.sleep(0.002)  # the other 99 are in the socket by then
            times.extend(_timed(crew.wait) for _ in range(99))
    return _per_call_us(times)


def _send_us() -> float:
    with WorkerPool(1, _swallow) as crew:
        times: list[float] = []
        while len(times) < N:
            times.extend(_timed(lambda: crew.send(0, b"x" * 32)) for _ in range(50))
            time.sleep(0.001)  # the socket is empty again
    return _per_call_us(times)


def _round_trip_us() -> float:
    with WorkerPool(1, _echo) as crew:

        def ask() -> None:
            crew.send(0, b"x")
            crew.wait()

        return _per_call_us([_timed(ask) for _ in range(N)])


def _rate() -> float:
    """Messages per second that two workers send as fast as they can."""
    with WorkerPool(2, _flood) as crew:
        crew.wait(0.5)
        for index in range(2):
            crew.send(index, b"%d" % N)
        start_s = time.perf_counter()
        n_messages = 0
        while n_messages < 2 * N:
            n_messages += sum(isinstance(event, Message) for event in crew.wait())
        return n_messages / (time.perf_counter() - start_s)


def _restart_ms() -> float:
    def leave(channel: Channel) -> None:
        channel.recv()

    times = []
    with WorkerPool(1, leave) as crew:
        for _ in range(50):
            crew.send(0, b"go")
            while not any(isinstance(event, WorkerExit) for event in crew.wait()):
                continue
            times.append(_timed(lambda: crew.restart(0)))
    return statistics.median(times) * 1e3


def main() -> int:
    """Print every figure; return 1 when one that is bounded is out of bounds."""
    print(f"first answer, cold          {_first_answer_ms():8.2f} ms")
    with WorkerPool(1, _echo):
        warm = statistics.median(_first_answer_ms() for _ in range(20))
        print(f"first answer, warm          {warm:8.2f} ms")
        print(f"restart, cost on main       {_restart_ms():8.2f} ms")
        wait_us, send_us = _wait_us(), _send_us()
        print(f"wait, one message ready     {wait_us:8.2f} us  (bound 10)")
        print(f"send                        {send_us:8.2f} us  (bound 6)")
        print(f"round trip                  {_round_trip_us():8.2f} us")
        print(f"messages from two workers   {_rate():8.0f} per second")
    return 1 if wait_us >= 10 or send_us >= 6 else 0


if __name__ == "__main__":
    sys.exit(main())
