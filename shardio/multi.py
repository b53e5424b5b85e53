"""MultiLoader: worker processes that each iterate a whole dataset and send samples over ZeroMQ."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from shardio._base.callers import one_of
from shardio._base.classes import Closing
from shardio._base.statistics import SkippedItem
from shardio._loading.options import OnError, check_seconds, check_skips, refuse_path
from shardio._workers.processes.serialization import short_repr
from shardio._workers.processes.worker_main import Start
from shardio._workers.tasks.failure_policy import ErrorBudget
from shardio._workers.tasks.sample_stream import SampleStream
from shardio._workers.tasks.zeromq import WorkerInfo, check_prefix, worker_info, zeromq
from shardio.errors import InvalidArgument
from shardio.order.sampling import check_count
from shardio.serving.client.protocol import parse_all
from shardio.serving.client.remote_samples import RemoteSamples

__all__ = ["MultiLoader", "WorkerInfo", "worker_info"]

_BUDGET_BYTES: Final = 256 << 20
_MAX_WORKERS: Final = 250


class MultiLoader(Closing):
    """A loader that yields the samples of several worker processes in the order of their arrival.

    Each worker iterates the whole dataset. Thus n workers yield every sample n times, unless the
    dataset skips the samples of the other workers (see `worker_info`). The samples of one worker
    arrive in the order of the dataset. A sample of 64 KiB or more arrives in a block of
    shared memory, which is not reused as long as the caller refers to an array in it. If the caller
    holds all blocks that `memory_bytes` or the limit of open files allows, samples are copied; a
    RuntimeWarning reports the first copy. References in a fork of this process do not keep a block:
    copy arrays that a fork will read before you fork.

    Every iteration starts new workers, and ends the workers of earlier iterations. Workers also
    exit when their iteration ends or is garbage-collected, when `kill()` is called, and when this
    process exits.

    Args:
        dataset: any iterable; None with `address`. The dataset is pickled for the workers. Its
            `__iter__` must create what cannot be pickled, such as a generator or an open file.
        workers: the number of processes.
        verbose: True to log to standard error: the path at which the socket was created, and a line
            for every worker that has finished.
        nokill: True to let earlier iterations continue when a new iteration begins.
        prefix: the beginning of the path of a private temporary folder for the socket. The folder
            is removed before the workers start: they receive a descriptor of the socket.
        memory_bytes: the limit for the total size of samples in transit from the workers; also,
            counted separately, the limit for the total size of blocks of shared memory.
        timeout_s: the maximum time to wait for a sample; None for no limit. After this time,
            BatchTimeout is raised; its message shows the stacks of every worker.
        start_method: "zygote" or "spawn", as for `ShardLoader`.
        on_error: "raise" the exception of the dataset, or "skip" the sample and continue with the
            same iterator. A generator cannot continue after an exception: its worker then ends with
            a warning. A crash of a worker always raises WorkerDied.
        max_skips: the number of samples of an iteration that may be skipped, from 0 up.
        address: the address of a server started with `shardio serve`, or a list of addresses of
            servers of one dataset. Each server then takes the place of a worker, and sends a share
            of the dataset. Every sample arrives once per iteration, as a dict, and every iteration
            is one epoch. `workers`, `nokill`, `prefix` and `start_method` are ignored.
        keys: with `address`, the folder of this client's keys; by default SHARDIO_KEYS from the
            environment.
        options: with `address`, options of `shardio.connect`: fields, shuffle, seed, clips, …
            `batch_size` is the number of samples in a message, by default 32.

    Raises:
        InvalidArgument: an argument is invalid; the message lists the accepted values.
        ServerUnreachable: (also in the loop) a server does not answer.
        UnsupportedEnvironment: pyzmq is missing: pip install '.[zmq]'.
        WorkerDied, TransformError, BatchTimeout: (in the loop) loading failed; the message names
            the worker.
        TooManySkipped: (in the loop) more than `max_skips` samples failed.
    """

    def __init__(
        self,
        dataset: Iterable[Any] | None = None,
        workers: int = 4,
        verbose: bool = False,  # noqa: FBT001, FBT002  # positional in webdataset, too
        nokill: bool = False,  # noqa: FBT001, FBT002  # positional in webdataset, too
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
        self._address, self._keys, self._options = address, keys, dict(options or {})
        self._servers: RemoteSamples | None = None
        self._epoch = 0
        if address is not None:
            if dataset is not None:
                raise InvalidArgument(
                    "with address the servers have the dataset: leave dataset out; found "
                    f"{short_repr(dataset)}"
                )
            parse_all(address)
        elif keys is not None or options is not None:
            raise InvalidArgument("keys and options are for a server: pass its address as address=")
        elif not hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__getitem__"):
            raise InvalidArgument(f"dataset must be iterable; found {short_repr(dataset)}")
        self.dataset = dataset
        if workers == 0:
            raise InvalidArgument(
                "workers must be at least 1, because a MultiLoader reads in worker processes only; "
                "found 0: iterate the dataset itself to read in this process"
            )
        self.workers = check_count("workers", workers, 1, _MAX_WORKERS)
        self.verbose, self.nokill = bool(verbose), bool(nokill)
        self.prefix = prefix
        self._whole_prefix = check_prefix(prefix)
        self._memory_bytes = check_count("memory_bytes", memory_bytes, 1)
        self._timeout_s = check_seconds("timeout_s", timeout_s)
        self._start: Start = one_of("start_method", start_method, get_args(Start))
        self._max_skips = check_skips(on_error, max_skips)
        if address is not None and self._max_skips is not None:
            self._options.update(on_error="skip", max_skips=self._max_skips)
        self._error_budget = ErrorBudget(self._max_skips)
        self._iterations: weakref.WeakSet[SampleStream] = weakref.WeakSet()

    def __repr__(self) -> str:
        source = self._address if self.dataset is None else type(self.dataset).__name__
        return f"MultiLoader({source}, workers={self.workers})"

    def __iter__(self) -> Iterator[Any]:
        """Start workers that iterate the dataset; with `address`, begin the servers' next epoch."""
        if self._address is not None:
            return self._next_epoch()
        if not self.nokill:
            self.kill()
        self._error_budget = ErrorBudget(self._max_skips)
        try:
            iteration = SampleStream(
                () if self.dataset is None else self.dataset,
                self.workers,
                prefix=self._whole_prefix,
                max_bytes=self._memory_bytes,
                timeout_s=self._timeout_s,
                start=self._start,
                error_budget=self._error_budget,
                log=_log if self.verbose else _ignore,
            )
        except InvalidArgument as error:
            raise InvalidArgument(
                f"the dataset cannot be sent to worker processes ({error.__cause__}); create "
                "what cannot be pickled, such as a generator or an open file, in its __iter__"
            ) from error
        self._iterations.add(iteration)
        return iteration

    def _next_epoch(self) -> Iterator[Any]:
        if self._servers is None or not self._servers.is_owner_process:
            address = self._address
            self._servers = RemoteSamples(
                [address] if isinstance(address, str) else list(address or ()),
                self._options,
                keys=self._keys,
                memory_bytes=self._memory_bytes,
                timeout_s=self._timeout_s,
                log=_log if self.verbose else _ignore,
            )
        self._epoch += 1
        return self._servers.epoch(self._epoch - 1)

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """The samples that the latest iteration has skipped so far.

        The `item` of a skipped sample names its worker; `index` is the index among the samples of
        this worker. With `address`, `item` names the server; `index` is the index in the dataset.
        """
        if self._servers is not None:
            return tuple(self._servers.skipped)
        return tuple(self._error_budget.skipped)

    def kill(self) -> None:
        """Stop the workers of all iterations, even busy ones, and disconnect from servers."""
        if self._servers is not None:
            self._servers.close()
            self._servers = None
        for iteration in list(self._iterations):
            iteration.close()
        self._iterations.clear()

    def close(self) -> None:
        """Stop the workers, as `kill` does."""
        self.kill()


def _log(line: str) -> None:
    sys.stderr.write(f"# {line}\n")


def _ignore(line: str) -> None:
    pass
