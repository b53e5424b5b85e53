"""Fill a block with a batch, in a worker or, without workers, in the main process.

A batch is a pure function of (dataset, batch spec, plan, step): any process writes the same bytes.
Each block has an origin table, with the shard, row and status of each sample. The filler claims a
sample in this table before it touches the sample's mapped memory or calls user code; after a crash,
the table shows which samples the worker was reading.

With on_error="skip", a batch that failed as a whole or crashed a worker is filled row by row. A
failing sample is replaced by the sample at a substitute position, which is a random draw seeded by
the position of the failing sample; other samples stay in their rows. A batch thus remains a pure
function of the above as long as failures depend on the sample alone.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan, IndexPlanner, Schemas
from shardio._engine.filling.collate import Scratch, copy_rows
from shardio._engine.filling.readahead import ReadAhead
from shardio._engine.filling.sizing import heap_bytes_by
from shardio._engine.filling.user_functions import (
    BatchBuilder,
    Call,
    TransformRunner,
    call_keyed,
)
from shardio._workers.processes.blocks import BlockMap
from shardio.batch.batch import Skipped
from shardio.batch.layout import (
    EMPTY,
    FILLED,
    NO_FIELD,
    SKIPPED,
    BlockLayout,
    layout_for_samples,
    pack_state,
)
from shardio.batch.schema_inference import infer_schema
from shardio.errors import (
    MediaError,
    SchemaError,
    ShardChanged,
    ShardCorrupt,
    TransformError,
    WorkerDied,
)
from shardio.format.schema import Schema
from shardio.order import FullShuffle, RankPartition, Sequential
from shardio.order.permutation import substitute_position
from shardio.samples.field_sources import BatchRows, IndexChunk
from shardio.samples.media import image_schema
from shardio.samples.view import SampleView
from shardio.shard.verification import Rows

Origins = npt.NDArray[np.int64]
RowByRow = Callable[[Origins, BatchRows], int]
"""A function that fills the rows of a batch one by one, and returns the used bytes of the heap.

