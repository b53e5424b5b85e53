"""What a crew holds in the kernel, and how all of it is ended.

Apart from the crew itself, because a finalizer ends it when the crew is already gone.

The one wait of a crew: over its channels, its session with the zygote, and the zygote itself.

What arrives is kept in the crew's holdings until `Crew.wait` hands it over, and every step may be
done again over what is there: a KeyboardInterrupt at any moment loses nothing and doubles nothing.
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

from shardio._workers.processes.channel import LOST_FDS, RECEIVE, Ancillary, Received, unpack_fds
from shardio._workers.processes.launch import Zygote, release
from shardio._workers.processes.linux import Bell, end_process, has_ended
from shardio._workers.processes.zygote import EXITED, GRACE_S, REPLY, STARTED
from shardio.errors import UnsupportedEnvironment

__all__ = [
    "Died",
    "Event",
    "Failed",
    "Holdings",
    "Message",
    "RECEIVE_NOW",
    "Watch",
    "Worker",
    "end_all",
]


# How long an end waits, after SIGKILL, for the kernel to take the processes apart.
_PATIENCE_S = 0.8

Arrival = tuple[int, Received]  # from the worker at this place
Rights = list[tuple[int, int, "array.array[int]"]]

RECEIVE_NOW = (RECEIVE[0], RECEIVE[1], RECEIVE[2] | socket.MSG_DONTWAIT)


class Died(NamedTuple):
    """A worker's process has ended: the last event of that process.

    Killed by `signal`, or else ended with `exit_code`: 0 when the function returned, 1 when it
    raised (a Failed came before). Both are None when it could not be started. `pid` is None when
    that was not learned: it could not be started, or the zygote ended in the middle of it.
    """

    worker: int
    pid: int | None
    signal: int | None
    exit_code: int | None

    @property
    def end(self) -> str:
        """How it ended: the same for whichever worker."""
        if self.signal is not None:
            return f"was killed by signal {self.signal}"
        if self.exit_code is not None:
            return f"ended with exit code {self.exit_code}"
        return "could not be started"

    @property
    def manner(self) -> str:
        """Which worker ended, and how."""
        process = "" if self.pid is None else f" (process {self.pid})"
        return f"worker {self.worker}{process} {self.end}"


class Worker:
    """Main's side of one place in the crew; a restart puts a new one there."""

    __slots__ = (
        "arrivals",
        "end",
        "ended",
        "failure",
        "index",
        "outgoing",
        "outgoing_fds",
        "pid",
        "pidfd",
        "sent",
    )

    def __init__(self, index: int, end: socket.socket) -> None:
        self.index = index
        self.end = end
        # Endless: (index, what `recvmsg` gives), one call of `recvmsg` for each item taken.
        received = map(end.recvmsg, *map(repeat, RECEIVE_NOW))
        self.arrivals: Iterator[Arrival] = zip(repeat(index), received, strict=False)
        self.pid: int | None = None
        self.pidfd: int | None = None
        # What the full socket did not take, as arguments of `sendmsg`, and its results so far.
        self.outgoing: list[tuple[list[bytes], Rights]] = []
        self.outgoing_fds: list[int] = []
        self.sent: list[int] = []
        self.failure: str | None = None
        self.ended: Died | None = None

    def close(self) -> None:
        """Close main's descriptors of this worker; the process is not touched."""
        self.end.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        for fd in self.outgoing_fds:
            os.close(fd)
        self.outgoing_fds = []


