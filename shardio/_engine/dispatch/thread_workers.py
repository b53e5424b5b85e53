"""Workers that are threads of this process, with the interface of a WorkerPool.

Each thread handles the same messages as a worker process, and opens the dataset itself. All threads
share one memory map of each block. The global random generators are seeded for each call of user
code. All threads share the generators, so a lock lets one thread at a time run user code.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from shardio._base.classes import Closing, undo_on_error
from shardio._engine.dispatch.worker import STACKS, BatchWorker, ReplyBuffer
from shardio._engine.filling.batch_spec import BatchSpec
from shardio._engine.filling.filler import Filler
from shardio._engine.filling.user_functions import UserCalls, call_seeded
from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.global_generators import (
    States,
    generator_states,
    restore_generators,
)
from shardio._workers.processes.linux import interrupts_held, this_process
from shardio._workers.processes.pool_state import Event, Failed, Message, WorkerExit
from shardio._workers.processes.stack_dumps import thread_stack
from shardio._workers.processes.zygote import GRACE_S
from shardio.errors import ClosedError
from shardio.samples.view import SampleView


class GeneratorLock:
    """A lock for the global random generators. Releasing it restores their states."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: threading.Thread | None = None
        self._waiting: deque[object] = deque()
        self._states: States

    def acquire(self, is_unwanted: Callable[[], bool] = lambda: False) -> bool:
        """Acquire the lock for the calling thread, in the order of the calls.

        Return False if `is_unwanted()` returns True meanwhile; `wake` makes waiting threads call
        this function.
        """
        ticket, queue = object(), self._waiting
        with self._changed:
            queue.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: is_unwanted() or (self._holder is None and queue[0] is ticket)
                )
                if is_unwanted():
                    return False
                self._states = generator_states()
                self._holder = threading.current_thread()
                return True
            finally:
                queue.remove(ticket)
                self._changed.notify_all()  # another thread is now the first in the queue

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def release(self, thread: threading.Thread) -> None:
        """Release the lock if `thread`, which may hang in user code, holds it."""
        with self._changed:
            if self._holder is thread:
                restore_generators(self._states)
                self._holder = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock during the `with` block; reentrant."""
        thread = threading.current_thread()
        if self._holder is thread:
            states = generator_states()
            try:
                yield
            finally:
                restore_generators(states)
            return
        try:
            self.acquire()
            yield
        finally:
            self.release(thread)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock during the `with` block if the calling thread holds it.

        At the end, the generators get back the states that they had at the beginning.
        """
        thread = threading.current_thread()
        if self._holder is not thread:
            yield
            return
        states = generator_states()
        self.release(thread)
        try:
            yield
        finally:
            self.acquire()
            restore_generators(states)


GENERATOR_LOCK: Final = GeneratorLock()

# In a forked child, nothing holds the lock at first: the threads of the parent do not exist there.
os.register_at_fork(after_in_child=GENERATOR_LOCK.__init__)  # type: ignore[misc]


_Message = tuple[bytes, tuple[int, ...]]


