"""The policy for items that fail and workers that crash, alike for all that runs in workers.

A worker that crashes is replaced, and what it was at is done again. What has crashed MAX_CRASHES
workers is not tried any more: it is reported, or left out if it may be. Workers that crash one
after the other without having done anything end the work.
"""

from __future__ import annotations

from typing import Any, Final

from shardio._base.statistics import SkippedItem
from shardio._workers.processes.serialization import shortened, text_of
from shardio.errors import ClosedError, InsufficientMemory, TooManySkipped, UnsupportedEnvironment

_NOT_OF_AN_ITEM: Final = (UnsupportedEnvironment, ClosedError, InsufficientMemory)


MAX_CRASHES: Final = 2
"""An item that has crashed this many workers is reported or left out, not tried again."""


class CrashLoop:
    """The crashes of workers since one of them last did something.

    Args:
        n_workers: how many there are.
    """

    def __init__(self, n_workers: int) -> None:
        self._most = 2 * n_workers + MAX_CRASHES
        self.n_crashes = 0
        """Set to 0 by the owner whenever a worker has done something."""

    def count(self, how: str) -> None:
        """Count one more crash; `how` describes it.

        Raises:
            UnsupportedEnvironment: each place was filled twice, and to no avail.
        """
        self.n_crashes += 1
        if self.n_crashes > self._most:
            raise UnsupportedEnvironment(f"workers crash before they do anything: {how}")


class ErrorBudget:
    """The number of items that may fail and be skipped; without one the first failure is raised.

    Args:
        most: the maximum number of skipped items; None for none.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.skipped: list[SkippedItem] = []
        """The skipped items."""

    def forgives(self, error: BaseException) -> bool:
        """Return True if an item that failed with this error may be skipped."""
        is_its_own = isinstance(error, Exception) and not isinstance(error, _NOT_OF_AN_ITEM)
        return self.most is not None and is_its_own

    def skip(self, index: int, item: Any, error: BaseException) -> None:
        """Leave an item out.

        Raises:
            TooManySkipped: that is one more than may be.
        """
        found = SkippedItem(index, shortened(item), type(error).__name__, text_of(error))
        self.skipped.append(found)
        n_skipped = len(self.skipped)
        if self.most is not None and n_skipped > self.most:
            raise TooManySkipped(
                f"{n_skipped} item{'s' * (n_skipped > 1)} failed; max_skips allows {self.most}; "
                f"the last is item {index} ({found.item}): {found.error}: {found.text}"
            ) from error
