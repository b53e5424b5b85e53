"""Main's ZeroMQ socket for samples, in a folder that only this user can enter."""

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
"""More than a context and a socket of ZeroMQ take, without those who are connected."""
_NAME: Final = "samples"
_RANDOM_LETTERS: Final = 8  # as in the names that `tempfile.mkdtemp` makes
_MAX_BYTES: Final = 107
"""Of the path of a socket: the kernel has no room for more."""


def zeromq(user: str = "MultiLoader") -> ModuleType:
    """Load pyzmq; `user` is named in the error if it is missing.

    Raises:
        UnsupportedEnvironment: Ray is not installed.
    """
    try:
        import zmq
    except ImportError as error:
        raise UnsupportedEnvironment(
            f"{user} needs pyzmq ({error}): {install_hint('zmq')}"
        ) from error
    module: ModuleType = zmq
    return module


def check_prefix(prefix: Any) -> str:
    """Return the prefix if a folder for a socket can be made with it.

    Raises:
        InvalidArgument: it is none.
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
            f"prefix makes the path of a socket {n_bytes} bytes long, and {_MAX_BYTES} are the "
            f"most; take a shorter one than {prefix!r}"
        )
    return whole[:-_RANDOM_LETTERS]


class Receiver(Closing):
    """Owns a ZeroMQ socket, and until `hide` a folder with its file; for one thread at a time.

    Args:
        prefix: of the folder, as returned by `check_prefix`.
        n_senders: how many will connect.

    Raises:
        UnsupportedEnvironment: too few files may be open for that.
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
            self._socket.rcvhwm = 0  # bytes are bounded, not messages
            self._socket.bind(self.address)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address that workers connect to."""
        return f"ipc://{self.path}"

    def fileno(self) -> int:
        """Return a descriptor, readable when a message arrives after `take` returned None."""
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
        """Remove the folder: workers stay connected, and no process can connect any more."""
        if self._folder is not None:
            with files_explained():
                remove_tree(self._folder)
            self._folder = None

    def close(self) -> None:
        """Close the socket and remove the folder. Idempotent."""
        self._socket.close()
        self._context.term()
        self.hide()
