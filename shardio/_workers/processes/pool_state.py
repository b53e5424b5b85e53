"""The state of a worker pool: kernel objects, their events, and the release of these objects.

A finalizer releases the state after the WorkerPool is garbage-collected. Received events stay in
the state until `WorkerPool.wait` returns them, and every step that handles them can be repeated:
a KeyboardInterrupt at any moment neither loses nor duplicates an event.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, repeat, starmap
from typing import NamedTuple

from shardio._workers.processes.linux import WakeupEvent, end_process, has_ended
from shardio._workers.processes.worker_main import (
    LOST_FDS,
    RECEIVE,
    Ancillary,
    Received,
    unpack_fds,
)
from shardio._workers.processes.zygote import EXITED, GRACE_S, REPLY, STARTED, Zygote, release
from shardio.errors import UnsupportedEnvironment

# The maximum time to wait, after SIGKILL, until the kernel has ended the processes.
_KILL_TIMEOUT_S = 0.8

Arrival = tuple[int, Received]  # the worker's index, and the result of `recvmsg`
Rights = list[tuple[int, int, "array.array[int]"]]  # descriptors, as an argument of `sendmsg`

_RECEIVE_NOW = (RECEIVE[0], RECEIVE[1], RECEIVE[2] | socket.MSG_DONTWAIT)
# The same arguments in tuples of one: `map(recvmsg, *_ONE_RECEIVE)` calls `recvmsg` once.
_ONE_RECEIVE = tuple((argument,) for argument in _RECEIVE_NOW)

# Plain ints, because operators of enum members are slow.
_READABLE, _WRITABLE = int(select.EPOLLIN), int(select.EPOLLOUT)


class Message(NamedTuple):
    """A message from a worker; the receiver owns the descriptors `fds`."""

    worker: int
    data: bytes
    fds: tuple[int, ...] = ()


class Failed(NamedTuple):
    worker: int
    text: str


class WorkerExit(NamedTuple):
    """The exit of a worker's process: its last event.

    If a signal killed the process, `signal` is its number. Otherwise `exit_code` is set: 0 if the
    pool's function returned; 1, after a Failed event, if it raised. Both are None if the process
    could not be started. `pid` is None if the zygote, which forks workers, did not report a start.
    """

    worker: int
    pid: int | None
    signal: int | None
    exit_code: int | None

    @property
    def cause(self) -> str:
        if self.signal is not None:
            known = self.signal in set(signal.Signals)  # most real-time signals have no name
            name = f" ({signal.Signals(self.signal).name})" if known else ""
            return f"was killed by signal {self.signal}{name}"
        if self.exit_code is not None:
            return f"ended with exit code {self.exit_code}"
        return "could not be started"

    @property
    def description(self) -> str:
        process = "" if self.pid is None else f" (process {self.pid})"
        return f"worker {self.worker}{process} {self.cause}"


Event = Message | Failed | WorkerExit


class WorkerHandle:
    """The main process's side of one worker process; a restart creates a new handle."""

    def __init__(self, index: int, own_socket: socket.socket) -> None:
        self.index = index
        self.socket = own_socket
        # An endless iterator: each step calls `recvmsg` and returns (index, result).
        received = map(own_socket.recvmsg, *map(repeat, _RECEIVE_NOW))
        self.arrivals: Iterator[Arrival] = zip(repeat(index), received, strict=False)
        self.pid: int | None = None
        self.pidfd: int | None = None
        # `outgoing` has messages that wait for room in the socket, as arguments of `sendmsg`. The
        # first `len(send_results)` of them are already sent.
        self.outgoing: list[tuple[list[bytes], Rights]] = []
        self.outgoing_fds: list[int] = []
        self.send_results: list[int] = []
        self.failure: str | None = None
        self.exit: WorkerExit | None = None

    def close(self) -> None:
        """Close the main process's descriptors for this worker; the worker is not affected."""
        self.socket.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        for fd in self.outgoing_fds:
            os.close(fd)
        self.outgoing_fds = []


