"""A worker's loop: take a task, fill the block, answer. Imports neither tinygrad nor `__main__`.

Runs in a worker process, as the target of a `WorkerPool`, or in a thread of main, under
`ThreadWorkers`.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable

import numpy as np

from shardio._base.classes import Closing
from shardio._base.statistics import now_ns
from shardio._engine.dispatch.counters import IterationCounters
from shardio._engine.dispatch.protocol import (
    CANCELLED,
    COUNTERS,
    KEPT,
    MARKS,
    STACKS,
    TABLES,
    ReplyBuffer,
    RequestKind,
    Status,
    Task,
    pack_done,
    pack_skips,
    unpack_task,
    unpack_tasks,
)
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
from shardio._workers.processes.linux import keep_freed_memory, yield_to_main
from shardio._workers.processes.serialization import pack_error
from shardio._workers.processes.stack_dumps import answer_with_stacks
from shardio._workers.tasks.schedule import QUICK_NS
from shardio.batch.layout import BlockLayout
from shardio.dataset.dataset import Dataset, ShardDataset
from shardio.dataset.mixture import Mixture
from shardio.errors import DatasetCorrupt

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
            self._plans[task.slot] = EpochPlan.unpack(message[DESCRIPTOR_BYTES:], fds)
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
