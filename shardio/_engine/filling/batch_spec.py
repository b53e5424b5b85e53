"""The specification of batches and of epochs: everything that determines the content of a batch.

A `BatchSpec` is valid for a loader, an `EpochPlan` for one iteration. An `IndexPlanner` computes
the number, row and shard of the samples of many steps at once, with vectorized operations; a batch
takes a slice of the result.

The long tables of main's view of the dataset travel to workers as shared arrays, one copy for all:
the rows of a selection; for clips, the number of frames and the events of each video; for windows
of tokens, the end of each document and the document in which each window begins.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio._workers.processes.shared_memory import SharedArray
from shardio.batch.collation import DEFAULT_COLLATION, Collation
from shardio.batch.layout import (
    CLAIMED,
    NO_FIELD,
    BlockLayout,
    layout_for_batches,
    layout_for_samples,
    pack_state,
)
from shardio.dataset.dataset import Dataset
from shardio.dataset.external_lists import total_bytes
from shardio.dataset.selection import RowList
from shardio.format.schema import Schema
from shardio.order import Order, Ordering, Samples, Sequential
from shardio.order.partition import RankPartition
from shardio.order.permutation import CHUNK, OF_SOUNDS, derive_key, keyed_hashes
from shardio.samples.clips import ClipDraws, ClipSpec, draw_clips
from shardio.samples.media import AudioField, AudioSpec, common_sizes, image_schema
from shardio.samples.mixture import Mixture, MixtureSpec
from shardio.shard.verification import Rows, Verify
from shardio.storage.file_access import Access
from shardio.storage.remote.options import RemoteOptions
from shardio.views.clips import Clips, Events
from shardio.views.packing import Packing


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The options that determine the content of a batch; sent to each worker once.

    `transform` and `batch_transform` are functions of the user; `takes_rng` is True if `transform`
    takes a generator. `n_samples` is the number of samples of the view, in `generation` and
    `subset` of the dataset. `block_rows` is the maximum number of samples in a block. `skips` is
    True if a failed sample is replaced by another. `mixed` has the arguments that open several
    datasets instead of one; `path` is then only for messages. `pictures` names the fields to
    decode. `cut` specifies the clips of videos, `audio_spec` the decoding of audio, `packing` the
    windows of tokens, and `remote` the options of a dataset in an object store.
    """

    path: str
    fields: tuple[str, ...]
    block_rows: int
    n_samples: int
    shuffle: bool
    seed: int
    verify: Verify
    access: Access
    transform: Callable[..., Any] | None
    takes_rng: bool
    subset: str | None = None
    generation: int | None = None
    skips: bool = False
    collation: Collation = DEFAULT_COLLATION
    batch_transform: Callable[..., Any] | None = None
    batch_takes_rng: bool = False
    mixed: MixtureSpec | None = None
    pictures: tuple[str, ...] = ()
    cut: ClipSpec | None = None
    audio_spec: AudioSpec | None = None
    packing: Packing | None = None
    remote: RemoteOptions | None = None

    @property
    def n_selected(self) -> int:
        """The number of rows that the main process sends, if the dataset is a selection."""
        if self.mixed is not None:
            return self.mixed.n_selected
        if self.packing is not None:
            return self.packing.n_documents
        return self.n_samples if self.cut is None else self.cut.n_videos

    @property
    def heard(self) -> tuple[AudioField, ...]:
        """The fields whose audio is decoded."""
        return () if self.audio_spec is None else self.audio_spec.fields

    @property
    def makes_batches(self) -> bool:
        """True if a user function transforms whole batches."""
        return self.batch_transform is not None or self.collation.function is not None

    @property
    def runs_user_code(self) -> bool:
        """True if any user function runs in the workers."""
        return self.transform is not None or self.makes_batches

    def delivered(self, dataset: Dataset) -> Schema:
        """Return the schema of samples without a transform: the stored or decoded fields.

        Raises:
            ShardCorrupt: the index entries with the sizes of pictures are damaged.
        """
        found = Schema({name: dataset.schema[name] for name in self.fields})
        if self.packing is not None:
            return self.packing.pack.delivered(found)
        if self.cut is not None:
            found = self.cut.delivered(found)
        if self.audio_spec is not None:
            found = self.audio_spec.delivered(found)
        return image_schema(found, common_sizes(dataset, self.pictures)) if self.pictures else found

    def lay_out(self, schemas: Schemas) -> BlockLayout:
        """Return the layout of batches in blocks.

        Raises:
            InvalidArgument: the collation does not fit the samples.
        """
        samples = schemas.samples
        layout = layout_for_samples(samples, self.block_rows, self.collation)
        decoded_ones = {*self.pictures, *(field.name for field in self.heard)}
        of_values = any(slot.join.name in decoded_ones for slot in layout.joins)
        if layout.joins and (of_values or self.transform is not None):
            # Values are computed sample by sample, and collated afterwards.
            layout = replace(layout, inner=layout_for_samples(samples, self.block_rows))
        if schemas.batch is None:
            return layout
        return layout_for_batches(schemas.batch, schemas.whole, layout)


