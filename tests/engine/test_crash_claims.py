from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
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


@pytest.fixture
def block() -> Iterator[Block]:
    made = Block(0, LAYOUT.heap)
    yield made
    os.close(made.fd)


def claim(block: Block, claims: list[tuple[int, int]], field: int = NO_FIELD) -> None:
    """Leave (shard, row) in a block, the way a worker does that dies while it reads a field."""
    origins = LAYOUT.origins(block.bytes)
    origins["status"] = EMPTY
    part = origins[: len(claims)]
    part["shard"], part["row"] = np.array(claims).T
    part["status"], part["field"] = CLAIMED, field


def described(block: Block, dataset: ShardDataset) -> str:
    return claims_in(LAYOUT, block, dataset, FIELDS).text


def test_a_block_without_claims_names_no_sample(block: Block, dataset: ShardDataset) -> None:
    assert described(block, dataset) == "before it began with"
    LAYOUT.origins(block.bytes)["status"] = FILLED
    assert described(block, dataset) == "before it began with"


def test_one_sample_is_named_with_its_shard(block: Block, dataset: ShardDataset) -> None:
    claim(block, [(3, 1)])
    assert described(block, dataset) == (
        "while it worked on sample 1 of shard 000003-000.shard for"
    )


def test_rows_that_are_done_or_not_begun_are_not_named(block: Block, dataset: ShardDataset) -> None:
    claim(block, [(0, 0), (1, 1), (2, 0)])
    LAYOUT.origins(block.bytes)["status"][:3] = FILLED, CLAIMED, EMPTY
    assert described(block, dataset) == (
        "while it worked on sample 1 of shard 000001-000.shard for"
    )


def test_the_field_being_read_is_named_by_the_recipes_order(
    block: Block, dataset: ShardDataset
) -> None:
    claim(block, [(0, 0), (0, 1)], field=0)
    assert described(block, dataset) == (
        "while it worked on field 'note' of samples 0, 1 of shard 000000-000.shard for"
    )


def test_no_field_is_named_where_rows_disagree(block: Block, dataset: ShardDataset) -> None:
    claim(block, [(0, 0), (0, 1)], field=0)
    LAYOUT.origins(block.bytes)["field"][1] = 1
    assert "field" not in described(block, dataset)


def test_three_samples_of_a_shard_are_named_and_more_hinted_at(
    block: Block, dataset: ShardDataset
) -> None:
    claim(block, [(2, row) for row in (5, 6, 7)])
    assert "samples 5, 6, 7 of shard 000002-000.shard for" in described(block, dataset)
    claim(block, [(2, row) for row in (5, 6, 7, 8)])
    assert "samples 5, 6, 7, … of shard 000002-000.shard for" in described(block, dataset)


def test_three_shards_are_named_and_more_hinted_at(block: Block, dataset: ShardDataset) -> None:
    claim(block, [(shard, 0) for shard in (4, 1, 0)])
    assert described(block, dataset) == (
        "while it worked on sample 0 of shard 000000-000.shard; sample 0 of shard "
        "000001-000.shard; sample 0 of shard 000004-000.shard for"
    )
    claim(block, [(shard, 0) for shard in (4, 1, 0, 2)])
    assert described(block, dataset).endswith("000002-000.shard and others for")
