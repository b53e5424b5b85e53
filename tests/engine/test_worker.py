from __future__ import annotations

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
    pack,
    replies_file,
    unpack,
    unpack_all,
)
from shardio._engine.filling.batch_spec import BatchSpec
from shardio.samples.shard_dataset import DatasetSource

FILLED, QUICK, FAILED, CANCELLED = Status.FILLED, Status.QUICK, Status.FAILED, Status.CANCELLED


class Scripted(BatchWorker):
    """A worker that does nothing, and whose tasks end as they are told."""

    def __init__(self, ends: list[tuple[Status, bytes]], batch_spec: BatchSpec, fd: int) -> None:
        self.sent: list[bytes] = []
        self._send = self.sent.append
        self._ends, self._batch_spec = ends, batch_spec
        self._kept = ReplyBuffer(mmap.mmap(fd, 0), 1)

    def _do(self, *task: int) -> tuple[int, bytes]:
        step = Task(*task).step
        status, rest = self._ends[step]
        return status, pack(status, 0, 0, step, 0, 0, 0) + rest


def answers(*ends: tuple[Status, bytes], **options: Any) -> list[list[tuple[int, int, bytes]]]:
    batch_spec = BatchSpec(DatasetSource("set"), ("x",), 1, 9, False, 0, **options)
    fd = replies_file(2)
    worker = Scripted(list(ends), batch_spec, fd)
    os.close(fd)
    tasks = [Task(RequestKind.FILL, 0, 0, 0, step, 0, 0) for step in range(len(ends))]
    worker.take(b"".join(pack(*task) for task in tasks), ())
    found = []
    for message in worker.sent:
        status, _, _, step, *_ = unpack(message)
        if status == FAILED:
            found.append([(status, step, message[32:])])
        else:
            found.append([(words[0], words[3], b"") for words in unpack_all(message)])
    return found


ONE_QUICK = (QUICK, b"")


@pytest.mark.parametrize(
    ("ends", "options", "sizes"),
    [
        ([ONE_QUICK] * 3, {}, [3]),
        ([(FILLED, b""), ONE_QUICK, (FILLED, b""), ONE_QUICK], {}, [1, 2, 1]),
        ([(CANCELLED, b""), ONE_QUICK, (CANCELLED, b""), ONE_QUICK], {}, [1, 2, 1]),
        ([ONE_QUICK, (FAILED, b"x" * 32), ONE_QUICK], {}, [1, 1, 1]),
        ([ONE_QUICK] * 2, {"batch_transform": dict}, [1, 1]),
    ],
    ids=["quick", "slow", "cancelled", "failed", "the next task may hang"],
)
def test_quick_answers_are_held_back_until_another_is_due(
    monkeypatch: pytest.MonkeyPatch, ends: Any, options: dict[str, Any], sizes: list[int]
) -> None:
    monkeypatch.setattr(worker, "now_ns", lambda: 0)
    found = answers(*ends, **options)
    assert [len(message) for message in found] == sizes
    expected = [(status, step, rest) for step, (status, rest) in enumerate(ends)]
    assert [each for message in found for each in message] == expected


def test_what_a_worker_held_back_is_found_once() -> None:
    fd = replies_file(3)
    theirs, memory = ReplyBuffer(mmap.mmap(fd, 0), 1), mmap.mmap(fd, 0)
    ours, other = ReplyBuffer(memory, 1), ReplyBuffer(memory, 2)
    os.close(fd)
    assert ours.take() == b""
    theirs.add(b"a" * 32)
    theirs.add(b"b" * 32)
    assert other.take() == b""
    assert ours.take() == b"a" * 32 + b"b" * 32
    assert theirs.take() == ours.take() == b""
