"""A worker that iterates a whole dataset and sends every sample as soon as it may.

Each sample is one message of ZeroMQ; ZeroMQ's own thread writes several at a time. A message is

    head     kind, number of the worker, number of the sample   uint32 2, uint64
    payload  the sample as `values` packs it, or of a large one the block it lies in and its bytes;
             or an exception

Main grants credit: a worker may have a limited number of bytes under way that main has not handed
over yet.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, NamedTuple

from shardio._workers.processes.channel import Channel
from shardio._workers.processes.linux import keep_freed_memory, this_process, yield_to_main
from shardio._workers.processes.serialization import pack_failure, text_of
from shardio._workers.processes.stack_dumps import answer_with_stacks
from shardio._workers.tasks.messages import zeromq
from shardio._workers.tasks.values import LentBlocks, pack_value
from shardio.errors import TransformError

HEAD: Final = struct.Struct("<IIQ")
PLACE: Final = struct.Struct("<QQ")
"""The number of a block, and the bytes in it."""
WORD: Final = struct.Struct("<QQ")
"""A message of main to a sender: a `Command` and a number."""
WANT: Final = b"?"
"""A worker has a large sample, and no block for it."""
MIN_IN_BLOCK_BYTES: Final = 64 << 10
"""A larger sample travels in a block: main takes 31 us for 70 KiB there, 41 us in a message."""
_MIN_APART_BYTES: Final = 4 << 10
"""Smaller arrays are part of the pickle, which takes less time."""
OVERHEAD_BYTES: Final = 256
"""The cost of a message beyond the bytes of its sample: most of a small one's."""


class MessageKind(IntEnum):
    """The kind of a message."""

    HELLO = 1  # the worker is connected
    SAMPLE = 2
    IN_BLOCK = 3  # a sample, in a block
    SKIPPED = 4  # instead of a sample an exception
    FAILED = 5  # an exception ended the worker's iteration
    END = 6  # no more samples: the number is that of all samples of this worker


class Command(IntEnum):
    """The command of a message from main."""

    CREDIT = 1  # the number of bytes handed over since the last credit
    BLOCK = 2  # a block that may be filled; its descriptor is attached the first time
    GOODBYE = 3  # main has received everything that the worker has sent


class WorkerInfo(NamedTuple):
    """The number of this worker, from 0 up, and the number of workers."""

    number: int
    n_workers: int


_here: WorkerInfo | None = None


def worker_info() -> WorkerInfo | None:
    """Return the MultiLoader worker that runs this code; None outside of such a worker.

    A dataset that yields every n-th sample, from the worker's number on, is iterated once by all
    workers together.
    """
    return _here


def send_all(
    dataset: Iterable[Any],
    n_workers: int,
    most_bytes: int,
    may_skip: bool,  # noqa: FBT001  # bound by position, as a target of a pool
    channel: Channel,
) -> None:
    """Iterate the dataset and send its samples to the address that main sends. Runs in a worker.

    Args:
        dataset: to iterate, once.
        n_workers: how many processes do the same.
        most_bytes: that may be under way from this one.
        may_skip: True if the iteration goes on after a sample that failed.
        channel: of this worker, with a file for the stacks of each.
    """
    global _here
    yield_to_main()
    keep_freed_memory()
    answer_with_stacks(channel.fds[channel.index])
    _here = WorkerInfo(channel.index, n_workers)
    # Webdataset reads these variables
    os.environ["WORKER"], os.environ["NUM_WORKERS"] = map(str, _here)
    zmq = zeromq()
    address = channel.recv()
    if address is None:
        return
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0  # nothing is unsent when a worker ends, unless main is gone
        socket.sndhwm = 0  # bytes are bounded, not messages
        socket.connect(os.fsdecode(address))
        sender = SampleSender(socket, channel, most_bytes, may_skip=may_skip)
        with suppress(MainExited):
            sender.send_samples(dataset)
            sender.await_goodbye()


