"""The samples of a pass: their numbers, rows and shards, computed for many steps at a time.

Used by `filler`. Work that is the same for every sample is cheap when it is done for many: a batch
only takes its slice.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio._engine.filling.batch_spec import EpochPlan
from shardio.batch.layout import CLAIMED, NO_FIELD, pack_state
from shardio.dataset.dataset import Dataset
from shardio.order.clip_groups import ClipGrouping, ClipGroupOrder
from shardio.order.mixture_order import MixtureOrder
from shardio.order.permutation import CHUNK, OF_SOUNDS, Order, derive_key, keyed_hashes
from shardio.order.sampling import WeightedOrder
from shardio.order.shuffle import GroupedOrder, ShardOrder, ShardWindow, WindowedOrder
from shardio.samples.clips import ClipDraws, draw_clips
from shardio.shard.verification import Rows

_STATE_SHIFT: Final = 32


class Keys(NamedTuple):
    """The keys of random draws for some samples: seed, epoch, and positions in the epoch."""

    seed: int
    epoch: int
    positions: Rows


class IndexChunk:
    """The samples of some steps of a pass; the arrays are read-only.

    The steps are `first` to `last` - 1. `numbers` are the numbers of their `n` samples, `rows`
    their rows in all shards, `shards` the numbers of their shards, `origins` their lines of a
    block's origin table, (n, 3), claimed for no field yet. `keys` are the keys of their random
    draws, `tokens` the plan's token counts.
    """

    def __init__(
        self,
        dataset: Dataset,
        first: int,
        last: int,
        numbers: Rows,
        keys: Keys,
        tokens: tuple[int, ...] | None = None,
    ) -> None:
        self._dataset, self._keys = dataset, keys
        self.first, self.last, self.numbers, self.tokens = first, last, numbers, tokens
        rows = dataset.rows.at(numbers)
        self.n, self.rows, self.shards = len(rows), rows, dataset.locate(rows)
        self.origins: npt.NDArray[np.int64] = np.empty((len(rows), 3), np.int64)
        self.origins[:, 0] = numbers
        self.origins[:, 1] = rows - dataset.starts.take(self.shards)
        self.origins[:, 2] = self.shards + (pack_state(NO_FIELD, CLAIMED) << _STATE_SHIFT)
        self._slots: dict[str, Rows] = {}

    def shards_within(self, part: slice) -> Rows:
        """Return the shards that some of the samples are made of."""
        if self._dataset.rows.packed is None:
            return self.shards[part]
        return self._dataset.locate(self._dataset.rows.covered_rows(self.origins[part, 0]))

    def slots(self, name: str) -> Rows:
        """Return where each sample's row of a column lies, for `ColumnGather.gather`."""
        found = self._slots.get(name)
        if found is None:
            found = self._dataset.gather(name).place(self.rows, self.shards)
            self._slots[name] = found
        return found

    @cached_property
    def cuts(self) -> ClipDraws:
        """Return where the clip of each sample begins and how it is cropped."""
        clips = self._dataset.rows.clips
        if clips is None:
            raise AssertionError("a recipe with a cut is for a dataset that shows its clips")
        seed, epoch, positions = self._keys
        return draw_clips(clips, self.origins[:, 0], positions, seed=seed, epoch=epoch)

    @cached_property
    def sound_draws(self) -> npt.NDArray[np.uint64]:
        """64 random bits for each sample, which say where its sound begins if that is drawn."""
        seed, epoch, positions = self._keys
        return keyed_hashes(positions, derive_key(OF_SOUNDS, seed, epoch))


class Ordering(Protocol):
    """The sample of the view at each position of an epoch."""

    def at(self, positions: Rows) -> Rows:
        """Return the sample at each of `positions`, which are in any order; int64, read-only."""


class TableOrder:
    """An order that is kept in a table, which it borrows."""

    def __init__(self, table: Rows) -> None:
        self._table = table

    def at(self, positions: Rows) -> Rows:
        """Return the sample at each of `positions`, which are in any order."""
        return self._table[positions]


