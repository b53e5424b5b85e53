"""Collate the values of a batch into padded, stacked or concatenated arrays in the heap of a block.

The heap has the values of varying size. When it grows, the block is mapped again, and earlier views
stay valid. Functions get the number of `used` bytes of the heap, and return the new number.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.shared_memory import reserve_memory_file
from shardio.batch.collation import JoinedField
from shardio.batch.layout import (
    ALIGNMENT,
    BlockLayout,
    FixedSlot,
    JoinSlot,
    PresenceSlot,
    VaryingSlot,
    WholeSlot,
)
from shardio.errors import SchemaError
from shardio.samples.field_sources import BatchRows, Values
from shardio.shard.verification import Rows

_Slot = TypeVar("_Slot", FixedSlot, PresenceSlot, VaryingSlot)


def put_value(batch: BatchRows, slot: VaryingSlot, i: int, value: object, used: int) -> int:
    """Write a value of row i into the heap; raise SchemaError for a wrong type."""
    layout, memory = batch.layout, batch.memory
    record, shape = layout.schema[slot.name].encode_record(slot.name, value)
    start = -(-used // slot.alignment) * slot.alignment
    end = start + record.nbytes
    _make_room(layout, memory, end)
    memory.bytes[layout.heap + start : layout.heap + end].data[:] = record
    layout.extents(memory.bytes, slot)[i] = (record.nbytes, start)
    if slot.n_dims:
        layout.shapes(memory.bytes, slot)[i] = shape
    return end


def reserve_array(
    batch: BatchRows, slot: WholeSlot, shape: Sequence[int], used: int
) -> tuple[npt.NDArray[Any], int]:
    """Reserve an array of the whole batch in the heap; return the array and the new `used`."""
    layout, memory = batch.layout, batch.memory
    start = -(-used // ALIGNMENT) * ALIGNMENT
    end = start + slot.dtype.itemsize * math.prod(shape)
    _make_room(layout, memory, end)
    layout.head(memory.bytes, slot)[:] = (start, *shape)
    return np.ndarray(shape, slot.dtype, memory.bytes.data, layout.heap + start), end


def _make_room(layout: BlockLayout, memory: BlockMap, end: int) -> None:
    # If the heap must grow, make it twice as large as needed now, because the sizes of later values
    # are unknown, and each growth maps the block again.
    if layout.heap + end > len(memory.bytes):
        memory.grow(layout.heap + end, preferred=layout.heap + 2 * end)


class Scratch(BlockMap):
    """A block that only this process uses, for batches with a certain layout; owns its file."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        what = "a batch that is built in several steps"
        fd = reserve_memory_file(layout.heap + mmap.PAGESIZE, what)
        weakref.finalize(self, os.close, fd)
        super().__init__(fd)


def copy_rows(source: BatchRows, batch: BatchRows, first: int = 0, used: int = 0) -> int:
    layout, memory, rows = batch.layout, batch.memory, slice(first, first + source.n_rows)
    below, given = source.layout, source.memory.bytes
    for fixed in layout.fixed:
        values = below.fixed_rows(given, _find_slot(below.fixed, fixed.name), source.n_rows)
        layout.fixed_rows(memory.bytes, fixed, rows.stop)[rows] = values
    for presence in layout.presence:
        is_there = below.present(given, _find_slot(below.presence, presence.name))
        layout.present(memory.bytes, presence)[rows] = is_there[: source.n_rows]
    for varying in layout.varying:
        slot = _find_slot(below.varying, varying.name)
        found = below.extents(given, slot)[: source.n_rows]
        starts, used = batch.reserve_values(varying, found["n_bytes"].astype(np.int64), used, first)
        if varying.n_dims:
            shapes = below.shapes(given, slot)[: source.n_rows]
            layout.shapes(memory.bytes, varying)[rows] = shapes
        heap, heap_below = memory.bytes[layout.heap :].data, given[below.heap :].data
        columns = starts, found["offset"].tolist(), found["n_bytes"].tolist()
        for start, offset, size in zip(*columns, strict=True):
            heap[start : start + size] = heap_below[offset : offset + size]
    return used


def _find_slot(slots: Sequence[_Slot], name: str) -> _Slot:
    return next(slot for slot in slots if slot.name == name)


