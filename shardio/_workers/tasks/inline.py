"""This process as the only worker of a pool, for num_workers=0; one caller at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shardio._base.classes import Closing
from shardio._base.statistics import ItemStats, now_ns
from shardio._workers.processes.serialization import add_note, as_failure, shortened
from shardio._workers.tasks.skip_policy import ErrorBudget
from shardio.errors import BatchTimeout, InvalidArgument


class SingleCaller:
    """A guard that admits one caller to its `with` and refuses others, also of the same thread.

    Args:
        refusal: the message for refused callers.
    """

    def __init__(self, refusal: str) -> None:
        self._refusal, self._lock = refusal, threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise InvalidArgument(self._refusal)

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


class InlinePool(Closing):
    """A pool of one item at a time, whose function is called when the value is taken.

    Args:
        function: takes one item; nothing is pickled.
        max_skips: how many items may fail and be left out; None raises the first failure.
        is_called: the function's name in messages.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        max_skips: int | None = None,
        is_called: str = "the function",
    ) -> None:
        self._function, self._is_called = function, is_called
        self.error_budget = ErrorBudget(max_skips)
        """The items that were left out, and how many more may be."""
        self._waiting: list[tuple[Any, Any]] = []
        self.n_put = self._n_taken = self._calling_ns = 0
        self._has_ended = False

    @property
    def has_room(self) -> bool:
        """True if an item may be put."""
        return not (self._waiting or self._has_ended)

    @property
    def is_over(self) -> bool:
        """True if all items have been taken and no more will be put."""
        return self._has_ended and not self._waiting

    @property
    def stats(self) -> ItemStats:
        """Return the figures so far."""
        return ItemStats(
            n_put=self.n_put,
            n_taken=self._n_taken,
            n_skipped=len(self.error_budget.skipped),
            calling_s=self._calling_ns / 1e9,
        )

    def put(self, request: Any, item: Any = None) -> int:
        """Queue a call with `request`; return the item's number, from 0 up."""
        self._waiting.append((request, request if item is None else item))
        self.n_put += 1
        return self.n_put - 1

    def end(self) -> None:
        """No more items will be put. Idempotent."""
        self._has_ended = True

    def take(self) -> tuple[int, Any] | None:
        """Call the function with the queued item.

        Return its number and value, or None if it failed.

        Raises:
            Exception: raised by the function, with a note of where.
            TooManySkipped: one more item failed than may.
        """
        if not self._waiting:
            return None
        (request, item), number = self._waiting.pop(), self.n_put - 1
        start_ns = now_ns()
        error: Exception | None = None
        try:
            value = self._function(request)
        except KeyboardInterrupt:  # meant for this process
            raise
        except BaseException as raised:  # noqa: BLE001  # sys.exit and all, as in a worker
            error = as_failure(raised, self._is_called)
            add_note(error, f"in this process, item {number} ({shortened(item)})")
            if not self.error_budget.forgives(error):
                raise error  # noqa: B904  # its cause, if it has one, is what was raised
            self.error_budget.skip(number, item, error)
            return None
        finally:
            error = None  # its traceback refers to this frame
            self._calling_ns += now_ns() - start_ns
        self._n_taken += 1
        return number, value

    def wait(self, timeout_s: float | None = None) -> None:
        """Do nothing: a queued item can be taken at once."""

    def overdue(self, timeout_s: float) -> BatchTimeout:
        """Return the error for a value that did not come in time."""
        slow = self.n_put - 1
        return BatchTimeout(f"item {slow} of {self._is_called} took over {timeout_s:g} s")

    def close(self) -> None:
        """Drop the queued item."""
        self._waiting.clear()
        self._has_ended = True
