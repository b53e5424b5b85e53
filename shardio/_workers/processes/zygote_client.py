"""Main's side of the zygote: one for all pools of a process, started and ended by use.

`acquire` and `release` count the users. Both may be called from any thread, `release` also from a
finalizer that runs in the middle of either of them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque

from shardio._workers.processes.linux import end_process, explain_files, has_ended, open_pidfd
from shardio.errors import UnsupportedEnvironment

__all__ = ["PRELOAD", "Zygote", "acquire", "release"]

# Slow imports that the workers of every pool use; each pool adds its own.
PRELOAD = (
    "numpy",
    "xxhash",
    "zstandard",
    "shardio._workers.processes.serialization",
    "shardio._workers.processes.global_generators",
)

# One thread per library and process: that is the point of worker processes, and a zygote must be
# single-threaded to fork.
_SINGLE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

_CONTROL_FD, _MAIN_PIDFD = 3, 4


class Zygote:
    """Main's handle on a zygote process: owned by `acquire` and `release`, ended by the last user.

    `pidfd` is readable once the process has ended. Creation does not wait for the imports of the
    process (0.6 ms).

    Raises:
        UnsupportedEnvironment: the interpreter cannot be executed.
    """

    def __init__(self) -> None:
        self.users = 0
        main_pidfd = open_pidfd(os.getpid())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.pid = _spawn(theirs.fileno(), main_pidfd)
            except OSError as error:
                ours.close()
                explain_files(error)
                raise UnsupportedEnvironment(
                    f"the process that starts workers could not be executed: {error} "
                    f"(sys.executable is {sys.executable!r}); num_workers=0 needs no such process"
                ) from error
            finally:
                os.close(main_pidfd)
        try:
            self.pidfd = open_pidfd(self.pid)
        except ProcessLookupError as error:
            ours.close()
            raise self.unsuitable("at once") from error
        except BaseException:  # the zygote ends when its socket closes
            ours.close()
            raise
        self._control = ours

    def open_session(self, preload: tuple[str, ...]) -> socket.socket:
        """Make a session for one pool; the caller owns main's end.

        `preload` names modules to import before workers are forked. A zygote that has ended leaves
        a session whose other end is closed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            names = " ".join(preload).encode()
            try:
                socket.send_fds(self._control, [names or b" "], [theirs.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                pass  # its pidfd reports the same, and waiting callers watch that
        return ours

    def is_running(self) -> bool:
        """Return True if the process runs."""
        return not has_ended(self.pidfd)

    def exit_code(self) -> int | None:
        """Return the exit code of a zygote that exited by itself, else None."""
        try:
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code of this program has reaped it
            return None
        return ended.si_status if ended and ended.si_code == os.CLD_EXITED else None

    def unsuitable(self, when: str) -> UnsupportedEnvironment:
        """Make the error for a zygote that could not do its work."""
        return UnsupportedEnvironment(
            f"the process that starts workers ended {when}; what it wrote to standard error says "
            "why; num_workers=0 works without"
        )

    def end(self) -> None:
        """Kill the process, with it any workers left, and reap it."""
        end_process(self.pidfd)
        has_ended(self.pidfd, 1.0)
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass  # reaped by other code of this program
        os.close(self.pidfd)
        self._control.close()


def acquire() -> Zygote:
    """Return the zygote of this process, started if there is none; `release` it after use."""
    global _current
    with _lock:
        if _current is None or not _current.is_running():
            _current = Zygote()
        zygote = _current
        zygote.users += 1
    _settle()
    return zygote


def release(zygote: Zygote) -> None:
    """Drop one use of `zygote`; without users it is gone when this returns.

    If another thread, or this thread further up the stack, is inside `acquire` or `release`, that
    call does it before it returns.
    """
    _released.append(zygote)
    _settle()


def _settle() -> None:
    """Handle queued releases, unless another call is about to.

    Never waits for the lock: a finalizer may have interrupted the very code that holds it. The
    holder of the lock calls this afterwards.
    """
    global _current
    while _released and _lock.acquire(blocking=False):
        try:
            while _released:
                zygote = _released.popleft()
                zygote.users -= 1
                if zygote.users == 0:
                    if _current is zygote:
                        _current = None
                    zygote.end()
        finally:
            _lock.release()


def _spawn(control_fd: int, main_pidfd: int) -> int:
    """Execute the zygote with this process's interpreter, flags and sys.path; return its pid."""
    if not sys.executable:
        raise FileNotFoundError("this interpreter does not know its own executable")
    code = (
        f"import sys; sys.path[:] = {[os.fspath(entry) for entry in sys.path]!r}; "
        "from shardio._workers.processes.zygote import serve; "
        f"serve({_CONTROL_FD}, {_MAIN_PIDFD}, {PRELOAD!r})"
    )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    environ = dict(os.environ)
    for name in _SINGLE_THREAD:
        environ.setdefault(name, "1")
    # Above the target numbers, so that one does not overwrite another.
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (control_fd, main_pidfd)]
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, *flags, "-c", code],
            environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, sources[0], _CONTROL_FD),
                (os.POSIX_SPAWN_DUP2, sources[1], _MAIN_PIDFD),
            ],
            # Blocked until the zygote ignores it: Ctrl-C during its imports would end it.
            setsigmask=[signal.SIGINT],
        )
    finally:
        for fd in sources:
            os.close(fd)


def _forget() -> None:
    """Reset in a fork of main, to which the zygote of main does not belong."""
    global _lock, _current
    _lock, _current = threading.Lock(), None
    _released.clear()


_lock = threading.Lock()
_current: Zygote | None = None
_released: deque[Zygote] = deque()
os.register_at_fork(after_in_child=_forget)
