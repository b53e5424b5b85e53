"""The engine of a loader: its workers, blocks and iterations.

If an exception may have left the state inconsistent (`may_be_inconsistent`), the engine restarts
with new workers and blocks. The work for each batch is done in `dispatcher`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import undo_on_error
from shardio._base.statistics import LoadingStats
from shardio._engine.dispatch.backends import (
    Backend,
    InlineWorker,
    StartMethod,
    WorkerBackend,
    closed_error,
)
from shardio._engine.dispatch.counters import CounterTable
from shardio._engine.dispatch.crashes import crash_error, describe_first_sample, is_final
from shardio._engine.dispatch.dispatcher import Dispatcher
from shardio._engine.dispatch.iterations import (
    N_SLOTS,
    DeliveredBlock,
    EpochIteration,
    IterationTable,
)
from shardio._engine.dispatch.worker import RequestKind, Task, TaskResult, WorkerLost, replies_file
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan, Schemas, share_view
from shardio._engine.filling.filler import may_skip
from shardio._engine.filling.sizing import block_bytes, n_blocks_wanted
from shardio._workers.processes.blocks import BlockPool
from shardio._workers.processes.limits import require
from shardio._workers.processes.linux import (
    interrupts_held,
    memory_file,
    raise_if_too_many_files,
    this_process,
    translate_open_file_errors,
)
from shardio._workers.processes.shared_memory import SharedArray, create_marks_file
from shardio._workers.processes.stack_dumps import timeout_error
from shardio._workers.tasks.schedule import Schedule
from shardio.batch.layout import BlockLayout
from shardio.errors import (
    ClosedError,
    InsufficientMemory,
    InvalidArgument,
    SchemaError,
    TransformError,
    WorkerDied,
)
from shardio.samples.view import SampleView

_N_FIRST, _N_SPREAD = 8, 24
"""The schema is tried with the first 8 samples, then with 24 samples spread over the view."""
_PROBED_WORKER = 0
"""The index of the worker that computes the schema."""


class SchemaProbe:
    """A request for the schemas that determine the layout of batches. Borrows its arguments.

    With user code, a worker computes the schemas from the first sample. If samples may be skipped,
    other samples are tried after a failure.
    """

    def __init__(self, batch_spec: BatchSpec, view: SampleView, backend: Backend) -> None:
        self._batch_spec, self._view, self._backend = batch_spec, view, backend
        self._is_pending = False
        self._n_crashes = 0
        self._candidates = schema_candidates(batch_spec.n_samples) if batch_spec.skips else [0]
        self._number = 0
        """The index in `_candidates` of the sample to try now."""

    @property
    def _sample(self) -> int:
        return self._candidates[self._number]

    def request(self) -> Schemas | None:
        """Return the schemas if no user code runs; otherwise send a request, and return None."""
        batch_spec = self._batch_spec
        if not batch_spec.runs_user_code or not batch_spec.n_samples:
            return Schemas(batch_spec.sample_schema(self._view))
        if not self._is_pending:
            self._is_pending = True
            self._backend.queue_task(
                _PROBED_WORKER, Task(RequestKind.SCHEMA, 0, 0, 0, self._sample, 0, 0), None
            )
            self._backend.send_queued()
        return None

    def schemas(self, timeout_s: float | None = None) -> Schemas | None:
        """Wait for the schemas; return None after `timeout_s`, not counting the starts of workers.

        If user code fails or a worker crashes, raise an error that names the sample; the next call
        tries again.
        """
        known = self.request()
        since_s = time.monotonic()
        while known is None:
            left_s = None if timeout_s is None else since_s + timeout_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            n_results, is_starting = 0, self._backend.is_starting
            # `map` avoids a variable for the result. If `_handle_result` raises the result's error,
            # the traceback keeps this frame alive, and a variable would keep the result alive.
            for schemas in map(self._handle_result, self._backend.wait(left_s)):
                known = schemas or known
                n_results += 1
            if not n_results and is_starting:
                since_s = time.monotonic()
        return known

    def tasks_of(self, worker: int) -> list[str]:
        is_busy = self._is_pending and worker == _PROBED_WORKER
        return (
            [describe_first_sample(self._batch_spec, self._view, self._sample).text]
            if is_busy
            else []
        )

    def _handle_result(self, result: TaskResult | WorkerLost) -> Schemas | None:
        if isinstance(result, WorkerLost) and not (
            self._is_pending and result.worker == _PROBED_WORKER
        ):
            return None  # the worker was not working on the request when it exited
        self._is_pending = False
        if isinstance(result, WorkerLost):
            return self._retry_after_crash(result)
        if result.error is None:
            return result.schemas
        if may_skip(result.error) and self._advance():
            return self.request()
        try:
            raise result.error
        finally:
            del result  # breaks the reference cycle error -> traceback -> this frame -> error

    def _advance(self) -> bool:
        """Advance to the next candidate; after the last, go back to the first and return False."""
        self._number = (self._number + 1) % len(self._candidates)
        return self._number > 0

    def _retry_after_crash(self, loss: WorkerLost) -> Schemas | None:
        self._n_crashes += 1
        claim = describe_first_sample(self._batch_spec, self._view, self._sample)
        n = self._n_crashes
        many = f", at which {n} workers have crashed" if n > 1 else ""
        error = crash_error(loss.how, loss.signal, claim, many, self._view.dataset)
        if not is_final(error, n):
            return self.request()
        self._n_crashes = 0
        if isinstance(error, WorkerDied) and self._advance():
            self._backend.reset_crash_count()
            return self.request()
        try:
            raise error
        finally:
            del error  # breaks the reference cycle error -> traceback -> this frame -> error


def schema_candidates(n_samples: int) -> list[int]:
    """Return the indices of the samples to try for the schema, in order."""
    spread = [n_samples * (i + 1) // (_N_SPREAD + 1) for i in range(_N_SPREAD)]
    first = range(min(_N_FIRST, n_samples))
    return list(dict.fromkeys([*first, *spread])) if n_samples else [0]


# After these exceptions, the state of the engine is still consistent.
_HARMLESS_ERRORS: Final = (
    InsufficientMemory,
    TransformError,
    SchemaError,
    InvalidArgument,
    ClosedError,
)


class Engine:
    """The workers and blocks of a loader, owned until `close`. Takes the loader's options."""

    def __init__(
        self,
        batch_spec: BatchSpec,
        *,
        n_workers: int,
        prefetch: int | None,
        memory_bytes: int,
        timeout_s: float | None = None,
        start_method: StartMethod = "zygote",
    ) -> None:
        self._batch_spec, self._memory_bytes, self._timeout_s = batch_spec, memory_bytes, timeout_s
        self._n_workers, self._n_blocks = n_workers, 0
        self._start_method: StartMethod = start_method
        self._synchronize: Callable[[], None] | None = None
        self._owner_pid = this_process.pid
        # Create the workers before anything else: they start while this process opens the dataset.
        self._backend = self._new_backend()
        self._prefetch = prefetch
        self._lock = threading.RLock()
        self._iterations = IterationTable()
        self._dispatcher: Dispatcher | None = None
        self._layout: BlockLayout | None = None
        self._schemas: Schemas
        self._fds: list[int] = []
        self._tables: tuple[SharedArray, ...] = ()
        self._is_closed = False
        self._is_inside = False
        """True during `iterate` and `next`.

        If a signal handler calls `close` meanwhile, the interrupted call releases the resources.
        """
        self.view: SampleView

    @translate_open_file_errors()
    def _new_backend(self) -> Backend:
        if not self._n_workers:
            return InlineWorker(self._batch_spec)
        return WorkerBackend(self._batch_spec, self._n_workers, self._start_method)

    @translate_open_file_errors()
    def open(self, view: SampleView) -> None:
        """Take ownership of the dataset of `view`, and share files and tables with the workers."""
        self.view, dataset = view, view.dataset
        marks_fd = create_marks_file(dataset.files.n_marks)
        self._fds = [marks_fd]
        self._iterations.counters = CounterTable(N_SLOTS, self._backend.n_workers)
        self._fds.append(self._iterations.counters.fd)
        self._fds.append(replies_file(self._n_workers))
        self._fds.extend(memory_file() for _ in range(self._n_workers))
        dataset.files.share_marks(np.frombuffer(mmap.mmap(marks_fd, 0), np.uint8))
        self.view, self._tables = share_view(view)
        self._backend.send_hello(self.view, self._fds, self._tables)
        self._schema_probe = SchemaProbe(self._batch_spec, self.view, self._backend)
        schemas = self._schema_probe.request()  # if this is None, `layout` waits for the reply
        if schemas is not None:
            self._lay_out(schemas)

    def layout(self) -> BlockLayout:
        """Return the layout of batches; if user code determines it, wait for the schemas."""
        with self._lock:
            self._check_usable()
            if self._layout is not None:
                return self._layout
            timeout_s, path = self._timeout_s, self._batch_spec.path
            schemas = self._schema_probe.schemas(timeout_s)
            if schemas is None:
                what = "the first sample, which determines the layout of batches,"
                stacks = self._backend.worker_stacks()
                raise timeout_error(what, path, timeout_s, stacks, self._schema_probe.tasks_of)
            return self._lay_out(schemas)

    def _lay_out(self, schemas: Schemas) -> BlockLayout:
        layout = self._batch_spec.lay_out(schemas)
        n_bytes = block_bytes(
            layout, self._batch_spec, self.view, self._memory_bytes, schemas.heap_bytes
        )
        wanted = n_blocks_wanted(self._n_workers, self._prefetch, n_bytes)
        self._n_blocks = min(wanted, self._memory_bytes // n_bytes)
        require(self._n_blocks * n_bytes, f"{self._n_blocks} blocks for batches")
        self._create_dispatcher(layout, schemas, n_bytes)
        self._layout, self._schemas = layout, schemas
        return layout

    def _create_dispatcher(self, layout: BlockLayout, schemas: Schemas, block_bytes: int) -> None:
        self._backend.use_layout(layout, schemas, self._memory_bytes)
        self._dispatcher = Dispatcher(
            self._batch_spec,
            self.view.dataset,
            self._backend,
            self._iterations,
            BlockPool(block_bytes, self._memory_bytes),
            n_blocks=self._n_blocks,
            memory_bytes=self._memory_bytes,
        )
        self._dispatcher.synchronize = self._synchronize

    def set_synchronize(self, synchronize: Callable[[], None]) -> None:
        """Set the function that waits until tensors no longer read released batches."""
        self._synchronize = synchronize
        if self._dispatcher is not None:
            self._dispatcher.synchronize = synchronize

    @translate_open_file_errors()
    def iterate(self, plan: EpochPlan, successor: EpochPlan | None = None) -> EpochIteration:
        """Start an iteration, or take over the one that was begun ahead (see `iterations`).

        `successor` is the plan of the next iteration, which idle workers begin ahead; None if they
        must not.
        """
        with self._inside():
            layout, dispatcher = self.layout(), self.dispatcher
            iteration = self._iterations.take_over(plan)
            dispatcher.apply_finalizers()
            if iteration is None:
                first, last = plan.partition.first_step, plan.partition.stop_step
                schedule = Schedule(first, last, self._backend.n_workers, self._backend.depth)
                iteration = self._iterations.begin(plan, schedule, layout)
            self._iterations.set_successor(
                iteration, successor if self._backend.begins_ahead else None
            )
            # If this fails, the caller gets no iteration that it could cancel.
            with undo_on_error(self.cancel, iteration):
                dispatcher.assign_tasks(iteration)
            return iteration

    def next(self, iteration: EpochIteration) -> DeliveredBlock | None:
        """Return the next filled block, or None at the end; raise the error of a worker."""
        with self._lock:
            if (
                self._is_closed
                or this_process.pid != self._owner_pid
                or self._iterations.may_be_inconsistent
            ):
                self._check_usable()
                self._restart_if_inconsistent()
            self._is_inside = self._iterations.may_be_inconsistent = True
            try:
                found = self.dispatcher.next(iteration, self._timeout_s)
                self._iterations.may_be_inconsistent = False
                return found
            except OSError as error:
                raise_if_too_many_files(error)
                raise
            finally:
                self._is_inside = False
                if self._is_closed:  # see `_is_inside`
                    self._release()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Hold the lock; the state counts as inconsistent until the `with` block has succeeded."""
        with self._lock:
            self._check_usable()
            self._restart_if_inconsistent()
            self._is_inside = self._iterations.may_be_inconsistent = True
            try:
                yield
                self._iterations.may_be_inconsistent = False
            except _HARMLESS_ERRORS:
                self._iterations.may_be_inconsistent = False
                raise
            finally:
                self._is_inside = False
                if self._is_closed:
                    self._release()

    def mark_inconsistent(self) -> None:
        self._iterations.may_be_inconsistent = True

    def _restart_if_inconsistent(self) -> None:
        """Restart with new workers and blocks if the state may be inconsistent.

        Delivered batches stay valid, and iterations resume at their next step.
        """
        if not self._iterations.may_be_inconsistent:
            return
        self._backend.close()
        self._iterations.restart_iterations()
        self._backend = self._new_backend()
        self._backend.send_hello(self.view, self._fds, self._tables)
        self._schema_probe = SchemaProbe(self._batch_spec, self.view, self._backend)
        if self._dispatcher is not None and self._layout is not None:
            self.pool.close()
            self._create_dispatcher(self._layout, self._schemas, self.pool.block_bytes)
        self._iterations.may_be_inconsistent = False

    def cancel(self, iteration: EpochIteration) -> None:
        """Cancel an iteration. Each of its blocks is freed once no worker uses the block.

        A finalizer may call this in any thread at any moment.
        """
        is_ours = this_process.pid == self._owner_pid
        self._iterations.cancel(iteration, has_workers=is_ours and not self._is_closed)

    def lease(self, iteration: EpochIteration) -> npt.NDArray[np.uint8] | None:
        """Lease the last delivered block for as long as an object refers to the returned memory.

        Return None if this iteration, or the next one, could not continue without the block.
        """
        block = iteration.delivered_block
        if block is None or not (iteration.schedule.n_circulating or self._can_spare(iteration)):
            return None
        # In this order, if Ctrl-C interrupts, the block may be lost, but is never used twice.
        iteration.delivered_block = None
        return self.pool.lease(block)

    def _can_spare(self, iteration: EpochIteration) -> bool:
        with self._lock:
            dispatcher = self.dispatcher
            dispatcher.apply_finalizers()
            if iteration.schedule.is_over:
                ahead = self._iterations.ahead
                has_blocks = ahead is not None and ahead.schedule.n_circulating > 0
                return has_blocks or dispatcher.pool.has_room
            dispatcher.assign_tasks(iteration)
            return iteration.schedule.n_circulating + self._iterations.n_returning_blocks > 0

    def stats(self, iteration: EpochIteration | None) -> tuple[LoadingStats, LoadingStats]:
        """Return the figures of `iteration`, and of all iterations. Takes no lock."""
        latest = LoadingStats() if iteration is None else self._iterations.stats_of(iteration)
        return latest, self._iterations.total()

    @property
    def counters(self) -> CounterTable:
        return self._iterations.counters

    @property
    def pool(self) -> BlockPool:
        # This repeats the check in `dispatcher`, to save a call for every batch.
        if self._dispatcher is None:
            raise closed_error()
        return self._dispatcher.pool

    @property
    def dispatcher(self) -> Dispatcher:
        if self._dispatcher is None:
            raise closed_error()
        return self._dispatcher

    def _check_usable(self) -> None:
        if self._is_closed:
            raise closed_error()
        if this_process.pid != self._owner_pid:
            raise ClosedError(
                f"this loader belongs to process {self._owner_pid}; create another loader in this "
                f"process, {this_process.pid}, which was forked from it"
            )

    def close(self) -> None:
        """Stop the workers and release everything. Do nothing in a forked child. Idempotent."""
        if self._is_closed or this_process.pid != self._owner_pid:
            return
        try:
            with interrupts_held():
                self._is_closed = True
                self._backend.close()
        finally:
            with self._lock:
                if not self._is_inside:
                    self._release()

    @interrupts_held()
    def _release(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.pool.close()
            self._dispatcher = None
        while self._fds:
            os.close(self._fds.pop())
        if hasattr(self._iterations, "counters"):
            self._iterations.counters.close()
        if hasattr(self, "view"):
            self.view.dataset.close()
