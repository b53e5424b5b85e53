"""Where the samples of a pass lie, worked out for many steps at a time.

Used by `fill`. What is the same for every sample is cheap when it is done for many: a batch only
takes its slice.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from shardio._engine.recipe import Plan
from shardio.collate import CLAIMED, NO_FIELD, pack_state
from shardio.dataset import ShardDataset
from shardio.drawing import WeightedOrder
from shardio.order import CHUNK, Order
from shardio.units import Rows
from shardio.windows import WindowedOrder

_STATE_SHIFT: Final = 32


class Stretch:
    """The samples of steps `first` to `last` - 1 of a pass; arrays are not to be written to.

    `rows` are their rows of all shards, `shards` the numbers of their shards, `origins` their
    lines of a block's origin table, (n, 3), claimed for no field yet.
    """

    def __init__(self, dataset: ShardDataset, first: int, last: int, numbers: Rows) -> None:
        self._dataset = dataset
        self.first, self.last = first, last
        rows = dataset.rows(numbers)
        self.rows, self.shards = rows, dataset.locate(rows)
        self.origins: npt.NDArray[np.int64] = np.empty((len(rows), 3), np.int64)
        self.origins[:, 0] = numbers
        self.origins[:, 1] = rows - dataset.starts.take(self.shards)
        self.origins[:, 2] = self.shards + (pack_state(NO_FIELD, CLAIMED) << _STATE_SHIFT)
        self._slots: dict[str, Rows] = {}

    def slots(self, name: str) -> Rows:
        """Where each sample's row of a column lies; for `ColumnGather.gather`."""
        found = self._slots.get(name)
        if found is None:
            found = self._dataset.gather(name).place(self.rows, self.shards)
            self._slots[name] = found
        return found


class Ordering(Protocol):
    """Which sample of the view is visited at which position of an epoch."""

    def at(self, positions: Rows) -> Rows:
        """The sample at each of `positions`, in any order; int64, not to be written to."""


class Listed:
    """An order that is kept in a table, which it borrows."""

    def __init__(self, table: Rows) -> None:
        self._table = table

    def at(self, positions: Rows) -> Rows:
        """The sample at each of `positions`, in any order."""
        return self._table[positions]


def order_of(plan: Plan, *, shuffle: bool, seed: int) -> Ordering:
    """The order of a pass; `shuffle` is for plans that say nothing of it."""
    n, epoch = plan.division.n, plan.epoch
    if plan.listed is not None:
        return Listed(plan.listed.array)
    if plan.sums is not None:
        return WeightedOrder(plan.sums.array, seed=seed, epoch=epoch)
    if plan.window is not None:
        return WindowedOrder(n, plan.window, seed=seed, epoch=epoch)
    return Order(n, shuffle=shuffle, seed=seed, epoch=epoch)


class Itinerary:
    """The way of a loader's passes through a dataset; keeps the latest stretch."""

    def __init__(self, dataset: ShardDataset, *, shuffle: bool, seed: int) -> None:
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self._plan: Plan | None = None
        self._order: Ordering
        self._stretch: Stretch

    def stretch(self, plan: Plan, step: int) -> tuple[Stretch, slice]:
        """A stretch with the samples of a step, and which of its samples they are."""
        division = plan.division
        if plan is not self._plan:
            found = self._look(plan, self._order_of(plan), step)
        else:
            found = self._stretch
            if not found.first <= step < found.last:
                found = self._look(plan, self._order, step)
        start = (step - found.first) * division.batch_size
        first, behind = division.read(step)
        return found, slice(start, start + behind - first)

    def at(self, plan: Plan, positions: Rows) -> Stretch:
        """A stretch of its own with the samples at some positions of a pass."""
        order = self._order if plan is self._plan else self._order_of(plan)
        return Stretch(self._dataset, 0, 1, order.at(positions))

    def _order_of(self, plan: Plan) -> Ordering:
        return order_of(plan, shuffle=self._shuffle, seed=self._seed)

    def _look(self, plan: Plan, order: Ordering, step: int) -> Stretch:
        division = plan.division
        n_steps = max(1, CHUNK // division.batch_size)
        first = max(division.first_step, step - step % n_steps)
        last = min(division.last_step, step - step % n_steps + n_steps)
        found = Stretch(self._dataset, first, last, order.at(division.positions(first, last)))
        self._plan = None  # should Ctrl-C strike here: never the order of another pass
        self._order, self._stretch = order, found
        self._plan = plan
        return found
