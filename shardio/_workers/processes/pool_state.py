"""The kernel objects of a worker pool, and their release.

The objects are separate from the pool, because a finalizer releases them after the pool is gone.
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
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

from shardio._workers.processes.channel import RECEIVE, Received, unpack_fds
from shardio._workers.processes.linux import WakeupEvent, end_process, has_ended
from shardio._workers.processes.zygote import GRACE_S, REPLY, STARTED, Zygote, release
from shardio.errors import UnsupportedEnvironment

# The time to wait after SIGKILL until the kernel has ended the processes.
_PATIENCE_S = 0.8

Arrival = tuple[int, Received]  # the worker's index, and the result of `recvmsg`
Rights = list[tuple[int, int, "array.array[int]"]]

RECEIVE_NOW = (RECEIVE[0], RECEIVE[1], RECEIVE[2] | socket.MSG_DONTWAIT)


class WorkerExit(NamedTuple):
    """The exit of a worker's process: its last event.

    The process was killed by `signal`, or exited with `exit_code`: 0 if the function returned, 1 if
    it raised (a Failed event precedes this). Both are None if the process could not be started.
    `pid` is None if the process could not be started or the zygote exited meanwhile.
    """

    worker: int
    pid: int | None
    signal: int | None
    exit_code: int | None

    @property
    def end(self) -> str:
        """A description of the exit, without the worker's name."""
        if self.signal is not None:
            known = self.signal in set(signal.Signals)  # most real-time signals have no name
            name = f" ({signal.Signals(self.signal).name})" if known else ""
            return f"was killed by signal {self.signal}{name}"
        if self.exit_code is not None:
            return f"ended with exit code {self.exit_code}"
        return "could not be started"

    @property
    def manner(self) -> str:
        """A description of the exit, with the worker's index and process."""
        process = "" if self.pid is None else f" (process {self.pid})"
        return f"worker {self.worker}{process} {self.end}"


class WorkerHandle:
    """The main process's side of one worker; a restart replaces it."""

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
        # An infinite iterator of (index, result of `recvmsg`): taking an item calls `recvmsg` once.
        received = map(end.recvmsg, *map(repeat, RECEIVE_NOW))
        self.arrivals: Iterator[Arrival] = zip(repeat(index), received, strict=False)
        self.pid: int | None = None
        self.pidfd: int | None = None
        # Messages for which the socket had no room, as arguments of `sendmsg`; `sent` has the
        # results of those sent so far.
        self.outgoing: list[tuple[list[bytes], Rights]] = []
        self.outgoing_fds: list[int] = []
        self.sent: list[int] = []
        self.failure: str | None = None
        self.ended: WorkerExit | None = None

    def close(self) -> None:
        """Close the main process's descriptors for this worker; the worker is not affected."""
        self.end.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        for fd in self.outgoing_fds:
            os.close(fd)
        self.outgoing_fds = []


class PoolState:
    """The sockets, descriptors, processes and undelivered events of one pool."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.lock = threading.RLock()  # held while `wait` uses descriptors, so that none is closed
        self.epoll = select.epoll()
        self.workers: list[WorkerHandle] = []
        self.zygote: Zygote | None = None
        self.session: socket.socket | None = None
        self.bell: WakeupEvent | None = None
        self.own_fds: list[int] = []  # the payload file, then copies of the fds given to workers
        self.letters: deque[Received] = deque()  # replies of the zygote that are not handled yet
        self.intake: list[Arrival] = []  # messages of workers that are not returned yet
        self.gone: list[WorkerHandle] = []  # exited workers that are not reported yet
        self.is_closing = False
        self.is_closed = False


def end_all(held: PoolState) -> None:
    """End the workers, wait until they have exited, and close everything.

    Idle workers exit when their channel is shut down; others are killed after GRACE_S. In a fork of
    the owner this does nothing, because a fork that exits must not end its parent's workers.
    """
    if os.getpid() != held.owner_pid:
        return
    held.is_closing = True
    _shut_sockets(held)
    with held.lock:
        if held.is_closed:
            return
        held.is_closed = True
        try:
            # If no descriptor is available, the workers are killed below.
            with contextlib.suppress(OSError):
                _release_zygote(held)
        finally:  # even if a second Ctrl-C interrupts the wait
            _let_go(held)


def _shut_sockets(held: PoolState) -> None:
    """Shut down the main process's side of every socket; this also wakes a `wait` in a thread.

    Closing would not suffice: while a fork has a copy of a socket, the other side does not notice.
    """
    ends = [(worker.end, socket.SHUT_RDWR) for worker in held.workers]
    if held.session is not None:
        ends.append((held.session, socket.SHUT_WR))  # the zygote must still report the exits
    for end, how in ends:
        try:
            end.shutdown(how)
        except OSError:  # already closed, here or on the other side
            continue


def _release_zygote(held: PoolState) -> None:
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


def _is_over(held: PoolState, zygote_pidfd: int, timeout_s: float) -> bool:
    """Read the zygote's last replies; return True when all have arrived, False after a timeout."""
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
        except ConnectionResetError:  # the next calls return the zygote's earlier replies
            continue
        if not letter[0]:
            return True
        held.letters.append(letter)
        _note_starts(held)
    return False


def _note_starts(held: PoolState) -> None:
    """Record the pidfds of workers that were started since the last `wait`."""
    while held.letters:
        data, ancillary, flags, _ = held.letters[0]
        kind, place, pid, _, _ = REPLY.unpack(data) if data else (0, 0, 0, 0, 0)
        if kind == STARTED:
            (held.workers[place].pidfd,) = unpack_fds(ancillary, flags)
            held.workers[place].pid = pid
        held.letters.popleft()


def _kill(held: PoolState) -> None:
    for worker in held.workers:
        if worker.pidfd is not None:
            end_process(worker.pidfd)


def _let_go(held: PoolState) -> None:
    # The error means that descriptors ran out, which was reported before.
    with contextlib.suppress(UnsupportedEnvironment):
        _note_starts(held)
    _kill(held)
    if held.zygote is not None:
        release(held.zygote)
        held.zygote = None
    for worker in held.workers:
        worker.close()
    # Close descriptors that arrived with events that were never returned.
    for _, (_, ancillary, flags, _) in held.intake:
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
