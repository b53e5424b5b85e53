"""Read stored fields: one value for a single sample, or the values of a whole batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing, cached_property
from shardio._workers.processes.blocks import BlockMap
from shardio.batch.layout import (
    CLAIMED,
    NO_FIELD,
    BlockLayout,
    BlockViews,
    FixedSlot,
    PresenceSlot,
    VaryingSlot,
    pack_state,
)
from shardio.dataset.dataset import Dataset
from shardio.errors import MediaError, ShardCorrupt
from shardio.format.checksum import distinct
from shardio.format.sections import Entries
from shardio.format.types import Array
from shardio.order.permutation import OF_SOUNDS, derive_key, keyed_hashes
from shardio.samples.clips import ClipDraws
from shardio.shard.verification import Rows

if TYPE_CHECKING:
    from shardio.samples.view import SampleView

Bytes = npt.NDArray[np.uint8]
Present = npt.NDArray[np.bool_]
Values = list[npt.NDArray[Any] | None]
"""The values of a field for the rows of a batch, with None for missing values."""

_STATE_SHIFT: Final = 32


class Keys(NamedTuple):
    """The keys of random draws for some samples: seed, epoch, and positions in the epoch."""

    seed: int
    epoch: int
    positions: Rows

    def hashes(self, purpose: int) -> npt.NDArray[np.uint64]:
        """Return 64 random bits for each sample; `purpose` is a random stream, such as OF_CLIPS."""
        return keyed_hashes(self.positions, derive_key(purpose, self.seed, self.epoch))


class IndexChunk:
    """The samples of a view at the indices `numbers`; the arrays are read-only.

    `rows` lists the row of each sample in the dataset, `shards` the shard that contains the row.
    `origins`, (samples, 3), are entries for a block's origin table (see `batch.layout`); each entry
    says that no field is being read yet. `stream_tokens` is passed to `PackedWindows.parts` as
    `n_tokens`.
    """

    def __init__(
        self,
        view: SampleView,
        numbers: Rows,
        keys: Keys,
        stream_tokens: tuple[int, ...] | None = None,
    ) -> None:
        dataset = view.dataset
        self._view, self._dataset = view, dataset
        self.numbers, self.keys, self.stream_tokens = numbers, keys, stream_tokens
        self.rows = view.at(numbers)
        self.shards = dataset.locate(self.rows)
        self.origins: npt.NDArray[np.int64] = np.empty((len(numbers), 3), np.int64)
        self.origins[:, 0] = numbers
        self.origins[:, 1] = self.rows - dataset.shard_starts.take(self.shards)
        self.origins[:, 2] = self.shards + (pack_state(NO_FIELD, CLAIMED) << _STATE_SHIFT)

    @cached_property
    def shard_rows(self) -> list[tuple[int, int]]:
        """The shard of each sample, and the row in the shard."""
        # Convert whole columns: reading two values of one sample from arrays takes 0.5 µs.
        return list(zip(self.shards.tolist(), self.origins[:, 1].tolist(), strict=True))

    @cached_property
    def positions(self) -> list[int]:
        """The position of each sample in the epoch."""
        found: list[int] = self.keys.positions.tolist()
        return found

    def covered(self, part: slice) -> tuple[Rows, Rows]:
        """Return all rows from which a slice of the samples is computed, and each row's shard."""
        if not self._view.spans_rows:
            return self.rows[part], self.shards[part]
        rows = self._view.covered_rows(self.numbers[part])
        return rows, self._dataset.locate(rows)

    @cached_property
    def draws(self) -> ClipDraws | None:
        """The start code and crop of each sample's clip; None if the samples are not clips."""
        return self._view.draws(self.numbers, self.keys)

    @cached_property
    def start_codes(self) -> npt.NDArray[Any]:
        """The start code of each sample's clip; without clips, random bits for audio."""
        return self.keys.hashes(OF_SOUNDS) if self.draws is None else self.draws.start_codes


