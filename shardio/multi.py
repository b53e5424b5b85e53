"""MultiLoader: worker processes that each iterate a whole dataset, over ZeroMQ."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, get_args

from shardio._engine.gathering import Gathering
from shardio._engine.inbox import check_prefix
from shardio._engine.lenience import Lenience, shortened
from shardio._engine.mail import zeromq
from shardio._engine.outbox import WorkerInfo, worker_info
from shardio._engine.start import Start
from shardio.closing import Closing
from shardio.errors import InvalidArgument
from shardio.item_stats import SkippedItem
from shardio.option_checks import OnError, count, most_skips, one_of, seconds

__all__ = ["MultiLoader", "WorkerInfo", "worker_info"]

_BUDGET_BYTES: Final = 256 << 20
_MOST_WORKERS: Final = 250


class MultiLoader(Closing):
    """Iterates over what several processes find in a dataset, as it comes.

    Each worker iterates the whole dataset from its beginning, so that n workers give every sample n
    times, unless the dataset leaves out what is the others' (see `worker_info`). The samples of one
    worker come in its order. Larger arrays arrive without a copy, in memory that stays the caller's
    for as long as anything refers to it.

    Every iteration starts workers anew, and ends those of the one before. Workers end with their
    iteration: when it is over, has failed, is let go of, at `kill()`, or with this process.

    Args:
        dataset: any iterable. It travels to the workers by pickle; what cannot, such as a generator
            or an open file, is there by a fork of this process, which a warning says.
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

    Raises:
        InvalidArgument: an argument is not acceptable; the message lists what is.
        EnvironmentUnsuitable: pyzmq is missing: pip install 'shardio[zmq]'.
        WorkerDied, TransformError, BatchOverdue: (in the loop) naming the worker.
        TooManySkipped: (in the loop) one more sample failed than may.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
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
    ) -> None:
        zeromq()
        if not hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__getitem__"):
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
        self._lenience = Lenience(self._most_skips)
        self._iterations: weakref.WeakSet[Gathering] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:
        """Start workers, each of which iterates the dataset."""
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

    def _gather(self, start: Start) -> Gathering:
        self._lenience = Lenience(self._most_skips)
        return Gathering(
            self.dataset,
            self.workers,
            prefix=self._whole_prefix,
            most_bytes=self._memory_bytes,
            timeout_s=self._timeout_s,
            start=start,
            lenience=self._lenience,
            say=_say if self.verbose else _say_nothing,
        )

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """The samples that were left out so far of the iteration that was begun last.

        `index` is the number of the sample in its worker, `item` says which worker that is.
        """
        return tuple(self._lenience.skipped)

    def kill(self) -> None:
        """End the workers of all iterations, in the middle of whatever they do."""
        for iteration in list(self._iterations):
            if self.verbose and iteration.is_open:
                _say("ending the workers of an iteration")
            iteration.close()
        self._iterations.clear()

    def close(self) -> None:
        """The same as `kill`, at the end of a `with`."""
        self.kill()


def _say(line: str) -> None:
    sys.stderr.write(f"# {line}\n")


def _say_nothing(line: str) -> None:
    """Be silent."""
