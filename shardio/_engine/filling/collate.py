"""Collate the values of a batch's samples: padded, stacked or concatenated arrays in the heap.

The heap of a block grows as needed. Arrays that view the block stay valid, because growing does not
replace the block's pages. A `Scratch` block holds a batch while the batch is built. Rows that pad a
batch repeat the batch's samples.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.shared_memory import reserve_memory_file
from shardio.batch.collation import JoinedField
from shardio.batch.layout import (
    ALIGNMENT,
    CLAIMED,
    BlockLayout,
    JoinSlot,
    VaryingSlot,
    WholeSlot,
    pack_state,
)
from shardio.dataset.dataset import Dataset
from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.checksum import distinct
from shardio.format.schema import Schema
from shardio.shard.verification import Rows


def put_value(
    layout: BlockLayout, memory: BlockMap, slot: VaryingSlot, i: int, value: object, used: int
) -> int:
    """Write the value of row i of a varying field; return the used bytes of the heap.

    Raises:
        SchemaError: the value does not fit the field.
        InsufficientMemory: the block cannot grow enough.
    """
    record, shape = layout.schema[slot.name].encode_record(slot.name, value)
    start = -(-used // slot.alignment) * slot.alignment
    end = start + record.nbytes
    _make_room(layout, memory, end)
    memory.bytes[layout.heap + start : layout.heap + end].data[:] = record
    extents = layout.extents(memory.bytes, slot)
    extents[i] = (0, record.nbytes, start)
    if slot.n_dims:
        layout.shapes(memory.bytes, slot)[i] = shape
    return end


def reserve(
    layout: BlockLayout, memory: BlockMap, slot: WholeSlot, shape: Sequence[int], used: int
) -> tuple[npt.NDArray[Any], int]:
    """Reserve an array for the whole batch in the heap; return it and the used bytes of the heap.

    Raises:
        InsufficientMemory: the block cannot grow enough.
    """
    start = -(-used // ALIGNMENT) * ALIGNMENT
    end = start + slot.dtype.itemsize * math.prod(shape)
    _make_room(layout, memory, end)
    layout.head(memory.bytes, slot)[:] = (start, *shape)
    return np.ndarray(shape, slot.dtype, memory.bytes.data, layout.heap + start), end


def _make_room(layout: BlockLayout, memory: BlockMap, end: int) -> None:
    # Double the heap, because later sizes are unknown, and every growth remaps the block.
    if layout.heap + end > len(memory.bytes):
        memory.grow(layout.heap + end, better=layout.heap + 2 * end)


class Scratch(BlockMap):
    """A private block for batches of one layout. Owns the memory file of the block."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        fd = reserve_memory_file(
            layout.heap + mmap.PAGESIZE, "a batch that is built in several steps"
        )
        weakref.finalize(self, os.close, fd)
        super().__init__(fd)


def copy_rows(
    source: BlockLayout, scratch: BlockMap, layout: BlockLayout, memory: BlockMap, n_rows: int
) -> int:
    """Copy all fields except collated ones; return the used bytes of the heap."""
    for fixed in layout.fixed:
        slot = next(each for each in source.fixed if each.name == fixed.name)
        rows = source.fixed_rows(scratch.bytes, slot, n_rows)
        layout.fixed_rows(memory.bytes, fixed, n_rows)[:] = rows
    for presence in layout.presence:
        place = next(each for each in source.presence if each.name == presence.name)
        layout.present(memory.bytes, presence)[:] = source.present(scratch.bytes, place)
    used = 0
    for varying in layout.varying:
        listed = next(each for each in source.varying if each.name == varying.name)
        used = _copy_records(source, scratch, listed, layout, memory, varying, n_rows, used)
    return used


