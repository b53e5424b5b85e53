"""Build batches in steps: rows, then arrays of all rows, then the results of user functions.

`filler` uses this module if fields are collated, or if batch functions change the batch. The last
step writes into the block; earlier steps write into a scratch block, which is private memory reused
for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.statistics import PHASE_TIMES, TRANSFORM, now_ns
from shardio._engine.filling.batch_spec import BatchSpec, IndexChunk, Schemas
from shardio._engine.filling.collate import (
    Places,
    Scratch,
    StoredCollation,
    Values,
    copy_rows,
    join,
    put_value,
    reserve,
)
from shardio._engine.filling.field_reader import FieldReader
from shardio._engine.filling.transform import (
    Call,
    TransformRunner,
    call_keyed,
    describe_error,
    named,
    plain,
)
from shardio._workers.processes.blocks import BlockMap
from shardio.batch.batch import Batch
from shardio.batch.layout import (
    CLAIMED,
    NO_FIELD,
    BlockLayout,
    layout_for_batches,
    layout_for_samples,
    pack_state,
)
from shardio.batch.schema_inference import check_batch, infer_batch
from shardio.dataset.dataset import Dataset
from shardio.dataset.open_files import ShardPaths
from shardio.errors import SchemaError, TransformError
from shardio.format.schema import Schema
from shardio.order.permutation import OF_BATCHES, OF_COLLATION, SampleGenerators

_CLAIMED: Final = pack_state(NO_FIELD, CLAIMED)
_NAMED_SAMPLES: Final = 3


OneByOne = Callable[[BlockLayout, BlockMap, npt.NDArray[np.int32]], int]
"""A function that fills the rows of a batch one by one, and returns the used bytes of the heap.

