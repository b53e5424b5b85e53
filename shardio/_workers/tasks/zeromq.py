"""Samples over ZeroMQ: the sockets, the messages, and the worker that sends them.

A worker iterates over a whole dataset and sends its samples in messages:

    head     kind, index of the worker, index of the first sample   2 x uint32, uint64
    payload  one or more samples as packed by `values`; or, for a large sample, the index of a block
             of shared memory that contains the sample, and its size; or an exception

The credit of a worker limits the bytes in flight: those of the samples that the worker holds or has
sent, until the main process opens their message.
"""

from __future__ import annotations

import math
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from types import ModuleType
from typing import Any, Final, NamedTuple

from shardio._base.classes import Closing, undo_on_error
from shardio._workers.processes.linux import (
    check_files,
    keep_freed_memory,
    this_process,
    translate_open_file_errors,
    yield_to_main,
)
from shardio._workers.processes.serialization import ValuePickler, pack_failure, text_of
from shardio._workers.processes.stack_dumps import install_stack_handler
from shardio._workers.processes.worker_main import Channel
from shardio._workers.tasks.values import LentBlocks, pack_value
from shardio.errors import InvalidArgument, TransformError, import_extra

OWN_FILES: Final = 16  # more files than a ZeroMQ context and an unconnected socket open
_SOCKET_NAME: Final = "samples"
_RANDOM_LETTERS: Final = 8  # in a name from `tempfile`
_MAX_PATH_BYTES: Final = 107  # the kernel's maximum for the path of a socket


def zeromq(user: str = "MultiLoader") -> ModuleType:
    """Import pyzmq and return it; if pyzmq is missing, the error says that `user` needs it."""
    # `import zmq` does not import z85.
    module: ModuleType = import_extra(f"{user} needs pyzmq", "zmq", "zmq", "zmq.utils.z85")
    return module


def check_prefix(prefix: Any) -> str:
    """Return the absolute path of `prefix`, the beginning of the path of a socket's folder."""
    if not isinstance(prefix, str | os.PathLike):
        raise InvalidArgument(f"prefix must be the beginning of a path; found {prefix!r}")
    whole = os.path.abspath(os.fspath(prefix) + "x" * _RANDOM_LETTERS)
    parent = os.path.dirname(whole)
    if not os.path.isdir(parent):
        raise InvalidArgument(f"prefix is {prefix!r}, but there is no folder {parent}")
    n_bytes = len(os.fsencode(os.path.join(whole, _SOCKET_NAME)))
    if n_bytes > _MAX_PATH_BYTES:
        raise InvalidArgument(
            f"prefix makes the path of a socket {n_bytes} bytes long; the maximum is "
            f"{_MAX_PATH_BYTES}: use a shorter prefix than {prefix!r}"
        )
    return whole[:-_RANDOM_LETTERS]