class _SharedState:
    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.is_closing = False
        self.maps: dict[int, BlockMap] = {}
        """The memory map of each block, by the inode of the block's file."""
        self._lock = threading.Lock()

    def call(self, key: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call a seeded user function; raise ClosedError if the pool was closed meanwhile."""
        if not GENERATOR_LOCK.acquire(lambda: self.is_closing):
            raise _closed()
        try:
            return call_seeded(key, function, arguments)
        finally:
            GENERATOR_LOCK.release(threading.current_thread())

    def map_of(self, fd: int, max_bytes: int | None) -> BlockMap:
        """Return the memory map of a block, the same for all threads; take ownership of `fd`.

        The map is not thread-safe, but only one thread uses a block at a time. The descriptor of
        the map is closed when the map is garbage-collected.
        """
        file = os.fstat(fd).st_ino  # no other file gets this inode while the file is mapped
        with self._lock:
            found = self.maps.get(file)
            if found is not None:
                os.close(fd)
                return found
            with undo_on_error(os.close, fd):
                found = self.maps[file] = BlockMap(fd, max_bytes)
            weakref.finalize(found, os.close, fd).atexit = False
            return found


def filler_in_main(batch_spec: BatchSpec, view: SampleView, calls: UserCalls) -> Filler:
    """Return a filler that first checks the lengths of mapped files, for the main process.

    Reading the missing part of a truncated mapped file would kill the process.
    """
    dataset = view.dataset
    check_shards = dataset.files.check_lengths if dataset.access == "mmap" else None
    return Filler(batch_spec, view, calls, check_shards)


class _ThreadWorker(BatchWorker):
    def __init__(self, index: int, batch_spec: BatchSpec, shared: _SharedState) -> None:
        self._shared = shared
        super().__init__(batch_spec, lambda reply: shared.events.put(Message(index, reply)))

    def _new_filler(self, view: SampleView) -> Filler:
        return filler_in_main(self._batch_spec, view, UserCalls(call=self._shared.call))

    def _map(self, fd: int) -> BlockMap:
        return self._shared.map_of(fd, self._max_bytes)

    def _accept_hello(
        self, lineage: str, fds: tuple[int, ...], number: int, n_workers: int
    ) -> None:
        try:
            super()._accept_hello(lineage, fds, number, n_workers)
        finally:
            # These files are mapped already, or not needed. A worker process need not close the
            # descriptors, because its exit closes them.
            for fd in fds[: STACKS + 1]:
                os.close(fd)

    def _map_replies(self, fd: int, number: int) -> ReplyBuffer:
        # Use private memory instead of `fd`. A thread that hangs is abandoned, and may still write
        # to its buffer while its successor with the same index runs.
        return ReplyBuffer(mmap.mmap(-1, mmap.PAGESIZE), 0)

    def _serve_stack_dumps(self, fd: int) -> None:
        """Do nothing: `named_stacks` reads the stacks of the threads."""


class ThreadWorkers(Closing):
    """A pool of `n_workers` threads that fill blocks, with the interface of a WorkerPool.

    `close` lets no further user function start, waits up to GRACE_S until the threads have handled
    their current messages, and abandons the threads that have not.
    """

    def __init__(self, n_workers: int, batch_spec: BatchSpec) -> None:
        import numpy.random  # noqa: F401  # on first use, too many files may be open

        self._batch_spec = batch_spec
        self._owner_pid = this_process.pid
        self._shared = _SharedState()
        self._inboxes: list[queue.SimpleQueue[_Message | None]] = []
        self._threads: list[threading.Thread] = []
        with undo_on_error(self.close):
            with interrupts_held():
                for index in range(n_workers):
                    inbox, thread = self._start(index)
                    self._inboxes.append(inbox)
                    self._threads.append(thread)

    def _start(self, index: int) -> tuple[queue.SimpleQueue[_Message | None], threading.Thread]:
        inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_serve,
            args=(index, self._batch_spec, inbox, self._shared),
            name=f"shardio-worker-{index}",
            daemon=True,  # a hanging thread must not keep the program from exiting
        )
        thread.start()
        return inbox, thread

    def send(self, index: int, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message without blocking. The caller keeps the `fds` open."""
        self._check_usable()
        if not fds:
            self._inboxes[index].put((message, ()))
            return
        # Send copies of the descriptors, because the thread will own and close what it receives.
        with interrupts_held(), contextlib.ExitStack() as on_failure:
            copies = []
            for fd in fds:
                copies.append(os.dup(fd))
                on_failure.callback(os.close, copies[-1])
            self._inboxes[index].put((message, tuple(copies)))
            on_failure.pop_all()

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Wait until there is an event; return all events, or none after `timeout_s`."""
        self._check_usable()
        arriving = self._shared.events
        events: list[Event | None] = []
        with contextlib.suppress(queue.Empty):
            with GENERATOR_LOCK.released():
                events.append(arriving.get(timeout=timeout_s))
            while True:
                events.append(arriving.get_nowait())
        # While this thread waited, another thread or a signal handler may have closed the pool.
        self._check_usable()
        return [event for event in events if event is not None]

    def named_stacks(self, fds: Sequence[int]) -> list[tuple[str, str]]:
        found = []
        for i, thread in enumerate(self._threads):
            frame = sys._current_frames().get(thread.ident or 0)
            stack = "it is being started" if frame is None else thread_stack(frame)
            found.append((f"worker {i} ({thread.name})", stack))
        return found

    def restart(self, index: int) -> None:
        self._check_usable()
        self._inboxes[index], self._threads[index] = self._start(index)

    def close(self) -> None:
        """Stop all workers. Idempotent; does nothing in a forked child."""
        shared = self._shared
        if shared.is_closing or this_process.pid != self._owner_pid:
            return
        with interrupts_held():
            shared.is_closing = True
            GENERATOR_LOCK.wake()
            shared.events.put(None)  # wakes a thread that is inside `wait`
            for inbox in self._inboxes:
                inbox.put(None)
            end_s = time.monotonic() + GRACE_S
            for thread in self._threads:
                # The current thread may be a worker, if a finalizer has called `close`.
                if thread is not threading.current_thread():
                    thread.join(max(0.0, end_s - time.monotonic()))
                    GENERATOR_LOCK.release(thread)
            # An abandoned thread keeps its own references to the maps that it uses.
            shared.maps.clear()

    def _check_usable(self) -> None:
        if self._shared.is_closing:
            raise _closed()


def _closed() -> ClosedError:
    return ClosedError("the workers were stopped by close()")


def _serve(
    index: int,
    batch_spec: BatchSpec,
    inbox: queue.SimpleQueue[_Message | None],
    shared: _SharedState,
) -> None:
    try:
        with _ThreadWorker(index, batch_spec, shared) as worker:
            while (message := inbox.get()) is not None:
                if shared.is_closing:
                    inbox.put(message)  # the end of this function closes its descriptors
                    break
                worker.handle_message(*message)
    except BaseException as error:  # noqa: BLE001  # the pool's owner gets it as text
        text = "".join(traceback.format_exception(error))
        shared.events.put(Failed(index, text))
        shared.events.put(WorkerExit(index, None, None, 1))
    finally:
        while not inbox.empty():
            for fd in (inbox.get() or (b"", ()))[1]:
                os.close(fd)
