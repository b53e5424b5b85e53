"""The HTTP server of the viewer: uvicorn with limits, ended by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar, Final

from uvicorn import Config
from uvicorn import Server as UvicornServer
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardio import InvalidArgument
from shardio_tools.output import escaped

_MAX_CONNECTIONS: Final = 512
"""The maximum number of connections, if the process may open four times as many files."""
_N_ACCEPTED: Final = 16
"""The number of connections that are accepted before the limit is applied to them."""
_N_WAITING: Final = 1024
_IDLE_S: Final = 10.0
"""The time in which a connection must send a whole request before it is closed."""
_N_FILES: Final = 8192
"""The number of files that the process may open, if the system allows: shards and connections."""
_GRACE_S: Final = 1.0
"""The time that requests and the process have to end after a signal."""


class BoundedProtocol(H11Protocol):
    """A connection that is closed if no request arrives, or if there are too many connections."""

    max_connections: ClassVar[int] = _MAX_CONNECTIONS
    _timer: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit; close the oldest idle connection if there are too many."""
        super().connection_made(transport)
        self._restart_timer()
        if len(self.connections) > self.max_connections:
            others = [each for each in self.connections if isinstance(each, BoundedProtocol)]
            idle = [each for each in others if each.is_idle and each is not self]
            closed = min(idle, key=lambda each: each._since) if idle else self
            self.connections.discard(closed)  # now: the next connections are made before it is lost
            closed.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered."""
        return not self.cycle or self.cycle.response_complete

    def close_if_idle(self) -> None:
        """Close the connection unless it has sent a whole request that is being answered."""
        if self.is_idle:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Start the time limit again: uvicorn's own ends with the first byte of a request."""
        self._restart_timer()
        super().on_response_complete()

    def _restart_timer(self) -> None:
        self._since = self.loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(_IDLE_S, self.close_if_idle)


class _Server(UvicornServer):
    """A uvicorn server whose signals `ViewServer` handles."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start; let many connections wait in the kernel, though few are accepted at a time."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_N_WAITING)


class ViewServer:
    """The server of an ASGI application at a socket that listens from the start."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = _listening(host, port)
        self.port: int = self.socket.getsockname()[1]
        self._server: _Server | None = None
        self._is_stopped = False

    def run(self, app: Any) -> None:
        """Answer requests until `stop` is called."""
        BoundedProtocol.max_connections = min(_MAX_CONNECTIONS, _raised_file_limit() // 4)
        config = Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=0,
            backlog=_N_ACCEPTED,
            h11_max_incomplete_event_size=32 << 10,
        )
        self._server = _Server(config)
        self._server.should_exit = self._is_stopped
        self._server.run([self.socket])

    def stop(self) -> None:
        """End `run`; safe in any thread and in a signal handler."""
        self._is_stopped = True
        if self._server is not None:
            self._server.should_exit = True

    @contextlib.contextmanager
    def stopped_by_signals(self, end: Callable[[], None]) -> Iterator[None]:
        """Let SIGINT and SIGTERM call `stop` in a `with` block, and `end` a second later.

        `end` must end the process: slow reads and user code cannot be interrupted. After the first
        signal, others have no effect.
        """
        is_signalled = False

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal is_signalled
            self.stop()
            if not is_signalled:
                is_signalled = True
                start_new_thread(end_later, ())  # unlike Thread, takes no lock of the main thread

        def end_later() -> None:
            time.sleep(_GRACE_S)
            end()

        numbers = signal.SIGINT, signal.SIGTERM
        before = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if is_signalled else handler)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; raise InvalidArgument if that fails."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(
            f"--host: {escaped(host)!r} is not an address of this machine: {error}"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_N_WAITING)
    except OSError as error:
        listener.close()
        raise InvalidArgument(
            f"cannot listen at {escaped(host)}:{port}: {error.strerror}; --port 0 takes a free port"
        ) from error
    listener.setblocking(False)
    return listener


def _raised_file_limit() -> int:
    """Raise the limit on open files, if it is low; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _N_FILES if hard == resource.RLIM_INFINITY else min(_N_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return soft
    return wanted
