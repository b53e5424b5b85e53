"""One iteration of a dataset by several workers, each of which iterates all of it.

        main                                             worker
  A  WorkerPool(send_all, dataset) ────────────────────▶ loads dataset and ZeroMQ
  B     Receiver: folder, socket ◀─────────────── READY ──
  C     address ───────────────────────────────────────▶ connects
  D     hide: the folder is gone ◀─────────── HELLO ───
  E     next ◀═════════ SAMPLES: pickles, arrays ══════ iterates
  F     credit: bytes that were handed over ───────────▶ goes on sending
        blocks, for larger samples (block_credits) ────▶ fills them, asks for more
  G     the count is checked ◀═════════════════ END ═══
  H     goodbye ───────────────────────────────────────▶ exits

═ is the ZeroMQ socket, ─ the pool's channels, but for HELLO.
"""

from __future__ import annotations

import functools
import os
import select
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from shardio._base.callers import caller_stacklevel
from shardio._base.classes import Closing
from shardio._workers.processes.linux import Finalizer, interrupts_held, this_process
from shardio._workers.processes.serialization import text_of, unpack_error
from shardio._workers.processes.stack_dumps import stack_files, timeout_error
from shardio._workers.processes.worker_main import Start
from shardio._workers.processes.worker_pool import Failed, WorkerExit, WorkerPool
from shardio._workers.tasks.failure_policy import ErrorBudget
from shardio._workers.tasks.messages import (
    MessageKind,
    Receiver,
    counted_bytes,
    payload_of,
    unpack_head,
    unpack_place,
    unpack_sample,
    unpack_samples,
)
from shardio._workers.tasks.sample_sender import WANT, WORD, Command, WorkerInfo, send_all
from shardio._workers.tasks.values import BlockLender
from shardio.errors import ClosedError, TransformError, WorkerDied

SKIPPED: Final = object()
"""Stands for a sample that is left out."""


class ReceiveBuffer:
    """The samples of all workers, each numbered by its worker; of one message they are at hand.

    Args:
        n_workers: whose they are.
        error_budget: which samples that fail are left out.
    """

    def __init__(self, n_workers: int, error_budget: ErrorBudget) -> None:
        self._error_budget = error_budget
        self.n_arrived = [0] * n_workers
        """Samples handed over or skipped."""
        self.n_owed = [0] * n_workers
        """Bytes handed over that their worker has not been credited."""
        self._n_skipped = [0] * n_workers
        self._last_was_skipped = [False] * n_workers
        self._available: deque[tuple[memoryview, list[Any]]] = deque()
        self.sender = 0
        """Whose samples are at hand."""

    @property
    def n_available(self) -> int:
        """The number of samples of the last message that are still to be handed over."""
        return len(self._available)

    def n_known(self, worker: int) -> int:
        """Return the number of samples of a worker that have arrived, those at hand included."""
        return self.n_arrived[worker] + (self.n_available if worker == self.sender else 0)

    def check(self, worker: int, number: int) -> None:
        """Compare with how many samples a worker has sent before a message.

        Raises:
            WorkerDied: some are lost.
        """
        if number != self.n_arrived[worker]:
            raise WorkerDied(
                f"worker {worker} sent {number} samples, and {self.n_arrived[worker]} arrived"
            )

    def accept(self, worker: int, message: Sequence[Any], n_samples: int) -> None:
        """Put the samples of a message at hand; no others may be.

        Args:
            message: one frame, and the memory of each larger array of the last sample.
        """
        self._available.extend(unpack_samples(message, n_samples))
        self.sender = worker
        self._last_was_skipped[worker] = False
        self.n_owed[worker] += counted_bytes(message, n_samples)

    def hand_over(self) -> Any:
        """Return the next sample at hand; SKIPPED for one that cannot be read and may be skipped.

        Raises:
            TransformError: it cannot be unpickled.
            TooManySkipped: one more is skipped than may.
        """
        worker = self.sender
        pickled, buffers = self._available.popleft()
        try:
            sample = unpack_sample(pickled, buffers)
        except Exception as error:  # noqa: BLE001  # raised, or told with what was skipped
            failure = TransformError(
                f"sample {self.n_arrived[worker]} of worker {worker} cannot be unpickled: "
                f"{type(error).__name__}: {text_of(error)}"
            )
            failure.__cause__ = error
            self.skip(worker, failure)
            self._last_was_skipped[worker] = False  # for this sample there was no error
            return SKIPPED
        self.n_arrived[worker] += 1
        return sample

    def skip(self, worker: int, error: BaseException) -> None:
        """Leave out the next sample of a worker, or raise why it failed.

        Raises:
            TooManySkipped: one more is skipped than may.
        """
        if not self._error_budget.forgives(error):
            raise error
        number = self.n_arrived[worker]
        self.n_arrived[worker] += 1
        self._n_skipped[worker] += 1
        self._last_was_skipped[worker] = True
        self._error_budget.skip(number, WorkerInfo(worker, len(self.n_arrived)), error)

    def ended_with_a_skip(self, worker: int) -> bool:
        """Return True if a worker's last sample failed here, which may have ended the worker."""
        return self._last_was_skipped[worker]

    def counted(self, worker: int) -> str:
        """Describe how many samples a worker has sent."""
        n_skipped = self._n_skipped[worker]
        message = f", and {n_skipped} skipped" if n_skipped else ""
        return f"{self.n_arrived[worker] - n_skipped} samples{message}"


