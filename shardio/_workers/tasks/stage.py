"""The parts of a pipeline, and the state of one stage.

A pipeline takes the items of a source through steps, which call a function for each item, or
collect items into lists. A `Stage` is the state of a step that calls a function; a call for one
input is a job. The stage starts no threads and calls no functions: it decides which job may start,
and puts results in order. An `OutputQueue` is at the end of the pipeline. A `BatchQueue` in front
of a stage or of the OutputQueue collects results into lists.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any, Final, Literal, NamedTuple

from shardio._base.statistics import StageStats, now_ns
from shardio._workers.processes.serialization import short_repr
from shardio.errors import InvalidArgument, TransformError


class UserCall(NamedTuple):
    """A function of one argument, which returns one result or yields many."""

    function: Callable[[Any], Any]
    yields_many: bool = False
    is_async: bool = False  # calls run in an event loop

    def invoke(self, item: Any) -> Any:
        """Return the result of the function; raise TransformError if the result is a coroutine."""
        value = self.function(item)
        if type(value) is CoroutineType:
            value.close()
            raise TransformError(
                "it returned a coroutine: define it with `async def`, so that it is awaited"
            )
        return value


def user_call(name: str, function: Any) -> UserCall:
    """Return the UserCall for a function, or for the look-up in an object such as a mapping."""
    if not callable(function):
        look_up = getattr(function, "__getitem__", None)
        if look_up is None or isinstance(function, str | bytes):
            raise InvalidArgument(
                f"{name} must be a function, or an object with keys or indices, such as a mapping; "
                f"found {short_repr(function)}"
            )
        return UserCall(look_up)
    # For an object that is callable, look also at `__call__`. For a class, do not.
    method = None if isinstance(function, type) else getattr(function, "__call__", None)  # noqa: B004
    for each in (function, method):
        if inspect.iscoroutinefunction(each):
            return UserCall(function, is_async=True)
        if inspect.isasyncgenfunction(each):
            return UserCall(function, yields_many=True, is_async=True)
        if inspect.isgeneratorfunction(each):
            return UserCall(function, yields_many=True)
    return UserCall(function)


TaskExecutor = Literal["process"] | Executor | None
"""The place where calls run: threads of the pipeline, worker processes, or a given executor."""


def check_executor(executor: Any) -> TaskExecutor:
    """Return `executor`; raise InvalidArgument if it is not None, "process" or an Executor."""
    if executor is None or executor == "process" or isinstance(executor, Executor):
        return executor  # type: ignore[no-any-return]
    raise InvalidArgument(
        "executor must be None, 'process' or an Executor of concurrent.futures; found "
        f"{short_repr(executor)}"
    )


class PipeStep(NamedTuple):
    call: UserCall
    name: str
    concurrency: int
    in_order: bool
    thread_group: str  # steps of a group share threads, as many as their highest `concurrency`
    executor: TaskExecutor = None


class BatchStep(NamedTuple):
    """A step that collects items into lists of `n`."""

    n: int
    drop_last: bool  # drop a shorter last list


class SourcePosition(NamedTuple):
    """An item of a source, and the states of the source before and after the item."""

    before: Any
    after: Any
    item: Any


_MAX_EARLY_RESULTS: Final = 16
"""The number of results that a generator may yield before earlier inputs are finished."""
_MAX_OUTPUTS: Final = 2
"""A generator is suspended while this number of results waits for the next stage."""
_S_PER_NS: Final = 1e-9


class SourceItem(NamedTuple):
    """The items of the source from which a result was made; used in messages, and to resume.

    The items have the indices `first` to `last`. To resume after the result, the source continues
    from the state `after`. But if a generator function made the result (`n_yielded` is not 0), the
    source continues from `before`, and the generator's first `n_yielded` results are skipped. For
    the job that reads the source, `first` is -1, and `last` is the index of the first item read.
    """

    first: int
    last: int
    before: Any
    after: Any
    n_yielded: int = 0

    def __str__(self) -> str:
        if self.first == self.last:
            return f"item {self.last}"
        return f"items {self.first} to {self.last}"


Entry = tuple[SourceItem, Any]  # the source items of a result, and the result


@dataclass(slots=True, eq=False)
class StageJob:
    stage: Stage
    step: int  # the index of the input in the stage
    origin: SourceItem
    item: Any
    # A generator, the event that resumes an async generator, or an item's index in a TaskPool.
    results: Any = None
    n_yielded: int = 0
    began_ns: int = 0
    thread_id: int = 0
    is_suspended: bool = False
    # The last results, and the time that they took, of a call that has ended.
    ready: tuple[Iterable[Any], int] | None = None

    @property
    def description(self) -> str:
        if self.origin.first < 0:
            return f"{self.stage.name}, item {self.origin.last + self.n_yielded}"
        return f"{self.stage.name}, {self.origin} ({short_repr(self.item)})"


@dataclass(slots=True, eq=False)
class Stage:
    name: str
    call: UserCall
    concurrency: int  # the limit for `running`, which includes jobs that wait for a process
    in_order: bool = False  # deliver results in the order of the inputs, not of completion
    n_workers: int = 1  # the number of jobs that can run at the same time
    n_passed_over: int = 0  # results of the first job to omit; delivered by an earlier iteration
    inputs: deque[Entry] = field(default_factory=deque)
    outputs: deque[Entry] = field(default_factory=deque)  # results that the consumer has not taken
    running: dict[int, StageJob] = field(default_factory=dict)
    error: Exception | None = None  # if set, the stage ends with this error after `outputs`
    has_reported_end: bool = False
    n_in: int = 0
    n_supplied: int = 0
    n_out: int = 0
    n_dropped: int = 0
    n_failed: int = 0
    busy_ns: int = 0
    waiting_ns: int = 0
    _n_begun: int = 0
    _next_step: int = 0  # in order: the next step to deliver; else: the number of finished jobs
    # The steps that finished before their turn, each with its error or None.
    _finished_jobs: dict[int, Exception | None] = field(default_factory=dict)
    _suspended: dict[int, StageJob] = field(default_factory=dict)
    _early_results: dict[int, list[Entry]] = field(default_factory=dict)
    _is_ended: bool = False
    _has_failed: bool = False
    end_error: Exception | None = None

    @property
    def has_room(self) -> bool:
        """True if another input may be added: max(2, `concurrency`) inputs may wait."""
        return len(self.inputs) < max(2, self.concurrency)

    @property
    def is_over(self) -> bool:
        """True if all results were taken, and no more will follow."""
        if self.outputs:
            return False
        return self.error is not None or (self._is_ended and self._next_step >= self.n_in)

    def put(self, entry: Entry) -> None:
        self.inputs.append(entry)
        self.n_in += 1
        self.waiting_ns -= now_ns()

    def end(self, error: Exception | None) -> None:
        """Declare that no more inputs follow; `error`, if any, is passed on after all results."""
        self._is_ended, self.end_error = True, error

    @property
    def has_work(self) -> bool:
        return self._may_begin or self._resumable() is not None

    @property
    def _may_begin(self) -> bool:
        if not self.inputs or self.outputs or self._has_failed:
            return False
        # Jobs may start up to 2 * concurrency steps ahead of the step that is due, so that a slow
        # job does not stop the others.
        n_ahead = self._n_begun - self._next_step
        return len(self.running) < self.concurrency and n_ahead < 2 * self.concurrency

    def _resumable(self) -> int | None:
        """Return the step of a suspended generator that may resume."""
        if not self._suspended or self.error is not None:
            return None
        return next((s for s in self._suspended if self._may_yield(s, is_next=False)), None)

    def begin(self) -> StageJob | None:
        """Return a suspended job to resume, else a new job; None if there is none."""
        if (step := self._resumable()) is not None:
            job = self._suspended.pop(step)
            job.is_suspended, job.began_ns = False, now_ns()
            return job
        if not self._may_begin:
            return None
        step = self._n_begun
        self._n_begun += 1
        now = now_ns()
        origin, item = self.inputs.popleft()
        self.waiting_ns += now
        self.running[step] = job = StageJob(self, step, origin, item, began_ns=now)
        return job

    def add_result(self, job: StageJob, value: Any) -> None:
        """Accept a result of a job; the result None means that the item is dropped."""
        job.n_yielded += 1
        origin = job.origin
        if value is None:
            self.n_dropped += 1
        elif not self.call.yields_many:
            self._add(job.step, (origin, value))
        elif job.step or job.n_yielded > self.n_passed_over:
            self._add(job.step, (origin._replace(n_yielded=job.n_yielded), value))

    def supply(self, job: StageJob, entry: Entry) -> None:
        job.n_yielded += 1
        self.n_supplied += 1
        self._add(job.step, entry)

    def _add(self, step: int, entry: Entry) -> None:
        self.n_out += 1
        if not self.in_order or step == self._next_step:
            self.outputs.append(entry)
        else:
            self._early_results.setdefault(step, []).append(entry)

    def may_continue(self, job: StageJob) -> bool:
        """Return True if a job may yield another result; otherwise suspend it until `begin`."""
        if self._may_yield(job.step, is_next=True):
            return True
        self._suspended[job.step] = job
        job.is_suspended = True
        return False

    def _may_yield(self, step: int, *, is_next: bool) -> bool:
        if self.in_order and step != self._next_step:
            return len(self._early_results.get(step, ())) < _MAX_EARLY_RESULTS
        # Resume a suspended job only after all results were taken. Waking a thread takes longer
        # than most items, so a thread is woken for several items rather than for each.
        return len(self.outputs) < (_MAX_OUTPUTS if is_next else 1)

    def fail(self, job: StageJob, error: Exception | None) -> None:
        """Record that a job has failed; with `error`, the stage fails after the job's results."""
        self.n_failed += 1
        # No new jobs may start after an error, because later results are not delivered.
        self._has_failed = self._has_failed or error is not None
        self.finish(job, error)

    def finish(self, job: StageJob, error: Exception | None = None) -> None:
        """Record the end of a job, and move to `outputs` the results that are next in order."""
        del self.running[job.step]
        self._finished_jobs[job.step] = error
        while self.error is None and self._finished_jobs:
            step = self._next_step if self.in_order else next(iter(self._finished_jobs))
            if step not in self._finished_jobs:
                return
            self.error = self._finished_jobs.pop(step)
            if self.error is None:
                self._next_step += 1
                self.outputs.extend(self._early_results.pop(self._next_step, ()))

    def take_suspended(self) -> list[Any]:
        """Remove and return the suspended generators; they end when the caller drops them."""
        found = [job.results for job in self._suspended.values()]
        for job in self._suspended.values():
            job.results = None
        return found

    def clear(self) -> None:
        """Drop all objects of user code, and all errors: tracebacks refer to such objects."""
        for entries in (self.inputs, self.outputs):
            entries.clear()
        for jobs in (self.running, self._suspended, self._early_results, self._finished_jobs):
            jobs.clear()
        self.error = self.end_error = None
        self._next_step = self.n_in

    def stats(self, elapsed_ns: int) -> StageStats:
        waiting_ns = self.waiting_ns + len(self.inputs) * now_ns()
        return StageStats(
            name=self.name,
            concurrency=self.n_workers,
            n_in=max(self.n_in, self.n_supplied),
            n_out=self.n_out,
            n_dropped=self.n_dropped,
            n_failed=self.n_failed,
            busy_s=self.busy_ns * _S_PER_NS,
            waiting_s=max(0, waiting_ns) * _S_PER_NS,
            elapsed_s=elapsed_ns * _S_PER_NS,
        )


