"""One pass over an epoch, as main keeps it; what to do with it is the engine's business."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardio._engine.recipe import Plan
from shardio._engine.schedule import Schedule
from shardio.collate import BlockLayout

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
    known_to: set[int] = field(default_factory=set)
    """The workers that have the plan."""
    n_handed_over: int = 0
    """How many steps the loop has got."""
    is_exhausted: bool = False
    """Whether the loop was told that there is no more."""
    held: int | None = None
    """The block delivered last, until it is leased, or taken back before the next."""
    is_cancelled: bool = False
    is_watched: bool = False
    """Whether somebody iterates, who will cancel it."""
