"""Main's side: give tasks out, take answers in, hand filled blocks over in order.

One Engine belongs to one loader and lives as long. Every pass over an epoch is an `Iteration`
with a Schedule of its own; several may go on at the same time over the same workers and blocks.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from textwrap import indent
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._engine.blocks import BlockPool, reserve_memory_file
from shardio._engine.claims import Claims, claims_in, clear_claims, error_of_death, is_final
from shardio._engine.inquiry import Inquiry
from shardio._engine.iteration import Delivered, Iteration
from shardio._engine.linux import memory_file, this_process
from shardio._engine.memory import require
from shardio._engine.passes import N_SLOTS, Passes
from shardio._engine.recipe import Recipe
from shardio._engine.schedule import Schedule
from shardio._engine.sizing import block_bytes
from shardio._engine.staff import Answer, Local, Loss, Staff, Workers
from shardio._engine.wire import Ask, Status, Task
from shardio.collate import BlockLayout, lay_out
from shardio.dataset import ShardDataset
from shardio.errors import (
    BatchOverdue,
    InvalidArgument,
    LoaderClosed,
    MemoryShort,
    TransformError,
)
from shardio.format.schema import Schema

# Plain numbers: members of an enum are slow to look up and to compare.
_FILL, _FILLED = int(Ask.FILL), int(Status.FILLED)

# Raised where the bookkeeping is whole, of a pass that could not begin.
_TEAR_NOTHING: Final = (MemoryShort, TransformError, InvalidArgument, LoaderClosed)


class Engine:
    """Owns the workers, the blocks, and what they share; all of it ends with `close`.

    Args:
        recipe: what is in a batch.
        n_workers: processes; 0 fills blocks in this process.
        prefetch: blocks beyond one per worker.
        memory_bytes: budget of all blocks.
        timeout_s: how long `next` waits for a batch that workers make; None for ever.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        n_workers: int,
        prefetch: int,
        memory_bytes: int,
        timeout_s: float | None = None,
    ) -> None:
        self._recipe, self._memory_bytes, self._timeout_s = recipe, memory_bytes, timeout_s
        self._n_workers = n_workers
        self.settle: Callable[[], None] | None = None
        """Called before the memory of batches that were let go is used again."""
        self._owner_pid = this_process.pid
        # Workers first: they start up while the dataset opens here.
        self._staff = self._new_staff()
        # One more, for the batch in the loop's hands; without workers nothing is filled ahead.
        self._n_blocks = n_workers + prefetch + 1 if n_workers else 2
        self._lock = threading.RLock()
        self._passes = Passes()
        self._pool: BlockPool | None = None
        self._layout: BlockLayout | None = None
        self._fds: list[int] = []
        self._is_closed = False
        self._is_inside = False
        """Whether a call is under way; a signal handler in the same thread may call `close`."""
        self._is_torn = False
        """Whether the bookkeeping may be wrong: an exception has left it half done."""
        self.dataset: ShardDataset

    def _new_staff(self) -> Staff:
        return Workers(self._recipe, self._n_workers) if self._n_workers else Local(self._recipe)

    def open(self, dataset: ShardDataset) -> None:
        """Share the dataset's marks with the workers; from now on the engine owns the dataset."""
        self.dataset = dataset
        n_marks = max(1, dataset.n_marks)
        marks_fd = reserve_memory_file(n_marks, "the table of what has been checked")
        self._fds = [marks_fd]
        self._fds.append(self._passes.share())
        self._fds.append(memory_file())  # for stacks
        dataset.share_marks(np.frombuffer(mmap.mmap(marks_fd, 0), np.uint8))
        self._staff.introduce(dataset, self._fds)
        self._inquiry = Inquiry(self._recipe, dataset, self._staff)
        schema = self._inquiry.ask()  # now; the answer is awaited when it is needed
        if schema is not None:
            self._lay_out(schema)

    def layout(self) -> BlockLayout:
        """How batches lie in blocks; waits for the first sample to have been transformed.

        Raises:
            TransformError: it could not be.
            BatchOverdue: it takes too long.
        """
        with self._lock:
            self._check_usable()
            if self._layout is not None:
                return self._layout
            schema = self._inquiry.schema(self._end_s())
            if schema is None:
                raise self._overdue("the first sample, from which batches are laid out,")
            return self._lay_out(schema)

    def _lay_out(self, schema: Schema) -> BlockLayout:
        layout = lay_out(schema, self._recipe.batch_size)
        n_bytes = block_bytes(layout, self._recipe, self.dataset, self._memory_bytes)
        self._n_blocks = min(self._n_blocks, self._memory_bytes // n_bytes)
        require(self._n_blocks * n_bytes, f"{self._n_blocks} blocks for batches")
        self._pool = BlockPool(n_bytes, self._memory_bytes)
        self._staff.use_layout(layout)
        self._layout = layout
        return layout

    def iterate(self, epoch: int, first: int, last: int) -> Iteration:
        """Start a pass over steps first..last-1 of an epoch."""
        with self._inside():
            self.layout()
            self._reap()
            while self._passes.is_full and self._passes.n_coming_back:
                self._take_answers()
            if self._passes.is_full:
                raise InvalidArgument(
                    f"{N_SLOTS} passes over one loader are under way, the most there may be; "
                    "let go of iterators that are no longer needed"
                )
            schedule = Schedule(first, last, self._staff.n_workers, self._staff.depth)
            iteration = self._passes.begin(epoch, schedule, self.layout())
            try:
                self._feed(iteration)
            except BaseException:  # the caller has nothing to end
                self.cancel(iteration)
                raise
            return iteration

    def next(self, iteration: Iteration) -> Delivered | None:
        """The next filled block of a pass, or None at its end; waits for it.

        Raises:
            what failed when the block was filled; LoaderClosed; WorkerDied or ShardChanged.
        """
        with self._lock:
            if self._is_closed or this_process.pid != self._owner_pid or self._is_torn:
                self._check_usable()
                self._mend()
            self._is_inside = self._is_torn = True
            try:
                found = self._next(iteration)
                self._is_torn = False
                return found
            finally:
                self._is_inside = False
                if self._is_closed:  # meanwhile, by a signal handler
                    self._release()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """What `next` does around itself, for calls that need not be fast."""
        with self._lock:
            self._check_usable()
            self._mend()
            self._is_inside = self._is_torn = True
            try:
                yield
                self._is_torn = False
            except _TEAR_NOTHING:
                self._is_torn = False
                raise
            finally:
                self._is_inside = False
                if self._is_closed:
                    self._release()

    def distrust(self) -> None:
        """Before the next call, start anew: Ctrl-C has struck in the middle of a hand-over."""
        self._is_torn = True

    def _mend(self) -> None:
        """If the bookkeeping may be wrong: start anew with other workers and other blocks.

        What was delivered stays valid, and passes go on with the step that they have come to: who
        fills a batch, and how often, makes no difference to it.
        """
        if not self._is_torn:
            return
        self._staff.close()
        self._passes.start_anew()
        self._staff = self._new_staff()
        self._staff.introduce(self.dataset, self._fds)
        self._inquiry = Inquiry(self._recipe, self.dataset, self._staff)
        if self._pool is not None and self._layout is not None:
            self._pool.close()
            self._pool = BlockPool(self._pool.block_bytes, self._memory_bytes)
            self._staff.use_layout(self._layout)
        self._is_torn = False

    def _next(self, iteration: Iteration) -> Delivered | None:
        schedule, pool = iteration.schedule, self.pool
        if iteration.held is not None:
            self._take_back(iteration)
        if schedule.is_over or iteration.is_cancelled:
            return None
        step = schedule.next_step
        self._reap()
        self._feed(iteration)
        end_s = self._end_s()
        while True:
            try:
                block = schedule.deliver()
            except BaseException:
                self._is_torn = not schedule.is_over  # what a batch failed of tears nothing
                raise
            if block is not None:
                break
            if not schedule.n_in_flight and not self._passes.n_coming_back:
                self._insist(iteration)
            if end_s is not None and time.monotonic() >= end_s:
                raise self._overdue(f"batch {step} of epoch {iteration.epoch}")
            self._take_answers(end_s)
            has_blocks = pool.has_idle or len(pool) < self._n_blocks or not schedule.wants_block
            if has_blocks or not schedule.n_in_flight:
                self._reap()
                self._feed(iteration)
        iteration.held = block
        return block, step, *iteration.sizes.pop(step)

    def _feed(self, iteration: Iteration) -> None:
        """Give tasks out, while there are workers with room for them and blocks."""
        schedule, pool = iteration.schedule, self.pool
        while schedule.wants_task:
            if schedule.wants_block:
                found = pool.take_idle()
                if found is None and not self._has_enough(schedule):
                    found = pool.make()
                if found is None:
                    return
                schedule.free(found)
            worker, step, number = schedule.assign()
            block = pool[number]
            block.use = (block.use + 1) & 0xFFFFFFFF
            words = _FILL, iteration.slot, number, iteration.epoch, step, block.use, 0
            self._staff.give(worker, tuple.__new__(Task, words), block)

    def _has_enough(self, schedule: Schedule) -> bool:
        """Whether a pass keeps every worker busy, and there are as many blocks as there should."""
        n_enough, n_to_come = self._n_blocks, schedule.n_circulating
        if len(self._passes) > 1:  # hardly ever
            n_enough *= self._passes.n_live
            n_to_come += self._passes.n_coming_back
        return len(self.pool) >= n_enough and n_to_come >= self._staff.n_workers

    def _insist(self, iteration: Iteration) -> None:
        """Find a block for a pass that has none: one beyond the budget if need be.

        Raises:
            MemoryShort: the program or other passes hold all, and there is no memory for another.
        """
        gc.collect()  # batches in reference cycles are held by nobody
        self._reap()
        self._feed(iteration)
        if iteration.schedule.n_in_flight:
            return
        n, n_bytes = len(self.pool), self.pool.n_bytes
        try:
            iteration.schedule.free(self.pool.make_extra())
        except MemoryShort as error:
            self._is_torn = False
            raise MemoryShort(
                f"all {n} blocks ({n_bytes} bytes of a budget of {self._memory_bytes}) are held by "
                "batches that the program still refers to, or by other loops over this loader; "
                f"let go of batches, or copy what you keep: {error}"
            ) from error
        self._feed(iteration)

    def _end_s(self) -> float | None:
        """When the wait that begins now is over, if it is ever."""
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _take_answers(self, end_s: float | None = None) -> None:
        """Wait for answers, until `end_s` at most, and tell the passes that they belong to."""
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        for answer in self._staff.wait(left_s):
            self._route(answer)

    def _route(self, answer: Answer | Loss) -> None:
        """Tell the pass that an answer belongs to."""
        if isinstance(answer, Loss):
            for iteration in self._passes:
                self._lose(iteration, answer)
            return
        status, slot, number, step, heap_bytes, use, n_rows = answer.done
        iteration = self._passes[slot]
        if status == _FILLED:
            block = self.pool[number]
            if use != block.use:
                raise AssertionError(f"block {number}: answer to use {use}, not its last")
            if heap_bytes:
                block.see_growth(iteration.layout.heap + heap_bytes)
            iteration.sizes[step] = n_rows, heap_bytes
            iteration.schedule.done(answer.worker, step)
        elif status == Status.FAILED:
            clear_claims(iteration.layout, self.pool[number])
            error = answer.error or TransformError("a worker failed without saying why")
            iteration.schedule.failed(answer.worker, step, error)
        elif status == Status.CANCELLED:
            iteration.schedule.cancelled(answer.worker, step)
        if iteration.is_cancelled:
            self._finish(iteration)

    def _lose(self, iteration: Iteration, loss: Loss) -> None:
        """Have the tasks of a dead worker done again, but one that kills whoever does it."""
        schedule = iteration.schedule
        tasks = schedule.tasks_of(loss.worker)
        if iteration.is_cancelled:
            for step in tasks:
                schedule.cancelled(loss.worker, step)
            self._finish(iteration)
            return
        for step, number in itertools.islice(tasks.items(), 1):  # that it worked on, if it did
            claims = self._claims_in(iteration, number)
            clear_claims(iteration.layout, self.pool[number])
            if not claims.rows:
                break
            n_deaths = iteration.deaths[step] = iteration.deaths.get(step, 0) + 1
            where = f" batch {step} of epoch {iteration.epoch} of {self._recipe.path}"
            where += f", which {n_deaths} workers have died of" if n_deaths > 1 else ""
            error = error_of_death(loss.how, loss.signal, claims, where, self.dataset)
            if is_final(error, n_deaths):
                schedule.failed(loss.worker, step, error)
        schedule.lost(loss.worker)

    def _overdue(self, what: str) -> BatchOverdue:
        """The error for what did not come in time; the next call starts anew with other workers."""
        lines = [f"{what} of {self._recipe.path} did not come within {self._timeout_s:g} s"]
        for worker, (who, stacks) in enumerate(self._staff.ask_what_they_do()):
            tasks = self._inquiry.tasks_of(worker) + [
                f"{claims.text} batch {step} of epoch {iteration.epoch}"
                for iteration in self._passes
                for step, number in itertools.islice(iteration.schedule.tasks_of(worker).items(), 1)
                for claims in [self._claims_in(iteration, number)]
            ]
            lines += [f"{who}, {'; '.join(tasks) or 'without a task'}:", indent(stacks, "    ")]
        return BatchOverdue("\n".join(lines))

    def _claims_in(self, iteration: Iteration, number: int) -> Claims:
        fields = self._recipe.fields
        return claims_in(iteration.layout, self.pool[number], self.dataset, fields)

    def cancel(self, iteration: Iteration) -> None:
        """End a pass early; its blocks come back as its tasks are answered.

        May be called by a finalizer: in any thread, in the middle of anything.
        """
        is_ours = this_process.pid == self._owner_pid
        self._passes.cancel(iteration, is_known=is_ours and not self._is_closed)

    def _reap(self) -> None:
        """Do what finalizers asked for: end passes, take back blocks that were let go."""
        if self._passes.ended:
            for iteration in self._passes.take_ended():
                self._finish(iteration)
        if self._pool is not None:
            self._pool.take_back_returned(self.settle)

    def _finish(self, iteration: Iteration) -> None:
        """Take back what a cancelled pass has; forget it when its last task is answered."""
        for block in iteration.schedule.surrender():
            self.pool.give_back(block)
        self._take_back(iteration)
        if not iteration.schedule.n_in_flight:
            self._passes.forget(iteration)

    def _take_back(self, iteration: Iteration) -> None:
        """The block delivered last, unless it was leased, may be filled again."""
        block = iteration.held
        if block is not None:
            iteration.held = None
            if self.settle is not None:
                self.settle()
            self.pool.give_back(block)

    def lease(self, iteration: Iteration) -> npt.NDArray[np.uint8] | None:
        """The block delivered last, for as long as anything refers to it.

        None if this pass, or the next one, could not go on without it: copy what is in it.
        """
        block = iteration.held
        if block is None or not (iteration.schedule.n_circulating or self._can_spare(iteration)):
            return None
        iteration.held = None  # first: Ctrl-C may cost a block, never give one to two owners
        return self.pool.lease(block)

    def _can_spare(self, iteration: Iteration) -> bool:
        with self._lock:
            self._reap()
            if iteration.schedule.is_over:
                return self.pool.has_room
            self._feed(iteration)
            return iteration.schedule.n_circulating + self._passes.n_coming_back > 0

    @property
    def pool(self) -> BlockPool:
        """The blocks."""
        if self._pool is None:
            raise LoaderClosed("the loader is closed")
        return self._pool

    def _check_usable(self) -> None:
        if self._is_closed:
            raise LoaderClosed("the loader is closed")
        if this_process.pid != self._owner_pid:
            raise LoaderClosed(
                f"this loader belongs to process {self._owner_pid}; this is process "
                f"{this_process.pid}, a fork of it, which has to make a loader of its own"
            )

    def close(self) -> None:
        """End the workers and let go of everything; batches that are held stay valid. Idempotent.

        In a fork of the process that made the engine nothing is done: nothing is its own.
        """
        if self._is_closed or this_process.pid != self._owner_pid:
            return
        self._is_closed = True
        self._staff.close()
        with self._lock:
            if not self._is_inside:  # else whoever is inside does it on his way out
                self._release()

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self._passes.unshare()
        if hasattr(self, "dataset"):
            self.dataset.close()
