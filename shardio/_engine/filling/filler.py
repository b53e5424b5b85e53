"""Fill a block with a batch, in a worker or, without workers, in the main process.

The origin table of a block has the sample and the status of each row. A row gets the status CLAIMED
before its sample is read or passed to user code.

With on_error="skip", a batch is filled row by row if filling it as a whole has failed or has
crashed a worker. A sample that fails is replaced by the sample at another position of the epoch;
this position is drawn with a seed that depends on the position of the failing sample.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan, IndexPlanner, Schemas
from shardio._engine.filling.collate import Scratch, copy_rows
from shardio._engine.filling.readahead import ReadAhead
from shardio._engine.filling.sizing import estimate_heap_bytes
from shardio._engine.filling.user_functions import (
    BatchBuilder,
    TransformRunner,
    UserCalls,
    error_at,
    refuse_pictures_as_arrays,
)
from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.serialization import truncate_middle
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
from shardio.order import FullShuffle, Sequential
from shardio.order.permutation import substitute_position
from shardio.order.ranks import RankPartition
from shardio.samples.field_sources import BatchRows
from shardio.samples.media import audio_schema, image_schema
from shardio.samples.view import SampleView
from shardio.shard.verification import Rows

Origins = npt.NDArray[np.int64]
RowByRow = Callable[[Origins, BatchRows], int]
"""A function that fills rows and their origins one by one, and returns the used heap bytes."""

_ALL_FILLED: Final = pack_state(NO_FIELD, FILLED)


class Filler:
    """A filler that writes the batches of a BatchSpec into blocks. Borrows the view.

    `check_shards` is called with the indices of a batch's shards before these shards are read.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        view: SampleView,
        calls: UserCalls | None = None,
        check_shards: Callable[[Rows], None] | None = None,
    ) -> None:
        calls = calls or UserCalls()
        self._batch_spec, self._view, self._check_shards = batch_spec, view, check_shards
        self._readahead = ReadAhead(batch_spec, view)
        self.index_planner = IndexPlanner(view, seed=batch_spec.seed)
        self._reader = view.reader(batch_spec.fields, batch_spec.pictures, batch_spec.audio)
        self._transformed = TransformRunner(batch_spec, view, self._reader, calls)
        self._batches = BatchBuilder(batch_spec, view.dataset, self._reader, calls)

    def close(self) -> None:
        self._reader.close()

    def _sample_schemas(self, number: int) -> Schemas:
        batch_spec, view = self._batch_spec, self._view
        if batch_spec.transform is None:
            return Schemas(batch_spec.sample_schema(view))
        chunk = self.index_planner.chunk_of(number)
        if self._check_shards is not None:
            self._check_shards(chunk.covered(slice(0, 1))[1])
        sample = self._transformed.sample(chunk, 0)
        try:
            stored = Schema({name: view.dataset.schema[name] for name in batch_spec.fields})
            source = audio_schema(view.sample_schema(stored), batch_spec.audio)
            schema = batch_spec.collation.relax_shapes(infer_schema(sample, source))
            # If the sample has no image in an optional field, the inferred schema lacks the size of
            # the images in this field.
            schema = image_schema(schema, batch_spec.pictures)
            heap_bytes = estimate_heap_bytes(sample, schema, batch_spec.block_rows)
            return Schemas(schema, heap_bytes=heap_bytes)
        except SchemaError as error:
            raise error_at(error, self._transformed.location(chunk, 0)) from None

    def schemas(self, number: int = 0) -> Schemas:
        """Return the schemas of samples and, if there are batch functions, of their results.

        The batch functions run on the first batch of epoch 0, with a full shuffle or in the order
        of the view. If samples may be skipped, they run on copies of sample `number` instead.
        """
        with refuse_pictures_as_arrays():
            return self._schemas(number)

    def _schemas(self, number: int) -> Schemas:
        batch_spec = self._batch_spec
        found = self._sample_schemas(number)
        if not batch_spec.makes_batches:
            return found
        n_rows = batch_spec.block_rows
        if batch_spec.skips:
            chunk, part = self.index_planner.chunk_of(number), slice(0, 1)
        else:
            partition = RankPartition(batch_spec.n_samples, 0, n_rows, tail="pad")
            plan = EpochPlan(
                0, partition, FullShuffle() if batch_spec.is_full_shuffle else Sequential()
            )
            chunk, part = self.index_planner.index_chunk(plan, 0)
        states = np.empty(part.stop - part.start, np.int32)
        layout = batch_spec.lay_out(found)
        rows = BatchRows(layout, Scratch(layout), chunk, part, states, n_rows)
        return self._batches.first(found.samples, rows, self.fill_rows)

    def fill(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        plan: EpochPlan,
        step: int,
        row_by_row: RowByRow | None = None,
    ) -> tuple[int, int]:
        """Fill a block; return the number of rows, and the used bytes of the heap.

        If `row_by_row` is given, it fills the rows instead of `fill_rows`.
        """
        chunk, part = self.index_planner.index_chunk(plan, step)
        self._readahead.prefetch(plan, step, chunk, part)
        n_read, partition = part.stop - part.start, plan.partition
        views = memory.views
        if views is None:
            views = memory.views = layout.views(memory.bytes)
        origins, states, _ = views
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
            start, stop = partition.own_range(step)
            if stop - start < layout.n_rows:
                layout.pad(memory.bytes, n_read, stop - start)
        return n_rows, heap

    def fill_rows(self, batch: BatchRows) -> int:
        """Fill the first rows of a block with samples; return the bytes used in the heap."""
        if self._check_shards is not None:
            self._check_shards(batch.chunk.covered(batch.part)[1])
        if self._batch_spec.transform is None:
            return self._reader.fill(batch)
        return self._transformed.fill(batch)