The first argument is the origin table of the samples.
"""

_ALL_FILLED: Final = pack_state(NO_FIELD, FILLED)


class Filler:
    """A filler of blocks with the batches of one BatchSpec. Borrows the view.

    Args:
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
        self._batch_spec, self._view, self._cautions = batch_spec, view, cautions
        self._readahead = ReadAhead(batch_spec, view)
        self._index_planner = IndexPlanner(view, seed=batch_spec.seed)
        self._heap_bytes = 0
        self._reader = view.reader(batch_spec.fields, batch_spec.pictures, batch_spec.audio)
        self._transformed = TransformRunner(batch_spec, view, self._reader, passes, call)
        self._batches = BatchBuilder(batch_spec, view.dataset, self._reader, passes, call)

    def close(self) -> None:
        """Close decoders and files. Idempotent."""
        self._reader.close()

    def share_steps(self, n_workers: int) -> None:
        """Set how many workers share an epoch's steps; the filler then plans only its own steps."""
        self._index_planner.n_workers = n_workers

    def batch_schema(self, number: int = 0) -> Schema:
        """Return the schema of samples in a batch: the delivered fields, or the transform's result.

        The transform runs on the sample with the index `number` in the view, not in the epoch.
        """
        batch_spec, view = self._batch_spec, self._view
        if batch_spec.transform is None:
            return batch_spec.delivered(view)
        chunk = self._index_planner.first(number)
        if self._cautions is not None:
            self._cautions(chunk.covered(slice(0, 1))[1])
        sample = self._transformed.sample(chunk, 0)
        try:
            stored = Schema({name: view.dataset.schema[name] for name in batch_spec.fields})
            source = batch_spec.audio.delivered(view.delivered(stored))
            schema = batch_spec.collation.relax_shapes(infer_schema(sample, source))
            # The first sample may lack an image
            schema = image_schema(schema, batch_spec.pictures)
            self._heap_bytes = heap_bytes_by(sample, schema, batch_spec.block_rows)
            return schema
        except SchemaError as error:
            raise self._transformed.placed(str(error), chunk, 0) from None

    def schemas(self, number: int = 0) -> Schemas:
        """Return the schemas of samples and of the batches that batch functions return.

        Batch functions run on the first batch or, if samples may be skipped, on copies of sample
        `number`.
        """
        batch_spec = self._batch_spec
        samples = self.batch_schema(number)
        if not batch_spec.makes_batches:
            return Schemas(samples, heap_bytes=self._heap_bytes)
        n_rows = batch_spec.block_rows
        if batch_spec.skips:
            chunk, part = self._index_planner.first(number), slice(0, 1)
        else:
            partition = RankPartition(batch_spec.n_samples, 0, n_rows, tail="pad")
            plan = EpochPlan(0, partition, FullShuffle() if batch_spec.shuffle else Sequential())
            chunk, part = self._index_planner.index_chunk(plan, 0)
        states = np.empty(part.stop - part.start, np.int32)
        layout = batch_spec.lay_out(Schemas(samples))
        rows = BatchRows(layout, Scratch(layout), chunk, part, states, n_rows)
        return self._batches.first(samples, rows, self.fill_rows)

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
        chunk, part = self._index_planner.index_chunk(plan, step)
        self._readahead.before(plan, step, chunk, part)
        n_read, partition = part.stop - part.start, plan.partition
        views = memory.views
        if views is None:
            views = memory.views = layout.views(memory.bytes)
        origins, states = views.origins, views.states
        if n_read < len(states):
            states[n_read:] = EMPTY
            origins, states = origins[:n_read], states[:n_read]
        n_rows = layout.n_rows if partition.tail == "pad" else n_read
        batch = BatchRows(layout, memory, chunk, part, states, n_rows)
        fill_rows = self.fill_rows
        if row_by_row is None:
            origins[:] = chunk.origins[part]
        else:
            fill_rows = functools.partial(row_by_row, origins)
        if layout.inner is not None or layout.joins:
            heap = self._batches.fill(batch, fill_rows, by_row=row_by_row is not None)
        else:
            heap = fill_rows(batch)
        states[:] = _ALL_FILLED
        if partition.tail == "pad":
            start, stop = partition.share(step)
            if stop - start < layout.n_rows:
                layout.pad(memory.bytes, n_read, stop - start)
        return n_rows, heap

    def fill_rows(self, batch: BatchRows) -> int:
        """Fill the first rows of a block with samples; return the used bytes of the heap."""
        if self._cautions is not None:
            self._cautions(batch.chunk.covered(batch.part)[1])
        if self._batch_spec.transform is None:
            return self._reader.fill(batch)
        return self._transformed.fill(batch)

    def sample_at(self, plan: EpochPlan, position: int) -> IndexChunk:
        """Return a chunk with the sample at a position of an iteration."""
        return self._index_planner.at(plan, np.array([position]))


ATTEMPTS: Final = 32
"""The maximum number of substitutes to try for a row.

Even if half of all samples fail, only one row in 4 * 10^9 finds no substitute.
"""

_MAX_CHARACTERS: Final = 4000
_EMPTY: Final = pack_state(NO_FIELD, EMPTY)

LeftOut = Mapping[int, Mapping[int, str]]
"""Samples to skip: row in the batch -> {index in the view: reason}."""


def may_skip(error: BaseException) -> bool:
    """Return True if the sample alone causes an error, so that every attempt fails.

    Return False for lack of memory, and for a file that changes while it is read.
    """
    if isinstance(error, TransformError):
        return not isinstance(error.__cause__, MemoryError)
    if isinstance(error, OSError):  # only without mmap: an EIO in a mapped file crashes the worker
        return error.errno == errno.EIO
    return isinstance(error, ShardCorrupt | MediaError) and not isinstance(error, ShardChanged)


