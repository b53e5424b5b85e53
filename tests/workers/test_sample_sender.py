"""A worker of a MultiLoader: when it may send, and how main reads its messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest

from shardio import MultiLoader
from shardio._workers.processes.shared_memory import reserve_memory_file
from shardio._workers.processes.worker_main import Channel
from shardio._workers.tasks import values, zeromq
from shardio._workers.tasks.values import pack_value, read_value, split_values
from shardio._workers.tasks.zeromq import (
    HEAD,
    OVERHEAD_BYTES,
    Command,
    MainExited,
    MessageKind,
    SampleSender,
)
from shardio.errors import InsufficientMemory, WorkerDied


class Sent(list[Any]):
    """A socket that keeps the head and payload of what it is given."""

    def send(self, message: bytes) -> None:
        kind, _, number = HEAD.unpack_from(message)
        self.append((kind, number, message[HEAD.size :]))

    @property
    def heads(self) -> list[tuple[int, int]]:
        return [(kind, number) for kind, number, _ in self]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    main, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with main, worker:
        yield main, Channel(0, worker, ())


def sent_by(
    channel: Channel, samples: Iterable[Any], *, may_skip: bool = False, n_bytes: int = 1 << 30
) -> Sent:
    """Return what a worker sends until main has gone."""
    sent = Sent()
    sender = SampleSender(sent, channel, n_bytes, may_skip=may_skip)
    try:
        sender.send_samples(samples)
    except MainExited:
        sent.append((None, len(sent), b""))
    return sent


def test_a_large_sample_waits_until_main_has_gone(ends: tuple[socket.socket, Channel]) -> None:
    main, channel = ends
    main.shutdown(socket.SHUT_WR)
    for has_gone in (False, True):
        if has_gone:
            main.close()
        assert sent_by(channel, [np.zeros(1 << 20)]).heads[-1][0] is None


@pytest.mark.parametrize("end", [MessageKind.END, MessageKind.FAILED, MessageKind.SKIPPED])
def test_small_samples_share_a_message_in_order(
    ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch, end: MessageKind
) -> None:
    monkeypatch.setattr(zeromq, "_HOLD_S", 60)  # only the first sample is sent at once
    reused = np.zeros(10)

    def samples() -> Iterator[Any]:
        for reused[:] in range(5):
            yield reused
        if end != MessageKind.END:
            raise ValueError

    sent = sent_by(ends[1], samples(), may_skip=end == MessageKind.SKIPPED)
    assert sent.heads[:3] == [(MessageKind.SAMPLES, 0), (MessageKind.SAMPLES, 1), (end, 5)]
    parts = [part for _, _, payload in sent[:2] for part in split_values(memoryview(payload))]
    assert [read_value(part).tolist() for part in parts] == [[n] * 10 for n in range(5)]


def test_a_sample_with_buffers_ends_a_message(
    ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "_HOLD_S", 60)
    wide = np.arange(30_000, dtype=np.uint8)
    sent = sent_by(ends[1], ["a", "b", "c", wide, "d"])
    assert sent.heads == [
        *((MessageKind.SAMPLES, number) for number in (0, 1, 4)),
        (MessageKind.END, 5),
    ]
    *small, large = map(read_value, split_values(memoryview(sent[1][2])))
    assert small == ["b", "c"]
    assert np.array_equal(large, wide)


def test_held_samples_are_sent_before_a_wait_for_credit(
    ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, channel = ends
    main.shutdown(socket.SHUT_WR)
    monkeypatch.setattr(zeromq, "_HOLD_S", 60)
    sent = sent_by(channel, [0] * 1000, n_bytes=100_000)
    assert sent[-1][0] is None
    n_sent = sum(len([*split_values(memoryview(payload))]) for _, _, payload in sent[:-1])
    assert n_sent == 100_000 // (pack_value(0).n_bytes + OVERHEAD_BYTES)


def test_no_sample_is_held_if_no_thread_can_start(
    ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refuse)
    monkeypatch.setattr(zeromq, "_HOLD_S", 60)
    sent = sent_by(ends[1], range(3))
    assert sent.heads == [*((MessageKind.SAMPLES, n) for n in range(3)), (MessageKind.END, 3)]


def lend_block(main: socket.socket, n_bytes: int) -> int:
    block = reserve_memory_file(n_bytes, "a block")
    socket.send_fds(main, [zeromq.WORD.pack(Command.BLOCK, 0)], [block])
    return block


def test_short_memory(ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    main, channel = ends
    os.close(lend_block(main, 4096))
    main.shutdown(socket.SHUT_WR)

    def refuse_much(n_bytes: int, what: str, hint: str) -> None:
        if n_bytes > 1 << 20:
            raise InsufficientMemory(what)

    monkeypatch.setattr(values, "require", refuse_much)
    samples = ["a", "b", np.zeros(1 << 20), np.zeros(1 << 14), "c"]
    sent = sent_by(channel, samples, may_skip=True)
    kinds = [MessageKind.SAMPLES, MessageKind.SAMPLES, MessageKind.SKIPPED, MessageKind.IN_BLOCK]
    assert sent.heads[:4] == list(zip(kinds, range(4), strict=True))
    assert zeromq.BLOCK_AND_SIZE.unpack(sent[3][2]) == (0, pack_value(samples[3]).n_bytes)
    assert sent.heads[4:] == [(MessageKind.SAMPLES, 4), (MessageKind.END, 5)]


def test_inner_forks(ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    main, channel = ends
    block = lend_block(main, 1 << 20)
    main.shutdown(socket.SHUT_WR)
    sender = SampleSender(Sent(), channel, 1 << 30, may_skip=False)
    sender._ask_for_block()
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sender, "_pid", 0)
    with pytest.raises(SystemExit):
        sender._send_sample(np.ones(1 << 14))
    assert not any(os.pread(block, 1 << 17, 0))
    os.close(block)


@pytest.mark.process
@pytest.mark.parametrize("kind", [MessageKind.END, MessageKind.SAMPLES])
def test_a_sample_that_is_lost_is_an_error(kind: MessageKind) -> None:
    stream: Any = iter(MultiLoader([], 1))
    stream._saved.append(HEAD.pack(kind, 0, 7))
    with pytest.raises(WorkerDied, match="worker 0 sent 7 samples, and 0 arrived"):
        next(stream)
