"""The trouble that `soak.py` makes for the workers of its loaders."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import threading
import time
from typing import Any

from shardio import ShardLoader
from shardio._workers.processes.worker_pool import WorkerPool
from shardio.errors import ClosedError

__all__ = ["Trouble"]


class Trouble(threading.Thread):
    """A thread that kills and stops workers of the current loader, at random moments."""

    def __init__(self, seed: int, tally: collections.Counter[str]) -> None:
        super().__init__(daemon=True)
        self._random, self._tally = random.Random(seed), tally
        self.loader: ShardLoader | None = None
        self.n_killed = 0

    def run(self) -> None:
        """Kill and stop workers without end."""
        while True:
            time.sleep(self._random.uniform(0.02, 0.3))
            with contextlib.suppress(ProcessLookupError, ClosedError):
                self.strike()

    def strike(self) -> None:
        """Kill or stop one worker of the loader, if it has worker processes."""
        loader = self.loader
        if loader is None or loader.num_workers == 0:
            return
        pool: Any = loader._engine._backend._pool  # type: ignore[union-attr]
        if not isinstance(pool, WorkerPool):  # threads
            return
        alive = [pid for pid in pool.pids() if pid is not None]
        if not alive:
            return
        pid = self._random.choice(alive)
        if self._random.random() < 0.5:
            self.n_killed += 1
            self._tally["workers killed"] += 1
            os.kill(pid, signal.SIGKILL)
        else:
            self._tally["workers stopped for a while"] += 1
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._random.uniform(0, 0.2))
            os.kill(pid, signal.SIGCONT)
