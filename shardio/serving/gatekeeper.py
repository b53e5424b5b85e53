"""Who may connect: answers what ZeroMQ asks of every client's key before it hears another word.

The protocol is ZAP (RFC 27): a request has version, id, domain, the client's address, identity,
mechanism and credentials; the answer version, id, a code, its text, a user and metadata.
"""

from __future__ import annotations

from typing import Any, Final

from shardio._workers.tasks.messages import zeromq
from shardio.serving.client.connection import ASK_AGAIN
from shardio.serving.client.keys import ServerKeys, z85

_ENDPOINT: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = b"shardio"
_VERSION: Final = b"1.0"
_N_FRAMES: Final = 7


class Gatekeeper:
    """Owns the socket where ZeroMQ asks; it has to be there before anybody can connect.

    Args:
        context: of the sockets that it guards.
        keys: of the clients that are let in.
    """

    def __init__(self, context: Any, keys: ServerKeys) -> None:
        self._zmq, self._keys = zeromq("a server"), keys
        self.socket = context.socket(self._zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def answer(self) -> None:
        """Answer one question, if there is one."""
        try:
            frames = self.socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return
        request_id = frames[1] if len(frames) > 1 else b""
        try:
            code, said = (b"200", b"OK") if self._is_known(frames) else (b"400", b"unknown key")
        except OSError as error:  # whoever reaches the port may have used up all files
            code, said = str(ASK_AGAIN).encode(), str(error.strerror).encode("ascii", "replace")
        self.socket.send_multipart([_VERSION, request_id, code, said, b"", b""])

    def _is_known(self, frames: list[bytes]) -> bool:
        if len(frames) != _N_FRAMES or frames[0] != _VERSION or frames[5] != b"CURVE":
            return False
        return frames[2] == DOMAIN and self._keys.knows(z85(frames[6]))
