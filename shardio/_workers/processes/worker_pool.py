"""A pool of worker processes: start, watch, restart and stop them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from typing import Final

from shardio._base.classes import Closing, undo_on_error
from shardio._workers.processes.linux import Finalizer, interrupts_held, this_process
from shardio._workers.processes.pool_state import (
    Event,
    Failed,
    Message,
    PoolState,
    WorkerExit,
    WorkerHandle,
)
from shardio._workers.processes.serialization import pack
from shardio._workers.processes.stack_dumps import ask_for_stacks
from shardio._workers.processes.worker_main import (
    EXECUTE,
    FORK,
    MAX_FDS,
    Channel,
    Start,
    Target,
    check_message,
)
from shardio._workers.processes.zygote import REQUEST, acquire
from shardio.errors import ClosedError, InvalidArgument, UnsupportedEnvironment, WorkerDied

__all__ = [
    "MAX_CRASHES",
    "Channel",
    "CrashLoop",
    "Event",
    "Failed",
    "Message",
    "WorkerExit",
    "WorkerPool",
]

MAX_CRASHES: Final = 2
"""The number of workers that an item may crash.

A worker that crashes is replaced, and its items are tried again (except by MultiLoader). An item
that has crashed MAX_CRASHES workers is skipped if skips are allowed; otherwise, an error is raised.
"""


class CrashLoop:
    """A counter of the crashes since any worker last completed a task."""

    def __init__(self, n_workers: int) -> None:
        self._max_crashes = 2 * n_workers + MAX_CRASHES
        self.n_crashes = 0  # the owner sets this to 0 when a worker completes a task

    def count(self, how: str) -> None:
        """Count a crash, described by `how`; raise UnsupportedEnvironment if there are too many."""
        self.n_crashes += 1
        if self.n_crashes > self._max_crashes:
            raise UnsupportedEnvironment(f"workers crash before they do anything: {how}")


class WorkerPool(Closing):
    """A pool of `n_workers` processes that each run `target(channel)`; `close` ends them.

    `target` is serialized with cloudpickle. Every worker has duplicates of `fds` in `channel.fds`.
    `preload` names modules that the zygote imports before it forks workers. Messages may be sent
    before the workers run. `send`, `wait` and `restart` must not run in two threads at once. A pool
    is also closed when it is garbage-collected, or when the interpreter exits.
    """

    def __init__(
        self,
        n_workers: int,
        target: Target,
        *,
        fds: Sequence[int] = (),
        preload: Sequence[str] = (),
        start: Start = "zygote",
    ) -> None:
        if len(fds) > MAX_FDS - 2:
            raise InvalidArgument(f"{len(fds)} fds; a pool can be given at most {MAX_FDS - 2}")
        self._preload = tuple(preload)
        self._action = EXECUTE if start == "spawn" else FORK
        self._state = PoolState()
        self._finalizer = Finalizer(self, self._state.end)
        with undo_on_error(self.close):
            with interrupts_held():
                self._acquire_zygote()
            self._state.own_fds.append(pack(target))
            self._state.own_fds.extend(map(os.dup, fds))
            with interrupts_held():
                for index in range(n_workers):
                    self._state.workers.append(self._start(index))

    def __len__(self) -> int:
        return len(self._state.workers)

    def fileno(self) -> int:
        """Return a descriptor to poll, which is readable if there may be events for `wait`."""
        return self._state.epoll.fileno()

    def pids(self) -> list[int | None]:
        """Return the process id of each worker; None until `wait` has seen the process start."""
        return [worker.pid for worker in self._state.workers]

    def send(self, index: int, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message of 1 to MAX_MESSAGE_BYTES bytes to worker `index`, without blocking.

        If the socket has no room, a later `wait` sends the message. The caller still owns `fds`. A
        message to a worker that has exited is dropped; once `wait` has returned the WorkerExit,
        WorkerDied is raised instead.
        """
        state = self._state
        self._check_usable()
        worker = state.workers[index]
        check_message(message, fds)
        if worker.exit is not None:
            if worker in state.exited:
                return
            raise WorkerDied(f"worker {index} has died and was not restarted")
        if worker.outgoing:
            state.queue(worker, message, fds)
            return
        try:
            if fds:
                socket.send_fds(worker.socket, [message], list(fds))
            else:
                worker.socket.send(message)
        except BlockingIOError:
            state.queue(worker, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            return  # `wait` reports the worker's exit

    def signal(self, index: int, number: int) -> bool:
        """Send a signal to worker `index`; return False if its process is not running."""
        with self._state.lock:  # another thread may close the pool, and thus the pidfd
            worker = self._state.workers[index]
            if worker.pidfd is None or worker.exit is not None:
                return False
            try:
                signal.pidfd_send_signal(worker.pidfd, number)
            except ProcessLookupError:
                return False
        return True

    def named_stacks(self, fds: Sequence[int]) -> list[tuple[str, str]]:
        """Return the name and Python stacks of each worker; `fds` are the workers' stack files."""
        processes = ["" if pid is None else f" (process {pid})" for pid in self.pids()]
        names = [f"worker {i}{process}" for i, process in enumerate(processes)]
        return list(zip(names, ask_for_stacks(fds, self.signal), strict=True))

    def nudge(self) -> None:
        """Make the current or next `wait` return the events so far; callable in any thread."""
        self._state.wakeup.set()

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Wait for events and return them; after `timeout_s` or a `nudge`, there may be none.

        All messages of a worker come before its WorkerExit. Raises ClosedError if the pool is
        closed meanwhile.
        """
        state = self._state
        self._check_usable()
        with state.lock:
            events = [] if state.is_closing else state.wait_for_events(timeout_s)
        if not events:
            self._check_usable()  # another thread or a signal handler may have closed the pool
        # No function is called from here on, so no KeyboardInterrupt can lose the events.
        state.received, state.exited = [], []
        return events

    def restart(self, index: int) -> None:
        """Start a new process for a worker whose WorkerExit was returned by `wait`."""
        state = self._state
        self._check_usable()
        worker = state.workers[index]
        if worker.exit is None or worker in state.exited:
            raise InvalidArgument(f"worker {index} was not reported dead; it cannot be restarted")
        with state.lock, interrupts_held():
            worker.close()
            if state.zygote is None:
                self._acquire_zygote()
            state.workers[index] = self._start(index)

    def close(self) -> None:
        """End all workers, even busy ones; wait for their exits. Idempotent, and thread-safe."""
        with interrupts_held():
            self._state.end()  # if another thread is closing the pool, wait for that thread
            self._finalizer.detach()

    def _check_usable(self) -> None:
        state = self._state
        if this_process.pid != state.owner_pid:
            raise ClosedError(
                f"these workers belong to process {state.owner_pid}; this is process "
                f"{this_process.pid}, a fork of it, which needs a loader of its own"
            )
        if state.is_closing:
            raise ClosedError("the workers were stopped by close()")

    def _acquire_zygote(self) -> None:
        zygote = self._state.zygote = acquire()
        self._state.add_session(zygote.open_session(self._preload), zygote.pidfd)

    def _start(self, index: int) -> WorkerHandle:
        state = self._state
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        target_fd, *shared_fds = state.own_fds
        with theirs:
            if state.session is not None:
                request_fds = [theirs.fileno(), target_fd, *shared_fds]
                try:
                    request = REQUEST.pack(index, self._action)
                    socket.send_fds(state.session, [request], request_fds)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the zygote has exited; `wait` will notice, because it polls the pidfd
        worker = WorkerHandle(index, ours)
        state.add(worker)
        return worker
