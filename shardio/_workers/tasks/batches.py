"""What stands between stages without a thread: batches being gathered, and results being taken."""

from __future__ import annotations

import threading
from collections import deque

from shardio._base.phase_timers import now_ns
from shardio._workers.tasks.stage import Entry


class Batches:
    """Gathers `n` items into a list, one list at a time; pure.

    Of the items that are left at the end it makes a shorter list, unless that is to be dropped or
    an error comes behind them.
    """

    def __init__(self, n: int, *, drop_last: bool) -> None:
        self.out: deque[Entry] = deque()
        self.error: Exception | None = None
        self.last_words: Exception | None = None
        self.has_told_end = self.is_halted = False
        self._n, self._drop_last = n, drop_last
        self._gathered: list[Entry] = []
        self._is_ended = False

    @property
    def has_room(self) -> bool:
        """Whether it takes another item: not while a list waits."""
        return not self.out

    @property
    def is_over(self) -> bool:
        """Whether no list will come any more."""
        return self._is_ended and not self.out

    def put(self, entry: Entry) -> None:
        """Take an item."""
        self._gathered.append(entry)
        if len(self._gathered) == self._n:
            self._put_out()

    def end(self, error: Exception | None) -> None:
        """No further item will come; `error`, if there is one, is what comes behind the last."""
        self._is_ended, self.last_words = True, error
        if self._gathered and not self._drop_last and error is None:
            self._put_out()

    def clear(self) -> None:
        """Let go of everything of the user's."""
        self.out.clear()
        self._gathered.clear()
        self.last_words = None

    def _put_out(self) -> None:
        gathered, self._gathered = self._gathered, []
        first, last = gathered[0][0], gathered[-1][0]
        self.out.append((last._replace(first=first.first), [item for _, item in gathered]))


class Results:
    """What waits for the loop at the end of a line, `most` of them, and what wakes the loop."""

    def __init__(self, most: int) -> None:
        self.entries: deque[Entry] = deque()
        self.is_over = False
        self.error: Exception | None = None
        """What comes behind all that is here."""
        self.n_taken = self.waiting_ns = 0
        self._most = most
        self._is_awaited = False
        # Of C alone: Ctrl-C comes before it is taken, or after.
        self._bell = threading.Lock()
        self._bell.acquire()

    @property
    def has_room(self) -> bool:
        """Whether another result may wait here."""
        return len(self.entries) < self._most

    def put(self, entry: Entry) -> None:
        """Take a result."""
        self.entries.append(entry)
        self.waiting_ns -= now_ns()

    def end(self, error: Exception | None) -> None:
        """No further result will come; `error`, if there is one, is what comes behind the last."""
        self.is_over, self.error = True, error

    def take(self) -> Entry | None:
        """A result if there is one; if not, the next is announced, and so is the end."""
        if not self.entries:
            self._is_awaited = not self.is_over
            return None
        self.waiting_ns += now_ns()
        self.n_taken += 1
        return self.entries.popleft()

    def ring(self) -> None:
        """Wake the loop, if it waits."""
        # It may have been woken already, by Ctrl-C.
        if self._is_awaited and self._bell.locked():
            self._bell.release()
        self._is_awaited = False

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until `ring`, without the line's lock; False if that takes too long."""
        return self._bell.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