_PRELOAD: Final = ("zmq", send_all.__module__)
_LOOK_EVERY_S: Final = 0.1
"""The interval at which main checks for exited workers while samples keep coming."""
_QUIET_S: Final = 0.05
_MAX_S: Final = 1.0
"""Messages of an exited worker have all arrived when none comes for this long."""
_LONG_S: Final = 0.01
"""A wait for a sample that is worth memory to be shorter the next time."""
_CREDITS: Final = 16
"""The maximum number of parts in which a worker's credit comes back, unless main has to wait."""


class SampleStream(Closing):
    """An iterator over the samples of all workers, in order of arrival; owns the workers.

    For one thread at a time, but `close` is for any. Nothing of it is left when it is exhausted,
    has failed or was closed.

    Args:
        dataset: every worker iterates it.
        n_workers: the number of workers.
        prefix: of the folder for the socket.
        most_bytes: the bytes under way from all workers together.
        timeout_s: how long to wait for a sample; None for ever.
        start: the start method of workers.
        error_budget: decides which failed samples are skipped.
        say: receives a line about each event.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        n_workers: int,
        *,
        prefix: str,
        most_bytes: int,
        timeout_s: float | None,
        start: Start,
        error_budget: ErrorBudget,
        say: Callable[[str], object],
    ) -> None:
        self._is_of, self._pid = type(dataset).__name__, this_process.pid
        self._timeout_s, self._prefix, self._say = timeout_s, prefix, say
        self._stacks = list(stack_files(n_workers))
        try:
            most, most_skips = most_bytes // n_workers, error_budget.most
            target = functools.partial(send_all, dataset, n_workers, most, most_skips)
            self._pool = WorkerPool(
                n_workers, target, fds=self._stacks, preload=_PRELOAD, start=start
            )
        except BaseException:
            _close_files(self._stacks)
            raise
        self._receivers: list[Receiver] = []
        self._lock = threading.RLock()  # sockets of ZeroMQ are for one thread at a time
        self._block_lender = BlockLender(n_workers, most_bytes)
        held = self._pool, self._receivers, self._block_lender, self._stacks
        self._finalizer = Finalizer(self, _let_go, self._pid, *held, self._lock)
        self._waiting = set(range(n_workers))
        """Whose READY, and then whose HELLO, has not come."""
        self._going = set(range(n_workers))
        """The workers that have not come to the end."""
        self._not_listening = set[int]()
        """The workers that exited after their end had been sent."""
        self._arrivals = ReceiveBuffer(n_workers, error_budget)
        self._last_words: dict[int, str] = {}
        self._saved: deque[list[Any]] = deque()
        """The messages that had arrived when an exit was noticed."""
        self._loss: WorkerDied | None = None
        self._look_at_s = 0.0
        self._least_credit_bytes = most_bytes // n_workers // _CREDITS
        self._is_over = False

    def __iter__(self) -> SampleStream:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """Return the next sample of any worker."""
        if self._is_over:
            raise StopIteration
        if self._pid != this_process.pid:  # two processes would share the socket
            raise ClosedError(
                "the iteration was begun before this process was forked; begin another one here"
            )
        try:
            return self._next()
        except BaseException as error:  # Ctrl-C included
            if self._is_over and isinstance(error, ClosedError):  # another thread saw the end
                raise StopIteration from None
            # If the loader was closed elsewhere, every call reports it.
            self._is_over = self._finalizer.alive
            self.close()
            raise

    def close(self) -> None:
        """End the workers, whatever they do, and release everything. Idempotent."""
        with interrupts_held():
            self._finalizer()

    @property
    def is_open(self) -> bool:
        """True if it has workers."""
        return self._finalizer.alive

    def _next(self) -> Any:
        end_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while self._going:
            with self._lock:
                if not self._finalizer.alive:
                    raise _closed()
                is_new = bool(self._arrivals.n_available) or self._take()
                sample = self._hand_over()
            if sample is not SKIPPED:
                return sample
            if not is_new:
                self._wait(end_s)
        raise StopIteration

    def _take(self) -> bool:
        """Handle the next message; return False if there is none."""
        now_s = time.monotonic()
        if now_s > self._look_at_s and self._loss is None:
            self._look_at_s = now_s + _LOOK_EVERY_S
            self._handle_events()
        message = self._saved.popleft() if self._saved else None
        if message is None and self._receivers:
            message = self._receivers[0].take()
        if message is not None:
            self._open(message)
        elif self._loss is not None:
            raise self._loss
        return message is not None

    def _open(self, message: Sequence[Any]) -> None:
        """Act upon a message; its samples are at hand then."""
        kind, worker, number, n_samples = unpack_head(message[0])
        self._arrivals.check(worker, number)
        if kind == MessageKind.SAMPLES:
            self._arrivals.accept(worker, message, n_samples)
        elif kind == MessageKind.IN_BLOCK:
            arrays = self._block_lender.hand_over(worker, *unpack_place(message))
            self._arrivals.accept(worker, [message[0], *arrays], n_samples)
            self._lend()
        elif kind == MessageKind.HELLO:
            self._waiting.discard(worker)
            if not self._waiting:
                self._receivers[0].hide()
                self._pool.set_cleanup_folder("")
        elif kind == MessageKind.SKIPPED:
            self._arrivals.skip(worker, unpack_error(bytes(payload_of(message))))
        elif kind == MessageKind.FAILED:
            raise unpack_error(bytes(payload_of(message)))
        else:
            self._release_worker(worker)

    def _hand_over(self) -> Any:
        """Return the next sample at hand that is not skipped; SKIPPED if there is none."""
        arrivals, sample = self._arrivals, SKIPPED
        with self._lock:
            while arrivals.n_available and sample is SKIPPED:
                n_owed = arrivals.n_owed[arrivals.sender]
                if arrivals.n_available == 1 and n_owed >= self._least_credit_bytes:
                    self._send_credit(arrivals.sender)
                sample = arrivals.hand_over()
        return sample

    def _send_credit(self, worker: int) -> None:
        """Send a worker the credit for samples that were handed over."""
        n_owed = self._arrivals.n_owed
        owed, n_owed[worker] = n_owed[worker], 0
        if owed and worker in self._going:
            self._tell(Command.CREDIT, worker, owed)

    def _lend(self) -> None:
        """Send workers the blocks that they have asked for, as far as there are any."""
        if self._loss is None:
            self._block_lender.give(functools.partial(self._tell, Command.BLOCK))

    def _release_worker(self, worker: int) -> None:
        """Release a worker whose samples have all arrived."""
        if self._loss is None:
            self._handle_events()
        # The last words of a fork, as the worker itself is alive
        if text := self._last_words.get(worker):
            raise TransformError(text)
        self._say(f"worker {worker} has finished: {self._arrivals.counted(worker)}")
        if self._arrivals.ended_with_a_skip(worker):
            warnings.warn(
                f"worker {worker} ended after sample {self._arrivals.n_arrived[worker] - 1} of it "
                "was skipped; a dataset that is a generator gives nothing more once it has raised",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
        self._going.discard(worker)
        self._block_lender.stop_lending(worker)
        self._tell(Command.GOODBYE, worker)

    def _tell(self, word: Command, worker: int, number: int = 0, fds: Sequence[int] = ()) -> None:
        if self._loss is None and worker not in self._not_listening:
            self._pool.send(worker, WORD.pack(word, number), fds)

    def _wait(self, end_s: float | None) -> None:
        """Wait until there may be something new."""
        for worker in self._going:
            self._send_credit(worker)
        poll = select.poll()
        with self._lock:
            try:
                poll.register(self._pool, select.POLLIN)
                for box in self._receivers:
                    poll.register(box, select.POLLIN)
            except ValueError:  # another thread has closed it
                raise _closed() from None
        now_s = time.monotonic()
        left_s = None if end_s is None else max(0.0, end_s - now_s)
        if not poll.poll(None if left_s is None else left_s * 1000):
            raise self._overdue()
        with self._lock:
            if time.monotonic() - now_s > _LONG_S:
                self._block_lender.grant_more()
            self._handle_events()

    def _handle_events(self) -> None:
        """Handle events of the worker pool."""
        for event in self._pool.wait(0):
            if isinstance(event, Failed):
                self._last_words[event.worker] = event.text
            elif isinstance(event, WorkerExit):
                if event.worker in self._going:
                    self._record_exit(event)
                    if self._loss is not None:
                        return  # there is nobody left to report to
            elif event.data == WANT:
                if event.worker in self._going:  # it may have received one since, and finished
                    self._block_lender.ask(event.worker)
            else:
                self._waiting.discard(event.worker)
                if not self._waiting:
                    self._send_address()
        self._lend()

    def _send_address(self) -> None:
        """Send the address of the socket to the workers, now that all are running."""
        box = Receiver(self._prefix, len(self._pool))
        self._receivers.append(box)
        self._pool.set_cleanup_folder(os.path.dirname(box.path))
        self._say(box.address)
        self._waiting = set(range(len(self._pool)))
        for worker in range(len(self._pool)):
            self._pool.send(worker, os.fsencode(box.address))

    def _record_exit(self, died: WorkerExit) -> None:
        """Receive all that has arrived before counting a worker as lost: its end may be there."""
        end_s = time.monotonic() + _MAX_S
        for box in self._receivers:
            poll = select.poll()
            poll.register(box, select.POLLIN)
            while True:
                while (message := box.take()) is not None:
                    self._saved.append(message)
                if time.monotonic() > end_s or not poll.poll(_QUIET_S * 1000):
                    break
        heads = [unpack_head(message[0]) for message in self._saved]
        heads = [head for head in heads if head[1] == died.worker]
        if any(kind in {MessageKind.END, MessageKind.FAILED} for kind, *_ in heads):
            self._not_listening.add(died.worker)
            return
        n_samples = self._arrivals.n_known(died.worker) + sum(head[3] for head in heads)
        detail = f":\n\n{text}" if (text := self._last_words.get(died.worker)) else ""
        self._loss = WorkerDied(f"{died.manner}, after {n_samples} samples of it{detail}")
        self._pool.close()  # the workers have nothing more to do

    def _overdue(self) -> Exception:
        stacks = self._pool.stacks(self._stacks)
        return timeout_error(
            "a sample",
            self._is_of,
            self._timeout_s,
            list(zip(self._pool.names(), stacks, strict=True)),
            lambda worker: [f"{self._arrivals.n_arrived[worker]} samples of which have come"],
        )


def _let_go(
    owner_pid: int,
    pool: WorkerPool,
    boxes: list[Receiver],
    supply: BlockLender,
    stacks: list[int],
    lock: threading.RLock,
) -> None:
    """End everything that an iteration owns, workers first; do nothing in a fork of its owner."""
    if os.getpid() != owner_pid:
        return
    pool.close()  # also wakes threads that wait
    with lock:
        for box in boxes:
            box.close()
        supply.close()
    _close_files(stacks)


def _closed() -> ClosedError:
    return ClosedError("this iteration was ended, by kill() or by the next one")


def _close_files(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
