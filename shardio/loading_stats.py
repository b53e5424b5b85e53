"""What a loader's time goes into: the record that `loader.stats()` gives, and how it adds up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class LoadingStats:
    """What one iteration, or several together, have taken; times in seconds.

    `elapsed_s` is the loop's time from its start to now or to its end: `waiting_s` for data,
    `hand_over_s` in making batches and giving out tasks, and `body_s` in the loop's own code.

    `filling_s` is what all workers together have spent on filling batches: `reading_s` on copying
    what is stored, `checking_s` on hashes, `decoding_s` on compressed records, `transforming_s` in
    the transform, the batch_transform and a function for collate. Of records, one in seven is timed
    for all. Without workers it is a part of `waiting_s`.

    `ready_s` is how long filled batches lay ready, added up.
    """

    elapsed_s: float = 0.0
    waiting_s: float = 0.0
    hand_over_s: float = 0.0
    filling_s: float = 0.0
    checking_s: float = 0.0
    decoding_s: float = 0.0
    transforming_s: float = 0.0
    ready_s: float = 0.0
    n_batches: int = 0
    n_samples: int = 0
    n_bytes: int = 0
    """Bytes of the values in those batches."""
    n_skipped: int = 0
    """Samples that were skipped; they are among `n_samples`, with another in their row."""
    n_copies: int = 0
    """Batches that were copied out of their blocks, since the program held all others."""
    n_restarts: int = 0
    """Workers that died and were replaced."""
    n_blocks_made: int = 0
    """Blocks that were made anew."""

    @property
    def body_s(self) -> float:
        """Time in the loop's own code."""
        return max(0.0, self.elapsed_s - self.waiting_s - self.hand_over_s)

    @property
    def reading_s(self) -> float:
        """Time of workers in which they copied what is stored: all that is not counted apart."""
        apart_s = self.checking_s + self.decoding_s + self.transforming_s
        return max(0.0, self.filling_s - apart_s)

    @property
    def queue_depth(self) -> float:
        """How many filled batches lay ready, on an average over time."""
        return self.ready_s / self.elapsed_s if self.elapsed_s else 0.0

    def __add__(self, other: Self) -> LoadingStats:
        """Both together."""
        names = [field.name for field in fields(self)]
        return LoadingStats(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def as_json(self) -> dict[str, Any]:
        """The same as JSON says it, with what follows from it."""
        derived = {name: getattr(self, name) for name in ("body_s", "reading_s", "queue_depth")}
        return asdict(self) | derived


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What `loader.stats()` gives: `latest` is of the latest iteration, `total` of all of them."""

    epoch: int
    n_workers: int
    latest: LoadingStats
    total: LoadingStats

    def as_json(self) -> dict[str, Any]:
        """The same as JSON says it."""
        return {
            "epoch": self.epoch,
            "n_workers": self.n_workers,
            "latest": self.latest.as_json(),
            "total": self.total.as_json(),
        }
