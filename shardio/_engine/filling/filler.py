"""Fill a block with a batch, in a worker or, without workers, in the main process.

A batch is a pure function of (dataset, batch spec, plan, step): any process writes the same bytes.
Each block has an origin table, with the shard, row and status of each sample. The filler claims a
sample in this table before it touches the sample's mapped memory or calls user code; after a crash,
the table shows which samples the worker was reading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._engine.filling.batch_functions import BatchBuilder, RowRange
from shardio._engine.filling.batch_spec import (
    BatchSpec,
    EpochPlan,
    IndexChunk,
    IndexPlanner,
    Schemas,
)
from shardio._engine.filling.field_reader import FieldReader
from shardio._engine.filling.readahead import ReadAhead
from shardio._engine.filling.sizing import heap_bytes_by
from shardio._engine.filling.transform import Call, TransformRunner, call_keyed
from shardio._workers.processes.blocks import BlockMap
from shardio.batch.layout import EMPTY, FILLED, NO_FIELD, BlockLayout, pack_state
from shardio.batch.schema_inference import infer_schema
from shardio.errors import SchemaError
from shardio.format.schema import Schema
from shardio.order import FullShuffle, RankPartition, Sequential
from shardio.samples.media import image_schema
from shardio.samples.view import SampleView
from shardio.shard.verification import Rows

RowByRow = Callable[[npt.NDArray[np.int64], BlockLayout, BlockMap, npt.NDArray[np.int32]], int]
"""A function that fills the rows of a block one by one, and returns the used bytes of the heap.