class MainExited(BaseException):
    """Main has closed the channel: not for the user's code to catch."""


class SampleSender:
    """The samples that one worker has sent and may send; borrows its socket and channel."""

    def __init__(self, socket: Any, channel: Channel, most_bytes: int, *, may_skip: bool) -> None:
        self._socket, self._channel, self._most_bytes = socket, channel, most_bytes
        self._may_skip, self._pid = may_skip, this_process.pid
        self._lent_blocks = LentBlocks()
        self._n_under_way = self._n_sent = 0

    def send_samples(self, dataset: Iterable[Any]) -> None:
        """Send a greeting, every sample or that it is skipped, and how it ended."""
        self._send(MessageKind.HELLO)
        try:
            samples = iter(dataset)
            while self._send_next(samples):
                self._n_sent += 1
        except MainExited:
            raise
        except BaseException as error:  # noqa: BLE001  # sys.exit and all: main raises it there
            self._send(MessageKind.FAILED, self._packed(error))
        else:
            self._send(MessageKind.END)

    def await_goodbye(self) -> None:
        """Wait until main has received everything: an earlier exit may lose messages."""
        while self._receive_command() != Command.GOODBYE:
            pass

    def _send_next(self, samples: Iterator[Any]) -> bool:
        """Send a sample, or that it is skipped; return False if there are no more."""
        try:
            # Not a `for`: an object whose `__iter__` starts again would never end
            sample = next(samples, _END)
            if sample is _END:
                return False
            self._check_process()
            self._send_sample(sample)
        except MainExited:
            raise
        except BaseException as error:  # user code may raise anything, sys.exit included
            if not self._may_skip:
                raise
            self._send(MessageKind.SKIPPED, self._packed(error))
        return True

    def _send_sample(self, sample: Any) -> None:
        try:
            packed = pack_value(sample, _MIN_APART_BYTES)
        except Exception as error:
            raise TransformError(
                f"sample {self._n_sent} of worker {self._channel.index} cannot be pickled: "
                f"{type(error).__name__}: {text_of(error)}"
            ) from error
        if packed.n_bytes < MIN_IN_BLOCK_BYTES:
            self._send(MessageKind.SAMPLE, packed.to_bytes(), packed.n_bytes)
            return
        if not self._lent_blocks:
            self._ask_for_block()
        number, n_bytes = self._lent_blocks.fill(packed), packed.n_bytes
        self._send(MessageKind.IN_BLOCK, PLACE.pack(number, n_bytes), n_bytes)

    def _send(self, kind: MessageKind, payload: bytes | bytearray = b"", n_bytes: int = 0) -> None:
        """Send a message, once there is room for it; a single one may have any size.

        `n_bytes` are those of its sample.
        """
        self._check_process()
        n_bytes += OVERHEAD_BYTES
        while 0 < self._n_under_way > self._most_bytes - n_bytes:
            self._receive_command()
        self._n_under_way += n_bytes
        self._socket.send(HEAD.pack(kind, self._channel.index, self._n_sent) + payload)

    def _check_process(self) -> None:
        """End a fork of this worker that has come back from the dataset: the socket is not its."""
        if this_process.pid != self._pid:
            self._channel.report_failure(
                f"at sample {self._n_sent} of worker {self._channel.index}, a process that was "
                "forked there came back from the dataset; it must end by os._exit"
            )
            os._exit(1)

    def _ask_for_block(self) -> None:
        """Wait until there is a block to be filled."""
        try:
            self._channel.send(WANT)
        except (BrokenPipeError, ConnectionResetError):
            raise MainExited from None
        while not self._lent_blocks:
            self._receive_command()

    def _receive_command(self) -> Command:
        """Wait for a command of main, and act upon it."""
        received = self._channel.recv_fds()
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
        where = f"worker {self._channel.index}, at sample {self._n_sent} of it"
        return pack_failure(error, f"{where}: the dataset")


_END: Final = object()
