"""Kill workers of a loader at random moments; every batch must still come, in order, bit for bit.

    tools/stress workers [--times 300 | --minutes N] [--workers 2] [--seed 0]

Prints the number of kills, how long the loop waited for the batch after a kill, and the number of
wrong epochs. Exits with 1 if a batch was lost, came twice or differs from that of num_workers=0, or
if a kill made the loop wait at least LIMIT_MS longer for a batch than it waits without kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from shardio import Array, Batch, DatasetWriter, Schema, ShardLoader, Text
from shardio.format.checksum import hash_bytes
from stress_tests.program import Deadline, make_parser, memory_folder

N, BATCH = 2048, 16
LIMIT_MS = 100.0
N_BETWEEN = 4
"""The number of batches between two kills: a batch that crashes two workers is not repeated."""

SCHEMA = Schema({"image": Array("uint8", (32, 32, 3)), "label": Array("int64"), "note": Text()})


def _write(folder: str) -> None:
    rng = np.random.default_rng(0)
    with DatasetWriter(folder, SCHEMA, shard_bytes=1 << 20) as writer:
        for i in range(N):
            image = rng.integers(0, 256, (32, 32, 3), np.uint8)
            writer.append({"image": image, "label": i, "note": f"sample {i} " * (i % 7)})


def _draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Work for about 100 us, and draw from every generator."""
    noise = rng.normal(size=(32, 32, 3))
    drawn = [random.random(), float(np.random.random())]
    return {**sample, "image": (sample["image"] + noise).astype(np.float32), "drawn": drawn}


def _digest(batch: Batch) -> int:
    values = [np.ascontiguousarray(batch[name]).tobytes() for name in ("image", "label", "drawn")]
    return hash_bytes(b"".join([*values, repr(batch["note"]).encode(), batch.indices.tobytes()]))


class Killer(threading.Thread):
    """A thread that kills a random worker at a random moment, once for each call of `allow`."""

    def __init__(self, loader: ShardLoader, seed: int, longest_s: float) -> None:
        super().__init__(daemon=True)
        self._loader, self._random, self._longest_s = loader, random.Random(seed), longest_s
        self._may = threading.Semaphore(0)
        self.n_killed = 0
        self.is_over = False

    def allow(self) -> None:
        """Allow one more kill."""
        self._may.release()

    def run(self) -> None:
        """Kill until the program ends."""
        while not self.is_over:
            self._may.acquire()
            time.sleep(self._random.uniform(0, self._longest_s))
            pids = self._loader._engine._backend._pool.pids()  # type: ignore[union-attr]
            alive = [pid for pid in pids if pid is not None]
            if alive and not self.is_over:
                # A process that has exited since then is reaped, and does not count.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._random.choice(alive), signal.SIGKILL)
                    self.n_killed += 1


def _timed(loader: ShardLoader) -> Iterator[tuple[Batch, float]]:
    """Yield each batch of an epoch, and how long the loop waited for it, in ms."""
    batches = iter(loader)
    while True:
        start_s = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, (time.perf_counter() - start_s) * 1e3


def _run(folder: str, n_times: int, deadline: Deadline, n_workers: int, seed: int) -> int:
    options: dict[str, Any] = {"output": "numpy", "shuffle": True, "transform": _draw}
    n_wrong, struck = 0, [0.0]
    with (
        ShardLoader(folder, BATCH, num_workers=0, **options) as here,
        ShardLoader(folder, BATCH, num_workers=n_workers, **options) as loader,
    ):
        waits = [waited for _, waited in _timed(loader)]
        expected = [_digest(batch) for batch in here]  # the epoch that the loader has had
        usual_ms = statistics.median(waits)
        killer = Killer(loader, seed, 4 * usual_ms / 1e3)
        killer.start()
        while killer.n_killed < n_times and not deadline.is_over():
            expected = [_digest(batch) for batch in here]
            found, n_since, n_seen = [], 0, killer.n_killed
            for batch, waited in _timed(loader):
                found.append(_digest(batch))
                struck.append(waited)
                n_since = n_since + 1 if killer.n_killed == n_seen else 0
                n_seen = killer.n_killed
                if n_since == N_BETWEEN and n_seen < n_times:
                    killer.allow()
            n_wrong += found != expected
        killer.is_over = True
        killer.allow()
        killer.join()
    longest_ms = max(struck) - usual_ms
    print(f"{killer.n_killed} workers killed; epochs that differ from num_workers=0: {n_wrong}")
    print(
        f"waited for a batch: {usual_ms:.1f} ms as a rule, at most {max(waits):.1f} ms in an epoch "
        f"without kills; {max(struck):.1f} ms in those with them (limit {LIMIT_MS:.0f} more)"
    )
    return 1 if n_wrong or longest_ms >= LIMIT_MS else 0


def main(arguments: list[str]) -> int:
    """Kill workers; return the exit code."""
    parser = make_parser("workers", __doc__)
    parser.add_argument("--times", type=int, default=300, help="kills without --minutes")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    deadline = Deadline(options.minutes)
    n_times = sys.maxsize if deadline.is_set else options.times
    with memory_folder() as root:
        folder = str(root / "set")
        _write(folder)
        return _run(folder, n_times, deadline, options.workers, options.seed)
