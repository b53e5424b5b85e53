"""A client's connection to a server, the choice among several servers, and the keys of both sides.

Keys are CURVE keys of ZeroMQ. Each key is a file with one line of 40 characters in Z85:

    FOLDER/server.secret           the server's key, kept at the server
    FOLDER/server.public
    FOLDER/clients/NAME.public     the key of an accepted client
    FOLDER/NAME/server.public      the server's key, to be copied to the client
    FOLDER/NAME/client.secret      the client's own key, to be copied to the client
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardio._base.classes import Closing, undo_on_error
from shardio._workers.processes.linux import check_files
from shardio._workers.tasks.zeromq import OWN_FILES, zeromq
from shardio.errors import InvalidArgument, ServerUnreachable
from shardio.serving.client.protocol import FROM_SERVER, MAX_HEAD_BYTES, Address, unpack
from shardio.storage import fs

_FORM: Final = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VARIABLE: Final = "SHARDIO_KEYS"
_MAX_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The secret key of a server, and the folder with the public keys of accepted clients."""

    secret: bytes = field(repr=False)
    clients: Path

    def knows(self, public: bytes) -> bool:
        """Return True if `public` is the key of an accepted client; the folder is read each time.

        A file that is not a key, for example because it is being written, is ignored. Raises
        OSError if too many files are open.
        """
        for name in os.listdir(self.clients):
            if name.endswith(".public"):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                    with open(self.clients / name, "rb") as file:
                        key = file.read(_MAX_BYTES).strip()
                    if key == public and _FORM.fullmatch(key):
                        return True
        return False


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The public and the secret key of a client, and the public key of the server."""

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)


def make_keys(folder: str | os.PathLike[str], client: str = "client") -> Path:
    """Create the keys of a client in `folder`; return the folder to copy to the client.

    If the server has no keys in `folder` yet, its keys are created too. Only this user may read the
    files of secret keys.

    Raises:
        InvalidArgument: the name is invalid, or keys for this name already exist.
        UnsupportedEnvironment: pyzmq is missing.
    """
    zmq, place = zeromq("a server"), Path(folder)
    if not _NAME.fullmatch(client) or client == "clients":
        raise InvalidArgument(
            "a client's name consists of letters, digits, _, . and -, and is not 'clients'; "
            f"found {client!r}"
        )
    own = place / client
    listed = place / "clients" / f"{client}.public"
    if own.exists() or listed.exists():
        raise InvalidArgument(
            f"{own}: keys of this name exist; choose another name, or remove them"
        )
    fs.make_folder(listed.parent, 0o700)
    if not (place / "server.secret").exists():
        public, secret = zmq.curve_keypair()
        _write(place / "server.secret", secret, 0o600)
        _write(place / "server.public", public, 0o644)
    public, secret = zmq.curve_keypair()
    fs.make_folder(own, 0o700)
    _write(own / "client.secret", secret, 0o600)
    _write(own / "server.public", _read(place / "server.public"), 0o644)
    # Write this file last: from now on, the server accepts the client.
    _write(listed, public, 0o644)
    return own


def server_keys(folder: str | os.PathLike[str]) -> ServerKeys:
    """Read the keys of a server from `folder`; check the keys of its clients."""
    place = Path(folder)
    clients = place / "clients"
    if not clients.is_dir():
        raise InvalidArgument(
            f"{clients}: no such folder of clients' keys; make it with "
            f"`shardio serve --make-keys {place}`"
        )
    for path in clients.glob("*.public"):
        _read(path)
    return ServerKeys(_read_secret(place / "server.secret"), clients)


def client_keys(folder: str | os.PathLike[str] | None) -> ClientKeys | None:
    """Read a client's keys from `folder`, by default $SHARDIO_KEYS; if neither is set, None."""
    found = os.environ.get(_VARIABLE) if folder is None else folder
    if not found:
        return None
    place = Path(found)
    secret = _read_secret(place / "client.secret")
    return ClientKeys(
        _read(place / "server.public"), zeromq("a client").curve_public(secret), secret
    )


