"""A recipe and a plan: everything that decides what is in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardio.access.filesystems import Access
from shardio.division import Division
from shardio.units import Verify


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what is in a batch; travels to the workers once.

    `transform` is the user's; `takes_rng` says whether it wants a generator too. `n_samples` are
    those of `subset`, if one is named, in the state of the dataset that `generation` numbers.
    `block_rows` is how many samples a block has room for.
    """

    path: str
    fields: tuple[str, ...]
    block_rows: int
    n_samples: int
    shuffle: bool
    seed: int
    verify: Verify
    access: Access
    transform: Callable[..., Any] | None
    takes_rng: bool
    subset: str | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What one pass goes over; travels to a worker before the first task of the pass."""

    epoch: int
    division: Division
