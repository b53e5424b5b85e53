from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardio import Array, Schema, ShardDataset, Text
from shardio._engine.dispatch.crashes import claims_in
from shardio._workers.processes.blocks import Block
from shardio.batch.layout import CLAIMED, EMPTY, FILLED, NO_FIELD, layout_for_samples
from tests.loading import write_dataset

pytestmark = pytest.mark.usefixtures("quick_disk")

SCHEMA = Schema({"label": Array("int64"), "note": Text()})
FIELDS = ("note", "label")  # in another order than the dataset's: the recipe's counts
LAYOUT = layout_for_samples(SCHEMA, 6)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardDataset]:
    root: Path = tmp_path_factory.mktemp("claims")
    with ShardDataset(write_dataset(root / "d", 10, 5, SCHEMA)) as opened:
        yield opened


def described(dataset: ShardDataset, rows: list[tuple[int, ...]]) -> str:
    """Describe the claims of a worker that crashes with these rows: shard, row, field, status."""
    block = Block(0, LAYOUT.heap)
    try:
        origins = LAYOUT.origins(block.bytes)
        origins["status"] = EMPTY
        for i, (shard, row, field, status) in enumerate(rows):
            origins[i]["shard"], origins[i]["row"] = shard, row
            origins[i]["field"], origins[i]["status"] = field, status
        return claims_in(LAYOUT, block, dataset, FIELDS).text
    finally:
        os.close(block.fd)


def claimed(*places: tuple[int, int], field: int = NO_FIELD) -> list[tuple[int, ...]]:
    return [(*place, field, CLAIMED) for place in places]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, 0, NO_FIELD, FILLED)], "before it began with"),
        (
            [(0, 0, NO_FIELD, FILLED), *claimed((1, 1)), (2, 0, NO_FIELD, EMPTY)],
            "while it worked on sample 1 of shard 000001-000.shard for",
        ),
        (
            claimed((0, 0), (0, 1), field=0),  # by the order of the fields that are read
            "while it worked on field 'note' of samples 0, 1 of shard 000000-000.shard for",
        ),
        (
            [*claimed((0, 0), field=0), *claimed((0, 1), field=1)],
            "while it worked on samples 0, 1 of shard 000000-000.shard for",
        ),
        (
            claimed((2, 5), (2, 6), (2, 7), (2, 8)),
            "while it worked on samples 5, 6, 7, … of shard 000002-000.shard for",
        ),
        (
            claimed((4, 0), (1, 5), (1, 6), (1, 7), (0, 0)),
            "while it worked on sample 0 of shard 000000-000.shard; samples 5, 6, 7 of shard "
            "000001-000.shard; sample 0 of shard 000004-000.shard for",
        ),
        (
            claimed((4, 0), (1, 0), (0, 0), (2, 0)),
            "while it worked on sample 0 of shard 000000-000.shard; sample 0 of shard "
            "000001-000.shard; sample 0 of shard 000002-000.shard and others for",
        ),
    ],
)
def test_samples_at_which_a_worker_crashed_are_named_up_to_three_a_shard_and_three_shards(
    dataset: ShardDataset, rows: list[tuple[int, ...]], expected: str
) -> None:
    assert described(dataset, rows) == expected
