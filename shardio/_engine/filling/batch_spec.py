"""The specification of batches and of epochs: everything that determines the content of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardio._base.classes import cached_property
from shardio._workers.processes.shared_memory import SharedArray
from shardio.batch.batch import BatchSource
from shardio.batch.collation import DEFAULT_COLLATION, Collation
from shardio.batch.layout import BlockLayout, layout_for_batches, layout_for_samples
from shardio.dataset.dataset import Dataset
from shardio.dataset.open_files import ShardPaths
from shardio.dataset.selection import RowList
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.format.types import Array
from shardio.order import EpochOrder, Order, Samples, Sequential
from shardio.order.permutation import CHUNK
from shardio.order.ranks import RankPartition
from shardio.samples.field_sources import IndexChunk, Keys
from shardio.samples.media import AudioField, audio_schema, common_sizes, image_schema
from shardio.samples.mixture import Mixture, MixtureSpec
from shardio.samples.shard_dataset import DatasetSource
from shardio.samples.view import RowView, SampleView, ViewFactory, restored_view
from shardio.shard.verification import Rows


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The options that determine the content of batches. A loader sends them to each worker once.

    Attributes:
        source: a description of the dataset, from which a worker opens the dataset.
        pictures: the image fields that are decoded.
        audio: the audio fields that are decoded, each with the format of the decoded audio.
        block_rows: the maximum number of samples in a block.
        skips: True if a sample that fails is replaced by another sample.
        make_view: a function that creates the view from the dataset and the view's tables.
        tables: the dtype and the length of each table (an array of numbers) of the view.
        n_selected: the number of selected rows; None if the dataset is not a selection.
        channels_first: the fields of pictures if batches deliver the channels before height and
            width; None if batches deliver the axes in the order in which blocks have them.
    """

    source: DatasetSource | MixtureSpec
    fields: tuple[str, ...]
    block_rows: int
    n_samples: int
    is_full_shuffle: bool
    seed: int
    transform: Callable[..., Any] | None = None
    batch_transform: Callable[..., Any] | None = None
    collation: Collation = DEFAULT_COLLATION
    skips: bool = False
    pictures: tuple[str, ...] = ()
    audio: Mapping[str, AudioField] = field(default_factory=dict)
    make_view: ViewFactory = partial(restored_view, RowView, ())
    tables: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    n_selected: int | None = None
    channels_first: frozenset[str] | None = None

    @property
    def path(self) -> str:
        return self.source.shown_path or self.source.path

    @property
    def makes_batches(self) -> bool:
        return self.batch_transform is not None or self.collation.function is not None

    @property
    def runs_user_code(self) -> bool:
        return self.transform is not None or self.makes_batches

    def sample_schema(self, view: SampleView) -> Schema:
        """Return the schema of samples before they are transformed, with decoded media."""
        stored = Schema({name: view.dataset.schema[name] for name in self.fields})
        found = audio_schema(view.sample_schema(stored), self.audio)
        sizes = common_sizes(view.dataset, self.pictures, len(view), view.at)
        return image_schema(found, self.pictures, sizes)

    def lay_out(self, schemas: Schemas) -> BlockLayout:
        samples = schemas.samples
        rows, stored = self.block_rows, self.fields
        layout = layout_for_samples(samples, rows, self.collation, stored=stored)
        decoded = {*self.pictures, *self.audio}
        joins_decoded = any(slot.join.name in decoded for slot in layout.joins)
        if layout.joins and (joins_decoded or self.transform is not None):
            # Decoded or transformed values are computed sample by sample. They are first written to
            # a block with the layout `inner`, and collated afterwards.
            layout = replace(layout, inner=layout_for_samples(samples, rows, stored=stored))
        if schemas.batch is not None:
            layout = layout_for_batches(schemas.batch, schemas.whole, layout)
        return layout if self.channels_first is None else self._lay_channels_first(layout)

    def _lay_channels_first(self, layout: BlockLayout) -> BlockLayout:
        """Return the layout with `channels_first` set: the fields of pictures, and their masks."""
        found, whole = set(), {slot.name for slot in layout.whole}
        for name, kind in layout.schema.items():
            if (array := kind.array) is not None:
                n_dims = len(array.shape) - (name in whole)
                is_known = name in (self.channels_first or ()) and n_dims in (3, 4)
                if is_known or is_picture(array):
                    found.add(name)
        for slot in layout.joins + (layout.inner.joins if layout.inner else ()):
            name, rule, array, _ = slot.join
            if name not in (self.channels_first or ()) and not is_picture(array):
                continue
            if rule.kind == "ragged":
                raise InvalidArgument(
                    f"layout='CHW' and collate='ragged' of {name!r} exclude each other, because "
                    "pictures are joined along their height: use 'list' or 'pad'"
                )
            found |= {slot.companion.name} if slot.companion else set()
        return replace(layout, channels_first=frozenset(found))


def is_picture(field: Array) -> bool:
    """Return True for uint8 of (height, width, 3) or (frames, height, width, 3)."""
    return field.dtype == "uint8" and len(field.shape) in (3, 4) and field.shape[-1] == 3