def order_of(
    plan: EpochPlan,
    *,
    shuffle: bool,
    seed: int,
    clip_grouping: ClipGrouping | None = None,
    shard_ends: Rows | None = None,
) -> Ordering:
    """Return the order of a pass.

    `shuffle` applies if the plan has none, `bundling` to clips that stay together in a shuffle, and
    `shard_ends` to windows of shards.
    """
    n, epoch = plan.partition.n, plan.epoch
    if isinstance(plan.window, ShardWindow):
        if shard_ends is None:
            raise AssertionError("a plan with windows of shards needs to know where they end")
        return ShardOrder(shard_ends, n, plan.window.n_shards, seed=seed, epoch=epoch)
    if plan.listed is not None:
        return TableOrder(plan.listed.array)
    if plan.sums is not None:
        return WeightedOrder(plan.sums.array, seed=seed, epoch=epoch)
    if plan.blend is not None:
        window = plan.window
        return MixtureOrder(
            plan.blend,
            shuffle=shuffle,
            window=window,
            seed=seed,
            epoch=epoch,
            clip_grouping=clip_grouping,
        )
    if plan.window is not None:
        if clip_grouping is not None:
            return GroupedOrder(n, clip_grouping.k, plan.window, seed=seed, epoch=epoch)
        return WindowedOrder(n, plan.window, seed=seed, epoch=epoch)
    if shuffle and clip_grouping is not None:
        return ClipGroupOrder(clip_grouping.groups(n), seed=seed, epoch=epoch)
    return Order(n, shuffle=shuffle, seed=seed, epoch=epoch)


class IndexPlanner:
    """The samples of a loader's passes; caches the latest chunks.

    If `n_workers` share the steps of a pass, each worker does every n-th in the main (`Schedule`
    assigns them so), and a chunk has only those steps.
    """

    def __init__(self, dataset: Dataset, *, shuffle: bool, seed: int) -> None:
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self.n_workers = 1
        """The number of workers that share the steps of a pass."""
        self._plan: EpochPlan | None = None
        self._order: Ordering
        self._stretches: dict[int, IndexChunk] = {}

    def stretch(self, plan: EpochPlan, step: int) -> tuple[IndexChunk, slice]:
        """Return a chunk with the samples of a step, and the slice that they are."""
        partition, n_workers = plan.partition, self.n_workers
        if plan is not self._plan:
            self._plan = None  # should Ctrl-C strike here: never the order of another pass
            self._stretches, self._order = {}, self._order_of(plan)
            self._plan = plan
        found = self._stretches.get(step % n_workers)
        if found is None or not found.first <= step < found.last:
            found = self._stretches[step % n_workers] = self._look(plan, step)
        n_whole = partition.batch_size
        start = (step - found.first) // n_workers * n_whole
        return found, slice(start, min(start + n_whole, found.n))  # only the last has fewer

    def at(self, plan: EpochPlan, positions: Rows) -> IndexChunk:
        """Return a chunk of the samples at some positions of a pass."""
        order = self._order if plan is self._plan else self._order_of(plan)
        keys = Keys(self._seed, plan.epoch, positions)
        return IndexChunk(self._dataset, 0, 1, order.at(positions), keys, plan.tokens)

    def first(self, number: int) -> IndexChunk:
        """Return a chunk with one sample of the view, as it comes first in a first epoch."""
        numbers = np.array([number])
        return IndexChunk(self._dataset, 0, 1, numbers, Keys(self._seed, 0, numbers))

    @cached_property
    def _clip_grouping(self) -> ClipGrouping | None:
        # Late: a worker's dataset is told what it shows after it was opened.
        return self._dataset.rows.clip_grouping

    def _order_of(self, plan: EpochPlan) -> Ordering:
        is_in_shards = isinstance(plan.window, ShardWindow)
        return order_of(
            plan,
            shuffle=self._shuffle,
            seed=self._seed,
            clip_grouping=self._clip_grouping,
            shard_ends=self._dataset.rows.shard_ends if is_in_shards else None,
        )

    def _look(self, plan: EpochPlan, step: int) -> IndexChunk:
        partition, every = plan.partition, self.n_workers
        n_steps = max(1, CHUNK // partition.batch_size) * every
        begin, own = step - step % n_steps, step % every
        first = max(partition.first_step, begin)
        first += (own - first) % every
        last = min(partition.last_step, begin + n_steps)
        positions = partition.positions(first, last, every)
        keys = Keys(self._seed, plan.epoch, positions)
        return IndexChunk(self._dataset, first, last, self._order.at(positions), keys, plan.tokens)
