"""Fill a block with what a transform makes, sample by sample. Used by `fill`."""

from __future__ import annotations

import random
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardio._engine.blocks import BlockMap
from shardio._engine.recipe import Recipe
from shardio.collate import CLAIMED, EMPTY, FILLED, BlockLayout, VaryingSlot
from shardio.dataset import ShardDataset
from shardio.errors import SchemaError, TransformError
from shardio.format.values import encode_record
from shardio.inference import check_sample
from shardio.order import SampleGenerators
from shardio.units import Rows


class TransformedValues:
    """Runs the user's transform on samples of a dataset, which it borrows.

    `passes` is what user code may raise without its being counted as the transform's failure.
    """

    def __init__(
        self, recipe: Recipe, dataset: ShardDataset, passes: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._recipe, self._dataset, self._passes = recipe, dataset, passes
        self._generators = SampleGenerators(recipe.seed)

    def fill(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        rows: Rows,
        shards: Rows,
        epoch: int,
        start: int,
    ) -> int:
        """Fill the rows of a batch; returns how much of the heap is used.

        Args:
            layout, memory: of the block.
            rows, shards: of the samples.
            epoch, start: the position of the first, which keys its generators.

        Raises:
            ShardCorrupt, TransformError, MemoryShort: naming the sample.
        """
        # These stay valid when the block grows: the pages are the same.
        status = layout.origins(memory.bytes)["status"]
        arrays = [(s.name, layout.fixed_rows(memory.bytes, s, len(rows))) for s in layout.fixed]
        presence = [(p.name, layout.present(memory.bytes, p)) for p in layout.presence]
        status[: len(rows)] = EMPTY
        used = 0
        for i, shard in enumerate(shards.tolist()):
            status[i] = CLAIMED
            sample = self.sample(rows, i, shard, epoch=epoch, position=start + i)
            try:
                check_sample(sample, layout.schema)
                for name, is_present in presence:
                    is_present[i] = sample[name] is not None
                for name, array in arrays:
                    value = sample[name]
                    array[i] = 0 if value is None else value
                for varying in layout.varying:
                    used = self._put(layout, memory, varying, i, sample[varying.name], used)
            except SchemaError as error:
                raise self.placed(str(error), int(rows[i]), shard, start + i) from None
            status[i] = FILLED
        return used

    def _put(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        slot: VaryingSlot,
        i: int,
        value: object,
        used: int,
    ) -> int:
        """One value that a transform made into the heap; returns how much is used then."""
        record, shape = encode_record(slot.name, layout.schema[slot.name], value)
        start = -(-used // slot.alignment) * slot.alignment
        end = start + record.nbytes
        # Doubled: the sizes to come are not known, and every growth maps the block anew.
        if layout.heap + end > len(memory.bytes):
            memory.grow(layout.heap + 2 * end)
        memory.bytes[layout.heap + start : layout.heap + end].data[:] = record
        extents = layout.extents(memory.bytes, slot)
        extents[i] = (0, record.nbytes, start)
        if slot.n_dims:
            layout.shapes(memory.bytes, slot)[i] = shape
        return end

    def sample(
        self, rows: Rows, i: int, shard: int, *, epoch: int, position: int
    ) -> Mapping[str, Any]:
        """What the transform makes of one sample, with every generator keyed for it."""
        recipe = self._recipe
        local = int(rows[i] - self._dataset.starts[shard])
        sample = self._dataset.sample(shard, local, recipe.fields)
        key = self._generators.key(epoch, position)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # the user's code may draw from it
        arguments = (
            (sample, self._generators.at(epoch, position)) if recipe.takes_rng else (sample,)
        )
        transform: Any = recipe.transform
        try:
            made: Mapping[str, Any] = transform(*arguments)
        except self._passes:
            raise
        except BaseException as error:  # sys.exit and StopIteration are failures too
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            text = "".join(traceback.format_exception(type(error), error, frames))
            what = f"the transform raised {type(error).__name__}: {_text_of(error)}"
            raise self.placed(what, int(rows[i]), shard, position, text) from error
        return made

    def placed(
        self, what: str, row: int, shard: int, position: int, text: str = ""
    ) -> TransformError:
        """What went wrong with a sample, and which it is."""
        name = self._dataset.shards[shard].name
        local = row - int(self._dataset.starts[shard])
        place = f"sample {local} of shard {name} of {self._recipe.path} (position {position})"
        return TransformError(f"{what}\n  at {place}" + (f"\n\n{text}" if text else ""))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # user classes fail in any way they like
        return f"(its __str__ raised {type(failure).__name__})"