class Schemas(NamedTuple):
    """The schema of samples, and the schema of batches made by the user's batch functions.

    `batch` is None without a batch function. `whole` names its fields that are arrays of the whole
    batch; the others are lists. `heap_bytes` is the size of a batch in the heap, estimated from the
    first sample or batch.
    """

    samples: Schema
    batch: Schema | None = None
    whole: frozenset[str] = frozenset()
    heap_bytes: int = 0

    def pack(self) -> bytes:
        """Return the schemas as bytes, for messages between the main process and workers."""
        batch = None if self.batch is None else self.batch.to_json()
        return pickle.dumps((self.samples.to_json(), batch, self.whole, self.heap_bytes))

    @classmethod
    def unpack(cls, packed: bytes) -> Schemas:
        """Unpack schemas from a message of this loader's processes, never from stored data."""
        samples, batch, whole, heap_bytes = pickle.loads(packed)
        made = None if batch is None else Schema.from_json(batch)
        return cls(Schema.from_json(samples), made, whole, heap_bytes)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The samples of one iteration; sent to a worker before its first task of the iteration.

    `tokens` has the number of tokens of each source, if the last tokens are padded to a window.
    """

    epoch: int
    partition: RankPartition
    order: Order = Sequential()
    tokens: tuple[int, ...] | None = None


def shared_tables(dataset: Dataset) -> tuple[SharedArray, ...]:
    """Move the tables of a dataset's view that are not in its BatchSpec into memory files.

    Raises:
        InsufficientMemory: the memory is not available.
    """
    tables, rows = [], dataset.rows
    if rows.row_list is not None:
        selection = SharedArray.of(rows.row_list.every(), "the rows of a selection")
        rows.set_rows(RowList(selection.array))
        tables.append(selection)
    if rows.clips is not None:
        n_frames = SharedArray.of(rows.clips.n_frames, "how many frames each video has")
        rows.clips.n_frames = n_frames.array
        tables.append(n_frames)
        if rows.clips.events is not None:
            counts, values = rows.clips.events
            shared = SharedArray.of(counts, "how many events each video has")
            events = SharedArray.of(values, "the events of videos")
            rows.clips.events = Events(shared.array, events.array)
            tables += [shared, events]
    if rows.packed is not None:
        ends = SharedArray.of(rows.packed.ends, "where each document ends")
        firsts = SharedArray.of(rows.packed.firsts, "which document each window begins in")
        rows.packed.ends, rows.packed.firsts = ends.array, firsts.array
        tables += [ends, firsts]
    return tuple(tables)


def apply_view(dataset: Dataset, batch_spec: BatchSpec, fds: Sequence[int]) -> None:
    """Apply the main process's view to a worker's dataset; take ownership of the tables' `fds`."""
    left = list(fds)
    if batch_spec.packing is not None:
        firsts = SharedArray.received(left.pop(), "<i8", batch_spec.n_samples)
        ends = SharedArray.received(left.pop(), "<i8", batch_spec.packing.n_documents)
        dataset.rows.set_windows(batch_spec.packing.pack, ends.array, firsts.array)
    if batch_spec.cut is not None:
        events = None
        if batch_spec.cut.events is not None:
            values = SharedArray.received(left.pop(), *batch_spec.cut.events)
            counts = SharedArray.received(left.pop(), "<i8", batch_spec.cut.n_videos)
            events = Events(counts.array, values.array)
        n_frames = SharedArray.received(left.pop(), "<i8", batch_spec.cut.n_videos)
        dataset.rows.set_clips(Clips(batch_spec.cut.clip, n_frames.array, events))
    if left:
        selection = SharedArray.received(left.pop(), "<i8", batch_spec.n_selected)
        dataset.rows.set_rows(RowList(selection.array))


_STATE_SHIFT: Final = 32


class Keys(NamedTuple):
    """The keys of some samples' random draws: seed, epoch, and positions in the epoch."""

    seed: int
    epoch: int
    positions: Rows


class IndexChunk:
    """The samples of some steps of an iteration; the arrays are read-only.

    The steps are `first` to `last` - 1. For each of their `n` samples, `numbers` has the number in
    the view, `rows` the row in the dataset, `shards` the number of the shard, and `origins` (n, 3)
    the row of a block's origin table, where no field is claimed yet. `keys` are the keys of the
    samples' random draws, `tokens` the plan's token counts.
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
        """Return the shards that contain the samples of a part."""
        if self._dataset.rows.packed is None:
            return self.shards[part]
        return self._dataset.locate(self._dataset.rows.covered_rows(self.origins[part, 0]))

    def slots(self, name: str) -> Rows:
        """Return the location of each sample's row of a column, for `ColumnGather.gather`."""
        found = self._slots.get(name)
        if found is None:
            found = self._dataset.gather(name).place(self.rows, self.shards)
            self._slots[name] = found
        return found

    @cached_property
    def cuts(self) -> ClipDraws:
        """Return the start and crop of each sample's clip."""
        clips = self._dataset.rows.clips
        if clips is None:
            raise AssertionError("a batch spec with clips is for a dataset that shows its clips")
        seed, epoch, positions = self._keys
        return draw_clips(clips, self.origins[:, 0], positions, seed=seed, epoch=epoch)

    def sound_starts(self, part: slice, *, is_drawn: bool) -> list[int]:
        """Return, for each sample, the start of its clip, else a random number, else 0.

        It determines the start of the sample's audio.
        """
        if self._dataset.rows.clips is not None:
            found: list[int] = self.cuts.starts[part].tolist()
            return found
        return self._sound_draws[part].tolist() if is_drawn else [0] * (part.stop - part.start)

    @cached_property
    def _sound_draws(self) -> npt.NDArray[np.uint64]:
        """Return 64 random bits for each sample."""
        seed, epoch, positions = self._keys
        return keyed_hashes(positions, derive_key(OF_SOUNDS, seed, epoch))