def shortened(text: str) -> str:
    """Return the reason for a skip, with the middle of a long text cut out."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]}\n[…]\n{text[-half:]}"


class RowByRowFiller:
    """A filler that skips the samples at which `filler` fails. Borrows `filler`."""

    def __init__(self, filler: Filler, seed: int) -> None:
        self._filler, self._seed = filler, seed

    def fill(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        plan: EpochPlan,
        step: int,
        left_out: LeftOut | None = None,
    ) -> tuple[int, int, tuple[Skipped, ...]]:
        """Fill a block with a batch; return (rows, used bytes of the heap, skips).

        `left_out` has the samples to skip, because workers have crashed at them. If it is not None,
        even if it is empty, rows are claimed one by one, so that another crash identifies the
        sample.

        Raises:
            TransformError, ShardCorrupt, …: no substitute was found for a sample, or the failure is
                not caused by a single sample.
        """
        if left_out is None:
            try:
                return *self._filler.fill(layout, memory, plan, step), ()
            except Exception as error:
                if not may_skip(error):
                    raise
        found: list[Skipped] = []
        fill = functools.partial(self._fill_rows, plan, step, left_out or {}, found)
        n_rows, heap_bytes = self._filler.fill(layout, memory, plan, step, fill)
        start, stop = plan.partition.share(step)
        # Skips in later rows belong to padding, and are not reported.
        skips = tuple(each for each in found if each.row < stop - start)
        states = layout.origins(memory.bytes)["status"]
        for each in skips:
            states[each.row] = SKIPPED
        return n_rows, heap_bytes, skips

    def _fill_rows(
        self,
        plan: EpochPlan,
        step: int,
        left_out: LeftOut,
        skips: list[Skipped],
        origins: Origins,
        batch: BatchRows,
    ) -> int:
        """Fill the rows of a batch, without padding; return the used bytes of the heap.

        Skipped samples are appended to `skips`.
        """
        layout = layout_for_samples(batch.layout.samples, 1)
        one = batch._replace(layout=layout, memory=Scratch(layout), part=slice(0, 1), n_rows=1)
        batch.states[:] = _EMPTY
        used = 0
        for i, position in enumerate(range(*plan.partition.read(step))):
            one = one._replace(states=batch.states[i : i + 1])
            skipped = self._find(plan, position, i, left_out.get(i, {}), origins[i], one)
            if skipped is not None:
                skips.append(skipped)
            used = copy_rows(one, batch, i, used)
        return used

    def _find(
        self,
        plan: EpochPlan,
        position: int,
        i: int,
        left_out: Mapping[int, str],
        origin: Origins,
        one: BatchRows,
    ) -> Skipped | None:
        """Fill the block of `one` with the sample at a position or, if it fails, a substitute.

        Return the skipped sample of row i, or None if no sample failed.
        """
        found: Skipped | None = None
        first: Exception | None = None
        error: Exception | None
        for candidate in self._candidates(plan, position):
            chunk = self._filler.sample_at(plan, candidate)
            origin[:] = chunk.origins[0]
            why = left_out.get(int(origin[0]))
            error = self._try(one._replace(chunk=chunk)) if why is None else WorkerDied(why)
            if error is None:
                return found
            if found is None or first is None:
                index, row, _ = origin.tolist()
                text, shard = shortened(str(error)), int(chunk.shards[0])
                found = Skipped(i, index, shard, row, type(error).__name__, text)
                first = error
        if first is None:
            raise AssertionError("a sample is tried before its substitutes")
        first.add_note(
            f"{ATTEMPTS} substitutes drawn for this sample failed, too, or were the same: "
            "on_error='skip' is meant for single samples, not for a bad dataset or transform"
        )
        try:
            raise first
        finally:
            # Break the reference cycle of error and traceback, which keeps all frames alive.
            first = error = None

    def _candidates(self, plan: EpochPlan, position: int) -> Iterator[int]:
        """Yield the position itself, then the positions of its substitutes, each once."""
        yield position
        tried = {position}
        n, epoch = plan.partition.n, plan.epoch
        for attempt in range(ATTEMPTS):
            found = substitute_position(
                n, seed=self._seed, epoch=epoch, position=position, attempt=attempt
            )
            if found not in tried:
                tried.add(found)
                yield found

    def _try(self, one: BatchRows) -> Exception | None:
        """Write a sample, which is claimed meanwhile; return the error that it caused, or None.

        Raises:
            Exception: an error that the sample did not cause.
        """
        try:
            self._filler.fill_rows(one)
        except Exception as error:
            if not may_skip(error):
                raise
            # Drop the traceback: it refers to this frame, and the frame to the error.
            return error.with_traceback(None)
        finally:
            one.states[:] = _EMPTY
        return None
