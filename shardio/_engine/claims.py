"""What a worker was doing when it died: read from the origin table that it left in its block."""

from __future__ import annotations

import numpy as np

from shardio._engine.blocks import Block
from shardio._engine.fill import Recipe
from shardio.collate import CLAIMED, NO_FIELD, BlockLayout
from shardio.dataset import ShardDataset
from shardio.order import Order

_NAMED_SAMPLES = 3


def describe_first(recipe: Recipe, dataset: ShardDataset) -> str:
    """Name the sample that the schema of batches is made from, as part of a sentence."""
    order = Order(recipe.n_samples, shuffle=recipe.shuffle, seed=recipe.seed, epoch=0)
    rows = order.rows(0, 1)
    shard = int(dataset.locate(rows)[0])
    row = int(rows[0] - dataset.starts[shard])
    return f"the first sample: sample {row} of shard {dataset.shards[shard].name} of {recipe.path}"


def describe_claims(
    layout: BlockLayout, block: Block, dataset: ShardDataset, fields: tuple[str, ...]
) -> str:
    """Say which samples of which shards were being read or transformed, as part of a sentence."""
    origins = layout.origins(block.bytes)
    claimed = origins[origins["status"] == CLAIMED]
    if not len(claimed):
        return "while it worked on"
    numbers = set(claimed["field"].tolist()) - {NO_FIELD}
    field = f"field {fields[numbers.pop()]!r} of " if len(numbers) == 1 else ""
    named = []
    for shard in np.unique(claimed["shard"]).tolist()[:_NAMED_SAMPLES]:
        rows = claimed["row"][claimed["shard"] == shard].tolist()
        listed = ", ".join(map(str, rows[:_NAMED_SAMPLES])) + (", …" if len(rows) > 3 else "")
        plural = "samples" if len(rows) > 1 else "sample"
        named.append(f"{plural} {listed} of shard {dataset.shards[shard].name}")
    more = " and others" if len(np.unique(claimed["shard"])) > _NAMED_SAMPLES else ""
    return f"while it worked on {field}{'; '.join(named)}{more} for"
