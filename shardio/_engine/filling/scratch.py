"""Memory that a batch is put together in, and what is copied from there as it is."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np

from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.shared_memory import reserve_memory_file
from shardio.batch.layout import BlockLayout, VaryingSlot


class Scratch(BlockMap):
    """Memory of this process for batches of one layout; owns its file, which goes with it."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        fd = reserve_memory_file(
            layout.heap + mmap.PAGESIZE, "a batch that is made in several steps"
        )
        weakref.finalize(self, os.close, fd)
        super().__init__(fd)


def copy_rows(
    source: BlockLayout, scratch: BlockMap, layout: BlockLayout, memory: BlockMap, n_rows: int
) -> int:
    """Copy all fields but those that are joined; returns how much of the heap is used."""
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
    """Copy the values of one varying field."""
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
