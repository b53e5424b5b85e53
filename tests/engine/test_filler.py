from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Batch, Json, Schema, ShardDataset, Text
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan
from shardio._engine.filling.filler import Filler
from shardio._workers.processes import blocks
from shardio._workers.processes.blocks import Block
from shardio.batch.layout import CLAIMED, EMPTY, FILLED, NO_FIELD, BlockLayout
from shardio.errors import ChecksumMismatch, InsufficientMemory, TransformError
from shardio.order import FullShuffle, RankPartition, Sequential
from shardio.order.permutation import SampleGenerators, epoch_permutation
from shardio.samples.shard_dataset import DatasetSource
from shardio.samples.view import RowView
from tests.loading import write_dataset
from tests.shards import EVERY_FIELD, as_read, every_field_sample, same_in_batch, same_value

pytestmark = pytest.mark.usefixtures("quick_disk")

N_SAMPLES = 50


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, ShardDataset]]:
    root = tmp_path_factory.mktemp("datasets")
    opened = {
        n: ShardDataset(write_dataset(root / str(n), N_SAMPLES, n)) for n in (1, 3, 2 * N_SAMPLES)
    }
    yield opened
    for dataset in opened.values():
        dataset.close()


@pytest.fixture
def dataset(datasets: dict[int, ShardDataset]) -> ShardDataset:
    """Open samples 0 to 49 in three shards, which begin at 0, 16 and 33."""
    return datasets[3]


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
        passes = changes.pop("passes", ())
        self.batch_spec = batch_spec_for(dataset, **changes)
        self.filler = Filler(self.batch_spec, RowView(dataset), passes)
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


def agree(batch: Batch, rows: list[int]) -> bool:
    """Check that a batch holds these samples of EVERY_FIELD, and names them."""
    assert batch.indices.tolist() == rows
    assert batch.valid.all()
    for name in batch:
        for value, row in zip(batch[name], rows, strict=True):
            expected = as_read(every_field_sample(row))[name]
            is_there = batch.present(name)[rows.index(row)]
            if is_there == (expected is None) or not same_in_batch(value, expected):
                return False
    return True


# Without a transform.


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n_shards", [1, 3, 100])
def test_every_batch_holds_the_samples_at_its_positions(
    datasets: dict[int, ShardDataset], filling: Make, n_shards: int, shuffle: object
) -> None:
    dataset = datasets[n_shards]
    filled = filling(dataset, shuffle=shuffle, seed=5)
    for epoch in (1, 0):
        rows = np.arange(N_SAMPLES)
        if shuffle:
            rows = epoch_permutation(N_SAMPLES, seed=5, epoch=epoch).at(rows)
        for step in (6, 0, 3):
            batch = filled.fill(epoch, step)
            stop = min(N_SAMPLES, 8 * step + 8)
            assert agree(batch, rows[8 * step : stop].tolist())
            origins = [dataset.starts[shard] + row for shard, row in batch.origins.tolist()]
            assert origins == batch.indices.tolist()


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


def test_only_the_fields_asked_for_are_filled_in_their_order(
    dataset: ShardDataset, filling: Make
) -> None:
    batch = filling(dataset, fields=("note", "label")).fill(0, 2)
    assert list(batch) == ["note", "label"]
    assert agree(batch, list(range(16, 24)))


def test_a_block_grows_as_far_as_its_values_need(dataset: ShardDataset, filling: Make) -> None:
    filled = filling(dataset, block_rows=50)
    assert len(filled.block.bytes) == filled.layout.heap
    assert agree(filled.fill(0, 0), list(range(50)))
    assert len(filled.block.bytes) > filled.layout.heap


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


