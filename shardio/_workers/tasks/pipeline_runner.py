"""Run a pipeline: items of a source pass through functions to the caller's loop.

    source ─▶ stage ─▶ batches ─▶ stage ─▶ … ─▶ results ─▶ the loop

No thread drives the pipeline. Instead, the threads of the stages and the thread of the loop pass
results on while the next stage has room, and wake threads for new jobs. They do this under one
lock; user code runs without the lock.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from textwrap import indent
from typing import Any, Final

from shardio._base.classes import Closing
from shardio._base.statistics import PipelineStats, now_ns
from shardio._workers.processes.linux import interrupts_held, this_process
from shardio._workers.processes.serialization import add_note, as_failure
from shardio._workers.processes.stack_dumps import thread_stack
from shardio._workers.tasks.calls import ErrorBudget
from shardio._workers.tasks.executors import SOURCE, create_executors
from shardio._workers.tasks.schedule import DEPTH
from shardio._workers.tasks.stage import (
    BatchQueue,
    BatchStep,
    Consumer,
    Entry,
    OutputQueue,
    PipeStep,
    SourceItem,
    SourcePosition,
    Stage,
    StageJob,
    UserCall,
)
from shardio.errors import BatchTimeout, ClosedError, TooManySkipped

_MAX_CALLS_LISTED: Final = 4  # the maximum number of calls in an error report


def _late_result_error(
    number: int, timeout_s: float | None, jobs: Iterable[StageJob], stacks: Sequence[str]
) -> BatchTimeout:
    lines = [f"result {number} did not arrive within {timeout_s:g} s"]
    at_work = [job for job in jobs if not job.is_suspended]
    frames = sys._current_frames()
    for job in sorted(at_work, key=lambda job: job.began_ns)[:_MAX_CALLS_LISTED]:
        lines.append(f"{job.description}, for {(now_ns() - job.began_ns) * 1e-9:.1f} s")
        frame = frames.get(job.thread_id)
        if frame is not None:
            lines.append(indent(thread_stack(frame), "    "))
    if len(at_work) > _MAX_CALLS_LISTED:
        lines.append(f"and {len(at_work) - _MAX_CALLS_LISTED} more calls")
    if not at_work:
        lines.append("no call is in progress")
    return BatchTimeout("\n".join([*lines, *stacks]))


_S_PER_NS: Final = 1e-9


class PipelineRunner(Closing):
    """One iteration over a source, through all stages of a pipeline.

    `source` is an iterable or async iterable of items, or of SourcePosition objects. At most
    `n_buffered` results wait for the loop. `max_skips` items may fail; None raises all errors. To
    resume an earlier iteration, pass the source without its first `n_items_before` items; the first
    stage then omits the first `n_passed_over` results of the first remaining item. The runner's
    threads are daemons, and are never joined.
    """

    def __init__(
        self,
        source: Any,
        steps: Sequence[PipeStep | BatchStep],
        *,
        n_buffered: int,
        max_skips: int | None = None,
        n_items_before: int = 0,
        n_passed_over: int = 0,
    ) -> None:
        self.lock = threading.Lock()
        self._take_lock = threading.RLock()
        self.is_closed = self._is_exhausted = False
        self._pid = this_process.pid
        self._error_budget = ErrorBudget(max_skips)
        self._n_items_before = n_items_before
        is_async = hasattr(type(source), "__aiter__")
        call = UserCall(aiter if is_async else iter, yields_many=True, is_async=is_async)
        self._source = Stage(SOURCE, call, 1)
        pipes = [step for step in steps if isinstance(step, PipeStep)]
        self._stages = [self._source]
        for step in pipes:
            limit = n_workers = step.concurrency
            if step.executor == "process":  # queue further jobs, so that no worker is idle
                limit = DEPTH * n_workers + 2
            self._stages.append(Stage(step.name, step.call, limit, step.in_order, n_workers))
        self._results = OutputQueue(n_buffered)
        self._consumers = _consumers(steps, [*self._stages[1:], self._results])
        for stage in self._stages[1:2]:
            stage.n_passed_over = n_passed_over
        self._index_of = {stage: index for index, stage in enumerate(self._stages)}
        self._began_ns, self._waited_ns = now_ns(), 0
        self._final_stats: PipelineStats | None = None
        self._internal_error: Exception | None = None
        self._executors = create_executors(
            self, dict(zip(self._stages, [None, *pipes], strict=True))
        )
        with self.lock:
            self._source.put((SourceItem(-1, n_items_before, None, None), source))
            self._source.end(None)
            self._executors[self._source].wake()

    # Called by the loop:

    def take(self, timeout_s: float | None) -> Entry | None:
        """Return the next result and its source items; None at the end. Thread-safe."""
        if not self._is_exhausted:
            # Check before locking: in a fork, the lock may be held by a thread that exists only in
            # the parent.
            self._check_open()
        with self._take_lock:
            return None if self._is_exhausted else self._take(timeout_s)

    def _take(self, timeout_s: float | None) -> Entry | None:
        start_ns = now_ns()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._check_open()
            with self.lock:
                entry = self._results.take()
                if entry is not None:
                    self._waited_ns += now_ns() - start_ns
                    self._pass_on(len(self._stages) - 1)
                    return entry
                if self._results.is_over:
                    break
                if self.is_closed or self._internal_error is not None:
                    # `_check_open` raises an error now; `wait` could wait forever.
                    continue
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if not self._results.wait(left_s):
                raise self._timeout_error(timeout_s)
        error, self._results.error = self._results.error, None
        if error is None:
            self._is_exhausted = True
            return None
        try:
            raise error
        finally:
            del error  # breaks the reference cycle of error, traceback and frame

    def _timeout_error(self, timeout_s: float | None) -> BatchTimeout:
        stacks = [each for stage in self._stages for each in self._executors[stage].stacks()]
        with self.lock:
            jobs = (job for stage in self._stages for job in stage.running.values())
            return _late_result_error(self._results.n_taken, timeout_s, jobs, stacks)

    def _check_open(self) -> None:
        if self._pid != this_process.pid:
            raise ClosedError(
                "the iteration was begun before this process was forked; begin another one here"
            )
        if self._internal_error is not None:
            raise self._internal_error
        if self.is_closed:
            raise ClosedError("the iteration was closed; begin another one")

    def close(self) -> None:
        """Start no more calls, end coroutines and processes; calls in threads run to their ends."""
        with interrupts_held():  # the user may press Ctrl-C a second time
            self._end()

    def _end(self) -> None:
        # In a fork, the threads and possibly the lock belong to the parent.
        if self._pid != this_process.pid:
            return
        with self.lock:
            if self.is_closed:
                return
            self._final_stats = self._stats()
            self.is_closed = True
            self._results.notify()
        for executor in {id(each): each for each in self._executors.values()}.values():
            executor.close()
        for each in (self._source, *self._consumers):  # no thread reads their queues any more
            each.clear()

    def abandon(self) -> None:
        """Close the runner from a finalizer, even in a thread that holds the lock."""
        if self.lock.locked():
            _thread.start_new_thread(self._end, ())
        else:
            self.close()

    def record_internal_error(self, error: BaseException) -> None:
        """Record an internal error, which `take` then raises."""
        with self.lock:
            self._internal_error = as_failure(error, "a thread of the pipeline")
            self._results.notify()

    # Called by executors:

    def add_results(self, job: StageJob, values: Iterable[Any], busy_ns: int) -> bool:
        """Accept results of a job that has not ended; return True if the job may go on now.

        If False, `Stage.begin` returns the job again later, unless the runner is closed.
        """
        stage = job.stage
        with self.lock:
            if self.is_closed:
                return False
            stage.busy_ns += busy_ns
            for value in values:
                if stage is self._source:
                    self._supply(job, value)
                else:
                    stage.add_result(job, value)
            self._pass_on(self._index_of[stage])
            return stage.may_continue(job)

    def _supply(self, job: StageJob, value: Any) -> None:
        index = self._n_items_before + job.n_yielded
        before, after = index, index + 1
        if type(value) is SourcePosition:
            before, after, value = value
        self._source.supply(job, (SourceItem(index, index, before, after), value))

    def finish(self, job: StageJob, values: Iterable[Any], busy_ns: int) -> None:
        """Accept `values`, the last results of a job."""
        stage = job.stage
        job.ready = values, busy_ns
        with self.lock:
            if self.is_closed:
                return
            self._finish_ready(stage, job.step)
            self._pass_on(self._index_of[stage])

    def _finish_ready(self, stage: Stage, last_step: int) -> None:
        """Accept the results of all jobs up to `last_step` for which `finish` was called.

        The call for an earlier job may still wait for the lock. Its results are accepted here, so
        that results that are ready together are delivered in the order of the inputs.
        """
        for job in [*stage.running.values()]:  # by step
            if job.ready is not None and job.step <= last_step:
                values, busy_ns = job.ready
                stage.busy_ns += busy_ns
                for value in values:
                    stage.add_result(job, value)
                stage.finish(job)

    def fail(
        self, job: StageJob, error: BaseException, busy_ns: int, values: Iterable[Any] = ()
    ) -> None:
        """Accept `values`, the last results of a job that then raised `error`."""
        stage = job.stage
        failure = as_failure(error, stage.name)
        add_note(failure, f"in {job.description}")
        with self.lock:
            if self.is_closed:
                return
            self._finish_ready(stage, job.step)
            stage.busy_ns += busy_ns
            for value in values:
                stage.add_result(job, value)
            stage.fail(job, self._error_to_raise(job, failure))
            self._pass_on(self._index_of[stage])

    def _error_to_raise(self, job: StageJob, failure: Exception) -> Exception | None:
        """Return the error to raise for a failed call; None if its item is skipped."""
        if job.stage is self._source or not self._error_budget.allows_skip(failure):
            return failure
        try:
            self._error_budget.skip(job.origin.last, job.item, failure)
        except TooManySkipped as refusal:
            return refusal
        return None

    def pass_on_to(self, stage: Stage) -> None:
        """Pass waiting results on to `stage`, which now has room. Called under the lock."""
        index = self._index_of[stage]
        if index:
            self._pass_on(index - 1)

    def _pass_on(self, index: int) -> None:
        """Pass results of stage `index` on, as far as the consumer has room; wake executors."""
        stage, consumer = self._stages[index], self._consumers[index]
        has_moved = False
        while stage.outputs and consumer.has_room:
            consumer.put(stage.outputs.popleft())
            has_moved = True
        has_ended = not stage.has_reported_end and stage.is_over
        if has_ended:
            stage.has_reported_end = True
            consumer.end(stage.error or stage.end_error)
        if has_moved or has_ended:
            if index + 1 < len(self._stages):
                self._executors[self._stages[index + 1]].wake()
                if has_ended:
                    self._pass_on(index + 1)
            self._executors[stage].wake()

    def stats(self) -> PipelineStats:
        with self.lock:
            return self._final_stats or self._stats()

    def _stats(self) -> PipelineStats:
        elapsed_ns = now_ns() - self._began_ns
        results = self._results
        waiting_ns = results.waiting_ns + len(results.entries) * now_ns()
        return PipelineStats(
            stages=tuple(stage.stats(elapsed_ns) for stage in self._stages),
            n_results=results.n_taken,
            skipped=tuple(self._error_budget.skipped),
            waiting_s=self._waited_ns * _S_PER_NS,
            elapsed_s=elapsed_ns * _S_PER_NS,
            buffer_depth=waiting_ns / elapsed_ns if elapsed_ns else 0.0,
        )


def _consumers(
    steps: Sequence[PipeStep | BatchStep], queues: list[Stage | OutputQueue]
) -> list[Consumer]:
    found: list[Consumer] = []
    consumer: Consumer = queues.pop()
    for step in reversed(steps):
        if isinstance(step, BatchStep):
            consumer = BatchQueue(step, consumer)
        else:
            found.append(consumer)
            consumer = queues.pop()
    return [*found, consumer][::-1]
