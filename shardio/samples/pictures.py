"""What the pictures of a dataset are in a batch: decoded, of one size or of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardio.dataset.dataset import Dataset
from shardio.dataset.scan import ShardSamples, scan
from shardio.format.fields import Array, Field, Image
from shardio.format.schema import Schema
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows

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


def common_sizes(dataset: Dataset, names: Iterable[str]) -> Sizes:
    """Look which fields' pictures have one height and width, in all samples that a dataset shows.

    That is in the index, 24 bytes for each picture, and is read until one differs. Pictures that
    are absent do not count.

    Raises:
        ShardCorrupt: that part of the index is damaged.
    """
    found = {name: _common_size(dataset, name) for name in names}
    return {name: size for name, size in found.items() if size is not None}


def _common_size(dataset: Dataset, name: str) -> tuple[int, int] | None:
    def look(part: ShardSamples) -> list[tuple[int, int]]:
        return _sizes_in(part.reader(name), name, part.rows)

    common: tuple[int, int] | None = None
    for _, sizes in scan(dataset, look, n=len(dataset), rows_of=dataset.rows.at):
        for size in sizes:
            if size != (common or size):
                return None
            common = size
    return common


def _sizes_in(reader: ShardReader, name: str, rows: Rows) -> list[tuple[int, int]]:
    """The sizes that some pictures of a shard have, each once; no more than two of them."""
    records = reader.records
    sizes = records.shapes(name, rows)[:, :2][records.present(name, rows)]
    if not len(sizes):
        return []
    others = sizes[(sizes != sizes[0]).any(1)]
    return [(int(height), int(width)) for height, width in (*sizes[:1], *others[:1])]
