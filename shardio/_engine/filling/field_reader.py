"""Fill a block with stored values, field by field, directly from the shards.

This is the path without a transform. Values of columns are gathered with one operation per column;
records are copied one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._engine.filling.batch_spec import IndexChunk
from shardio._engine.filling.collate import put_value
from shardio._workers.processes.blocks import BlockMap
from shardio.batch.layout import (
    CLAIMED,
    BlockLayout,
    BlockViews,
    FixedSlot,
    PresenceSlot,
    VaryingSlot,
    pack_state,
)
from shardio.dataset.dataset import Dataset
from shardio.errors import ShardCorrupt
from shardio.format.checksum import distinct
from shardio.format.schema import Schema
from shardio.format.sections import Entries
from shardio.samples.sample_reader import SampleReader
from shardio.shard.verification import Rows

Bytes = npt.NDArray[np.uint8]
Present = npt.NDArray[np.bool_]
Samples = npt.NDArray[Any]


class _BatchRows(NamedTuple):
    """A block, and the samples to write to its first rows."""

    layout: BlockLayout
    memory: BlockMap
    index_chunk: IndexChunk
    part: slice
    """The samples' slice of the index chunk."""
    rows: Rows
    """The rows in the dataset."""
    shards: Rows
    """The shard of each row."""


