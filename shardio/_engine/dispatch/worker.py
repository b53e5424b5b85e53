"""A batch worker: receive a task, fill a block with the batch of a step, send a reply.

Tasks and replies have headers of 32 bytes. A message may contain several tasks, or several
replies of which the first is QUICK. The payload of a reply (an error, skipped samples or schemas)
follows the header in the same message, or is sent in a file (see `pack_message`).

This module imports neither tinygrad nor the program's `__main__`.
"""

from __future__ import annotations

import mmap
import pickle
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from shardio._base.classes import Closing
from shardio._base.statistics import now_ns
from shardio._engine.dispatch.counters import IterationCounters
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan, Schemas, receive_view
from shardio._engine.filling.filler import Filler, RowByRowFiller, SamplesToSkip
from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.linux import keep_freed_memory, yield_to_main
from shardio._workers.processes.serialization import pack_error
from shardio._workers.processes.shared_memory import sparse_memory_file, unpack_shared
from shardio._workers.processes.stack_dumps import install_stack_handler
from shardio._workers.processes.worker_main import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    Channel,
    pack_message,
    unpack_message,
)
from shardio._workers.tasks.schedule import QUICK_NS
from shardio.batch.batch import Skipped
from shardio.batch.layout import BlockLayout
from shardio.dataset.dataset import Dataset
from shardio.errors import DatasetCorrupt
from shardio.samples.view import SampleView

_HEADER = struct.Struct("<HHIQQII")
pack = _HEADER.pack
"""Return a header: the fields of a `Task`, or those of a `TaskResult` up to `n_rows`."""
unpack = _HEADER.unpack_from
"""Return the fields of the header at the start of a message."""
unpack_all = _HEADER.iter_unpack
"""Yield the fields of each header in a message without payloads."""

MARKS, COUNTERS, REPLIES, STACKS, TABLES = range(5)
"""Indices of the files that the main process shares with a worker.

MARKS has one byte for each hashed piece of a shard file; the byte is 1 once the piece is
verified. COUNTERS is the file of a `CounterTable`, REPLIES has the reply buffers, and STACKS the
stacks that the worker dumps on request. TABLES and later indices are those of the tables of the
dataset's view, one file for each table.
"""


class RequestKind(IntEnum):
    """The kind of a message from the main process; the comments name the fields in use."""

    FILL = 1  # a task: fill a block with a batch
    SCHEMA = 2  # a task: run user code on sample `step` of the view; reply with the schemas
    BLOCK = 3  # the file of block `block` is attached
    LAYOUT = 4  # pickled Schemas follow, for the layout; a block has at most `step` bytes
    HELLO = 5  # the shared files are attached; for worker `block` of `n_rows` workers
    PLAN = 6  # a packed EpochPlan follows, for the iteration in `slot`
    SKIP_SAMPLES = 7  # pickled samples to skip follow; the next task is filled row by row


class Status(IntEnum):
    """The outcome of a task, or READY."""

    FILLED = 1  # if samples were skipped, they follow as a payload
    FAILED = 2  # a pickled exception follows
    CANCELLED = 3  # the iteration was cancelled before the task began
    SCHEMA = 4  # pickled Schemas follow
    READY = 5  # not the reply to a task: the worker has started and handled HELLO
    QUICK = 6  # like FILLED, in at most QUICK_NS; other replies may follow in the message


class Task(NamedTuple):
    """A request to fill block `block` with batch `step`, or the fields of another message.

    `use` is the number of tasks that have been sent for this block. The reply has the same number;
    thus the main process notices an outdated reply.
    """

    kind: int
    slot: int
    block: int
    epoch: int
    step: int
    use: int
    n_rows: int


class TaskResult(NamedTuple):
    """The reply to a task; the block now has `n_rows` rows, and `heap_bytes` bytes in its heap.

    A worker sends the fields up to `n_rows`, and then the payload.
    """

    status: int
    slot: int
    block: int
    step: int
    heap_bytes: int
    use: int
    n_rows: int
    worker: int = 0
    error: BaseException | None = None
    schemas: Schemas | None = None
    skips: tuple[Skipped, ...] = ()


class WorkerLost(NamedTuple):
    """The unexpected exit of a worker; a new worker has taken its index.

    `how` is a clause that names the worker and describes its exit; `end` only describes the exit.
    """

    worker: int
    how: str
    signal: int | None = None
    end: str = "died"


_COUNT: Final = 0
_ROOM: Final = mmap.PAGESIZE // HEADER_BYTES - 1


def replies_file(n_workers: int) -> int:
    return sparse_memory_file(max(1, n_workers) * mmap.PAGESIZE, "the reply buffers")


