"""What is for one caller at a time: another is refused, whichever moment it comes at."""

from __future__ import annotations

import threading

from shardio.errors import InvalidArgument


class Alone:
    """Lets one caller into its `with`; another is refused, of the same thread too.

    Args:
        refusal: what the other is told.
    """

    def __init__(self, refusal: str) -> None:
        self._refusal, self._lock = refusal, threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise InvalidArgument(self._refusal)

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
