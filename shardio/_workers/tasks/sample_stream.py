"""One iteration over a dataset by several workers; each worker iterates over all of it.

        main                                             worker
  A  Receiver, WorkerPool(send_all, dataset) ──────────▶ loads dataset and ZeroMQ, connects
  B     next ◀══════════════════════════════ SAMPLES ══ iterates
  C     credit: bytes that were handed over ───────────▶ continues sending
        blocks, for larger samples (BlockLender) ──────▶ fills them, asks for more
  D     the count is checked ◀═════════════════ END ═══
  E     goodbye ───────────────────────────────────────▶ exits

A line ═ is a message on the ZeroMQ socket. A line ─ is a message on a channel of the worker pool.
The credit of a worker limits the bytes of the samples that the worker holds or has sent, until the
main process opens their message.
"""

from __future__ import annotations

import functools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from shardio._base.callers import warn
from shardio._base.classes import Closing, undo_on_error
from shardio._workers.processes.blocks import Bytes
from shardio._workers.processes.linux import Finalizer, interrupts_held, memory_file, this_process
from shardio._workers.processes.serialization import text_of, unpack_failure
from shardio._workers.processes.stack_dumps import timeout_error
from shardio._workers.processes.worker_main import Start
from shardio._workers.processes.worker_pool import Failed, WorkerExit, WorkerPool
from shardio._workers.tasks.calls import ErrorBudget
from shardio._workers.tasks.values import BlockLender, read_value, split_values
from shardio._workers.tasks.zeromq import (
    BLOCK_AND_SIZE,
    HEAD,
    OVERHEAD_BYTES,
    WORD,
    Command,
    MessageKind,
    Receiver,
    WorkerInfo,
    send_all,
)
from shardio.errors import ClosedError, TransformError, WorkerDied

_NO_SAMPLE: Final = object()
# Plain ints, because enum members are slow.
_SAMPLES, _IN_BLOCK = int(MessageKind.SAMPLES), int(MessageKind.IN_BLOCK)
_PRELOAD: Final = ("zmq", send_all.__module__)
# The interval, while samples arrive, at which the main process checks for exited workers.
_LOOK_EVERY_S: Final = 0.1
# After the exit of a worker, the main process receives messages until none has arrived for
# _QUIET_S, but for at most _MAX_S. It then assumes that all messages of the worker have arrived.
_QUIET_S: Final = 0.05
_MAX_S: Final = 1.0
_SOON_MS: Final = 1  # the loop waits this long for a sample; then all pending credit is sent
_LONG_S: Final = 0.01  # if the loop waits longer than this for a sample, workers get more blocks
_CREDITS: Final = 16  # while the loop is busy, credit below 1/16 of a worker's limit is held back


class _Sender:
    def __init__(self) -> None:
        self.ended_with_a_skip = False
        self.n_arrived = 0  # the number of samples that were handed over to the loop or skipped
        self.n_skipped = 0
        self.n_owed = 0  # the bytes that were handed over, and for which no credit was sent yet
        self.failure_text = ""


