"""The zygote: a small single-threaded process that forks workers for the main process.

The zygote is started by exec, so it has none of the main process's threads, locks or memory. NumPy
and the codecs are imported once, so that forking a worker takes only a few milliseconds; the user's
`__main__` and tinygrad are never imported. `Zygote` is the main process's handle for the zygote.

The main process and the zygote share a socket pair, called *control*. Every pool has another socket
pair, called its *session*: through it, the main process requests workers, and the zygote reports
the starts and exits of workers. A request carries descriptors: the worker's channel, the *payload*
(a memory file that contains the pool's function), and copies of the descriptors that the pool was
created with.

    main -> zygote   control   names of modules to import         + the zygote's socket of a session
    main -> zygote   session   REQUEST (index, action)            + channel, payload, the pool's fds
    zygote -> main   session   REPLY STARTED (index, pid)         + pidfd of the worker
    zygote -> main   session   REPLY EXITED (index, pid, how, status)
    zygote -> main   session   REPLY NOT_STARTED (index, errno)

`index` is the index of a worker in its pool. To close a pool, the main process shuts down its side
of the session, waits up to GRACE_S for the workers to exit, and kills the others. After the last
exit, the zygote shuts down its side of the session, too. If the main process shuts down the session
in both directions, the zygote kills the remaining workers. When the main process exits, for any
reason, the zygote exits, and the kernel kills the workers.

The main process has one zygote for all its pools. `acquire` and `release` may be called in any
thread; a finalizer may call `release` even while one of these calls is running in the same thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from typing import NoReturn

from shardio._base.classes import undo_on_error
from shardio._workers.processes.linux import (
    die_with_parent,
    end_process,
    has_ended,
    name_process,
    open_pidfd,
    raise_if_too_many_files,
)
from shardio._workers.processes.worker_main import (
    EXECUTE,
    RECEIVE,
    execute,
    preload,
    run,
    unpack_fds,
)
from shardio.errors import UnsupportedEnvironment

REQUEST = struct.Struct("<IB")  # index of the worker in its pool, action (see `worker_main`)
REPLY = struct.Struct("<BIiii")  # kind, index, pid, how (CLD_*), status
STARTED, EXITED, NOT_STARTED = 1, 2, 3

GRACE_S = 0.1  # the time that workers have to exit by themselves when their pool is closed

ASK_FOR_STACKS = signal.SIGRTMIN + 7
"""The signal on which workers write their stacks; see `stack_dumps`."""


def serve(control_fd: int, main_pidfd: int, modules: tuple[str, ...]) -> NoReturn:
    """Run the zygote until the main process exits or shuts down the control socket."""
    # Close all other descriptors. If an inherited pipe stayed open here, the readers of the pipe
    # would never see the end of the data.
    os.closerange(max(control_fd, main_pidfd) + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.set_inheritable(control_fd, False)
    os.set_inheritable(main_pidfd, False)
    _set_up()
    preload(modules)
    _Zygote(socket.socket(fileno=control_fd), main_pidfd, modules).run()


def _set_up() -> None:
    # The terminal sends Ctrl-C to the whole process group; only the main process handles it. Reset
    # SIGCHLD: if the zygote inherited SIG_IGN, the kernel would discard exit statuses.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(ASK_FOR_STACKS, signal.SIG_IGN)  # until a worker installs a handler
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    name_process("shardio-zygote")
    gc.disable()


class _Session:
    def __init__(self, end: socket.socket, modules: tuple[str, ...]) -> None:
        self.socket = end
        self.modules = modules  # the modules that a new interpreter imports
        self.workers: dict[int, tuple[int, int]] = {}  # pidfd: (index in the pool, pid)
        self.replies: deque[tuple[bytes, list[int]]] = deque()  # replies that are not sent yet
        self.is_ending = False  # True once the main process has closed the pool


class _Zygote:
    """The event loop of the zygote: one epoll watches all sockets and pidfds of the process."""

    def __init__(self, control: socket.socket, main_pidfd: int, modules: tuple[str, ...]) -> None:
        self.pid = os.getpid()
        self.modules = modules  # the modules that the workers of every pool import
        self.control = control
        self.main_pidfd = main_pidfd
        self.sessions: dict[int, _Session] = {}  # {descriptor of the session's socket: session}
        self.session_of: dict[int, _Session] = {}  # {pidfd of a worker: session}
        self.epoll = select.epoll()
        self.epoll.register(main_pidfd, select.EPOLLIN)
        self.epoll.register(control, select.EPOLLIN)

    def run(self) -> NoReturn:
        while True:
            # Ask for one event at a time. If there were several, handling one of them could close
            # the descriptor of the next.
            for fd, mask in self.epoll.poll(None, 1):
                if fd == self.main_pidfd:
                    os._exit(0)  # the kernel then kills the workers
                elif fd == self.control.fileno():
                    self._open_session()
                elif fd in self.session_of:
                    self._report_exit(fd)
                else:
                    self._serve_session(self.sessions[fd], mask)

    def _open_session(self) -> None:
        try:
            data, ancillary, flags, _ = self.control.recvmsg(*RECEIVE)
        except ConnectionResetError:
            os._exit(0)
        if not data:  # the main process has released the zygote
            os._exit(0)
        (fd,) = unpack_fds(ancillary, flags)
        names = tuple(data.decode().split())
        self.sessions[fd] = _Session(socket.socket(fileno=fd), (*self.modules, *names))
        self.epoll.register(fd, select.EPOLLIN)
        if any(name not in sys.modules for name in names):
            preload(names)

    def _serve_session(self, session: _Session, mask: int) -> None:
        if session.is_ending:
            if mask & (select.EPOLLHUP | select.EPOLLERR):  # shut down in both directions
                session.replies.clear()
                for pidfd in session.workers:
                    end_process(pidfd)
            self._flush(session)
            self._close_if_over(session)
            return
        if mask & select.EPOLLOUT:
            self._flush(session)
        if mask & ~select.EPOLLOUT:
            try:
                data, ancillary, flags, _ = session.socket.recvmsg(*RECEIVE)
            # The main process closed the socket before it received all replies. The next `recvmsg`
            # on this socket returns no data, so the session ends.
            except ConnectionResetError:
                return
            if data:
                self._start_worker(session, data, unpack_fds(ancillary, flags))
            else:
                session.is_ending = True
                self._watch(session)
                self._close_if_over(session)

    def _start_worker(self, session: _Session, data: bytes, fds: tuple[int, ...]) -> None:
        index, action = REQUEST.unpack(data)
        try:
            pid = os.fork()
        except OSError as error:
            self._reply(session, REPLY.pack(NOT_STARTED, index, 0, 0, error.errno or 0))
        else:
            if pid == 0:
                self._become_worker(session.modules, index, action, fds)
            pidfd = open_pidfd(pid)
            session.workers[pidfd] = (index, pid)
            self.session_of[pidfd] = session
            self.epoll.register(pidfd, select.EPOLLIN)
            self._reply(session, REPLY.pack(STARTED, index, pid, 0, 0), pidfd)
        for fd in fds:
            os.close(fd)

    def _become_worker(
        self, modules: tuple[str, ...], index: int, action: int, fds: tuple[int, ...]
    ) -> NoReturn:
        try:
            die_with_parent(self.pid)
            # Close the copies of the zygote's sockets in this fork. Otherwise the main process
            # would not notice when the zygote closes the sockets.
            self.epoll.close()
            self.control.close()
            for session in self.sessions.values():
                session.socket.close()
            for fd in (self.main_pidfd, *self.session_of):
                os.close(fd)
            if action == EXECUTE:
                execute(index, fds, modules)
            run(index, fds)
        finally:
            os._exit(1)  # a worker must never continue as a second zygote

    def _report_exit(self, pidfd: int) -> None:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        session = self.session_of.pop(pidfd)
        index, pid = session.workers.pop(pidfd)
        self.epoll.unregister(pidfd)
        os.close(pidfd)
        how, status = (ended.si_code, ended.si_status) if ended else (0, 0)
        self._reply(session, REPLY.pack(EXITED, index, pid, how, status))
        self._close_if_over(session)

    def _reply(self, session: _Session, data: bytes, pidfd: int | None = None) -> None:
        # Send a duplicate of the pidfd: if the worker exits before the reply is sent, the original
        # is closed.
        session.replies.append((data, [] if pidfd is None else [os.dup(pidfd)]))
        self._flush(session)

    def _flush(self, session: _Session) -> None:
        while session.replies:
            data, fds = session.replies[0]
            try:
                socket.send_fds(session.socket, [data], fds, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                pass  # the main process has closed its socket: drop the reply
            session.replies.popleft()
            for fd in fds:
                os.close(fd)
        self._watch(session)

    def _watch(self, session: _Session) -> None:
        # Once the main process has shut down its side, the socket is always readable (end of file).
        mask = select.EPOLLET if session.is_ending else select.EPOLLIN
        self.epoll.modify(session.socket, mask | (select.EPOLLOUT if session.replies else 0))

    def _close_if_over(self, session: _Session) -> None:
        if session.is_ending and not session.workers and not session.replies:
            self.epoll.unregister(session.socket)
            del self.sessions[session.socket.fileno()]
            # Closing the socket is not enough, because another process may have a copy of it.
            session.socket.shutdown(socket.SHUT_RDWR)
            session.socket.close()


# Modules that the workers of every pool need and that are slow to import. A pool may name more.
PRELOAD = (
    "numpy",
    "xxhash",
    "zstandard",
    "shardio._workers.processes.serialization",
    "shardio._workers.processes.global_generators",
)

# These variables make libraries use one thread per process. The worker processes already run in
# parallel, and the zygote must have a single thread to fork.
SINGLE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

_CONTROL_FD, _MAIN_PIDFD = 3, 4


class Zygote:
    """The main process's handle for a zygote; `pidfd` becomes readable when the zygote exits."""

    def __init__(self) -> None:
        self.users = 0
        main_pidfd = open_pidfd(os.getpid())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with undo_on_error(ours.close):  # the zygote exits when its socket closes
            try:
                with theirs:
                    self.pid = _spawn(theirs.fileno(), main_pidfd)
            except OSError as error:
                raise_if_too_many_files(error)
                raise UnsupportedEnvironment(
                    f"the process that starts workers could not be executed: {error} "
                    f"(sys.executable is {sys.executable!r}); num_workers=0 needs no such process"
                ) from error
            finally:
                os.close(main_pidfd)
            try:
                self.pidfd = open_pidfd(self.pid)
            except ProcessLookupError as error:
                raise self.exit_error("at once") from error
        self._control = ours

    def open_session(self, preload: tuple[str, ...]) -> socket.socket:
        """Open a session for one pool, and return its socket, which the caller then owns."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            names = " ".join(preload).encode()
            # An error means that the zygote has exited. The caller notices this through the pidfd.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._control, [names or b" "], [theirs.fileno()])
        return ours

    def is_running(self) -> bool:
        return not has_ended(self.pidfd)

    def exit_code(self) -> int | None:
        """Return the exit code if the zygote exited by itself, else None."""
        try:
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code of this program has reaped it
            return None
        return ended.si_status if ended and ended.si_code == os.CLD_EXITED else None

    def exit_error(self, when: str) -> UnsupportedEnvironment:
        return UnsupportedEnvironment(
            f"the process that starts workers ended {when}; its output on standard error shows "
            "why; num_workers=0 needs no such process"
        )

    def end(self) -> None:
        """Kill and reap the zygote's process; the kernel then kills its workers."""
        end_process(self.pidfd)
        has_ended(self.pidfd, 1.0)
        with contextlib.suppress(ChildProcessError):  # reaped by other code of this program
            os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self._control.close()


