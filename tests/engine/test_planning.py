"""Plans of the engine: the sizes and numbers of blocks, and the samples of each step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Schema, ShardLoader
from shardio._engine.filling.batch_spec import EpochPlan, IndexPlanner
from shardio._engine.filling.sizing import n_blocks_wanted
from shardio.order import FullShuffle
from shardio.order.permutation import CHUNK, epoch_permutation
from shardio.order.ranks import RankPartition
from shardio.samples.view import RowView
from tests.loading import write_dataset

MIB = 1 << 20


@pytest.mark.parametrize(
    ("n_workers", "prefetch", "n_bytes", "n_blocks"),
    [
        (0, None, 1, 2),
        (2, 0, 1, 3),
        (2, 4, 9 * MIB, 7),
        (2, None, 9 * MIB, 5),
        (2, None, MIB + 1, 5),
        (2, None, MIB, 27),
        (1, None, 4096, 19),
    ],
)
def test_small_blocks_are_more_unless_their_number_is_given(
    n_workers: int, prefetch: int | None, n_bytes: int, n_blocks: int
) -> None:
    assert n_blocks_wanted(n_workers, prefetch, n_bytes) == n_blocks


def arrays(n: int) -> Iterator[dict[str, Any]]:
    return ({"x": np.zeros(1000 + i, np.int32)} for i in range(n))


@pytest.mark.parametrize("transform", [None, lambda sample: sample])
@pytest.mark.parametrize("collate", ["stack", "pad", "ragged", {"x": (2000,)}])
def test_varying_blocks_start_large_enough(tmp_path: Path, collate: Any, transform: Any) -> None:
    schema = Schema({"x": Array("int32", (None,))})
    folder = write_dataset(tmp_path / "set", 40, 2, schema, arrays(40))
    options: dict[str, Any] = {"collate": collate, "transform": transform, "num_workers": 0}
    with ShardLoader(folder, 10, output="numpy", **options) as loader:
        list(loader)
        pool = loader._engine.pool
        assert {len(pool[i].bytes) for i in range(len(pool))} == {pool.block_bytes}
        assert pool.block_bytes < 2 * 10 * (2000 if isinstance(collate, dict) else 1000) * 5


def test_blocks_have_room_for_what_is_made_of_a_whole_batch(tmp_path: Path) -> None:
    schema = Schema({"x": Array("int32", (None,))})
    folder = write_dataset(tmp_path / "set", 40, 2, schema, arrays(40))
    made = {"y": np.zeros(1 << 20, np.uint8)}
    options: dict[str, Any] = {"batch_transform": lambda batch: made, "num_workers": 0}
    with ShardLoader(folder, 10, output="numpy", **options) as loader:
        list(loader)
        pool = loader._engine.pool
        assert {len(pool[i].bytes) for i in range(len(pool))} == {pool.block_bytes}
        assert MIB < pool.block_bytes < MIB + 16384


SCHEMA = Schema({"label": Array("int64")})
N = 2 * CHUNK + 77


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("index_planner") / "set"
    with shardio.DatasetWriter(path, SCHEMA) as writer:
        for i in range(N):
            writer.append({"label": i})
    return str(path)


def test_the_order_of_an_epoch_is_arranged_once(
    labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arranged, arrange = list[int](), FullShuffle.arrange

    def counted(self: Any, samples: Any, n: int, *, seed: int, epoch: int) -> Any:
        arranged.append(epoch)
        return arrange(self, samples, n, seed=seed, epoch=epoch)

    monkeypatch.setattr(FullShuffle, "arrange", counted)
    plan, other = (EpochPlan(epoch, RankPartition(N, 0, 13), FullShuffle()) for epoch in (3, 4))
    with shardio.open(labels) as dataset:
        index_planner = IndexPlanner(RowView(dataset), seed=5)
        for each in (plan, plan, other):
            index_planner.chunk_at(each, np.arange(5))
            index_planner.index_chunk(each, 0)
    assert arranged == [3, 4]


@pytest.mark.parametrize("n_workers", [1, 2, 3, 7])
@pytest.mark.parametrize("tail", ["short", "pad"])
@pytest.mark.parametrize("first", [0, 40])
def test_a_step_has_its_samples(labels: str, n_workers: int, tail: str, first: int) -> None:
    partition = RankPartition(N, first, 13, rank=1, world_size=2, tail=tail)  # type: ignore[arg-type]
    plan = EpochPlan(3, partition, FullShuffle())
    order = epoch_permutation(N, seed=5, epoch=3)
    with shardio.open(labels) as dataset:
        index_planner = IndexPlanner(RowView(dataset), seed=5)
        index_planner.n_workers = n_workers
        steps = list(range(plan.partition.first_step, plan.partition.stop_step))
        # Its own ones, and now and then one of another.
        for step in [*steps[::n_workers], *steps[1:30], *steps[-5:]]:
            index_chunk, part = index_planner.index_chunk(plan, step)
            start, stop = plan.partition.read_range(step)
            expected = order.at(plan.partition.positions(step, step + 1)).tolist()
            assert len(expected) == stop - start
            assert index_chunk.rows[part].tolist() == expected
