"""Measure what a ShardLoader costs main per batch, and how long its first batch takes.

    DEV=CPU python tools/dev/bench_loader.py

Makes a dataset of two fields in a temporary folder. A batch costs what the thread that iterates
spends on a CPU (`time.thread_time`) while nothing is done in the loop's body, apart from what it
spends in waiting for workers (`WorkerPool.wait`), which is printed beside it. The lanes take turns
for several rounds of epochs, and the cheapest epoch counts. First batches are timed from the call
of the constructor: cold in fresh processes that have imported shardio and NumPy, warm while another
loader is open. Exits with 1 when a figure is above its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

import shardio
from shardio import Array, Schema, ShardLoader
from shardio._workers.processes.worker_pool import Event, WorkerPool

N_SAMPLES = 32_768
BATCH = 32
SCHEMA = Schema({"image": Array("uint8", (1024,)), "label": Array("int64")})

LIMITS_US = {"arrays": 30.0, "tensors": 150.0, "tensors, reuse": 30.0}
LANES: dict[str, dict[str, Any]] = {
    "arrays": {"output": "numpy"},
    "tensors": {"output": "tinygrad"},
    "tensors, reuse": {"output": "tinygrad", "reuse": True},
}
COLD_LIMIT_S, WARM_LIMIT_S = 0.4, 0.1

# Run in a fresh interpreter: only what the user has imported anyway comes before the clock.
COLD = """
import sys, time
import numpy
import shardio
shardio.ShardLoader  # the name is loaded when it is first used
start_s = time.perf_counter()
loader = shardio.ShardLoader(sys.argv[1], 32, output="numpy", shuffle=True)
batch = next(iter(loader))
print(time.perf_counter() - start_s)
"""


def _samples() -> Iterator[dict[str, Any]]:
    image = np.zeros(1024, np.uint8)
    return ({"image": image, "label": i} for i in range(N_SAMPLES))


def _write(folder: str) -> None:
    with shardio.DatasetWriter(folder, SCHEMA) as writer:
        for sample in _samples():
            writer.append(sample)


Wait = Callable[[WorkerPool, float | None], list[Event]]


def _timed(wait: Wait, spent_s: list[float]) -> Wait:
    """Return the same wait, which notes the CPU seconds that it takes."""

    def timed_wait(crew: WorkerPool, timeout_s: float | None = None) -> list[Event]:
        start_s = time.thread_time()
        try:
            return wait(crew, timeout_s)
        finally:
            spent_s.append(time.thread_time() - start_s)

    return timed_wait


@contextlib.contextmanager
def _waits_timed() -> Iterator[list[float]]:
    """Collect the CPU seconds of every wait of a crew."""
    spent_s: list[float] = []
    with mock.patch.object(WorkerPool, "wait", _timed(WorkerPool.wait, spent_s)):
        yield spent_s


def _timing_costs_s() -> float:
    """Return the cost of timing one wait that it does not record itself."""

    def no_wait(crew: WorkerPool | None, timeout_s: float | None = None) -> list[Event]:
        return []

    found = []
    for _ in range(20):
        spent_s: list[float] = []
        timed: Any = _timed(no_wait, spent_s)
        moments = [time.thread_time()]
        for call in (timed, no_wait):
            for _ in range(1000):
                call(None, None)
            moments.append(time.thread_time())
        start_s, middle_s, end_s = moments
        found.append((middle_s - start_s - sum(spent_s) - (end_s - middle_s)) / 1000)
    return max(0.0, min(found))


def _per_batch_us(folder: str, n_epochs: int, options: dict[str, Any]) -> tuple[float, float]:
    """Return the cheapest epoch's CPU time per batch, and of its waits, without the first."""
    costs, timing_s = [], _timing_costs_s()
    with _waits_timed() as spent_s, ShardLoader(folder, BATCH, shuffle=True, **options) as loader:
        for _ in range(n_epochs + 1):
            spent_s.clear()
            start_s = time.thread_time()
            for _ in loader:
                pass
            whole_s = time.thread_time() - start_s - len(spent_s) * timing_s
            waiting_s, n_batches = sum(spent_s), len(loader)
            costs.append(((whole_s - waiting_s) / n_batches * 1e6, waiting_s / n_batches * 1e6))
    return min(costs[1:])


def _cold_s(folder: str, n_times: int) -> list[float]:
    command = [sys.executable, "-c", COLD, folder]
    return [
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(n_times)
    ]


def _first_batch_s(folder: str) -> float:
    start_s = time.perf_counter()
    with ShardLoader(folder, BATCH, output="numpy", shuffle=True) as loader:
        next(iter(loader))
        return time.perf_counter() - start_s


def _report(name: str, found: float, limit: float, unit: str) -> bool:
    """Print one figure beside its limit; tell whether it is within."""
    verdict = "" if found <= limit else "   ABOVE ITS LIMIT"
    print(f"{name:32} {found:8.1f} {unit}  (limit {limit:.0f}){verdict}")
    return found <= limit


def main() -> int:
    """Print every figure; return 1 when one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15, help="epochs of each lane in a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over the lanes")
    parser.add_argument("--times", type=int, default=7, help="how many first batches are timed")
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    within = []
    with tempfile.TemporaryDirectory() as parent:
        folder = os.path.join(parent, "set")
        _write(folder)
        costs: dict[str, list[tuple[float, float]]] = {lane: [] for lane in LANES}
        for _ in range(arguments.rounds):  # the lanes in turn: a busy minute must not hit only one
            for lane, options in LANES.items():
                costs[lane].append(_per_batch_us(folder, arguments.epochs, options))
        for lane, found in costs.items():
            found_us, waiting_us = min(found)
            within.append(_report(f"main per batch, {lane}", found_us, LIMITS_US[lane], "us"))
            print(f"{'    and in waiting':32} {waiting_us:8.1f} us")
        cold_s = statistics.median(_cold_s(folder, arguments.times))
        within.append(_report("first batch, cold", cold_s * 1e3, COLD_LIMIT_S * 1e3, "ms"))
        with ShardLoader(folder, BATCH, output="numpy") as other:
            next(iter(other))
            warm_s = statistics.median(_first_batch_s(folder) for _ in range(arguments.times))
        within.append(_report("first batch, warm", warm_s * 1e3, WARM_LIMIT_S * 1e3, "ms"))
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
