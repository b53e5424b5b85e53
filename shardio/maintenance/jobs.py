"""A job for each shard of a dataset, in any order: here, in worker processes, or on a Ray cluster.

Processes may end over a job, and machines may be lost: the job is done again. So it writes, if
anything, into a folder that it makes for itself.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from shardio._workers.processes.channel import Channel, MessageAssembler, send_chunks
from shardio._workers.processes.serialization import pack_error, unpack_error
from shardio._workers.processes.worker_pool import Event, Failed, WorkerExit, WorkerPool
from shardio._workers.ray_cluster import MAX_DEATHS, Cluster, Engine
from shardio.dataset.dataset import ShardDataset
from shardio.errors import ShardioError, WorkerDied

R = TypeVar("R")

_RESULT: Final = b"r"
_ERROR: Final = b"e"


class ShardJob:
    """A job over the shards of a dataset: lent by the process that made it, reopened elsewhere.

    It always reads the same generation, even if others are published.
    """

    def __init__(self, dataset: ShardDataset) -> None:
        self._place, self._subset = os.path.abspath(dataset.path), dataset.subset
        self._number = dataset.generation
        self._dataset: ShardDataset | None = dataset

    @property
    def dataset(self) -> ShardDataset:
        """The dataset, open."""
        if self._dataset is None:
            self._dataset = ShardDataset(self._place, subset=self._subset, generation=self._number)
        return self._dataset

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}


def done_for_each(
    function: Callable[[int], R],
    n_shards: int,
    *,
    workers: int | None,
    engine: Engine,
    sees: str | os.PathLike[str],
) -> Iterator[tuple[int, R]]:
    """Run a job for each shard, and yield its number and result as it finishes.

    Args:
        function: takes the number of a shard; travels by cloudpickle, once per process.
        n_shards: how many there are.
        workers: processes, of all machines together; by default, and with 0, it is this one alone,
            but on a cluster as many as that has CPUs.
        engine: where the processes run.
        sees: a path that all machines of a cluster must see.

    Raises:
        WorkerDied: over one shard, too many processes crashed or machines were lost.
        Exception: raised by the function.
    """
    if engine.is_ray:
        jobs = iter(enumerate(range(n_shards)))
        with Cluster(engine, sees=sees, n_at_once=workers) as cluster:
            yield from cluster.run(function, partial(next, jobs, None), _named)
    elif workers and n_shards:
        with WorkerPool(
            min(workers, n_shards), partial(_serve, function), preload=(__name__,)
        ) as pool:
            yield from _Round(pool, n_shards).run()
    else:
        for number in range(n_shards):
            yield number, function(number)


class _Round:
    """The assignment of shards to the workers of a pool, which it borrows."""

    def __init__(self, pool: WorkerPool, n_shards: int) -> None:
        self._pool, self._waiting = pool, list(reversed(range(n_shards)))
        self._doing: dict[int, int] = {}
        self._n_deaths: Counter[int] = Counter()
        self._pieces = MessageAssembler()

    def run(self) -> Iterator[tuple[int, Any]]:
        """Yield the number and the result of each shard as it finishes."""
        for worker in range(len(self._pool)):
            self._assign(worker)
        while self._doing:
            for event in self._pool.wait():
                yield from self._take(event)

    def _assign(self, worker: int) -> None:
        if self._waiting:
            self._doing[worker] = self._waiting.pop()
            self._pool.send(worker, b"%d" % self._doing[worker])

    def _take(self, event: Event) -> Iterator[tuple[int, Any]]:
        if isinstance(event, WorkerExit):
            self._on_worker_exit(event)
        elif isinstance(event, Failed):
            raise WorkerDied(f"a worker failed:\n{event.text}")
        elif (whole := self._pieces.take(event.worker, event.data)) is not None:
            if whole[:1] == _ERROR:
                raise unpack_error(whole[1:])
            number = self._doing.pop(event.worker)
            self._assign(event.worker)
            yield number, pickle.loads(whole[1:])  # from our own worker, never from data

    def _on_worker_exit(self, died: WorkerExit) -> None:
        """Give the shard of a crashed worker to another process."""
        self._pieces.forget(died.worker)
        number = self._doing.pop(died.worker, None)
        if number is None:
            return  # it was idle, and no jobs are left
        self._n_deaths[number] += 1
        if self._n_deaths[number] == MAX_DEATHS:
            raise WorkerDied(
                f"{MAX_DEATHS} workers ended over {_named(number)}: signal {died.signal}, exit "
                f"code {died.exit_code}"
            )
        self._waiting.append(number)
        self._pool.restart(died.worker)
        self._assign(died.worker)


def _named(number: int) -> str:
    return f"shard {number}"


def _serve(function: Callable[[int], Any], channel: Channel) -> None:
    """Do one job after another, as main names their shards. Runs in a worker."""
    while (message := channel.recv()) is not None:
        try:
            answer = _RESULT + pickle.dumps(function(int(message)))
        except Exception as error:  # noqa: BLE001  # it is raised in main
            # These errors are clear by themselves
            if not isinstance(error, ShardioError | OSError):
                error.add_note(f"in a worker:\n{traceback.format_exc()}")
            answer = _ERROR + pack_error(error)
        send_chunks(channel, answer)
