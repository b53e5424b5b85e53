"""A batch worker: receive a task, fill a block with the batch of a step, send a reply.

This module imports neither tinygrad nor the program's `__main__`.

A block is a piece of shared memory for one batch. Tasks and replies are descriptors of 32 bytes;
the data of batches stays in the blocks. The main process sends a `Task`, which names a block and
the step whose batch the worker writes into the block. The worker replies with the first fields of a
`TaskResult`. A message may contain several tasks. It may also contain several replies, but only if
the first of the replies is QUICK. A reply can have a payload: an error, skipped samples or schemas.
The payload follows the reply in the same message, or is sent in a file (see `pack_message`). Other
messages from the main process deliver the memory of the blocks, and the schemas from which the
worker computes the layout of batches.

A worker collects the replies to quick tasks in a `ReplyBuffer` for a moment before it sends them.
If the worker crashes, the main process reads the buffer, so that no finished task is repeated. A
repeated task could fail although the first attempt succeeded: if a file was truncated in between, a
new worker cannot open the file.
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
from shardio._engine.filling.filler import Filler, LeftOut, RowByRowFiller
from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.linux import keep_freed_memory, yield_to_main
from shardio._workers.processes.serialization import pack_error
from shardio._workers.processes.shared_memory import sparse_memory_file, unpack_shared
from shardio._workers.processes.stack_dumps import answer_with_stacks
from shardio._workers.processes.worker_main import (
    DESCRIPTOR_BYTES,
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

_TASK = struct.Struct("<HHIQQII")
_DONE = struct.Struct("<HHIQQII")

MARKS, CANCELLED, COUNTERS, KEPT, STACKS, TABLES = range(6)
"""Indices of the files that the main process shares with a worker.

MARKS has one byte per unit of the shards (a piece of a file with a hash of its own), which is 1 if
the unit has been verified. CANCELLED has the cancellation flags of iterations, COUNTERS the
counters of `CounterTable`, KEPT the reply buffers, and STACKS the stacks that the worker dumps on
request. From index TABLES on, there is one file for each table of the dataset's view.
"""


class RequestKind(IntEnum):
    """The kind of a message from the main process.

    Every message begins with a `Task`. Some kinds use the fields of the `Task` for other values
    than tasks do; the comments name these fields.
    """

    FILL = 1  # a task: fill a block with a batch
    SCHEMA = 2  # a task: run user code on sample `step` of the view; reply with the schemas
    BLOCK = 3  # the file of block `block` is attached
    LAYOUT = 4  # pickled Schemas follow, for the layout; a block has at most `step` bytes
    HELLO = 5  # the shared files are attached; for worker `block` of `n_rows` workers
    PLAN = 6  # a packed EpochPlan follows, for the iteration in `slot`
    CAUTION = 7  # pickled samples to skip follow; the next task is filled row by row


class Status(IntEnum):
    """The outcome of a task, or READY."""

    FILLED = 1  # if samples were skipped, they follow as a payload
    FAILED = 2  # a pickled exception follows
    CANCELLED = 3  # the iteration was cancelled before the task began
    SCHEMA = 4  # pickled Schemas follow
    READY = 5  # not the reply to a task: the worker has started and handled HELLO
    QUICK = 6  # like FILLED, if it took at most QUICK_NS; other replies may follow in the message


class Task(NamedTuple):
    """A request to fill block `block` with batch `step` of epoch `epoch`.

    Every other message from the main process begins with the same fields. `ask` is the RequestKind.
    `slot` is the index of the iteration, and of the iteration's cancellation flag. `use` is the
    number of tasks that have been sent for this block. The reply repeats `use`, so that the main
    process notices an outdated reply.
    """

    ask: int
    slot: int
    block: int
    epoch: int
    step: int
    use: int
    n_rows: int


pack_task = _TASK.pack
"""Return a task as bytes; the arguments are the fields of a `Task`."""


pack_done = _DONE.pack
"""Return a reply without its payload as bytes; the arguments are those of a `TaskResult`, up to
`n_rows`.
"""


def unpack_task(message: bytes) -> Task:
    """Return the task at the start of a message."""
    # The constructor of a NamedTuple runs Python code, and is therefore slower than this call.
    return tuple.__new__(Task, _TASK.unpack_from(message))


unpack_tasks = _TASK.iter_unpack
"""Yield, for each task in a message, a tuple with the fields of a `Task`."""
unpack_done = _DONE.unpack_from
"""Return a tuple of the fields `status` to `n_rows` of the reply at the start of a message."""
unpack_dones = _DONE.iter_unpack
"""Yield a tuple of the same fields for each reply in a message of replies without payloads."""


class TaskResult(NamedTuple):
    """The reply to a task.

    After the task, the block has `n_rows` rows. It has `heap_bytes` bytes in its heap, the area at
    the end of a block for values whose sizes vary. A worker sends the fields up to `n_rows`. The
    error, the schemas or the skipped samples follow as a payload. The main process sets `worker`.
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
    """The unexpected exit of a worker. Its tasks are lost; another worker has taken its index.

    `how` is a clause that names the worker and describes its exit; `end` only describes the exit.
    """

    worker: int
    how: str
    signal: int | None = None
    end: str = "died"


