"""Background jobs of the viewer: one at a time of each kind, with progress, stopped at the end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import shardio
from shardio.errors import ClosedError

T = TypeVar("T")
State = Literal["none", "running", "done", "failed"]
_JOIN_S: Final = 0.3
"""The time that all jobs together get to stop at the end; jobs that are still running end with the
process.
"""
_TIME_SLICE_S: Final = 0.2
"""The time after which a job lets a waiting job run."""
_POLL_S: Final = 0.05
"""The time after which a waiting job checks whether it has been cancelled."""


class Cancelled(Exception):
    """Raised in a job's thread, by `Job.report`, after the job has been cancelled."""


class Job:
    """A function that runs in a thread of its own.

    `progress` is from 0 to 1, `text` says what is done or what failed, and `result` is what the
    function has returned.
    """

    def __init__(self, work: Callable[[Job], Any]) -> None:
        self.state: State = "running"
        self.progress, self.text = 0.0, ""
        self.result: Any = None
        self._is_cancelled = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Job], Any]) -> None:
        state: State = "failed"
        try:
            self.result = work(self)
            state, self.progress = "done", 1.0
        except Cancelled:
            self.text = "stopped"
        except (shardio.ShardioError, OSError, MemoryError) as error:
            self.text = str(error) or type(error).__name__
        except Exception as error:  # noqa: BLE001  # a bug: the page says where it is shown
            traceback.print_exception(error, file=sys.stderr)
            self.text = "the viewer failed; its terminal shows the error"
        with self._changed:
            self.state = state
            self._changed.notify_all()

    def report(self, progress: float, text: str = "") -> None:
        """Set the progress; wake those who wait for a change.

        Raises:
            Cancelled: the job is to stop.
        """
        if self._is_cancelled:
            raise Cancelled
        with self._changed:
            self.progress, self.text = min(1.0, progress), text
            self._changed.notify_all()

    def cancel(self) -> None:
        """Make the next `report` raise Cancelled."""
        self._is_cancelled = True

    @property
    def is_cancelled(self) -> bool:
        """True if `cancel` was called before the job was done."""
        return self._is_cancelled and self.state != "done"

    def wait(self, timeout_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until the job has ended or `until` returns True, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.state != "running" or until(), timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)


class Jobs:
    """The jobs of a viewer by kind. Starting a job whose kind runs already has no effect."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def get(self, kind: str) -> Job | None:
        """Return the last job of a kind; None if there was none."""
        return self._jobs.get(kind)

    def start(self, kind: str, work: Callable[[Job], Any]) -> Job:
        """Start a job, unless one of its kind runs; return the job that runs.

        A finished job is started again.

        Raises:
            ClosedError: the jobs are closed, and there was none of this kind.
        """
        with self._lock:
            job = self._jobs.get(kind)
            if self._is_closed and job is None:
                raise ClosedError("the viewer is closed")
            if job is None or (job.state != "running" and not self._is_closed):
                job = self._jobs[kind] = Job(work)
            return job

    def forget(self, kind: str) -> None:
        """Cancel and discard the last job of a kind."""
        with self._lock:
            job = self._jobs.pop(kind, None)
        if job is not None:
            job.cancel()

    def close(self) -> None:
        """Cancel all jobs, and wait for them for a moment."""
        with self._lock:
            self._is_closed = True
            jobs = [*self._jobs.values()]
        for job in jobs:
            job.cancel()
        end = time.monotonic() + _JOIN_S
        for job in jobs:
            job.join(max(0.0, end - time.monotonic()))


class FairSemaphore:
    """A semaphore that at most `n` jobs hold; the others wait in order, and time is shared."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._acquired_s: dict[Job, float] = {}
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()

    def acquire(self, job: Job) -> None:
        """Wait until the job holds the semaphore.

        Raises:
            Cancelled: the job has been cancelled.
        """
        with self._changed:
            self._waiting.append(job)
            try:
                while len(self._acquired_s) >= self._n or self._waiting[0] is not job:
                    self._changed.wait(_POLL_S)
                    job.report(job.progress)
                self._acquired_s[job] = time.monotonic()
            finally:
                self._waiting.remove(job)
                self._changed.notify_all()

    def yield_if_due(self, job: Job) -> None:
        """Release and acquire the semaphore if another job waits and the time slice is over.

        Raises:
            Cancelled: the job has been cancelled.
        """
        if self._waiting and time.monotonic() - self._acquired_s[job] >= _TIME_SLICE_S:
            self.release(job)
            self.acquire(job)

    def release(self, job: Job) -> None:
        """Release the semaphore if the job holds it."""
        with self._changed:
            self._acquired_s.pop(job, None)
            self._changed.notify_all()


async def in_own_thread(work: Callable[[], T]) -> T:
    """Run a function that may never return in a daemon thread, and return its result.

    Raises:
        Exception: the function raised it. SystemExit and the like become a RuntimeError.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(set_: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = future.set_result, work()
        except BaseException as error:  # noqa: BLE001  # of a user's code: the server goes on
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            outcome = future.set_exception, error if is_plain else RuntimeError(repr(error))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future
