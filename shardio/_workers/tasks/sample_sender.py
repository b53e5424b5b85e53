"""A worker that iterates a whole dataset and sends every sample as soon as it may.

Main grants credit: a worker may have a limited number of bytes under way that main has not handed
over yet.
"""

from __future__ import annotations

import math
import os
import struct
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, NamedTuple

from shardio._base.classes import Closing
from shardio._workers.processes.channel import Channel
from shardio._workers.processes.linux import keep_freed_memory, this_process, yield_to_main
from shardio._workers.processes.serialization import add_note, as_failure, pack_error, text_of
from shardio._workers.processes.stack_dumps import answer_with_stacks
from shardio._workers.tasks.messages import (
    MIN_IN_BLOCK_BYTES,
    MessageBatch,
    MessageKind,
    pack_head,
    zeromq,
)
from shardio._workers.tasks.values import LentBlocks
from shardio.errors import TransformError, UnsupportedEnvironment

READY: Final = b"+"
"""A worker has loaded the dataset, and awaits the address of main's socket."""

WANT: Final = b"?"
"""A worker has a large sample, and no block for it."""

WORD: Final = struct.Struct("<QQ")
"""A message of main to a sender: a `Command` and a number."""

_SOON_S: Final = 0.0005
"""The time a sample may wait for others to travel in the same message."""
_MAX_TOGETHER_BYTES: Final = 64 << 10
"""The maximum size of a message of several samples, or a fraction of the credit: credit comes back
in such amounts.
"""
_PARTS: Final = 16


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
    most_skips: int | None,
    channel: Channel,
) -> None:
    """Iterate the dataset and send its samples to the address that main says. Runs in a worker.

    Args:
        dataset: to iterate, once.
        n_workers: how many processes do the same.
        most_bytes: that may be under way from this one.
        most_skips: how many samples may fail, which are then left out; None for none.
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
    channel.send(READY)
    address = channel.recv()
    if address is None:
        return
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0  # nothing is unsent when a worker ends, unless main is gone
        socket.sndhwm = 0  # bytes are bounded, not messages
        socket.connect(os.fsdecode(address))
        with _Sender(socket, channel, most_bytes) as outbox, suppress(_MainExited):
            outbox.send_samples(dataset, most_skips)
            outbox.await_goodbye()


class _MainExited(BaseException):
    """Main has closed the channel: not for the user's code to catch."""