class FieldReader:
    """A reader that copies fields into blocks. Borrows the dataset."""

    def __init__(
        self,
        dataset: Dataset,
        source: Schema,
        reader: SampleReader,
    ) -> None:
        self._dataset, self._source, self._pictures = dataset, source, reader.images
        clips, sounds = reader.clips, reader.sounds
        self._clips, self._sounds, self._packed = clips, sounds, reader.tokens
        self._spans = {} if sounds is None else sounds.spans
        self._gathered = frozenset(source.columns)
        self._claims = {name: pack_state(i, CLAIMED) for i, name in enumerate(source)}
        self._timed = () if clips is None else clips.names[1:]
        if clips is not None:  # the time fields are computed from the video field
            self._claims |= dict.fromkeys(self._timed, self._claims[clips.name])

    def fill(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        views: BlockViews,
        index_chunk: IndexChunk,
        part: slice,
        states: npt.NDArray[np.int32],
    ) -> int:
        """Fill the rows of a batch; return the used bytes of the heap.

        Args:
            layout, memory, views: the block, its layout and its views.
            index_chunk, part: the samples, as a chunk and their slice of it.
            states: the samples' entries in the status column of the origin table; receives the
                field that is being read.

        Raises:
            ShardCorrupt, InsufficientMemory: the message names the sample.
        """
        rows = index_chunk.rows[part]
        batch = _BatchRows(layout, memory, index_chunk, part, rows, index_chunk.shards[part])
        if self._packed is not None:
            states[:] = self._claims[self._packed.name]
            outs = {s.name: layout.fixed_rows(memory.bytes, s, len(rows)) for s in layout.fixed}
            self._packed.fill(outs, index_chunk.numbers, part, index_chunk.tokens)
            return 0
        present = {}
        for presence in layout.presence:
            states[:] = self._claims[presence.name]
            present[presence.name] = self._fill_presence(batch, presence)
        for slot, whole in zip(layout.fixed, views.fixed, strict=True):
            if slot.name in self._spans:
                continue  # filled together with the audio
            states[:] = self._claims[slot.name]
            out = whole if len(whole) == len(rows) else whole[: len(rows)]
            self._fill_fixed(batch, slot, out, present.get(slot.name))
        used = 0
        for varying in layout.varying:
            states[:] = self._claims[varying.name]
            used = self._fill_varying(batch, varying, used)
        return used

    def _by_shard(self, batch: _BatchRows) -> Iterator[tuple[int, Rows, Rows]]:
        """Yield each shard of a batch, with the samples' rows in the batch and in the shard."""
        for shard in distinct(batch.shards).tolist():
            places = np.flatnonzero(batch.shards == shard)
            yield shard, places, batch.rows[places] - self._dataset.starts[shard]

    def _fill_presence(self, batch: _BatchRows, presence: PresenceSlot) -> Present:
        """Write the mask of the samples that have an optional field, and return it."""
        out = batch.layout.present(batch.memory.bytes, presence)
        for shard, places, local in self._by_shard(batch):
            reader = self._dataset.files.reader(shard, presence.name)
            out[places] = reader.present(presence.name, local)
        return out

    def _fill_fixed(
        self, batch: _BatchRows, slot: FixedSlot, out: Bytes, present: Present | None
    ) -> None:
        """Write the values of a field of fixed size."""
        name, rows, shards = slot.name, batch.rows, batch.shards
        index_chunk, part = batch.index_chunk, batch.part
        if name in self._gathered:
            slots = index_chunk.slots(name)[part]
            self._dataset.gather(name).gather(slots, rows, shards, out)
            if present is not None:  # a missing value may have any bytes in the file
                out[~present[: len(out)]] = 0
        elif name in self._pictures.names:
            self._decode_pictures(batch, name, list(out.reshape(-1, *slot.shape)))
        elif self._clips is not None and name == self._clips.name:
            self._clips.fill(out.reshape(-1, *slot.shape), rows, shards, index_chunk.draws, part)
        elif self._clips is not None and name in self._timed:
            times = out.view(np.int64).reshape(-1, *slot.shape)
            self._clips.fill_times(name, times, rows, shards, index_chunk.starts[part])
        elif self._sounds is not None and name in self._sounds.names:
            self._fill_sound(batch, slot)
        else:
            self._decode_fixed(batch, name, out)

    def _fill_varying(self, batch: _BatchRows, slot: VaryingSlot, used: int) -> int:
        """Write the values of a varying field; return the used bytes of the heap."""
        if slot.name in self._pictures.names:
            return self._fill_pictures(batch, slot, used)
        if self._sounds is not None and slot.name in self._sounds.names:
            return self._fill_sounds(batch, slot, used)
        return self._fill_records(batch, slot, used)

    def _decode_fixed(self, batch: _BatchRows, name: str, out: Bytes) -> None:
        """Decompress arrays of fixed shape into their rows."""
        for shard, places, local in self._by_shard(batch):
            reader = self._dataset.files.reader(shard, name)
            entries = reader.records.entries(name, local)
            records = reader.records.read(name, local, entries)
            absent = reader.records.absent(name, local, entries)
            for i, (place, record) in enumerate(zip(places.tolist(), records, strict=True)):
                out[place] = 0 if i in absent else np.frombuffer(record, np.uint8)

    def _decode_pictures(self, batch: _BatchRows, name: str, outs: list[Bytes]) -> None:
        """Decode each picture directly into its output array."""
        for shard, places, local in self._by_shard(batch):
            records = self._dataset.files.reader(shard, name).records
            entries = records.entries(name, local)
            absent = records.absent(name, local, entries)
            found = zip(
                places.tolist(), local.tolist(), records.read(name, local, entries), strict=True
            )
            for i, (place, row, data) in enumerate(found):
                if i in absent:
                    outs[place][...] = 0
                else:
                    self._pictures.decode(data, name, shard, row, outs[place])

    def _fill_pictures(self, batch: _BatchRows, slot: VaryingSlot, used: int) -> int:
        """Write pictures of varying size; return the used bytes of the heap."""
        layout, memory, n = batch.layout, batch.memory, len(batch.rows)
        sizes = np.zeros((n, 3), np.int64)
        for shard, places, local in self._by_shard(batch):
            sizes[places] = self._pictures.shapes(slot.name, shard, local)
        n_bytes = sizes.prod(1)
        starts, total = _placed(n_bytes, used, slot.alignment)
        memory.grow(layout.heap + total)
        extents = layout.extents(memory.bytes, slot)[:n]
        extents["n_bytes"], extents["place"], extents["offset"] = n_bytes, starts, 0
        layout.shapes(memory.bytes, slot)[:n] = sizes
        heap = memory.bytes[layout.heap :]
        outs = [
            heap[start : start + size].reshape(shape)
            for start, size, shape in zip(
                starts.tolist(), n_bytes.tolist(), sizes.tolist(), strict=True
            )
        ]
        self._decode_pictures(batch, slot.name, outs)
        return total

    def _sound(self, batch: _BatchRows, name: str) -> list[Samples | None]:
        """Return the decoded audio of a batch, and write the range of each that is not padding."""
        if self._sounds is None:
            raise AssertionError("the batch spec has no audio")
        layout, memory, index_chunk, part, rows, shards = batch
        starts = index_chunk.starts[part].tolist()
        found = self._sounds.decode(name, rows, shards, starts)
        slot = next(slot for slot in layout.fixed if self._spans.get(slot.name) == name)
        spans = layout.fixed_rows(memory.bytes, slot, len(found))
        spans[:] = [(0, 0) if each is None else each[1] for each in found]
        return [None if each is None else each[0] for each in found]

    def _fill_sound(self, batch: _BatchRows, slot: FixedSlot) -> None:
        """Write audio of fixed length."""
        out = batch.layout.fixed_rows(batch.memory.bytes, slot, len(batch.rows))
        for i, samples in enumerate(self._sound(batch, slot.name)):
            out[i] = 0 if samples is None else samples

    def _fill_sounds(self, batch: _BatchRows, slot: VaryingSlot, used: int) -> int:
        """Write audio of varying length; return the used bytes of the heap."""
        for i, samples in enumerate(self._sound(batch, slot.name)):
            used = put_value(batch.layout, batch.memory, slot, i, samples, used)
        return used

    def _fill_records(self, batch: _BatchRows, slot: VaryingSlot, used: int) -> int:
        """Write records of varying size; return the used bytes of the heap."""
        layout, memory = batch.layout, batch.memory
        by_shard: list[tuple[int, Rows, Rows, Entries]] = []
        n_bytes = np.zeros(len(batch.rows), np.int64)
        for shard, places, local in self._by_shard(batch):
            entries = self._dataset.files.reader(shard, slot.name).records.entries(slot.name, local)
            n_bytes[places] = entries["n_bytes"]
            by_shard.append((shard, places, local, entries))
        starts, total = _placed(n_bytes, used, slot.alignment)
        memory.grow(layout.heap + total)
        extents = layout.extents(memory.bytes, slot)[: len(n_bytes)]
        extents["n_bytes"], extents["place"] = n_bytes, starts
        for shard, places, local, entries in by_shard:
            extents["offset"][places] = entries["offset"]
            self._copy_records(layout, memory, slot, shard, places, local, entries)
        return total

    def _copy_records(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        slot: VaryingSlot,
        shard: int,
        places: Rows,
        local: Rows,
        entries: Entries,
    ) -> None:
        reader = self._dataset.files.reader(shard, slot.name)
        array = self._source[slot.name].array
        starts = layout.extents(memory.bytes, slot)["place"][places].tolist()
        heap = memory.bytes[layout.heap :].data
        records = reader.records.read(slot.name, local, entries)
        absent = reader.records.absent(slot.name, local, entries)
        if array is None:
            for start, record in zip(starts, records, strict=True):
                heap[start : start + len(record)] = record
            return
        dims = reader.records.shapes(slot.name, local)
        shapes = layout.shapes(memory.bytes, slot)
        for i, (place, start, record) in enumerate(
            zip(places.tolist(), starts, records, strict=True)
        ):
            size = len(record)
            heap[start : start + size] = record
            if i in absent:
                shapes[place] = 0
                continue
            try:
                shapes[place] = array.shape_of(dims[i], size)
            except ShardCorrupt as error:
                offset = reader.records.offset + int(entries["offset"][i])
                raise reader.records.placed(error, slot.name, int(local[i]), offset) from error


def _placed(n_bytes: Rows, used: int, alignment: int) -> tuple[Rows, int]:
    """Return the heap offsets of values with these sizes, and the used bytes after the values."""
    taken = -(-n_bytes // alignment) * alignment
    ends = -(-used // alignment) * alignment + np.cumsum(taken)
    return ends - taken, int(ends[-1])
