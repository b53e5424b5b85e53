"""Fill a block with a batch: the work of a worker, and of main when it has no workers.

A batch is a pure function of (dataset, seed, epoch, step): whoever fills it, and however often,
writes the same bytes. The origin table is written before mapped memory is touched or user code is
called, so that whatever kills the process, main can say what it was doing.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from shardio._engine.itinerary import Itinerary, Stretch
from shardio._engine.recipe import Recipe
from shardio.collate import (
    CLAIMED,
    EMPTY,
    FILLED,
    NO_FIELD,
    BlockLayout,
    BlockViews,
    VaryingSlot,
    pack_state,
)
from shardio.dataset import ShardDataset
from shardio.errors import SchemaError, ShardCorrupt, TransformError
from shardio.format.checksum import distinct
from shardio.format.fields import Array
from shardio.format.index import Entries, full_shape
from shardio.format.schema import Schema
from shardio.format.values import encode_record
from shardio.inference import check_sample, infer_schema
from shardio.order import SampleGenerators
from shardio.units import Rows

Bytes = npt.NDArray[np.uint8]
_ALL_FILLED: Final = pack_state(NO_FIELD, FILLED)


class Memory(Protocol):
    """A block's memory, which can grow."""

    bytes: Bytes
    views: BlockViews | None
    """Kept by whoever fills it; None at first, and when it has grown."""

    def grow(self, n_bytes: int) -> None:
        """Make it at least n_bytes long; `bytes` is then another array over the same memory."""