class BatchQueue:
    """A queue that collects items into lists, and puts the lists into `consumer`.

    A shorter list at the end is dropped if `step.drop_last` is True, or if an error follows.
    """

    def __init__(self, step: BatchStep, consumer: Consumer) -> None:
        self._n, self._drop_last = step
        self._consumer = consumer
        self._batch: list[Entry] = []

    @property
    def has_room(self) -> bool:
        """True if another item may be added; a full list needs room in the consumer."""
        return len(self._batch) < self._n - 1 or self._consumer.has_room

    def put(self, entry: Entry) -> None:
        self._batch.append(entry)
        if len(self._batch) == self._n:
            self._pass_on()

    def end(self, error: Exception | None) -> None:
        if self._batch and not self._drop_last and error is None:
            self._pass_on()
        self._consumer.end(error)

    def _pass_on(self) -> None:
        batch, self._batch = self._batch, []
        first, last = batch[0][0], batch[-1][0]
        self._consumer.put((last._replace(first=first.first), [item for _, item in batch]))

    def clear(self) -> None:
        self._batch.clear()
        self._consumer.clear()


class OutputQueue:
    """The queue of up to `max_results` results that wait for the loop at the end of a pipeline."""

    def __init__(self, max_results: int) -> None:
        self.entries: deque[Entry] = deque()
        self.is_over = False
        self.error: Exception | None = None  # to raise after all results
        self.n_taken = self.waiting_ns = 0
        self._max_results = max_results
        self._is_awaited = False
        # Use a plain lock: its `acquire` is written in C, so Ctrl-C cannot interrupt it half-way.
        self._wakeup_lock = threading.Lock()
        self._wakeup_lock.acquire()

    @property
    def has_room(self) -> bool:
        return len(self.entries) < self._max_results

    def put(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.waiting_ns -= now_ns()
        self.notify()

    def end(self, error: Exception | None) -> None:
        """Declare that no more results follow; `error`, if any, is raised after the last result."""
        self.is_over, self.error = True, error
        self.notify()

    def take(self) -> Entry | None:
        """Return a result, or None if there is none; `wait` then waits for a result or the end."""
        if not self.entries:
            self._is_awaited = not self.is_over
            return None
        self.waiting_ns += now_ns()
        self.n_taken += 1
        return self.entries.popleft()

    def notify(self) -> None:
        # If Ctrl-C interrupted an earlier `notify`, the lock may already be released.
        if self._is_awaited and self._wakeup_lock.locked():
            self._wakeup_lock.release()
        self._is_awaited = False

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for `notify`; return False after the timeout. Called without the pipeline's lock."""
        return self._wakeup_lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))

    def clear(self) -> None:
        self.entries.clear()


Consumer = Stage | BatchQueue | OutputQueue
"""An object into which the results of a stage are put."""
