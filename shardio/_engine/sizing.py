"""How large a block is, and how many there are: known before the first, to check the budget."""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np

from shardio._engine.recipe import Recipe
from shardio._engine.schedule import DEPTH
from shardio.collate import BlockLayout
from shardio.dataset import ShardDataset
from shardio.errors import MemoryShort

_SAMPLED: Final = 256
_PREFETCH: Final = 2
_SMALL_BYTES: Final = 1 << 20


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


def n_blocks_wanted(n_workers: int, prefetch: int | None, n_bytes: int) -> int:
    """How many blocks of n_bytes a pass needs, if there is memory.

    One per worker and `prefetch` more, and one for the batch in the loop's hands; without workers
    nothing is filled ahead. Few are faster than many, as they stay in the cache; but small ones are
    filled so fast that main hardly comes to give out the next. So by default there are so many of
    those that each worker can have both of its tasks, and the loop the batch that it lets go of.
    """
    if not n_workers:
        return 2
    if prefetch is not None:
        return n_workers + prefetch + 1
    n_extra = n_workers * (DEPTH - 1) + 1 if n_bytes <= _SMALL_BYTES else 0
    return n_workers + _PREFETCH + 1 + n_extra


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