def _write(path: Path, key: bytes, mode: int) -> None:
    with fs.create_private(path, mode) as file:
        file.write(key + b"\n")


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise InvalidArgument(
            f"{path}: others may read this secret key (mode {mode:o}): chmod 600 {path}"
        )
    return key


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            key = file.read(_MAX_BYTES).strip()
    except OSError as error:
        raise InvalidArgument(
            f"{path}: this key cannot be read ({error.strerror}): "
            "`shardio serve --make-keys` makes the keys of a server and a folder for a client"
        ) from error
    if not _FORM.fullmatch(key):
        raise InvalidArgument(f"{path}: not a key; expected 40 characters of Z85")
    return key


HEARTBEAT_MS: Final = 2_000
"""The interval in milliseconds at which ZeroMQ's own threads on both sides send heartbeats."""
SILENCE_MS: Final = 10_000
"""If no message arrives for this time in milliseconds, the connection is considered lost."""

ASK_AGAIN: Final = 300
"""The ZAP status code with which a server answers if it cannot read the keys."""

_CLOSE_LINGER_MS: Final = 200
_EVENT: Final = struct.Struct("=HI")
_NO_HANDSHAKE: Final = (
    "the handshake failed: this client's server.public is not the key of the server, or only one "
    "side has keys"
)


class ConnectionLost(Exception):
    """Raised if a connection is lost; `is_denied` is True if this client's key was refused."""

    def __init__(self, reason: str, *, is_denied: bool = False) -> None:
        super().__init__(reason)
        self.is_denied = is_denied


class Link(Closing):
    """A connection to one server, for one thread at a time. Owns its sockets.

    `max_bytes` is the maximum size of a received block.
    """

    def __init__(self, address: Address, keys: ClientKeys | None, max_bytes: int) -> None:
        zmq = self._zmq = zeromq("a loader of a server's batches")
        self.address, self.last_message_s, self.has_received = address, time.monotonic(), False
        self._max_bytes = max(max_bytes, MAX_HEAD_BYTES)
        check_files(OWN_FILES)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._reasons = {
            zmq.EVENT_CONNECT_RETRIED: "no server listens at this address, or the host does not "
            "exist",
            zmq.EVENT_DISCONNECTED: "the connection was lost",
            zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not know this client's key",
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: _NO_HANDSHAKE,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: _NO_HANDSHAKE,
        }
        with undo_on_error(self.close):
            self._set_up(keys)
            self._monitor = self._socket.get_monitor_socket(sum(self._reasons))
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(self._monitor, zmq.POLLIN)
            try:
                self._socket.connect(str(address))
            except zmq.ZMQError as error:
                raise InvalidArgument(f"{address}: ZeroMQ cannot connect there: {error}") from error

    def _set_up(self, keys: ClientKeys | None) -> None:
        socket = self._socket
        socket.linger = 0
        socket.rcvhwm = socket.sndhwm = 0  # no limit, because the credit limits the messages
        socket.maxmsgsize = self._max_bytes
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, SILENCE_MS
        socket.ipv6 = self.address.is_ipv6
        if keys is not None:
            socket.curve_serverkey = keys.server
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret

    def send(self, message: bytes) -> None:
        """Queue a message for the server. Drop the message if the handshake has failed."""
        # After a failed handshake, ZeroMQ has no queue, and a blocking send would never return.
        # `receive` learns of the failure from the monitor of the socket.
        with contextlib.suppress(self._zmq.Again):
            self._socket.send(message, self._zmq.NOBLOCK)

    def receive(self, wait_s: float) -> tuple[dict[str, Any], Any] | None:
        """Return the head of the next message and its block, if any; None after `wait_s`.

        Raises ConnectionLost, or MalformedMessage if the message is not valid.
        """
        found = self._take()
        if found is None:
            ready = dict(self._poller.poll(max(0.0, wait_s) * 1000))
            found = self._take()
            if found is None and self._monitor in ready:
                self._check_monitor()
        if found is None:
            return None
        self.last_message_s, self.has_received = time.monotonic(), True
        head = unpack([frame.buffer for frame in found], FROM_SERVER)
        return head, found[1].buffer if len(found) == 2 else None

    def _take(self) -> list[Any] | None:
        try:
            found: list[Any] = self._socket.recv_multipart(self._zmq.NOBLOCK, copy=False)
        except self._zmq.Again:
            return None
        return found

    def _check_monitor(self) -> None:
        """Raise ConnectionLost if the monitor of the socket has reported an event."""
        zmq = self._zmq
        try:
            frames = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        event, value = _EVENT.unpack(frames[0])
        if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise ConnectionLost(self._reasons[event])
        if value == ASK_AGAIN:
            raise ConnectionLost("the server currently cannot read the keys of its clients")
        raise ConnectionLost(f"{self._reasons[event]} ({value})", is_denied=True)

    @property
    def sockets(self) -> tuple[Any, Any]:
        """The sockets that become readable when there is something to receive."""
        return self._socket, self._monitor

    def close(self, message: bytes | None = None) -> None:
        """Close the connection, after sending a last message, if any. Idempotent."""
        if self._context.closed:
            return
        if message is not None:
            self.send(message)
        self._socket.disable_monitor()
        self._context.destroy(linger=0 if message is None else _CLOSE_LINGER_MS)


