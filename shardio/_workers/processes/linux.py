"""Calls that exist only on Linux: process file descriptors, memory files, prctl, mallopt.

If the kernel or a sandbox lacks a call, UnsupportedEnvironment names it.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from shardio._base.classes import Closing, undo_on_error
from shardio.errors import InsufficientMemory, UnsupportedEnvironment
from shardio.storage.fs import max_file_bytes

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MFD_NOEXEC_SEAL = 8
_KEPT_BYTES = 128 << 20
_MAX_MMAP_THRESHOLD = 32 << 20  # the largest threshold that glibc accepts
_MALLOC_VARIABLES = {"MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}

HandlerArguments = tuple[int, FrameType | None]
Handler = Callable[[int, FrameType | None], object]

# Load the library at import, because a forked worker calls prctl before anything else.
_libc = ctypes.CDLL(None, use_errno=True)


class _ThisProcess:
    """A cache of this process's id, updated in a fork: os.getpid() takes 0.24 µs, this 0.01 µs."""

    def __init__(self) -> None:
        self.note_pid()
        os.register_at_fork(after_in_child=self.note_pid)

    def note_pid(self) -> None:
        self.pid = os.getpid()


this_process = _ThisProcess()


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Defer Ctrl-C, which Python handles in the main thread, to the end of a short `with` block."""
    with _record_interrupts(lambda handler, arguments: handler(*arguments)):
        # The kernel may still deliver the signal to another thread, and Python would then raise
        # KeyboardInterrupt here, before the mask is restored. `_record_interrupts` prevents this.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Finalizer(weakref.finalize):  # type: ignore[type-arg]  # not subscriptable at run time
    """A `weakref.finalize` that does not swallow Ctrl-C.

    Python discards every exception that is raised during garbage collection. If Ctrl-C arrives
    while the garbage collector calls the finalizer, the signal is sent again after the call.

    `is_at_exit` is bound as a default, because the interpreter clears the globals of modules before
    it collects the last objects. A call at that time does nothing, as in the base class.
    """

    __slots__ = ()

    def __call__(
        self, owner: Any = None, is_at_exit: Callable[[], bool] = sys.is_finalizing
    ) -> object:
        if owner is None or is_at_exit():
            return super().__call__()
        with _record_interrupts(_send_again):
            return super().__call__(owner)


def _send_again(handler: Handler, arguments: HandlerArguments) -> None:
    if isinstance(handler, _HeldInterrupts):  # an outer `_record_interrupts` handles the interrupt
        handler(*arguments)
        return
    with contextlib.suppress(RuntimeError):  # no thread starts while the interpreter shuts down
        _thread.start_new_thread(_interrupt_after_finalizer, (threading.get_ident(),))


def _interrupt_after_finalizer(thread: int) -> None:
    """Send Ctrl-C to a thread as soon as that thread has left the finalizer."""
    while _is_in_finalizer(sys._current_frames().get(thread)):
        time.sleep(0.001)
    signal.pthread_kill(thread, signal.SIGINT)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not Finalizer.__call__.__code__:
        frame = frame.f_back
    return frame is not None


class _HeldInterrupts(list[HandlerArguments]):
    """A temporary handler of SIGINT that records its calls."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.append((number, frame))


