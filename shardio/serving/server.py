"""The server: one socket for all clients, a session for each client, and a gatekeeper.

    messages of clients    socket ──▶ main thread ──▶ session.accept
    messages to clients    thread of a session ──▶ outgoing ──▶ main thread ──▶ socket
    keys of clients        ZeroMQ ──▶ main thread ──▶ gatekeeper.answer ──▶ ZeroMQ

The main thread is the thread that calls `run`; an event wakes it when a message is outgoing. Only
the main thread uses the socket. `stop` may be called from any thread and from signal handlers.
While `run` runs, only other threads may call `close`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from shardio._base.callers import expand_home
from shardio._base.classes import Closing, undo_on_error
from shardio._engine.dispatch.backends import StartMethod
from shardio._loading.options import check_user_function
from shardio._workers.processes.linux import check_files
from shardio._workers.tasks.zeromq import OWN_FILES, zeromq
from shardio.errors import InvalidArgument, UnsupportedEnvironment
from shardio.loader import ShardLoader
from shardio.order.sampling import check_count
from shardio.samples.clip_view import ClipView
from shardio.samples.shard_dataset import ShardDataset
from shardio.samples.token_view import TokenView
from shardio.samples.view import SampleView
from shardio.serving.client import protocol
from shardio.serving.client.connection import (
    ASK_AGAIN,
    HEARTBEAT_MS,
    SILENCE_MS,
    ServerKeys,
    server_keys,
)
from shardio.serving.client.protocol import (
    FROM_CLIENT,
    MAX_HEAD_BYTES,
    VERSION,
    Address,
    MalformedMessage,
    member,
    number,
    pack,
    parse,
    unpack,
)
from shardio.serving.session import MAX_AHEAD, Frames, Session
from shardio.storage.file_access import Access

__all__ = ["Server", "make_server"]


_ENDPOINT: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = b"shardio"
_VERSION: Final = b"1.0"
_N_FRAMES: Final = 7


class Gatekeeper:
    """The handler of ZeroMQ's requests to check the key of a client (ZAP, RFC 27)."""

    def __init__(self, context: Any, keys: ServerKeys) -> None:
        self._zmq, self._keys = zeromq("a server"), keys
        self.socket = context.socket(self._zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def answer(self) -> None:
        """Answer one request of ZeroMQ, if there is one."""
        try:
            frames = self.socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return
        request_id = frames[1] if len(frames) > 1 else b""
        try:
            code, message = (b"200", b"OK") if self._is_known(frames) else (b"400", b"unknown key")
        except OSError as error:  # for example, unknown clients use all file descriptors
            code, message = str(ASK_AGAIN).encode(), str(error.strerror).encode("ascii", "replace")
        self.socket.send_multipart([_VERSION, request_id, code, message, b"", b""])

    def _is_known(self, frames: list[bytes]) -> bool:
        # The frames are version, id, domain, address, identity, mechanism and key.
        if len(frames) != _N_FRAMES or frames[0] != _VERSION or frames[5] != b"CURVE":
            return False
        key = self._zmq.utils.z85.encode(frames[6])
        return frames[2] == DOMAIN and self._keys.knows(key)


_BEAT_S: Final = 1.0
_GRACE_S: Final = 10.0
"""The time for which a lost client may reconnect and continue where it stopped."""
_TOKEN_LETTERS: Final = 32
_MAX_READS: Final = 64
"""The maximum number of messages that the main thread reads before it does other work."""
_MAX_UNSENT: Final = 4 * MAX_AHEAD
"""The length of ZeroMQ's queue for a client. A client whose queue is full counts as lost."""
_MAX_UNREAD: Final = 16
"""The maximum number of messages of one client that the server has not read yet."""
_CLOSE_TIMEOUT_S: Final = 2.0


class Server(Closing):
    """A server of batches, made by `make_server`. Owns its socket and all sessions.

    `served` maps "transform" and "batch_transform" to the names of the functions that the server
    applies. A client that connects again checks that the names are still the same. Without `keys`,
    only this machine is served.
    """

    def __init__(
        self,
        make_loader: Callable[[dict[str, Any]], ShardLoader],
        served: Mapping[str, Any],
        bind: str,
        *,
        keys: ServerKeys | None,
        max_clients: int,
    ) -> None:
        zmq = self._zmq = zeromq("a server")
        address = parse(bind)
        if keys is None and not address.is_loopback:
            raise InvalidArgument(
                f"{address} is reachable from other machines and therefore needs keys: make them "
                "with `shardio serve --make-keys DIR` and pass --keys DIR, or bind tcp://127.0.0.1 "
                "and forward the port with ssh -L"
            )
        self._make_loader, self._served = make_loader, served
        self._max_clients = max_clients
        self._sessions: dict[str, Session] = {}
        self._tokens: dict[bytes, str] = {}
        """The token of each client, by the identity that ZeroMQ gives to the connection."""
        self._ending: list[Session] = []
        self._outgoing: deque[tuple[Session, Frames]] = deque()
        self._is_stopping = False
        self._run_lock = threading.Lock()
        """Held by `run`, so that no other thread closes the sockets meanwhile."""
        # A reentrant lock, because a signal handler may acquire it while its thread holds it.
        self._wakeup_lock = threading.RLock()
        check_files(OWN_FILES)
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context()
        self.n_malformed = 0
        with undo_on_error(self.close):
            # Create the gatekeeper before the socket: without it, ZeroMQ accepts every client.
            self._gatekeeper = None if keys is None else Gatekeeper(self._context, keys)
            self._socket = self._listen(address, keys)
            self.address: str = self._socket.last_endpoint.rstrip(b"\0").decode()
            """The address at which the server listens."""

    def _listen(self, address: Address, keys: ServerKeys | None) -> Any:
        zmq, socket = self._zmq, self._context.socket(self._zmq.ROUTER)
        socket.linger = 0
        socket.sndhwm, socket.rcvhwm = _MAX_UNSENT, _MAX_UNREAD
        # Limit the time of a handshake, because a client that connects and then sends nothing holds
        # a file descriptor.
        socket.handshake_ivl = SILENCE_MS
        socket.router_mandatory = True
        socket.maxmsgsize = MAX_HEAD_BYTES
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, SILENCE_MS
        socket.ipv6 = address.is_ipv6
        if keys is not None:
            socket.curve_server, socket.curve_secretkey = True, keys.secret
            socket.zap_domain = DOMAIN
        try:
            socket.bind(str(address))
        except zmq.ZMQError as error:
            raise InvalidArgument(f"{address}: ZeroMQ cannot listen there: {error}") from error
        return socket

    @property
    def sessions(self) -> list[Session]:
        """The sessions whose clients are connected or may still reconnect."""
        return list(self._sessions.values())

    def run(self) -> None:
        """Serve until `stop` or `close` is called."""
        with self._run_lock:
            poller, gatekeeper = self._zmq.Poller(), self._gatekeeper
            gate = () if gatekeeper is None else (gatekeeper.socket,)
            for each in (self._socket, *gate, self._wakeup_fd):
                poller.register(each, self._zmq.POLLIN)
            next_check_s = time.monotonic()
            while not self._is_stopping:
                poller.poll(_BEAT_S * 1000)
                self._receive_messages()
                if gatekeeper is not None:
                    gatekeeper.answer()
                self._send_queued()
                if time.monotonic() >= next_check_s:
                    next_check_s = time.monotonic() + _BEAT_S
                    self._check_clients()

    def stop(self) -> None:
        """Make `run` return. This may be called from any thread or signal handler."""
        self._is_stopping = True
        self._wake_up()

    def _wake_up(self) -> None:
        with self._wakeup_lock:
            if self._wakeup_fd >= 0:  # a session may still run after the server was closed
                os.eventfd_write(self._wakeup_fd, 1)

    def _post(self, session: Session, frames: Frames) -> None:
        """Queue a message for the client of a session. The session's thread calls this."""
        self._outgoing.append((session, frames))
        self._wake_up()

    def _receive_messages(self) -> None:
        for _ in range(_MAX_READS):
            try:
                identity, *frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            try:
                self._handle(identity, unpack(frames, FROM_CLIENT))
            except MalformedMessage:
                self.n_malformed += 1

    def _handle(self, identity: bytes, head: dict[str, Any]) -> None:
        if head["kind"] == "open":
            self._open_session(identity, head)
            return
        token = self._tokens.get(identity)
        if token is None:
            if head["kind"] != "close":
                self._send(identity, [pack("no_session")])
        elif head["kind"] == "close":
            self._end_session(token)
        else:
            self._sessions[token].accept(head)

    def _open_session(self, identity: bytes, head: dict[str, Any]) -> None:
        """Create a session for a client, or continue the session of the client's token."""
        token = member(head, "token", str)
        if len(token) != _TOKEN_LETTERS:
            raise MalformedMessage("an invalid token")
        try:
            if number(head, "version") != VERSION:
                raise InvalidArgument(
                    f"the server uses version {VERSION} of shardio's protocol, the client "
                    f"{head['version']}: install the same shardio on both"
                )
            if self._tokens.get(identity, token) != token:  # one session per connection
                self._end_session(self._tokens[identity])
            session = self._sessions.get(token)
            if session is not None and session.is_running:
                self._tokens.pop(session.identity, None)
                session.accept(head)
            else:
                if session is not None:
                    self._end_session(token)
                self._check_capacity()
                session = Session(head, self._make_loader, self._served, self._post)
                self._sessions[token] = session
        except (InvalidArgument, UnsupportedEnvironment) as error:
            self._send(identity, [pack("failed", error=protocol.error_to_json(error))])
            return
        session.identity, session.disconnected_s = identity, None
        self._tokens[identity] = token

    def _check_capacity(self) -> None:
        """Raise UnsupportedEnvironment if too many sessions exist, including ending ones."""
        self._ending = [session for session in self._ending if session.is_running]
        n, n_ending = len(self._sessions), len(self._ending)
        if n >= self._max_clients or n + n_ending >= 2 * self._max_clients:
            raise UnsupportedEnvironment(
                f"the server accepts no more clients (--max-clients): it has {n}, and is still "
                f"closing the loaders of {n_ending} former ones"
            )

    def _send_queued(self) -> None:
        try:
            os.eventfd_read(self._wakeup_fd)
        except BlockingIOError:
            return
        while self._outgoing:
            session, frames = self._outgoing.popleft()
            if session.disconnected_s is None:
                self._send_to(session, frames)

    def _send_to(self, session: Session, frames: Frames) -> None:
        if not self._send(session.identity, frames):
            session.disconnected_s = time.monotonic()

    def _send(self, identity: bytes, frames: Frames) -> bool:
        """Send a message to a client; return False if the client is lost."""
        try:
            self._socket.send_multipart([identity, *frames], self._zmq.NOBLOCK, copy=False)
        except self._zmq.ZMQError:
            return False
        return True

    def _check_clients(self) -> None:
        """Send a heartbeat to each client, and end the sessions of clients that have been lost."""
        now_s = time.monotonic()
        finished = {token for token, each in self._sessions.items() if not each.is_running}
        self._send_queued()  # the sessions in `finished` may have queued their last messages
        for token, session in list(self._sessions.items()):
            if token in finished:
                self._end_session(token)
            elif session.disconnected_s is None:
                self._send_to(session, [pack("heartbeat")])
            elif now_s - session.disconnected_s > _GRACE_S:
                self._end_session(token)
        self._ending = [session for session in self._ending if session.is_running]

    def _end_session(self, token: str) -> None:
        session = self._sessions.pop(token)
        self._tokens.pop(session.identity, None)
        session.disconnected_s = time.monotonic()
        session.shut_down()
        self._ending.append(session)

    def close(self) -> None:
        """Make `run` return, end all sessions and close the socket. Idempotent."""
        if self._context.closed:
            return
        self.stop()
        with self._run_lock:
            for token in list(self._sessions):
                self._end_session(token)
            end_s = time.monotonic() + _CLOSE_TIMEOUT_S
            for session in self._ending:
                session.join(max(0.0, end_s - time.monotonic()))
            self._context.destroy(linger=0)
            with self._wakeup_lock:
                fd, self._wakeup_fd = self._wakeup_fd, -1
                os.close(fd)


def make_server(
    dataset: str | os.PathLike[str],
    bind: str,
    *,
    keys: str | os.PathLike[str] | None = None,
    num_workers: int | None = None,
    transform: Callable[..., Any] | None = None,
    batch_transform: Callable[..., Any] | None = None,
    memory_bytes: int | None = None,
    access: Access = "auto",
    start_method: StartMethod = "zygote",
    max_clients: int = 16,
) -> Server:
    """Return a server of a dataset. The caller must call `run` and, at the end, `close`.

    The server creates a loader for each client, with the client's options and with the options that
    are passed here.

    Args:
        dataset: a folder.
        bind: the address to listen at, such as "tcp://127.0.0.1:5555". The port `*` stands for any
            free port.
        keys: the folder that `make_keys` has created. If it is None, only clients on this machine
            can be served.
        num_workers, transform, batch_transform, memory_bytes, start_method: as in ShardLoader.
        access: how files are read, as in `shardio.open`.
        max_clients: the maximum number of clients at the same time.

    Raises:
        InvalidArgument: an option is invalid, or other machines can reach the address and there are
            no keys.
        UnsupportedEnvironment: pyzmq is missing: pip install '.[zmq]'.
    """
    # Check the options here, because the errors of a client's loader are only sent to the client.
    check_user_function("transform", transform, "sample")
    check_user_function("batch_transform", batch_transform, "batch")
    for name, least, value in (("num_workers", 0, num_workers), ("memory_bytes", 1, memory_bytes)):
        if value is not None:
            check_count(name, value, least)
    path = os.fspath(expand_home(dataset))
    with ShardDataset(path):
        pass  # opening the dataset once reports damage before any client connects

    def make_loader(options: dict[str, Any]) -> ShardLoader:
        opened = {name: options.pop(name) for name in ("subset", "verify") if name in options}
        with ShardDataset(path, access=access, **opened) as served:
            view: ShardDataset | SampleView = served
            if "clips" in options:
                view = ClipView(served, options.pop("clips"))
            elif "pack" in options:
                view = TokenView(served, options.pop("pack"))
            return ShardLoader(
                view,
                **options,
                output="numpy",
                num_workers=num_workers,
                transform=transform,
                batch_transform=batch_transform,
                memory_bytes=memory_bytes,
                start_method=start_method,
            )

    return Server(
        make_loader,
        {"transform": _named(transform), "batch_transform": _named(batch_transform)},
        bind,
        keys=None if keys is None else server_keys(keys),
        max_clients=check_count("max_clients", max_clients, 1),
    )


def _named(function: Callable[..., Any] | None) -> str | None:
    """Return a name by which clients can distinguish functions; None if there is no function."""
    if function is None:
        return None
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}:{name}"
