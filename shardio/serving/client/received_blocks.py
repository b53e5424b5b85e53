"""A filled block on its way: its layout, the part that is used, and checks of its numbers.

A batch travels as its worker filled it, and is read as on the machine that filled it. The receiver
trusts none of its numbers before `check`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.batch.batch import Batch, Skipped
from shardio.batch.layout import SKIPPED, BlockLayout, layout_of_received_batches
from shardio.errors import ShardioError
from shardio.format.fields import Array
from shardio.format.schema import Schema, canonical_json, read_json
from shardio.serving.client.protocol import MalformedMessage, items, number, text

_ALIGNMENT: Final = 64
_MAX_ROWS: Final = 1 << 32
_MAX_VALUES: Final = 1 << 48
_SKIPPED_NUMBERS: Final = ("row", "index", "shard", "sample")

Block = npt.NDArray[np.uint8]


@functools.lru_cache(maxsize=16)
def layout_text(layout: BlockLayout) -> str:
    """Return a layout as text for `layout_of`."""
    schema = layout.schema.to_json().decode("utf-8")
    whole = [slot.name for slot in layout.whole]
    return canonical_json({"schema": schema, "whole": whole, "rows": layout.n_rows}).decode("utf-8")


@functools.lru_cache(maxsize=16)
def layout_of(content: str) -> BlockLayout:
    """Return the layout of the blocks that a server sends.

    Raises:
        MalformedMessage: it is not a layout.
    """
    try:
        found = read_json(content)
        if not isinstance(found, dict):
            raise MalformedMessage("a layout that is not an object")
        schema = Schema.from_json(text(found, "schema").encode("utf-8"))
        whole, n_rows = items(found, "whole"), number(found, "rows", _MAX_ROWS)
        if not all(isinstance(schema.get(n), Array) for n in whole if isinstance(n, str)):
            raise MalformedMessage("a layout with arrays that its schema does not have")
        return layout_of_received_batches(schema, n_rows, frozenset(map(str, whole)))
    except MalformedMessage:
        raise
    except (ShardioError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"an invalid layout: {error}") from error


def pack_batch(batch: Batch) -> tuple[dict[str, Any], Block]:
    """Return the head of a batch's message, and the used part of its block."""
    layout, block, n_rows = batch.filled
    head = {
        "layout": layout_text(layout),
        "rows": n_rows,
        "epoch": batch.epoch,
        "step": batch.step,
        "skipped": [asdict(each) for each in batch.skipped],
    }
    return head, block[: layout.heap + _heap_bytes(layout, block, n_rows)]


def _heap_bytes(layout: BlockLayout, block: Block, n_rows: int) -> int:
    """Return how much of the heap the values of a batch use."""
    end = 0
    for slot in layout.varying:
        extents = layout.extents(block, slot)[:n_rows]
        if len(extents):
            end = max(end, int((extents["place"] + extents["n_bytes"]).max()))
    for whole, (place, *shape) in zip(layout.whole, layout.heads(block), strict=True):
        end = max(end, place + int(np.prod(shape, dtype=np.int64)) * whole.dtype.itemsize)
    return end


def unpack_batch(head: Mapping[str, Any], content: Any) -> Batch:
    """Return the batch of a message, over a copy of its block aligned as tensors need it.

    Raises:
        MalformedMessage: its block does not fit the layout.
    """
    layout, n_rows = layout_of(text(head, "layout")), number(head, "rows", _MAX_ROWS)
    received = np.frombuffer(content, np.uint8)
    check(layout, received, n_rows)
    block = _aligned(len(received))
    block[:] = received
    skipped = tuple(map(_skipped, items(head, "skipped")))
    epoch, step = number(head, "epoch"), number(head, "step")
    return Batch(layout, block, n_rows, layout.arrays(block, n_rows), epoch, step, (), {}, skipped)


def _aligned(n_bytes: int) -> Block:
    memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + n_bytes]


def _skipped(found: Any) -> Skipped:
    if not isinstance(found, dict):
        raise MalformedMessage("a skipped sample that is not an object")
    row, index, shard, sample = (number(found, name) for name in _SKIPPED_NUMBERS)
    return Skipped(row, index, shard, sample, text(found, "error"), text(found, "text"))


def check(layout: BlockLayout, block: Block, n_rows: int) -> None:
    """Check that all places in a block lie inside it.

    Raises:
        MalformedMessage: naming the field and the offending place.
    """
    if not n_rows <= layout.n_rows:
        raise MalformedMessage(f"a batch of {n_rows} rows in a block for {layout.n_rows}")
    if len(block) < layout.heap:
        raise MalformedMessage(
            f"a block of {len(block)} bytes, where its layout needs {layout.heap}"
        )
    heap_bytes = len(block) - layout.heap
    if n_rows and int(layout.origins(block)["status"][:n_rows].max()) > SKIPPED:
        raise MalformedMessage("a row in an unknown state")
    for slot in layout.presence:
        if n_rows and int(layout.present(block, slot)[:n_rows].view(np.uint8).max()) > 1:
            raise MalformedMessage(f"field {slot.name!r}: its presence is neither 0 nor 1")
    for varying in layout.varying:
        _check_extents(layout, block, n_rows, varying, heap_bytes)
    for whole, (place, *shape) in zip(layout.whole, layout.heads(block), strict=True):
        n_bytes = math.prod((whole.dtype.itemsize, *shape))
        is_shape = min(place, *shape) >= 0 and math.prod(max(1, n) for n in shape) < _MAX_VALUES
        if not is_shape or place + n_bytes > heap_bytes:
            raise MalformedMessage(f"field {whole.name!r}: shape {shape} from byte {place} on")


def _check_extents(
    layout: BlockLayout, block: Block, n_rows: int, slot: Any, heap_bytes: int
) -> None:
    extents = layout.extents(block, slot)[:n_rows]
    places, sizes = extents["place"], extents["n_bytes"]
    limit = np.uint64(heap_bytes)
    if bool(((places > limit) | (sizes > limit - np.minimum(places, limit))).any()):
        raise MalformedMessage(
            f"field {slot.name!r}: a value beyond the {heap_bytes} bytes of the heap"
        )
    field = layout.schema[slot.name]
    if isinstance(field, Array):
        shapes = layout.shapes(block, slot)[:n_rows].astype(np.float64)
        # Exact up to the largest possible heap; a dimension of 0 bounds the others as well.
        is_wrong = shapes.prod(axis=1) * field.numpy.itemsize != sizes
        if bool((is_wrong | (np.maximum(shapes, 1).prod(axis=1) >= _MAX_VALUES)).any()):
            raise MalformedMessage(
                f"field {slot.name!r}: a value that is not as large as its shape"
            )
