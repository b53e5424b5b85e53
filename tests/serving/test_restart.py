"""Servers that are lost in the middle of an epoch, and keys that fit or do not, over CURVE."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import InvalidArgument, ShardLoader
from shardio.errors import BatchTimeout, ServerUnreachable
from shardio.serving import Server, make_keys
from shardio.serving.client.batch_stream import Stream
from shardio.serving.client.connection import ConnectionLost, Link, ServerKeys, Servers, client_keys
from shardio.serving.client.protocol import pack, parse
from shardio.serving.client.remote_loader import RemoteLoader
from tests.loading import PATIENCE_S, bits
from tests.serving import served
from tests.serving.served import FREE, HOW, Process, Relay, local_bits, serving, wait_until


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "ours")
    make_keys(folder / "theirs")
    return folder


@pytest.fixture(scope="module")
def process(path: str, keys: Path) -> Iterator[list[Process]]:
    """Start a server in a process, the last of the list: tests may kill it and start another."""
    found = [_start(path, keys, FREE)]
    yield found
    assert found[-1].end(signal.SIGTERM) == 0


@pytest.fixture(scope="module")
def edges(path: str) -> Iterator[Server]:
    """Start a server that sends `heartbeat` often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardio.serving.server._BEAT_S", 0.02)
        with serving(path) as made:
            yield made


def _start(path: str, keys: Path, bind: str) -> Process:
    return Process(path, bind, "--keys", str(keys / "ours"), "--workers", "1")


def _asks(address: str, keys: Path | None, **options: Any) -> RemoteLoader:
    return shardio.connect(address, 4, keys=keys, **{**HOW, **options})


@pytest.mark.process
def test_a_killed_server_is_continued(path: str, keys: Path, process: list[Process]) -> None:
    address = process[-1].address
    found = []
    with _asks(address, keys / "ours" / "client", prefetch=1) as far:
        for batch in far:
            found.append(bits(batch))
            if len(found) == 3:
                assert process[-1].end(signal.SIGKILL) == -signal.SIGKILL
                process.append(_start(path, keys, address))
        stats = far.stats().latest
    assert found == local_bits(path, 4)
    assert stats.n_restarts == 1


@pytest.mark.process
def test_a_server_runs_a_function_of_its_folder(path: str, tmp_path: Path) -> None:
    module = "def double(sample):\n    return {'label': sample['label'] * 2}\n"
    (tmp_path / "mine.py").write_text(module)
    more = ("--workers", "1", "--transform", "mine:double")
    server = Process(path, FREE, *more, cwd=tmp_path)
    assert server.line == f"serving {path} at {server.address}\n"
    with shardio.connect(server.address, 4, output="numpy") as far:
        assert next(iter(far))["label"].tolist() == [0, 2, 4, 6]
        assert server.end(signal.SIGINT) == 0


def test_an_unknown_key_gets_nothing(keys: Path, process: list[Process], tmp_path: Path) -> None:
    client = served.keys_between(
        tmp_path / "x", keys / "theirs" / "client", keys / "ours" / "client"
    )
    with pytest.raises(ServerUnreachable, match="for 0 s: .* does not know this client's key"):
        _asks(process[-1].address, client)


