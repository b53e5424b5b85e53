"""Fill a block row by row, to skip only the samples that fail.

Used with on_error="skip", for batches that failed as a whole or crashed a worker. A failing sample
is replaced by the sample at a substitute position, which is a random draw seeded by the position of
the failing sample; other samples stay in their rows. A batch thus remains a pure function of
(dataset, batch spec, plan, step) as long as failures depend on the sample alone.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._engine.filling.batch_spec import EpochPlan, IndexChunk
from shardio._engine.filling.collate import Scratch
from shardio._engine.filling.filler import Filler
from shardio._workers.processes.blocks import BlockMap
from shardio.batch.batch import Skipped
from shardio.batch.layout import (
    EMPTY,
    NO_FIELD,
    SKIPPED,
    BlockLayout,
    layout_for_samples,
    pack_state,
)
from shardio.errors import MediaError, ShardChanged, ShardCorrupt, TransformError, WorkerDied
from shardio.order.permutation import substitute_position

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
    """A filler that skips the samples at which `filler` fails.

    Args:
        filler: the filler; borrowed.
        seed: the seed of the loader.
    """

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

        Args:
            layout, memory: the block and its layout.
            plan, step: the batch.
            left_out: samples to skip because workers have crashed at them. If this is not None,
                even if it is empty, rows are claimed one by one, so that another crash identifies
                the sample.

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
        return self._fill_rows(layout, memory, plan, step, left_out or {})

    def _fill_rows(
        self, layout: BlockLayout, memory: BlockMap, plan: EpochPlan, step: int, left_out: LeftOut
    ) -> tuple[int, int, tuple[Skipped, ...]]:
        scratch = Scratch(layout_for_samples(layout.samples, 1))
        rows = _Rows(self._filler, self._seed, plan, step, scratch, left_out)
        n_rows, heap_bytes = self._filler.fill(layout, memory, plan, step, rows.fill)
        start, stop = plan.partition.share(step)
        # Skips in later rows belong to padding, and are not reported.
        skips = tuple(each for each in rows.skips if each.row < stop - start)
        states = layout.origins(memory.bytes)["status"]
        for each in skips:
            states[each.row] = SKIPPED
        return n_rows, heap_bytes, skips


class _Rows:
    """The rows of one batch, filled one after another."""

    def __init__(
        self,
        filler: Filler,
        seed: int,
        plan: EpochPlan,
        step: int,
        scratch: Scratch,
        left_out: LeftOut,
    ) -> None:
        self._filler, self._seed, self._plan, self._step = filler, seed, plan, step
        self._scratch, self._left_out = scratch, left_out
        self.skips: list[Skipped] = []
        """The skipped samples, in the order of their rows."""

    def fill(
        self,
        origins: npt.NDArray[np.int64],
        layout: BlockLayout,
        memory: BlockMap,
        states: npt.NDArray[np.int32],
    ) -> int:
        """Fill the rows of the batch, without padding; return the used bytes of the heap.

        `origins` is the batch's origin table, `states` its status column.
        """
        states[:] = _EMPTY
        used = 0
        for i, position in enumerate(range(*self._plan.partition.read(self._step))):
            skipped = self._find(i, position, origins[i], states[i : i + 1])
            if skipped is not None:
                self.skips.append(skipped)
            used = _copy_row(self._scratch, layout, memory, i, used)
        return used

    def _find(
        self,
        i: int,
        position: int,
        origin: npt.NDArray[np.int64],
        state: npt.NDArray[np.int32],
    ) -> Skipped | None:
        """Fill the scratch block with the sample at a position or, if it fails, with a substitute.

        Return the skipped sample, or None if no sample failed.
        """
        found: Skipped | None = None
        first: Exception | None = None
        error: Exception | None
        for candidate in self._candidates(position):
            index_chunk = self._filler.sample_at(self._plan, candidate)
            origin[:] = index_chunk.origins[0]
            why = self._left_out.get(i, {}).get(int(origin[0]))
            error = WorkerDied(why) if why is not None else self._try(index_chunk, candidate, state)
            if error is None:
                return found
            if found is None or first is None:
                index, row, _ = origin.tolist()
                text = shortened(str(error))
                shard = int(index_chunk.shards[0])
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

    def _candidates(self, position: int) -> Iterator[int]:
        """Yield the position itself, then the positions of its substitutes, each once."""
        yield position
        tried = {position}
        plan = self._plan
        for attempt in range(ATTEMPTS):
            n, epoch = plan.partition.n, plan.epoch
            found = substitute_position(
                n, seed=self._seed, epoch=epoch, position=position, attempt=attempt
            )
            if found not in tried:
                tried.add(found)
                yield found

    def _try(
        self, index_chunk: IndexChunk, position: int, state: npt.NDArray[np.int32]
    ) -> Exception | None:
        """Fill the scratch block with a sample, claimed meanwhile; return its error or None.

        Raises:
            Exception: an error that the sample did not cause.
        """
        scratch, part, epoch = self._scratch, slice(0, 1), self._plan.epoch
        try:
            self._filler.fill_rows(
                scratch.layout, scratch, index_chunk, part, state, epoch, position
            )
        except Exception as error:
            if not may_skip(error):
                raise
            # Drop the traceback: it refers to this frame, and the frame to the error.
            return error.with_traceback(None)
        finally:
            state[:] = _EMPTY
        return None


def _copy_row(scratch: Scratch, layout: BlockLayout, memory: BlockMap, i: int, used: int) -> int:
    """Copy the sample in a scratch block to row i of a block.

    `used` and the return value are the used bytes of the block's heap before and after.
    """
    lone = scratch.layout
    for fixed, source in zip(layout.fixed, lone.fixed, strict=True):
        value = lone.fixed_rows(scratch.bytes, source, 1)[0]
        layout.fixed_rows(memory.bytes, fixed, layout.n_rows)[i] = value
    for presence, its_presence in zip(layout.presence, lone.presence, strict=True):
        is_present = lone.present(scratch.bytes, its_presence)[0]
        layout.present(memory.bytes, presence)[i] = is_present
    for varying, its_varying in zip(layout.varying, lone.varying, strict=True):
        offset, n_bytes, place = lone.extents(scratch.bytes, its_varying)[0].tolist()
        start = -(-used // varying.alignment) * varying.alignment
        used = start + n_bytes
        if layout.heap + used > len(memory.bytes):
            memory.grow(layout.heap + 2 * used)  # doubled, because every growth remaps the block
        from_, to = lone.heap + place, layout.heap + start
        memory.bytes[to : to + n_bytes] = scratch.bytes[from_ : from_ + n_bytes]
        layout.extents(memory.bytes, varying)[i] = (offset, n_bytes, start)
        if varying.n_dims:
            shape = lone.shapes(scratch.bytes, its_varying)[0]
            layout.shapes(memory.bytes, varying)[i] = shape
    return used
