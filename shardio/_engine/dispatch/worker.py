"""A batch worker: receive a task, fill the block, reply. Imports neither tinygrad nor `__main__`.

Tasks and replies are descriptors of 32 bytes; data stays in shared memory. The main process sends a
`Task`, to fill a block with a batch; the worker replies with the first fields of a `TaskResult`. A
message may have several tasks, or several replies if the first is QUICK. The payload of a reply (an
error, skipped samples or schemas) follows it in the same message, or in a file (see
`pack_message`). Other messages from the main process deliver the blocks' memory and the schemas
that determine their layout.

A worker collects quick replies in a `ReplyBuffer` for a moment before sending them. If the worker
exits, the main process reads the buffer, so that finished tasks are not repeated. Repeating a task
could fail: if a file was truncated meanwhile, a new worker cannot open the file.
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

The files hold the marks of verified units, the cancellation flags, the counters, the reply buffers
and the stack dump. The tables of the dataset's view follow from index TABLES on.
"""


class RequestKind(IntEnum):
    """The kind of a message from the main process."""

    FILL = 1
    SCHEMA = 2  # run the transform on sample `step` of the view; reply with the result's schema
    BLOCK = 3  # a block, whose descriptor is attached
    LAYOUT = 4  # schemas for the layout follow; blocks have at most `step` bytes
    HELLO = 5  # the shared files, for worker `block` of `n_rows` workers
    PLAN = 6  # the plan of an iteration: a packed EpochPlan follows
    CAUTION = 7  # run the next task row by row; the samples to skip follow, pickled


class Status(IntEnum):
    """The outcome of a task."""

    FILLED = 1  # the skipped samples follow, if there are any
    FAILED = 2  # a pickled exception follows
    CANCELLED = 3
    SCHEMA = 4  # packed Schemas follow
    READY = 5  # not a reply: the worker has started and opened the dataset
    QUICK = 6  # FILLED within QUICK_NS; other replies may follow in the message


class Task(NamedTuple):
    """A request to fill `block` with batch `step` of `epoch`, or another message without payload.

    `slot` identifies the iteration and its cancellation flag. `use` counts the tasks for this
    block; the reply repeats the count, so that an outdated reply is noticed.
    """

    ask: int
    slot: int
    block: int
    epoch: int
    step: int
    use: int
    n_rows: int


pack_task = _TASK.pack
"""Pack a task from the fields of a `Task`."""


pack_done = _DONE.pack
"""Pack a reply, without its payload, from the fields of a `TaskResult` up to `n_rows`."""


def unpack_task(message: bytes) -> Task:
    """Unpack the task at the start of a message."""
    # `tuple.__new__`, because the constructor of a NamedTuple runs Python code and is slower.
    return tuple.__new__(Task, _TASK.unpack_from(message))


unpack_tasks = _TASK.iter_unpack
"""Yield the fields of each task in a message of tasks."""
unpack_done = _DONE.unpack_from
"""Return the packed fields of the reply at the start of a message."""
unpack_dones = _DONE.iter_unpack
"""Yield the packed fields of each reply in a message of replies without payloads."""


class TaskResult(NamedTuple):
    """The reply to a task: the block has n_rows rows and heap_bytes bytes of varying values.

    A worker sends the fields up to `n_rows`, followed by an error, schemas or skipped samples.
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
    """The exit of a worker, which has been replaced; its tasks are lost.

    `how` is a sentence that names the worker and its exit; `end` describes the exit alone.
    """

    worker: int
    how: str
    signal: int | None = None
    end: str = "died"


_COUNT: Final = 0
_ROOM: Final = mmap.PAGESIZE // DESCRIPTOR_BYTES - 1


def kept_file(n_workers: int) -> int:
    """Create a file of reply buffers, one page per worker; the caller owns the descriptor."""
    return sparse_memory_file(max(1, n_workers) * mmap.PAGESIZE, "the reply buffers")


class ReplyBuffer:
    """The quick replies that one worker has not sent yet, in a map of `kept_file`."""

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
        self._words[_COUNT] = n + 1  # last, so that only complete replies are counted

    def take(self) -> bytes:
        """Return all replies, concatenated, and empty the buffer."""
        n = self._words[_COUNT]
        self._words[_COUNT] = 0  # reset before sending: a reply must not be received twice
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
        # Open the main process's generation, even if a newer generation was published meanwhile.
        self._dataset: Dataset = batch_spec.source.open()
        self._filler: Filler
        self._row_by_row: RowByRowFiller | None = None
        self._left_out: LeftOut | None = None
        """The samples that the next task skips; None for an ordinary task."""
        self._cancelled = np.zeros(0, np.uint8)
        self._blocks: dict[int, BlockMap] = {}
        self._plans: dict[int, EpochPlan] = {}
        self._layout: BlockLayout | None = None
        self._most_bytes: int | None = None
        self._counters: IterationCounters
        self._kept: ReplyBuffer
        self._start_error: Exception | None = None
        """The error of opening the dataset, which every task reports."""

    def close(self) -> None:
        """Close the decoders and files, then the dataset."""
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
            except Exception as error:  # noqa: BLE001  # reported with the first reply
                self._start_error = error
            # One byte more than a descriptor, because READY is not the reply to a task.
            self._send(pack_done(Status.READY, 0, 0, 0, 0, 0, 0) + b".")

    def _do_all(self, tasks: bytes) -> None:
        """Run tasks one after the other; hold back replies to quick tasks for up to QUICK_NS.

        Held-back replies are sent together. If user code runs, all replies are sent at once,
        because the next task may hang.
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
        """Map the shared files, and check that the main process has opened the same dataset."""
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
        """Return the status of a task, and its reply."""
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
        except Exception as error:  # noqa: BLE001  # raised in the main process
            status, rest = _FAILED, pack_error(error)
        done = pack_done(status, task.slot, task.block, task.step, heap_bytes, task.use, n_rows)
        return status, done + rest

    def _fill(self, task: Task) -> tuple[int, int, int, bytes]:
        if self._layout is None:
            raise AssertionError("main sends the layout before the first batch")
        memory = self._blocks[task.block]
        if self._layout.has_heap:  # blocks without a heap never grow
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