@dataclass(slots=True, eq=False)
class BatchRows:
    """The rows of one batch in a block, and the samples to write there: `part` of `chunk`.

    `states` holds the status of each sample and the field being read; `n_rows` includes padding.
    A named tuple would be slower to create, and to read.
    """

    layout: BlockLayout
    memory: BlockMap
    chunk: IndexChunk
    part: slice
    states: npt.NDArray[np.int32]
    n_rows: int

    @property
    def n_read(self) -> int:
        """The number of rows without padding."""
        return len(self.states)

    @property
    def views(self) -> BlockViews:
        """The arrays over the block; they are created again after the block has grown."""
        views = self.memory.views
        if views is None:
            views = self.memory.views = self.layout.views(self.memory.bytes)
        return views

    def reserve_values(
        self, slot: VaryingSlot, n_bytes: Rows, used: int, first: int = 0
    ) -> tuple[list[int], int]:
        """Reserve space in the heap for the values of a field in row `first` and later rows.

        `n_bytes` is the size of each value, and `used` the number of heap bytes in use. Return the
        offset of each value, and the new `used`.
        """
        layout, memory = self.layout, self.memory
        taken = -(-n_bytes // slot.alignment) * slot.alignment
        ends = -(-used // slot.alignment) * slot.alignment + np.cumsum(taken)
        starts, total = ends - taken, int(ends[-1])
        # If rows are added one by one, double the heap, because every growth remaps the block.
        if not first or layout.heap + total > len(memory.bytes):
            memory.grow(layout.heap + total, preferred=layout.heap + 2 * total if first else 0)
        extents = layout.extents(memory.bytes, slot)[first : first + len(n_bytes)]
        extents["n_bytes"], extents["offset"] = n_bytes, starts
        return starts.tolist(), total


class FieldSource(Closing):
    """A reader of the stored field `name`, from which it makes the fields `names` of a sample.

    Borrows the dataset. Errors (ShardCorrupt, MediaError) name the sample.
    """

    is_stored: ClassVar[bool] = False
    """True if `SampleReader` reads the stored value, together with those of other fields."""
    is_converted: ClassVar[bool] = False
    """True if samples contain the result of `convert` instead of the value that was read."""

    def __init__(self, dataset: Dataset, name: str, names: tuple[str, ...] = ()) -> None:
        self._dataset, self.name, self.names = dataset, name, names or (name,)

    def read_sample(self, chunk: IndexChunk, k: int) -> dict[str, Any]:
        """Return the fields that are made for sample k of a chunk. Not used if `is_stored`."""
        raise NotImplementedError(f"the field {self.name!r} is read together with others")

    def convert(self, value: Any, chunk: IndexChunk, k: int) -> Any:
        """Return the value for sample k of a chunk, given the stored value."""
        raise NotImplementedError(f"the field {self.name!r} is delivered as stored")

    @abstractmethod
    def fill_fixed(
        self, batch: BatchRows, slot: FixedSlot, out: Bytes, present: Present | None
    ) -> None:
        """Write a field of fixed size to `out`, (rows without padding, bytes per row).

        `present` is the mask of the samples that have a value; None if all have.
        """

    def fill_varying(self, batch: BatchRows, slot: VaryingSlot, used: int) -> int:
        """Write a varying field after `used` heap bytes; return the number of bytes then used."""
        raise NotImplementedError(f"the field {slot.name!r} has a fixed size")

    def values(self, batch: BatchRows) -> Values:
        """Return the stored arrays of varying shape; uncompressed arrays are views of the file."""
        raise NotImplementedError(f"the arrays of field {self.name!r} are not collated as stored")

    def present(self, batch: BatchRows, slot: PresenceSlot) -> Present:
        """Write the mask of the samples that have a value, and return it."""
        out = batch.layout.present(batch.memory.bytes, slot)
        for shard, batch_rows, local in self._by_shard(batch):
            out[batch_rows] = self._dataset.files.reader(shard, self.name).present(self.name, local)
        return out[: batch.n_read]

    def _by_shard(self, batch: BatchRows) -> Iterator[tuple[int, Rows, Rows]]:
        """Yield each shard of a batch, with its samples' rows in the batch and in the shard."""
        rows, shards = batch.chunk.rows[batch.part], batch.chunk.shards[batch.part]
        for shard in distinct(shards).tolist():
            batch_rows = np.flatnonzero(shards == shard)
            yield shard, batch_rows, rows[batch_rows] - self._dataset.shard_starts[shard]

    def _media_error(self, what: object, shard: int, row: int) -> MediaError:
        path = self._dataset.files.reader(shard, self.name).path
        return MediaError(f"{path}, field {self.name!r}, sample {row}: {what}")

    def close(self) -> None:
        """Release decoders and files. Idempotent."""


class ColumnSource(FieldSource):
    """A source of a column. The values of a batch are gathered in one operation."""

    is_stored = True

    def fill_fixed(
        self, batch: BatchRows, slot: FixedSlot, out: Bytes, present: Present | None
    ) -> None:
        """Gather the values."""
        chunk, part = batch.chunk, batch.part
        self._dataset.gather(self.name).gather(chunk.rows[part], chunk.shards[part], out)
        if present is not None:  # do not rely on zeros for missing values in the file
            out[~present] = 0


class RecordSource(FieldSource):
    """A source of a record field; records are copied or decompressed one by one."""

    is_stored = True

    def fill_fixed(
        self, batch: BatchRows, slot: FixedSlot, out: Bytes, present: Present | None
    ) -> None:
        """Decompress arrays of fixed shape."""
        for batch_row, _, _, record in self._records(batch):
            out[batch_row] = 0 if record is None else np.frombuffer(record, np.uint8)

    def _records(
        self, batch: BatchRows
    ) -> Iterator[tuple[int, int, int, bytes | memoryview | None]]:
        """Yield (row in the batch, shard, row in the shard, record or None if it is missing)."""
        for shard, batch_rows, local in self._by_shard(batch):
            records = self._dataset.files.reader(shard, self.name).records
            entries = records.entries(self.name, local)
            absent = records.absent(self.name, local, entries)
            columns = batch_rows.tolist(), local.tolist(), records.read(self.name, local, entries)
            for i, (batch_row, row, record) in enumerate(zip(*columns, strict=True)):
                yield batch_row, shard, row, None if i in absent else record

    def fill_varying(self, batch: BatchRows, slot: VaryingSlot, used: int) -> int:
        """Copy the records."""
        name, files, layout, memory = self.name, self._dataset.files, batch.layout, batch.memory
        by_shard: list[tuple[int, Rows, Rows, Entries]] = []
        n_bytes = np.zeros(batch.n_read, np.int64)
        for shard, batch_rows, local in self._by_shard(batch):
            entries = files.reader(shard, name).records.entries(name, local)
            n_bytes[batch_rows] = entries["n_bytes"]
            by_shard.append((shard, batch_rows, local, entries))
        starts, total = batch.reserve_values(slot, n_bytes, used)
        heap, array = memory.bytes[layout.heap :].data, self._dataset.schema[name].array
        for shard, batch_rows, local, entries in by_shard:
            if array is not None:
                shapes = layout.shapes(memory.bytes, slot)
                found = self._arrays(array, shard, local, entries)
                for batch_row, (record, shape) in zip(batch_rows.tolist(), found, strict=True):
                    start = starts[batch_row]
                    heap[start : start + len(record)] = record
                    shapes[batch_row] = 0 if shape is None else shape
                continue
            records = files.reader(shard, name).records
            records.absent(name, local, entries)  # raises if a missing value has a record
            for batch_row, record in zip(
                batch_rows.tolist(), records.read(name, local, entries), strict=True
            ):
                start = starts[batch_row]
                heap[start : start + len(record)] = record
        return total

    def values(self, batch: BatchRows) -> Values:
        """Return the stored arrays."""
        name, array = self.name, self._dataset.schema[self.name].array
        values: Values = [None] * batch.n_read
        if array is None:
            raise AssertionError("only arrays are collated")
        for shard, batch_rows, local in self._by_shard(batch):
            entries = self._dataset.files.reader(shard, name).records.entries(name, local)
            found = self._arrays(array, shard, local, entries)
            for batch_row, (record, shape) in zip(batch_rows.tolist(), found, strict=True):
                if shape is not None:
                    values[batch_row] = np.frombuffer(record, array.numpy).reshape(shape)
        return values

    def _arrays(
        self, array: Array, shard: int, local: Rows, entries: Entries
    ) -> Iterator[tuple[bytes | memoryview, tuple[int, ...] | None]]:
        """Yield the record of each row, and the shape of its array: None for a missing array."""
        records = self._dataset.files.reader(shard, self.name).records
        dims = records.shapes(self.name, local)
        absent = records.absent(self.name, local, entries)
        for i, record in enumerate(records.read(self.name, local, entries)):
            if i in absent:
                yield record, None
                continue
            try:
                shape = array.shape_of(dims[i], len(record))
            except ShardCorrupt as error:
                offset = records.offset + int(entries["offset"][i])
                records.add_location(error, self.name, int(local[i]), offset)
                raise
            yield record, shape


class SampleReader(Closing):
    """A reader of samples, one by one or into a block. Owns `sources`, in the order of fields."""

    def __init__(self, dataset: Dataset, sources: Sequence[FieldSource]) -> None:
        self._dataset, self._sources = dataset, sources
        self._stored = [each.name for each in sources if each.is_stored]
        self._converted = [each for each in sources if each.is_converted]
        self._others = [each for each in sources if not each.is_stored]
        self.names = [name for each in sources for name in each.names]
        """The fields of a sample."""
        self._by_name = {name: each for each in sources for name in each.names}
        self._claims = {
            name: pack_state(i, CLAIMED) for i, each in enumerate(sources) for name in each.names
        }

    def has_stored_values(self, name: str) -> bool:
        """Return True if samples have a field's values as stored, neither decoded nor computed."""
        source = self._by_name[name]
        return source.is_stored and not source.is_converted

    def read(self, chunk: IndexChunk, k: int) -> dict[str, Any]:
        """Return sample k of a chunk, with its fields in the order of the sources."""
        shard, row = chunk.shard_rows[k]
        # Do not check for truncated files here: `Filler`, in the main process, and
        # `SampleView.sample` have checked the files of the chunk.
        sample = self._dataset.files.sample(shard, row, self._stored, check_truncated=False)
        for source in self._converted:
            sample[source.name] = source.convert(sample[source.name], chunk, k)
        if not self._others:
            return sample
        for source in self._others:
            sample |= source.read_sample(chunk, k)
        return {name: sample[name] for name in self.names}

    def fill(self, batch: BatchRows) -> int:
        """Write all samples of a batch; return the number of heap bytes in use.

        Errors name the sample; after an error, `batch.states` names the field that was being read.
        """
        layout, states, sources, claims = batch.layout, batch.states, self._by_name, self._claims
        n_read, present = len(states), dict[str, Present]()
        for presence in layout.presence:
            name = presence.name
            states[:] = claims[name]
            present[name] = sources[name].present(batch, presence)
        for slot, whole in zip(layout.fixed, batch.views.fixed, strict=True):
            name = slot.name
            states[:] = claims[name]
            out = whole if len(whole) == n_read else whole[:n_read]
            sources[name].fill_fixed(batch, slot, out, present.get(name))
        used = 0
        for varying in layout.varying:
            states[:] = claims[varying.name]
            used = sources[varying.name].fill_varying(batch, varying, used)
        return used

    def values(self, batch: BatchRows, name: str) -> Values:
        """Return the stored arrays of a field for collation. Sets `batch.states` as `fill` does."""
        batch.states[:] = self._claims[name]
        return self._by_name[name].values(batch)

    def close(self) -> None:
        """Close the sources. Idempotent."""
        for source in reversed(self._sources):
            source.close()
