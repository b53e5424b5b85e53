"""Build batches in steps: rows, then arrays of all rows, then the results of user functions.

`filler` uses this module if fields are collated, or if batch functions change the batch. The last
step writes into the block; earlier steps write into a scratch block, which is private memory reused
for every batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from shardio._base.callers import takes_rng
from shardio._base.statistics import PHASE_TIMES, TRANSFORM, now_ns
from shardio._engine.filling.batch_spec import BatchSpec, Schemas
from shardio._engine.filling.collate import (
    Places,
    Scratch,
    copy_rows,
    join,
    put_value,
    reserve,
)
from shardio._engine.filling.transform import Call, call_keyed, describe_error, named, plain
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
from shardio.samples.field_sources import BatchRows, SampleReader, Values

_CLAIMED: Final = pack_state(NO_FIELD, CLAIMED)
_NAMED_SAMPLES: Final = 3


FillRows = Callable[[BatchRows], int]


class BatchBuilder:
    """A builder of batches in steps. Borrows the reader and owns its scratch blocks."""

    def __init__(
        self,
        batch_spec: BatchSpec,
        dataset: Dataset,
        reader: SampleReader,
        passes: tuple[type[BaseException], ...] = (),
        call: Call = call_keyed,
    ) -> None:
        self._batch_spec, self._dataset, self._call = batch_spec, dataset, call
        self._reader, self._passes = reader, passes
        function = batch_spec.batch_transform
        self._takes_rng = function is not None and takes_rng("batch_transform", "batch", function)
        self._generators = SampleGenerators(batch_spec.seed, OF_BATCHES)
        self._collation_keys = SampleGenerators(batch_spec.seed, OF_COLLATION)
        self._scratches: list[Scratch] = []
        self._paths = ShardPaths(batch_spec.path, dataset.shards)
        self._beside = {
            name: ShardPaths(batch_spec.path, found)
            for name, found in dataset.column_groups.items()
        }

    def fill(self, batch: BatchRows, fill_rows: FillRows, *, by_row: bool = False) -> int:
        """Fill a block or a scratch block with a batch; return the used bytes of the heap.

        Args:
            batch: the rows.
            fill_rows: a function that writes the samples of a batch, and returns the used bytes.
            by_row: True if `fill_rows` may replace samples. Values to collate are then taken from
                its result, not from the dataset.

        Raises:
            ShardCorrupt, SchemaError, TransformError, InsufficientMemory: the message names
                samples.
        """
        layout = batch.layout
        if layout.inner is not None:
            below = batch._replace(layout=layout.inner, memory=self._scratch(layout.inner))
            self.fill(below, fill_rows, by_row=by_row)
        elif layout.joins and by_row:
            plain = layout_for_samples(layout.samples, layout.n_rows)
            below = batch._replace(layout=plain, memory=Scratch(plain))
            self.fill(below, fill_rows)
        else:
            values_of = functools.partial(self._reader.values, batch)
            used = self._join(batch, values_of, fill_rows(batch))
            if batch.n_rows > batch.n_read:
                layout.pad(batch.memory.bytes, batch.n_read, batch.n_read)
            return used
        # Claim all samples but no particular field: errors from here on concern the whole batch.
        batch.states[:] = _CLAIMED
        if not layout.joins:
            return self._write(batch, self._make(below))
        rows = Batch(below.layout, below.memory.bytes, batch.n_rows, {}, 0, 0)
        return self._join(batch, rows.__getitem__, copy_rows(below, batch))

    def _scratch(self, layout: BlockLayout) -> Scratch:
        """Return the scratch block for batches of an inner layout."""
        for found in self._scratches:
            if found.layout is layout:
                return found
        self._scratches.append(Scratch(layout))
        return self._scratches[-1]

    def _join(self, batch: BatchRows, values_of: Callable[[str], Values], used: int) -> int:
        """Collate the values of fields; return the used bytes of the heap."""
        try:
            for slot in batch.layout.joins:
                used = join(batch, slot, values_of(slot.join.name), used, self._places(batch))
        except SchemaError as error:
            kind = SchemaError if self._batch_spec.transform is None else TransformError
            raise kind(f"{error}\n  at {self._named(batch)}") from None
        return used

    def _make(self, rows: BatchRows) -> Any:
        """Return the result of the user's batch functions for a batch."""
        batch_spec, block = self._batch_spec, rows.memory.bytes
        epoch, start = rows.chunk.keys.epoch, rows.chunk.positions[rows.part.start]
        arrays, files = rows.layout.arrays(block, rows.n_rows), (self._paths, self._beside)
        batch = Batch(rows.layout, block, rows.n_rows, arrays, epoch, 0, *files)
        made: Any = dict(batch)
        if (collate := batch_spec.collation.function) is not None:
            key = self._collation_keys.key(epoch, start)
            made = self._run("the collate function", collate, (_samples(batch, made),), key, rows)
        if batch_spec.batch_transform is not None:
            key = self._generators.key(epoch, start)
            arguments: tuple[Any, ...] = (made,)
            if self._takes_rng:
                arguments += (self._generators.at(epoch, start),)
            made = self._run("batch_transform", batch_spec.batch_transform, arguments, key, rows)
        return made

    def _run(
        self, what: str, function: Any, arguments: tuple[Any, ...], key: int, rows: BatchRows
    ) -> Any:
        start_ns = now_ns()
        try:
            made = self._call(key, function, arguments)
        except self._passes:
            raise
        except BaseException as error:  # sys.exit and StopIteration count as failures too
            message, text = describe_error(what, error)
            raise TransformError(f"{message}\n  at {self._named(rows)}\n\n{text}") from error
        PHASE_TIMES.sums_ns[TRANSFORM] += now_ns() - start_ns
        try:
            return plain(made)
        except SchemaError as error:
            raise TransformError(f"{error}\n  at {self._named(rows)}") from None

    def first(self, samples: Schema, rows: BatchRows, fill_rows: FillRows) -> Schemas:
        """Build the first batch of samples with this schema, and return the resulting schemas."""
        self.fill(rows, fill_rows)
        made = self._make(rows)
        try:
            schema, whole = infer_batch(made, rows.n_rows, rows.layout.schema)
        except SchemaError as error:
            raise TransformError(f"{error}\n  at {self._named(rows)}") from None
        layout = layout_for_batches(schema, whole, rows.layout)
        heap_bytes = self._write(rows._replace(layout=layout, memory=Scratch(layout)), made)
        self._scratches.clear()  # later batches have other layouts
        return Schemas(samples, schema, whole, heap_bytes)

    def _write(self, batch: BatchRows, made: Any) -> int:
        """Copy the user's batch into a block; return the used bytes of the heap."""
        layout, used = batch.layout, 0
        try:
            check_batch(made, batch.n_rows, layout.schema, [slot.name for slot in layout.whole])
            for slot in layout.whole:
                value = np.asarray(made[slot.name])
                out, used = reserve(batch, slot, value.shape, used)
                out[...] = value
            for presence in layout.presence:
                there = [value is not None for value in made[presence.name]]
                layout.present(batch.memory.bytes, presence)[: batch.n_rows] = there
            for varying in layout.varying:
                for i, value in enumerate(made[varying.name]):
                    used = put_value(batch, varying, i, value, used)
        except SchemaError as error:
            raise TransformError(f"{error}\n  at {self._named(batch)}") from None
        return used

    def _places(self, batch: BatchRows) -> Places:
        def place(i: int) -> str:
            chunk, k = batch.chunk, batch.part.start + i % batch.n_read
            return f"{named(self._dataset, *chunk.places[k])} (position {chunk.positions[k]})"

        return place

    def _named(self, batch: BatchRows) -> str:
        """Describe the batch for messages."""
        places = list(map(self._places(batch), range(min(batch.n_read, _NAMED_SAMPLES))))
        more = ", …" if batch.n_read > _NAMED_SAMPLES else ""
        return f"the batch of {', '.join(places)}{more} of {self._batch_spec.path}"


def _samples(batch: Batch, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of a batch as dicts, with None for missing values."""
    present = {name: batch.present(name) for name in batch}
    return [
        {name: columns[name][i] if present[name][i] else None for name in columns}
        for i in range(batch.n_rows)
    ]
