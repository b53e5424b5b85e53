"""The main process's ZeroMQ socket for samples, in a folder that only this user can enter."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from shardio._base.classes import Closing
from shardio._workers.processes.linux import check_files, files_explained
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.storage.fs import remove_tree

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
    """A ZeroMQ socket and, until `hide`, its folder. It owns both; use it in one thread at a time.

    Args:
        prefix: the prefix of the folder, as returned by `check_prefix`.
        n_senders: the number of processes that will connect.

    Raises:
        UnsupportedEnvironment: the limit on open files is too low.
    """

    def __init__(self, prefix: str, n_senders: int) -> None:
        self._zmq = zeromq()
        check_files(OWN_FILES + n_senders)
        parent, name = os.path.split(prefix)
        self._folder: Path | None = Path(tempfile.mkdtemp(prefix=name, dir=parent))
        self.path = os.fspath(self._folder / _NAME)
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.PULL)
        try:
            self._socket.linger = 0
            self._socket.rcvhwm = 0  # credit limits the bytes, so the message count needs no limit
            self._socket.bind(self.address)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address that workers connect to."""
        return f"ipc://{self.path}"

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

    def hide(self) -> None:
        """Remove the folder: workers stay connected, and no other process can connect."""
        if self._folder is not None:
            with files_explained():
                remove_tree(self._folder)
            self._folder = None

    def close(self) -> None:
        """Close the socket and remove the folder. Idempotent."""
        self._socket.close()
        self._context.term()
        self.hide()
