"""What loading items one by one takes, and which were left out: the records that users get."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SkippedItem:
    """An item that failed and was left out (with on_error="skip").

    `index` counts items from 0; `item` is its repr, shortened; `error` the name of the exception's
    class, and `text` what it says.
    """

    index: int
    item: str
    error: str
    text: str


@dataclass(frozen=True, slots=True)
class ItemStats:
    """What has been done so far."""

    n_put: int = 0
    """Items that were given to workers, or wait for one."""
    n_taken: int = 0
    """Items whose values came back."""
    n_skipped: int = 0
    """Items that failed and were left out."""
    n_restarts: int = 0
    """Workers that died and were replaced."""
    n_copies: int = 0
    """Values that were copied out of their blocks, since the program held all others."""
    n_bytes: int = 0
    """Bytes of the values that came in blocks: all but small ones."""
    calling_s: float = 0.0
    """Time that all workers together have spent in the function."""