@pytest.mark.parametrize("which", ["theirs", None])
def test_without_the_key_of_the_server_there_is_no_handshake(
    keys: Path, process: list[Process], which: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDIO_KEYS", raising=False)
    client = None if which is None else keys / which / "client"
    with pytest.raises(ServerUnreachable, match="the handshake failed"):
        _asks(process[-1].address, client, timeout_s=0.2)


def test_a_client_with_keys_gets_nothing_from_a_server_without(path: str, keys: Path) -> None:
    with serving(path) as server:
        with pytest.raises(ServerUnreachable, match="the handshake failed"):
            _asks(server.address, keys / "ours" / "client", timeout_s=0.2)
        assert server.sessions == []


def test_a_message_after_a_failed_handshake_does_not_block(keys: Path) -> None:
    # ZMTP 3.1 (RFC 37): signature, version, mechanism, as-server, filler.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = parse(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        link = Link(address, client_keys(keys / "ours" / "client"), 1 << 20)
        try:
            with listener.accept()[0] as peer:
                peer.sendall(greeting)
                assert link.sockets[1].poll(10_000), "the monitor has not reported the failure"
                for _ in range(100):  # ZeroMQ removes the queue a moment after the report
                    link.send(pack("close"))
                    time.sleep(0.001)
                with pytest.raises(ConnectionLost, match="the handshake failed"):
                    link.receive(1)
        finally:
            link.close()


def test_unreadable_keys_are_reread(path: str, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knows, asked = ServerKeys.knows, list[bytes]()

    def refuse_once(self: ServerKeys, public: bytes) -> bool:
        asked.append(public)
        if len(asked) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return knows(self, public)

    monkeypatch.setattr(ServerKeys, "knows", refuse_once)
    monkeypatch.setattr("shardio.serving.client.batch_stream._SILENCE_S", 1)  # of a handshake
    with serving(path, keys=keys / "ours") as server:
        with _asks(server.address, keys / "ours" / "client") as far:
            assert len(far) == 8
    assert len(set(asked)) == 1 < len(asked)


def test_a_connection_that_is_cut_within_batches_gives_every_batch_once(path: str) -> None:
    with (
        serving(path) as server,
        contextlib.closing(Relay(server.address, 500, 30_000, 61_111, 1, 200_000)) as relay,
    ):
        with shardio.connect(relay.address, 4, **HOW) as far:
            with ShardLoader(path, 4, num_workers=0, **HOW) as local:
                for _ in range(2):
                    assert list(map(bits, far)) == list(map(bits, local))
                    assert far.state_dict() == local.state_dict()
            assert not relay.cuts and far.stats().total.n_restarts >= 2
            assert len(server.sessions) == 1  # the same, each time


@pytest.mark.parametrize("kind", ["opened", "begun", "end"])
@pytest.mark.parametrize("tail", ["short", "pad", "drop"])
def test_a_connection_that_is_lost_at_an_edge_of_an_epoch_gives_every_batch_once(
    path: str, edges: Server, monkeypatch: pytest.MonkeyPatch, kind: str, tail: str
) -> None:
    act, lost = Stream._handle, list[str]()

    def lose(self: Stream, head: dict[str, Any], block: Any) -> None:
        if head["kind"] == kind and not lost:
            lost.append(kind)
            raise ConnectionLost("cut")
        act(self, head, block)

    monkeypatch.setattr(Stream, "_handle", lose)
    options: dict[str, Any] = {**HOW, "fields": ["label"], "tail": tail}
    with shardio.connect(edges.address, 4, timeout_s=PATIENCE_S, **options) as far:
        found = [(bits(batch), far.state_dict()) for batch in far]
        with ShardLoader(path, 4, num_workers=0, **options) as local:
            assert found == [(bits(batch), local.state_dict()) for batch in local]
            assert far.state_dict() == local.state_dict()
    assert lost


def _hears(patch: pytest.MonkeyPatch, told: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the messages that clients receive; {} drops one."""
    act = Stream._handle

    def hear(self: Stream, head: dict[str, Any], block: Any) -> None:
        if heard := told(head):
            act(self, heard, block)

    patch.setattr(Stream, "_handle", hear)


@pytest.mark.parametrize("kind", ["opened", "begun", "batch", "end"])
def test_an_overdue_answer(edges: Server, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    _hears(monkeypatch, lambda head: {} if head["kind"] == kind else head)
    with pytest.raises(BatchTimeout, match="did not come from"):
        with shardio.connect(edges.address, 4, fields=["label"], timeout_s=0.1, **HOW) as far:
            list(far)


@pytest.mark.parametrize(
    ("kind", "lie", "said"),
    [
        ("opened", {"state": {}}, "epoch is null"),
        ("begun", {"last": 9}, "the epoch ended instead of batch 8"),
        ("begun", {"last": 2}, "received batch 2 of epoch 0 instead of 2"),
        ("begun", {"kind": "end"}, "received end before the epoch had begun"),
        ("batch", {"epoch": 5}, "received batch 0 of epoch 5 instead of 0"),
        ("batch", {"kind": "end"}, "the epoch ended instead of batch 0"),
    ],
)
def test_a_server_that_says_what_cannot_be_is_left(
    edges: Server, monkeypatch: pytest.MonkeyPatch, kind: str, lie: dict[str, Any], said: str
) -> None:
    def record_loss(self: Servers, lost: ConnectionLost) -> None:
        raise ServerUnreachable(str(lost))

    monkeypatch.setattr(Servers, "record_loss", record_loss)
    _hears(monkeypatch, lambda head: {**head, **lie} if head["kind"] == kind else head)
    with pytest.raises(ServerUnreachable, match=said):
        with shardio.connect(edges.address, 4, fields=["label"], **HOW) as far:
            list(far)


def _begun(address: str | list[str], **options: Any) -> tuple[RemoteLoader, Any, list[Any]]:
    """Return a loader, its iterator, and what the first batch has."""
    far = shardio.connect(address, 4, prefetch=0, **HOW, **options)
    batches = iter(far)
    return far, batches, [bits(next(batches))]


def test_a_server_that_is_full_when_it_returns_is_waited_for(path: str) -> None:
    with serving(path) as server:
        address = server.address
        far, batches, found = _begun(address)
    with far, serving(path, bind=address, max_clients=1) as server:
        other = shardio.connect(address, 4, **HOW)
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(lambda: list(map(bits, batches)))
            wait_until(lambda: "accepts no more" in far._stream.last_error)
            other.close()
            found += rest.result()
    assert found == local_bits(path, 4)


def test_another_server_goes_on_where_one_was_lost(path: str) -> None:
    with serving(path) as second:
        with serving(path) as first:
            far, batches, found = _begun([first.address, second.address])
            found += [bits(next(batches)) for _ in range(2)]
        with far:
            found += map(bits, batches)
            assert far.stats().latest.n_restarts == 1
    assert found == local_bits(path, 4)


def _double(sample: dict[str, Any]) -> dict[str, Any]:
    return {"label": sample["label"] * 2}


@pytest.mark.parametrize(
    ("is_other", "transform", "said"),
    [(True, None, "serves other batches.*lineage"), (False, _double, "serves other.*_double")],
)
def test_a_server_that_returns_with_other_batches_is_refused_by_name(
    path: str, other_path: str, is_other: object, transform: Any, said: str
) -> None:
    with serving(path) as server:
        address = server.address
        far, batches, _ = _begun(address)
    with far, serving(other_path if is_other else path, bind=address, transform=transform):
        with pytest.raises(InvalidArgument, match=f"{address} {said}"):
            list(batches)


def test_another_version_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(path) as server:
        monkeypatch.setattr("shardio.serving.client.batch_stream.VERSION", 7)
        with pytest.raises(InvalidArgument, match="the client 7: install the same shardio"):
            shardio.connect(server.address, 4, **HOW)
        monkeypatch.undo()
        monkeypatch.setattr("shardio.serving.client.handshake.VERSION", 7)
        with pytest.raises(InvalidArgument, match="this client 7: install the same shardio"):
            shardio.connect(server.address, 4, **HOW)


def test_a_server_that_stays_away_is_an_error_and_the_state_goes_on_elsewhere(path: str) -> None:
    with serving(path) as server:
        far, batches, found = _begun(server.address, timeout_s=0.3)
        found.append(bits(next(batches)))
    with far:
        with pytest.raises(ServerUnreachable, match="no server to load from"):
            found += map(bits, batches)
        state = far.state_dict()
    with ShardLoader(path, 4, num_workers=0, **HOW) as local:
        local.load_state_dict(state)
        assert found + list(map(bits, local)) == local_bits(path, 4)


def test_who_listens_and_says_nothing_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.serving.client.batch_stream._SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match="the server has sent nothing for"):
            _asks(address, None, timeout_s=0.1)
