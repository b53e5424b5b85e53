"""Samples as messages of ZeroMQ, and main's socket for them.

The first frame of a message is

    head     kind, number of the worker, number of the first sample, count   uint32 2, uint64 2
    pickles  of the samples, concatenated, without the memory of larger arrays
    sizes    of the pickles   uint64 each

and each frame after it is the memory of one array of the last sample, copied three times on its
way: in the worker, and twice by the kernel. Larger amounts lie in a block instead (see
`block_credits`), and one frame says where:

    place    number of the block, sizes of the arrays   uint64 each

The socket lies in a folder that only this user can enter.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing
from shardio._workers.processes.linux import check_files, files_explained, interrupts_held
from shardio._workers.processes.serialization import pickle_out_of_band
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.storage.fs import remove_tree

_HEAD: Final = struct.Struct("<IIQQ")
_SIZE_BYTES: Final = 8

MIN_APART_BYTES: Final = 16 << 10
"""Arrays from this size up travel in frames of their own, each of which ZeroMQ receives into memory
of its own. Shorter ones would be slices of its buffer of 8 KiB, at any offset.
"""

MIN_IN_BLOCK_BYTES: Final = 128 << 10
"""Arrays of a sample, together, that travel in a block: it takes a message there and one back."""

OWN_FILES: Final = 16
"""More than a context and a socket of ZeroMQ take, without those who are connected."""

_OVERHEAD_BYTES: Final = 256
"""The cost of a sample beyond its bytes: most of a small one's."""


class MessageKind(IntEnum):
    """The kind of a message."""

    HELLO = 1  # the worker is connected
    SAMPLES = 2
    IN_BLOCK = 6  # samples, of which the last one's larger arrays are in a block
    SKIPPED = 3  # instead of a sample an exception follows, packed by `pack_error`
    FAILED = 4  # such an exception ended the worker's iteration
    END = 5  # no more samples: the number is that of all samples of this worker


def pack_head(kind: MessageKind, worker: int, number: int, n_samples: int = 0) -> bytes:
    """Pack the head of a message."""
    return _HEAD.pack(kind, worker, number, n_samples)


unpack_head = _HEAD.unpack_from
"""Kind, worker, number and how many samples of a message, of its first frame."""


class MessageBatch:
    """Samples of one worker that are pickled, to be sent in one message."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._file = io.BytesIO(bytes(_HEAD.size))
        self._end = _HEAD.size
        self._sizes: list[int] = []
        self.apart: list[pickle.PickleBuffer] = []
        """The larger arrays of the last sample, which have to stay as they are until it is sent."""
        self.n_bytes = self.n_apart_bytes = 0
        """The cost of all samples, and of the larger arrays of the last one alone."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._sizes)

    def add(self, sample: Any) -> None:
        """Append a sample to the others, which have no larger arrays.

        Raises any error of the sample's own pickling code.
        """
        self._file.seek(self._end)
        try:
            pickle_out_of_band(sample, self._file, self.apart, MIN_APART_BYTES)
        except BaseException:  # the samples before stay as they were
            self.apart.clear()
            raise
        size = self._file.tell() - self._end
        self._end += size
        self._sizes.append(size)
        self.n_apart_bytes = sum(buffer.raw().nbytes for buffer in self.apart)
        self.n_bytes += _OVERHEAD_BYTES + size + self.n_apart_bytes

    def take_back(self) -> None:
        """Remove the last sample; the others stay as they were."""
        size = self._sizes.pop()
        self._end -= size
        self.n_bytes -= _OVERHEAD_BYTES + size + self.n_apart_bytes
        self.n_apart_bytes = 0
        self.apart.clear()

    def frames(self, first: int, place: tuple[int, list[int]] | None = None) -> list[Any]:
        """Return the frames of the message.

        Args:
            first: the number of its first sample.
            place: the block that holds the larger arrays of the last sample, and their sizes.
        """
        self._file.seek(self._end)
        self._file.write(struct.pack(f"<{len(self)}Q", *self._sizes))
        self._file.truncate()  # removes what could not be pickled, or was taken back
        self._file.seek(0)
        kind = MessageKind.SAMPLES if place is None else MessageKind.IN_BLOCK
        self._file.write(pack_head(kind, self._worker, first, len(self)))
        if place is None:
            return [self._file.getvalue(), *self.apart]
        number, sizes = place
        return [self._file.getvalue(), struct.pack(f"<{1 + len(sizes)}Q", number, *sizes)]


