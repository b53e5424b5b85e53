"""What the pictures of a dataset are in a batch: decoded, of one size or of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from shardio.dataset import ShardDataset
from shardio.format.checksum import distinct
from shardio.format.fields import Array, Field, Image
from shardio.format.schema import Schema
from shardio.units import Rows

_AT_ONCE: Final = 1 << 16
Sizes = Mapping[str, tuple[int, int]]
"""Height and width of those fields whose pictures all have the same."""


def picture_fields(schema: Schema, names: Iterable[str]) -> tuple[str, ...]:
    """Those of some fields that hold pictures."""
    return tuple(name for name in names if isinstance(schema[name], Image))


def decoded(schema: Schema, sizes: Sizes | None = None) -> Schema:
    """The schema of samples whose pictures are decoded: uint8 (height, width, 3).

    Args:
        schema: as they are stored.
        sizes: see there; height and width of all others vary from sample to sample.
    """
    return Schema(
        {name: _decoded(field, (sizes or {}).get(name)) for name, field in schema.items()}
    )


def _decoded(field: Field, size: tuple[int, int] | None) -> Field:
    if not isinstance(field, Image):
        return field
    return Array("uint8", (*(size or (None, None)), 3), optional=field.optional)


def common_sizes(dataset: ShardDataset, names: Iterable[str]) -> Sizes:
    """Look which fields' pictures have one height and width, in all samples that a dataset shows.

    That is in the index, 24 bytes for each picture, and is read until one differs. Pictures that
    are absent do not count.

    Raises:
        ShardCorrupt: that part of the index is damaged.
    """
    found = {name: _common_size(dataset, name) for name in names}
    return {name: size for name, size in found.items() if size is not None}


def _common_size(dataset: ShardDataset, name: str) -> tuple[int, int] | None:
    common: tuple[int, int] | None = None
    for start in range(0, len(dataset), _AT_ONCE):
        rows = dataset.rows(np.arange(start, min(start + _AT_ONCE, len(dataset))))
        shards = dataset.locate(rows)
        for shard in distinct(shards).tolist():
            own = rows[shards == shard] - dataset.starts[shard]
            for size in _sizes_in(dataset, shard, name, own):
                if size != (common or size):
                    return None
                common = size
    return common


def _sizes_in(dataset: ShardDataset, shard: int, name: str, rows: Rows) -> list[tuple[int, int]]:
    """The sizes that some pictures of a shard have, each once; no more than two of them."""
    records = dataset.reader(shard, name).records
    sizes = records.shapes(name, rows)[:, :2][records.present(name, rows)]
    if not len(sizes):
        return []
    others = sizes[(sizes != sizes[0]).any(1)]
    return [(int(height), int(width)) for height, width in (*sizes[:1], *others[:1])]