class Receiver(Closing):
    """A ZeroMQ socket that receives samples; only one thread at a time may use it.

    The socket has a path, which begins with `prefix`, only while the constructor runs. Workers
    connect through the descriptor `path_fd`. Thus no other process can connect, and no file is left
    behind.
    """

    def __init__(self, prefix: str, n_senders: int) -> None:
        self._zmq = zeromq()
        check_files(OWN_FILES + n_senders)
        self.path_fd = -1
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.PULL)
        parent, name = os.path.split(prefix)
        with undo_on_error(self.close):
            self._socket.linger = 0
            self._socket.rcvhwm = 0  # credit limits the bytes, so the message count needs no limit
            with (
                translate_open_file_errors(),
                tempfile.TemporaryDirectory(prefix=name, dir=parent) as folder,
            ):
                path = os.path.join(folder, _SOCKET_NAME)
                self.address = f"ipc://{path}"
                self._socket.bind(self.address)
                self.path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Return a descriptor to poll after `take` has returned None."""
        fd: int = self._socket.fileno()
        return fd

    def take(self) -> bytes | None:
        try:
            found: bytes = self._socket.recv(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return found

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        if self.path_fd >= 0:
            os.close(self.path_fd)
            self.path_fd = -1


HEAD: Final = struct.Struct("<IIQ")
BLOCK_AND_SIZE: Final = struct.Struct("<QQ")
WORD: Final = struct.Struct("<QQ")  # from the main process to a worker: a Command and a number
WANT: Final = b"?"  # the message by which a worker requests a block for a large sample
# Samples of this size are sent in blocks: 70 KiB take 31 µs in a block, and 41 µs in a message.
MIN_IN_BLOCK_BYTES: Final = 64 << 10
_MIN_APART_BYTES: Final = 24 << 10  # smaller arrays are faster in the pickle than out of band
OVERHEAD_BYTES: Final = 256  # the credit that a sample takes in addition to its bytes
# A worker sends the held samples if they have this size (or 1/16 of the credit), or after _HOLD_S.
_MAX_HELD_BYTES: Final = 64 << 10
_HOLD_S: Final = 0.0005


class MessageKind(IntEnum):
    SAMPLES = 1
    IN_BLOCK = 2  # a sample that was written to a block
    SKIPPED = 3  # an exception instead of a sample
    FAILED = 4  # an exception that has ended the iteration of this worker
    END = 5  # the end; instead of an index, the head contains the number of samples


class Command(IntEnum):
    CREDIT = 1  # the number of bytes that were handed over since the last credit
    BLOCK = 2  # the index of a block to fill; the descriptor is attached the first time
    GOODBYE = 3  # the main process has received everything that the worker has sent


class WorkerInfo(NamedTuple):
    """The index of this worker, from 0 up, and the number of workers."""

    number: int
    n_workers: int


_here: WorkerInfo | None = None


def worker_info() -> WorkerInfo | None:
    """Return the index of this MultiLoader worker and the number of workers; None elsewhere.

    Use this to divide the samples among n workers: if each worker yields every n-th sample,
    starting from the index of the worker, all workers together yield every sample once.
    """
    return _here


def send_all(
    dataset: Iterable[Any],
    n_workers: int,
    max_bytes: int,
    may_skip: bool,  # noqa: FBT001  # `functools.partial` binds it by position
    channel: Channel,
) -> None:
    """Iterate over the dataset in a worker; send its samples, at most `max_bytes` in flight.

    With `may_skip`, continue after a sample that failed. The descriptors of the channel are the
    stack files of all workers, followed by the `path_fd` of the receiver.
    """
    global _here
    yield_to_main()
    keep_freed_memory()
    install_stack_handler(channel.fds[channel.index])
    _here = WorkerInfo(channel.index, n_workers)
    # webdataset reads these variables.
    os.environ["WORKER"], os.environ["NUM_WORKERS"] = map(str, _here)
    zmq = zeromq()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0  # at the end, drop unsent messages: the main process has then exited
        socket.sndhwm = 0  # credit limits the bytes, so the message count needs no limit
        socket.connect(f"ipc:///proc/self/fd/{channel.fds[-1]}")
        sender = SampleSender(socket, channel, max_bytes, may_skip=may_skip)
        with sender, suppress(MainExited):
            sender.send_samples(dataset)
            sender.await_goodbye()


class MainExited(BaseException):
    """Raised if the main process closed the channel; `except Exception` does not catch it."""


class SampleSender(Closing):
    """A sender of the samples of one worker; borrows the socket and the channel.

    Small samples that follow each other quickly are held, and sent in one message. A thread sends
    them after a short time, because the next sample of the dataset may take long.
    """

    def __init__(self, socket: Any, channel: Channel, max_bytes: int, *, may_skip: bool) -> None:
        self._socket, self._channel, self._max_bytes = socket, channel, max_bytes
        self._may_skip, self._pid = may_skip, this_process.pid
        self._pickler, self._lent_blocks = ValuePickler(_MIN_APART_BYTES), LentBlocks()
        self._n_under_way = self._n_sent = 0
        self._lock = threading.Lock()  # of the socket and the held message
        self._held, self._max_held = bytearray(), min(_MAX_HELD_BYTES, max_bytes // 16)
        self._sent_s = -math.inf
        self._must_flush = threading.Event()
        self._thread: threading.Thread | None = None

    def send_samples(self, dataset: Iterable[Any]) -> None:
        """Send every sample, or an exception in its place; then send the end of the iteration."""
        try:
            samples = iter(dataset)
            while self._send_next(samples):
                self._n_sent += 1
        except MainExited:
            raise
        except BaseException as error:  # noqa: BLE001  # sent to the main process, even SystemExit
            self._send(MessageKind.FAILED, self._packed(error))
        else:
            self._send(MessageKind.END)

    def await_goodbye(self) -> None:
        """Wait until the main process has all messages; an earlier exit could lose some of them."""
        while self._receive_command() != Command.GOODBYE:
            pass

    def _send_next(self, samples: Iterator[Any]) -> bool:
        """Send the next sample, or the exception in its place; return False if there is none."""
        try:
            # Do not use a `for` loop. The loop would be started again after each skipped sample,
            # and would never end if the `__iter__` of the iterator restarts the iteration.
            sample = next(samples, _END)
            if sample is _END:
                return False
            self._send_sample(sample)
        except MainExited:
            raise
        except BaseException as error:  # user code may raise anything, even SystemExit
            if not self._may_skip:
                raise
            self._send(MessageKind.SKIPPED, self._packed(error))
        return True

    def _send_sample(self, sample: Any) -> None:
        try:
            packed = pack_value(sample, self._pickler)
        except Exception as error:
            raise TransformError(
                f"sample {self._n_sent} of worker {self._channel.index} cannot be pickled: "
                f"{type(error).__name__}: {text_of(error)}"
            ) from error
        if packed.n_bytes < MIN_IN_BLOCK_BYTES:
            payload, can_wait = packed.to_bytes(), not packed.buffers
            self._send(MessageKind.SAMPLES, payload, packed.n_bytes, can_wait=can_wait)
            return
        self._check_process()  # a fork must not write to the worker's blocks
        if not self._lent_blocks:
            self._ask_for_block()
        number, n_bytes = self._lent_blocks.fill(packed), packed.n_bytes
        self._send(MessageKind.IN_BLOCK, BLOCK_AND_SIZE.pack(number, n_bytes), n_bytes)

    def _send(
        self,
        kind: MessageKind,
        payload: bytes | bytearray = b"",
        n_bytes: int = 0,
        *,
        can_wait: bool = False,
    ) -> None:
        """Send a message as soon as the credit allows; `n_bytes` is the size of the sample.

        The message may exceed the credit if it is the only one in flight. A sample that `can_wait`
        is held if the last message was sent less than _HOLD_S ago.
        """
        self._check_process()  # before the lock, which a fork may inherit in the locked state
        n_bytes += OVERHEAD_BYTES
        while 0 < self._n_under_way > self._max_bytes - n_bytes:
            with self._lock:
                self._flush()
            self._receive_command()
        self._n_under_way += n_bytes
        with self._lock:
            if kind != MessageKind.SAMPLES:
                self._flush()  # the held samples come first
            if not self._held:
                self._held += HEAD.pack(kind, self._channel.index, self._n_sent)
            self._held += payload
            can_wait = can_wait and len(self._held) < self._max_held
            if not can_wait or time.monotonic() - self._sent_s > _HOLD_S:
                self._flush()
            elif not self._must_flush.is_set():
                self._flush_soon()

    def _flush_soon(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._flush_late, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the limit of threads
                self._flush()
                return
            self._thread = thread
        self._must_flush.set()

    def _flush(self) -> None:
        if self._held:
            self._socket.send(self._held)
            self._held.clear()
            self._sent_s = time.monotonic()

    def _flush_late(self) -> None:
        """Send held samples after a short time; run in a thread as long as the worker runs."""
        while self._must_flush.wait():
            self._must_flush.clear()
            # While the dataset uses the CPU, each wait takes 5 ms longer, because of the GIL.
            if time.monotonic() - self._sent_s < _HOLD_S:
                time.sleep(_HOLD_S)
            with self._lock:
                self._flush()

    def close(self) -> None:
        """Drop held samples, so that the thread does not use the socket any more."""
        with self._lock:
            self._held.clear()

    def _check_process(self) -> None:
        """End this process if it is a fork of the worker, because only the worker may send."""
        if this_process.pid != self._pid:
            os._exit(1)

    def _ask_for_block(self) -> None:
        try:
            self._channel.send(WANT)
        except (BrokenPipeError, ConnectionResetError):
            raise MainExited from None
        while not self._lent_blocks:
            self._receive_command()

    def _receive_command(self) -> Command:
        received = self._channel.recv()
        if received is None:
            raise MainExited
        message, fds = received
        command, number = WORD.unpack(message)
        if command == Command.CREDIT:
            self._n_under_way -= number
        elif command == Command.BLOCK:
            self._lent_blocks.add(number, fds)
        return Command(command)

    def _packed(self, error: BaseException) -> bytes:
        where = f"worker {self._channel.index}, at its sample {self._n_sent}"
        return pack_failure(error, f"{where}: the dataset")


_END: Final = object()
