"""A worker that iterates a whole dataset, and sends every sample as soon as there is room for it.

Main says when there is: a worker may have so many bytes under way that main has not handed over.
"""

from __future__ import annotations

import os
import struct
import traceback
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from shardio._engine.calling import as_failure
from shardio._engine.channel import Channel
from shardio._engine.linux import keep_freed_memory, yield_to_main
from shardio._engine.mail import Kind, counted_bytes, pack_head, pack_sample, zeromq
from shardio._engine.overdue import answer_with_stacks
from shardio._engine.wire import pack_error
from shardio.errors import TransformError

READY: Final = b"+"
"""A worker has loaded the dataset, and awaits the address of main's socket."""

GOODBYE: Final = b"."
"""Main has all that a worker has sent."""

CREDIT: Final = struct.Struct("<Q")
"""So many bytes more have been handed over."""


class WorkerInfo(NamedTuple):
    """Which worker this process is, from 0 up, and of how many."""

    number: int
    n_workers: int


_here: WorkerInfo | None = None


def worker_info() -> WorkerInfo | None:
    """Which of a MultiLoader's workers runs this code; None where that is no worker of one.

    A dataset that gives every n-th sample, from the worker's number on, is iterated once by all
    workers together.
    """
    return _here


def send_all(dataset: Iterable[Any], n_workers: int, most_bytes: int, channel: Channel) -> None:
    """Iterate the dataset and send its samples to the address that main says. Runs in a worker.

    Args:
        dataset: to iterate, once.
        n_workers: how many processes do the same.
        most_bytes: that may be under way from this one.
        channel: of this worker, with a file for the stacks of each.
    """
    global _here
    yield_to_main()
    keep_freed_memory()
    answer_with_stacks(channel.fds[channel.index])
    _here = WorkerInfo(channel.index, n_workers)
    os.environ["WORKER"], os.environ["NUM_WORKERS"] = map(str, _here)  # webdataset looks there
    zmq = zeromq()
    channel.send(READY)
    address = channel.recv()
    if address is None:
        return
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0  # nothing is under way when a worker ends, unless main has gone
        socket.sndhwm = 0  # bytes are bounded, not messages
        socket.connect(os.fsdecode(address))
        outbox = _Outbox(socket, channel, most_bytes)
        try:
            outbox.send_samples(dataset)
            outbox.await_goodbye()
        except _MainHasGone:
            return


class _MainHasGone(BaseException):
    """Main has closed the channel: not for the user's code to catch."""


class _Outbox:
    """What one worker has sent, and may send; borrows its socket and channel."""

    def __init__(self, socket: Any, channel: Channel, most_bytes: int) -> None:
        self._socket, self._channel, self._most_bytes = socket, channel, most_bytes
        self._n_under_way = 0
        self._n_sent = 0

    def send_samples(self, dataset: Iterable[Any]) -> None:
        """Send a greeting, every sample, and how it ended."""
        self._say(Kind.HELLO)
        try:
            for sample in dataset:
                self._send(sample)
        except _MainHasGone:
            raise
        except BaseException as error:  # noqa: BLE001  # sys.exit and all: main raises it there
            self._say(Kind.FAILED, pack_error(self._as_failure(error)))
        else:
            self._say(Kind.END)

    def await_goodbye(self) -> None:
        """Wait until main has all of it: what ends before may take some along."""
        while self._channel.recv() not in (GOODBYE, None):
            pass

    def _say(self, kind: Kind, rest: bytes = b"") -> None:
        self._socket.send(pack_head(kind, self._channel.index, self._n_sent) + rest)

    def _send(self, sample: Any) -> None:
        try:
            frames = pack_sample(sample, self._channel.index, self._n_sent)
        except Exception as error:
            raise TransformError(
                f"sample {self._n_sent} of worker {self._channel.index} cannot be pickled: "
                f"{type(error).__name__}: {error}"
            ) from error
        n_bytes = counted_bytes([memoryview(frame).nbytes for frame in frames])
        while 0 < self._n_under_way > self._most_bytes - n_bytes:  # one alone may be of any size
            self._take_credit()
        self._n_under_way += n_bytes
        if len(frames) == 1:
            self._socket.send(frames[0], copy=False)
        else:  # what is not waited for, the dataset might meanwhile write something else into
            self._socket.send_multipart(frames, copy=False, track=True).wait()
        self._n_sent += 1

    def _take_credit(self) -> None:
        credit = self._channel.recv()
        if credit is None:
            raise _MainHasGone
        self._n_under_way -= CREDIT.unpack(credit)[0]

    def _as_failure(self, error: BaseException) -> Exception:
        """What main is to raise: the exception itself, unless it would end more than a loop."""
        where = f"worker {self._channel.index}, at sample {self._n_sent} of it"
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        failure = as_failure(error, f"{where}: the dataset")
        failure.add_note(f"in {where}:\n\n{text}")
        return failure
