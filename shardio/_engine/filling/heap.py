"""Put values into a block's heap, which grows as far as they need.

Of arrays over a block that were made before it grew, all stay valid: the pages are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio._workers.processes.blocks import BlockMap
from shardio.batch.layout import ALIGNMENT, BlockLayout, VaryingSlot, WholeSlot
from shardio.format.values import encode_record


def put_value(
    layout: BlockLayout, memory: BlockMap, slot: VaryingSlot, i: int, value: object, used: int
) -> int:
    """The value that row i has for a varying field; returns how much of the heap is used then.

    Raises:
        SchemaError: it does not fit the field.
        InsufficientMemory: there is no memory for it.
    """
    record, shape = encode_record(slot.name, layout.schema[slot.name], value)
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
    """Room for an array of the whole batch; returns it, unwritten, and how much is used then.

    Raises:
        InsufficientMemory: there is no memory for it.
    """
    start = -(-used // ALIGNMENT) * ALIGNMENT
    end = start + slot.dtype.itemsize * math.prod(shape)
    _make_room(layout, memory, end)
    layout.head(memory.bytes, slot)[:] = (start, *shape)
    return np.ndarray(shape, slot.dtype, memory.bytes.data, layout.heap + start), end


def _make_room(layout: BlockLayout, memory: BlockMap, end: int) -> None:
    # Doubled: the sizes to come are not known, and every growth maps the block anew.
    if layout.heap + end > len(memory.bytes):
        memory.grow(layout.heap + end, better=layout.heap + 2 * end)
