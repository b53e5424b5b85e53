"""Fill a block with a batch: the work of a worker, and of main when it has no workers.

A batch is a pure function of (dataset, recipe, plan, step): whoever fills it, and however often,
writes the same bytes. The origin table is written before mapped memory is touched or user code is
called, so that whatever kills the process, main can say what it was doing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from shardio._engine.blocks import BlockMap
from shardio._engine.itinerary import Itinerary
from shardio._engine.recipe import Plan, Recipe
from shardio._engine.stored import StoredValues
from shardio._engine.transformed import TransformedValues
from shardio.collate import EMPTY, FILLED, NO_FIELD, BlockLayout, pack_state
from shardio.dataset import ShardDataset
from shardio.errors import SchemaError
from shardio.format.schema import Schema
from shardio.inference import infer_schema
from shardio.units import Rows

_ALL_FILLED: Final = pack_state(NO_FIELD, FILLED)


class Filler:
    """Fills blocks by one recipe.

    Args:
        recipe: what is in a batch.
        dataset: opened on recipe.path; borrowed.
        passes: what user code may raise without its being counted as the transform's failure.
        beware: called with the shards of a batch before any of it is read.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: ShardDataset,
        passes: tuple[type[BaseException], ...] = (),
        beware: Callable[[Rows], None] | None = None,
    ) -> None:
        self._recipe, self._dataset, self._beware = recipe, dataset, beware
        self._source = Schema({name: dataset.schema[name] for name in recipe.fields})
        self._itinerary = Itinerary(dataset, shuffle=recipe.shuffle, seed=recipe.seed)
        self._stored = StoredValues(dataset, self._source)
        self._transformed = TransformedValues(recipe, dataset, passes)

    def batch_schema(self) -> Schema:
        """What a sample of a batch is: the fields, or what the transform makes of the first sample.

        That is the first of the view, whatever the order.

        Raises:
            TransformError: the transform raised, or returned what cannot be put into a batch.
        """
        if self._recipe.transform is None or not self._recipe.n_samples:
            return self._source
        rows = self._dataset.rows(np.zeros(1, np.int64))
        shard = int(self._dataset.locate(rows)[0])
        sample = self._transformed.sample(rows, 0, shard, epoch=0, position=0)
        try:
            return infer_schema(sample, self._source)
        except SchemaError as error:
            raise self._transformed.placed(str(error), int(rows[0]), shard, 0) from None

    def fill(self, layout: BlockLayout, memory: BlockMap, plan: Plan, step: int) -> tuple[int, int]:
        """Fill a block with a batch of a pass; returns (rows, bytes used in the heap).

        Raises:
            ShardCorrupt, TransformError, MemoryShort: naming the sample.
        """
        stretch, part = self._itinerary.stretch(plan, step)
        n_read = part.stop - part.start
        views = memory.views
        if views is None:
            views = memory.views = layout.views(memory.bytes)
        origins, states = views.origins, views.states
        if n_read < len(states):
            states[n_read:] = EMPTY
            origins, states = origins[:n_read], states[:n_read]
        origins[:] = stretch.origins[part]
        if self._beware is not None:
            self._beware(stretch.shards[part])
        if self._recipe.transform is None:
            heap = self._stored.fill(layout, memory, views, stretch, part, states)
        else:
            rows, shards = stretch.rows[part], stretch.shards[part]
            start = plan.division.read(step)[0]
            heap = self._transformed.fill(layout, memory, rows, shards, plan.epoch, start)
        states[:] = _ALL_FILLED
        if plan.division.tail == "pad":
            start, stop = plan.division.share(step)
            if stop - start < layout.n_rows:
                layout.pad(memory.bytes, n_read, stop - start)
            return layout.n_rows, heap
        return n_read, heap
