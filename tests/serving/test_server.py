from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shardio
from shardio import InvalidArgument, ShardLoader
from shardio._workers.tasks.zeromq import zeromq
from shardio.errors import ClosedError, InsufficientMemory, UnsupportedEnvironment
from shardio.serving import Server, make_server
from shardio.serving.client.connection import Link
from shardio.serving.client.protocol import VERSION, MalformedMessage, pack, parse
from shardio.serving.session import MAX_AHEAD, Session
from tests.loading import PATIENCE_S, bits
from tests.serving.served import FREE, HOW, few_files, local_bits, serving, wait_until


@contextlib.contextmanager
def _peer(address: str) -> Iterator[Any]:
    """Open a socket of ZeroMQ that sends what no loader would."""
    zmq = zeromq()
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.linger = 0
        made.connect(address)
        yield made


@pytest.fixture
def peer(server: Server) -> Iterator[Any]:
    with _peer(server.address) as made:
        yield made


def _loads(path: str, server: Server) -> None:
    with shardio.connect(server.address, 7, **HOW) as far:
        assert list(map(bits, far)) == local_bits(path, 7)


@pytest.mark.parametrize(
    ("bind", "options", "said"),
    [
        ("tcp://*:5555", {}, "reachable from other machines and therefore needs keys"),
        ("tcp://[::]:5555", {}, "reachable from other machines and therefore needs keys"),
        (FREE, {"num_workers": -1}, "num_workers"),
        (FREE, {"memory_bytes": 0}, "memory_bytes"),
        (FREE, {"max_clients": 0}, "max_clients"),
        (FREE, {"transform": 7}, "transform"),
        (FREE, {"batch_transform": globals}, "batch_transform"),
        (None, {}, "cannot listen there"),
    ],
    ids=str,
)
def test_what_no_client_could_use_is_refused_at_once(
    path: str, server: Server, bind: str | None, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        make_server(path, bind or server.address, **options)  # of the other server: in use


def test_missing_zeromq(path: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    for use in (lambda: make_server(path, FREE), lambda: shardio.connect(server.address, 4, **HOW)):
        with pytest.raises(UnsupportedEnvironment, match=r"pip install '\.\[zmq\]'"):
            use()


def test_bytes_that_are_no_zeromq_do_not_disturb_it(path: str, server: Server) -> None:
    address = parse(server.address)
    for content in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 64, b""):
        with socket.create_connection((address.host, int(address.port))) as raw:
            raw.sendall(content)
    _loads(path, server)


@pytest.mark.parametrize(
    "frames",
    [
        [b"{"],
        [pickle.dumps(print)],
        [pack("open")],
        [pack("open", version=VERSION, token="short", most_bytes=1, options={})],
        [pack("open", version=VERSION, token="0" * 32, most_bytes=-1, options={})],
        [pack("open", version=VERSION, token="0" * 32, most_bytes=1, options=[])],
        [b"{}"] * 40,
        [os.urandom(1 << 20)],
    ],
    ids=range(8),
)
def test_messages_that_are_none_are_dropped(peer: Any, server: Server, frames: list[bytes]) -> None:
    before = server.n_malformed
    peer.send_multipart(frames)
    wait_until(lambda: server.n_malformed > before)
    assert server.sessions == []


def test_too_large_a_message_is_not_received(path: str, peer: Any, server: Server) -> None:
    before = server.n_malformed
    peer.send(bytes(5 << 20))
    _loads(path, server)
    assert server.n_malformed == before


@pytest.mark.parametrize(
    "options",
    [
        {"transform": "x"},
        {"clip": {"around": "x", "lead": 10**400}},
        {"batch_size": {}, "sampler": [[1], "x"]},
        {"sound": {"seconds": "1e999999999"}},
        {"seed": -1},
    ],
    ids=range(5),
)
def test_wrong_options_are_answered(peer: Any, server: Server, options: dict[str, Any]) -> None:
    peer.send(pack("open", version=VERSION, token="2" * 32, most_bytes=1, options=options))
    assert _only_beats(_hear(peer, '"failed"'))
    peer.send(pack("close"))
    wait_until(lambda: not server.sessions)


@pytest.mark.parametrize("garbled", ["credit", "iterate", "check"])
def test_nonsense_within_a_session_ends_nothing(peer: Any, server: Server, garbled: str) -> None:
    more = {"most_bytes": 1 << 30, "options": {"batch_size": 4}}
    peer.send(pack("open", version=VERSION, token="1" * 32, **more))
    assert _only_beats(_hear(peer, '"opened"'))
    peer.send(pack(garbled, number="x", state=7, ahead=1 << 40, upto=None))
    peer.send(pack("check", state={}))
    _hear(peer, "load_state_dict")
    peer.send(pack("close"))
    wait_until(lambda: not server.sessions)


def _opening(number: int, **more: Any) -> bytes:
    asked = {"most_bytes": 1 << 30, "options": {"batch_size": 4}, **more}
    return pack("open", version=VERSION, token=f"{number:032}", **asked)


def _hear(peer: Any, words: str) -> list[bytes]:
    """Read up to the message that has these words; returns what was said before it."""
    end_s, said = time.monotonic() + PATIENCE_S, list[bytes]()
    while not said or words.encode() not in said[-1]:
        left_s = max(0.0, end_s - time.monotonic())
        assert peer.poll(left_s * 1000), f"nobody said {words}; the last was {said[-1:]!r:.200}"
        said.append(peer.recv())
    return said[:-1]


def _only_beats(said: list[bytes]) -> bool:
    return all(b'"heartbeat"' in each for each in said)


def test_a_session_opened_with_nonsense_ends(peer: Any, path: str, server: Server) -> None:
    peer.send(_opening(3, options={"seed": -1}))
    _hear(peer, '"failed"')
    wait_until(lambda: not any(each.is_running for each in server.sessions))
    peer.send(_opening(3, options=[]))
    peer.send(pack("stop", number=1))
    _hear(peer, '"no_session"')
    _loads(path, server)


def test_a_connection_has_one_session(peer: Any, server: Server) -> None:
    for number in range(4):
        peer.send(_opening(number))
        _hear(peer, '"opened"')
        assert len(server.sessions) == 1
    peer.send(pack("close"))
    wait_until(lambda: not server.sessions)


def test_a_reconnected_session_leaves_its_old_peer(peer: Any, server: Server) -> None:
    peer.send(_opening(5))
    _hear(peer, '"opened"')
    with _peer(server.address) as second:
        second.send(_opening(5))
        _hear(second, '"opened"')
        peer.send(pack("close"))
        peer.send(pack("stop", number=1))
        _hear(peer, '"no_session"')
        assert len(server.sessions) == 1
        second.send(pack("close"))
        wait_until(lambda: not server.sessions)


def test_a_session_keeps_so_many_questions_and_no_more() -> None:
    going = threading.Event()

    def make_loader(options: dict[str, Any]) -> ShardLoader:
        going.wait()
        raise KeyError

    session = Session({"options": {}, "most_bytes": 1}, make_loader, {}, lambda *_: None)
    for _ in range(16):
        session.accept({"kind": "check"})
    with pytest.raises(MalformedMessage, match="without an answer"):
        session.accept({"kind": "check"})
    session.accept({"kind": "open"})  # which nobody has to wait for
    session.accept({"kind": "check"})
    going.set()
    session.join(PATIENCE_S)
    assert not session.is_running


def test_a_loader_whose_state_cannot_be_sent_is_closed_and_reported(path: str) -> None:
    said, made = list[bytes](), list[ShardLoader]()

    def make_loader(options: dict[str, Any]) -> ShardLoader:
        made.append(ShardLoader(path, 2, num_workers=0, output="numpy"))
        made[0].state_dict = lambda: {1: {2}}  # type: ignore[method-assign, dict-item]
        return made[0]

    asked = {"options": {}, "most_bytes": 1}
    session = Session(asked, make_loader, {}, lambda _, frames: said.extend(frames))
    session.join(PATIENCE_S)
    assert b'"failed"' in said[-1] and not session.is_running
    with pytest.raises(ClosedError):
        iter(made[0])


def test_ending_sessions_are_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    with serving(path, max_clients=1) as server, _peer(server.address) as peer:
        make_loader = server._make_loader

        def make_late(options: dict[str, Any]) -> ShardLoader:
            going.wait()
            return make_loader(options)

        monkeypatch.setattr(server, "_make_loader", make_late)
        for number in range(3):
            peer.send(_opening(number))
            peer.send(pack("close"))
        _hear(peer, '"failed"')
        going.set()
        wait_until(lambda: not any(each.is_running for each in server._ending))
        peer.send(_opening(4))
        _hear(peer, '"opened"')


def test_several_clients_each_have_their_own_epoch(path: str, server: Server) -> None:
    with (
        shardio.connect(server.address, 3, **HOW) as a,
        shardio.connect(server.address, 5, **{**HOW, "seed": 4}) as b,
    ):
        both = list(zip(map(bits, a), map(bits, b), strict=False))
        expected = zip(local_bits(path, 3), local_bits(path, 5, seed=4), strict=False)
        assert both == list(expected)


def test_a_client_that_closes_frees_its_session(server: Server) -> None:
    with shardio.connect(server.address, 3, **HOW) as far:
        next(iter(far))
        (session,) = server.sessions
    wait_until(lambda: not server.sessions and not session.is_running)


_DIES = """
import os, signal, sys
import shardio
loader = shardio.connect(sys.argv[1], 3, output="numpy")
next(iter(loader))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_client_frees_its_session(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.serving.server._GRACE_S", 0.0)
    monkeypatch.setattr("shardio.serving.server._BEAT_S", 0.05)
    with serving(path) as server:
        done = subprocess.run([sys.executable, "-c", _DIES, server.address], check=False)
        assert done.returncode == -signal.SIGKILL
        wait_until(lambda: not server.sessions)


def test_more_clients_than_there_may_be_are_refused(path: str) -> None:
    with serving(path, max_clients=1) as server, shardio.connect(server.address, 3, **HOW):
        with pytest.raises(UnsupportedEnvironment, match="accepts no more"):
            shardio.connect(server.address, 3, **HOW)


def test_a_server_sends_no_more_than_it_is_granted(server: Server) -> None:
    with shardio.connect(server.address, 2, prefetch=2, **HOW) as far:
        batches = iter(far)
        next(batches)
        (session,) = server.sessions
        wait_until(lambda: session.n_sent == 4)
        next(batches)
        wait_until(lambda: session.n_sent == 5)


def test_memory_of_a_client_bounds_what_is_under_way(server: Server) -> None:
    with shardio.connect(server.address, 2, memory_bytes=100_000, **HOW) as far:
        batches = iter(far)
        for _ in range(4):
            next(batches)
        (session,) = server.sessions
        assert session.n_untaken_bytes <= 100_000
        assert session.n_sent <= 4 + 100_000 // 20_000


def test_untaken_bytes_are_few(path: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.serving.session.MAX_UNTAKEN_BYTES", 50_000)
    with shardio.connect(server.address, 2, **HOW) as far:
        batches = iter(far)
        first = bits(next(batches))
        (session,) = server.sessions
        assert session.n_untaken_bytes < 50_000 + 40_000
        assert [first, *map(bits, batches)] == local_bits(path, 2)


@pytest.mark.parametrize("lie", ["credit", "iterate"])
def test_an_idle_client_has_no_memory(path: str, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.serving.session.MAX_UNTAKEN_BYTES", 50_000)
    kept, said = list[Any](), queue.Queue[str]()

    def post(_: Session, frames: list[Any]) -> None:
        kept.extend(frames[1:])  # as ZeroMQ does
        said.put(json.loads(frames[0])["kind"])

    def hear(kind: str) -> None:
        while said.get(timeout=PATIENCE_S) != kind:
            pass

    asked = {"options": {"batch_size": 2}, "most_bytes": 1 << 30}
    session = Session(
        asked, lambda how: ShardLoader(path, num_workers=0, output="numpy", **how), {}, post
    )
    hear("opened")
    with ShardLoader(path, 2, num_workers=0, output="numpy") as loader:
        state = loader.state_dict()
    for number in range(1, 4):
        session.accept({"kind": "iterate", "number": number, "state": state, "ahead": 9})
        hear("begun")
        session.accept({"kind": "credit", "number": number + 1, "taken": 0, "upto": 99})
        session.accept({"kind": "stop", "number": number + 1})
        assert session._upto == 9 and session._number == number  # these were of another pass
        if lie == "credit":
            session.accept({"kind": "credit", "number": number, "taken": 1 << 40, "upto": 1 << 50})
            assert session._upto <= 15 + MAX_AHEAD
    session.accept({"kind": "check", "state": state})
    hear("checked")
    assert session._number == 3
    assert sum(len(block) for block in kept) < 50_000 + 40_000
    session.accept({"kind": "iterate", "number": 9, "state": state, "ahead": 9})
    hear("begun")
    kept.clear()
    hear("batch")
    session.shut_down()
    session.join(PATIENCE_S)


def test_a_missing_thread(path: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(UnsupportedEnvironment, match="a thread for one more client"):
            shardio.connect(server.address, 4, **HOW)
    _loads(path, server)


@pytest.mark.parametrize("n_more", [0, 3, 5])
def test_too_few_files_are_an_error_on_either_side(path: str, n_more: int) -> None:
    makes: list[Callable[[], object]] = [
        lambda: Link(parse("tcp://127.0.0.1:1"), None, 1),
        lambda: Server(lambda _: None, {}, FREE, keys=None, max_clients=1),  # type: ignore[arg-type, return-value]
    ]
    for make in makes:
        with few_files(n_more), pytest.raises(UnsupportedEnvironment, match="ulimit -n"):
            make()


def test_a_batch_larger_than_the_client_takes_is_an_error_of_its_own(server: Server) -> None:
    with shardio.connect(server.address, 8, memory_bytes=10_000, **HOW) as far:
        with pytest.raises(InsufficientMemory, match="lower batch_size or raise memory_bytes"):
            next(iter(far))
