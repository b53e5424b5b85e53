"""A batch worker: take a task, fill the block, answer. Imports neither tinygrad nor `__main__`.

Runs in a worker process, as the target of a `WorkerPool`, or in a thread of main, under
`ThreadWorkers`.

Messages are descriptors of 32 bytes; pixels never travel. Main sends a `Task` (fill this block with
that batch); the worker answers with a `TaskReply`. A message may hold several of either: tasks
assigned at the same time, and replies of which the first is QUICK. The bytes of a failure, of
skipped samples or of requested schemas follow the reply in the same message (or in a file, see
`pack_message`). Other messages of main deliver the blocks' memory and the schemas that blocks are
laid out by.

A worker holds quick replies back for a moment, in a `ReplyBuffer` that main reads if the worker
exits: its finished tasks are not repeated, which might be impossible if the file that crashed it is
too short to be opened again.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from shardio._base.classes import Closing
from shardio._base.statistics import now_ns
from shardio._engine.dispatch.counters import IterationCounters
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan, Schemas, apply_view
from shardio._engine.filling.filler import Filler
from shardio._engine.filling.row_by_row import LeftOut, RowByRowFiller
from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.channel import (
    DESCRIPTOR_BYTES,
    MAX_MESSAGE_BYTES,
    Channel,
    pack_message,
    unpack_message,
)
from shardio._workers.processes.linux import (
    keep_freed_memory,
    memory_file,
    resize_memory_file,
    yield_to_main,
)
from shardio._workers.processes.serialization import pack_error
from shardio._workers.processes.shared_memory import unpack_shared
from shardio._workers.processes.stack_dumps import answer_with_stacks
from shardio._workers.tasks.schedule import QUICK_NS
from shardio.batch.batch import Skipped
from shardio.batch.layout import BlockLayout
from shardio.dataset.dataset import Dataset
from shardio.errors import DatasetCorrupt
from shardio.samples.mixture import Mixture
from shardio.samples.shard_dataset import ShardDataset

# The constructors of a NamedTuple run Python code; `tuple.__new__` is used for every batch.
_TASK = struct.Struct("<HHIQQII")
_DONE = struct.Struct("<HHIQQII")


MARKS, CANCELLED, COUNTERS, KEPT, STACKS, TABLES = range(6)
"""The files that main shares with a worker, in order: marks of checked units, words that say what
is cancelled, what filling takes, answers that are held back, where stacks are written when main
asks for them; and from TABLES on those of `showing`, if any."""


class RequestKind(IntEnum):
    """The kind of a message from main."""

    FILL = 1
    SCHEMA = 2  # run the transform on sample number `step`, and return the schema of its result
    BLOCK = 3  # a block, whose descriptor is attached
    LAYOUT = 4  # the layout for the schemas that follow, in blocks of at most `step` bytes
    HELLO = 5  # the shared files, for worker number `block` of `n_rows`
    PLAN = 6  # the plan of an iteration's tasks: a packed EpochPlan follows
    CAUTION = 7  # do the next task row by row: the samples to leave out follow, pickled


class Status(IntEnum):
    """The outcome of a task."""

    FILLED = 1  # the skipped samples follow, if there are any
    FAILED = 2  # a pickled exception follows
    CANCELLED = 3
    SCHEMA = 4  # packed Schemas follow
    READY = 5  # not an answer: the worker has started and opened the dataset
    QUICK = 6  # FILLED, in at most QUICK_NS: others may follow in the message


class Task(NamedTuple):
    """Fill `block` with batch number `step` of `epoch`.

    `slot` is the iteration it belongs to: a word of shared memory says whether it is cancelled.
    `use` counts how often the block has been given out; the answer repeats it.
    """

    ask: int
    slot: int
    block: int
    epoch: int
    step: int
    use: int
    n_rows: int


pack_task = _TASK.pack
"""The message of a task, from its words."""


class TaskReply(NamedTuple):
    """The answer to a task: n_rows rows and heap_bytes of varying values are in the block."""

    status: int
    slot: int
    block: int
    step: int
    heap_bytes: int
    use: int
    n_rows: int


pack_done = _DONE.pack
"""Pack a reply, without its payload, from its words."""


def unpack_task(message: bytes) -> Task:
    """Read a task from the first bytes of a message."""
    return tuple.__new__(Task, _TASK.unpack_from(message))


unpack_tasks = _TASK.iter_unpack
"""The words of each task of a message that has nothing else."""
unpack_dones = _DONE.iter_unpack
"""The words of each answer of a message that has nothing else."""


def unpack_done(message: bytes) -> TaskReply:
    """Read an answer from the first bytes of a message."""
    return tuple.__new__(TaskReply, _DONE.unpack_from(message))


def pack_skips(skips: tuple[Skipped, ...]) -> bytes:
    """Pack the skipped samples that follow a reply; empty for none."""
    return pickle.dumps(skips) if skips else b""


def unpack_skips(packed: bytes) -> tuple[Skipped, ...]:
    """Unpack the samples that a worker has skipped."""
    found: tuple[Skipped, ...] = pickle.loads(packed)  # from our own worker, never from data
    return found


class TaskResult(NamedTuple):
    """A worker's reply to a task, with its error, schemas, or skipped samples."""

    worker: int
    done: TaskReply
    error: BaseException | None = None
    schemas: Schemas | None = None
    skips: tuple[Skipped, ...] = ()


