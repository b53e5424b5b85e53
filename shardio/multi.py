"""MultiLoader: workers that each iterate over a whole dataset and send samples over ZeroMQ."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, get_args

from shardio._base.callers import one_of
from shardio._base.classes import Closing
from shardio._base.html import fragment, table
from shardio._base.progress import counted
from shardio._base.statistics import SkippedItem
from shardio._loading.options import OnError, check_seconds, check_skips, refuse_path
from shardio._workers.processes.serialization import short_repr
from shardio._workers.processes.worker_main import Start
from shardio._workers.tasks.calls import ErrorBudget
from shardio._workers.tasks.sample_stream import SampleStream
from shardio._workers.tasks.zeromq import WorkerInfo, check_prefix, worker_info, zeromq
from shardio.errors import InvalidArgument
from shardio.order.sampling import check_count

__all__ = ["MultiLoader", "WorkerInfo", "worker_info"]

_BUDGET_BYTES: Final = 256 << 20
_MAX_WORKERS: Final = 250


class MultiLoader(Closing):
    """A loader that yields the samples of several worker processes in the order of their arrival.

    Each worker iterates over the whole dataset. Thus n workers yield every sample n times, unless
    the dataset skips the samples of the other workers (see `worker_info`). The samples of one
    worker arrive in the order of the dataset. A sample of 64 KiB or more arrives in a block of
    shared memory, which is not reused as long as the caller refers to an array in it. If the caller
    holds all blocks that `memory_bytes` or the limit of open files allows, samples are copied; a
    RuntimeWarning reports the first copy. References in a forked child do not keep a block: before
    a fork, copy the arrays that the child will read.

    Every iteration starts new workers, and ends the workers of earlier iterations. Workers also
    exit when their iteration ends or is garbage-collected, when `kill()` is called, and when this
    process exits.

    Args:
        dataset: any iterable. It is pickled for the workers. Its `__iter__` must create what cannot
            be pickled, such as a generator or an open file.
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
        on_error: "raise" to raise the exception of the dataset, or "skip" to skip the sample and
            continue with the same iterator. A generator cannot continue after an
            exception: its worker then ends with a warning. A crash of a worker always raises
            WorkerDied.
        max_skips: with "skip", the number of samples of an iteration that may be skipped.

    Raises:
        InvalidArgument: an argument is invalid; the message lists the accepted values.
        UnsupportedEnvironment: pyzmq is missing: pip install '.[zmq]'.
        WorkerDied, TransformError, BatchTimeout: (in the loop) loading failed; the message names
            the worker.
        TooManySkipped: (in the loop) more than `max_skips` samples failed.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
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
    ) -> None:
        zeromq()
        refuse_path("dataset", dataset)
        if not hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__getitem__"):
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
        self._error_budget = ErrorBudget(self._max_skips)
        self._iterations: weakref.WeakSet[SampleStream] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"MultiLoader({type(self.dataset).__name__}, workers={self.workers})"

    def _repr_html_(self) -> str:
        name, skips = type(self.dataset).__name__, self._max_skips
        skipped = f"skips up to {skips:,} samples" if skips is not None else ""
        facts = f"a dataset of class {name}", counted(self.workers, "workers"), skipped
        rows = ((each.item, each.index, each.error, each.text) for each in self.skipped)
        header = ("worker", "sample", "error", "message")
        return fragment("MultiLoader", "", facts, table(header, rows, len(self.skipped)))

    def __iter__(self) -> Iterator[Any]:
        """Start workers that iterate over the dataset."""
        if not self.nokill:
            self.kill()
        self._error_budget = ErrorBudget(self._max_skips)
        try:
            iteration = SampleStream(
                self.dataset,
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

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """The samples that the latest iteration has skipped so far.

        The `item` of a skipped sample names its worker; `index` is the index among the samples of
        this worker.
        """
        return tuple(self._error_budget.skipped)

    def kill(self) -> None:
        """Stop the workers of all iterations, even busy ones."""
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