The first argument is the batch's origin table, the last argument the table's status column.
"""

_ALL_FILLED: Final = pack_state(NO_FIELD, FILLED)


class Filler:
    """A filler of blocks with the batches of one BatchSpec.

    Args:
        batch_spec: the specification of batches.
        view: the samples of the dataset; borrowed.
        passes: exception types that are not wrapped in a TransformError if user code raises them.
        cautions: a function to call with the shards of a batch before they are read.
        call: the function that calls user functions.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        view: SampleView,
        passes: tuple[type[BaseException], ...] = (),
        cautions: Callable[[Rows], None] | None = None,
        call: Call = call_keyed,
    ) -> None:
        dataset = view.dataset
        self._batch_spec, self._view, self._cautions = batch_spec, view, cautions
        self._source = Schema({name: dataset.schema[name] for name in batch_spec.fields})
        self._readahead = ReadAhead(batch_spec, view)
        self._index_planner = IndexPlanner(view, seed=batch_spec.seed)
        self._heap_bytes = 0
        self._reader = view.reader(batch_spec.fields, batch_spec.pictures, batch_spec.audio)
        self._stored = FieldReader(dataset, self._source, self._reader)
        self._transformed = TransformRunner(batch_spec, view, self._reader, passes, call)
        self._batches = BatchBuilder(
            batch_spec,
            dataset,
            self._source,
            self._stored,
            self._transformed,
            passes,
            call,
        )

    def close(self) -> None:
        """Close decoders and files. Idempotent."""
        self._reader.close()

    def share_steps(self, n_workers: int) -> None:
        """Set how many workers share an epoch's steps; the filler then plans only its own steps."""
        self._index_planner.n_workers = n_workers

    def batch_schema(self, number: int = 0) -> Schema:
        """Return the schema of samples in a batch: the delivered fields, or the transform's result.

        The transform runs on the sample with the index `number` in the view, not in the epoch.

        Raises:
            TransformError: the transform raised, or returned a value that cannot be stored in a
                batch.
        """
        if self._batch_spec.transform is None or not self._batch_spec.n_samples:
            return self._batch_spec.delivered(self._view)
        index_chunk = self._index_planner.first(number)
        if self._cautions is not None:
            self._cautions(index_chunk.shards_within(slice(0, 1)))
        sample = self._transformed.sample(index_chunk, 0, epoch=0, position=number)
        try:
            source = self._batch_spec.audio.delivered(self._view.delivered(self._source))
            schema = self._batch_spec.collation.relax_shapes(infer_schema(sample, source))
            # The first sample may lack an image
            schema = image_schema(schema, self._batch_spec.pictures)
            self._heap_bytes = heap_bytes_by(sample, schema, self._batch_spec.block_rows)
            return schema
        except SchemaError as error:
            raise self._transformed.placed(str(error), index_chunk, 0, number) from None

    def schemas(self, number: int = 0) -> Schemas:
        """Return the schemas of samples and of the batches that batch functions return.

        Batch functions run on the first batch or, if samples may be skipped, on a batch of copies
        of sample `number`.

        Raises:
            TransformError, ShardCorrupt: the message names samples.
            InvalidArgument: the collation does not fit the samples.
        """
        batch_spec = self._batch_spec
        samples = self.batch_schema(number)
        if not batch_spec.makes_batches or not batch_spec.n_samples:
            return Schemas(samples, heap_bytes=self._heap_bytes)
        n_rows = batch_spec.block_rows
        if batch_spec.skips:
            index_chunk, part = self._index_planner.first(number), slice(0, 1)
        else:
            partition = RankPartition(batch_spec.n_samples, 0, n_rows, tail="pad")
            plan = EpochPlan(0, partition, FullShuffle() if batch_spec.shuffle else Sequential())
            index_chunk, part = self._index_planner.index_chunk(plan, 0)
        start = number if batch_spec.skips else 0
        states = np.empty(part.stop - part.start, np.int32)
        if self._cautions is not None:
            self._cautions(index_chunk.shards_within(part))
        return self._batches.first(samples, RowRange(index_chunk, part, 0, start, n_rows, states))

    def fill(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        plan: EpochPlan,
        step: int,
        row_by_row: RowByRow | None = None,
    ) -> tuple[int, int]:
        """Fill a block with a batch; return the number of rows and the used bytes of the heap.

        If `row_by_row` is given, it fills the rows.

        Raises:
            ShardCorrupt, TransformError, InsufficientMemory: the message names the sample.
        """
        index_chunk, part = self._index_planner.index_chunk(plan, step)
        self._readahead.before(plan, step, index_chunk, part)
        n_read = part.stop - part.start
        views = memory.views
        if views is None:
            views = memory.views = layout.views(memory.bytes)
        origins, states = views.origins, views.states
        if n_read < len(states):
            states[n_read:] = EMPTY
            origins, states = origins[:n_read], states[:n_read]
        if row_by_row is not None:
            one_by_one = functools.partial(row_by_row, origins)
        else:
            origins[:] = index_chunk.origins[part]
            one_by_one = None
        if layout.inner is not None or layout.joins:
            if self._cautions is not None:
                self._cautions(index_chunk.shards_within(part))
            n_rows = layout.n_rows if plan.partition.tail == "pad" else n_read
            start = plan.partition.read(step)[0]
            share = RowRange(index_chunk, part, plan.epoch, start, n_rows, states)
            heap = self._batches.fill(layout, memory, share, one_by_one)
        elif one_by_one is not None:
            heap = one_by_one(layout, memory, states)
        elif self._batch_spec.transform is None and self._cautions is None:
            heap = self._stored.fill(layout, memory, views, index_chunk, part, states)
        else:
            start = plan.partition.read(step)[0]
            heap = self.fill_rows(layout, memory, index_chunk, part, states, plan.epoch, start)
        states[:] = _ALL_FILLED
        if plan.partition.tail == "pad":
            start, stop = plan.partition.share(step)
            if stop - start < layout.n_rows:
                layout.pad(memory.bytes, n_read, stop - start)
            return layout.n_rows, heap
        return n_read, heap

    def fill_rows(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        index_chunk: IndexChunk,
        part: slice,
        states: npt.NDArray[np.int32],
        epoch: int,
        start: int,
    ) -> int:
        """Fill the first rows of a block with samples; return the used bytes of the heap.

        Args:
            layout, memory: the block and its layout.
            index_chunk, part: the samples, as a chunk and their slice of it.
            states: the samples' entries in the status column of the origin table; no field is
                claimed yet.
            epoch, start: the epoch, and the first sample's position in it; they seed the
                generators for user code.

        Raises:
            ShardCorrupt, TransformError, InsufficientMemory: the message names the sample.
        """
        if self._cautions is not None:
            self._cautions(index_chunk.shards_within(part))
        if self._batch_spec.transform is not None:
            return self._transformed.fill(layout, memory, index_chunk, part, states, epoch, start)
        views = memory.views
        if views is None:
            views = memory.views = layout.views(memory.bytes)
        return self._stored.fill(layout, memory, views, index_chunk, part, states)

    def sample_at(self, plan: EpochPlan, position: int) -> IndexChunk:
        """Return a chunk with the sample at a position of an iteration."""
        return self._index_planner.at(plan, np.array([position]))
