from __future__ import annotations

import itertools
import mmap
import os
from typing import Any

import pytest

from shardio._engine.dispatch import worker
from shardio._engine.dispatch.worker import (
    BatchWorker,
    ReplyBuffer,
    RequestKind,
    Status,
    Task,
    kept_file,
    pack_done,
    pack_task,
    unpack_done,
    unpack_dones,
)
from shardio._engine.filling.batch_spec import BatchSpec
from shardio._workers.tasks.schedule import QUICK_NS
from shardio.samples.shard_dataset import DatasetSource

FILLED, QUICK, FAILED, CANCELLED = Status.FILLED, Status.QUICK, Status.FAILED, Status.CANCELLED


class Scripted(BatchWorker):
    """A worker that does nothing, and whose tasks end as they are told."""

    def __init__(self, ends: list[tuple[Status, bytes]], batch_spec: BatchSpec, fd: int) -> None:
        self.sent: list[bytes] = []
        self._send = self.sent.append
        self._ends, self._batch_spec, self._kept = (
            ends,
            batch_spec,
            ReplyBuffer(mmap.mmap(fd, 0), 1),
        )

    def _do(self, task: Task) -> tuple[int, bytes]:
        status, rest = self._ends[task.step]
        return status, pack_done(status, 0, 0, task.step, 0, 0, 0) + rest


def answers(*ends: tuple[Status, bytes], **options: Any) -> list[list[tuple[int, int, bytes]]]:
    """Return status, step and rest of each message that a worker sends for these tasks."""
    batch_spec = BatchSpec(DatasetSource("set"), ("x",), 1, 9, False, 0, **options)
    fd = kept_file(2)
    worker = Scripted(list(ends), batch_spec, fd)
    os.close(fd)
    tasks = [Task(RequestKind.FILL, 0, 0, 0, step, 0, 0) for step in range(len(ends))]
    worker.take(b"".join(pack_task(*task) for task in tasks), ())
    found = []
    for message in worker.sent:
        status, _, _, step, *_ = unpack_done(message)
        if status == FAILED:
            found.append([(status, step, message[32:])])
        else:
            found.append([(words[0], words[3], b"") for words in unpack_dones(message)])
    return found


@pytest.fixture
def _clock_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "now_ns", lambda: 0)


@pytest.mark.usefixtures("_clock_that_stands")
def test_answers_to_quick_tasks_come_in_one_message() -> None:
    assert answers((QUICK, b""), (QUICK, b""), (QUICK, b"")) == [
        [(QUICK, 0, b""), (QUICK, 1, b""), (QUICK, 2, b"")]
    ]


@pytest.mark.usefixtures("_clock_that_stands")
@pytest.mark.parametrize("status", [FILLED, CANCELLED])
def test_what_is_not_quick_is_answered_at_once_with_what_was_held_back(status: Status) -> None:
    assert answers((status, b""), (QUICK, b""), (status, b""), (QUICK, b"")) == [
        [(status, 0, b"")],
        [(QUICK, 1, b""), (status, 2, b"")],
        [(QUICK, 3, b"")],
    ]


@pytest.mark.usefixtures("_clock_that_stands")
def test_a_failure_is_a_message_of_its_own_behind_what_was_held_back() -> None:
    assert answers((QUICK, b""), (FAILED, b"x" * 32), (QUICK, b"")) == [
        [(QUICK, 0, b"")],
        [(FAILED, 1, b"x" * 32)],
        [(QUICK, 2, b"")],
    ]


@pytest.mark.usefixtures("_clock_that_stands")
def test_nothing_is_held_back_where_the_next_task_may_hang() -> None:
    found = answers((QUICK, b""), (QUICK, b""), batch_transform=dict)
    assert [len(message) for message in found] == [1, 1]


@pytest.mark.usefixtures("_clock_that_stands")
def test_more_than_there_is_room_for_is_not_held_back() -> None:
    assert sum(map(len, answers(*[(QUICK, b"")] * 300))) == 300


def test_what_a_worker_held_back_is_found_once() -> None:
    fd = kept_file(3)
    theirs, memory = ReplyBuffer(mmap.mmap(fd, 0), 1), mmap.mmap(fd, 0)
    ours, other = ReplyBuffer(memory, 1), ReplyBuffer(memory, 2)
    os.close(fd)
    assert ours.take() == b""
    theirs.add(b"a" * 32)
    theirs.add(b"b" * 32)
    assert other.take() == b""
    assert ours.take() == b"a" * 32 + b"b" * 32
    assert theirs.take() == ours.take() == b""


def test_nothing_is_held_back_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "now_ns", itertools.count(0, QUICK_NS // 2 + 1).__next__)
    found = answers(*[(QUICK, b"")] * 5)
    assert [len(message) for message in found] == [2, 2, 1]
