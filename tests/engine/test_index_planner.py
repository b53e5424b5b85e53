from __future__ import annotations

from pathlib import Path

import pytest

import shardio
from shardio import Array, Schema
from shardio._engine.filling.batch_spec import EpochPlan, IndexPlanner
from shardio.order import FullShuffle, RankPartition
from shardio.order.permutation import CHUNK, epoch_permutation
from shardio.samples.view import RowView

SCHEMA = Schema({"label": Array("int64")})
N = 2 * CHUNK + 77


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("index_planner") / "set"
    with shardio.DatasetWriter(path, SCHEMA) as writer:
        for i in range(N):
            writer.append({"label": i})
    return str(path)


@pytest.mark.parametrize("n_workers", [1, 2, 3, 7])
@pytest.mark.parametrize("tail", ["short", "pad"])
@pytest.mark.parametrize("first", [0, 40])
def test_a_step_has_its_samples_whoever_does_which(
    folder: str, n_workers: int, tail: str, first: int
) -> None:
    partition = RankPartition(N, first, 13, rank=1, world_size=2, tail=tail)  # type: ignore[arg-type]
    plan = EpochPlan(3, partition, FullShuffle())
    order = epoch_permutation(N, seed=5, epoch=3)
    with shardio.open(folder) as dataset:
        index_planner = IndexPlanner(RowView(dataset), seed=5)
        index_planner.n_workers = n_workers
        steps = list(range(plan.partition.first_step, plan.partition.stop_step))
        # Its own ones, and now and then one of another.
        for step in [*steps[::n_workers], *steps[1:30], *steps[-5:]]:
            index_chunk, part = index_planner.index_chunk(plan, step)
            start, stop = plan.partition.read(step)
            expected = order.at(plan.partition.positions(step, step + 1)).tolist()
            assert len(expected) == stop - start
            assert index_chunk.rows[part].tolist() == expected
