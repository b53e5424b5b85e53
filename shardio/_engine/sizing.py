"""How large a block is: known before the first is made, so that the budget can be checked."""

from __future__ import annotations

import mmap

import numpy as np

from shardio._engine.recipe import Recipe
from shardio.collate import BlockLayout
from shardio.dataset import ShardDataset
from shardio.errors import MemoryShort

_SAMPLED = 256


def block_bytes(
    layout: BlockLayout, recipe: Recipe, dataset: ShardDataset, memory_bytes: int
) -> int:
    """The size of a new block; what varies is guessed from the first shard, and blocks grow.

    Raises:
        MemoryShort: the budget is smaller than one block.
    """
    n_bytes = layout.heap + _expected_heap(layout, recipe, dataset)
    if n_bytes > memory_bytes:
        raise MemoryShort(
            f"a batch of {recipe.block_rows} samples needs a block of {n_bytes} bytes; "
            f"memory_bytes allows {memory_bytes}: raise it, or lower batch_size"
        )
    return n_bytes


def _expected_heap(layout: BlockLayout, recipe: Recipe, dataset: ShardDataset) -> int:
    names = [slot.name for slot in layout.varying if slot.name in recipe.fields]
    n = min(_SAMPLED, recipe.n_samples)
    if not names or not n or recipe.transform is not None:
        return mmap.PAGESIZE if layout.varying else 0
    n_rows = dataset.shards[0].n_samples
    rows = np.linspace(0, max(0, n_rows - 1), min(n, n_rows), dtype=np.int64)
    records = [(name, dataset.reader(0, name).records) for name in names if len(rows)]
    sizes = [found.entries(name, rows)["n_bytes"].mean() for name, found in records]
    wanted = int(1.5 * sum(sizes) * recipe.block_rows) + mmap.PAGESIZE
    return -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
