"""The channel between main and one worker: whole messages, with file descriptors, both ways.

Underneath is a SOCK_SEQPACKET socket pair. The kernel keeps message boundaries, each side sees the
other exit, and nothing has a name in the file system.

A message that may be longer than the socket takes is a descriptor of fixed length with a payload:
`pack_message` puts a long payload into a memory file and sends the descriptor and one byte, which
no plain message has.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Final

from shardio._workers.processes.linux import memory_file
from shardio.errors import InvalidArgument, UnsupportedEnvironment

__all__ = [
    "Ancillary",
    "Channel",
    "LOST_FDS",
    "MAX_FDS",
    "MAX_MESSAGE_BYTES",
    "RECEIVE",
    "Received",
    "check_message",
    "unpack_fds",
]


# Fits the smallest default socket buffer with room to spare; more travels in a memory file.
MAX_MESSAGE_BYTES = 65536
# The kernel's limit (SCM_MAX_FD) for one message.
MAX_FDS = 253

# A plain number: operators of enum members are slow.
LOST_FDS = int(socket.MSG_CTRUNC)

Ancillary = list[tuple[int, int, bytes]]
Received = tuple[bytes, Ancillary, int, object]

# Arguments of `recvmsg`: room for the largest message, for all its descriptors, closed on exec.
RECEIVE = (MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC)


class Channel:
    """A worker's end of its channel; owned by the worker, closed when its process ends.

    `index` is the worker's number in its pool, `fds` are the descriptors given to the pool.
    """

    __slots__ = ("_recvmsg", "_send", "_socket", "fds", "index")

    def __init__(self, index: int, end: socket.socket, fds: tuple[int, ...]) -> None:
        self.index = index
        self.fds = fds
        self._socket = end
        self._send = end.send
        self._recvmsg = end.recvmsg

    def fileno(self) -> int:
        """Return the descriptor to poll: readable when a message or the end has arrived."""
        return self._socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send one message of 1 to MAX_MESSAGE_BYTES bytes to main, waiting while main is behind.

        `fds` stay the caller's. Raises BrokenPipeError when main has closed the pool.
        """
        if fds or not 0 < len(message) <= MAX_MESSAGE_BYTES:
            check_message(message, fds)
            socket.send_fds(self._socket, [message], list(fds))
        else:
            self._send(message)

    def recv(self) -> bytes | None:
        """Wait for main's next message; None when main has closed the pool.

        Raises InvalidArgument when descriptors came with it: receive those with `recv_fds`.
        """
        data, ancillary, flags, _ = self._receive()
        if ancillary or flags & LOST_FDS:
            n_fds = len(unpack_fds(ancillary, flags))
            raise InvalidArgument(
                f"worker {self.index} received {n_fds} file descriptors through Channel.recv(); "
                "receive messages that carry descriptors with recv_fds()"
            )
        return data or None

    def recv_fds(self) -> tuple[bytes, tuple[int, ...]] | None:
        """Wait for main's next message and its descriptors, which the caller then owns."""
        data, ancillary, flags, _ = self._receive()
        if ancillary or flags & LOST_FDS:
            return (data, unpack_fds(ancillary, flags)) if data else None
        return (data, ()) if data else None

    def report_failure(self, text: str) -> None:
        """Send the text of an exception: an empty message that carries it in a memory file."""
        fd = memory_file(text.encode("utf-8", "backslashreplace"))
        socket.send_fds(self._socket, [b""], [fd])

    def _receive(self) -> Received:
        try:
            return self._recvmsg(*RECEIVE)
        except ConnectionResetError:
            # Reported once if the other side closes with messages of ours unread; what it had sent
            # before is still in the queue behind this error.
            return self._recvmsg(*RECEIVE)


def check_message(message: bytes, fds: Sequence[int]) -> None:
    """Raise InvalidArgument unless the message can travel through a channel."""
    if not 0 < len(message) <= MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"a message between main and a worker has 1 to {MAX_MESSAGE_BYTES} bytes, this one "
            f"has {len(message)}; send more in a memory file, by its descriptor"
        )
    if len(fds) > MAX_FDS:
        raise InvalidArgument(f"a message carries at most {MAX_FDS} descriptors, not {len(fds)}")


def unpack_fds(ancillary: Ancillary, flags: int) -> tuple[int, ...]:
    """Return the descriptors in the ancillary data that `recvmsg` returned."""
    if flags & LOST_FDS:
        raise UnsupportedEnvironment(
            "file descriptors were lost on their way between main and a worker: this process has "
            "reached its limit of open files; raise it with `ulimit -n`"
        )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)


DESCRIPTOR_BYTES: Final = 32
"""The length of every descriptor: a task's, and an answer's."""


@contextlib.contextmanager
def pack_message(parcel: bytes) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """Yield the message and its descriptors, which stay open until the `with` ends."""
    if len(parcel) <= MAX_MESSAGE_BYTES:
        yield parcel, ()
        return
    fd = memory_file(parcel[DESCRIPTOR_BYTES:])
    try:
        yield parcel[: DESCRIPTOR_BYTES + 1], (fd,)
    finally:
        os.close(fd)


def unpack_message(message: bytes, fds: Sequence[int]) -> bytes:
    """Return descriptor and payload of a received message; closes its file descriptors."""
    if not fds:
        return message
    (fd,) = fds
    try:
        return message[:DESCRIPTOR_BYTES] + os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)