class Schemas(NamedTuple):
    """The schemas from which the layout of batches is computed."""

    samples: Schema
    batch: Schema | None = None
    """The schema of the batches that user code returns; None if no user code makes batches."""
    whole: frozenset[str] = frozenset()
    """The fields of `batch` whose value is one array for the whole batch; the others are lists."""
    heap_bytes: int = 0
    """The estimated number of bytes of all variable-size values of a batch."""


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The order of the samples in one iteration.

    `partition` has this rank's positions in the epoch, and `order` maps positions to samples.
    `stream_tokens` has the token count of each source; it is None unless samples are windows of
    tokens and the last window is padded.
    """

    epoch: int
    partition: RankPartition
    order: Order = Sequential()
    stream_tokens: tuple[int, ...] | None = None


def share_view(view: SampleView) -> tuple[SampleView, tuple[SharedArray, ...]]:
    """Copy a view's tables into shared arrays; return a view that uses them, and the arrays.

    If the dataset is a selection, the first array is the list of the selected rows.
    """
    shared, rows = [], view.dataset.rows
    if rows.row_list is not None:
        shared.append(SharedArray.from_array(rows.row_list.all_rows(), "the rows of a selection"))
        rows.set_rows(RowList(shared[0].array))
    tables = {name: SharedArray.from_array(*table) for name, table in view.tables().items()}
    arrays = {name: table.array for name, table in tables.items()}
    return view.factory(view.dataset, arrays), (*shared, *tables.values())


def receive_view(dataset: Dataset, batch_spec: BatchSpec, fds: Sequence[int]) -> SampleView:
    """Recreate a view from `fds`, the files of the arrays that `share_view` made; own `fds`."""
    left = list(fds)
    if batch_spec.n_selected is not None:
        selection = SharedArray.from_fd(left.pop(0), "<i8", batch_spec.n_selected)
        dataset.rows.set_rows(RowList(selection.array))
    pairs = zip(batch_spec.tables.items(), left, strict=True)
    tables = {name: SharedArray.from_fd(fd, *shape).array for (name, shape), fd in pairs}
    return batch_spec.make_view(dataset, tables)


def batch_source(dataset: Dataset) -> BatchSource:
    groups = dataset.column_groups.items()
    column_paths = {name: ShardPaths(dataset.path, shards) for name, shards in groups}
    return BatchSource(ShardPaths(dataset.path, dataset.shards), column_paths, dataset.classes)


def samples_of(view: SampleView) -> Samples:
    dataset = view.dataset

    def no_shards_reason() -> str | None:
        if isinstance(dataset, Mixture):
            return "a mixture has those of several datasets"
        return view.no_shards_reason()

    def measure() -> tuple[int, int]:
        n_bytes, n_samples = dataset.shards.n_bytes, int(dataset.shard_starts[-1])
        if not isinstance(view, RowView):
            # The view only has the samples of the selected rows. Assume that other rows have the
            # same number of samples on average.
            n_samples = max(1, n_samples * len(view) // max(1, len(dataset)))
        return n_bytes, n_samples

    return Samples(
        path=dataset.path,
        n=len(view),
        is_mixture=isinstance(dataset, Mixture),
        clip_grouping=view.clip_grouping,
        shard_ends=lambda: view.shard_ends,
        no_shards_reason=no_shards_reason,
        measure=measure,
    )


class IndexPlanner:
    """A planner that computes the samples of each step (batch), and caches the latest chunks.

    A chunk has the samples of many steps of one worker, computed at once. Worker w usually fills
    the steps s with `s % n_workers == w`.
    """

    def __init__(self, view: SampleView, *, seed: int) -> None:
        self._view, self._seed = view, seed
        self.n_workers = 1
        self._plan: EpochPlan | None = None
        self._order: EpochOrder
        self._chunks: dict[int, tuple[int, int, IndexChunk]] = {}
        """For each `step % n_workers`, the latest chunk: (first step, end of steps, chunk)."""

    def index_chunk(self, plan: EpochPlan, step: int) -> tuple[IndexChunk, slice]:
        """Return a chunk that contains the samples of a step, and the slice with these samples."""
        partition, n_workers = plan.partition, self.n_workers
        if plan is not self._plan:
            self._use(plan)
        found = self._chunks.get(step % n_workers)
        if found is None or not found[0] <= step < found[1]:
            found = self._chunks[step % n_workers] = self._compute_chunk(plan, step)
        first, _, chunk = found
        start = (step - first) // n_workers * partition.batch_size
        # The last step of an epoch may have fewer samples than `batch_size`.
        stop = min(start + partition.batch_size, len(chunk.numbers))
        return chunk, slice(start, stop)

    def chunk_at(self, plan: EpochPlan, positions: Rows) -> IndexChunk:
        if plan is not self._plan:
            self._use(plan)
        keys = Keys(self._seed, plan.epoch, positions)
        return IndexChunk(self._view, self._order.at(positions), keys, plan.stream_tokens)

    def chunk_of(self, number: int) -> IndexChunk:
        """Return a chunk with sample `number` of the view, as in epoch 0 without shuffling."""
        numbers = np.array([number])
        return IndexChunk(self._view, numbers, Keys(self._seed, 0, numbers))

    @cached_property
    def _samples(self) -> Samples:
        return samples_of(self._view)

    def _use(self, plan: EpochPlan) -> None:
        self._plan = None  # if Ctrl-C interrupts the next lines, the next call repeats them
        n, epoch = plan.partition.n, plan.epoch
        order = plan.order.arrange(self._samples, n, seed=self._seed, epoch=epoch)
        self._chunks, self._order, self._plan = {}, order, plan

    def _compute_chunk(self, plan: EpochPlan, step: int) -> tuple[int, int, IndexChunk]:
        partition, every = plan.partition, self.n_workers
        n_steps = max(1, CHUNK // partition.batch_size) * every
        begin, own = step - step % n_steps, step % every
        first = max(partition.first_step, begin)
        first += (own - first) % every
        last = min(partition.stop_step, begin + n_steps)
        positions = partition.positions(first, last, every)
        return first, last, self.chunk_at(plan, positions)