_DEFAULT_TIMEOUT_S: Final = 60.0
_MIN_BACK_OFF_S, _MAX_BACK_OFF_S = 0.05, 2.0


class Servers:
    """The servers of a dataset, which are tried one after another, for at most `timeout_s`."""

    def __init__(self, addresses: Sequence[Address], timeout_s: float | None) -> None:
        self._addresses = list(addresses)
        self._timeout_s = _DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._denied: set[Address] = set()
        self._reasons: dict[Address, str] = {}
        """For each server, the reason of its latest loss since a server last made progress."""
        self._first_loss_s: float | None = None
        self._back_off_s, self._next_try_s = _MIN_BACK_OFF_S, 0.0

    @property
    def current(self) -> Address:
        """The server to which the client connects, or is connected."""
        return self._addresses[0]

    @property
    def last_error(self) -> str:
        """The reasons why servers were lost since a server last made progress."""
        return "; ".join(f"{where}: {what}" for where, what in self._reasons.items())

    def wait(self, wait_s: float) -> bool:
        """Return True if the next attempt is due; otherwise, wait for it at most `wait_s`."""
        left_s = self._next_try_s - time.monotonic()
        if left_s > 0:
            time.sleep(min(wait_s, left_s))
        return left_s <= 0

    def record_loss(self, lost: ConnectionLost) -> None:
        """Record that the current server was lost; switch to the next, after a growing pause.

        Raises ServerUnreachable if no server has been reachable for too long, or if all servers
        refuse this client.
        """
        now_s, address = time.monotonic(), self._addresses.pop(0)
        self._addresses.append(address)
        self._reasons[address] = str(lost)
        if lost.is_denied:
            self._denied.add(address)
        if self._first_loss_s is None:
            self._first_loss_s = now_s
        away_s = now_s - self._first_loss_s
        if away_s >= self._timeout_s or self._denied.issuperset(self._addresses):
            message = self.last_error
            self.record_progress()  # if the caller tries again, the time limit begins again
            raise ServerUnreachable(f"no server to load from for {away_s:.0f} s: {message}")
        self._next_try_s = now_s + self._back_off_s
        self._back_off_s = min(_MAX_BACK_OFF_S, self._back_off_s * 2)

    def record_progress(self) -> None:
        """Record that a server has made progress: forget all losses, and their reasons."""
        self._back_off_s, self._first_loss_s = _MIN_BACK_OFF_S, None
        self._reasons.clear()
        self._denied.clear()
