"""Data sets that give samples by number, as torch's do, as items: each a run of positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardio.errors import MediaError
from shardio.format.arraylike import is_of

MAX_ITEMS: Final = 16_384
"""Items that a data set is cut into, at most: each has its line in the report."""


def is_indexed(src: object, workers: int | None) -> bool:
    """Whether it is converted by position: it has `__getitem__` and a length, and no `__iter__`.

    What can be iterated over as well is converted by position where `workers` are asked for. An
    IterableDataset of torch never is: it inherits a `__getitem__` that only raises.
    """
    kind = type(src)
    if not (hasattr(kind, "__getitem__") and hasattr(kind, "__len__")):
        return False
    if isinstance(src, Mapping) or is_of(src, "torch", "IterableDataset"):
        return False
    return workers is not None or not hasattr(kind, "__iter__")


@dataclass(frozen=True)
class Indexing:
    """What a data set gives for a run of positions, the first and the last."""

    dataset: Any

    def __call__(self, run: int | tuple[int, int]) -> Iterator[Any]:
        """Yield what is at each position.

        Raises:
            MediaError: an item of a data set is None.
        """
        first, last = (run, run) if isinstance(run, int) else run
        for position in range(first, last + 1):
            try:
                value = self.dataset[position]
            except Exception as error:
                error.add_note(f"at position {position}")
                raise
            if value is None:
                raise MediaError(f"position {position}: expected a sample, found None")
            yield value

    @property
    def name(self) -> str:
        """The class of the data set, as it is recorded."""
        return type(self.dataset).__qualname__


def runs_of(n: int) -> list[int | tuple[int, int]]:
    """Positions 0 to n - 1 as items: each by itself, or in runs where there would be too many."""
    n_run = 1 << max(0, -(-n // MAX_ITEMS) - 1).bit_length()
    if n_run == 1:
        return list(range(n))
    return [(first, min(first + n_run, n) - 1) for first in range(0, n, n_run)]
