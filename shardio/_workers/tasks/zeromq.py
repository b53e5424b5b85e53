"""ZeroMQ: its import, and the main process's socket for samples."""

from __future__ import annotations

import os
import tempfile
from types import ModuleType
from typing import Any, Final

from shardio._base.classes import Closing
from shardio._workers.processes.linux import check_files, files_explained
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint

OWN_FILES: Final = 16
"""An upper bound for the files that a ZeroMQ context and socket open, without connections."""
_NAME: Final = "samples"
_RANDOM_LETTERS: Final = 8  # as in the names that `tempfile.mkdtemp` makes
_MAX_BYTES: Final = 107
"""The maximum length of the path of a socket, set by the kernel."""


def zeromq(user: str = "MultiLoader") -> ModuleType:
    """Import pyzmq; the error for a missing package names `user`.

    Raises:
        UnsupportedEnvironment: pyzmq is not installed.
    """
    try:
        import zmq
        import zmq.utils.z85  # zmq itself does not import it
    except ImportError as error:
        raise UnsupportedEnvironment(
            f"{user} needs pyzmq ({error}): {install_hint('zmq')}"
        ) from error
    module: ModuleType = zmq
    return module


def check_prefix(prefix: Any) -> str:
    """Return the absolute path of a prefix for the folder of a socket.

    Raises:
        InvalidArgument: no such folder can be created, or the path of the socket is too long.
    """
    if not isinstance(prefix, str | os.PathLike):
        raise InvalidArgument(f"prefix must be the beginning of a path; found {prefix!r}")
    whole = os.path.abspath(os.fspath(prefix) + "x" * _RANDOM_LETTERS)
    parent = os.path.dirname(whole)
    if not os.path.isdir(parent):
        raise InvalidArgument(f"prefix is {prefix!r}, but there is no folder {parent}")
    n_bytes = len(os.fsencode(os.path.join(whole, _NAME)))
    if n_bytes > _MAX_BYTES:
        raise InvalidArgument(
            f"prefix makes the path of a socket {n_bytes} bytes long; the maximum is "
            f"{_MAX_BYTES}: use a shorter prefix than {prefix!r}"
        )
    return whole[:-_RANDOM_LETTERS]


class Receiver(Closing):
    """A ZeroMQ socket that receives samples; owned and used by one thread at a time.

    The socket has a name only while the constructor runs. Processes connect by the descriptor
    `path_fd`, which Linux resolves to the socket even after the name is removed. No other process
    can therefore connect, and no name is left behind if this process is killed.

    Args:
        prefix: the prefix of the socket's folder, as returned by `check_prefix`.
        n_senders: the number of processes that will connect.

    Raises:
        UnsupportedEnvironment: the limit on open files is too low.
    """

    def __init__(self, prefix: str, n_senders: int) -> None:
        self._zmq = zeromq()
        check_files(OWN_FILES + n_senders)
        self.path_fd = -1
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.PULL)
        parent, name = os.path.split(prefix)
        try:
            self._socket.linger = 0
            self._socket.rcvhwm = 0  # credit limits the bytes, so the message count needs no limit
            with files_explained(), tempfile.TemporaryDirectory(prefix=name, dir=parent) as folder:
                path = os.path.join(folder, _NAME)
                self.address = f"ipc://{path}"
                self._socket.bind(self.address)
                self.path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable if a message arrives after `take` returned None."""
        fd: int = self._socket.fileno()
        return fd

    def take(self) -> bytes | None:
        """Return the next message, or None."""
        try:
            found: bytes = self._socket.recv(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return found

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()
        self._context.term()
        if self.path_fd >= 0:
            os.close(self.path_fd)
            self.path_fd = -1


def address_of(path_fd: int) -> str:
    """Return the address of a `Receiver` in a process that has inherited its `path_fd`."""
    return f"ipc:///proc/self/fd/{path_fd}"
