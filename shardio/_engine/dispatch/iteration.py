"""One pass over an epoch, as main keeps it; what to do with it is the engine's business."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from shardio._engine.dispatch.crashes import Caution
from shardio._engine.dispatch.tally import Lap
from shardio._engine.filling.recipe import Plan
from shardio._workers.tasks.schedule import Schedule
from shardio.batch.batch import Skipped
from shardio.batch.layout import BlockLayout
from shardio.errors import TooManySkipped

_NAMED_SKIPS: Final = 3

Delivered = tuple[int, int, int, int]
"""A filled block, until it is given back: its number, the step, rows, bytes of varying values."""


@dataclass(slots=True, eq=False)
class Iteration:
    """A pass under way: `slot` tells it apart from others, also in the workers."""

    slot: int
    plan: Plan
    schedule: Schedule
    layout: BlockLayout
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rows, and bytes of varying values, of the steps that are ready."""
    deaths: dict[int, int] = field(default_factory=dict)
    """How many workers died while they worked on a step that is still to be done."""
    cautions: dict[int, Caution] = field(default_factory=dict)
    """What is known of steps that workers have died of, where their samples may be skipped."""
    skips: dict[int, tuple[Skipped, ...]] = field(default_factory=dict)
    """The samples that were skipped in steps that are ready, where there are any."""
    n_skipped: int = 0
    """How many samples of the batches that the loop has got were skipped."""
    known_to: set[int] = field(default_factory=set)
    """The workers that have the plan."""
    lap: Lap = field(default_factory=Lap)
    n_handed_over: int = 0
    """How many steps the loop has got."""
    is_exhausted: bool = False
    """Whether the loop was told that there is no more."""
    held: int | None = None
    """The block delivered last, until it is leased, or taken back before the next."""
    is_cancelled: bool = False
    is_watched: bool = False
    """Whether somebody iterates, who will cancel it."""
    is_ahead: bool = False
    """Whether it was begun before anybody asked for it, and nobody has until now."""
    successor: Plan | None = None
    """What the next pass goes over, if it may be begun when nothing is left to give out of this."""

    def take_skips(self, step: int, most: int) -> tuple[Skipped, ...]:
        """The samples that were skipped in a step that is delivered now, in order.

        Raises:
            TooManySkipped: in this step they become more than `most`.
        """
        found = self.skips.pop(step, ())
        self.n_skipped += len(found)
        if self.n_skipped <= most:
            return found
        named = [f"sample {s.index}: {s.error}: {s.text}" for s in found[-_NAMED_SKIPS:]]
        raise TooManySkipped(
            f"{self.n_skipped} samples of epoch {self.plan.epoch} have failed by batch {step}, and "
            f"max_skips allows {most}: mend them, or raise it; the last:\n" + "\n".join(named)
        )
