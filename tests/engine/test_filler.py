from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Batch, ShardDataset
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan
from shardio._engine.filling.filler import Filler
from shardio._workers.processes.blocks import Block
from shardio.batch.layout import CLAIMED, EMPTY, FILLED, BlockLayout
from shardio.errors import ChecksumMismatch
from shardio.order import FullShuffle, RankPartition, Sequential
from shardio.order.permutation import SampleGenerators
from shardio.samples.shard_dataset import DatasetSource
from shardio.samples.view import RowView
from tests.loading import write_dataset
from tests.shards import EVERY_FIELD, same_value

pytestmark = pytest.mark.usefixtures("quick_disk")

N_SAMPLES = 50


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardDataset]:
    """Open samples 0 to 49 in three shards, which begin at 0, 16 and 33."""
    folder = write_dataset(tmp_path_factory.mktemp("filler") / "set", N_SAMPLES, 3)
    with ShardDataset(folder) as opened:
        yield opened


def batch_spec_for(dataset: ShardDataset, **changes: Any) -> BatchSpec:
    batch_spec = BatchSpec(
        source=DatasetSource(dataset.path),
        fields=tuple(dataset.schema),
        block_rows=8,
        n_samples=len(dataset),
        shuffle=False,
        seed=0,
    )
    return replace(batch_spec, **changes)


class Filling:
    """A filler with a block of its own, as a worker has them; the block begins full of garbage."""

    def __init__(self, dataset: ShardDataset, *, spare_bytes: int = 0, **changes: Any) -> None:
        self.batch_spec = batch_spec_for(dataset, **changes)
        self.filler = Filler(self.batch_spec, RowView(dataset))
        self.layout: BlockLayout = self.batch_spec.lay_out(self.filler.schemas())
        self.block = Block(0, self.layout.heap + spare_bytes)
        self.block.bytes[:] = 0xA5

    def fill(self, epoch: int = 0, step: int = 0) -> Batch:
        partition = RankPartition(self.batch_spec.n_samples, 0, self.batch_spec.block_rows)
        order = FullShuffle() if self.batch_spec.shuffle else Sequential()
        plan = EpochPlan(epoch, partition, order)
        n_rows, heap = self.filler.fill(self.layout, self.block, plan, step)
        assert len(self.block.bytes) >= self.layout.heap + heap
        values = {
            s.name: self.layout.fixed_rows(self.block.bytes, s, n_rows) for s in self.layout.fixed
        }
        return Batch(self.layout, self.block.bytes, n_rows, values, epoch=epoch, step=step)

    def statuses(self) -> list[int]:
        found: list[int] = self.layout.origins(self.block.bytes)["status"].tolist()
        return found

    def close(self) -> None:
        os.close(self.block.fd)


@pytest.fixture
def filling() -> Iterator[Callable[..., Filling]]:
    made: list[Filling] = []

    def make(dataset: ShardDataset, **changes: Any) -> Filling:
        made.append(Filling(dataset, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[..., Filling]


# Without a transform.


def test_a_batch_is_the_same_whatever_was_filled_before(
    dataset: ShardDataset, filling: Make
) -> None:
    used, fresh = (filling(dataset, shuffle=True, seed=1, spare_bytes=1 << 20) for _ in range(2))
    for step in (5, 6, 1):
        used.fill(3, step)
    found, expected = used.fill(2, 4), fresh.fill(2, 4)
    assert found.origins.tolist() == expected.origins.tolist()
    for name in expected:
        assert all(map(same_value, found[name], expected[name]))


def test_the_last_batch_leaves_the_rest_of_its_block_empty(
    dataset: ShardDataset, filling: Make
) -> None:
    filled = filling(dataset)
    filled.fill(0, 0)
    assert filled.fill(0, 6).n_rows == 2
    assert filled.statuses() == [FILLED] * 2 + [EMPTY] * 6


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("transform", [None, lambda sample: {**sample, "note": "odd"}])
def test_arrays_that_vary_begin_on_cache_lines_whatever_lies_before_them(
    dataset: ShardDataset, filling: Make, transform: Any
) -> None:
    fields = ("note", "blob", "points", "cloud")  # sizes that are no multiples of 64
    batch = filling(dataset, fields=fields, transform=transform).fill(0, 2)
    arrays = [*batch["points"], *batch["cloud"]]
    assert [address(array) % 64 for array in arrays if array.size] == [0] * sum(
        array.size > 0 for array in arrays
    )
    assert any(len(batch[name][k]) % 64 for name in ("note", "blob") for k in range(8))


@pytest.mark.parametrize("name", ["odd", "label", "packed", "note", "cloud"])
def test_damage_is_refused_and_the_block_says_what_was_being_read(
    tmp_path: Path, filling: Make, name: str
) -> None:
    with ShardDataset(write_dataset(tmp_path / "d", 20, 1)) as dataset:
        reader = dataset.reader(0)
        if name in EVERY_FIELD.columns:
            section = reader.column_section(name)
            offset = section.offset + 10 * section.stride
        else:
            payload = next(s.offset for s in reader.sections if s.name.startswith("payload"))
            offset = payload + int(reader.records.entries(name, np.array([10]))["offset"][0])
        with open(reader.path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        filled = filling(dataset)
        with pytest.raises(ChecksumMismatch) as caught:
            filled.fill(0, 1)
        assert (caught.value.path, caught.value.field) == (reader.path, name)
        origins = filled.layout.origins(filled.block.bytes)
        assert set(origins["status"].tolist()) == {CLAIMED}
        assert set(origins["field"].tolist()) == {list(EVERY_FIELD).index(name)}
        assert origins["row"].tolist() == list(range(8, 16))


# With a transform.


def test_the_generator_given_is_that_of_the_position(dataset: ShardDataset, filling: Make) -> None:
    batch = filling(dataset, transform=lambda _, rng: {"drawn": rng.random(3)}, seed=9).fill(4, 2)
    for i in range(8):
        expected = SampleGenerators(9).at(4, 16 + i).random(3)
        assert np.array_equal(batch["drawn"][i], expected)


def test_the_schema_is_that_of_the_first_sample_whoever_asks(
    dataset: ShardDataset, filling: Make
) -> None:
    def name_it(sample: dict[str, Any]) -> dict[str, Any]:
        return {f"sample {int(sample['label'])}": 1}

    filler = filling(dataset, transform=name_it, shuffle=True, seed=6).filler
    assert list(filler.schemas().samples) == ["sample 0"]
