"""Run jobs on the machines of a Ray cluster; the only module that imports Ray.

A job is a call of a function with one argument. The jobs of a lost machine are repeated on other
machines, although the lost machine may still run them. Each run of a job must therefore write to
new files of its own, and the process that submits the jobs decides which run counts.
"""

from __future__ import annotations

import functools
import os
import platform
import socket
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeVar, get_args

from shardio._base import __version__
from shardio._base.classes import Closing, undo_on_error
from shardio._workers.processes.serialization import pack_error, unpack_error
from shardio._workers.processes.worker_pool import MAX_CRASHES
from shardio.errors import (
    InvalidArgument,
    ShardioError,
    UnsupportedEnvironment,
    WorkerDied,
    import_extra,
)

_CONNECT_TIMEOUT_S: Final = 10.0


def ray_module() -> Any:
    """Import Ray on first use, and return it."""
    return import_extra("engine 'ray' needs Ray", "ray", "ray")


def connect(ray: Any, address: str | None) -> None:
    """Connect to the cluster at `address`, or start Ray here, without logs and usage reports."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    place = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if place == "local":
        options |= {"include_dashboard": False}
    try:
        _check_reachable(place)
        with warnings.catch_warnings():
            # Ray warns of a future change to the assignment of GPUs.
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(place, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedEnvironment(
            f"Ray at {place!r} cannot be reached: {_one_line(error)}"
        ) from error


def _check_reachable(place: str) -> None:
    """Raise OSError if a host and port accept no connections; Ray would wait for minutes."""
    host, _, port = place.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


def _one_line(error: Exception) -> str:
    line = first_line(error)
    return " ".join(str(error).split()) if line.endswith(":") else line


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_WATCH_INTERVAL_S: Final = 0.5


def do_job(function_ref: list[Any], shared_path: str, version: str, value: Any) -> Any:
    """Call the function in `function_ref` with `value`; return the result, or the exception.

    `function_ref` is a list that contains the reference to the function.
    """
    try:
        _exit_with_parent(os.getppid())
        if version != __version__:
            raise UnsupportedEnvironment(
                f"machine {platform.node()} of the Ray cluster has shardio {__version__}, this one "
                f"{version}: install the same version everywhere"
            )
        if not os.path.exists(shared_path):
            raise UnsupportedEnvironment(
                f"machine {platform.node()} of the Ray cluster does not see {shared_path}: source "
                "and dataset must be on a file system that all machines have under the same path"
            )
        return _function(function_ref[0])(value)
    except SystemExit:  # Ray would only report that a process has ended
        where = f"on machine {platform.node()}:\n{traceback.format_exc()}"
        return WorkerDied(f"a job called sys.exit {where}")
    except Exception as error:  # noqa: BLE001  # the process that submits jobs raises the error
        if not isinstance(error, ShardioError | OSError):  # these errors need no traceback
            error.add_note(f"on machine {platform.node()}:\n{traceback.format_exc()}")
        return unpack_error(pack_error(error))


@functools.lru_cache(1)
def _function(reference: Any) -> Callable[[Any], Any]:
    """Return the function; unpickle it once per process, so that the function's state lasts."""
    found: Callable[[Any], Any] = ray_module().get(reference)
    return found


@functools.cache
def _exit_with_parent(parent: int) -> None:
    """End this process when its parent (Ray's process) exits; Ray itself would wait for the job."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="shardio-watch", daemon=True).start()


EngineName = Literal["local", "ray"]
MAX_LOST: Final = 8
"""A job is given up after this number of machines were lost while they ran the job.

