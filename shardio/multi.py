"""MultiLoader: worker processes that each iterate a whole dataset, over ZeroMQ."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

from shardio._base.classes import Closing
from shardio._base.statistics import SkippedItem
from shardio._loading.options import OnError, count, most_skips, one_of, refuse_path, seconds
from shardio._workers.processes.serialization import shortened
from shardio._workers.processes.worker_main import Start
from shardio._workers.tasks.messages import check_prefix, zeromq
from shardio._workers.tasks.sample_sender import WorkerInfo, worker_info
from shardio._workers.tasks.sample_stream import SampleStream
from shardio._workers.tasks.skip_policy import ErrorBudget
from shardio.errors import InvalidArgument
from shardio.serving.client.protocol import parse_all
from shardio.serving.client.remote_samples import RemoteSamples

__all__ = ["MultiLoader", "WorkerInfo", "worker_info"]

_BUDGET_BYTES: Final = 256 << 20
_MOST_WORKERS: Final = 250


class _Far(NamedTuple):
    """The addresses of servers, and the options sent to them."""

    address: str | Sequence[str] | None
    keys: str | os.PathLike[str] | None
    options: dict[str, Any]


class MultiLoader(Closing):
    """Iterates over what several processes find in a dataset, as it comes.

    Each worker iterates the whole dataset from its beginning, so that n workers give every sample n
    times, unless the dataset leaves out what is the others' (see `worker_info`). The samples of one
    worker come in its order. Larger arrays arrive without a copy, in memory that stays the caller's
    for as long as anything refers to it; in a fork of this process it does not: copy them before.

    Every iteration starts workers anew, and ends those of the one before. Workers end with their
    iteration: when it is over, has failed, is let go of, at `kill()`, or with this process.

    Args:
        dataset: any iterable; None with `address`. It travels to the workers by pickle; what
            cannot, such as a generator or an open file, is there by a fork of this process, which a
            warning says.
        workers: how many processes.
        verbose: say on standard error where the socket is, and which workers have finished.
        nokill: let earlier iterations go on when another one begins.
        prefix: how the path of the folder for the socket begins, which only this user can enter,
            and which is there while workers connect.
        memory_bytes: how much all workers together may have sent that has not been handed over,
            and how large their blocks for large arrays may be together.
        timeout_s: how long to wait for a sample before it is an error that says what every worker
            is doing; None for ever.
        start_method: how workers come to be, as for `ShardLoader`: "zygote", "spawn", "forkserver"
            or "fork".
        on_error: "raise" what the dataset raises, or "skip" that sample and have its iterator go
            on. One that cannot, as a generator, ends there, which a warning says, and the other
            workers go on. The death of a worker is an error in any case.
        max_skips: how many samples of an iteration may be skipped, from 0 up.
        address: of a server that `shardio serve` runs, or a list of several of one dataset, whose
            samples are iterated then: each is a worker that has its part, every sample comes once,
            as a dict, and every iteration is one epoch. What says how workers start is not used.
        keys: with `address`, the folder of this client's keys, by default what SHARDIO_KEYS says.
        options: with `address`, of ShardLoader: fields, shuffle, seed, clip, … `batch_size` is how
            many samples travel together, 32 by default.

    Raises:
        InvalidArgument: an argument is not acceptable; the message lists what is.
        ServerUnreachable: (also in the loop) a server does not answer.
        UnsupportedEnvironment: pyzmq is missing: pip install '.[zmq]'.
        WorkerDied, TransformError, BatchTimeout: (in the loop) naming the worker.
        TooManySkipped: (in the loop) one more sample failed than may.
    """

    def __init__(
        self,
        dataset: Iterable[Any] | None = None,
        workers: int = 4,
        verbose: bool = False,  # noqa: FBT001, FBT002  # as it is called elsewhere
        nokill: bool = False,  # noqa: FBT001, FBT002  # likewise
        prefix: str | os.PathLike[str] = "/tmp/_multi-",
        *,
        memory_bytes: int = _BUDGET_BYTES,
        timeout_s: float | None = None,
        start_method: Start = "zygote",
        on_error: OnError = "raise",
        max_skips: int | None = None,
        address: str | Sequence[str] | None = None,
        keys: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        zeromq()
        refuse_path("dataset", dataset)
        self._far = _Far(address, keys, dict(options or {}))
        self._servers: RemoteSamples | None = None
        self._epoch = 0
        if address is not None:
            if dataset is not None:
                raise InvalidArgument(
                    "with address the servers have the dataset: leave dataset out; found "
                    f"{shortened(dataset)}"
                )
            parse_all(address)
        elif keys is not None or options is not None:
            raise InvalidArgument("keys and options are for the address of a server; there is none")
        elif not hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__getitem__"):
            raise InvalidArgument(
                f"dataset must be something to iterate; found {shortened(dataset)}"
            )
        self.dataset = dataset
        self.workers = count("workers", workers, 1, _MOST_WORKERS)
        self.verbose, self.nokill = bool(verbose), bool(nokill)
        self.prefix = prefix
        self._whole_prefix = check_prefix(prefix)
        self._memory_bytes = count("memory_bytes", memory_bytes, 1)
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._start: Start = one_of("start_method", start_method, get_args(Start))
        self._most_skips = most_skips(on_error, max_skips)
        if address is not None and self._most_skips is not None:
            self._far.options.update(on_error="skip", max_skips=self._most_skips)
        self._error_budget = ErrorBudget(self._most_skips)
        self._iterations: weakref.WeakSet[SampleStream] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        """Start workers, each of which iterates the dataset; of servers, begin the next epoch."""
        if self._far.address is not None:
            return self._next_epoch()
        if not self.nokill:
            self.kill()
        try:
            iteration = self._gather(self._start)
        except InvalidArgument as error:
            if self._start == "fork":
                raise
            warnings.warn(
                f"the dataset cannot be pickled ({error.__cause__}), so workers are forks of this "
                "process",
                RuntimeWarning,
                stacklevel=2,
            )
            self._start = "fork"
            iteration = self._gather("fork")
        self._iterations.add(iteration)
        return iteration

    def _next_epoch(self) -> Iterator[Any]:
        """Yield the samples of the servers' next epoch."""
        if self._servers is None or not self._servers.is_ours:
            address, keys, options = self._far
            self._servers = RemoteSamples(
                [address] if isinstance(address, str) else list(address or ()),
                options,
                keys=keys,
                memory_bytes=self._memory_bytes,
                timeout_s=self._timeout_s,
                say=_say if self.verbose else _say_nothing,
            )
        self._epoch += 1
        return self._servers.epoch(self._epoch - 1)

    def _gather(self, start: Start) -> SampleStream:
        self._error_budget = ErrorBudget(self._most_skips)
        return SampleStream(
            () if self.dataset is None else self.dataset,
            self.workers,
            prefix=self._whole_prefix,
            most_bytes=self._memory_bytes,
            timeout_s=self._timeout_s,
            start=start,
            error_budget=self._error_budget,
            say=_say if self.verbose else _say_nothing,
        )

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """The samples that were left out so far of the iteration that was begun last.

        `index` is the number of the sample in its worker, `item` says which worker that is. Of
        servers, it is the number in the dataset, and says which server.
        """
        if self._servers is not None:
            return tuple(self._servers.skipped)
        return tuple(self._error_budget.skipped)

    def kill(self) -> None:
        """End the workers of all iterations, in the middle of whatever they do; leave servers."""
        if self._servers is not None:
            self._servers.close()
            self._servers = None
        for iteration in list(self._iterations):
            if self.verbose and iteration.is_open:
                _say("ending the workers of an iteration")
            iteration.close()
        self._iterations.clear()

    def close(self) -> None:
        """End the workers, as `kill` does; called at the end of a `with`."""
        self.kill()


def _say(line: str) -> None:
    sys.stderr.write(f"# {line}\n")


def _say_nothing(line: str) -> None:
    """Be silent."""
