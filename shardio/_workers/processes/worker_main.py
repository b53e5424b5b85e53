"""A worker process: its channel to the main process, and its first steps.

A channel is a SOCK_SEQPACKET socket pair: the kernel keeps message boundaries, and each process
notices when the other exits. If a message (a header of HEADER_BYTES and a payload) is too long
for the socket, `pack_message` moves the payload to a memory file. The header is then sent with one
byte of the payload, which marks the message as long, and with the file descriptor.

The main process and the zygote import this module, so it imports nothing slow.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NoReturn

from shardio._workers.processes.linux import memory_file, name_process
from shardio.errors import InvalidArgument, UnsupportedEnvironment

# Messages of this size fit into the smallest default socket buffer.
MAX_MESSAGE_BYTES = 65536
# The maximum number of descriptors that the kernel accepts with one message (SCM_MAX_FD).
MAX_FDS = 253

# A plain int, because operators of enum members are slow.
LOST_FDS = int(socket.MSG_CTRUNC)

Ancillary = list[tuple[int, int, bytes]]
Received = tuple[bytes, Ancillary, int, object]

# The arguments of `recvmsg`; an exec closes the received descriptors.
RECEIVE = (MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC)


class Channel:
    """The worker's side of its channel; `fds` duplicate the descriptors that its pool shares."""

    def __init__(self, index: int, end: socket.socket, fds: tuple[int, ...]) -> None:
        self.index = index
        self.fds = fds
        self._socket = end

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message of 1 to MAX_MESSAGE_BYTES bytes; block while the socket's buffer is full.

        The caller still owns `fds`. Raises BrokenPipeError if the pool was closed.
        """
        check_message(message, fds)
        if fds:
            socket.send_fds(self._socket, [message], list(fds))
        else:
            self._socket.send(message)

    def recv(self) -> tuple[bytes, tuple[int, ...]] | None:
        """Wait for a message; return None if the pool was closed. The caller owns the fds."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(*RECEIVE)
        except ConnectionResetError:
            # The kernel raises this once if the main process closed its socket before it had read
            # all messages of this worker. Messages that the main process sent are still queued.
            data, ancillary, flags, _ = self._socket.recvmsg(*RECEIVE)
        if ancillary or flags & LOST_FDS:
            return (data, unpack_fds(ancillary, flags)) if data else None
        return (data, ()) if data else None

    def report_failure(self, text: str) -> None:
        """Send the text of an exception, as an empty message with a memory file."""
        fd = memory_file(text.encode("utf-8", "backslashreplace"))
        socket.send_fds(self._socket, [b""], [fd])


def check_message(message: bytes, fds: Sequence[int]) -> None:
    if not 0 < len(message) <= MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"a message to or from a worker has 1 to {MAX_MESSAGE_BYTES} bytes, this one "
            f"has {len(message)}; to send more, send the descriptor of a memory file"
        )
    if len(fds) > MAX_FDS:
        raise InvalidArgument(f"a message carries at most {MAX_FDS} descriptors, not {len(fds)}")


def unpack_fds(ancillary: Ancillary, flags: int) -> tuple[int, ...]:
    if flags & LOST_FDS:
        raise UnsupportedEnvironment(
            "file descriptors sent to or from a worker were lost: this process has reached its "
            "limit of open files; raise that limit with `ulimit -n`"
        )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)


HEADER_BYTES: Final = 32  # the length of the header of each task and each reply


@contextlib.contextmanager
def pack_message(content: bytes) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """Yield the message and descriptors to send for `content`, a header and a payload."""
    if len(content) <= MAX_MESSAGE_BYTES:
        yield content, ()
        return
    fd = memory_file(content[HEADER_BYTES:])
    try:
        yield content[: HEADER_BYTES + 1], (fd,)
    finally:
        os.close(fd)


def unpack_message(message: bytes, fds: Sequence[int]) -> bytes:
    """Return the header and payload of a received message, and close its file descriptors."""
    if not fds:
        return message
    (fd,) = fds
    try:
        return message[:HEADER_BYTES] + os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


Start = Literal["zygote", "spawn"]
"""The start method: a fork of the zygote, which executes a new interpreter with "spawn"."""

FORK, EXECUTE = range(2)
"""The action that starts a worker: the zygote forks, or forks and executes an interpreter."""

Target = Callable[[Channel], object]

_Fds = tuple[int, ...]


def preload(names: tuple[str, ...]) -> None:
    """Import modules for all forks of this process; skip a module that cannot be imported."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Exempt the present objects from garbage collection. A collection would write to all of them,
    # and the kernel would then copy their pages. Do not collect garbage before this call: only 500
    # of 36,000 objects are garbage, and finding them takes 12 ms.
    gc.freeze()


def execute(index: int, fds: _Fds, modules: tuple[str, ...]) -> NoReturn:
    """Replace the program of this fork of the zygote with a new interpreter."""
    for fd in fds:
        os.set_inheritable(fd, True)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from shardio._workers.processes.worker_main import begin; "
        f"begin({index}, {fds!r}, {modules!r})"
    )
    # Use the zygote's own command line, with other code as the last argument.
    os.execv(sys.executable, [*sys.orig_argv[:-1], code])


def begin(index: int, fds: _Fds, modules: tuple[str, ...]) -> NoReturn:
    for fd in fds:
        os.set_inheritable(fd, False)
    # Import the modules before the environment of the main process is applied, because the present
    # environment, that of the zygote, makes libraries use one thread.
    preload(modules)
    run(index, fds)


def run(index: int, fds: _Fds) -> NoReturn:
    """Run the pool's function and exit; `fds` has the channel, the function, and `Channel.fds`."""
    name_process("shardio-worker")
    gc.enable()
    channel_fd, payload_fd, *given = fds
    channel = Channel(index, socket.socket(fileno=channel_fd), tuple(given))
    code = 0
    try:
        # Import these late, because they import NumPy and cloudpickle.
        from shardio._workers.processes.global_generators import seed_generators_of_worker
        from shardio._workers.processes.serialization import unpack

        seed_generators_of_worker()
        target: Target = unpack(payload_fd)
        os.close(payload_fd)
        target(channel)
    except BaseException as error:  # noqa: BLE001  # even sys.exit is reported as text
        code = 1
        _report(channel, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(channel: Channel, error: BaseException) -> None:
    # Leave out the frame of `run` itself.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    # These errors mean that the main process has closed the pool. The close is then usually the
    # cause of `error`, too, so nothing needs to be reported.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.report_failure(text)
