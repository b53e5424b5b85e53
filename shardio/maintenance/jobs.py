"""Run a job for each shard of a dataset: in this process, in workers, or on a Ray cluster.

A job is repeated if its process crashes or its machine is lost. A job that writes files therefore
writes them to a new folder in each attempt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from shardio._workers.processes.serialization import pack_error, unpack_error
from shardio._workers.ray_cluster import Cluster, Engine
from shardio._workers.tasks.task_pool import TaskPool
from shardio.errors import ShardioError
from shardio.samples.shard_dataset import ShardDataset

R = TypeVar("R")


class ShardJob:
    """A job that reads shards of a dataset. It borrows the dataset; other processes reopen it.

    The job always reads the same generation, even after later generations are published.
    """

    def __init__(self, dataset: ShardDataset) -> None:
        self._place, self._subset = os.path.abspath(dataset.path), dataset.subset_name
        self._number = dataset.generation
        self._dataset: ShardDataset | None = dataset

    @property
    def dataset(self) -> ShardDataset:
        """The open dataset."""
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
    """Run a job for each shard; yield the shard's index and the result as each job finishes.

    Args:
        function: receives the index of a shard; sent by cloudpickle, once per process.
        n_shards: the number of shards.
        workers: the number of processes, over all machines. By default, and with 0, jobs run in
            this process; on a cluster, the default is the cluster's number of CPUs.
        engine: the engine that runs the processes.
        sees: a path that all machines of a cluster must see.

    Raises:
        WorkerDied: too many processes crashed, or machines were lost, on one shard.
        Exception: raised by the function.
    """
    if engine.is_ray:
        jobs = iter(enumerate(range(n_shards)))
        with Cluster(engine, sees=sees, n_at_once=workers) as cluster:
            yield from cluster.run(function, partial(next, jobs, None), _named)
    elif workers and n_shards:
        yield from _in_workers(function, n_shards, min(workers, n_shards))
    else:
        for number in range(n_shards):
            yield number, function(number)


def _in_workers(
    function: Callable[[int], R], n_shards: int, n_workers: int
) -> Iterator[tuple[int, R]]:
    """Run the jobs in worker processes; each idle worker is assigned the next job."""
    with TaskPool(
        partial(_try, function),
        n_workers,
        most_items=n_workers,
        in_order=False,
        preload=[__name__],
        is_called="the job",
    ) as pool:
        n_done = n_put = 0
        while n_done < n_shards:
            while n_put < n_shards and pool.has_room:
                n_put = 1 + pool.put(n_put, _named(n_put))
            pool.wait()
            while (finished := pool.take()) is not None:
                number, (result, failure) = finished
                if failure is not None:
                    raise unpack_error(failure)
                n_done += 1
                yield number, result


def _try(function: Callable[[int], R], number: int) -> tuple[R | None, bytes | None]:
    """Return the result of a job, or a packed ShardioError or OSError, without its traceback."""
    try:
        return function(number), None
    except (ShardioError, OSError) as error:
        return None, pack_error(error)


def _named(number: int) -> str:
    return f"shard {number}"
