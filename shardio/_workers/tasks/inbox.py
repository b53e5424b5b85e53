"""Main's socket for what workers send, in a folder that nobody else can look into."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.closing import Closing
from shardio._workers.processes.linux import check_files, files_explained, interrupts_held
from shardio._workers.tasks.mail import OWN_FILES, zeromq
from shardio.errors import InvalidArgument
from shardio.storage.fs import remove_tree

_NAME: Final = "samples"
_RANDOM_LETTERS: Final = 8  # of `tempfile.mkdtemp`
_MOST_BYTES: Final = 107
"""Of the path of a socket: the kernel has no room for more."""


def check_prefix(prefix: Any) -> str:
    """A prefix that a folder for a socket can be made with.

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
    if n_bytes > _MOST_BYTES:
        raise InvalidArgument(
            f"prefix makes the path of a socket {n_bytes} bytes long, and {_MOST_BYTES} are the "
            f"most; take a shorter one than {prefix!r}"
        )
    return whole[:-_RANDOM_LETTERS]


class Inbox(Closing):
    """Owns a ZeroMQ socket, and until `hide` a folder with its file; for one thread at a time.

    Args:
        prefix: of the folder, as `check_prefix` gives it.
        n_senders: how many will connect.

    Raises:
        UnsupportedEnvironment: too few files may be open for that.
    """

    def __init__(self, prefix: str, n_senders: int) -> None:
        self._zmq = zeromq()
        check_files(OWN_FILES + n_senders)
        self._frames = _Frames()
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
        """Where workers connect to."""
        return f"ipc://{self.path}"

    def fileno(self) -> int:
        """A descriptor that becomes readable when something arrives after `take` gave None."""
        fd: int = self._socket.fileno()
        return fd

    def take(self) -> list[Any] | None:
        """The next message; None where none is there.

        Its first frame is bytes, each other an array over the memory of one, without a copy.
        """
        self._frames.let_go()
        try:
            found = [self._socket.recv(self._zmq.NOBLOCK)]
        except self._zmq.Again:
            return None
        has_more = self._socket.get(self._zmq.RCVMORE)
        while has_more:
            frame = self._socket.recv(copy=False)
            found.append(self._frames.memory_of(frame))
            has_more = frame.more
        return found

    def hide(self) -> None:
        """Remove the folder: whoever is connected stays so, and nobody else can be."""
        if self._folder is not None:
            with files_explained():
                remove_tree(self._folder)
            self._folder = None

    def close(self) -> None:
        """Let go of socket and folder. Idempotent; what has been taken stays."""
        self._socket.close()
        self._context.term()
        self.hide()
        self._frames.close()


class _Frames(Closing):
    """Holds frames until nothing lies in them, and then until Ctrl-C is held back.

    Where a frame ends, pyzmq looks for signals; what their handler raises there is lost.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._ended: deque[weakref.ref[Any]] = deque()
        self._end = self._ended.append  # not in Python, where Ctrl-C would strike

    def memory_of(self, frame: Any) -> npt.NDArray[np.uint8]:
        """The memory of a frame, for as long as anything refers to it."""
        memory = np.frombuffer(frame, np.uint8)
        end = weakref.ref(memory, self._end)
        self._held[id(end)] = end, frame
        return memory

    def let_go(self) -> None:
        """End the frames in which nothing lies."""
        if self._ended:
            with interrupts_held():
                while self._ended:
                    self._held.pop(id(self._ended.popleft()), None)

    def close(self) -> None:
        """Let go of all; those in which something lies end with that."""
        self.let_go()
        self._held.clear()