class Holdings:
    """Sockets, descriptors, processes and undelivered events of one crew."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.lock = threading.RLock()  # held while `wait` uses the descriptors that an end closes
        self.epoll = select.epoll()
        self.workers: list[Worker] = []
        self.zygote: Zygote | None = None
        self.session: socket.socket | None = None
        self.bell: Bell | None = None
        self.own_fds: list[int] = []  # the cargo, then copies of the fds that workers are given
        self.letters: deque[Received] = deque()  # from the zygote, not yet acted upon
        self.intake: list[Arrival] = []  # from workers, not yet handed over
        self.gone: list[Worker] = []  # dead, not yet reported
        self.is_closing = False
        self.is_closed = False


def end_all(held: Holdings) -> None:
    """End the workers, wait until they are gone, and close everything.

    Idle workers leave when they see the end of their channel; others are killed after GRACE_S. In a
    fork of the owner this does nothing: a fork that ends must not take its parent's workers along.
    """
    if os.getpid() != held.owner_pid:
        return
    held.is_closing = True
    _hang_up(held)
    with held.lock:
        if held.is_closed:
            return
        held.is_closed = True
        try:
            with contextlib.suppress(OSError):  # no descriptor to be had: they are killed below
                _see_off(held)
        finally:  # also when a second Ctrl-C interrupts the wait
            _let_go(held)


def _hang_up(held: Holdings) -> None:
    """End main's half of every socket: also a `wait` in another thread wakes from that.

    By shutdown, since a close is not seen by the other side while a fork of main holds a copy.
    """
    ends = [(worker.end, socket.SHUT_RDWR) for worker in held.workers]
    if held.session is not None:
        ends.append((held.session, socket.SHUT_WR))  # the zygote still has to tell of the ends
    for end, how in ends:
        try:
            end.shutdown(how)
        except OSError:  # closed, or the other side is
            continue


def _see_off(held: Holdings) -> None:
    zygote = held.zygote
    if zygote is None:
        return
    zygote_pidfd = os.dup(zygote.pidfd)  # the release below may close the original
    try:
        if not _is_over(held, zygote_pidfd, GRACE_S):
            _kill(held)
        held.zygote = None
        release(zygote)
        give_up_s = time.monotonic() + _PATIENCE_S
        _is_over(held, zygote_pidfd, _PATIENCE_S)
        for worker in held.workers:
            if worker.pidfd is not None:
                has_ended(worker.pidfd, give_up_s - time.monotonic())
    finally:
        os.close(zygote_pidfd)


def _is_over(held: Holdings, zygote_pidfd: int, timeout_s: float) -> bool:
    """Read the zygote's last letters until it has no more to say, or the time is up."""
    if held.session is None:
        return True
    poll = select.poll()
    poll.register(held.session, select.POLLIN)
    poll.register(zygote_pidfd, select.POLLIN)
    give_up_s = time.monotonic() + timeout_s
    while ready := poll.poll(max(0.0, give_up_s - time.monotonic()) * 1000):
        is_zygote_gone = any(fd == zygote_pidfd for fd, _ in ready)
        try:
            letter: Received = held.session.recvmsg(*RECEIVE_NOW)
        except BlockingIOError:
            if is_zygote_gone:
                return True
            continue
        except ConnectionResetError:  # what it wrote before comes with the next calls
            continue
        if not letter[0]:
            return True
        held.letters.append(letter)
        _note_starts(held)
    return False


def _note_starts(held: Holdings) -> None:
    """Learn the pidfds of workers that were started since the last `wait`."""
    while held.letters:
        data, ancillary, flags, _ = held.letters[0]
        kind, place, pid, _, _ = REPLY.unpack(data) if data else (0, 0, 0, 0, 0)
        if kind == STARTED:
            (held.workers[place].pidfd,) = unpack_fds(ancillary, flags)
            held.workers[place].pid = pid
        held.letters.popleft()


def _kill(held: Holdings) -> None:
    for worker in held.workers:
        if worker.pidfd is not None:
            end_process(worker.pidfd)


