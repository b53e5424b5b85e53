"""Run a job for each shard of a dataset: in this process, in workers, or on a Ray cluster.

A job is repeated if its process crashes or its machine is lost. A job that writes files therefore
writes them to a new folder in each attempt.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardio._workers.processes.serialization import pack_error, unpack_error
from shardio._workers.processes.worker_pool import WorkerExit
from shardio._workers.ray_cluster import Cluster, Engine
from shardio._workers.tasks.task_pool import TaskPool
from shardio.errors import ShardioError

if TYPE_CHECKING:
    from shardio.samples.shard_dataset import ShardDataset

R = TypeVar("R")
T = TypeVar("T")

MAX_AHEAD: Final = 3
"""The maximum number of jobs queued for a worker in advance. With 1, a worker with small shards ran
out of work while the main process verified a large shard."""


@dataclass(frozen=True, slots=True)
class MaintenanceProgress:
    """The progress of an operation; `step` is "verifying", "writing", "counting" or "repairing"."""

    step: str
    n_shards_done: int
    n_shards: int
    n_bytes_done: int
    n_bytes: int


Progress = Callable[[MaintenanceProgress], None]


def ends_of(sizes: Iterable[int]) -> list[int]:
    """Return the cumulative sizes, starting with 0, for progress reports."""
    return list(accumulate(sizes, initial=0))


def report_step(progress: Progress | None, step: str, n_done: int, ends: Sequence[int]) -> None:
    """Report that n_done shards are done; `ends` are the cumulative sizes from `ends_of`."""
    if progress is not None:
        progress(MaintenanceProgress(step, n_done, len(ends) - 1, ends[n_done], ends[-1]))


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
            # Imported here, because verification needs no code that reads datasets.
            from shardio.samples.shard_dataset import ShardDataset

            self._dataset = ShardDataset(self._place, subset=self._subset, generation=self._number)
        return self._dataset

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}


def run_for_shards(
    job: Callable[[int], R],
    dataset: ShardDataset,
    step: str,
    progress: Progress | None,
    *,
    engine: Engine,
    workers: int | None = None,
    sees: str | os.PathLike[str] | None = None,
) -> list[R]:
    """Run a job for each shard of a dataset, and report progress; return the results in order."""
    ends, found = ends_of(shard.n_bytes for shard in dataset.shards), dict[int, R]()
    report_step(progress, step, 0, ends)
    results = run_jobs(
        job,
        range(len(dataset.shards)),
        workers=workers,
        engine=engine,
        sees=dataset.path if sees is None else sees,
        preload=type(job).__module__,
    )
    for k, result in results:
        found[k] = result
        report_step(progress, step, len(found), ends)
    return [found[k] for k in range(len(found))]


def run_jobs(
    function: Callable[[T], R],
    items: Sequence[T],
    *,
    workers: int | None,
    engine: Engine,
    sees: str | os.PathLike[str],
    preload: str,
    takes_part: bool = False,
    on_crash: Callable[[T, WorkerExit], R | None] | None = None,
) -> Iterator[tuple[int, R]]:
    """Run a job for each item; yield the item's index and the result as each job finishes.

    Args:
        function: the job; sent by cloudpickle, once per process.
        items: the index or the name of each shard.
        workers: the number of processes, over all machines. By default, and with 0, jobs run in
            this process; on a cluster, the default is the cluster's number of CPUs.
        engine: the engine that runs the processes.
        sees: a path that all machines of a cluster must see.
        preload: the module that worker processes import before they are forked.
        takes_part: True if this process runs jobs too, besides the workers.
        on_crash: returns the result of a job that killed its worker, or None for an error.

    Raises:
        WorkerDied: too many processes crashed, or machines were lost, on one job.
        Exception: raised by the function.
    """
    if engine.is_ray:
        jobs = iter(enumerate(items))
        with Cluster(engine, sees=sees, n_at_once=workers) as cluster:
            yield from cluster.run(
                function, partial(next, jobs, None), lambda number: _named(items[number])
            )
    elif workers and items:
        yield from _run_in_workers(
            function, items, min(workers, len(items)), preload, on_crash, takes_part=takes_part
        )
    else:
        yield from ((number, function(item)) for number, item in enumerate(items))


def _run_in_workers(
    function: Callable[[T], R],
    items: Sequence[T],
    n_workers: int,
    preload: str,
    on_crash: Callable[[T, WorkerExit], R | None] | None,
    *,
    takes_part: bool,
) -> Iterator[tuple[int, R]]:
    """Run jobs in worker processes; with `takes_part`, run some in this process too."""

    def survive(item: T, _: int | None, died: WorkerExit) -> tuple[R, None] | None:
        result = None if on_crash is None else on_crash(item, died)
        return None if result is None else (result, None)

    waiting, under_way = deque(enumerate(items)), dict[int, int]()
    with TaskPool(
        partial(_try, function),
        n_workers,
        most_items=n_workers * (1 + MAX_AHEAD),
        depth=1 + MAX_AHEAD,
        in_order=False,
        preload=[__name__, preload],
        is_called="the job",
        on_crash=survive,
    ) as pool:
        while waiting or under_way:
            while waiting and len(under_way) < n_workers * (1 + _n_ahead(len(waiting), n_workers)):
                number, item = waiting.popleft()
                under_way[pool.put(item, _named(item))] = number
            # Run a job here meanwhile: workers take a quarter of a second to start.
            if takes_part and waiting:
                number, item = waiting.popleft()
                yield number, function(item)
                pool.wait(0)
            else:
                pool.wait()
            while (finished := pool.take()) is not None:
                step, (result, failure) = finished
                if failure is not None:
                    raise unpack_error(failure)
                yield under_way.pop(step), result


def _n_ahead(n_waiting: int, n_workers: int) -> int:
    """Return the number of jobs to queue in advance per worker.

    Towards the end fewer jobs are queued, so that each of the last goes to the first idle worker.
    """
    return min(MAX_AHEAD, (n_waiting - 1) // (2 * n_workers))


def _try(function: Callable[[T], R], item: T) -> tuple[R | None, bytes | None]:
    """Return the result of a job, or a packed ShardioError or OSError, without its traceback."""
    try:
        return function(item), None
    except (ShardioError, OSError) as error:
        return None, pack_error(error)


def _named(item: object) -> str:
    return item if isinstance(item, str) else f"shard {item}"