def unpack_place(message: Sequence[Any]) -> tuple[int, list[int]]:
    """Return the block of the larger arrays of a message's last sample, and their sizes."""
    number, *sizes = np.frombuffer(message[1], "<u8").tolist()
    return number, sizes


def unpack_samples(message: Sequence[Any], n_samples: int) -> list[tuple[memoryview, list[Any]]]:
    """For each sample of a message what `unpack_sample` makes it of."""
    pickles = payload_of(message)
    end = len(pickles) - _SIZE_BYTES * n_samples
    found, start = list[tuple[memoryview, list[Any]]](), 0
    for size in struct.unpack(f"<{n_samples}Q", pickles[end:]):
        found.append((pickles[start : start + size], []))
        start += size
    found[-1] = (found[-1][0], [memoryview(memory) for memory in message[1:]])
    return found


def unpack_sample(pickled: memoryview, buffers: list[Any]) -> Any:
    """Return a sample; its larger arrays are views of the received memory, and keep it."""
    # From our own worker, never from data.
    return pickle.loads(pickled, buffers=buffers)


def payload_of(message: Sequence[Any]) -> memoryview:
    """Return the bytes after the head."""
    return memoryview(message[0])[_HEAD.size :]


def counted_bytes(message: Sequence[Any], n_samples: int) -> int:
    """Return the cost of a message's samples in the budget."""
    n_around = _HEAD.size + _SIZE_BYTES * n_samples
    return sum(map(len, message)) - n_around + _OVERHEAD_BYTES * n_samples


def zeromq(user: str = "MultiLoader") -> ModuleType:
    """Load pyzmq; `user` is named in the error if it is missing.

    Raises:
        UnsupportedEnvironment: it is not installed.
    """
    try:
        import zmq
    except ImportError as error:
        raise UnsupportedEnvironment(
            f"{user} needs pyzmq ({error}): {install_hint('zmq')}"
        ) from error
    module: ModuleType = zmq
    return module


_NAME: Final = "samples"
_RANDOM_LETTERS: Final = 8  # as in the names that `tempfile.mkdtemp` makes
_MAX_BYTES: Final = 107
"""Of the path of a socket: the kernel has no room for more."""


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
        self._frames = _FrameKeeper()
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

    def take(self) -> list[Any] | None:
        """Return the next message, or None.

        Its first frame is bytes; each other frame is an array over the frame's memory, without a
        copy.
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
        """Remove the folder: workers stay connected, and no process can connect any more."""
        if self._folder is not None:
            with files_explained():
                remove_tree(self._folder)
            self._folder = None

    def close(self) -> None:
        """Close the socket and remove the folder; taken messages stay valid. Idempotent."""
        self._socket.close()
        self._context.term()
        self.hide()
        self._frames.close()


class _FrameKeeper(Closing):
    """A keeper of frames until no array views them, and then until Ctrl-C is held back.

    pyzmq checks for signals when a frame is finalized; an exception of the handler is lost there.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._ended: deque[weakref.ref[Any]] = deque()
        self._end = self._ended.append  # not a Python function, in which Ctrl-C could strike

    def memory_of(self, frame: Any) -> npt.NDArray[np.uint8]:
        """Return the memory of a frame, valid for as long as anything refers to it."""
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
        """Release all frames; those in use end when they are released."""
        self.let_go()
        self._held.clear()