DescribeRow = Callable[[int], str]
"""A function that describes the sample in a row of the batch, for messages."""


def join(batch: BatchRows, slot: JoinSlot, values: Values, used: int, describe: DescribeRow) -> int:
    """Write the values of a field into the heap as one array.

    Rows that pad the batch have no `values`; they repeat the samples of the batch. Raises
    SchemaError for values that cannot be collated; in the message, `describe` names their samples.
    """
    n_read, n_rows = len(values), batch.n_rows
    values = values + [values[i % n_read] for i in range(n_rows - n_read)]
    n_dims = len(slot.join.field.shape)
    lengths = np.zeros((n_rows, n_dims), np.int64)
    for i, value in enumerate(values):
        if value is not None:
            lengths[i] = value.shape
    if slot.join.rule.kind == "ragged":
        return _concatenate(batch, slot, values, lengths, used, describe)
    sizes = _sizes(slot.join, values, lengths, describe)
    out, used = reserve_array(batch, slot.values, (n_rows, *sizes), used)
    is_full = (lengths == sizes).all()
    if not is_full:
        out.fill(0)
    for i, value in enumerate(values):
        if value is not None:
            out[i][() if is_full else tuple(map(slice, value.shape))] = value
    if slot.companion is not None:
        mask, used = reserve_array(batch, slot.companion, (n_rows, *sizes), used)
        _mask(mask, lengths, sizes)
    return used


def _sizes(
    join: JoinedField, values: Values, lengths: npt.NDArray[np.int64], describe: DescribeRow
) -> tuple[int, ...]:
    # If all values are missing, an axis has the length from the field type, or the length 0.
    largest = np.maximum(lengths.max(0), [n or 0 for n in join.field.shape])
    if join.rule.kind == "stack":
        _check_equal(join, values, 0, describe)
    wanted = join.rule.sizes or (None,) * len(largest)
    sizes = tuple(
        n if size is None else size for n, size in zip(largest.tolist(), wanted, strict=True)
    )
    if (largest > sizes).any():
        i = int((lengths > sizes).any(1).argmax())
        raise SchemaError(
            f"field {join.name!r}: collate pads to {join.rule.sizes}, but the shape of "
            f"{describe(i)} is {tuple(lengths[i].tolist())}: pad to a larger shape, or to None for "
            "the largest in the batch"
        )
    return sizes


def _check_equal(join: JoinedField, values: Values, first_axis: int, describe: DescribeRow) -> None:
    there = [(i, value.shape) for i, value in enumerate(values) if value is not None]
    for i, shape in there:
        k, first = there[0]
        if shape[first_axis:] != first[first_axis:]:
            ways = '"pad" or "list"' if first_axis else '"pad", "ragged" or "list"'
            what = "only differ in the first axis" if first_axis else "be the same"
            raise SchemaError(
                f"field {join.name!r}: with collate={join.rule.kind!r} the shapes of a batch must "
                f"{what}; that of {describe(k)} is {first}, that of {describe(i)} is {shape}: "
                f"use {ways}"
            )


def _mask(out: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64], sizes: Rows | Any) -> None:
    out.fill(True)
    n_rows, n_dims = lengths.shape
    for axis, size in enumerate(sizes):
        is_inside = np.arange(size) < lengths[:, axis, None]
        shape = [1] * n_dims
        shape[axis] = size
        out &= is_inside.reshape(n_rows, *shape)


def _concatenate(
    batch: BatchRows,
    slot: JoinSlot,
    values: Values,
    lengths: npt.NDArray[np.int64],
    used: int,
    describe: DescribeRow,
) -> int:
    _check_equal(slot.join, values, 1, describe)
    there = [value for value in values if value is not None]
    inner = there[0].shape[1:] if there else tuple(n or 0 for n in slot.join.field.shape[1:])
    out, used = reserve_array(batch, slot.values, (int(lengths[:, 0].sum()), *inner), used)
    if there:
        np.concatenate(there, out=out)
    if slot.companion is None:
        return used
    offsets, used = reserve_array(batch, slot.companion, (len(values) + 1,), used)
    offsets[0] = 0
    np.cumsum(lengths[:, 0], out=offsets[1:])
    return used