def samples_of(dataset: Dataset) -> Samples:
    """Return the samples of a dataset, for an order."""
    rows, is_mixture = dataset.rows, isinstance(dataset, Mixture)

    def why_unsharded() -> str | None:
        if is_mixture:
            return "a mixture has those of several datasets"
        if rows.row_list is not None and not rows.row_list.ascends:
            return "those of this selection are in another order; sort the rows given to select()"
        if rows.packed is not None:
            return "a window of tokens may begin in one shard and end in another"
        if rows.clip_grouping is not None:
            return "per_video keeps the clips of a video together"
        return None

    def measure() -> tuple[int, int]:
        n_bytes, n_samples = total_bytes(dataset.shards), int(dataset.starts[-1])
        if rows.clips is not None or rows.packed is not None:
            # Estimated as if all rows had as many samples as the selected ones.
            n_samples = max(1, n_samples * len(dataset) // max(1, rows.n_rows))
        return n_bytes, n_samples

    return Samples(
        path=dataset.path,
        n=len(dataset),
        is_mixture=is_mixture,
        clip_grouping=rows.clip_grouping,
        shard_ends=lambda: rows.shard_ends,
        why_unsharded=why_unsharded,
        measure=measure,
    )


class IndexPlanner:
    """A planner of the samples of each step; it caches the latest chunks.

    If `n_workers` share the steps of an iteration, each worker usually fills every n-th step, and a
    chunk has only these steps.
    """

    def __init__(self, dataset: Dataset, *, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self.n_workers = 1
        """The number of workers that share the steps of an iteration."""
        self._plan: EpochPlan | None = None
        self._order: Ordering
        self._chunks: dict[int, IndexChunk] = {}

    def index_chunk(self, plan: EpochPlan, step: int) -> tuple[IndexChunk, slice]:
        """Return a chunk with the samples of a step, and their slice of the chunk."""
        partition, n_workers = plan.partition, self.n_workers
        if plan is not self._plan:
            self._plan = None  # first: Ctrl-C must not leave chunks of another iteration behind
            self._chunks, self._order = {}, self._order_of(plan)
            self._plan = plan
        found = self._chunks.get(step % n_workers)
        if found is None or not found.first <= step < found.last:
            found = self._chunks[step % n_workers] = self._compute_chunk(plan, step)
        n_whole = partition.batch_size
        start = (step - found.first) // n_workers * n_whole
        return found, slice(start, min(start + n_whole, found.n))  # the last one may have fewer

    def at(self, plan: EpochPlan, positions: Rows) -> IndexChunk:
        """Return a chunk of the samples at some positions of an iteration."""
        order = self._order if plan is self._plan else self._order_of(plan)
        keys = Keys(self._seed, plan.epoch, positions)
        return IndexChunk(self._dataset, 0, 1, order.at(positions), keys, plan.tokens)

    def first(self, number: int) -> IndexChunk:
        """Return a chunk with sample `number` of the view, with the keys of epoch 0."""
        numbers = np.array([number])
        return IndexChunk(self._dataset, 0, 1, numbers, Keys(self._seed, 0, numbers))

    @cached_property
    def _samples(self) -> Samples:
        # Computed late, because a worker's dataset gets its view after it is opened.
        return samples_of(self._dataset)

    def _order_of(self, plan: EpochPlan) -> Ordering:
        n, epoch = plan.partition.n, plan.epoch
        return plan.order.arrange(self._samples, n, seed=self._seed, epoch=epoch)

    def _compute_chunk(self, plan: EpochPlan, step: int) -> IndexChunk:
        partition, every = plan.partition, self.n_workers
        n_steps = max(1, CHUNK // partition.batch_size) * every
        begin, own = step - step % n_steps, step % every
        first = max(partition.first_step, begin)
        first += (own - first) % every
        last = min(partition.last_step, begin + n_steps)
        positions = partition.positions(first, last, every)
        keys = Keys(self._seed, plan.epoch, positions)
        return IndexChunk(self._dataset, first, last, self._order.at(positions), keys, plan.tokens)
