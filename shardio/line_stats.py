"""What the stages of a pipeline have done and what they wait for: what `stats()` gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardio.item_stats import SkippedItem


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
