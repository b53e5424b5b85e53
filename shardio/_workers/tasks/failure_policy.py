"""The policy for items that fail and for workers that crash (except MultiLoader's workers).

A worker that crashes is replaced, and its items are tried again. An item that has crashed
MAX_CRASHES workers is skipped if skips are allowed; otherwise, an error is raised.
"""

from __future__ import annotations

from typing import Any, Final

from shardio._base.statistics import SkippedItem
from shardio._workers.processes.serialization import shortened, text_of
from shardio.errors import ClosedError, InsufficientMemory, TooManySkipped, UnsupportedEnvironment

MAX_CRASHES: Final = 2
_NOT_OF_AN_ITEM: Final = (UnsupportedEnvironment, ClosedError, InsufficientMemory)


class CrashLoop:
    """A counter of the crashes since any worker last completed a task."""

    def __init__(self, n_workers: int) -> None:
        self._most = 2 * n_workers + MAX_CRASHES
        self.n_crashes = 0  # the owner sets this to 0 when a worker completes a task

    def count(self, how: str) -> None:
        """Count a crash, described by `how`; raise UnsupportedEnvironment if there are too many."""
        self.n_crashes += 1
        if self.n_crashes > self._most:
            raise UnsupportedEnvironment(f"workers crash before they do anything: {how}")


class ErrorBudget:
    """The items that were skipped, at most `most`; None allows no skips."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.skipped: list[SkippedItem] = []

    def forgives(self, error: BaseException) -> bool:
        is_its_own = isinstance(error, Exception) and not isinstance(error, _NOT_OF_AN_ITEM)
        return self.most is not None and is_its_own

    def skip(self, index: int, item: Any, error: BaseException) -> None:
        """Record that an item is skipped; raise TooManySkipped after more than `most` skips."""
        found = SkippedItem(index, shortened(item), type(error).__name__, text_of(error))
        self.skipped.append(found)
        n_skipped = len(self.skipped)
        if self.most is not None and n_skipped > self.most:
            raise TooManySkipped(
                f"{n_skipped} item{'s' * (n_skipped > 1)} failed; max_skips allows {self.most}; "
                f"the last is item {index} ({found.item}): {found.error}: {found.text}"
            ) from error
