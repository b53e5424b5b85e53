"""Jobs on the machines of a Ray cluster.

A job is a function of one value. Where a machine is lost its jobs are done again on others, while
the lost one may still be at them: what a job writes must be its own, and one process, the one that
gives the jobs, decides whose work counts.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeVar, get_args

from shardio._base.callers import caller_stacklevel
from shardio._base.classes import Closing
from shardio._workers.ray.job import connect, do_job, first_line, ray_module
from shardio.errors import InvalidArgument, UnsupportedEnvironment, WorkerDied
from shardio.version import __version__

EngineName = Literal["local", "ray"]
MAX_DEATHS: Final = 2
"""As many processes may end over one job."""
MAX_LOST: Final = 8
"""As many machines may be lost over one job: the job may be what they are lost of.

Where it is not known whether a machine did the job, it is as many as are left, if these are more.
"""
_LOOK_S: Final = 5.0
_AHEAD: Final = 2
"""Jobs that wait for each CPU of the cluster, with the one that it does."""

V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Engine:
    """Where work is done: by processes of this machine, or on a Ray cluster.

    `address` is the cluster's, as `ray.init` takes it. Without one it is what RAY_ADDRESS says;
    without that, Ray is started on this machine, and stopped again. `gpus` are those of the cluster
    that each job is given, or a share of one; CUDA_VISIBLE_DEVICES names them there.

    Raises:
        InvalidArgument: there is no such engine, an address that it has no use for, or no such
            share of a GPU.
        UnsupportedEnvironment: Ray is not installed.
    """

    name: EngineName = "local"
    address: str | None = None
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.name not in get_args(EngineName):
            raise InvalidArgument(f"engine must be 'local' or 'ray'; found {self.name!r}")
        if self.address is not None and self.name == "local":
            raise InvalidArgument(f"address {self.address!r}: only with engine='ray'")
        if self.gpus < 0 or (self.gpus and self.name == "local"):
            raise InvalidArgument(f"gpus is {self.gpus}; only engine='ray' gives any, from 0 up")
        if self.gpus != (round(self.gpus, 4) if self.gpus < 1 else self.gpus // 1):  # or is nan
            raise InvalidArgument(
                f"gpus is {self.gpus}; it must be a whole number, or a share of one GPU such as 0.5"
            )
        if self.is_ray:
            ray_module()

    @property
    def is_ray(self) -> bool:
        """Whether other machines take part."""
        return self.name == "ray"


LOCAL: Final = Engine()


class Cluster(Closing):
    """Owns a connection to a Ray cluster from `with` to its end; what runs there ends with it.

    A connection that the program has already is borrowed, and stays.

    Args:
        engine: says which cluster.
        sees: a path that every machine must see, or its work would be for nothing: refused is a
            machine that does not.
        n_at_once: jobs at a time; by default as many as the cluster has CPUs, and as many waiting.

    Raises:
        UnsupportedEnvironment: there is no cluster at the address.
        InvalidArgument: `n_at_once` is no positive number.
    """

    def __init__(
        self, engine: Engine, *, sees: str | os.PathLike[str], n_at_once: int | None = None
    ) -> None:
        if n_at_once is not None and n_at_once < 1:
            raise InvalidArgument(f"workers is {n_at_once}; with engine='ray' it must be 1 or more")
        self._ray = ray_module()
        found = self._ray.exceptions
        self._lost = found.NodeDiedError, found.ObjectLostError  # in the midst of a job, or behind
        self._engine, self._n_at_once = engine, n_at_once
        self._sees = os.path.abspath(sees)
        self._running: dict[Any, tuple[int, Any]] = {}
        self._n_deaths: Counter[int] = Counter()
        self._n_lost: Counter[int] = Counter()
        self._n_lost_meanwhile: Counter[int] = Counter()
        self._dead: set[str] = set()
        self._looked_s = 0.0
        self._is_told = self._is_owner = False

    def __enter__(self) -> Self:
        if not self._ray.is_initialized():
            self._is_owner = True
            try:
                connect(self._ray, self._engine.address)
            except BaseException:
                self._ray.shutdown()
                raise
        return self

    def run(
        self,
        function: Callable[[V], R],
        next_job: Callable[[], tuple[int, V] | None],
        name_of: Callable[[int], str],
    ) -> Iterator[tuple[int, R]]:
        """Do jobs in any order, and give each one's number and result as it is done.

        Args:
            function: what is done; it travels once to each process, as cloudpickle has it.
            next_job: asked for another job (a number and a value) whenever there is room, also
                after it had none.
            name_of: what a job is about, for errors.

        Raises:
            WorkerDied: over one job, processes ended or machines were lost too often.
            UnsupportedEnvironment: a machine does not see what it must, or has another shardio; or
                none has as many GPUs as a job is to be given.
            Exception: what a job raised.
        """
        self._refuse_lack_of_gpus()
        remote = self._ray.remote(num_cpus=1, num_gpus=self._engine.gpus, max_retries=0)
        # In a list, a reference is left as it is: Ray would unpickle the function for each job.
        held = [self._ray.put(function)]
        do = functools.partial(remote(do_job).remote, held, self._sees, __version__)
        self._dead = self._dead_nodes()
        while True:
            while len(self._running) < self._room() and (job := next_job()) is not None:
                self._running[do(job[1])] = job
            if not self._running:
                return
            if (done := self._next_done()) is None:
                self._do_twice(do, name_of)
                continue
            number, value = job = self._running.pop(done)
            copies = [each for each, (n, _) in self._running.items() if n == number]
            try:
                result = self._ray.get(done)
            except self._ray.exceptions.RayError as error:
                if isinstance(error, self._lost):
                    self._note_loss(number, name_of, error)
                elif not copies:
                    self._mourn(error, number, name_of)
                if not copies:
                    self._running[do(value)] = job
                continue
            if isinstance(result, Exception):
                raise result
            self._cancel(copies)
            yield number, result

    def _next_done(self) -> Any:
        """Wait for a job; None instead when a machine is found to be lost.

        Ray may come to notice only much later that it has no connection to who does a job there.
        """
        while True:
            done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_LOOK_S)
            if time.monotonic() - self._looked_s > _LOOK_S and self._dead_nodes() - self._dead:
                return None
            if done:
                return done[0]
            self._tell_of_waiting()

    def _tell_of_waiting(self) -> None:
        """Warn, once in a row, where nothing is done because no machine could do it."""
        is_waiting = not any(map(self._can_work, self._ray.nodes()))
        if is_waiting and not self._is_told:
            gpus = f" and gpus={self._engine.gpus:g}" if self._engine.gpus else ""
            warnings.warn(
                f"waiting for a machine: none of the Ray cluster has a CPU{gpus} for a job now; "
                "start one there, or interrupt this",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
        self._is_told = is_waiting

    def _can_work(self, node: Mapping[str, Any]) -> bool:
        """Whether a machine has what a job takes, or has given it to one."""
        there = node["Resources"]
        has_gpus = there.get("GPU", 0) >= self._engine.gpus
        return bool(node["Alive"]) and there.get("CPU", 0) >= 1 and has_gpus

    def _dead_nodes(self) -> set[str]:
        self._looked_s = time.monotonic()
        return {node["NodeID"] for node in self._ray.nodes() if not node["Alive"]}

    def _do_twice(self, do: Callable[[Any], Any], name_of: Callable[[int], str]) -> None:
        """Begin all jobs once more, any of which may be lost; of each, the first result counts."""
        self._dead |= self._dead_nodes()
        n_may_be_lost = max(MAX_LOST, sum(node["Alive"] for node in self._ray.nodes()))
        for number, value in {number: value for number, value in self._running.values()}.items():
            self._n_lost_meanwhile[number] += 1
            if self._n_lost_meanwhile[number] >= n_may_be_lost:
                raise WorkerDied(f"{n_may_be_lost} machines were lost over {name_of(number)}")
            self._running[do(value)] = number, value

    def _note_loss(self, number: int, name_of: Callable[[int], str], error: Exception) -> None:
        self._n_lost[number] += 1
        if self._n_lost[number] == MAX_LOST:
            raise WorkerDied(f"{MAX_LOST} machines were lost over {name_of(number)}") from error

    def _refuse_lack_of_gpus(self) -> None:
        """Ray would wait for such a machine, and not say so."""
        there = [node["Resources"].get("GPU", 0) for node in self._ray.nodes() if node["Alive"]]
        if self._engine.gpus > max(there, default=0):
            raise UnsupportedEnvironment(
                f"gpus is {self._engine.gpus}: no machine of the Ray cluster has as many; the most "
                f"that one has is {max(there, default=0):g}"
            )

    def _room(self) -> int:
        """How many jobs may be under way: machines may have come or gone since the last time."""
        if self._n_at_once is not None:
            return self._n_at_once
        return _AHEAD * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _mourn(self, error: Exception, number: int, name_of: Callable[[int], str]) -> None:
        """Note what became of a job that gave no result; an error unless it may be done again."""
        found = self._ray.exceptions
        if isinstance(error, found.WorkerCrashedError | found.OutOfMemoryError):
            self._n_deaths[number] += 1
            if self._n_deaths[number] == MAX_DEATHS:
                raise WorkerDied(
                    f"{MAX_DEATHS} processes ended over {name_of(number)}; of the last one Ray "
                    f"says: {first_line(error)}"
                ) from error
        elif "No module named 'shardio" in str(error):
            raise UnsupportedEnvironment(
                "a machine of the Ray cluster lacks shardio: install version "
                f"{__version__} on all of them"
            ) from error
        else:
            raise WorkerDied(f"Ray failed over {name_of(number)}: {error}") from error

    def _cancel(self, references: Sequence[Any]) -> None:
        """End what nobody waits for any more."""
        for reference in references:
            del self._running[reference]
            self._ray.cancel(reference, force=True)

    def close(self) -> None:
        """End what runs, and the connection if it was made here. Idempotent."""
        try:
            self._cancel(list(self._running))
        finally:
            if self._is_owner:
                self._is_owner = False
                self._ray.shutdown()
