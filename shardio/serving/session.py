"""The session of one client: its loader, and a thread that sends its batches.

The server's thread passes each message of the client to `Session.accept`. Batches are sent ahead of
the client's loop, within `MAX_UNTAKEN_BYTES` and up to the last step that the client accepts.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from shardio._loading.iterator import LoaderIterator
from shardio.batch.batch import Batch
from shardio.errors import InsufficientMemory, InvalidArgument, UnsupportedEnvironment
from shardio.loader import ShardLoader
from shardio.serving.client import handshake, protocol
from shardio.serving.client.protocol import (
    VERSION,
    MalformedMessage,
    member,
    number,
    pack,
    pack_batch,
)

MAX_UNTAKEN_BYTES: Final = 256 << 20
"""A batch is only sent while fewer bytes wait in ZeroMQ, and fewer wait for the client's loop."""
MAX_AHEAD: Final = 1 << 10
"""The maximum number of sent batches that the client's loop has not taken."""
_MAX_INBOX: Final = 16
"""The maximum number of unanswered messages; a correct client awaits most answers."""
_POLL_S: Final = 0.05
"""The interval at which a waiting session checks whether ZeroMQ has sent its blocks."""

Head = dict[str, Any]
Frames = list[Any]


class Session:
    """The session of one client. Owns a loader and a thread, which end after `shut_down`.

    `head` is the client's "open" message. `post` queues a message for the client; its arguments are
    the session and the frames of the message.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        make_loader: Callable[[dict[str, Any]], ShardLoader],
        served: Mapping[str, Any],
        post: Callable[[Session, Frames], object],
    ) -> None:
        self.identity = b""
        """The identity that ZeroMQ gives to the client's connection. The server sets it."""
        self.disconnected_s: float | None = None
        """The time at which the client was lost or the session ended; set by the server."""
        self._options = member(head, "options", dict)
        self._max_bytes = number(head, "most_bytes")
        self._make_loader, self._served, self._post = make_loader, dict(served), post
        self._changed = threading.Condition()
        self._inbox: deque[Head] = deque()
        self._is_shutting_down = False
        self._initial_state: dict[str, Any] = {}
        self._next_state: dict[str, Any] = {}
        """The loader's state after a complete iteration; empty if it may have changed since."""
        self._number: int | None = None
        """The number by which the client identifies the current iteration, or None."""
        self._batches: LoaderIterator | None = None
        self._step = self._taken = self._upto = 0
        self._untaken: deque[tuple[int, int]] = deque()
        """The step and size of each sent batch that the client's loop has not taken yet."""
        self._unsent: deque[tuple[weakref.ref[Any], int]] = deque()
        """A weak reference to each sent block, and its size. ZeroMQ releases a block once sent."""
        self.n_untaken_bytes = self.n_sent = 0
        self._thread = threading.Thread(target=self._run, name="shardio session", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise UnsupportedEnvironment(
                f"the server cannot start a thread for one more client: {error}"
            ) from error

    @property
    def is_running(self) -> bool:
        """True until the session's thread has ended."""
        return self._thread.is_alive()

    def accept(self, head: Head) -> None:
        """Accept a message of the client, or raise MalformedMessage if too many are queued."""
        with self._changed:
            if head["kind"] == "credit":
                self._grant(head)
            elif head["kind"] == "open":  # the client has reconnected: drop its earlier messages
                self._inbox = deque([head])
            elif len(self._inbox) < _MAX_INBOX:
                self._inbox.append(head)
            else:
                raise MalformedMessage(f"more than {_MAX_INBOX} messages without an answer")
            self._changed.notify()

    def shut_down(self) -> None:
        """Ask the session's thread to end once it has finished the current batch."""
        with self._changed:
            self._is_shutting_down = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait until the session's thread has ended, for at most `timeout_s`."""
        self._thread.join(timeout_s)

    def _grant(self, head: Head) -> None:
        """Record that the client took the steps before "taken" and accepts those before "upto"."""
        if number(head, "number") != self._number:
            return
        self._taken = max(self._taken, min(self._step, number(head, "taken")))
        self._upto = min(number(head, "upto"), self._taken + MAX_AHEAD)
        while self._untaken and self._untaken[0][0] < self._taken:
            self.n_untaken_bytes -= self._untaken.popleft()[1]

    def _run(self) -> None:
        loader: ShardLoader | None = None
        try:
            loader = self._make_loader(handshake.options_from_json(self._options))
            self._initial_state = self._next_state = loader.state_dict()
            self._send_opened(loader)
            while self._run_once(loader):
                pass
        except Exception as error:  # noqa: BLE001  # reported to the client
            self._fail(error)
        finally:
            self._batches = None
            if loader is not None:
                loader.close()

    def _send_opened(self, loader: ShardLoader) -> None:
        dataset = loader.dataset
        self._send(
            "opened",
            version=VERSION,
            lineage=dataset.lineage,
            generation=dataset.generation,
            batches=len(loader),
            state=self._initial_state,
            served=self._served,
        )

    def _run_once(self, loader: ShardLoader) -> bool:
        """Wait for work, then handle a message or send a batch. Return False at the end."""
        with self._changed:
            while not (self._is_shutting_down or self._inbox or self._may_send):
                self._changed.wait(_POLL_S if self._is_granted else None)
            if self._is_shutting_down:
                return False
            head = self._inbox.popleft() if self._inbox else None
        try:
            if head is None:
                self._send_next(loader)
            else:
                self._handle(loader, head)
        except Exception as error:  # noqa: BLE001  # reported to the client
            failed = self._number
            self._stop()
            self._fail(error, failed)
        return True

    @property
    def _is_granted(self) -> bool:
        if self._batches is None or self._step >= self._upto:
            return False
        return not self._untaken or self.n_untaken_bytes < MAX_UNTAKEN_BYTES

    @property
    def _may_send(self) -> bool:
        return self._is_granted and self.n_unsent_bytes < MAX_UNTAKEN_BYTES

    @property
    def n_unsent_bytes(self) -> int:
        """The total size of the blocks that ZeroMQ has not sent yet."""
        while self._unsent and self._unsent[0][0]() is None:
            self._unsent.popleft()
        return sum(n_bytes for _, n_bytes in self._unsent)

    def _handle(self, loader: ShardLoader, head: Head) -> None:
        kind = head["kind"]
        if kind == "open":  # the client has reconnected
            self._stop()
            self._send_opened(loader)
        elif kind == "check":
            loader.load_state_dict(member(head, "state", dict))
            self._next_state = {}
            self._send("checked", epoch=loader.epoch)
        elif kind == "stop":
            if number(head, "number") == self._number:
                self._stop()
        elif kind == "iterate":
            self._begin(loader, head)

    def _begin(self, loader: ShardLoader, head: Head) -> None:
        self._stop()
        self._number = number(head, "number")
        state, ahead = member(head, "state", dict), number(head, "ahead", MAX_AHEAD)
        # If the loader is already in this state, do not load the state again: workers may already
        # be filling the first batches of the iteration.
        if state != self._next_state:
            loader.load_state_dict(state)
        self._next_state = {}
        self._batches = batches = cast(LoaderIterator, iter(loader))
        partition = batches.iteration.plan.partition
        first, last = partition.first_step, partition.stop_step
        with self._changed:
            self._step = self._taken = first
            self._upto = first + ahead
        self._send("begun", number=self._number, epoch=loader.epoch, first=first, last=last)

    def _send_next(self, loader: ShardLoader) -> None:
        batch: Batch | None = None if self._batches is None else next(self._batches, None)
        if batch is None:
            ended, self._next_state = self._number, loader.state_dict()
            self._stop()
            self._send("end", number=ended, state=self._next_state)
            return
        head, block = pack_batch(batch)
        if len(block) > self._max_bytes:
            raise InsufficientMemory(
                f"batch {batch.step} has {len(block)} bytes, more than the client's limit of "
                f"{self._max_bytes}: lower batch_size or raise memory_bytes at the client"
            )
        with self._changed:
            self._step = batch.step + 1
            self._untaken.append((batch.step, len(block)))
            self.n_untaken_bytes += len(block)
            self._unsent.append((weakref.ref(block), len(block)))
        self.n_sent += 1
        self._send("batch", block, number=self._number, state=loader.state_dict(), **head)

    def _stop(self) -> None:
        with self._changed:
            self._number = self._batches = None
            self._untaken.clear()
            self.n_untaken_bytes = 0

    def _fail(self, error: Exception, failed: int | None = None) -> None:
        if isinstance(error, MalformedMessage):
            error = InvalidArgument(f"the server does not understand the request: {error}")
        self._send("failed", number=failed, error=protocol.error_to_json(error))

    def _send(self, kind: str, block: Any = None, **more: Any) -> None:
        head = pack(kind, **more)
        self._post(self, [head] if block is None else [head, block])