_COUNT: Final = 0
_ROOM: Final = mmap.PAGESIZE // DESCRIPTOR_BYTES - 1


def kept_file(n_workers: int) -> int:
    """Create a file with a reply buffer of one page per worker; the caller owns the descriptor."""
    return sparse_memory_file(max(1, n_workers) * mmap.PAGESIZE, "the reply buffers")


class ReplyBuffer:
    """The replies to quick tasks that one worker has not sent yet.

    `memory` is a memory map of the file that `kept_file` creates. The first word of a buffer is the
    number of replies in it.
    """

    def __init__(self, memory: mmap.mmap, worker: int) -> None:
        start = worker * mmap.PAGESIZE
        self._page = memoryview(memory)[start : start + mmap.PAGESIZE]
        self._words = self._page.cast("Q")

    @property
    def is_full(self) -> bool:
        """True if there is no room for another reply."""
        return self._words[_COUNT] == _ROOM

    def add(self, answer: bytes) -> None:
        """Append a reply without payload."""
        n = self._words[_COUNT]
        start = (n + 1) * DESCRIPTOR_BYTES
        self._page[start : start + DESCRIPTOR_BYTES] = answer
        # Update the count last, so that it never includes a reply that is not fully written.
        self._words[_COUNT] = n + 1

    def take(self) -> bytes:
        """Return all replies, concatenated, and empty the buffer."""
        n = self._words[_COUNT]
        # The count is reset before the replies are sent, because the main process must not receive
        # a reply twice.
        self._words[_COUNT] = 0
        return bytes(self._page[DESCRIPTOR_BYTES : (n + 1) * DESCRIPTOR_BYTES])


# Plain ints, because members of an enum are slow to look up and to compare.
_LAST_OF_WORK, _SCHEMA = int(RequestKind.SCHEMA), int(Status.SCHEMA)
_FILLED, _QUICK = int(Status.FILLED), int(Status.QUICK)
_FAILED, _CANCELLED = int(Status.FAILED), int(Status.CANCELLED)


def work(batch_spec: BatchSpec, channel: Channel) -> None:
    """Handle messages from the main process until it closes the channel."""

    def send(answer: bytes) -> None:
        if len(answer) <= MAX_MESSAGE_BYTES:
            channel.send(answer)
        else:
            with pack_message(answer) as parcel:
                channel.send(*parcel)

    yield_to_main()
    keep_freed_memory()
    worker = BatchWorker(batch_spec, send)
    while (received := channel.recv_fds()) is not None:
        worker.take(*received)