class ReplyBuffer:
    """The replies to quick tasks that a worker holds back for a moment, to send several at once.

    If the worker crashes, the main process reads the replies from the shared buffer. Otherwise, a
    finished task would be repeated, and could then fail, for example because a new worker cannot
    open a file that has been truncated. `memory` maps a file with one page per
    worker; the first word of a page is the number of replies.
    """

    def __init__(self, memory: mmap.mmap, worker: int) -> None:
        start = worker * mmap.PAGESIZE
        self._page = memoryview(memory)[start : start + mmap.PAGESIZE]
        self._words = self._page.cast("Q")

    @property
    def is_full(self) -> bool:
        return self._words[_COUNT] == _ROOM

    def add(self, reply: bytes) -> None:
        n = self._words[_COUNT]
        start = (n + 1) * HEADER_BYTES
        self._page[start : start + HEADER_BYTES] = reply
        # Update the count last, so that it never includes a reply that is not fully written.
        self._words[_COUNT] = n + 1

    def take(self) -> bytes:
        """Return all replies, concatenated, and empty the buffer."""
        n = self._words[_COUNT]
        self._words[_COUNT] = 0  # before the replies are sent, so that none arrives twice
        return bytes(self._page[HEADER_BYTES : (n + 1) * HEADER_BYTES])


# Plain ints, because members of an enum are slow to look up and to compare.
_LAST_TASK_KIND, _SCHEMA = int(RequestKind.SCHEMA), int(Status.SCHEMA)
_FILLED, _QUICK = int(Status.FILLED), int(Status.QUICK)
_FAILED, _CANCELLED = int(Status.FAILED), int(Status.CANCELLED)


class TaskRunner:
    """A runner of the tasks of one worker, or of the main process."""

    def __init__(self, batch_spec: BatchSpec) -> None:
        self._batch_spec = batch_spec
        self.filler: Filler | None = None
        self._row_by_row: RowByRowFiller | None = None
        self._counters: IterationCounters | None = None
        self.layout: BlockLayout | None = None
        self.plans: dict[int, EpochPlan] = {}
        self.to_skip: SamplesToSkip | None = None
        """The samples that the next task skips; None if no SKIP_SAMPLES has preceded this task."""

    def start(self, filler: Filler, counters_fd: int, worker: int) -> None:
        self.filler = filler
        self._counters = IterationCounters(counters_fd, worker)
        if self._batch_spec.skips:
            self._row_by_row = RowByRowFiller(filler, self._batch_spec.seed)

    def schemas(self, number: int) -> Schemas:
        if self.filler is None:
            raise AssertionError("main sends HELLO before the first task")
        return self.filler.schemas(number)

    def fill(
        self, slot: int, step: int, memory: BlockMap
    ) -> tuple[int, int, int, tuple[Skipped, ...]]:
        """Fill a block; return `status`, `n_rows`, `heap_bytes` and `skips` of the result."""
        to_skip, self.to_skip = self.to_skip, None
        # Bind the attributes to names, because another thread may call `close` meanwhile.
        filler, row_by_row, counters = self.filler, self._row_by_row, self._counters
        layout = self.layout
        skips: tuple[Skipped, ...] = ()
        if filler is None or counters is None or layout is None:
            raise AssertionError("main sends HELLO and the layout before the first batch")
        if counters.is_cancelled(slot):
            return _CANCELLED, 0, 0, ()
        # Only a block with a heap (an area for values whose sizes vary) can grow. If another worker
        # has enlarged the block, the new pages must be mapped here.
        if layout.has_heap:
            memory.note_growth()
        plan, start_ns = self.plans[slot], counters.start()
        if row_by_row is None:
            n_rows, heap_bytes = filler.fill(layout, memory, plan, step)
        else:
            n_rows, heap_bytes, skips = row_by_row.fill(layout, memory, plan, step, to_skip)
        taken_ns = counters.add(slot, step, start_ns)
        status = _FILLED if skips or taken_ns > QUICK_NS else _QUICK
        return status, n_rows, heap_bytes, skips

    def close(self) -> None:
        self.filler = self._row_by_row = self._counters = None


def work(batch_spec: BatchSpec, channel: Channel) -> None:
    """Handle messages from the main process until it closes the channel."""

    def send(reply: bytes) -> None:
        if len(reply) <= MAX_MESSAGE_BYTES:
            channel.send(reply)
        else:
            with pack_message(reply) as parcel:
                channel.send(*parcel)

    yield_to_main()
    keep_freed_memory()
    worker = BatchWorker(batch_spec, send)
    while (received := channel.recv()) is not None:
        worker.handle_message(*received)