def _let_go(held: Holdings) -> None:
    with contextlib.suppress(UnsupportedEnvironment):  # no descriptors were left: said before
        _note_starts(held)
    _kill(held)
    if held.zygote is not None:
        release(held.zygote)
        held.zygote = None
    for worker in held.workers:
        worker.close()
    for _, (_, ancillary, flags, _) in held.intake:  # sent to us with events nobody waited for
        for fd in unpack_fds(ancillary, flags):
            os.close(fd)
    for fd in held.own_fds:
        os.close(fd)
    held.intake, held.gone, held.own_fds = [], [], []
    if held.session is not None:
        held.session.close()
    if held.bell is not None:
        held.bell.close()
    held.epoll.close()


# The arguments of one `recvmsg`, as the iterables that `map` wants.
_ONE_RECEIVE = tuple((argument,) for argument in RECEIVE_NOW)

# Plain numbers: operators of enum members are slow.
_READABLE, _WRITABLE = int(select.EPOLLIN), int(select.EPOLLOUT)


class Message(NamedTuple):
    """A worker has sent `data`; the descriptors `fds` belong to whoever takes the event."""

    worker: int
    data: bytes
    fds: tuple[int, ...] = ()


class Failed(NamedTuple):
    """The crew's function raised in a worker, or could not be unpickled there; its Died follows.

    `text` is the traceback, also of SystemExit and KeyboardInterrupt.
    """

    worker: int
    text: str


Event = Message | Failed | Died


