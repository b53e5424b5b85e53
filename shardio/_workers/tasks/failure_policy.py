"""The policy for items that fail and for workers that crash (except MultiLoader's workers).

A worker that crashes is replaced, and its items are tried again. An item that has crashed
MAX_CRASHES workers is skipped if skips are allowed; otherwise, an error is raised.
"""

from __future__ import annotations

from typing import Any, Final

from shardio._base.statistics import SkippedItem
from shardio._workers.processes.serialization import short_repr, text_of
from shardio.errors import ClosedError, InsufficientMemory, TooManySkipped, UnsupportedEnvironment

MAX_CRASHES: Final = 2
_NEVER_SKIPPED: Final = (UnsupportedEnvironment, ClosedError, InsufficientMemory)


class CrashLoop:
    """A counter of the crashes since any worker last completed a task."""

    def __init__(self, n_workers: int) -> None:
        self._max_crashes = 2 * n_workers + MAX_CRASHES
        self.n_crashes = 0  # the owner sets this to 0 when a worker completes a task

    def count(self, how: str) -> None:
        """Count a crash, described by `how`; raise UnsupportedEnvironment if there are too many."""
        self.n_crashes += 1
        if self.n_crashes > self._max_crashes:
            raise UnsupportedEnvironment(f"workers crash before they do anything: {how}")


class ErrorBudget:
    """The items that were skipped, at most `max_skips`; None allows no skips."""

    def __init__(self, max_skips: int | None) -> None:
        self.max_skips = max_skips
        self.skipped: list[SkippedItem] = []

    def allows_skip(self, error: BaseException) -> bool:
        is_of_item = isinstance(error, Exception) and not isinstance(error, _NEVER_SKIPPED)
        return self.max_skips is not None and is_of_item

    def skip(self, index: int, item: Any, error: BaseException) -> None:
        """Record that an item is skipped; raise TooManySkipped after too many skips."""
        found = SkippedItem(index, short_repr(item), type(error).__name__, text_of(error))
        self.skipped.append(found)
        n_skipped = len(self.skipped)
        if self.max_skips is not None and n_skipped > self.max_skips:
            raise TooManySkipped(
                f"{n_skipped} item{'s' * (n_skipped > 1)} failed; max_skips allows "
                f"{self.max_skips}; the last is item {index} ({found.item}): {found.error}: "
                f"{found.text}"
            ) from error
