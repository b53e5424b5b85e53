"""Check the paths given to an operation, and run a job for each shard of a dataset.

Jobs run in this process, in workers, or on a Ray cluster.

If the process of a job crashes, or the machine is lost, the job is run again. Therefore a job that
writes files creates a new folder for the files each time it is run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from shardio._base.callers import checking, expand_home, refuses, shown
from shardio._base.progress import ProgressState, counted, shows_progress
from shardio._workers.processes.serialization import pack_error, unpack_error
from shardio._workers.ray_cluster import Cluster, Engine
from shardio._workers.tasks.task_pool import TaskPool
from shardio.errors import InvalidArgument, ShardioError
from shardio.storage.remote.connection import is_url

if TYPE_CHECKING:
    from shardio.samples.shard_dataset import ShardDataset

R = TypeVar("R")
T = TypeVar("T")
_Callable = TypeVar("_Callable", bound=Callable[..., Any])

_HABITS: Final = {
    **dict.fromkeys(("n_jobs", "num_proc", "num_workers"), "write workers="),
    **dict.fromkeys(
        ("max_shard_size", "n_shards", "num_shards", "shard_size"),
        "write shard_bytes=, the target size of a shard",
    ),
}
_COPY: Final = "for example with `aws s3 sync` or `gcloud storage rsync`"


def takes_paths(
    call: str, *names: str, outputs: tuple[str, ...] = (), advice: Mapping[str, str] | None = None
) -> Callable[[_Callable], _Callable]:
    """Return a decorator for an operation whose parameters `names` and `outputs` are local paths.

    Other values, unknown options and missing arguments raise an error that shows the correct call,
    `call`. `advice` has hints for further options that users know from other libraries.
    """

    def decorate(function: _Callable) -> _Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            for name in (*names, *outputs):
                found = bound.arguments.get(name, ())
                paths = []
                for value in found if type(found) is tuple else (found,):
                    with checking(f"{function.__name__}, {name}"):
                        paths.append(expand_home(value))
                        _check_path(function.__name__, call, value, is_output=name in outputs)
                bound.arguments[name] = tuple(paths) if type(found) is tuple else paths[0]
            return function(*bound.args, **bound.kwargs)

        return cast(_Callable, refuses(_HABITS | dict(advice or {}), function.__name__)(checked))

    return decorate


def _check_path(operation: str, call: str, value: Any, *, is_output: bool) -> None:
    if not isinstance(value, str | os.PathLike):
        hint = ""
        if isinstance(path := getattr(value, "path", None), str):
            hint = f": pass {path!r}, its path"
        raise InvalidArgument(f"{operation} takes paths: write {call}; found {shown(value)}{hint}")
    if is_url(text := os.fsdecode(value)):
        how = "write to one, and copy that to the URL" if is_output else "copy the dataset first"
        raise InvalidArgument(f"{text}: {operation} needs a local path: {how}, {_COPY}")


@dataclass(frozen=True, slots=True)
class MaintenanceProgress:
    """The progress of one step of an operation, with the number and the total size of shards.

    `step` is "verifying", "writing", "counting" or "repairing". `n_damaged` is the number of shards
    that turned out to be damaged.
    """

    step: str
    n_shards_done: int
    n_shards: int
    n_bytes_done: int
    n_bytes: int
    n_damaged: int = 0


Progress = Callable[[MaintenanceProgress], None] | bool
"""A function that is called with each state; or True to show a bar on standard error."""


def _progress_state(state: MaintenanceProgress) -> ProgressState:
    return ProgressState(
        title=state.step,
        done=state.n_bytes_done,
        total=state.n_bytes,
        counts=f"{state.n_shards_done:,} of {counted(state.n_shards, 'shards')}",
        faults=f"{state.n_damaged:,} damaged" if state.n_damaged else "",
    )


displays_progress = shows_progress(_progress_state)
"""A decorator for operations with the option `progress`."""


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the size of a file; 0 if it is missing or unreadable, which is reported elsewhere."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


class ShardProgress:
    """A reporter of the progress of one step of an operation: at the start and after each shard."""

    def __init__(self, progress: Progress | None, step: str, sizes: Iterable[int]) -> None:
        self._progress, self._step, self._sizes = progress, step, list(sizes)
        self._n_bytes, self._n_done, self._n_bytes_done = sum(self._sizes), 0, 0
        self._n_damaged = 0
        self._report()

    def report_done(self, k: int | None = None, *, is_damaged: bool = False) -> None:
        """Report that the k-th shard is done; by default, the next one."""
        self._n_damaged += is_damaged
        self._n_bytes_done += self._sizes[self._n_done if k is None else k]
        self._n_done += 1
        self._report()

    def _report(self) -> None:
        if callable(self._progress):
            numbers = (self._n_done, len(self._sizes), self._n_bytes_done, self._n_bytes)
            self._progress(MaintenanceProgress(self._step, *numbers, self._n_damaged))


class _ShardJob(Generic[R]):
    """A call of `function` with a dataset and the index of a shard.

    A process that unpickles the job opens the same generation of the dataset, even if others have
    been published in the meantime.
    """

    def __init__(self, function: Callable[[ShardDataset, int], R], dataset: ShardDataset) -> None:
        self._function = function
        self._path, self._subset = os.path.abspath(dataset.path), dataset.subset_name
        self._generation = dataset.generation
        self._dataset: ShardDataset | None = dataset

    def __call__(self, k: int) -> R:
        if self._dataset is None:
            # Import the class here, because verification also imports this module and does not need
            # the class.
            from shardio.samples.shard_dataset import ShardDataset

            self._dataset = ShardDataset(
                self._path, subset=self._subset, generation=self._generation
            )
        return self._function(self._dataset, k)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}


def run_for_shards(
    function: Callable[[ShardDataset, int], R],
    dataset: ShardDataset,
    step: str,
    progress: Progress | None,
    *,
    engine: Engine,
    preload: str,
    workers: int | None = None,
    shared_path: str | os.PathLike[str] | None = None,
) -> Iterator[R]:
    """Call `function` with a dataset and the index of each shard; yield the results in order.

    `step` is the name of the step in progress reports. The other arguments are those of `run_jobs`;
    `shared_path` is by default the path of the dataset.
    """
    state = ShardProgress(progress, step, (shard.n_bytes for shard in dataset.shards))
    early: dict[int, R] = {}  # the results that wait for the result of an earlier shard
    n_yielded = 0
    results = run_jobs(
        _ShardJob(function, dataset),
        range(len(dataset.shards)),
        workers=workers,
        engine=engine,
        shared_path=dataset.path if shared_path is None else shared_path,
        preload=preload,
    )
    with contextlib.closing(results):
        for k, result in results:
            early[k] = result
            state.report_done(k)
            while n_yielded in early:
                yield early.pop(n_yielded)
                n_yielded += 1


def run_jobs(
    function: Callable[[T], R],
    items: Sequence[T],
    *,
    workers: int | None,
    engine: Engine,
    shared_path: str | os.PathLike[str],
    preload: str,
    starts_here: bool = False,
) -> Generator[tuple[int, R], None, None]:
    """Call `function` for each item; after each call, yield the index of the item and the result.

    The caller must close the generator. Otherwise, if the caller's loop raises an exception, the
    traceback keeps the generator and the workers alive.

    Args:
        function: the job. It is serialized with cloudpickle, and sent to each process once.
        items: for each shard, its index or its name.
        workers: the total number of processes on all machines. By default, and with 0, jobs run in
            the calling process. On a cluster, the default is the number of CPUs of the cluster.
        engine: the engine that runs the processes: local workers, or a Ray cluster.
        shared_path: a path that all machines of a cluster must be able to access.
        preload: the name of a module that is imported before worker processes are forked.
        starts_here: True to run jobs in the calling process, too, while local workers start.

    Raises:
        WorkerDied: while one job was run, too many processes crashed or machines were lost.
        Exception: the function raised an exception.
    """
    if engine.is_ray:
        jobs = iter(enumerate(items))
        with Cluster(engine, shared_path=shared_path, n_at_once=workers) as cluster:
            yield from cluster.run(
                function, partial(next, jobs, None), lambda number: _item_name(items[number])
            )
    elif workers and items:
        n_workers = min(workers, len(items))
        yield from _run_in_workers(function, items, n_workers, preload, starts_here=starts_here)
    else:
        yield from ((number, function(item)) for number, item in enumerate(items))


def _run_in_workers(
    function: Callable[[T], R],
    items: Sequence[T],
    n_workers: int,
    preload: str,
    *,
    starts_here: bool,
) -> Iterator[tuple[int, R]]:
    waiting = deque(range(len(items)))
    under_way: dict[int, int] = {}  # maps the number that the pool gives to a job to its item
    with TaskPool(
        partial(_run_job, function),
        n_workers,
        in_order=False,
        preload=[__name__, preload],
        name="the job",
    ) as pool:
        while waiting or under_way:
            # While many jobs are left, let one job wait in the queue of each worker. Towards the
            # end, queue none: a queued job might wait for a busy worker while another worker is
            # idle.
            while waiting and len(under_way) < n_workers * (1 + (len(waiting) > 2 * n_workers)):
                number = waiting.popleft()
                under_way[pool.put(items[number], _item_name(items[number]))] = number
            if starts_here and waiting:
                number = waiting.popleft()
                yield number, function(items[number])
                pool.wait(0)
            else:
                pool.wait()
            while (finished := pool.take()) is not None:
                starts_here = False
                job, (result, failure) = finished
                if failure is not None:
                    raise unpack_error(failure)
                yield under_way.pop(job), result


def _run_job(function: Callable[[T], R], item: T) -> tuple[R | None, bytes | None]:
    """Run a job; return its result, or a serialized ShardioError or OSError, without traceback."""
    try:
        return function(item), None
    except (ShardioError, OSError) as error:
        return None, pack_error(error)


def _item_name(item: object) -> str:
    return item if isinstance(item, str) else f"shard {item}"