def acquire() -> Zygote:
    """Return the zygote of this process, started if needed; call `release` after use."""
    global _current
    with _lock:
        if _current is None or not _current.is_running():
            _current = Zygote()
        zygote = _current
        zygote.users += 1
    _end_unused()
    return zygote


def release(zygote: Zygote) -> None:
    """Record that a user of `zygote` no longer needs it; after the last user, end the process.

    If another call of `acquire` or `release` holds the lock, that call ends the process.
    """
    _released.append(zygote)
    _end_unused()


def _end_unused() -> None:
    """End released zygotes. Never wait for the lock: a finalizer may interrupt its holder."""
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
    for name in SINGLE_THREAD:
        environ.setdefault(name, "1")
    # Copy both to descriptors of at least 10. If a source were 3 or 4, a DUP2 below could overwrite
    # this source.
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
            # Block SIGINT until the zygote ignores it, because Ctrl-C during imports would kill it.
            setsigmask=[signal.SIGINT],
        )
    finally:
        for fd in sources:
            os.close(fd)


def _forget() -> None:
    """Reset the state of this module in a fork, because a fork must not use its parent's zygote."""
    global _lock, _current
    _lock, _current = threading.Lock(), None
    _released.clear()


_lock = threading.Lock()
_current: Zygote | None = None
_released: deque[Zygote] = deque()
os.register_at_fork(after_in_child=_forget)