@contextlib.contextmanager
def _record_interrupts(then: Callable[[Handler, HandlerArguments], object]) -> Iterator[None]:
    """Record interrupts during a `with` block; then call `then(handler, arguments)` for each.

    Blocking the signal in the main thread is not enough: the kernel would deliver the signal to
    another thread, such as one of NumPy's, and Python would call the handler in the main thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and callable(handler)):
        yield
        return
    held = _HeldInterrupts()
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for arguments in held:
            then(handler, arguments)


@contextlib.contextmanager
def translate_open_file_errors() -> Iterator[None]:
    """Raise UnsupportedEnvironment if the `with` block fails because too many files are open."""
    try:
        yield
    except OSError as error:
        raise_if_too_many_files(error)
        raise


def raise_if_too_many_files(error: OSError) -> None:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise UnsupportedEnvironment(
            "too many open files: a loader opens two per block, and more per worker; the limit of "
            f"this process is {limit} (`ulimit -n`): raise that limit, lower num_workers or "
            "prefetch, or release batches and loaders"
        ) from error


def check_files(n_files: int) -> None:
    """Raise UnsupportedEnvironment unless n_files can be opened; ZeroMQ would abort the process."""
    with interrupts_held(), translate_open_file_errors(), contextlib.ExitStack() as opened:
        for _ in range(n_files):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def open_pidfd(pid: int) -> int:
    """Open a descriptor, owned by the caller, that becomes readable when the process exits."""
    if not hasattr(os, "pidfd_open"):
        raise _missing_call("pidfd_open", f"this is {sys.platform}")
    try:
        with translate_open_file_errors():
            return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise _missing_call("pidfd_open", str(error)) from error


def has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Wait up to `timeout_s` for the exit of a process; return True if the process has exited."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def end_process(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def memory_file(*parts: bytes) -> int:
    """Create an anonymous file in memory that contains `parts`; the caller owns the descriptor.

    Read the file with `os.pread`, because all processes share the position of the descriptor.
    """
    if not hasattr(os, "memfd_create"):
        raise _missing_call("memfd_create", f"this is {sys.platform}")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        try:
            fd = os.memfd_create("shardio", flags | _MFD_NOEXEC_SEAL)
        except OSError:  # kernels before 6.3 do not know this flag
            fd = os.memfd_create("shardio", flags)
    except OSError as error:
        raise_if_too_many_files(error)
        raise _missing_call("memfd_create", str(error)) from error
    with undo_on_error(os.close, fd):
        with translate_file_size_errors(sum(map(len, parts)), "the data for workers"):
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[os.write(fd, view) :]
    return fd


@contextlib.contextmanager
def translate_file_size_errors(n_bytes: int, what: str) -> Iterator[None]:
    """Raise InsufficientMemory if RLIMIT_FSIZE prevents a memory file of n_bytes for `what`."""
    try:
        yield
    except OSError as error:
        limit = max_file_bytes()
        if error.errno != errno.EFBIG or limit is None:
            raise
        raise InsufficientMemory(
            f"{what}: a memory file of {n_bytes} bytes is needed, and RLIMIT_FSIZE allows {limit}: "
            "raise that limit (`ulimit -f unlimited`)"
        ) from error


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent exits; exit if the parent has exited.

    The parent must have a single thread: the kernel acts when the forking *thread* exits.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent exited before prctl: there will be no signal
        os._exit(1)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show for this process, at most 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def yield_to_main() -> None:
    """Prevent this process from preempting other processes on its CPU.

    With 2 workers on 2 CPUs, the main process of a TaskPool then takes 5 % less CPU time for items
    of 160 KB.
    """
    with contextlib.suppress(OSError):  # some sandboxes and inherited policies refuse this
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory() -> None:
    """Keep up to 128 MiB of freed memory in this process for reuse.

    By default, glibc returns arrays of 128 KiB or more to the kernel, which must then zero every
    page of the next array. For samples with two arrays of 600 KB, this takes 90 % of the time.
    Settings of malloc in the environment take precedence.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." in tunables or not _MALLOC_VARIABLES.isdisjoint(os.environ):
        return
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def read_umask() -> int:
    """Return this process's umask; os.umask() would have to change it for a moment."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    raise _missing_call("/proc/self/status", "it has no Umask line (Linux 4.7 has one)")


def _missing_call(call: str, found: str) -> UnsupportedEnvironment:
    return UnsupportedEnvironment(
        f"loaders and worker processes need {call} (Linux 5.4 or newer): {found}; "
        "shardio.open and ShardReader do not need it"
    )


class WakeupEvent(Closing):
    """A kernel event that can be polled; `set` and `close` may be called in any thread."""

    def __init__(self) -> None:
        with translate_open_file_errors():
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Without the lock, another thread could call `close` just before `set` writes; `set`
        # would then write to a file that was opened meanwhile and got the same descriptor number.
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        """Wake the thread that polls the event; do nothing after `close`."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the event was not set
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)
