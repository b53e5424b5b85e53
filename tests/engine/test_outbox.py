"""What a worker of a MultiLoader may send, and what main makes of what it says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from shardio._engine.channel import Channel
from shardio._engine.gathering import Gathering
from shardio._engine.mail import Kind, counted_bytes, pack_head, pack_sample, unpack_head
from shardio._engine.outbox import CREDIT, GOODBYE, _MainHasGone, _Outbox
from shardio.errors import WorkerDied


class Sent(list[Any]):
    """A socket that keeps what it is given."""

    def send(self, frame: bytes, **how: object) -> None:
        self.append(unpack_head(frame))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    main, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with main, worker:
        yield main, Channel(0, worker, ())


def _size(sample: object) -> int:
    return counted_bytes(map(len, pack_sample(sample, 0, 0)))


def test_a_worker_sends_as_much_as_there_is_room_for(ends: tuple[socket.socket, Channel]) -> None:
    main, channel = ends
    main.shutdown(socket.SHUT_WR)
    sent = Sent()
    with pytest.raises(_MainHasGone):
        _Outbox(sent, channel, 10 * _size("x") + 5).send_samples(["x"] * 20)
    assert sent[1:] == [(Kind.SAMPLE, 0, number) for number in range(10)]


def test_what_main_has_handed_over_makes_room(ends: tuple[socket.socket, Channel]) -> None:
    main, channel = ends
    for _ in range(3):
        main.send(CREDIT.pack(2 * _size("x")))
    main.shutdown(socket.SHUT_WR)
    sent = Sent()
    with pytest.raises(_MainHasGone):
        _Outbox(sent, channel, 4 * _size("x")).send_samples(["x"] * 20)
    assert len(sent[1:]) == 4 + 3 * 2


def test_a_worker_says_how_many_samples_it_sent_and_stays_until_main_has_them(
    ends: tuple[socket.socket, Channel],
) -> None:
    main, channel = ends
    for message in (CREDIT.pack(1), GOODBYE, b"more"):
        main.send(message)
    sent = Sent()
    outbox = _Outbox(sent, channel, 1000)
    outbox.send_samples("abc")
    outbox.await_goodbye()
    assert (sent[0], sent[-1]) == ((Kind.HELLO, 0, 0), (Kind.END, 0, 3))
    assert channel.recv() == b"more"


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (pack_head(Kind.END, 0, 7), "worker 0 sent 7 samples, and 0 arrived"),
        (pack_head(Kind.SAMPLE, 0, 1), "of worker 0, sample 0 was lost"),
    ],
)
def test_a_sample_that_is_lost_is_an_error(
    head: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taken(bytes):
        buffer = b""

    with Gathering(
        [], 1, prefix="", most_bytes=1, timeout_s=None, start="zygote", say=lambda line: None
    ) as gathering:
        monkeypatch.setattr(gathering, "_take", lambda: [Taken(head)])
        with pytest.raises(WorkerDied, match=said):
            next(gathering)