class BatchWorker(Closing):
    """The state of one worker process or thread; `send` sends a message to the main process."""

    def __init__(self, batch_spec: BatchSpec, send: Callable[[bytes], None]) -> None:
        self._batch_spec, self._send = batch_spec, send
        # `source` names the generation (the version of the dataset) that the main process has
        # opened, even if a newer one has been published since.
        self._dataset: Dataset = batch_spec.source.open()
        self._runner = TaskRunner(batch_spec)
        self._blocks: dict[int, BlockMap] = {}
        self._max_bytes: int | None = None
        self._replies: ReplyBuffer
        self._start_error: Exception | None = None
        """The error that handling HELLO raised; every later task fails with this error."""

    def close(self) -> None:
        if self._runner.filler is not None:
            self._runner.filler.close()
        self._blocks.clear()
        self._dataset.close()

    def _new_filler(self, view: SampleView) -> Filler:
        return Filler(self._batch_spec, view)

    def _map(self, fd: int) -> BlockMap:
        return BlockMap(fd, self._max_bytes)

    def _map_replies(self, fd: int, number: int) -> ReplyBuffer:
        return ReplyBuffer(mmap.mmap(fd, 0), number)

    def _serve_stack_dumps(self, fd: int) -> None:
        install_stack_handler(fd)

    def handle_message(self, message: bytes, fds: tuple[int, ...]) -> None:
        """Handle a message, and send the replies that are due."""
        if not fds and message[0] <= _LAST_TASK_KIND:
            self._run_tasks(message)
            return
        task, runner = Task(*unpack(message)), self._runner
        if task.kind == RequestKind.BLOCK:
            self._blocks[task.block] = self._map(fds[0])
        elif task.kind == RequestKind.PLAN:
            runner.plans[task.slot] = unpack_shared(message[HEADER_BYTES:], fds)
        elif task.kind == RequestKind.SKIP_SAMPLES:
            runner.to_skip = pickle.loads(unpack_message(message, fds)[HEADER_BYTES:])
        elif task.kind == RequestKind.LAYOUT:
            self._max_bytes = task.step
            runner.layout = self._batch_spec.lay_out(pickle.loads(message[HEADER_BYTES:]))
        elif task.kind == RequestKind.HELLO:
            try:
                lineage = message[HEADER_BYTES:].decode()
                self._accept_hello(lineage, fds, task.block, task.n_rows)
            except Exception as error:  # noqa: BLE001  # every reply to a task reports it
                self._start_error = error
            # The extra byte makes the message longer than a header. The main process thus sees
            # that READY is not the reply to a task.
            self._send(pack(Status.READY, 0, 0, 0, 0, 0, 0) + b".")

    def _run_tasks(self, tasks: bytes) -> None:
        """Run tasks one after the other; hold back replies to quick tasks for up to QUICK_NS.

        If tasks run user code, each reply is sent immediately, because the next task may hang.
        """
        may_wait = not self._batch_spec.runs_user_code
        end_ns = now_ns() + QUICK_NS
        for words in unpack_all(tasks):
            status, reply = self._run_task(*words)
            if status == _QUICK and may_wait and now_ns() < end_ns and not self._replies.is_full:
                self._replies.add(reply)
                continue
            if len(reply) > HEADER_BYTES:
                self._flush_replies()
                self._send(reply)
            else:
                self._send(self._replies.take() + reply)
            end_ns = now_ns() + QUICK_NS
        self._flush_replies()

    def _flush_replies(self) -> None:
        if replies := self._replies.take():
            self._send(replies)

    def _accept_hello(
        self, lineage: str, fds: tuple[int, ...], number: int, n_workers: int
    ) -> None:
        self._serve_stack_dumps(fds[STACKS])
        self._replies = self._map_replies(fds[REPLIES], number)
        if lineage != self._dataset.lineage:
            raise DatasetCorrupt(
                f"{self._dataset.path}: another dataset has replaced the one that the loader "
                f"opened: expected lineage {lineage}, found {self._dataset.lineage}"
            )
        self._dataset.files.share_marks(np.frombuffer(mmap.mmap(fds[MARKS], 0), np.uint8))
        view = receive_view(self._dataset, self._batch_spec, fds[TABLES:])
        filler = self._new_filler(view)
        filler.index_planner.n_workers = n_workers
        self._runner.start(filler, fds[COUNTERS], number)

    def _run_task(
        self, kind: int, slot: int, block: int, epoch: int, step: int, use: int, n_rows: int
    ) -> tuple[int, bytes]:
        """Run a task; return the status, and the reply with its payload."""
        heap_bytes, payload = 0, b""
        try:
            if self._start_error is not None:
                raise self._start_error
            if kind == _LAST_TASK_KIND:
                status, payload = _SCHEMA, pickle.dumps(self._runner.schemas(step))
            else:
                status, n_rows, heap_bytes, skips = self._runner.fill(
                    slot, step, self._blocks[block]
                )
                payload = pickle.dumps(skips) if skips else b""
        except Exception as error:  # noqa: BLE001  # the main process raises it
            status, payload = _FAILED, pack_error(error)
        return status, pack(status, slot, block, step, heap_bytes, use, n_rows) + payload
