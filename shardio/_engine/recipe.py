"""A recipe and a plan: everything that decides what is in a batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from shardio._engine.shared import SharedArray
from shardio.access.filesystems import Access
from shardio.division import Division
from shardio.units import Verify
from shardio.windows import Window


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what is in a batch; travels to the workers once.

    `transform` is the user's; `takes_rng` says whether it wants a generator too. `n_samples` are
    those of `subset`, if one is named, in the state of the dataset that `generation` numbers.
    `block_rows` is how many samples a block has room for. `skips` says whether a sample that fails
    gives its place to another.
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
    skips: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What one pass goes over; travels to a worker before the first task of the pass.

    How its samples are chosen: `listed`, by a table of all; `sums`, by weighted draws; `window`,
    shuffled inside of windows; with none of these, as the recipe says.
    """

    epoch: int
    division: Division
    window: Window | None = None
    listed: SharedArray | None = None
    sums: SharedArray | None = None

    def pack(self) -> tuple[bytes, list[int]]:
        """It as a message, and the descriptors that go with it, which stay its own."""
        tables = {}
        if self.listed is not None:
            tables["listed"] = self.listed
        if self.sums is not None:
            tables["sums"] = self.sums
        shapes = {name: (each.array.dtype.str, len(each.array)) for name, each in tables.items()}
        content = self.epoch, self.division, self.window, shapes
        return pickle.dumps(content), [each.fd for each in tables.values()]

    @classmethod
    def unpack(cls, message: bytes, fds: Sequence[int]) -> Self:
        """What `pack` gave; takes the descriptors over."""
        # From our own parent, never from data.
        epoch, division, window, shapes = pickle.loads(message)
        tables = {
            name: SharedArray.received(fd, *shape)
            for (name, shape), fd in zip(shapes.items(), fds, strict=True)
        }
        return cls(epoch, division, window, **tables)
