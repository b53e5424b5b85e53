"""Estimate the size and the number of blocks before the first block is created.

The heap of a block has values of varying size, so the size of a heap can only be estimated.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._engine.filling.batch_spec import BatchSpec
from shardio._workers.tasks.schedule import QUICK_DEPTH
from shardio.batch.collation import JoinedField
from shardio.batch.layout import ALIGNMENT, BlockLayout, is_fixed
from shardio.errors import InsufficientMemory
from shardio.format.schema import Schema
from shardio.samples.clip_view import ClipView
from shardio.samples.media import AudioField
from shardio.samples.view import SampleView
from shardio.shard.verification import Rows

_SAMPLED: Final = 256
_MARGIN: Final = 1.5
_PREFETCH: Final = 2
_SMALL_BYTES: Final = 1 << 20
_SAMPLE_BYTES: Final = 4  # of decoded audio, float32


def block_bytes(
    layout: BlockLayout,
    batch_spec: BatchSpec,
    view: SampleView,
    memory_bytes: int,
    heap_bytes: int = 0,
) -> int:
    """Return the number of bytes of a new block; `memory_bytes` is the budget for all blocks.

    The size of the heap is estimated from values of the first shard; it is at least `heap_bytes`.
    """
    heap = _expected_heap(layout, batch_spec, view)
    n_bytes = layout.heap + max(heap, _whole_pages(heap_bytes + _padded_by_user_bytes(layout)))
    if n_bytes > memory_bytes:
        raise InsufficientMemory(
            f"a batch of {batch_spec.block_rows} samples needs a block of {n_bytes} bytes; "
            f"memory_bytes allows {memory_bytes}: raise it, or lower batch_size"
        )
    return n_bytes


def estimate_heap_bytes(sample: Mapping[str, Any], schema: Schema, n_rows: int) -> int:
    """Estimate the heap bytes of n_rows transformed samples that are like `sample`."""
    per_row = 0
    for name, field in schema.items():
        if not is_fixed(schema, name):
            record, _ = field.encode_record(name, sample[name])
            per_row += record.nbytes + ALIGNMENT
    return int(_MARGIN * per_row * n_rows)


def n_blocks_wanted(n_workers: int, prefetch: int | None, n_bytes: int) -> int:
    """Return the number of blocks that an iteration should have; `n_bytes` is the size of a block.

    Few blocks are usually faster than many, because their memory stays in the CPU cache. But
    workers fill a small block faster than the main process can assign a task. If blocks are small,
    there are therefore more: QUICK_DEPTH per worker, and QUICK_DEPTH filled blocks that wait for
    the loop.
    """
    if not n_workers:
        return 2
    if prefetch is not None:
        return n_workers + prefetch + 1
    n_extra = n_workers * (QUICK_DEPTH - 1) + QUICK_DEPTH if n_bytes <= _SMALL_BYTES else 0
    return n_workers + _PREFETCH + 1 + n_extra


def _expected_heap(layout: BlockLayout, batch_spec: BatchSpec, view: SampleView) -> int:
    """Return the expected number of bytes of the heap of a block.

    Blocks that are too small must grow, which takes 20 ms of CPU time for 125 batches of 1 MB.
    """
    dataset = view.dataset
    names = [slot.name for slot in layout.varying if slot.name in batch_spec.fields]
    names += [slot.join.name for slot in layout.joins]
    n = min(_SAMPLED, batch_spec.n_samples)
    if not names or not n or batch_spec.runs_user_code:
        return mmap.PAGESIZE if layout.has_heap else 0
    n_rows = dataset.shards[0].n_samples
    rows = np.linspace(0, max(0, n_rows - 1), min(n, n_rows), dtype=np.int64)
    per_row = 0.0
    for name in names if len(rows) else []:
        if name in batch_spec.audio:
            per_row += _audio_bytes(view, batch_spec.audio[name], rows)
            continue
        records = dataset.files.reader(0, name).records
        join = next((slot.join for slot in layout.joins if slot.join.name == name), None)
        if join is not None and join.rule.kind == "pad":
            per_row += _padded_bytes(join, records.shapes(name, rows))
        else:
            per_row += _MARGIN * records.entries(name, rows)["n_bytes"].mean()
    return _whole_pages(int(per_row * batch_spec.block_rows)) + mmap.PAGESIZE


def _audio_bytes(view: SampleView, field: AudioField, rows: Rows) -> float:
    """Return the bytes of the longest decoded audio, with its mask; 0 for the audio of clips."""
    if isinstance(view, ClipView):
        return 0
    records = view.dataset.files.reader(0, field.name).records
    lines = records.stream_table(field.name, rows, records.entries(field.name, rows))
    seconds = lines["n_frames"] / np.maximum(1, lines["height"])
    return float(seconds.max()) * field.rate * field.channels * (_SAMPLE_BYTES + 1)


def _padded_by_user_bytes(layout: BlockLayout) -> int:
    n_items = [
        (math.prod(n or 0 for n in join.rule.sizes or (0,)), join.field.numpy.itemsize + 1)
        for join, _, _ in layout.joins
    ]
    return layout.n_rows * sum(n * size for n, size in n_items)


def _padded_bytes(join: JoinedField, varying: npt.NDArray[np.uint64]) -> int:
    """Estimate the bytes of a padded array and its mask from the lengths of varying axes."""
    largest = iter(varying.max(0).tolist())
    found = [next(largest) if n is None else n for n in join.field.shape]
    wanted = join.rule.sizes or found
    n_items = math.prod(n if size is None else size for n, size in zip(found, wanted, strict=True))
    return n_items * (join.field.numpy.itemsize + 1)


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
