"""A worker of a MultiLoader: when it may send, and how main reads its messages."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardio._workers.processes import channel as channel_module
from shardio._workers.processes.channel import Channel
from shardio._workers.processes.shared_memory import reserve_memory_file
from shardio._workers.tasks import values
from shardio._workers.tasks.failure_policy import ErrorBudget
from shardio._workers.tasks.messages import (
    MessageBatch,
    MessageKind,
    pack_head,
    unpack_head,
    unpack_sample,
    unpack_samples,
)
from shardio._workers.tasks.sample_sender import WORD, Command, _MainExited, _Sender
from shardio._workers.tasks.sample_stream import SampleStream
from shardio.errors import InsufficientMemory, UnsupportedEnvironment, WorkerDied


class Sent(list[Any]):
    """A socket that keeps what it is given."""

    def send(self, frame: bytes, **how: object) -> None:
        self.append(unpack_head(frame))

    def send_multipart(self, frames: list[bytes]) -> None:
        self.send(frames[0])


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    main, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with main, worker:
        yield main, Channel(0, worker, ())


def _size(sample: object) -> int:
    sheaf = MessageBatch(0)
    sheaf.add(sample)
    return sheaf.n_bytes


def test_a_worker_sends_as_much_as_there_is_room_for(ends: tuple[socket.socket, Channel]) -> None:
    main, channel = ends
    main.shutdown(socket.SHUT_WR)
    sent = Sent()
    with pytest.raises(_MainExited):
        _Sender(sent, channel, 10 * _size("x") + 5).send_samples(["x"] * 20, None)
    assert sent[1:] == [(MessageKind.SAMPLES, 0, number, 1) for number in range(10)]


def test_a_large_sample_waits_for_a_block_until_main_has_gone(
    ends: tuple[socket.socket, Channel],
) -> None:
    main, channel = ends
    main.shutdown(socket.SHUT_WR)
    for has_gone in (False, True):
        if has_gone:
            main.close()
        with pytest.raises(_MainExited):
            _Sender(Sent(), channel, 1 << 20).send_samples([np.zeros(1 << 20)], None)


def test_a_sample_for_whose_arrays_there_is_no_memory_fails_alone(
    ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, channel = ends
    block = reserve_memory_file(4096, "a block")
    socket.send_fds(main, [WORD.pack(Command.BLOCK, 0)], [block])
    os.close(block)
    main.shutdown(socket.SHUT_WR)

    def refuse(n_bytes: int, what: str, hint: str) -> None:
        raise InsufficientMemory(what)

    monkeypatch.setattr(values, "require", refuse)
    sent = Sent()
    samples = ["a", "b", np.zeros(1 << 20), "c"]
    with _Sender(sent, channel, 1 << 30) as outbox:
        outbox.send_samples(samples, 9)
    numbers = [(number, n) for kind, _, number, n in sent if kind == MessageKind.SAMPLES]
    assert [first + i for first, n in numbers for i in range(n)] == [0, 1, 3]
    assert [head[2] for head in sent if head[0] == MessageKind.SKIPPED] == [2]
    assert sent[-1] == (MessageKind.END, 0, 4, 0)


def test_a_block_whose_message_cannot_be_made_is_filled_with_the_next_sample(
    ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, channel = ends
    block = reserve_memory_file(1 << 20, "a block")
    socket.send_fds(main, [WORD.pack(Command.BLOCK, 0)], [block])
    os.close(block)
    main.shutdown(socket.SHUT_WR)
    frames, places = MessageBatch.frames, list[Any]()

    def refuse_once(self: MessageBatch, first: int, place: Any = None) -> list[Any]:
        places.append(place)
        if len(places) == 1:
            raise MemoryError
        return frames(self, first, place)

    monkeypatch.setattr(MessageBatch, "frames", refuse_once)
    sent = Sent()
    with _Sender(sent, channel, 1 << 30) as outbox:
        outbox.send_samples([np.zeros(1 << 16), np.ones(1 << 16)], 9)
    assert [head[0] for head in sent[1:]] == [
        MessageKind.SKIPPED,
        MessageKind.IN_BLOCK,
        MessageKind.END,
    ]
    assert [number for number, _ in places] == [0, 0]


def test_a_block_whose_descriptor_is_lost_is_an_error_and_not_waited_for(
    ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, channel = ends
    monkeypatch.setattr(channel_module, "unpack_fds", lambda *received: lose())
    socket.send_fds(main, [WORD.pack(Command.BLOCK, 0)], [main.fileno()])
    main.shutdown(socket.SHUT_WR)
    sent = Sent()
    _Sender(sent, channel, 1 << 30).send_samples(["a", np.zeros(1 << 20)], None)
    assert sent[-2:] == [(MessageKind.SAMPLES, 0, 0, 1), (MessageKind.FAILED, 0, 1, 0)]


def lose() -> tuple[int, ...]:
    raise UnsupportedEnvironment("file descriptors were lost")


def test_what_main_has_handed_over_makes_room(ends: tuple[socket.socket, Channel]) -> None:
    main, channel = ends
    for _ in range(3):
        main.send(WORD.pack(Command.CREDIT, 2 * _size("x")))
    main.shutdown(socket.SHUT_WR)
    sent = Sent()
    with pytest.raises(_MainExited):
        _Sender(sent, channel, 4 * _size("x")).send_samples(["x"] * 20, None)
    assert len(sent[1:]) == 4 + 3 * 2


def test_a_worker_says_how_many_samples_it_sent_and_stays_until_main_has_them(
    ends: tuple[socket.socket, Channel],
) -> None:
    main, channel = ends
    for message in (WORD.pack(Command.CREDIT, 1), WORD.pack(Command.GOODBYE, 0), b"more"):
        main.send(message)
    sent = Sent()
    outbox = _Sender(sent, channel, 1000)
    outbox.send_samples("abc", None)
    outbox.await_goodbye()
    assert (sent[0], sent[-1]) == ((MessageKind.HELLO, 0, 0, 0), (MessageKind.END, 0, 3, 0))
    assert channel.recv() == b"more"


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (pack_head(MessageKind.END, 0, 7), "worker 0 sent 7 samples, and 0 arrived"),
        (pack_head(MessageKind.SAMPLES, 0, 1, 1), "worker 0 sent 1 samples, and 0 arrived"),
    ],
)
def test_a_sample_that_is_lost_is_an_error(head: bytes, said: str) -> None:
    with SampleStream(
        [],
        1,
        prefix="",
        most_bytes=1,
        timeout_s=None,
        start="zygote",
        error_budget=ErrorBudget(None),
        say=lambda line: None,
    ) as gathering:
        gathering._saved.append([head])
        with pytest.raises(WorkerDied, match=said):
            next(gathering)


def test_samples_that_come_quickly_travel_together_and_none_waits_for_another(
    ends: tuple[socket.socket, Channel],
) -> None:
    _, channel = ends
    all_sent = threading.Event()

    class Counting(Sent):
        def send(self, frame: bytes, **how: object) -> None:
            super().send(frame)
            if sum(n for *_, n in self) == 200:
                all_sent.set()

    def samples() -> Iterator[int]:
        yield from range(200)
        assert all_sent.wait(60)

    sent = Counting()
    with _Sender(sent, channel, 1 << 20) as outbox:
        outbox.send_samples(samples(), None)
    numbers = [range(first, first + n) for kind, _, first, n in sent if kind == MessageKind.SAMPLES]
    assert list(itertools.chain(*numbers)) == list(range(200))
    assert sent[-1] == (MessageKind.END, 0, 200, 0)


def test_a_sheaf_gives_its_samples_as_they_were_when_they_came() -> None:
    array = np.zeros(3)
    sheaf = MessageBatch(1)
    for number in range(3):
        array[:] = number
        sheaf.add({"number": number, "array": array})
    with pytest.raises(TypeError, match="pickle"):
        sheaf.add([np.zeros(1 << 20), threading.Lock()])
    sheaf.add(np.arange(1 << 18, dtype=np.uint8))
    (first, apart) = sheaf.frames(5)
    assert unpack_head(first) == (MessageKind.SAMPLES, 1, 5, 4)
    frame = np.frombuffer(apart, np.uint8)
    *small, large = (unpack_sample(*each) for each in unpack_samples([first, frame], 4))
    assert [(s["number"], s["array"].tolist()) for s in small] == [(i, [i] * 3) for i in range(3)]
    assert np.array_equal(large, np.arange(1 << 18, dtype=np.uint8))


def test_a_sheaf_is_as_it_was_when_its_last_sample_is_taken_back() -> None:
    sheaf = MessageBatch(0)
    sheaf.add("x")
    (before, n_bytes) = sheaf.frames(0), sheaf.n_bytes
    sheaf.add(np.zeros(1 << 20))
    assert len(sheaf.frames(0)) == 2
    sheaf.take_back()
    assert (sheaf.frames(0), sheaf.n_bytes, len(sheaf)) == (before, n_bytes, 1)


def test_a_class_that_only_cloudpickle_knows_has_its_arrays_apart() -> None:
    sheaf = MessageBatch(0)
    sheaf.add(dataclasses.make_dataclass("Local", ["pixels"])(np.zeros(1 << 20, np.uint8)))
    assert [buffer.raw().nbytes for buffer in sheaf.apart] == [1 << 20]