class _Sender(Closing):
    """The samples that one worker has sent and may send; borrows its socket and channel.

    Samples that come quickly wait for each other, so that several travel in a message; but not for
    long, whatever the dataset is doing: then a thread sends them. Sending, from either thread, is
    under a lock.
    """

    def __init__(self, socket: Any, channel: Channel, most_bytes: int) -> None:
        self._socket, self._channel, self._most_bytes = socket, channel, most_bytes
        self._most_together = min(_MAX_TOGETHER_BYTES, most_bytes // _PARTS)
        self._lock = threading.Lock()
        self._unsent = MessageBatch(channel.index)
        self._lent_blocks = LentBlocks()
        self._n_under_way = 0
        self._n_sent = 0
        self._sent_s = -math.inf
        self._are_waiting = threading.Event()
        self._sender: threading.Thread | None = None
        self._is_over, self._pid = False, this_process.pid

    @property
    def _n_done(self) -> int:
        return self._n_sent + len(self._unsent)

    def send_samples(self, dataset: Iterable[Any], most_skips: int | None) -> None:
        """Send a greeting, every sample or that it is skipped, and how it ended."""
        self._say(MessageKind.HELLO)
        n_left = most_skips or 0
        try:
            samples = iter(dataset)
            while True:
                try:
                    if not self._send_next(samples):
                        break
                except _MainExited:
                    raise
                # User code may raise anything, sys.exit included; so below
                except BaseException as error:
                    if most_skips is None:
                        raise
                    self._say(MessageKind.SKIPPED, pack_error(self._as_failure(error)))
                    self._n_sent += 1
                    n_left -= 1
                    if n_left < 0:  # more failed than main allows
                        return
        except _MainExited:
            raise
        except BaseException as error:  # noqa: BLE001  # sys.exit and all: main raises it there
            self._say(MessageKind.FAILED, pack_error(self._as_failure(error)))
        else:
            self._say(MessageKind.END)

    def await_goodbye(self) -> None:
        """Wait until main has received everything: an earlier exit may lose messages."""
        while self._receive_command() != Command.GOODBYE:
            pass

    def _say(self, kind: MessageKind, rest: bytes = b"") -> None:
        self._check_process()
        with self._lock:
            self._flush()
            self._socket.send(pack_head(kind, self._channel.index, self._n_sent) + rest)

    def _check_process(self) -> None:
        """End a fork of this worker that has come back from the dataset: the socket is not its."""
        if this_process.pid != self._pid:
            self._channel.report_failure(
                f"at sample {self._n_done} of worker {self._channel.index}, a process that was "
                "forked there came back from the dataset; it must end by os._exit"
            )
            os._exit(1)

    def _send_next(self, samples: Iterator[Any]) -> bool:
        """Send a sample, at once or soon; return False if there are no more."""
        try:
            # Not a `for`: an object whose `__iter__` starts again would never end
            sample = next(samples)
        except StopIteration:
            return False
        self._check_process()
        with self._lock:
            try:
                self._unsent.add(sample)
            except Exception as error:
                raise TransformError(
                    f"sample {self._n_done} of worker {self._channel.index} cannot be pickled: "
                    f"{type(error).__name__}: {text_of(error)}"
                ) from error
            is_large = self._unsent.apart or self._unsent.n_bytes >= self._most_together
            if is_large or time.monotonic() - self._sent_s >= _SOON_S:
                try:
                    self._flush()
                except BaseException:  # the samples before are sent, together with the error
                    self._unsent.take_back()
                    raise
        if self._unsent:
            self._send_soon()
        return True

    def _flush(self) -> None:
        """Send what waits, once there is room for it."""
        sheaf = self._unsent
        if not sheaf:
            return
        n_bytes = sheaf.n_bytes
        # A single sample may have any size
        while 0 < self._n_under_way > self._most_bytes - n_bytes:
            self._receive_command()
        place = None
        if sheaf.n_apart_bytes >= MIN_IN_BLOCK_BYTES:
            self._await_block()
            place = self._lent_blocks.fill(sheaf.apart)
        # Copied: the dataset may reuse its arrays for the next sample.
        frames = sheaf.frames(self._n_sent, place)
        if place is not None:
            # Before sending: an interrupted call may have sent the message all the same.
            self._lent_blocks.drop_filled()
        self._socket.send_multipart(frames)
        self._n_under_way += n_bytes
        self._n_sent += len(sheaf)
        self._unsent = MessageBatch(self._channel.index)
        self._sent_s = time.monotonic()

    def _send_soon(self) -> None:
        """Arrange for waiting samples to be sent, even if no other sample follows."""
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_late, daemon=True)
            self._sender.start()
        if not self._are_waiting.is_set():
            self._are_waiting.set()

    def _send_late(self) -> None:
        """Send samples that have waited long enough; runs in a thread until main has exited."""
        while self._are_waiting.wait():
            self._are_waiting.clear()
            time.sleep(_SOON_S)
            with self._lock:
                if self._is_over:
                    return
                try:
                    self._flush()
                except _MainExited:  # the dataset's thread notices by itself
                    return

    def close(self) -> None:
        """Send nothing more, so that the socket may be closed."""
        with self._lock:
            self._is_over = True
        self._are_waiting.set()

    def _await_block(self) -> None:
        """Wait until there is a block to be filled."""
        if not self._lent_blocks:
            try:
                self._channel.send(WANT)
            except (BrokenPipeError, ConnectionResetError):
                raise _MainExited from None
            while not self._lent_blocks:
                self._receive_command()

    def _receive_command(self) -> Command:
        """Wait for a word of main, and act upon it."""
        try:
            received = self._channel.recv_fds()
        except UnsupportedEnvironment as error:
            self._lent_blocks.lose(error)
            return Command.BLOCK
        if received is None:
            raise _MainExited
        message, fds = received
        word, number = WORD.unpack(message)
        if word == Command.CREDIT:
            self._n_under_way -= number
        elif word == Command.BLOCK:
            self._lent_blocks.add(number, fds)
        return Command(word)

    def _as_failure(self, error: BaseException) -> Exception:
        """Return the exception for main to raise; another if it would end more than a loop."""
        where = f"worker {self._channel.index}, at sample {self._n_done} of it"
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        failure = as_failure(error, f"{where}: the dataset")
        add_note(failure, f"in {where}:\n\n{text}")
        return failure