class PoolState:
    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.lock = threading.RLock()  # so that `end` closes no descriptor that `wait` is using
        self.epoll = select.epoll()
        self.workers: list[WorkerHandle] = []
        self.zygote: Zygote | None = None
        self.session: socket.socket | None = None
        self.wakeup = WakeupEvent()
        self.epoll.register(self.wakeup, _READABLE)
        self.own_fds: list[int] = []  # the file with the function, then the fds for the workers
        self.replies: deque[Received] = deque()  # replies of the zygote that are not handled yet
        self.received: list[Arrival] = []  # messages of workers that are not returned yet
        self.exited: list[WorkerHandle] = []  # exited workers that are not reported yet
        self.is_closing = False
        self.is_closed = False
        self._by_fd: dict[int, WorkerHandle] = {}

    def add_session(self, session: socket.socket, zygote_pidfd: int) -> None:
        if self.session is not None:
            self.session.close()
        self.session = session
        self.epoll.register(session, _READABLE)
        self.epoll.register(zygote_pidfd, _READABLE)

    def add(self, worker: WorkerHandle) -> None:
        self._by_fd[worker.socket.fileno()] = worker
        self.epoll.register(worker.socket, _READABLE)

    def wait_for_events(self, timeout_s: float | None) -> list[Event]:
        """Wait for events and return them; the caller must then clear `received` and `exited`."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self.replies:
                self._handle_replies()
            if self.received or self.exited:
                if events := self._events():
                    return events
                self.received.clear()
            try:
                ready = self.epoll.poll(timeout_s, 64)
            except (OSError, ValueError):
                if self.is_closing:  # a signal handler closed the pool during the call
                    return []
                raise
            if not ready or self.is_closing:
                return []
            is_woken = False
            for fd, mask in ready:
                worker = self._by_fd.get(fd)
                if worker is None:
                    is_woken |= self._handle_other(fd)
                    continue
                if mask & _WRITABLE:
                    self._flush(worker)
                if mask != _WRITABLE:
                    self._receive(worker)
            if end_s is not None:
                timeout_s = max(0.0, end_s - time.monotonic())
            if is_woken:  # handle the events that are ready, but do not wait
                end_s = timeout_s = 0.0

    def _handle_other(self, fd: int) -> bool:
        """Handle a readable descriptor that is not a worker's; return True for the wakeup event."""
        if fd == self.wakeup.fileno():
            self.wakeup.clear()
            return True
        if self.session is not None and fd == self.session.fileno():
            self._receive_reply(self.session)
        else:
            self._on_zygote_exit()
        return False

    def queue(self, worker: WorkerHandle, message: bytes, fds: Sequence[int]) -> None:
        """Queue a message for which the socket had no room; duplicate its descriptors `fds`."""
        if not worker.outgoing:
            self.epoll.modify(worker.socket, _READABLE | _WRITABLE)
        copies = array.array("i", map(os.dup, fds))
        worker.outgoing_fds.extend(copies)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, copies)] if copies else []
        worker.outgoing.append(([message], rights))

    def _flush(self, worker: WorkerHandle) -> None:
        try:
            # `extend` stores the result of each send before the next send. Therefore no message is
            # sent twice, even after Ctrl-C.
            unsent = worker.outgoing[len(worker.send_results) :]
            worker.send_results.extend(starmap(worker.socket.sendmsg, unsent))
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker's exit will be reported
        self.epoll.modify(worker.socket, _READABLE)
        done_fds = worker.outgoing_fds
        worker.outgoing, worker.outgoing_fds, worker.send_results = [], [], []
        for fd in done_fds:
            os.close(fd)

    def _receive(self, worker: WorkerHandle) -> None:
        # A single call in C receives the message and stores it: no signal handler runs in between.
        try:
            self.received.extend(islice(worker.arrivals, 1))
        except (BlockingIOError, ConnectionResetError):
            return  # the kernel reports a reset once; later calls receive the queued messages

    def _receive_reply(self, session: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            self.replies.extend(map(session.recvmsg, *_ONE_RECEIVE))

    def _events(self) -> list[Event]:
        """Convert everything received so far into events; a second call returns the same events."""
        events: list[Event] = []
        workers = self.workers
        for index, (data, ancillary, flags, _) in self.received:
            if data:
                fds = unpack_fds(ancillary, flags) if ancillary or flags & LOST_FDS else ()
                events.append(tuple.__new__(Message, (index, data, fds)))
            elif ancillary:
                events.append(Failed(index, _failure(workers[index], ancillary, flags)))
            else:
                self._stop_listening(workers[index])
        for worker in self.exited:
            if worker.exit is not None:
                if worker.exit.pid is None and worker.failure is not None:
                    events.append(Failed(worker.index, worker.failure))
                events.append(worker.exit)
        return events

    def _handle_replies(self) -> None:
        """Handle the zygote's replies; remove each reply once it is completely handled."""
        while self.replies:
            data, ancillary, flags, _ = self.replies[0]
            if not data:  # the zygote has exited; its pidfd reports the exit, too
                self._ignore(self.session)
            else:
                kind, index, pid, how, status = REPLY.unpack(data)
                worker = self.workers[index]
                if kind == STARTED:
                    (worker.pidfd,) = unpack_fds(ancillary, flags)
                    worker.pid = pid
                elif kind == EXITED and how == os.CLD_EXITED:
                    self._on_worker_exit(worker, WorkerExit(index, pid, None, status))
                elif kind == EXITED:
                    self._on_worker_exit(worker, WorkerExit(index, pid, status, None))
                else:
                    why = os.strerror(status)
                    worker.failure = f"the operating system refused to start a process: {why}"
                    self._on_worker_exit(worker, WorkerExit(index, None, None, None))
            self.replies.popleft()

    def _on_zygote_exit(self) -> None:
        """Record the exit of every worker: the kernel kills all workers when the zygote exits."""
        zygote = self.zygote
        if zygote is None or self.session is None:
            return
        n_replies = -1
        while n_replies != len(self.replies):
            n_replies = len(self.replies)
            self._receive_reply(self.session)
            if self.replies and not self.replies[-1][0]:
                break
        self._handle_replies()
        exit_code = zygote.exit_code()
        if exit_code and all(worker.pid is None for worker in self.workers):
            raise zygote.exit_error(f"with exit code {exit_code} before it could start a worker")
        for worker in self.workers:
            if worker.exit is None:
                _await_exit(worker)
                self._on_worker_exit(
                    worker, WorkerExit(worker.index, worker.pid, int(signal.SIGKILL), None)
                )
        self._ignore(self.session)
        self._ignore(zygote.pidfd)
        self.zygote = None
        release(zygote)

    def _on_worker_exit(self, worker: WorkerHandle, died: WorkerExit) -> None:
        """Receive everything that an exited worker has sent, then record its exit."""
        if worker.exit is not None:
            return
        received = self.received
        while worker.socket.fileno() in self._by_fd:
            try:
                received.extend(islice(worker.arrivals, 1))
            except ConnectionResetError:
                continue
            # The socket is empty, but a process that the worker has started keeps it open.
            except BlockingIOError:
                break
            _, (data, ancillary, _, _) = received[-1]
            if not data and not ancillary:
                break
        self._stop_listening(worker)
        if worker not in self.exited:
            self.exited.append(worker)
        worker.exit = died

    def _stop_listening(self, worker: WorkerHandle) -> None:
        self._ignore(worker.socket)
        self._by_fd.pop(worker.socket.fileno(), None)

    def _ignore(self, source: socket.socket | int | None) -> None:
        """Stop watching a descriptor; a close is not enough if a fork has a copy."""
        if source is not None:
            with contextlib.suppress(FileNotFoundError):
                self.epoll.unregister(source)

    def end(self) -> None:
        """End the workers, busy ones after GRACE_S, and close everything; do nothing in a fork."""
        if os.getpid() != self.owner_pid:
            return
        self.is_closing = True
        self._shut_down_sockets()
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            try:
                # OSError: no descriptor is available; `_release_all` then kills the workers.
                with contextlib.suppress(OSError):
                    self._release_zygote()
            finally:  # even if a second Ctrl-C interrupts the wait
                self._release_all()

    def _shut_down_sockets(self) -> None:
        """Shut down all sockets to end `wait`; closing is not enough while a fork has copies."""
        ends = [(worker.socket, socket.SHUT_RDWR) for worker in self.workers]
        if self.session is not None:
            ends.append((self.session, socket.SHUT_WR))  # the zygote must still report the exits
        for end, how in ends:
            with contextlib.suppress(OSError):  # already closed, here or on the other side
                end.shutdown(how)

    def _release_zygote(self) -> None:
        zygote = self.zygote
        if zygote is None:
            return
        zygote_pidfd = os.dup(zygote.pidfd)  # `release` below may close the original
        try:
            if not self._await_session_end(zygote_pidfd, GRACE_S):
                self._kill()
            self.zygote = None
            release(zygote)
            give_up_s = time.monotonic() + _KILL_TIMEOUT_S
            self._await_session_end(zygote_pidfd, _KILL_TIMEOUT_S)
            for worker in self.workers:
                if worker.pidfd is not None:
                    has_ended(worker.pidfd, give_up_s - time.monotonic())
        finally:
            os.close(zygote_pidfd)

    def _await_session_end(self, zygote_pidfd: int, timeout_s: float) -> bool:
        """Wait until the zygote ends the session after the last worker; return False on timeout."""
        if self.session is None:
            return True
        poll = select.poll()
        poll.register(self.session, select.POLLIN)
        poll.register(zygote_pidfd, select.POLLIN)
        give_up_s = time.monotonic() + timeout_s
        while ready := poll.poll(max(0.0, give_up_s - time.monotonic()) * 1000):
            is_zygote_gone = any(fd == zygote_pidfd for fd, _ in ready)
            try:
                reply: Received = self.session.recvmsg(*_RECEIVE_NOW)
            except BlockingIOError:
                if is_zygote_gone:
                    return True
                continue
            except ConnectionResetError:  # the next calls return the zygote's earlier replies
                continue
            if not reply[0]:
                return True
            self.replies.append(reply)
            self._handle_replies()
        return False

    def _kill(self) -> None:
        for worker in self.workers:
            if worker.pidfd is not None:
                end_process(worker.pidfd)

    def _release_all(self) -> None:
        # Ignore that this process cannot open more files: the workers are killed in any case.
        with contextlib.suppress(UnsupportedEnvironment):
            self._handle_replies()  # replies may contain pidfds of new workers
        self._kill()
        if self.zygote is not None:
            release(self.zygote)
            self.zygote = None
        for worker in self.workers:
            worker.close()
        # Close the descriptors of messages that `wait` has not returned.
        for _, (_, ancillary, flags, _) in self.received:
            for fd in unpack_fds(ancillary, flags):
                os.close(fd)
        for fd in self.own_fds:
            os.close(fd)
        self.received, self.exited, self.own_fds = [], [], []
        if self.session is not None:
            # The zygote then kills workers whose start it has not reported yet.
            with contextlib.suppress(OSError):
                self.session.shutdown(socket.SHUT_RDWR)
            self.session.close()
        self.wakeup.close()
        self.epoll.close()


def _await_exit(worker: WorkerHandle) -> None:
    if worker.pidfd is not None:
        has_ended(worker.pidfd, 1.0)
        return
    # There is no pidfd, because the zygote exited before it reported the start of this worker. Wait
    # until the worker's socket is closed.
    poll = select.poll()
    poll.register(worker.socket, 0)
    poll.poll(1000)


def _failure(worker: WorkerHandle, ancillary: Ancillary, flags: int) -> str:
    if worker.failure is None:
        (fd,) = unpack_fds(ancillary, flags)
        n_bytes = os.fstat(fd).st_size
        worker.failure = os.pread(fd, n_bytes, 0).decode("utf-8", "replace")
        os.close(fd)
    return worker.failure
