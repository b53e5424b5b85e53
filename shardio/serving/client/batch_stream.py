"""A stream of batches from a server, across epochs and lost connections.

    lost ──(connect)──▶ opening ──(opened)──▶ open ──▶ batches
      ▲                    │                   │
      └──── after a while ─┴── lost, silent ───┘

A batch depends only on the state that the loader has before the batch. If the connection is lost,
the same server or another server of the dataset can therefore continue with the batch that follows
the last received batch.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from shardio._base.classes import Closing
from shardio._workers.processes.linux import this_process
from shardio.errors import BatchTimeout, ClosedError, InsufficientMemory, UnsupportedEnvironment
from shardio.serving.client import protocol
from shardio.serving.client.connection import SILENCE_MS, ClientKeys, ConnectionLost, Link, Servers
from shardio.serving.client.handshake import LoaderInfo, ReceivedBatch, State
from shardio.serving.client.protocol import (
    VERSION,
    Address,
    MalformedMessage,
    member,
    number,
    pack,
    pack_user_values,
    unpack_batch,
)

_FIRST_AHEAD: Final = 2
"""The maximum number of batches to request ahead while the size of a batch is not known yet."""
_SILENCE_S: Final = SILENCE_MS / 1000
_STEP_S: Final = 0.1
_NO_ERROR: Final = "the server is alive and reports no error"


class Stream(Closing):
    """A stream of batches from one of several servers of a dataset. Owns its connection.

    A stream may be used by one thread at a time; only `close` and `interrupt` may be called from
    any thread. At most `max_ahead` batches, of at most `max_bytes` in total, are requested before
    the user's loop takes them.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        keys: ClientKeys | None,
        options: Mapping[str, Any],
        *,
        max_bytes: int,
        max_ahead: int,
        timeout_s: float | None,
    ) -> None:
        self._servers, self._keys = Servers(addresses, timeout_s), keys
        more = {"token": os.urandom(16).hex(), "most_bytes": max_bytes, "options": dict(options)}
        self._opening = pack_user_values("open", version=VERSION, **more)
        self._max_bytes, self._max_ahead, self._timeout_s = max_bytes, max_ahead, timeout_s
        self._link: Link | None = None
        self._lock = threading.RLock()  # ZeroMQ sockets are not thread-safe
        self._is_open = self._is_closed = False
        self._pid = this_process.pid
        self.n_losses = 0
        self.loader_info: LoaderInfo | None = None
        self._pending_check: bytes | None = None
        """The "check" message without an answer, if any; sent again after a reconnection."""
        self._number = 0
        """The number that identifies the current iteration in messages."""
        self._is_iterating = False
        """True while the stream has not received all batches of the current iteration."""
        self._begun: State | None = None
        self._state: State = {}
        """The loader's state after the last received batch, from which a reconnection resumes."""
        self._next = 0
        """The step of the next batch that the stream will receive."""
        self._n_batch_bytes = 0
        self.queue: deque[ReceivedBatch] = deque()

    def open(self) -> LoaderInfo:
        """Wait until a server has created a loader for this client; return the loader's facts."""
        self._wait(lambda: self.loader_info, "an answer")
        return cast(LoaderInfo, self.loader_info)

    def check(self, state: State) -> None:
        """Ask the server to check that a state is valid for this loader; wait for the answer."""
        self._pending_check = message = pack_user_values("check", state=state)
        try:
            with self._lock:
                if self._is_open:
                    self._send(message)
            self._wait(lambda: self._pending_check is None, "an answer")
        finally:
            self._pending_check = None

    def begin(self, state: State) -> tuple[int, int, int]:
        """Start an iteration; return its epoch, its first step, and its last step plus 1."""
        self.queue.clear()
        self._begun, self._state, self._is_iterating = None, state, True
        with self._lock:
            if self._is_open:
                self._iterate()
        self._wait(lambda: self._begun, "an answer")
        begun = cast(State, self._begun)
        return begun["epoch"], begun["first"], begun["last"]

    def take(self, wait_s: float | None = None) -> ReceivedBatch | None:
        """Return the next batch; None if the iteration is over, or if none came in `wait_s`."""
        self._check_open()
        if wait_s is None:
            self._wait(lambda: self.queue or not self._is_iterating, f"batch {self._next}")
        elif not self.queue and self._is_iterating:
            # With `wait_s`, the caller polls frequently, so all the time without a message counts
            # as silence.
            self._process_one(wait_s, 0.0)
        if not self.queue:
            return None
        arrived = self.queue.popleft()
        with self._lock:
            if self._is_iterating and self._is_open:
                taken = self._next - len(self.queue)
                upto = taken + self._n_ahead
                self._send(pack("credit", number=self._number, taken=taken, upto=upto))
        return arrived

    def _send(self, message: bytes) -> None:
        if self._link is not None:
            self._link.send(message)

    @property
    def last_error(self) -> str:
        """The reasons why connections were lost since a server last made progress."""
        return self._servers.last_error

    @property
    def is_over(self) -> bool:
        """True if all batches of the iteration were taken, or if there is no iteration."""
        return not self._is_iterating and not self.queue

    def stop(self) -> None:
        """Abort the current iteration; the server stops sending its batches."""
        if self._pid != this_process.pid:
            return  # this is a forked child, and the parent owns the connection
        with self._lock:
            if self._is_iterating:
                self._send(pack("stop", number=self._number))
        self._is_iterating = False
        self._number += 1
        self.queue.clear()

    @property
    def sockets(self) -> tuple[Any, ...]:
        """The sockets that become readable when a batch may have arrived."""
        return () if self._link is None else self._link.sockets

    def close(self) -> None:
        """Send the server a last message, and close the connection. Idempotent."""
        if self._pid != this_process.pid:
            return  # as in `stop`
        # Call `interrupt` first, so that a waiting thread releases the lock.
        self.interrupt()
        with self._lock:
            self._disconnect()

    def interrupt(self) -> None:
        """Make a thread that waits for a batch raise ClosedError soon. Call `close` afterwards."""
        self._is_closed = True

    def _disconnect(self) -> None:
        self._is_iterating = self._is_open = False
        if self._link is not None:
            self._link.close(pack("close"))
            self._link = None

    @property
    def _n_ahead(self) -> int:
        """The maximum number of batches that were requested but not taken."""
        if not self._n_batch_bytes:
            return min(_FIRST_AHEAD, self._max_ahead)
        return max(1, min(self._max_ahead, self._max_bytes // self._n_batch_bytes))

    def _wait(self, is_there: Callable[[], object], what: str) -> None:
        """Handle messages until `is_there()` is true; errors name the awaited object, `what`."""
        entered_s = time.monotonic()
        while not is_there():
            self._process_one(_STEP_S, entered_s)
            is_late = time.monotonic() - entered_s > (self._timeout_s or math.inf)
            if is_late and not is_there() and self._link is not None and self._link.has_received:
                raise BatchTimeout(
                    f"{what} did not come from {self._servers.current} within "
                    f"{self._timeout_s:g} s; {self._servers.last_error or _NO_ERROR}"
                )

    def _process_one(self, wait_s: float, entered_s: float) -> None:
        """Handle one message, if one arrives within `wait_s`.

        The server counts as lost after _SILENCE_S without a message. Time before `entered_s` does
        not count as silence, because no messages were received then.
        """
        with self._lock:
            self._check_open()
            try:
                link = self._link or self._connect(wait_s)
                if link is None:
                    return
                found = link.receive(wait_s)
                if found is not None:
                    self._handle(*found)
                elif time.monotonic() - max(link.last_message_s, entered_s) > _SILENCE_S:
                    raise ConnectionLost(f"the server has sent nothing for {_SILENCE_S:.0f} s")
            except ConnectionLost as lost:
                self._lose_connection(lost)
            except MalformedMessage as error:
                text = f"received something that is not a message of a server: {error}"
                self._lose_connection(ConnectionLost(text))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this iteration was ended by close() or kill()")

    def _connect(self, wait_s: float) -> Link | None:
        """Connect to the current server; return None if it is not time for the next attempt yet."""
        if not self._servers.wait(wait_s):
            return None
        self._link = Link(self._servers.current, self._keys, self._max_bytes)
        self._link.send(self._opening)
        return self._link

    def _lose_connection(self, lost: ConnectionLost) -> None:
        self.n_losses += self._is_open
        self._is_open = False
        if self._link is not None:
            self._link.close()
            self._link = None
        self._servers.record_loss(lost)

    def _handle(self, head: dict[str, Any], block: Any) -> None:
        kind = head["kind"]
        if kind == "opened":
            self._handle_opened(head)
        elif kind == "checked":
            self._pending_check = None
            self._servers.record_progress()
        elif kind == "no_session":
            raise ConnectionLost("the server has no session for this client: it was restarted")
        elif kind == "failed":
            self._fail(head)
        elif kind != "heartbeat" and self._is_open and number(head, "number") == self._number:
            self._advance(kind, head, block)

    def _handle_opened(self, head: dict[str, Any]) -> None:
        """Handle "opened"; after a reconnection, continue if the new loader has equal batches."""
        info = LoaderInfo.parse(head, self._servers.current)
        if self.loader_info is not None:
            info.check_follows(self.loader_info, self._servers.current)
        self.loader_info, self._is_open = info, True
        if self._pending_check is not None:
            self._send(self._pending_check)
        if self._is_iterating:
            self._iterate()
        elif self._pending_check is None:
            self._servers.record_progress()

    def _iterate(self) -> None:
        self._number += 1  # messages with the previous number are ignored from now on
        ahead = max(1, self._n_ahead - len(self.queue))
        self._send(pack("iterate", number=self._number, state=self._state, ahead=ahead))

    def _advance(self, kind: str, head: dict[str, Any], block: Any) -> None:
        if kind == "begun":
            self._handle_begun(head)
        elif self._begun is None:
            raise ConnectionLost(f"received {kind} before the epoch had begun")
        elif kind == "batch":
            self._handle_batch(head, block)
        elif kind == "end":
            if self._next < self._begun["last"]:
                raise ConnectionLost(f"the epoch ended instead of batch {self._next}")
            self._state, self._is_iterating = member(head, "state", dict), False
            self._servers.record_progress()

    def _handle_begun(self, head: dict[str, Any]) -> None:
        epoch, first, last = (number(head, name) for name in ("epoch", "first", "last"))
        if self._begun is None:
            self._begun, self._next = head, first
            return
        left = range(self._next, self._begun["last"])
        # Compare the steps as ranges, because all empty ranges are equal. At the end of an epoch,
        # the numbers themselves may differ, because a server may or may not count an incomplete
        # batch.
        if epoch != self._begun["epoch"] or range(first, last) != left:
            raise ConnectionLost(
                f"the server has batches {first} to {last} of epoch {epoch}; expected "
                f"{left.start} to {left.stop} of epoch {self._begun['epoch']}"
            )

    def _handle_batch(self, head: dict[str, Any], block: Any) -> None:
        place, begun = (number(head, "epoch"), number(head, "step")), cast(State, self._begun)
        if place != (begun["epoch"], self._next) or self._next >= begun["last"]:
            raise ConnectionLost(
                f"received batch {place[1]} of epoch {place[0]} instead of {self._next}"
            )
        state, batch = member(head, "state", dict), unpack_batch(head, block)
        self._n_batch_bytes = max(self._n_batch_bytes, len(block))
        self.queue.append(ReceivedBatch(batch, state, len(block)))
        self._state = state
        self._next += 1
        self._servers.record_progress()

    def _fail(self, head: dict[str, Any]) -> None:
        """Raise the error that the server has sent, unless it belongs to an earlier iteration."""
        if head.get("number") is not None and number(head, "number") != self._number:
            return
        error = protocol.error_from_json(member(head, "error", dict))
        if not self._is_open:  # this server could not create the loader
            # Another server may succeed. For example, this server may have no room, because the
            # clients of a lost server have come to it.
            if self.loader_info is not None and isinstance(error, UnsupportedEnvironment):
                raise ConnectionLost(str(error))
            self._disconnect()
        self._is_iterating = False
        if isinstance(error, InsufficientMemory):
            error.add_note(f"at the server {self._servers.current}")
        raise error
