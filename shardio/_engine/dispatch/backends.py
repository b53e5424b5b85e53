"""The backends that fill blocks: worker processes, worker threads, or this process.

`queue_task` queues a task, `send_queued` sends the queued tasks, and `wait` returns results.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import pickle
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

from shardio._engine.dispatch.thread_workers import GENERATOR_LOCK, ThreadWorkers, filler_in_main
from shardio._engine.dispatch.worker import (
    COUNTERS,
    REPLIES,
    STACKS,
    ReplyBuffer,
    RequestKind,
    Status,
    Task,
    TaskResult,
    TaskRunner,
    WorkerLost,
    pack,
    unpack,
    unpack_all,
    work,
)
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan, Schemas
from shardio._engine.filling.filler import SamplesToSkip
from shardio._engine.filling.user_functions import UserCalls
from shardio._workers.processes.blocks import Block
from shardio._workers.processes.serialization import unpack_error
from shardio._workers.processes.shared_memory import SharedArray, pack_shared
from shardio._workers.processes.worker_main import HEADER_BYTES, Start, pack_message, unpack_message
from shardio._workers.processes.worker_pool import CrashLoop, Message, WorkerExit, WorkerPool
from shardio._workers.tasks.schedule import DEPTH
from shardio.batch.batch import Skipped
from shardio.batch.layout import BlockLayout
from shardio.errors import ClosedError
from shardio.samples.view import SampleView


def closed_error() -> ClosedError:
    """Return the error for the use of a closed loader."""
    return ClosedError(
        "the loader is closed: use it inside its `with` block, or create another one"
    )


class InlineWorker:
    """The backend for num_workers=0: `wait` runs a task in this process."""

    depth = 1
    n_workers = 1
    is_starting = False
    begins_ahead = False

    def __init__(self, batch_spec: BatchSpec) -> None:
        self._batch_spec, self._runner = batch_spec, TaskRunner(batch_spec)
        self._tasks: deque[tuple[Task, Block | None]] = deque()

    def send_hello(
        self, view: SampleView, fds: Sequence[int], tables: tuple[SharedArray, ...] = ()
    ) -> None:
        # In this process, a KeyboardInterrupt means that the user pressed Ctrl-C, so the filler
        # passes the exception on. In a worker, only user code can raise this exception.
        calls = UserCalls(reraise=(KeyboardInterrupt,))
        filler = filler_in_main(self._batch_spec, view, calls)
        self._runner.start(filler, fds[COUNTERS], 0)

    def use_layout(self, layout: BlockLayout, schemas: Schemas, memory_bytes: int) -> None:
        self._runner.layout = layout

    def send_plan(self, worker: int, slot: int, plan: EpochPlan) -> None:
        self._runner.plans[slot] = plan

    def send_samples_to_skip(self, worker: int, to_skip: SamplesToSkip) -> None:
        self._runner.to_skip = to_skip

    def reset_crash_count(self) -> None:
        """Do nothing: there is no worker to crash."""

    def queue_task(self, worker: int, task: Task, block: Block | None) -> None:
        self._tasks.append((task, block))

    def send_queued(self) -> None:
        """Do nothing: tasks are not sent."""

    def wait(self, timeout_s: float | None = None) -> list[TaskResult | WorkerLost]:
        """Run the oldest task and return its result; `timeout_s` is ignored."""
        if not self._tasks:
            raise closed_error()
        # Ctrl-C may interrupt the task, so the task is removed only when it is done.
        task, block = self._tasks[0]
        if not self._batch_spec.runs_user_code:
            result = self._run_task(task, block)
        else:
            with GENERATOR_LOCK.held():
                result = self._run_task(task, block)
        with contextlib.suppress(IndexError):  # another thread may have closed the loader meanwhile
            self._tasks.popleft()
        try:
            return [result]
        finally:
            # Break a reference cycle: the traceback of a result's error refers to this frame, and
            # this frame to the result.
            del result

    def _run_task(self, task: Task, block: Block | None) -> TaskResult:
        n_rows = heap_bytes = 0
        status: int = Status.SCHEMA
        error: BaseException | None = None
        schemas: Schemas | None = None
        skips: tuple[Skipped, ...] = ()
        try:
            if block is None:
                schemas = self._runner.schemas(task.step)
            else:
                status, n_rows, heap_bytes, skips = self._runner.fill(task.slot, task.step, block)
        except Exception as failure:  # noqa: BLE001  # `deliver` raises it when the batch is due
            status, error = Status.FAILED, failure
        words = status, task.slot, task.block, task.step, heap_bytes, task.use, n_rows
        try:
            return TaskResult(*words, 0, error, schemas, skips)
        finally:
            # Break the reference cycle error -> traceback -> this frame -> error. The cycle would
            # keep the block's memory in use.
            del error

    def worker_stacks(self) -> list[tuple[str, str]]:
        return []

    def close(self) -> None:
        self._tasks.clear()
        self._runner.close()


_QUICK: Final = int(Status.QUICK)

STARTING_S: Final = 60.0
"""The maximum time by which starting workers delay the timeout of a batch."""

_PRELOAD: Final = ("numpy.random", "shardio._engine.dispatch.worker")
"""The modules that the zygote imports for all workers; numpy.random alone takes 12 ms."""


StartMethod = Start | Literal["thread"]


class WorkerBackend:
    """A backend whose workers are processes or threads. Owns the workers until `close`."""

    depth = DEPTH

    def __init__(
        self, batch_spec: BatchSpec, n_workers: int, start_method: StartMethod = "zygote"
    ) -> None:
        self.n_workers = n_workers
        self.begins_ahead = start_method != "thread" or not batch_spec.runs_user_code
        """True if idle workers may begin the next epoch before the program requests it.

        False if threads would run user functions while the program does not iterate.
        """
        self._pool: WorkerPool | ThreadWorkers
        if start_method == "thread":
            self._pool = ThreadWorkers(n_workers, batch_spec)
        else:
            target = functools.partial(work, batch_spec)
            functions = batch_spec.transform, batch_spec.batch_transform
            modules = [name for f in functions for name in getattr(f, "worker_modules", ())]
            preload = (*_PRELOAD, *modules)
            self._pool = WorkerPool(n_workers, target, preload=preload, start=start_method)
        self._lineage = b""
        self._fds: Sequence[int] = ()
        self._tables: tuple[SharedArray, ...] = ()
        self._layout: bytes | None = None
        self._blocks: dict[int, Block] = {}
        self._outbox = [b""] * n_workers
        self._replies: list[ReplyBuffer] = []
        self._crash_loop = CrashLoop(n_workers)
        self._failure_texts: dict[int, str] = {}
        self._starting = set(range(n_workers))
        self._start_end_s = time.monotonic() + STARTING_S

    @property
    def is_starting(self) -> bool:
        """True while a worker opens the dataset, up to STARTING_S after the latest start."""
        return bool(self._starting) and time.monotonic() < self._start_end_s

    def send_hello(
        self, view: SampleView, fds: Sequence[int], tables: tuple[SharedArray, ...] = ()
    ) -> None:
        """Send the shared files to the workers; `fds` are indexed by MARKS, COUNTERS and so on.

        STACKS is the index of the first worker's file; one file for each other worker follows. The
        caller keeps `fds` open. `tables` are the result of `share_view`.
        """
        self._lineage, self._fds, self._tables = view.dataset.lineage.encode(), tuple(fds), tables
        memory = mmap.mmap(fds[REPLIES], 0)
        self._replies = [ReplyBuffer(memory, worker) for worker in range(self.n_workers)]
        for replies in self._replies:
            replies.take()  # discard what the workers of an earlier backend have left
        for worker in range(self.n_workers):
            self._send_hello(worker)

    def _send_hello(self, worker: int) -> None:
        hello = _message(RequestKind.HELLO, block=worker, n_rows=self.n_workers) + self._lineage
        tables = [table.fd for table in self._tables]
        self._pool.send(worker, hello, [*self._fds[:STACKS], self._fds[STACKS + worker], *tables])

    def use_layout(self, layout: BlockLayout, schemas: Schemas, memory_bytes: int) -> None:
        """Send `schemas`, from which workers derive the layout, and the maximum size of a block."""
        self._layout = _message(RequestKind.LAYOUT, step=memory_bytes) + pickle.dumps(schemas)
        for worker in range(self.n_workers):
            self._pool.send(worker, self._layout)

    def send_plan(self, worker: int, slot: int, plan: EpochPlan) -> None:
        content, fds = pack_shared(plan)
        self._pool.send(worker, _message(RequestKind.PLAN, slot=slot) + content, fds)

    def send_samples_to_skip(self, worker: int, to_skip: SamplesToSkip) -> None:
        """Make a worker fill its next batch row by row, without the samples in `to_skip`."""
        self.send_queued()
        with pack_message(_message(RequestKind.SKIP_SAMPLES) + pickle.dumps(to_skip)) as parcel:
            self._pool.send(worker, *parcel)

    def reset_crash_count(self) -> None:
        """Reset the counter of consecutive crashes: the sample that caused them will be skipped."""
        self._crash_loop.n_crashes = 0

    def queue_task(self, worker: int, task: Task, block: Block | None) -> None:
        """Queue a task: fill `block`; if `block` is None, compute schemas."""
        if block is not None and worker not in block.sent_to:
            self._blocks[block.number] = block
            message = _message(RequestKind.BLOCK, block=block.number)
            self._pool.send(worker, message, [block.fd])
            block.sent_to.add(worker)
        self._outbox[worker] += pack(*task)

    def send_queued(self) -> None:
        for worker, tasks in enumerate(self._outbox):
            if tasks:
                # Clear the queue before sending, because a task must not be sent twice.
                self._outbox[worker] = b""
                self._pool.send(worker, tasks)

    def wait(self, timeout_s: float | None = None) -> list[TaskResult | WorkerLost]:
        """Wait until a result arrives, or a worker starts or exits.

        The `WorkerLost` of a worker follows all of its results.
        """
        found: list[TaskResult | WorkerLost] = []
        for event in self._pool.wait(timeout_s):
            if isinstance(event, Message):
                worker, data, fds = event
                if data[0] == _QUICK or len(data) == HEADER_BYTES:
                    self._crash_loop.n_crashes = 0
                    found += _unpack_results(worker, data)
                    continue
                result = _unpack_long_result(worker, unpack_message(data, fds))
                if result.status == Status.READY:
                    self._starting.discard(worker)
                else:
                    self._crash_loop.n_crashes = 0
                    found.append(result)
            elif isinstance(event, WorkerExit):
                # Read the attribute once, because another thread may close this backend.
                replies = self._replies
                if replies and (held_back := replies[event.worker].take()):
                    self._crash_loop.n_crashes = 0
                    found += _unpack_results(event.worker, held_back)
                how = self._on_worker_exit(event)
                found.append(WorkerLost(event.worker, how, event.signal, event.cause))
            else:
                self._failure_texts[event.worker] = event.text
        return found

    def worker_stacks(self) -> list[tuple[str, str]]:
        """Return each worker's name, and the Python stacks of its threads."""
        return self._pool.named_stacks(self._fds[STACKS:]) if self._fds else []

    def _on_worker_exit(self, died: WorkerExit) -> str:
        how = died.description
        if text := self._failure_texts.pop(died.worker, ""):
            how = f"{how}:\n\n{text}"
        self._crash_loop.count(how)
        for block in self._blocks.values():
            block.sent_to.discard(died.worker)
        self._starting.add(died.worker)
        self._start_end_s = time.monotonic() + STARTING_S
        self._pool.restart(died.worker)
        if self._fds:
            self._send_hello(died.worker)
        if self._layout is not None:
            self._pool.send(died.worker, self._layout)
        return how

    def close(self) -> None:
        """Stop all workers, even busy ones. Idempotent."""
        self._pool.close()
        self._blocks.clear()  # otherwise this object would keep the blocks' memory in use
        self._replies = []


def _message(
    kind: RequestKind, block: int = 0, slot: int = 0, step: int = 0, n_rows: int = 0
) -> bytes:
    return pack(kind, slot, block, 0, step, 0, n_rows)


def _unpack_results(worker: int, data: bytes) -> list[TaskResult]:
    return [
        tuple.__new__(TaskResult, (*words, worker, None, None, ())) for words in unpack_all(data)
    ]


def _unpack_long_result(worker: int, data: bytes) -> TaskResult:
    result, payload = TaskResult(*unpack(data))._replace(worker=worker), data[HEADER_BYTES:]
    if result.status == Status.FAILED:
        return result._replace(error=unpack_error(payload))
    if result.status == Status.SCHEMA:
        return result._replace(schemas=pickle.loads(payload))
    if result.status == Status.FILLED:
        # It is safe to unpickle `payload`: a worker of this loader sent it.
        return result._replace(skips=pickle.loads(payload))
    return result


Backend = WorkerBackend | InlineWorker