class Watch:
    """Watches over a crew's holdings, which it does not own."""

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._by_fd: dict[int, Worker] = {}

    def add_zygote(self) -> None:
        """Watch the holdings' zygote and session."""
        held = self._held
        if held.zygote is not None and held.session is not None:
            held.epoll.register(held.session, _READABLE)
            held.epoll.register(held.zygote.pidfd, _READABLE)

    def add(self, worker: Worker) -> None:
        """Watch the channel of a worker."""
        self._by_fd[worker.end.fileno()] = worker
        self._held.epoll.register(worker.end, _READABLE)

    def add_bell(self) -> None:
        """Watch the holdings' bell."""
        if self._held.bell is not None:
            self._held.epoll.register(self._held.bell, _READABLE)

    def gather(self, timeout_s: float | None) -> list[Event]:
        """Take in what arrives until there is an event, and return all.

        None when the time is up, or the bell has rung.

        The events stay in `intake` and `gone` of the holdings: the caller empties both.
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
                if held.is_closing:  # by a signal handler, while this thread was in the call
                    return []
                raise
            if not ready or held.is_closing:
                return []
            has_rung = False
            for fd, mask in ready:
                worker = self._by_fd.get(fd)
                if worker is None:
                    has_rung |= self._hear_other(fd)
                    continue
                if mask & _WRITABLE:
                    self._flush(worker)
                if mask != _WRITABLE:
                    self._receive(worker)
            if end_s is not None:
                timeout_s = max(0.0, end_s - time.monotonic())
            if has_rung:  # what has arrived with it is still to be taken
                end_s = timeout_s = 0.0

    def _hear_other(self, fd: int) -> bool:
        """Act upon what is ready and no worker's; returns whether it was the bell."""
        held = self._held
        if held.bell is not None and fd == held.bell.fileno():
            held.bell.hush()
            return True
        if held.session is not None and fd == held.session.fileno():
            self._receive_letter(held.session)
        else:
            self._lose_zygote()
        return False

    def queue(self, worker: Worker, message: bytes, fds: Sequence[int]) -> None:
        """Keep a message that the socket did not take, with copies of its fds, to send it later."""
        if not worker.outgoing:
            self._held.epoll.modify(worker.end, _READABLE | _WRITABLE)
        copies = array.array("i", map(os.dup, fds))
        worker.outgoing_fds.extend(copies)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, copies)] if copies else []
        worker.outgoing.append(([message], rights))

    def _flush(self, worker: Worker) -> None:
        """Send what was queued, as far as the socket takes it."""
        try:
            # Each result is in the list when the next is sent: Ctrl-C sends nothing twice.
            unsent = worker.outgoing[len(worker.sent) :]
            worker.sent.extend(starmap(worker.end.sendmsg, unsent))
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            pass  # its death is told soon
        self._held.epoll.modify(worker.end, _READABLE)
        done_fds = worker.outgoing_fds
        worker.outgoing, worker.outgoing_fds, worker.sent = [], [], []
        for fd in done_fds:
            os.close(fd)

    def _receive(self, worker: Worker) -> None:
        # From the kernel to the list within one call: no signal handler can run in between.
        try:
            self._held.intake.extend(islice(worker.arrivals, 1))
        except (BlockingIOError, ConnectionResetError):
            return  # a reset is said once, before what is still in the queue

    def _receive_letter(self, session: socket.socket) -> None:
        try:
            self._held.letters.extend(map(session.recvmsg, *_ONE_RECEIVE))
        except (BlockingIOError, ConnectionResetError):
            return

    def _events(self) -> list[Event]:
        """Make events of all that has arrived; after Ctrl-C a second time of the same."""
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
        """Act upon what the zygote says; a letter is put away when all of it is done."""
        held = self._held
        while held.letters:
            data, ancillary, flags, _ = held.letters[0]
            if not data:  # the zygote has ended, which its pidfd says too
                self._ignore(held.session)
            else:
                kind, place, pid, how, status = REPLY.unpack(data)
                worker = held.workers[place]
                if kind == STARTED:
                    (worker.pidfd,) = unpack_fds(ancillary, flags)
                    worker.pid = pid
                elif kind == EXITED and how == os.CLD_EXITED:
                    self._bury(worker, Died(place, pid, None, status))
                elif kind == EXITED:
                    self._bury(worker, Died(place, pid, status, None))
                else:
                    why = os.strerror(status)
                    worker.failure = f"the operating system refused to start a process: {why}"
                    self._bury(worker, Died(place, None, None, None))
            held.letters.popleft()

    def _lose_zygote(self) -> None:
        """Count every worker as dead: the kernel kills them when the zygote ends."""
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
                self._bury(worker, Died(worker.index, worker.pid, int(signal.SIGKILL), None))
        self._ignore(held.session)
        self._ignore(zygote.pidfd)
        held.zygote = None
        release(zygote)

    def _bury(self, worker: Worker, died: Died) -> None:
        """Take in all that a dead worker has sent, then note its death."""
        if worker.ended is not None:
            return
        intake = self._held.intake
        while worker.end.fileno() in self._by_fd:
            try:
                intake.extend(islice(worker.arrivals, 1))
            except ConnectionResetError:
                continue
            except BlockingIOError:  # empty, though a process that it started holds its end
                break
            _, (data, ancillary, _, _) = intake[-1]
            if not data and not ancillary:
                break
        self._stop_listening(worker)
        if worker not in self._held.gone:
            self._held.gone.append(worker)
        worker.ended = died

    def _stop_listening(self, worker: Worker) -> None:
        self._ignore(worker.end)
        self._by_fd.pop(worker.end.fileno(), None)

    def _ignore(self, source: socket.socket | int | None) -> None:
        """Take a descriptor out of the epoll, which a close alone does not do if a fork has it."""
        if source is None:
            return
        try:
            self._held.epoll.unregister(source)
        except FileNotFoundError:
            return


def _await_end(worker: Worker) -> None:
    """Wait until a worker that the kernel is killing has ended."""
    if worker.pidfd is not None:
        has_ended(worker.pidfd, 1.0)
        return
    # The zygote ended while it started this one: nothing but the end of the channel tells.
    poll = select.poll()
    poll.register(worker.end, 0)
    poll.poll(1000)


def _failure(worker: Worker, ancillary: Ancillary, flags: int) -> str:
    """Read the text that a failed worker sent in a memory file."""
    if worker.failure is None:
        (fd,) = unpack_fds(ancillary, flags)
        n_bytes = os.fstat(fd).st_size
        worker.failure = os.pread(fd, n_bytes, 0).decode("utf-8", "replace")
        os.close(fd)
    return worker.failure