def _copy_records(
    source: BlockLayout,
    scratch: BlockMap,
    slot: VaryingSlot,
    layout: BlockLayout,
    memory: BlockMap,
    target: VaryingSlot,
    n_rows: int,
    used: int,
) -> int:
    """Copy the values of one varying field; return the used bytes of the heap."""
    found = source.extents(scratch.bytes, slot)[:n_rows]
    taken = -(-found["n_bytes"].astype(np.int64) // target.alignment) * target.alignment
    ends = -(-used // target.alignment) * target.alignment + np.cumsum(taken)
    starts, total = ends - taken, int(ends[-1])
    memory.grow(layout.heap + total)
    extents = layout.extents(memory.bytes, target)[:n_rows]
    extents["offset"], extents["n_bytes"], extents["place"] = 0, found["n_bytes"], starts
    if target.n_dims:
        shapes = source.shapes(scratch.bytes, slot)[:n_rows]
        layout.shapes(memory.bytes, target)[:n_rows] = shapes
    heap, below = memory.bytes[layout.heap :].data, scratch.bytes[source.heap :].data
    columns = starts.tolist(), found["place"].tolist(), found["n_bytes"].tolist()
    for start, place, size in zip(*columns, strict=True):
        heap[start : start + size] = below[place : place + size]
    return total


Values = list[npt.NDArray[Any] | None]
"""The values of a field for the rows of a batch, with None for missing values."""
Places = Callable[[int], str]
"""A function that describes the sample in a row of the batch, for messages."""


def join(
    layout: BlockLayout,
    memory: BlockMap,
    slot: JoinSlot,
    values: Values,
    n_rows: int,
    used: int,
    places: Places,
) -> int:
    """Write the values of a field into the heap as one array; return the used bytes.

    Args:
        layout, memory: the block and its layout.
        slot: the slot of the array.
        values: the values of the rows, without padding, as arrays of the field's dtype.
        n_rows: the number of rows of the batch, padding included.
        used: the bytes of the heap used so far.
        places: a function that describes the sample in a row, for messages.

    Raises:
        SchemaError: the shapes cannot be collated; the message names samples.
        InsufficientMemory: the block cannot grow enough.
    """
    n_read = len(values)
    values = values + [values[i % n_read] for i in range(n_rows - n_read)]
    n_dims = len(slot.join.field.shape)
    lengths = np.zeros((n_rows, n_dims), np.int64)
    for i, value in enumerate(values):
        if value is not None:
            lengths[i] = value.shape
    if slot.join.rule.kind == "ragged":
        return _concatenate(layout, memory, slot, values, lengths, used, places)
    sizes = _sizes(slot.join, values, lengths, places)
    out, used = reserve(layout, memory, slot.values, (n_rows, *sizes), used)
    is_full = (lengths == sizes).all()
    if not is_full:
        out.fill(0)
    for i, value in enumerate(values):
        if value is not None:
            out[i][() if is_full else tuple(map(slice, value.shape))] = value
    if slot.companion is not None:
        mask, used = reserve(layout, memory, slot.companion, (n_rows, *sizes), used)
        _mask(mask, lengths, sizes)
    return used


def _sizes(
    join: JoinedField, values: Values, lengths: npt.NDArray[np.int64], places: Places
) -> tuple[int, ...]:
    """Return the shape to which the array of each sample is padded."""
    # Axes of fixed length keep their length even if all values are missing.
    largest = np.maximum(lengths.max(0), [n or 0 for n in join.field.shape])
    if join.rule.kind == "stack":
        _check_equal(join, values, 0, places)
    wanted = join.rule.sizes or (None,) * len(largest)
    sizes = tuple(
        n if size is None else size for n, size in zip(largest.tolist(), wanted, strict=True)
    )
    if (largest > sizes).any():
        i = int((lengths > sizes).any(1).argmax())
        raise SchemaError(
            f"field {join.name!r}: collate pads to {join.rule.sizes}, but the shape of {places(i)} "
            f"is {tuple(lengths[i].tolist())}: pad to a larger shape, or to None for the largest "
            "in the batch"
        )
    return sizes


def _check_equal(join: JoinedField, values: Values, first_axis: int, places: Places) -> None:
    """Raise SchemaError unless all shapes are equal, ignoring the axes before `first_axis`."""
    there = [(i, value.shape) for i, value in enumerate(values) if value is not None]
    for i, shape in there:
        k, first = there[0]
        if shape[first_axis:] != first[first_axis:]:
            ways = '"pad" or "list"' if first_axis else '"pad", "ragged" or "list"'
            what = "only differ in the first axis" if first_axis else "be the same"
            raise SchemaError(
                f"field {join.name!r}: with collate={join.rule.kind!r} the shapes of a batch must "
                f"{what}; that of {places(k)} is {first}, that of {places(i)} is {shape}: "
                f"use {ways}"
            )


def _mask(out: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64], sizes: Rows | Any) -> None:
    """Fill a mask with True inside the lengths of each row, and False elsewhere."""
    out.fill(True)
    n_rows, n_dims = lengths.shape
    for axis, size in enumerate(sizes):
        is_inside = np.arange(size) < lengths[:, axis, None]
        shape = [1] * n_dims
        shape[axis] = size
        out &= is_inside.reshape(n_rows, *shape)


def _concatenate(
    layout: BlockLayout,
    memory: BlockMap,
    slot: JoinSlot,
    values: Values,
    lengths: npt.NDArray[np.int64],
    used: int,
    places: Places,
) -> int:
    """Concatenate the values along the first axis, and write the offset of each value."""
    _check_equal(slot.join, values, 1, places)
    there = [value for value in values if value is not None]
    inner = there[0].shape[1:] if there else tuple(n or 0 for n in slot.join.field.shape[1:])
    out, used = reserve(layout, memory, slot.values, (int(lengths[:, 0].sum()), *inner), used)
    if there:
        np.concatenate(there, out=out)
    if slot.companion is None:
        return used
    offsets, used = reserve(layout, memory, slot.companion, (len(values) + 1,), used)
    offsets[0] = 0
    np.cumsum(lengths[:, 0], out=offsets[1:])
    return used


class StoredCollation:
    """A collator of stored fields. Borrows the dataset."""

    def __init__(self, dataset: Dataset, source: Schema) -> None:
        self._dataset = dataset
        self._claims = {name: pack_state(i, CLAIMED) for i, name in enumerate(source)}

    def fill(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        rows: Rows,
        shards: Rows,
        n_rows: int,
        states: npt.NDArray[np.int32],
        used: int,
        places: Places,
    ) -> int:
        """Collate every field of `layout.joins`; return the used bytes of the heap.

        Args:
            layout, memory: the block and its layout.
            rows, shards: the rows of the samples in the dataset, and their shards.
            n_rows: the number of rows of the batch, padding included.
            states: the samples' entries in the status column of the origin table.
            used: the bytes of the heap used so far.
            places: a function that describes the sample in a row, for messages.

        Raises:
            ShardCorrupt, SchemaError, InsufficientMemory: the message names the sample.
        """
        for slot in layout.joins:
            states[:] = self._claims[slot.join.name]
            values: Values = [None] * len(rows)
            for shard in distinct(shards).tolist():
                at = np.flatnonzero(shards == shard)
                self._read(slot.join, shard, at, rows[at] - self._dataset.starts[shard], values)
            used = join(layout, memory, slot, values, n_rows, used, places)
        return used

    def _read(
        self, join: JoinedField, shard: int, places: Rows, local: Rows, values: Values
    ) -> None:
        """Read the arrays of some samples of one shard into `values`.

        `places` are the samples' rows in the batch, `local` the rows in the shard. Uncompressed
        arrays are views of the mapped file.
        """
        name, field = join.name, join.field
        reader = self._dataset.files.reader(shard, name)
        entries = reader.records.entries(name, local)
        dims = reader.records.shapes(name, local)
        absent = reader.records.absent(name, local, entries)
        records = reader.records.read(name, local, entries)
        for i, (place, record) in enumerate(zip(places.tolist(), records, strict=True)):
            if i in absent:
                continue
            try:
                shape = field.shape_of(dims[i], len(record))
            except ShardCorrupt as error:
                offset = reader.records.offset + int(entries["offset"][i])
                raise reader.records.placed(error, name, int(local[i]), offset) from error
            values[place] = np.frombuffer(record, field.numpy).reshape(shape)
