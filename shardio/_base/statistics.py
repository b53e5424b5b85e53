"""Records of what loaders, items and pipelines have done so far: what their `stats()` give.

What this thread has spent on hashing, decoding and transforms since it was last asked.

Where the work is done, its nanoseconds are added; whoever fills a batch takes the sums afterwards.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields
from time import perf_counter_ns
from typing import Any, Final, Self


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


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage of one iteration, so far; times in seconds."""

    name: str
    concurrency: int
    """How many calls may be under way."""
    n_in: int
    """Items that have come,"""
    n_out: int
    """and results that it has given;"""
    n_dropped: int
    """None, which drops an item;"""
    n_failed: int
    """and calls that failed."""
    busy_s: float
    """Time in its function, all threads together."""
    waiting_s: float
    """How long items lay before it until it had a thread for them, added up."""
    elapsed_s: float
    """The time that all of this is of."""

    @property
    def queue_depth(self) -> float:
        """How many items lay before it, on an average over time."""
        return self.waiting_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def n_busy(self) -> float:
        """How many calls were under way, on an average: near `concurrency`, it is what limits."""
        return self.busy_s / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """What `stats()` of a DataLoader or a Pipeline gives: its latest iteration, so far."""

    stages: tuple[StageStats, ...]
    """From the source on; batching is none of them."""
    n_results: int
    """What the loop has got."""
    skipped: tuple[SkippedItem, ...]
    """What failed and was left out (with on_error="skip"); of a batch, by its last item."""
    waiting_s: float
    """How long the loop has waited for results."""
    elapsed_s: float
    """Since the iteration began, to its end or to now."""
    buffer_depth: float
    """How many results lay ready, on an average over time."""

    @property
    def n_skipped(self) -> int:
        """How many calls have failed and were passed over."""
        return len(self.skipped)

    def as_json(self) -> dict[str, Any]:
        """The same as JSON says it, with what follows from it."""
        derived = [{"queue_depth": s.queue_depth, "n_busy": s.n_busy} for s in self.stages]
        stages = [asdict(s) | more for s, more in zip(self.stages, derived, strict=True)]
        return asdict(self) | {"stages": stages}


CHECK, DECODE, TRANSFORM = range(3)
"""Places in `SPENT.sums_ns`."""

TIMED_EVERY: Final = 7
"""Of records, one in so many is timed, and counts for as many: two readings of the clock cost as
much as the hash of a short one. A prime, since clips of a video may come in eights."""

now_ns = perf_counter_ns
"""The clock of all of this; processes of one machine share it."""


class _PhaseTimes(threading.local):
    """Sums of one thread."""

    def __init__(self) -> None:
        self.sums_ns = [0, 0, 0]


PHASE_TIMES: Final = _PhaseTimes()
