"""One connection of a client to a server, and what its socket's monitor tells of its fate."""

from __future__ import annotations

import struct
import time
from typing import Any, Final

from shardio._base.closing import Closing
from shardio._workers.processes.linux import check_files
from shardio._workers.tasks.messages import OWN_FILES, zeromq
from shardio.errors import InvalidArgument
from shardio.serving.client.address import Address
from shardio.serving.client.keys import ClientKeys
from shardio.serving.client.protocol import FROM_SERVER, MOST_HEAD_BYTES, Garbled, unpack

HEARTBEAT_MS: Final = 2_000
"""How often both sides ask for a sign of life, in ZeroMQ's own thread."""
SILENCE_MS: Final = 10_000
"""After which a connection is given up."""

ASK_AGAIN: Final = 300
"""What ZAP says where it is not known whether a client may come in."""

_LEAVE_MS: Final = 200
_EVENT: Final = struct.Struct("=HI")
_DENIED: Final = "the server does not know this client's key"
_NO_HANDSHAKE: Final = (
    "the handshake failed: the server has another key than this client's server.public says, or "
    "one side has keys and the other none"
)


class Lost(Exception):
    """The connection is of no more use; the text says why."""


class Denied(Lost):
    """The server will not talk to a client of this key."""


class Link(Closing):
    """Owns the socket to one server; for one thread at a time.

    Args:
        address: of the server.
        keys: of CURVE; None only on this machine.
        most_bytes: of a block that may arrive.

    Raises:
        InvalidArgument: ZeroMQ makes nothing of the address.
        UnsupportedEnvironment: too few files may be open, or pyzmq is missing.
    """

    def __init__(self, address: Address, keys: ClientKeys | None, most_bytes: int) -> None:
        zmq = self._zmq = zeromq("a loader of a server's batches")
        self.address, self.heard_s, self.has_heard = address, time.monotonic(), False
        self._most_bytes = max(most_bytes, MOST_HEAD_BYTES)
        check_files(OWN_FILES)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            self._set_up(keys)
            self._monitor = self._socket.get_monitor_socket(
                zmq.EVENT_DISCONNECTED
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_CONNECT_RETRIED
            )
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(self._monitor, zmq.POLLIN)
            self._socket.connect(str(address))
        except zmq.ZMQError as error:
            self.close()
            raise InvalidArgument(f"{address}: ZeroMQ cannot connect there: {error}") from error
        except BaseException:
            self.close()
            raise

    def _set_up(self, keys: ClientKeys | None) -> None:
        socket = self._socket
        socket.linger = 0
        socket.rcvhwm = socket.sndhwm = 0  # credit bounds what is under way
        socket.maxmsgsize = self._most_bytes
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, SILENCE_MS
        socket.ipv6 = self.address.is_ipv6
        if keys is not None:
            socket.curve_serverkey = keys.server
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret

    def send(self, message: bytes) -> None:
        """Send a message, now or when there is a connection."""
        self._socket.send(message)

    def receive(self, wait_s: float) -> tuple[dict[str, Any], Any] | None:
        """The next message and its block, if it has one; None if none comes in time.

        Raises:
            Lost: nothing more will come, or what came is no message.
        """
        zmq = self._zmq
        found = self._take()
        if found is None:
            ready = dict(self._poller.poll(max(0.0, wait_s) * 1000))
            found = self._take()
            if found is None and self._monitor in ready:
                self._look()
        if found is None:
            return None
        self.heard_s, self.has_heard = time.monotonic(), True
        try:
            head = unpack([frame.buffer for frame in found], FROM_SERVER)
        except Garbled as error:
            raise Lost(f"what came is no message of a server: {error}") from error
        except zmq.ZMQError as error:
            raise Lost(str(error)) from error
        return head, found[1].buffer if len(found) == 2 else None

    def _take(self) -> list[Any] | None:
        zmq = self._zmq
        try:
            found: list[Any] = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return found

    def _look(self) -> None:
        """Act upon what the monitor says."""
        zmq = self._zmq
        try:
            frames = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        event, value = _EVENT.unpack(frames[0])
        if event == zmq.EVENT_CONNECT_RETRIED:
            raise Lost("nobody listens there, or there is no such host")
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == ASK_AGAIN:
            raise Lost("the server cannot read the keys of its clients just now")
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise Denied(f"{_DENIED} ({value})")
        if event in (
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        ):
            raise Lost(_NO_HANDSHAKE)
        raise Lost("the connection was cut")

    @property
    def sockets(self) -> tuple[Any, Any]:
        """What becomes readable when there is something for `receive`."""
        return self._socket, self._monitor

    def leave(self, message: bytes) -> None:
        """Send a last message, if that takes no time, and let go of the connection."""
        if not self._context.closed:
            self._socket.send(message)
            self._end(_LEAVE_MS)

    def close(self) -> None:
        """Let go of the connection. Idempotent."""
        if not self._context.closed:
            self._end(0)

    def _end(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=linger_ms)