ATTEMPTS: Final = 32
"""The maximum number of substitutes for a row. If half of all samples fail, 1 row in 4e9 has none.
"""

_MAX_CHARACTERS: Final = 4000
_EMPTY: Final = pack_state(NO_FIELD, EMPTY)

SamplesToSkip = Mapping[int, Mapping[int, str]]
"""Samples to skip: for each row of the batch, {index of the sample in the view: reason}."""


def may_skip(error: BaseException) -> bool:
    """Return True if `error` is caused by the sample, not by lack of memory or a changed file."""
    if isinstance(error, TransformError):
        return not isinstance(error.__cause__, MemoryError)
    # An OSError can only occur if files are not mapped. In a mapped file, EIO crashes the worker.
    if isinstance(error, OSError):
        return error.errno == errno.EIO
    return isinstance(error, ShardCorrupt | MediaError) and not isinstance(error, ShardChanged)


class RowByRowFiller:
    """A filler that replaces each failing sample with another sample. Borrows `filler`."""

    def __init__(self, filler: Filler, seed: int) -> None:
        self._filler, self._seed = filler, seed

    def fill(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        plan: EpochPlan,
        step: int,
        to_skip: SamplesToSkip | None = None,
    ) -> tuple[int, int, tuple[Skipped, ...]]:
        """Fill a block; return the number of rows, the used heap bytes, and the skipped samples.

        Raise the error of a sample for which no substitute was found. If `to_skip` is None, the
        batch is first filled as a whole. Otherwise, rows are claimed and filled one by one, so that
        a further crash identifies its sample.
        """
        if to_skip is None:
            try:
                return *self._filler.fill(layout, memory, plan, step), ()
            except Exception as error:
                if not may_skip(error):
                    raise
        found: list[Skipped] = []
        fill = functools.partial(self._fill_rows, plan, step, to_skip or {}, found)
        n_rows, heap_bytes = self._filler.fill(layout, memory, plan, step, fill)
        start, stop = plan.partition.own_range(step)
        # Row `stop - start` and later rows are padding; samples skipped there do not count.
        skips = tuple(each for each in found if each.row < stop - start)
        states = layout.origins(memory.bytes)["status"]
        for each in skips:
            states[each.row] = SKIPPED
        return n_rows, heap_bytes, skips

    def _fill_rows(
        self,
        plan: EpochPlan,
        step: int,
        to_skip: SamplesToSkip,
        skips: list[Skipped],
        origins: Origins,
        batch: BatchRows,
    ) -> int:
        layout = layout_for_samples(batch.layout.samples, 1)
        one = replace(batch, layout=layout, memory=Scratch(layout), part=slice(0, 1), n_rows=1)
        batch.states[:] = _EMPTY
        used = 0
        for i, position in enumerate(range(*plan.partition.read_range(step))):
            one = replace(one, states=batch.states[i : i + 1])
            skipped = self._fill_row(plan, position, i, to_skip.get(i, {}), origins[i], one)
            if skipped is not None:
                skips.append(skipped)
            used = copy_rows(one, batch, i, used)
        return used

    def _fill_row(
        self,
        plan: EpochPlan,
        position: int,
        i: int,
        to_skip: Mapping[int, str],
        origin: Origins,
        one: BatchRows,
    ) -> Skipped | None:
        """Fill the block of `one` with the sample at `position`, or with a substitute.

        Return the skipped sample, if any. `origin` is the entry of row i in the origin table.
        """
        found: Skipped | None = None
        first: Exception | None = None
        error: Exception | None
        for candidate in self._candidates(plan, position):
            chunk = self._filler.index_planner.chunk_at(plan, np.array([candidate]))
            origin[:] = chunk.origins[0]
            why = to_skip.get(int(origin[0]))
            error = self._try(replace(one, chunk=chunk)) if why is None else WorkerDied(why)
            if error is None:
                return found
            if found is None or first is None:
                index, row, _ = origin.tolist()
                text, shard = truncate_middle(str(error), _MAX_CHARACTERS), int(chunk.shards[0])
                found = Skipped(i, index, shard, row, type(error).__name__, text)
                first = error
        if first is None:
            raise AssertionError("a sample is tried before its substitutes")
        first.add_note(
            f"{ATTEMPTS} substitutes drawn for this sample failed, too, or were drawn twice: "
            "on_error='skip' is meant for single samples, not for a bad dataset or transform"
        )
        try:
            raise first
        finally:
            # Break the reference cycle error -> traceback -> this frame -> error. The cycle would
            # keep all frames of the traceback alive.
            first = error = None

    def _candidates(self, plan: EpochPlan, position: int) -> Iterator[int]:
        """Yield the position itself, and then the positions of its substitutes, each once."""
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
        """Fill the block of `one` with its sample; return the error that the sample causes."""
        try:
            self._filler.fill_rows(one)
        except Exception as error:
            if not may_skip(error):
                raise
            # Without the traceback, there is no reference cycle: the traceback refers to this
            # frame, and this frame refers to the error.
            return error.with_traceback(None)
        finally:
            one.states[:] = _EMPTY
        return None
