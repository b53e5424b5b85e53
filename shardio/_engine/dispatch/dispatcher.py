"""The dispatcher of batches: it assigns tasks to workers, handles results and recycles blocks."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator

from shardio._base.statistics import now_ns
from shardio._engine.dispatch.backends import Backend
from shardio._engine.dispatch.crashes import (
    InFlightRows,
    SuspectSamples,
    clear_claims,
    crash_error,
    is_final,
    read_claims,
)
from shardio._engine.dispatch.iterations import DeliveredBlock, EpochIteration, IterationTable
from shardio._engine.dispatch.worker import RequestKind, Status, Task, TaskResult, WorkerLost
from shardio._engine.filling.batch_spec import BatchSpec
from shardio._workers.processes.blocks import BlockPool
from shardio._workers.processes.stack_dumps import timeout_error
from shardio._workers.tasks.schedule import Schedule
from shardio.dataset.dataset import Dataset
from shardio.errors import InsufficientMemory, TransformError, WorkerDied

# Plain ints, because members of an enum are slow to look up and to compare.
_FILL, _FILLED, _QUICK = int(RequestKind.FILL), int(Status.FILLED), int(Status.QUICK)


class Dispatcher:
    """A dispatcher of tasks and filled blocks. Borrows all its arguments.

    `n_blocks` is the number of blocks that one iteration should have; `memory_bytes` is only used
    in messages. Callers hold the engine's lock.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        dataset: Dataset,
        backend: Backend,
        iterations: IterationTable,
        pool: BlockPool,
        *,
        n_blocks: int,
        memory_bytes: int,
    ) -> None:
        self._batch_spec, self._dataset, self._backend = batch_spec, dataset, backend
        self._iterations, self.pool = iterations, pool
        self._n_blocks, self._memory_bytes = n_blocks, memory_bytes
        self.synchronize: Callable[[], None] | None = None
        """A function that waits until the tensors' framework no longer reads released batches."""

    def next(self, iteration: EpochIteration, timeout_s: float | None) -> DeliveredBlock | None:
        schedule, pool, timer = iteration.schedule, self.pool, iteration.timer
        if schedule.is_over or iteration.is_cancelled:
            self._end(iteration)
            return None
        if iteration.delivered_block is not None:
            self._free_delivered_block(iteration)
        step = schedule.next_step
        if schedule.has_nearly_idle_worker:
            self.apply_finalizers()
            self.assign_tasks(iteration)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                block = schedule.deliver()
            except BaseException:
                # If `deliver` raised the failure of a batch, the schedule is over and the state is
                # consistent. Any other exception may have left the state corrupt.
                self._iterations.may_be_inconsistent = not schedule.is_over
                raise
            if block is not None:
                break
            if not schedule.n_in_flight and not self._iterations.n_returning_blocks:
                self._force_block(iteration)
            start_ns = now_ns()
            has_results = self.take_results(end_s)
            timer.waited_ns += now_ns() - start_ns
            if not has_results and timeout_s is not None:
                end_s = self.extend_deadline(end_s, timeout_s, _batch_name(iteration, step))
            has_blocks = pool.n_idle or len(pool) < self._n_blocks or not schedule.wants_block
            if has_blocks or not schedule.n_in_flight:
                self.apply_finalizers()
                self.assign_tasks(iteration)
        iteration.delivered_block = block
        n_rows, heap_bytes = iteration.sizes.pop(step)
        return block, step, n_rows, heap_bytes

    def extend_deadline(self, end_s: float | None, timeout_s: float, what: str) -> float:
        """Return a new deadline; raise BatchTimeout after `end_s`, unless a worker is starting."""
        now_s = time.monotonic()
        if end_s is not None and now_s >= end_s and not self._backend.is_starting:
            stacks = self._backend.worker_stacks()
            raise timeout_error(what, self._batch_spec.path, timeout_s, stacks, self._tasks_of)
        return now_s + timeout_s

    def assign_tasks(self, iteration: EpochIteration) -> None:
        """Assign tasks of an iteration, then of the next one, while workers and blocks are free."""
        schedule = iteration.schedule
        if not schedule.has_nearly_idle_worker:
            return
        try:
            n_wanted = schedule.n_wanted
            for _ in range(n_wanted):
                if schedule.wants_block and not self._find_block(iteration):
                    break
                self._send_task(iteration, *schedule.assign())
            if not n_wanted and iteration.successor is not None:
                self._assign_ahead(iteration)
        finally:
            self._backend.send_queued()

    def _assign_ahead(self, iteration: EpochIteration) -> None:
        ahead = self._iterations.ahead or self._iterations.begin_ahead(iteration)
        if ahead is None:
            return
        schedule, pool = ahead.schedule, self.pool
        schedule.set_backlog(iteration.schedule.n_tasks)
        for _ in range(schedule.n_wanted):
            if schedule.wants_block:
                if (found := pool.take_idle()) is None:
                    break
                schedule.free(found)
            self._send_task(ahead, *schedule.assign())

    def _end(self, iteration: EpochIteration) -> None:
        """End an iteration: assign tasks of the next one, and free the block delivered last."""
        if iteration.successor is not None and not iteration.is_cancelled:
            self.apply_finalizers()
            self.assign_tasks(iteration)
        self._free_delivered_block(iteration)

    def _find_block(self, iteration: EpochIteration) -> bool:
        schedule, pool = iteration.schedule, self.pool
        found = pool.take_idle()
        if found is None and not self._has_enough_blocks(schedule):
            # Send the queued tasks before the block is created, because creating a block takes as
            # long as filling one.
            self._backend.send_queued()
            found = pool.make()
        if found is None:
            return False
        schedule.free(found)
        return True

    def _send_task(self, iteration: EpochIteration, worker: int, step: int, number: int) -> None:
        block, slot, plan = self.pool[number], iteration.slot, iteration.plan
        block.use = use = (block.use + 1) & 0xFFFFFFFF
        if worker not in iteration.sent_to:
            self._backend.send_plan(worker, slot, plan)
            iteration.sent_to.add(worker)
        if iteration.suspects and step in iteration.suspects:
            self._backend.send_samples_to_skip(worker, iteration.suspects[step].to_skip)
        words = _FILL, slot, number, plan.epoch, step, use, 0
        self._backend.queue_task(worker, tuple.__new__(Task, words), block)

    def _has_enough_blocks(self, schedule: Schedule) -> bool:
        n_enough, n_to_come = self._n_blocks, schedule.n_circulating
        if len(self._iterations) > 1:  # rare case: several iterations share the pool
            n_enough *= self._iterations.n_live
            n_to_come += self._iterations.n_returning_blocks
        return len(self.pool) >= n_enough and n_to_come >= self._backend.n_workers

    def _force_block(self, iteration: EpochIteration) -> None:
        """Find a block for an iteration that has none; if necessary, exceed the budget."""
        gc.collect()  # frees the batches that only reference cycles keep alive
        self.apply_finalizers()
        self.assign_tasks(iteration)
        if iteration.schedule.n_in_flight:
            return
        n, n_bytes = len(self.pool), self.pool.n_bytes
        try:
            iteration.schedule.free(self.pool.make_extra())
        except InsufficientMemory as error:
            self._iterations.may_be_inconsistent = False
            raise InsufficientMemory(
                f"all {n} blocks ({n_bytes} bytes of a budget of {self._memory_bytes}) are held by "
                "batches that the program still refers to, or by other loops over this loader; "
                f"release batches, or keep copies of them: {error}"
            ) from error
        self.assign_tasks(iteration)

    def take_results(self, end_s: float | None = None) -> bool:
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        result = None
        for result in self._backend.wait(left_s):
            self._handle_result(result)
        has_results = result is not None
        # The traceback of a result's error may keep this frame alive, and thus the result's block.
        del result
        return has_results

    def _handle_result(self, result: TaskResult | WorkerLost) -> None:
        if isinstance(result, WorkerLost):
            self._iterations.n_restarts += 1
            for iteration in self._iterations:
                iteration.timer.n_restarts += 1
                iteration.sent_to.discard(result.worker)
                self._handle_crash(iteration, result)
            return
        status, slot, number, step, heap_bytes, use, n_rows, worker, error, _, skips = result
        iteration = self._iterations[slot]
        if status == _QUICK or status == _FILLED:
            block = self.pool[number]
            if use != block.use:
                raise AssertionError(f"block {number}: result of use {use}, not of the latest")
            if heap_bytes:
                self.pool.note_growth(number, iteration.layout.heap + heap_bytes)
            iteration.sizes[step] = n_rows, heap_bytes
            if skips:
                iteration.skips[step] = skips
            iteration.schedule.complete(worker, step, is_quick=status == _QUICK)
        elif status == Status.FAILED:
            clear_claims(iteration.layout, self.pool[number])
            iteration.schedule.fail(worker, step, error or TransformError("no reason was sent"))
        elif status == Status.CANCELLED:
            iteration.schedule.cancel(worker, step)
        if iteration.is_cancelled:
            self._finish(iteration)

    def _handle_crash(self, iteration: EpochIteration, loss: WorkerLost) -> None:
        """Reassign the tasks of a crashed worker; fail a step at which too many workers crashed."""
        schedule = iteration.schedule
        tasks = schedule.tasks_of(loss.worker)
        if iteration.is_cancelled:
            for step, number in tasks.items():
                clear_claims(iteration.layout, self.pool[number])
                schedule.cancel(loss.worker, step)
            self._finish(iteration)
            return
        for step, number, claims in self._running_task(iteration, tasks):
            clear_claims(iteration.layout, self.pool[number])
            n_crashes = iteration.crashes[step] = iteration.crashes.get(step, 0) + 1
            where = f" {_batch_name(iteration, step)} of {self._batch_spec.path}"
            where += f", at which {n_crashes} workers have crashed" if n_crashes > 1 else ""
            error = crash_error(loss.how, loss.signal, claims, where, self._dataset)
            if self._batch_spec.skips and isinstance(error, WorkerDied):
                suspects = iteration.suspects.setdefault(step, SuspectSamples())
                if suspects.record_crash(claims, loss.end):
                    self._backend.reset_crash_count()
                is_reported = suspects.has_too_many_crashes
            else:
                is_reported = is_final(error, n_crashes)
            if is_reported:
                schedule.fail(loss.worker, step, error)
        schedule.reassign(loss.worker)

    def _tasks_of(self, worker: int) -> list[str]:
        found, given = [], []
        for iteration in self._iterations:
            tasks = iteration.schedule.tasks_of(worker)
            for step, _, claims in self._running_task(iteration, tasks):
                found.append(f"{claims.text} {_batch_name(iteration, step)}")
            for step in itertools.islice(tasks, 1):
                given.append(f"before it began with {_batch_name(iteration, step)}")
        return found or given

    def _running_task(
        self, iteration: EpochIteration, tasks: dict[int, int]
    ) -> Iterator[tuple[int, int, InFlightRows]]:
        """Yield the step, the block index and the samples of the task that a worker is running.

        `tasks` are the worker's unfinished tasks as {step: block index}. Only the running task has
        claimed samples.
        """
        fields = self._batch_spec.fields
        for step, number in tasks.items():
            claims = read_claims(iteration.layout, self.pool[number], self._dataset, fields)
            if claims.rows:
                yield step, number, claims
                return

    def apply_finalizers(self) -> None:
        """End the iterations cancelled by finalizers, and free the blocks of released batches."""
        if self._iterations.newly_cancelled:
            for iteration in self._iterations.take_cancelled():
                self._finish(iteration)
        self.pool.take_back_returned(self.synchronize)

    def _finish(self, iteration: EpochIteration) -> None:
        for block in iteration.schedule.release_idle_blocks():
            self.pool.give_back(block)
        self._free_delivered_block(iteration)
        if not iteration.schedule.n_in_flight:
            self._iterations.remove(iteration)

    def _free_delivered_block(self, iteration: EpochIteration) -> None:
        """Free the block that was delivered last, unless it was leased to a batch."""
        block = iteration.delivered_block
        if block is not None:
            iteration.delivered_block = None
            if self.synchronize is not None:
                self.synchronize()
            self.pool.give_back(block)


def _batch_name(iteration: EpochIteration, step: int) -> str:
    return f"batch {step} of epoch {iteration.plan.epoch}"