class BatchWorker(Closing):
    """The state of one worker process or thread; `send` sends a message to the main process."""

    def __init__(self, batch_spec: BatchSpec, send: Callable[[bytes], None]) -> None:
        self._batch_spec, self._send = batch_spec, send
        # This opens the generation (the version of the dataset) that the main process has opened,
        # even if a newer generation has been published since.
        self._dataset: Dataset = batch_spec.source.open()
        self._filler: Filler
        self._row_by_row: RowByRowFiller | None = None
        self._left_out: LeftOut | None = None
        """The samples that the next task skips; None if the next task is an ordinary one."""
        self._cancelled = np.zeros(0, np.uint8)
        self._blocks: dict[int, BlockMap] = {}
        self._plans: dict[int, EpochPlan] = {}
        self._layout: BlockLayout | None = None
        self._most_bytes: int | None = None
        self._counters: IterationCounters
        self._kept: ReplyBuffer
        self._start_error: Exception | None = None
        """The error that HELLO raised; it is then the result of every task."""

    def close(self) -> None:
        """Close the filler with its decoders, drop the maps of blocks, and close the dataset."""
        if hasattr(self, "_filler"):
            self._filler.close()
        self._blocks.clear()
        self._dataset.close()

    def _new_filler(self, view: SampleView) -> Filler:
        return Filler(self._batch_spec, view)

    def _map(self, fd: int) -> BlockMap:
        return BlockMap(fd, self._most_bytes)

    def _map_replies(self, fd: int, number: int) -> ReplyBuffer:
        return ReplyBuffer(mmap.mmap(fd, 0), number)

    def _serve_stack_dumps(self, fd: int) -> None:
        answer_with_stacks(fd)

    def take(self, message: bytes, fds: tuple[int, ...]) -> None:
        """Handle a message, and send the replies that are due."""
        if not fds and message[0] <= _LAST_OF_WORK:
            self._do_all(message)
            return
        task = unpack_task(message)
        if task.ask == RequestKind.BLOCK:
            self._blocks[task.block] = self._map(fds[0])
        elif task.ask == RequestKind.PLAN:
            self._plans[task.slot] = unpack_shared(message[DESCRIPTOR_BYTES:], fds)
        elif task.ask == RequestKind.CAUTION:
            self._left_out = pickle.loads(unpack_message(message, fds)[DESCRIPTOR_BYTES:])
        elif task.ask == RequestKind.LAYOUT:
            self._most_bytes = task.step
            schemas = pickle.loads(message[DESCRIPTOR_BYTES:])
            self._layout = self._batch_spec.lay_out(schemas)
        elif task.ask == RequestKind.HELLO:
            try:
                self._accept_hello(message[DESCRIPTOR_BYTES:].decode(), fds, task.block)
                self._filler.share_steps(task.n_rows)
            except Exception as error:  # noqa: BLE001  # every reply to a task reports it
                self._start_error = error
            # The extra byte makes the message longer than a descriptor. The main process thus sees
            # that READY is not the reply to a task.
            self._send(pack_done(Status.READY, 0, 0, 0, 0, 0, 0) + b".")

    def _do_all(self, tasks: bytes) -> None:
        """Run tasks one after the other; hold back replies to quick tasks for up to QUICK_NS.

        Replies that were held back are sent in one message. If tasks run user code, each reply is
        sent immediately, because the user code of the next task may hang.
        """
        may_wait = not self._batch_spec.runs_user_code
        end_ns = now_ns() + QUICK_NS
        for words in unpack_tasks(tasks):
            status, answer = self._do(tuple.__new__(Task, words))
            if status == _QUICK and may_wait and now_ns() < end_ns and not self._kept.is_full:
                self._kept.add(answer)
                continue
            if len(answer) > DESCRIPTOR_BYTES:
                self._send_kept()
                self._send(answer)
            else:
                self._send(self._kept.take() + answer)
            end_ns = now_ns() + QUICK_NS
        self._send_kept()

    def _send_kept(self) -> None:
        if answers := self._kept.take():
            self._send(answers)

    def _accept_hello(self, lineage: str, fds: tuple[int, ...], number: int) -> None:
        """Map the shared files `fds`, and check that this worker has opened the same dataset.

        `lineage` identifies the dataset that the main process has opened; `number` is the index of
        this worker.
        """
        self._serve_stack_dumps(fds[STACKS])
        self._cancelled = np.frombuffer(mmap.mmap(fds[CANCELLED], 0), np.uint8)
        self._counters = IterationCounters(fds[COUNTERS], number)
        self._kept = self._map_replies(fds[KEPT], number)
        if lineage != self._dataset.lineage:
            raise DatasetCorrupt(
                f"{self._dataset.path}: another dataset has replaced the one that the loader "
                f"opened: expected lineage {lineage}, found {self._dataset.lineage}"
            )
        self._dataset.files.share_marks(np.frombuffer(mmap.mmap(fds[MARKS], 0), np.uint8))
        view = receive_view(self._dataset, self._batch_spec, fds[TABLES:])
        self._filler = self._new_filler(view)
        if self._batch_spec.skips:
            self._row_by_row = RowByRowFiller(self._filler, self._batch_spec.seed)

    def _do(self, task: Task) -> tuple[int, bytes]:
        """Run a task; return the status, and the reply with its payload."""
        n_rows = heap_bytes = 0
        status, rest = _CANCELLED, b""
        try:
            if self._start_error is not None:
                raise self._start_error
            if task.ask == _LAST_OF_WORK:
                status, rest = _SCHEMA, pickle.dumps(self._filler.schemas(task.step))
            elif not self._cancelled[task.slot]:
                status, n_rows, heap_bytes, rest = self._fill(task)
            else:
                self._left_out = None
        except Exception as error:  # noqa: BLE001  # the main process raises it
            status, rest = _FAILED, pack_error(error)
        done = pack_done(status, task.slot, task.block, task.step, heap_bytes, task.use, n_rows)
        return status, done + rest

    def _fill(self, task: Task) -> tuple[int, int, int, bytes]:
        if self._layout is None:
            raise AssertionError("main sends the layout before the first batch")
        memory = self._blocks[task.block]
        # Only a block with a heap (an area for values whose sizes vary) can grow. If another worker
        # has enlarged the block, the new pages must be mapped here.
        if self._layout.has_heap:
            memory.note_growth()
        plan, start_ns, rest = self._plans[task.slot], self._counters.start(), b""
        if self._row_by_row is None:
            n_rows, heap_bytes = self._filler.fill(self._layout, memory, plan, task.step)
        else:
            left_out, self._left_out = self._left_out, None
            n_rows, heap_bytes, skips = self._row_by_row.fill(
                self._layout, memory, plan, task.step, left_out
            )
            rest = pickle.dumps(skips) if skips else b""
        taken_ns = self._counters.add(task.slot, task.step, start_ns)
        status = _FILLED if rest or taken_ns > QUICK_NS else _QUICK
        return status, n_rows, heap_bytes, rest