class WorkerLost(NamedTuple):
    """A worker has died; another has taken its place, and knows nothing of its tasks.

    `how` is a sentence about it; `end` is how it ended, the same for whichever worker.
    """

    worker: int
    how: str
    signal: int | None = None
    end: str = "died"


_COUNT: Final = 0
_ROOM: Final = mmap.PAGESIZE // DESCRIPTOR_BYTES - 1


def kept_file(n_workers: int) -> int:
    """Make the memory for all workers, a page each; the caller owns the descriptor."""
    fd = memory_file()
    try:
        resize_memory_file(fd, max(1, n_workers) * mmap.PAGESIZE, "answers held back")
    except BaseException:
        os.close(fd)
        raise
    return fd


class ReplyBuffer:
    """The answers that one worker holds back.

    Args:
        memory: the map of the file made by `kept_file`.
        worker: which of the workers it is.
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
        """Hold an answer back that is nothing but a descriptor."""
        n = self._words[_COUNT]
        start = (n + 1) * DESCRIPTOR_BYTES
        self._page[start : start + DESCRIPTOR_BYTES] = answer
        self._words[_COUNT] = n + 1  # set last: everything that it counts is there

    def take(self) -> bytes:
        """Return all replies, concatenated, and empty the buffer."""
        n = self._words[_COUNT]
        self._words[_COUNT] = 0  # reset before sending: no task is both found here and received
        return bytes(self._page[DESCRIPTOR_BYTES : (n + 1) * DESCRIPTOR_BYTES])


# Plain numbers: members of an enum are slow to look up and to compare.
_LAST_OF_WORK, _FILLED, _CANCELLED = (
    int(RequestKind.SCHEMA),
    int(Status.FILLED),
    int(Status.CANCELLED),
)
_FAILED, _SCHEMA, _QUICK = int(Status.FAILED), int(Status.SCHEMA), int(Status.QUICK)


def work(batch_spec: BatchSpec, channel: Channel) -> None:
    """Answer main's tasks until it closes the channel."""

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


def _open(batch_spec: BatchSpec) -> Dataset:
    """Open main's dataset, or its mixture of several, in the same state."""
    if batch_spec.mixed is not None:
        return Mixture.of(batch_spec.mixed, batch_spec.verify, batch_spec.access)
    return ShardDataset(
        batch_spec.path,
        verify=batch_spec.verify,
        access=batch_spec.access,
        subset=batch_spec.subset,
        generation=batch_spec.generation,
        remote=batch_spec.remote,
    )


