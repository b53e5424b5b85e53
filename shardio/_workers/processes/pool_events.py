"""The event loop of a worker pool, over its channels, its zygote, and its session with the zygote.

Received events stay in the pool's state until `WorkerPool.wait` returns them, and every step can be
repeated on the same state. A KeyboardInterrupt at any moment thus neither loses nor duplicates an
event.
"""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from itertools import islice, starmap
from typing import NamedTuple

from shardio._workers.processes.channel import LOST_FDS, Ancillary, unpack_fds
from shardio._workers.processes.linux import has_ended
from shardio._workers.processes.pool_state import RECEIVE_NOW, PoolState, WorkerExit, WorkerHandle
from shardio._workers.processes.zygote import EXITED, REPLY, STARTED, release

# The arguments of one `recvmsg`, as the iterables that `map` takes.
_ONE_RECEIVE = tuple((argument,) for argument in RECEIVE_NOW)

# Plain ints, because operators of enum members are slow.
_READABLE, _WRITABLE = int(select.EPOLLIN), int(select.EPOLLOUT)


class Message(NamedTuple):
    """A message from a worker: `data`, and descriptors `fds`, which the receiver owns."""

    worker: int
    data: bytes
    fds: tuple[int, ...] = ()


class Failed(NamedTuple):
    """The pool's function raised in a worker, or could not be unpickled; a WorkerExit follows."""

    worker: int
    text: str


Event = Message | Failed | WorkerExit