class SampleStream(Closing):
    """An iterator over the samples of all workers, in order of arrival; owns the workers.

    Threads may share the iterator, which closes itself at the end. All workers together have up to
    `max_bytes` in flight. `log` is called with the socket's address, and as each worker finishes.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        n_workers: int,
        *,
        prefix: str,
        max_bytes: int,
        timeout_s: float | None,
        start: Start,
        error_budget: ErrorBudget,
        log: Callable[[str], object],
    ) -> None:
        self._is_of, self._pid = type(dataset).__name__, this_process.pid
        self._timeout_s, self._error_budget, self._log = timeout_s, error_budget, log
        self._stacks = [memory_file() for _ in range(n_workers)]
        self._lock = threading.RLock()  # a ZeroMQ socket must be used by one thread at a time
        self._block_lender = BlockLender(n_workers, max_bytes)
        self._owned: list[Closing] = []  # the pool and the receiver, in the order of closing
        held = self._owned, self._block_lender, self._stacks
        self._finalizer = Finalizer(self, _let_go, self._pid, *held, self._lock)
        self._going = {worker: _Sender() for worker in range(n_workers)}  # not finished
        self._saved: deque[bytes] = deque()  # messages that arrived before a crash was handled
        # The samples of the current message that the loop has not received yet, and their worker.
        self._unread: deque[Bytes | memoryview] = deque()
        self._unread_of = 0
        self._crash: WorkerExit | None = None
        self._look_at_s = 0.0
        self._min_credit_bytes = max_bytes // n_workers // _CREDITS
        self._is_over = False
        with undo_on_error(self.close):
            may_skip = error_budget.max_skips is not None
            target = functools.partial(
                send_all, dataset, n_workers, max_bytes // n_workers, may_skip
            )
            self._receiver = Receiver(prefix, n_workers)
            self._owned.append(self._receiver)
            fds = [*self._stacks, self._receiver.path_fd]
            self._pool = WorkerPool(n_workers, target, fds=fds, preload=_PRELOAD, start=start)
            self._owned.insert(0, self._pool)
        self._log(self._receiver.address)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
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
            if self._finalizer.alive:  # otherwise, every further call raises ClosedError
                self._is_over = True
            self.close()
            raise

    def close(self) -> None:
        with interrupts_held():
            self._finalizer()

    def _next(self) -> Any:
        end_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while self._going:
            with self._lock:
                if not self._finalizer.alive:
                    raise _closed()
                is_new = bool(self._unread) or self._take()
                sample = self._hand_over() if self._unread else _NO_SAMPLE
            if sample is not _NO_SAMPLE:
                return sample
            if not is_new:
                self._wait(end_s)
        raise StopIteration

    def _take(self) -> bool:
        """Process the next message, if any; raise WorkerDied if a crash has left no message."""
        now_s = time.monotonic()
        if now_s > self._look_at_s and self._crash is None:
            self._look_at_s = now_s + _LOOK_EVERY_S
            self._handle_events()
        message = self._saved.popleft() if self._saved else self._receiver.take()
        if message is None and self._crash is not None:
            sender = self._going[self._crash.worker]
            detail = f":\n\n{sender.failure_text}" if sender.failure_text else ""
            n = sender.n_arrived
            raise WorkerDied(
                f"{self._crash.description}, after {n} samples of this worker had arrived{detail}"
            )
        if message is not None:
            self._open(message)
        return message is not None

    def _open(self, message: bytes) -> None:
        kind, worker, number = HEAD.unpack_from(message)
        sender = self._going[worker]
        if number != sender.n_arrived:
            raise WorkerDied(
                f"worker {worker} sent {number} samples, and {sender.n_arrived} arrived"
            )
        payload = memoryview(message)[HEAD.size :]
        if kind == _SAMPLES:
            self._unread.extend(split_values(payload))
        elif kind == _IN_BLOCK:
            number_and_size = BLOCK_AND_SIZE.unpack(payload)
            self._unread.append(self._block_lender.hand_over(worker, *number_and_size))
            self._lend()
        else:
            self._open_other(MessageKind(kind), worker, payload)
            return
        self._unread_of = worker
        sender.n_owed += sum(map(len, self._unread)) + OVERHEAD_BYTES * len(self._unread)
        if sender.n_owed >= self._min_credit_bytes:
            self._send_credit(worker)
        sender.ended_with_a_skip = False

    def _hand_over(self) -> Any:
        """Return the next sample of the current message, or _NO_SAMPLE if it is skipped."""
        worker = self._unread_of
        sender = self._going[worker]
        try:
            sample = read_value(self._unread.popleft())
        except Exception as error:  # noqa: BLE001  # `_skip` raises or records the error
            failure = TransformError(
                f"sample {sender.n_arrived} of worker {worker} cannot be unpickled: "
                f"{type(error).__name__}: {text_of(error)}"
            )
            failure.__cause__ = error
            self._skip(worker, failure)
            return _NO_SAMPLE
        sender.n_arrived += 1
        return sample

    def _open_other(self, kind: MessageKind, worker: int, payload: memoryview) -> None:
        sender = self._going[worker]
        sender.n_owed += OVERHEAD_BYTES
        if kind == MessageKind.END:
            self._release_worker(worker)
            return
        error = unpack_failure(payload, f"worker {worker}, at its sample {sender.n_arrived}")
        if kind == MessageKind.FAILED:
            raise error
        self._skip(worker, error)
        sender.ended_with_a_skip = True

    def _skip(self, worker: int, error: BaseException) -> None:
        """Skip the next sample of a worker, or raise `error`, the error of this sample."""
        if not self._error_budget.allows_skip(error):
            raise error
        sender = self._going[worker]
        number = sender.n_arrived
        sender.n_arrived, sender.n_skipped = number + 1, sender.n_skipped + 1
        self._error_budget.skip(number, WorkerInfo(worker, len(self._pool)), error)

    def _send_credit(self, worker: int) -> None:
        sender = self._going[worker]
        owed, sender.n_owed = sender.n_owed, 0
        if owed:
            self._send(Command.CREDIT, worker, owed)

    def _lend(self) -> None:
        if self._crash is None:
            self._block_lender.give(functools.partial(self._send, Command.BLOCK))

    def _release_worker(self, worker: int) -> None:
        if self._crash is None:
            self._handle_events()
        sender = self._going[worker]
        skipped = f", and {sender.n_skipped} skipped" if sender.n_skipped else ""
        n_samples = sender.n_arrived - sender.n_skipped
        self._log(f"worker {worker} has finished: {n_samples} samples{skipped}")
        if sender.ended_with_a_skip:
            warn(
                f"worker {worker} ended after its sample {sender.n_arrived - 1} was "
                "skipped; a dataset that is a generator cannot continue after it has raised",
                RuntimeWarning,
            )
        del self._going[worker]
        self._block_lender.stop_lending(worker)
        self._send(Command.GOODBYE, worker)

    def _send(self, word: Command, worker: int, number: int = 0, fds: Sequence[int] = ()) -> None:
        if self._crash is None:
            with suppress(WorkerDied):  # the worker exited after its last message
                self._pool.send(worker, WORD.pack(word, number), fds)

    def _wait(self, end_s: float | None) -> None:
        with self._lock:
            poll = select.poll()
            try:
                poll.register(self._pool, select.POLLIN)
                fd = self._receiver.fileno()
                poll.register(fd, select.POLLIN)
            except ValueError:  # closed by another thread
                raise _closed() from None
        ready = poll.poll(_SOON_MS)
        if not ready:
            with self._lock:
                for worker in self._going:
                    self._send_credit(worker)
            now_s = time.monotonic()
            ready = poll.poll(None if end_s is None else max(0.0, end_s - now_s) * 1000)
            if not ready:
                raise self._overdue()
            if time.monotonic() - now_s > _LONG_S:
                self._block_lender.grant_more()
        if len(ready) > 1 or ready[0][0] != fd:
            self._look_at_s = 0.0  # there are events of the pool

    def _handle_events(self) -> None:
        for event in self._pool.wait(0):
            sender = self._going.get(event.worker)
            if sender is None:  # the worker has already finished
                continue
            if isinstance(event, Failed):
                sender.failure_text = event.text
            elif not isinstance(event, WorkerExit):  # the worker requests a block
                self._block_lender.ask(event.worker)
            elif not self._has_come_to_its_end(event.worker):
                self._crash = event
                self._pool.close()  # the error ends the iteration, so no worker is needed
                return
        self._lend()

    def _has_come_to_its_end(self, exited: int) -> bool:
        """Save all messages that arrive soon; return True if one is the worker's final message."""
        end_s = time.monotonic() + _MAX_S
        poll = select.poll()
        poll.register(self._receiver, select.POLLIN)
        while True:
            while (message := self._receiver.take()) is not None:
                self._saved.append(message)
            if time.monotonic() > end_s or not poll.poll(_QUIET_S * 1000):
                break
        heads = map(HEAD.unpack_from, self._saved)
        ends = {MessageKind.END, MessageKind.FAILED}
        return any(kind in ends and worker == exited for kind, worker, _ in heads)

    def _overdue(self) -> Exception:
        def tasks_of(worker: int) -> list[str]:
            sender = self._going.get(worker)
            return [] if sender is None else [f"{sender.n_arrived} samples of which have arrived"]

        workers = self._pool.named_stacks(self._stacks)
        return timeout_error("a sample", self._is_of, self._timeout_s, workers, tasks_of)


def _let_go(
    owner_pid: int,
    owned: list[Closing],
    block_lender: BlockLender,
    stacks: list[int],
    lock: threading.RLock,
) -> None:
    """Release everything, the workers first; do nothing in a fork."""
    if os.getpid() != owner_pid:
        return
    for each in owned[:1]:
        each.close()  # closing the pool also wakes waiting threads
    with lock:
        for each in owned[1:]:
            each.close()
        block_lender.close()
    while stacks:
        os.close(stacks.pop())


def _closed() -> ClosedError:
    return ClosedError("this iteration was ended, by kill() or by the next one")