If Ray does not report which jobs a lost machine ran, its loss counts for every running job. These
losses are counted separately, up to max(MAX_LOST, number of running machines).
"""
_CHECK_INTERVAL_S: Final = 5.0
_JOBS_PER_CPU: Final = 2  # submitted jobs per CPU of the cluster, including the running job

V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Engine:
    """The place where work is done: processes on this machine, or a Ray cluster.

    `address` is passed to `ray.init`; the default is RAY_ADDRESS from the environment. Without any
    address, Ray is started on this machine and stopped at the end. `gpus` is the number of GPUs per
    job, or a fraction; in the job, CUDA_VISIBLE_DEVICES has the indices of these GPUs.
    """

    name: EngineName = "local"
    address: str | None = None
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.name not in get_args(EngineName):
            raise InvalidArgument(f"engine must be 'local' or 'ray'; found {self.name!r}")
        if self.address is not None and self.name == "local":
            raise InvalidArgument(f"address {self.address!r} is only valid with engine='ray'")
        if self.gpus < 0 or (self.gpus and self.name == "local"):
            raise InvalidArgument(
                f"gpus is {self.gpus}; only engine='ray' supports GPUs, from 0 up"
            )
        # This comparison is also true for nan.
        if self.gpus != (round(self.gpus, 4) if self.gpus < 1 else self.gpus // 1):
            raise InvalidArgument(
                f"gpus is {self.gpus}; it must be a whole number, or a share of one GPU such as 0.5"
            )
        if self.is_ray:
            ray_module()

    @property
    def is_ray(self) -> bool:
        return self.name == "ray"


LOCAL: Final = Engine()


class Cluster(Closing):
    """A connection to a Ray cluster for the time of a `with` block.

    Jobs that are running at the end of the block are cancelled. If the program is connected
    already, the earlier connection is used, and stays open. The path `shared_path` must exist on
    every machine. Up to `n_at_once` jobs are submitted at a time, by default two for each CPU of
    the cluster.
    """

    def __init__(
        self, engine: Engine, *, shared_path: str | os.PathLike[str], n_at_once: int | None = None
    ) -> None:
        if n_at_once is not None and n_at_once < 1:
            raise InvalidArgument(f"workers is {n_at_once}; with engine='ray' it must be 1 or more")
        self._ray = ray_module()
        found = self._ray.exceptions
        # These errors mean that a job or its result was lost together with a machine.
        self._loss_errors = found.NodeDiedError, found.ObjectLostError
        self._engine, self._n_at_once = engine, n_at_once
        self._shared_path = os.path.abspath(shared_path)
        self._running: dict[Any, tuple[int, Any]] = {}
        self._n_crashes: Counter[int] = Counter()
        self._n_lost: Counter[int] = Counter()
        self._n_possible_losses: Counter[int] = Counter()
        self._dead_node_ids: set[str] = set()
        self._submit: Callable[[Any], Any]  # `run` sets this and the next attribute
        self._name_of: Callable[[int], str]
        self._last_check_s = 0.0
        self._is_owner = False

    def __enter__(self) -> Self:
        if not self._ray.is_initialized():
            self._is_owner = True
            with undo_on_error(self._ray.shutdown):
                connect(self._ray, self._engine.address)
        return self

    def run(
        self,
        function: Callable[[V], R],
        next_job: Callable[[], tuple[int, V] | None],
        name_of: Callable[[int], str],
    ) -> Iterator[tuple[int, R]]:
        """Run jobs in any order; yield the index and result of each job as it finishes.

        `function` is sent to each process once, serialized with cloudpickle. `next_job` returns an
        index and a value, or None; it is called whenever there is room for a job. `name_of(i)`
        describes job i. Raises the exception of a job, or WorkerDied if Ray cannot finish a job,
        for example because too many processes crashed while they ran this job.
        """
        self._check_gpus()
        remote = self._ray.remote(num_cpus=1, num_gpus=self._engine.gpus, max_retries=0)
        # Keep the reference in a list: Ray would replace a bare reference with the function, and
        # unpickle the function for each job.
        function_ref = [self._ray.put(function)]
        do = functools.partial(remote(do_job).remote, function_ref, self._shared_path, __version__)
        self._submit, self._name_of, self._dead_node_ids = do, name_of, self._dead_nodes()
        while True:
            while len(self._running) < self._max_submitted() and (job := next_job()) is not None:
                self._running[self._submit(job[1])] = job
            if not self._running:
                return
            if (done := self._next_done()) is None:
                self._repeat_all()
                continue
            number, value = job = self._running.pop(done)
            copies = [each for each, (n, _) in self._running.items() if n == number]
            try:
                result = self._ray.get(done)
            except self._ray.exceptions.RayError as error:
                if isinstance(error, self._loss_errors):
                    self._note_loss(number, error)
                elif not copies:
                    self._record_failure(number, error)
                if not copies:
                    self._running[self._submit(value)] = job
                continue
            if isinstance(result, Exception):
                raise result
            self._cancel(copies)
            yield number, result

    def _next_done(self) -> Any:
        """Wait for a job, and return its reference; None if a machine is lost."""
        while True:
            done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_CHECK_INTERVAL_S)
            is_due = time.monotonic() - self._last_check_s > _CHECK_INTERVAL_S
            if is_due and self._dead_nodes() - self._dead_node_ids:
                return None
            if done:
                return done[0]

    def _dead_nodes(self) -> set[str]:
        self._last_check_s = time.monotonic()
        return {node["NodeID"] for node in self._ray.nodes() if not node["Alive"]}

    def _repeat_all(self) -> None:
        """Submit all running jobs again, as any may be lost. The first result of a job counts."""
        self._dead_node_ids |= self._dead_nodes()
        max_losses = max(MAX_LOST, sum(node["Alive"] for node in self._ray.nodes()))
        for number, value in {number: value for number, value in self._running.values()}.items():
            self._n_possible_losses[number] += 1
            if self._n_possible_losses[number] >= max_losses:
                what = self._name_of(number)
                raise WorkerDied(f"{max_losses} machines were lost while working on {what}")
            self._running[self._submit(value)] = number, value

    def _note_loss(self, number: int, error: Exception) -> None:
        self._n_lost[number] += 1
        if self._n_lost[number] == MAX_LOST:
            what = self._name_of(number)
            raise WorkerDied(f"{MAX_LOST} machines were lost while working on {what}") from error

    def _check_gpus(self) -> None:
        """Raise UnsupportedEnvironment if no machine has the GPUs; Ray would wait in silence."""
        n_gpus = [node["Resources"].get("GPU", 0) for node in self._ray.nodes() if node["Alive"]]
        if self._engine.gpus > max(n_gpus, default=0):
            raise UnsupportedEnvironment(
                f"gpus is {self._engine.gpus}: no machine of the Ray cluster has so many; the "
                f"maximum is {max(n_gpus, default=0):g}"
            )

    def _max_submitted(self) -> int:
        """Return the number of jobs that may be submitted at a time to the current machines."""
        if self._n_at_once is not None:
            return self._n_at_once
        return _JOBS_PER_CPU * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _record_failure(self, number: int, error: Exception) -> None:
        """Record the failure of a job that has no result; raise an error if the job is given up."""
        found = self._ray.exceptions
        if isinstance(error, found.WorkerCrashedError | found.OutOfMemoryError):
            self._n_crashes[number] += 1
            if self._n_crashes[number] == MAX_CRASHES:
                raise WorkerDied(
                    f"{MAX_CRASHES} processes crashed on {self._name_of(number)}; Ray reports for "
                    f"the last one: {first_line(error)}"
                ) from error
        elif "No module named 'shardio" in str(error):
            raise UnsupportedEnvironment(
                "a machine of the Ray cluster lacks shardio: install version "
                f"{__version__} on all machines"
            ) from error
        else:
            raise WorkerDied(f"Ray failed on {self._name_of(number)}: {error}") from error

    def _cancel(self, references: Sequence[Any]) -> None:
        for reference in references:
            del self._running[reference]
            self._ray.cancel(reference, force=True)

    def close(self) -> None:
        """Cancel running jobs, and close the connection if this object opened it. Idempotent."""
        try:
            self._cancel(list(self._running))
        finally:
            if self._is_owner:
                self._is_owner = False
                self._ray.shutdown()