Its last argument is the status column of the origin table.
"""


class RowRange(NamedTuple):
    """The samples of one batch.

    The samples are those in the slice `part` of `index_chunk`; `start` is the first sample's
    position in the epoch. The batch has n_rows rows, padding included. `states` is the status
    column of the origin table, for the rows that are not padding.
    """

    index_chunk: IndexChunk
    part: slice
    epoch: int
    start: int
    n_rows: int
    states: npt.NDArray[np.int32]

    @property
    def n_read(self) -> int:
        """The number of rows without padding."""
        return len(self.states)


class BatchBuilder:
    """A builder of batches in steps. It borrows the dataset and owns its scratch blocks."""

    def __init__(
        self,
        batch_spec: BatchSpec,
        dataset: Dataset,
        source: Schema,
        stored: FieldReader,
        transformed: TransformRunner,
        passes: tuple[type[BaseException], ...] = (),
        call: Call = call_keyed,
    ) -> None:
        self._batch_spec, self._dataset, self._call = batch_spec, dataset, call
        self._stored, self._transformed, self._passes = stored, transformed, passes
        self._joins = StoredCollation(dataset, source)
        self._generators = SampleGenerators(batch_spec.seed, OF_BATCHES)
        self._collation_keys = SampleGenerators(batch_spec.seed, OF_COLLATION)
        self._scratches: list[Scratch] = []
        self._paths = ShardPaths(batch_spec.path, dataset.shards)
        self._beside = {
            name: ShardPaths(batch_spec.path, found)
            for name, found in dataset.column_groups.items()
        }

    def fill(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        share: RowRange,
        one_by_one: OneByOne | None = None,
    ) -> int:
        """Fill a block or a scratch block with a batch; return the used bytes of the heap.

        If `one_by_one` is given, it fills the rows.

        Raises:
            ShardCorrupt, SchemaError, TransformError, InsufficientMemory: the message names
                samples.
        """
        inner = layout.inner
        if inner is None:
            return self._fill_rows(layout, memory, share, one_by_one)
        below = self._scratch(inner)
        self.fill(inner, below, share, one_by_one)
        # Claim all samples but no particular field: errors from here on concern the whole batch.
        share.states[:] = _CLAIMED
        if not layout.joins:
            return self._write(layout, memory, self._make(inner, below, share), share)
        used = copy_rows(inner, below, layout, memory, share.n_rows)
        rows = Batch(inner, below.bytes, share.n_rows, {}, 0, 0)
        return self._join(layout, memory, rows, share, used)

    def _scratch(self, layout: BlockLayout) -> Scratch:
        """Return the scratch block for batches of an inner layout."""
        for found in self._scratches:
            if found.layout is layout:
                return found
        self._scratches.append(Scratch(layout))
        return self._scratches[-1]

    def _fill_rows(
        self, layout: BlockLayout, memory: BlockMap, share: RowRange, one_by_one: OneByOne | None
    ) -> int:
        """Fill the rows, and collate the stored fields."""
        index_chunk, part, epoch, start, n_rows, states = share
        rows, shards = index_chunk.rows[part], index_chunk.shards[part]
        if one_by_one is not None:
            if layout.joins:
                return self._fill_and_join(layout, memory, share, one_by_one)
            used = one_by_one(layout, memory, states)
        elif self._batch_spec.transform is not None:
            used = self._transformed.fill(layout, memory, index_chunk, part, states, epoch, start)
        else:
            if memory.views is None:
                memory.views = layout.views(memory.bytes)
            used = self._stored.fill(layout, memory, memory.views, index_chunk, part, states)
            where = self._places(share)
            try:
                used = self._joins.fill(layout, memory, rows, shards, n_rows, states, used, where)
            except SchemaError as error:
                raise SchemaError(f"{error}\n  at {self._named(share)}") from None
        if n_rows > share.n_read:
            layout.pad(memory.bytes, share.n_read, share.n_read)
        return used

    def _fill_and_join(
        self, layout: BlockLayout, memory: BlockMap, share: RowRange, one_by_one: OneByOne
    ) -> int:
        """Fill the rows one by one into a scratch block, and collate them from there."""
        plain = layout_for_samples(layout.samples, layout.n_rows)
        below = Scratch(plain)
        self._fill_rows(plain, below, share, one_by_one)
        share.states[:] = _CLAIMED
        used = copy_rows(plain, below, layout, memory, share.n_rows)
        rows = Batch(plain, below.bytes, share.n_rows, {}, 0, 0)
        return self._join(layout, memory, rows, share, used)

    def _join(
        self, layout: BlockLayout, memory: BlockMap, rows: Batch, share: RowRange, used: int
    ) -> int:
        """Collate the fields of `rows`, which are already computed."""
        try:
            for slot in layout.joins:
                values: Values = rows[slot.join.name]
                used = join(layout, memory, slot, values, share.n_rows, used, self._places(share))
        except SchemaError as error:
            kind = SchemaError if self._batch_spec.transform is None else TransformError
            raise kind(f"{error}\n  at {self._named(share)}") from None
        return used

    def _make(self, layout: BlockLayout, memory: BlockMap, share: RowRange) -> Any:
        """Return the result of the user's batch functions for a batch.

        Raises:
            TransformError: a function raised.
        """
        batch_spec, n_rows = self._batch_spec, share.n_rows
        arrays = layout.arrays(memory.bytes, n_rows)
        files = self._paths, self._beside
        batch = Batch(layout, memory.bytes, n_rows, arrays, share.epoch, 0, *files)
        made: Any = dict(batch)
        if batch_spec.collation.function is not None:
            key = self._collation_keys.key(share.epoch, share.start)
            arguments: tuple[Any, ...] = (_samples(batch, made),)
            made = self._run(
                "the collate function", batch_spec.collation.function, arguments, key, share
            )
        if batch_spec.batch_transform is not None:
            key = self._generators.key(share.epoch, share.start)
            arguments = (made,)
            if batch_spec.batch_takes_rng:
                arguments += (self._generators.at(share.epoch, share.start),)
            made = self._run("batch_transform", batch_spec.batch_transform, arguments, key, share)
        return made

    def _run(
        self, what: str, function: Any, arguments: tuple[Any, ...], key: int, share: RowRange
    ) -> Any:
        start_ns = now_ns()
        try:
            made = self._call(key, function, arguments)
        except self._passes:
            raise
        except BaseException as error:  # sys.exit and StopIteration count as failures too
            message, text = describe_error(what, error)
            raise TransformError(f"{message}\n  at {self._named(share)}\n\n{text}") from error
        PHASE_TIMES.sums_ns[TRANSFORM] += now_ns() - start_ns
        try:
            return plain(made)
        except SchemaError as error:
            raise TransformError(f"{error}\n  at {self._named(share)}") from None

    def first(self, samples: Schema, share: RowRange) -> Schemas:
        """Build the first batch of samples with this schema, and return the resulting schemas.

        Raises:
            Exception: as in `fill`.
            TransformError: the result cannot be stored in a batch.
        """
        inner = self._batch_spec.lay_out(Schemas(samples))
        scratch = Scratch(inner)
        self.fill(inner, scratch, share)
        made = self._make(inner, scratch, share)
        try:
            schema, whole = infer_batch(made, share.n_rows, inner.schema)
        except SchemaError as error:
            raise TransformError(f"{error}\n  at {self._named(share)}") from None
        layout = layout_for_batches(schema, whole, inner)
        heap_bytes = self._write(layout, Scratch(layout), made, share)
        self._scratches.clear()  # later batches have other layouts
        return Schemas(samples, schema, whole, heap_bytes)

    def _write(self, layout: BlockLayout, memory: BlockMap, made: Any, share: RowRange) -> int:
        """Copy the user's batch into a block; return the used bytes of the heap.

        Raises:
            TransformError: the batch differs from the first one in its fields or types.
            InsufficientMemory: the block cannot grow enough.
        """
        used = 0
        try:
            check_batch(made, share.n_rows, layout.schema, [slot.name for slot in layout.whole])
            for slot in layout.whole:
                value = np.asarray(made[slot.name])
                out, used = reserve(layout, memory, slot, value.shape, used)
                out[...] = value
            for presence in layout.presence:
                there = [value is not None for value in made[presence.name]]
                layout.present(memory.bytes, presence)[: share.n_rows] = there
            for varying in layout.varying:
                for i, value in enumerate(made[varying.name]):
                    used = put_value(layout, memory, varying, i, value, used)
        except SchemaError as error:
            raise TransformError(f"{error}\n  at {self._named(share)}") from None
        return used

    def _places(self, share: RowRange) -> Places:
        def place(i: int) -> str:
            k = share.part.start + i % share.n_read
            row, shard = int(share.index_chunk.rows[k]), int(share.index_chunk.shards[k])
            return f"{named(self._dataset, row, shard)} (position {share.start + i % share.n_read})"

        return place

    def _named(self, share: RowRange) -> str:
        """Describe the batch for messages."""
        places = [self._places(share)(i) for i in range(min(share.n_read, _NAMED_SAMPLES))]
        more = ", …" if share.n_read > _NAMED_SAMPLES else ""
        return f"the batch of {', '.join(places)}{more} of {self._batch_spec.path}"


def _samples(batch: Batch, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of a batch as dicts, with None for missing values."""
    present = {name: batch.present(name) for name in batch}
    return [
        {name: columns[name][i] if present[name][i] else None for name in columns}
        for i in range(batch.n_rows)
    ]