class PoolEventLoop:
    """An event loop over the state of a pool. Borrows the state."""

    def __init__(self, held: PoolState) -> None:
        self._held = held
        self._by_fd: dict[int, WorkerHandle] = {}

    def add_zygote(self) -> None:
        """Watch the zygote and the session of the pool."""
        held = self._held
        if held.zygote is not None and held.session is not None:
            held.epoll.register(held.session, _READABLE)
            held.epoll.register(held.zygote.pidfd, _READABLE)

    def add(self, worker: WorkerHandle) -> None:
        """Watch the channel of a worker."""
        self._by_fd[worker.end.fileno()] = worker
        self._held.epoll.register(worker.end, _READABLE)

    def add_bell(self) -> None:
        """Watch the wakeup event of the pool, if it has one."""
        if self._held.bell is not None:
            self._held.epoll.register(self._held.bell, _READABLE)

    def gather(self, timeout_s: float | None) -> list[Event]:
        """Wait until there is an event, and return all events.

        The list is empty after a timeout or a wakeup. The events stay in `intake` and `gone` of the
        pool's state, which the caller must clear.
        """
        held = self._held
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if held.letters:
                self._read_letters()
            if held.intake or held.gone:
                if events := self._events():
                    return events
                held.intake.clear()
            try:
                ready = held.epoll.poll(timeout_s, 64)
            except (OSError, ValueError):
                if held.is_closing:  # closed by a signal handler during the call
                    return []
                raise
            if not ready or held.is_closing:
                return []
            has_rung = False
            for fd, mask in ready:
                worker = self._by_fd.get(fd)
                if worker is None:
                    has_rung |= self._handle_other(fd)
                    continue
                if mask & _WRITABLE:
                    self._flush(worker)
                if mask != _WRITABLE:
                    self._receive(worker)
            if end_s is not None:
                timeout_s = max(0.0, end_s - time.monotonic())
            if has_rung:  # receive the events that arrived at the same time, then return
                end_s = timeout_s = 0.0

    def _handle_other(self, fd: int) -> bool:
        """Handle a ready descriptor that is not a worker's; return True for the wakeup event."""
        held = self._held
        if held.bell is not None and fd == held.bell.fileno():
            held.bell.clear()
            return True
        if held.session is not None and fd == held.session.fileno():
            self._receive_letter(held.session)
        else:
            self._lose_zygote()
        return False

    def queue(self, worker: WorkerHandle, message: bytes, fds: Sequence[int]) -> None:
        """Queue a message for which the socket had no room, with duplicates of its fds."""
        if not worker.outgoing:
            self._held.epoll.modify(worker.end, _READABLE | _WRITABLE)
        copies = array.array("i", map(os.dup, fds))
        worker.outgoing_fds.extend(copies)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, copies)] if copies else []
        worker.outgoing.append(([message], rights))

    def _flush(self, worker: WorkerHandle) -> None:
        """Send queued messages as long as the socket has room for them."""
        try:
            # The result of each send is stored before the next send, so Ctrl-C cannot cause a
            # message to be sent twice.
            unsent = worker.outgoing[len(worker.sent) :]
            worker.sent.extend(starmap(worker.end.sendmsg, unsent))
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker's exit will be reported
        self._held.epoll.modify(worker.end, _READABLE)
        done_fds = worker.outgoing_fds
        worker.outgoing, worker.outgoing_fds, worker.sent = [], [], []
        for fd in done_fds:
            os.close(fd)

    def _receive(self, worker: WorkerHandle) -> None:
        # One call moves data from the kernel to the list, so no signal handler can run in between.
        try:
            self._held.intake.extend(islice(worker.arrivals, 1))
        except (BlockingIOError, ConnectionResetError):
            return  # a reset is reported once; queued data can still be received afterwards

    def _receive_letter(self, session: socket.socket) -> None:
        try:
            self._held.letters.extend(map(session.recvmsg, *_ONE_RECEIVE))
        except (BlockingIOError, ConnectionResetError):
            return

    def _events(self) -> list[Event]:
        """Convert everything received so far into events.

        If Ctrl-C interrupts a call, the next call has the same state.
        """
        events: list[Event] = []
        workers = self._held.workers
        for index, (data, ancillary, flags, _) in self._held.intake:
            if data:
                fds = unpack_fds(ancillary, flags) if ancillary or flags & LOST_FDS else ()
                events.append(tuple.__new__(Message, (index, data, fds)))
            elif ancillary:
                events.append(Failed(index, _failure(workers[index], ancillary, flags)))
            else:
                self._stop_listening(workers[index])
        for worker in self._held.gone:
            if worker.ended is not None:
                if worker.ended.pid is None and worker.failure is not None:
                    events.append(Failed(worker.index, worker.failure))
                events.append(worker.ended)
        return events

    def _read_letters(self) -> None:
        """Handle the zygote's replies; remove each reply once it is completely handled."""
        held = self._held
        while held.letters:
            data, ancillary, flags, _ = held.letters[0]
            if not data:  # the zygote has exited, which its pidfd reports too
                self._ignore(held.session)
            else:
                kind, place, pid, how, status = REPLY.unpack(data)
                worker = held.workers[place]
                if kind == STARTED:
                    (worker.pidfd,) = unpack_fds(ancillary, flags)
                    worker.pid = pid
                elif kind == EXITED and how == os.CLD_EXITED:
                    self._on_worker_exit(worker, WorkerExit(place, pid, None, status))
                elif kind == EXITED:
                    self._on_worker_exit(worker, WorkerExit(place, pid, status, None))
                else:
                    why = os.strerror(status)
                    worker.failure = f"the operating system refused to start a process: {why}"
                    self._on_worker_exit(worker, WorkerExit(place, None, None, None))
            held.letters.popleft()

    def _lose_zygote(self) -> None:
        """Record the exit of every worker: the kernel kills all workers when the zygote exits."""
        held = self._held
        zygote = held.zygote
        if zygote is None or held.session is None:
            return
        n_letters = -1
        while n_letters != len(held.letters):
            n_letters = len(held.letters)
            self._receive_letter(held.session)
            if held.letters and not held.letters[-1][0]:
                break
        self._read_letters()
        exit_code = zygote.exit_code()
        if exit_code and all(worker.pid is None for worker in held.workers):
            raise zygote.unsuitable(f"with exit code {exit_code} before it could start a worker")
        for worker in held.workers:
            if worker.ended is None:
                _await_end(worker)
                self._on_worker_exit(
                    worker, WorkerExit(worker.index, worker.pid, int(signal.SIGKILL), None)
                )
        self._ignore(held.session)
        self._ignore(zygote.pidfd)
        held.zygote = None
        release(zygote)

    def _on_worker_exit(self, worker: WorkerHandle, died: WorkerExit) -> None:
        """Receive everything that an exited worker has sent, then record its exit."""
        if worker.ended is not None:
            return
        intake = self._held.intake
        while worker.end.fileno() in self._by_fd:
            try:
                intake.extend(islice(worker.arrivals, 1))
            except ConnectionResetError:
                continue
            # The socket is empty but still open, in a process that the worker started.
            except BlockingIOError:
                break
            _, (data, ancillary, _, _) = intake[-1]
            if not data and not ancillary:
                break
        self._stop_listening(worker)
        if worker not in self._held.gone:
            self._held.gone.append(worker)
        worker.ended = died

    def _stop_listening(self, worker: WorkerHandle) -> None:
        self._ignore(worker.end)
        self._by_fd.pop(worker.end.fileno(), None)

    def _ignore(self, source: socket.socket | int | None) -> None:
        """Remove a descriptor from the epoll; `close` is not enough if a fork has a copy of it."""
        if source is None:
            return
        try:
            self._held.epoll.unregister(source)
        except FileNotFoundError:
            return


def _await_end(worker: WorkerHandle) -> None:
    """Wait until a worker that the kernel is killing has exited."""
    if worker.pidfd is not None:
        has_ended(worker.pidfd, 1.0)
        return
    # The zygote exited while it started this worker, so only the channel shows the exit.
    poll = select.poll()
    poll.register(worker.end, 0)
    poll.poll(1000)


def _failure(worker: WorkerHandle, ancillary: Ancillary, flags: int) -> str:
    """Return the text that a failed worker sent in a memory file."""
    if worker.failure is None:
        (fd,) = unpack_fds(ancillary, flags)
        n_bytes = os.fstat(fd).st_size
        worker.failure = os.pread(fd, n_bytes, 0).decode("utf-8", "replace")
        os.close(fd)
    return worker.failure