class Filler:
    """Fills blocks by one recipe.

    Args:
        recipe: what is in a batch.
        dataset: opened on recipe.path; borrowed.
        passes: what user code may raise without its being counted as the transform's failure.
        beware: called with the shards of a batch before any of it is read.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: ShardDataset,
        passes: tuple[type[BaseException], ...] = (),
        beware: Callable[[Rows], None] | None = None,
    ) -> None:
        self._recipe, self._dataset, self._passes = recipe, dataset, passes
        self._beware = beware
        self._source = Schema({name: dataset.schema[name] for name in recipe.fields})
        self._itinerary = Itinerary(
            dataset, recipe.n_samples, shuffle=recipe.shuffle, seed=recipe.seed
        )
        self._generators = SampleGenerators(recipe.seed)
        self._gathered = frozenset(self._source.columns)
        self._claims = {name: pack_state(i, CLAIMED) for i, name in enumerate(recipe.fields)}

    def batch_schema(self) -> Schema:
        """What a sample of a batch is: the fields, or what the transform makes of the first sample.

        The first sample is the one at position 0 of epoch 0, whoever asks.

        Raises:
            TransformError: the transform raised, or returned what cannot be put into a batch.
        """
        if self._recipe.transform is None or not self._recipe.n_samples:
            return self._source
        first = self._itinerary.stretch(0, 0, 1)
        rows, shard = first.rows, int(first.shards[0])
        sample = self._transformed(rows, 0, shard, epoch=0, position=0)
        try:
            return infer_schema(sample, self._source)
        except SchemaError as error:
            raise self._placed(str(error), int(rows[0]), shard, 0) from None

    def fill(self, layout: BlockLayout, memory: Memory, epoch: int, step: int) -> tuple[int, int]:
        """Fill a block with batch `step` of `epoch`; returns (rows, bytes used in the heap).

        Raises:
            ShardCorrupt, TransformError, MemoryShort: naming the sample.
        """
        start = step * self._recipe.batch_size
        stop = min(start + self._recipe.batch_size, self._recipe.n_samples)
        stretch = self._itinerary.stretch(epoch, start, stop)
        part = slice(start - stretch.start, stop - stretch.start)
        views = memory.views
        if views is None:
            views = memory.views = layout.views(memory.bytes)
        origins, states = views.origins, views.states
        if stop - start < len(states):
            states[stop - start :] = EMPTY
            origins, states = origins[: stop - start], states[: stop - start]
        origins[:] = stretch.origins[part]
        if self._beware is not None:
            self._beware(stretch.shards[part])
        if self._recipe.transform is None:
            heap = self._fill_stored(layout, memory, views, stretch, part, states)
        else:
            rows, shards = stretch.rows[part], stretch.shards[part]
            heap = self._fill_transformed(layout, memory, rows, shards, epoch, start)
        states[:] = _ALL_FILLED
        return stop - start, heap

    # Without a transform: field by field, straight from the shards.

    def _fill_stored(
        self,
        layout: BlockLayout,
        memory: Memory,
        views: BlockViews,
        stretch: Stretch,
        part: slice,
        states: npt.NDArray[np.int32],
    ) -> int:
        rows, shards = stretch.rows[part], stretch.shards[part]
        used, present = 0, {}
        for presence in layout.presence:
            states[:] = self._claims[presence.name]
            present[presence.name] = layout.present(memory.bytes, presence)
            self._fill_presence(present[presence.name], presence.name, rows, shards)
        for slot, whole in zip(layout.fixed, views.fixed, strict=True):
            name = slot.name
            states[:] = self._claims[name]
            out = whole if len(whole) == len(rows) else whole[: len(rows)]
            if name in self._gathered:
                slots = stretch.slots(name)[part]
                self._dataset.gather(name).gather(slots, rows, shards, out)
                if name in present:  # zeros, whatever a file has in the place of no value
                    out[~present[name][: len(out)]] = 0
            else:
                self._decode_fixed(name, rows, shards, out)
        for varying in layout.varying:
            states[:] = self._claims[varying.name]
            used = self._fill_varying(layout, memory, varying, rows, shards, used)
        return used

    def _fill_presence(
        self, out: npt.NDArray[np.bool_], name: str, rows: Rows, shards: Rows
    ) -> None:
        """Which of the rows have an optional field."""
        for shard in distinct(shards).tolist():
            places = np.flatnonzero(shards == shard)
            local = rows[places] - self._dataset.starts[shard]
            out[places] = self._dataset.reader(shard, name).present(name, local)

    def _decode_fixed(self, name: str, rows: Rows, shards: Rows, out: Bytes) -> None:
        """Compressed arrays of fixed shape: record by record into their rows."""
        for shard in distinct(shards).tolist():
            places = np.flatnonzero(shards == shard)
            reader = self._dataset.reader(shard, name)
            local = rows[places] - self._dataset.starts[shard]
            entries = reader.records.entries(name, local)
            records = reader.records.read(name, local, entries)
            absent = reader.records.absent(name, local, entries)
            for i, (place, record) in enumerate(zip(places.tolist(), records, strict=True)):
                out[place] = 0 if i in absent else np.frombuffer(record, np.uint8)

    def _fill_varying(
        self,
        layout: BlockLayout,
        memory: Memory,
        slot: VaryingSlot,
        rows: Rows,
        shards: Rows,
        used: int,
    ) -> int:
        """Records of varying size into the heap; returns how much of it is used then."""
        by_shard: list[tuple[int, Rows, Rows, Entries]] = []
        n_bytes = np.zeros(len(rows), np.int64)
        for shard in distinct(shards).tolist():
            places = np.flatnonzero(shards == shard)
            local = rows[places] - self._dataset.starts[shard]
            entries = self._dataset.reader(shard, slot.name).records.entries(slot.name, local)
            n_bytes[places] = entries["n_bytes"]
            by_shard.append((shard, places, local, entries))
        alignment = slot.alignment
        taken = -(-n_bytes // alignment) * alignment
        ends = -(-used // alignment) * alignment + np.cumsum(taken)
        starts, total = ends - taken, int(ends[-1])
        memory.grow(layout.heap + total)
        extents = layout.extents(memory.bytes, slot)[: len(rows)]
        extents["n_bytes"], extents["place"] = n_bytes, starts
        for shard, places, local, entries in by_shard:
            extents["offset"][places] = entries["offset"]
            self._copy_records(layout, memory, slot, shard, places, local, entries)
        return total

    def _copy_records(
        self,
        layout: BlockLayout,
        memory: Memory,
        slot: VaryingSlot,
        shard: int,
        places: Rows,
        local: Rows,
        entries: Entries,
    ) -> None:
        reader = self._dataset.reader(shard, slot.name)
        field = self._source[slot.name]
        starts = layout.extents(memory.bytes, slot)["place"][places].tolist()
        heap = memory.bytes[layout.heap :].data
        dims = reader.records.shapes(slot.name, local)
        shapes = layout.shapes(memory.bytes, slot)
        records = reader.records.read(slot.name, local, entries)
        absent = reader.records.absent(slot.name, local, entries)
        for i, (place, start, record) in enumerate(
            zip(places.tolist(), starts, records, strict=True)
        ):
            size = len(record)
            heap[start : start + size] = record
            if i in absent:
                shapes[place] = 0
            elif isinstance(field, Array):
                try:
                    shapes[place] = full_shape(field, dims[i], size)
                except ShardCorrupt as error:
                    offset = reader.records.offset + int(entries["offset"][i])
                    raise reader.records.placed(error, slot.name, int(local[i]), offset) from error

    # With a transform: sample by sample.

    def _fill_transformed(
        self,
        layout: BlockLayout,
        memory: Memory,
        rows: Rows,
        shards: Rows,
        epoch: int,
        start: int,
    ) -> int:
        # These stay valid when the block grows: the pages are the same.
        status = layout.origins(memory.bytes)["status"]
        arrays = [(s.name, layout.fixed_rows(memory.bytes, s, len(rows))) for s in layout.fixed]
        presence = [(p.name, layout.present(memory.bytes, p)) for p in layout.presence]
        status[: len(rows)] = EMPTY
        used = 0
        for i, shard in enumerate(shards.tolist()):
            status[i] = CLAIMED
            sample = self._transformed(rows, i, shard, epoch=epoch, position=start + i)
            try:
                check_sample(sample, layout.schema)
                for name, is_present in presence:
                    is_present[i] = sample[name] is not None
                for name, array in arrays:
                    value = sample[name]
                    array[i] = 0 if value is None else value
                for varying in layout.varying:
                    used = self._put(layout, memory, varying, i, sample[varying.name], used)
            except SchemaError as error:
                raise self._placed(str(error), int(rows[i]), shard, start + i) from None
            status[i] = FILLED
        return used

    def _put(
        self,
        layout: BlockLayout,
        memory: Memory,
        slot: VaryingSlot,
        i: int,
        value: object,
        used: int,
    ) -> int:
        """One value that a transform made into the heap; returns how much is used then."""
        record, shape = encode_record(slot.name, layout.schema[slot.name], value)
        start = -(-used // slot.alignment) * slot.alignment
        end = start + record.nbytes
        # Doubled: the sizes to come are not known, and every growth maps the block anew.
        if layout.heap + end > len(memory.bytes):
            memory.grow(layout.heap + 2 * end)
        memory.bytes[layout.heap + start : layout.heap + end].data[:] = record
        extents = layout.extents(memory.bytes, slot)
        extents[i] = (0, record.nbytes, start)
        if slot.n_dims:
            layout.shapes(memory.bytes, slot)[i] = shape
        return end

    def _transformed(
        self, rows: Rows, i: int, shard: int, *, epoch: int, position: int
    ) -> Mapping[str, Any]:
        """What the transform makes of one sample, with every generator keyed for it."""
        recipe = self._recipe
        local = int(rows[i] - self._dataset.starts[shard])
        sample = self._dataset.sample(shard, local, recipe.fields)
        key = self._generators.key(epoch, position)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # the user's code may draw from it
        arguments = (
            (sample, self._generators.at(epoch, position)) if recipe.takes_rng else (sample,)
        )
        transform: Any = recipe.transform
        try:
            made: Mapping[str, Any] = transform(*arguments)
        except self._passes:
            raise
        except BaseException as error:  # sys.exit and StopIteration are failures too
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            text = "".join(traceback.format_exception(type(error), error, frames))
            what = f"the transform raised {type(error).__name__}: {_text_of(error)}"
            raise self._placed(what, int(rows[i]), shard, position, text) from error
        return made

    def _placed(
        self, what: str, row: int, shard: int, position: int, text: str = ""
    ) -> TransformError:
        name = self._dataset.shards[shard].name
        local = row - int(self._dataset.starts[shard])
        place = f"sample {local} of shard {name} of {self._recipe.path} (position {position})"
        return TransformError(f"{what}\n  at {place}" + (f"\n\n{text}" if text else ""))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # user classes fail in any way they like
        return f"(its __str__ raised {type(failure).__name__})"