class BatchWorker(Closing):
    """The state of one worker: dataset, layout, and the blocks it has received.

    Args:
        batch_spec: determines the content of batches.
        send: sends messages to main.
    """

    def __init__(self, batch_spec: BatchSpec, send: Callable[[bytes], None]) -> None:
        self._batch_spec, self._send = batch_spec, send
        # The generation that main has opened, whatever was published since.
        self._dataset = _open(batch_spec)
        self._filler = self._new_filler(batch_spec, self._dataset)
        self._row_by_row = (
            RowByRowFiller(self._filler, batch_spec.seed) if batch_spec.skips else None
        )
        self._left_out: LeftOut | None = None
        """The samples that the next task must not try; None for an ordinary task."""
        self._cancelled = np.zeros(0, np.uint8)
        self._blocks: dict[int, BlockMap] = {}
        self._plans: dict[int, EpochPlan] = {}
        self._layout: BlockLayout | None = None
        self._most_bytes: int | None = None
        self._counters: IterationCounters
        self._kept: ReplyBuffer
        self._start_error: Exception | None = None
        """Why no task can be done: the dataset is not the one that main has opened, or damaged."""

    def close(self) -> None:
        """Close the dataset, and first the decoders and files opened from it."""
        self._filler.close()
        self._dataset.close()

    def _new_filler(self, batch_spec: BatchSpec, dataset: Dataset) -> Filler:
        return Filler(batch_spec, dataset)

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
            schemas = Schemas.unpack(message[DESCRIPTOR_BYTES:])
            self._layout = self._batch_spec.lay_out(schemas)
        elif task.ask == RequestKind.HELLO:
            try:
                self._filler.share_steps(task.n_rows)
                self._accept_hello(message[DESCRIPTOR_BYTES:].decode(), fds, task.block)
            except Exception as error:  # noqa: BLE001  # main gets it with the first answer
                self._start_error = error
            # The error is longer than a reply.
            self._send(pack_done(Status.READY, 0, 0, 0, 0, 0, 0) + b".")

    def _do_all(self, tasks: bytes) -> None:
        """Do one task after the other; answers to quick ones wait a little for each other.

        Not where code of the user runs, which may hang in the next.
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
        """Take over the files that main shares, once all shards have been opened."""
        self._serve_stack_dumps(fds[STACKS])
        self._cancelled = np.frombuffer(mmap.mmap(fds[CANCELLED], 0), np.uint8)
        self._counters, self._kept = (
            IterationCounters(fds[COUNTERS], number),
            self._map_replies(fds[KEPT], number),
        )
        self._compare(lineage)
        self._dataset.files.share_marks(np.frombuffer(mmap.mmap(fds[MARKS], 0), np.uint8))
        apply_view(self._dataset, self._batch_spec, fds[TABLES:])

    def _compare(self, lineage: str) -> None:
        """Make sure that main has opened the dataset that stands here now."""
        if lineage != self._dataset.lineage:
            raise DatasetCorrupt(
                f"{self._dataset.path}: another dataset has taken the place of the one that the "
                f"loader opened: expected lineage {lineage}, found {self._dataset.lineage}"
            )

    def _do(self, task: Task) -> tuple[int, bytes]:
        """Return the status of a task, and its reply."""
        n_rows = heap_bytes = 0
        status, rest = _CANCELLED, b""
        try:
            if self._start_error is not None:
                raise self._start_error
            if task.ask == _LAST_OF_WORK:
                status, rest = _SCHEMA, self._filler.schemas(task.step).pack()
            elif not self._cancelled[task.slot]:
                status, n_rows, heap_bytes, rest = self._fill(task)
            else:
                self._left_out = None
        except Exception as error:  # noqa: BLE001  # main gets it, and raises it there
            status, rest = _FAILED, pack_error(error)
        done = pack_done(status, task.slot, task.block, task.step, heap_bytes, task.use, n_rows)
        return status, done + rest

    def _fill(self, task: Task) -> tuple[int, int, int, bytes]:
        if self._layout is None:
            raise AssertionError("main sends the layout before the first batch")
        memory = self._blocks[task.block]
        if self._layout.has_heap:  # only these blocks can grow
            memory.note_growth()
        plan, start_ns, rest = self._plans[task.slot], self._counters.start(), b""
        if self._row_by_row is None:
            n_rows, heap_bytes = self._filler.fill(self._layout, memory, plan, task.step)
        else:
            left_out, self._left_out = self._left_out, None
            n_rows, heap_bytes, skips = self._row_by_row.fill(
                self._layout, memory, plan, task.step, left_out
            )
            rest = pack_skips(skips)
        taken_ns = self._counters.add(task.slot, task.step, start_ns)
        status = _FILLED if rest or taken_ns > QUICK_NS else _QUICK
        return status, n_rows, heap_bytes, rest
