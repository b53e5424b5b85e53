"""The messages between main and batch workers: descriptors of 32 bytes. Pixels never travel.

Main sends a `Task` (fill this block with that batch); the worker answers with a `TaskReply`. A
message may hold several of either: tasks assigned at the same time, and replies of which the first
is QUICK. The bytes of a failure, of skipped samples or of requested schemas follow the reply in the
same message (or in a file, see `pack_message`). Other messages of main deliver the blocks' memory
and the schemas that blocks are laid out by.

A worker holds quick replies back for a moment, in a `ReplyBuffer` that main reads if the worker
exits: its finished tasks are not repeated, which might be impossible if the file that crashed it is
too short to be opened again.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from shardio._engine.filling.batch_spec import Schemas
from shardio._workers.processes.channel import DESCRIPTOR_BYTES
from shardio._workers.processes.linux import memory_file, resize_memory_file
from shardio.batch.batch import Skipped

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