def test_memory_that_a_batch_cannot_have_is_memory_short(
    dataset: ShardDataset, filling: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(n_bytes: int, what: str) -> None:
        raise InsufficientMemory(f"{n_bytes} bytes for {what}")

    filled = filling(dataset)
    monkeypatch.setattr(blocks, "require", require)
    with pytest.raises(InsufficientMemory, match="values of varying size"):
        filled.fill(0, 1)


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


def stamp(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return the sample's number, and a draw of each generator for it."""
    return {
        "label": sample["label"],
        "drawn": rng.random(3),
        "python": random.random(),
        "numpy": np.random.random(),
    }


def draws(filled: Filling, epoch: int, n_steps: int) -> dict[int, list[Any]]:
    found = {}
    for step in range(n_steps):
        batch = filled.fill(epoch, step)
        for i, label in enumerate(batch["label"].tolist()):
            found[label] = [batch[key][i].tolist() for key in ("drawn", "python", "numpy")]
    return found


def test_what_is_drawn_for_a_sample_depends_on_seed_epoch_and_position_only(
    dataset: ShardDataset, filling: Make
) -> None:
    def make(**changes: Any) -> Filling:
        return filling(dataset, transform=stamp, shuffle=True, **changes)

    plain = draws(make(seed=3), epoch=1, n_steps=7)
    assert len(plain) == N_SAMPLES
    assert draws(make(seed=3, block_rows=5), epoch=1, n_steps=10) == plain
    others = [draws(make(seed=4), epoch=1, n_steps=7), draws(make(seed=3), epoch=2, n_steps=7)]
    for other in others:
        assert all(other[label][k] != plain[label][k] for label in plain for k in range(3))


def test_no_two_samples_draw_the_same(dataset: ShardDataset, filling: Make) -> None:
    filled = filling(dataset, transform=stamp)
    found = draws(filled, epoch=0, n_steps=7)
    for k in range(1, 3):
        assert len({values[k] for values in found.values()}) == N_SAMPLES


def test_the_generator_given_is_that_of_the_position(dataset: ShardDataset, filling: Make) -> None:
    batch = filling(dataset, transform=stamp, seed=9).fill(4, 2)
    for i in range(8):
        expected = SampleGenerators(9).at(4, 16 + i).random(3)
        assert np.array_equal(batch["drawn"][i], expected)


def test_a_transform_gets_the_fields_asked_for_and_cannot_write_into_them(
    dataset: ShardDataset, filling: Make
) -> None:
    seen = []

    def look(sample: dict[str, Any]) -> dict[str, Any]:
        seen.append(list(sample))
        writable = [
            name
            for name, value in sample.items()
            if isinstance(value, np.ndarray) and value.flags.writeable
        ]
        return {"writable": writable}

    fields = ("points", "frames", "packed", "note")
    batch = filling(dataset, transform=look, fields=fields).fill(0, 0)
    assert seen == [list(fields)] * 9  # the first sample once more, for its schema
    assert batch["writable"] == [[]] * 8


def make_all_kinds(sample: dict[str, Any]) -> dict[str, Any]:
    i = int(sample["label"])
    return {
        "text": "ü" * i,
        "points": np.full((i % 3, 2), i, ">i2"),  # varies in the source, and therefore here
        "swapped": np.array([i, -i], ">i4"),
        "number": i,
        "json": {"i": [i, None]},
        "image": sample["frames"][0][::2, ::2],
        "bits": sample["bits"],
        "bytes": bytearray([i]) * 3000,
    }


def test_whatever_a_transform_returns_arrives(dataset: ShardDataset, filling: Make) -> None:
    filled = filling(dataset, transform=make_all_kinds, block_rows=50, seed=2, shuffle=True)
    before = len(filled.block.bytes)
    batch = filled.fill(3, 0)
    assert len(filled.block.bytes) > before, "it grew in the middle"
    for k, i in enumerate(batch.indices.tolist()):
        made = make_all_kinds(as_read(every_field_sample(i)))
        assert batch["text"][k] == made["text"]
        assert batch["json"][k] == made["json"]
        assert batch["bytes"][k] == bytes(made["bytes"])
        assert batch["number"][k] == i
        for name in ("points", "swapped", "image", "bits"):
            assert np.array_equal(batch[name][k], made[name])
            assert batch[name][k].dtype.isnative
    assert filled.layout.schema["bits"] == Array("bfloat16", (3,))
    assert batch.valid.all()


def test_the_schema_is_that_of_the_first_sample_whoever_asks(
    dataset: ShardDataset, filling: Make
) -> None:
    def name_it(sample: dict[str, Any]) -> dict[str, Any]:
        return {f"sample {int(sample['label'])}": 1}

    filler = filling(dataset, transform=name_it, shuffle=True, seed=6).filler
    assert list(filler.batch_schema()) == ["sample 0"]


def test_an_empty_dataset_never_runs_the_transform(tmp_path: Path) -> None:
    with ShardDataset(write_dataset(tmp_path / "d", 0, 1)) as dataset:
        batch_spec = batch_spec_for(dataset, transform=lambda sample: 1 / 0)
        assert Filler(batch_spec, RowView(dataset)).batch_schema() == dataset.schema


def test_without_a_transform_the_schema_is_that_of_the_fields(dataset: ShardDataset) -> None:
    batch_spec = batch_spec_for(dataset, fields=("note", "meta"))
    assert Filler(batch_spec, RowView(dataset)).batch_schema() == Schema(
        {"note": Text(), "meta": Json()}
    )


# Transforms that fail. Sample 20 is number 4 of the second shard, which begins at 16.


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def failing_at(row: int, error: BaseException) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["label"]) == row:
            raise error
        return {"label": sample["label"]}

    return fail


@pytest.mark.parametrize(
    "error",
    [
        ValueError("broken pixels"),
        SystemExit(3),
        KeyboardInterrupt(),
        StopIteration(4),
        GeneratorExit(),
        MemoryError(),
        SilentError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_transform_raises_is_its_failure_and_names_the_sample(
    dataset: ShardDataset, filling: Make, error: BaseException
) -> None:
    filled = filling(dataset, transform=failing_at(20, error))
    with pytest.raises(TransformError) as caught:
        filled.fill(0, 2)
    text = str(caught.value)
    assert f"the transform raised {type(error).__name__}" in text
    assert f"sample 4 of shard 000001-000.shard of {dataset.path} (position 20)" in text
    assert caught.value.__cause__ is error


def test_the_message_holds_the_users_own_frames_only(dataset: ShardDataset, filling: Make) -> None:
    filled = filling(dataset, transform=failing_at(20, ValueError("broken pixels")))
    with pytest.raises(TransformError) as caught:
        filled.fill(0, 2)
    text = str(caught.value)
    assert "broken pixels" in text
    assert "in fail\n" in text
    assert "filling/filler.py" not in text
    assert "filling/filler.py" in "".join(traceback.format_exception(caught.value))


def test_the_block_says_which_sample_failed(dataset: ShardDataset, filling: Make) -> None:
    filled = filling(dataset, transform=failing_at(20, ValueError()))
    with pytest.raises(TransformError):
        filled.fill(0, 2)
    assert filled.statuses() == [FILLED] * 4 + [CLAIMED] + [EMPTY] * 3
    assert set(filled.layout.origins(filled.block.bytes)["field"].tolist()) == {NO_FIELD}


def test_exceptions_that_pass_are_not_the_transforms(dataset: ShardDataset, filling: Make) -> None:
    interrupt = KeyboardInterrupt()
    transform = failing_at(20, interrupt)
    filled = filling(dataset, transform=transform, passes=(KeyboardInterrupt,))
    with pytest.raises(KeyboardInterrupt) as caught:
        filled.fill(0, 2)
    assert caught.value is interrupt


def test_a_transform_that_fails_on_the_first_sample_is_named_when_the_schema_is_asked_for(
    dataset: ShardDataset,
) -> None:
    filler = Filler(
        batch_spec_for(dataset, transform=failing_at(0, ValueError("first"))), RowView(dataset)
    )
    with pytest.raises(TransformError, match=r"sample 0 of shard 000000-000\.shard"):
        filler.batch_schema()


def test_a_first_sample_that_no_batch_can_hold_is_named(dataset: ShardDataset) -> None:
    filler = Filler(
        batch_spec_for(dataset, transform=lambda sample: {"x": object()}), RowView(dataset)
    )
    with pytest.raises(TransformError, match=r"'x'.*cannot be put into a batch[^$]*sample 0"):
        filler.batch_schema()


@pytest.mark.parametrize(
    ("odd_one", "text"),
    [
        (None, "must be a dict of fields, found NoneType"),
        ([{"x": np.zeros(2), "t": ""}], "must be a dict of fields, found list"),
        (
            {"x": np.zeros(3), "t": ""},
            r"first sample \(sample 0 of shard 000000-000\.shard\) had float64 of shape \(2,\)",
        ),
        ({"x": [1, [2]], "t": ""}, "this has a list"),
        ({"x": np.zeros(2)}, r"first sample \(.*\) had fields"),
        ({"x": np.zeros(2), "t": b""}, "expected str, found bytes"),
        ({"x": np.zeros(2), "t": "\ud800"}, "not valid Unicode"),
    ],
    ids=["none", "list", "shape", "ragged list", "field missing", "bytes", "surrogate"],
)
def test_a_later_sample_unlike_the_first_is_named_with_both(
    dataset: ShardDataset, filling: Make, odd_one: object, text: str
) -> None:
    def differ(sample: dict[str, Any]) -> Any:
        return odd_one if int(sample["label"]) == 20 else {"x": np.zeros(2), "t": ""}

    filled = filling(dataset, transform=differ)
    filled.fill(0, 0)
    with pytest.raises(TransformError, match=text) as caught:
        filled.fill(0, 2)
    assert "sample 4 of shard 000001-000.shard" in str(caught.value)


def test_after_a_failure_the_block_can_be_filled_again(
    dataset: ShardDataset, filling: Make
) -> None:
    filled = filling(dataset, transform=failing_at(20, ValueError()))
    with pytest.raises(TransformError):
        filled.fill(0, 2)
    batch = filled.fill(0, 1)
    assert batch["label"].tolist() == list(range(8, 16))
    assert batch.valid.all()
