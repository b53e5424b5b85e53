"""A recipe: everything that decides what is in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardio.access.filesystems import Access
from shardio.units import Verify


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what is in a batch; travels to the workers once.

    `transform` is the user's; `takes_rng` says whether it wants a generator too. `n_samples` are
    those of `subset`, if one is named, in the state of the dataset that `generation` numbers.
    """

    path: str
    fields: tuple[str, ...]
    batch_size: int
    n_samples: int
    shuffle: bool
    seed: int
    verify: Verify
    access: Access
    transform: Callable[..., Any] | None
    takes_rng: bool
    subset: str | None = None
    generation: int | None = None
