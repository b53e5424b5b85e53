"""Generations after the first: published exclusively, on what is there, beside their readers."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from shardio import Array, DatasetWriter, Schema, ShardLoader, Text
from shardio import open as open_dataset
from shardio.dataset.manifest import load, load_generation, publish, publish_next
from shardio.dataset.selection import RowRuns
from shardio.errors import DatasetConflict, DatasetCorrupt, InvalidArgument, UnsupportedEnvironment
from shardio.samples.shard_dataset import ShardDataset
from tests.loading import write_dataset
from tests.maintenance.datasets import tree

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

LABELS = Schema({"label": Array("int64"), "note": Text()})
N = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = ({"label": i, "note": f"note {i}"} for i in range(N))
    return Path(write_dataset(tmp_path / "d", N, 3, LABELS, samples))


def labels(dataset: ShardDataset) -> list[int]:
    return [int(sample["label"]) for sample in dataset]


def test_next_generation_keeps_lineage_and_unchanged_values(folder: Path) -> None:
    first = load(folder)
    second = publish_next(folder, first, classes=("a", "b"))
    assert (second.number, second.lineage) == (2, first.lineage)
    assert (second.shards, second.classes) == (first.shards, ("a", "b"))
    assert (second.schema, second.inputs) == (first.schema, first.inputs)
    assert (second.converter, second.versions) == (first.converter, first.versions)
    assert load(folder) == second
    assert load_generation(folder, 1) == first
    with pytest.raises(DatasetConflict, match="generation 2 exists: another writer") as caught:
        publish_next(folder, first, classes=("theirs",))
    assert str(caught.value).startswith(f"{folder}: ")
    assert load(folder) == second
    third = publish_next(folder, second, subsets={"odd": RowRuns([1], [1])}, stats={"whole": {}})
    assert (third.number, third.classes) == (3, ("a", "b"))
    assert load(folder) == third
    assert (third.subsets, third.stats) == ({"odd": RowRuns([1], [1])}, {"whole": {}})
    assert [load_generation(folder, n).classes for n in (1, 2)] == [(), ("a", "b")]


def test_generations_may_be_a_link_within_the_dataset(folder: Path, tmp_path: Path) -> None:
    folder.joinpath("generations").rename(folder / "moved")
    folder.joinpath("generations").symlink_to("moved")
    assert publish_next(folder, load(folder), classes=("a",)) == load(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generations").symlink_to(folder / "moved")
    with pytest.raises(DatasetCorrupt, match="a link that leads out of the dataset"):
        publish(tmp_path / "other", schema=LABELS, shards=[])


def test_another_dataset_in_the_same_folder_is_a_conflict(folder: Path, tmp_path: Path) -> None:
    first = load(folder)
    other = publish(tmp_path / "other", schema=Schema({"x": Text()}), shards=[])
    assert other.lineage != first.lineage
    for name in ("dataset.json", "generations/000001.json"):
        (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
    before = tree(folder)
    with pytest.raises(DatasetConflict) as caught:
        publish_next(folder, first)
    assert str(folder) in str(caught.value)
    assert tree(folder) == before


def test_a_generation_that_a_killed_writer_did_not_publish_is_removed(folder: Path) -> None:
    first = load(folder)
    pointer = (folder / "dataset.json").read_bytes()
    publish_next(folder, first, classes=("killed",))
    (folder / "dataset.json").write_bytes(pointer)
    assert load(folder) == first
    later = publish_next(folder, first, classes=("later",))
    assert (later.number, later.classes) == (2, ("later",))
    assert load(folder) == later


def test_writing_needs_locks(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    first, before = load(folder), tree(folder)
    monkeypatch.setattr(fcntl, "flock", refuse)
    for write in (
        lambda: publish_next(folder, first, classes=("mine",)),
        lambda: DatasetWriter(tmp_path / "new", LABELS),
    ):
        with pytest.raises(UnsupportedEnvironment, match="no locks .*; mount it with locks, or"):
            write()
    assert tree(folder) == before
    assert list((tmp_path / "new").iterdir()) == []


def _race(folder: str, number: int, barrier: Any, queue: Any) -> None:
    previous, classes = load(folder) if number == 2 else None, (f"of {os.getpid()}",)
    barrier.wait()
    try:
        if previous is None:
            queue.put(publish(folder, schema=LABELS, shards=[], classes=classes).classes)
        else:
            queue.put(publish_next(folder, previous, classes=classes).classes)
    except DatasetConflict as error:
        queue.put(str(error))


@pytest.mark.parametrize("number", [1, 2])
def test_one_of_several_concurrent_publishers_wins(folder: Path, number: int) -> None:
    folder = folder if number == 2 else folder.with_name("new")
    context = multiprocessing.get_context("fork")
    n, queue = 4, context.Queue()
    barrier = context.Barrier(n)
    writers = [
        context.Process(target=_race, args=(str(folder), number, barrier, queue), daemon=True)
        for _ in range(n)
    ]
    for writer in writers:
        writer.start()
    outcomes = [queue.get(timeout=60) for _ in writers]
    for writer in writers:
        writer.join()
    (winner,) = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    assert load(folder).classes == winner
    expected = [f"{n:06d}.json" for n in range(1, number + 1)]
    assert sorted(os.listdir(folder / "generations")) == expected
    assert all("another writer" in outcome for outcome in outcomes if isinstance(outcome, str))


# Readers.


def with_subset(folder: Path) -> None:
    publish_next(folder, load(folder), subsets={"some": RowRuns([0, 30], [5, 10])})


def test_a_subset_is_a_dataset_of_its_samples(folder: Path) -> None:
    with_subset(folder)
    with open_dataset(folder, subset="some") as dataset:
        expected = [*range(5), *range(30, 40)]
        assert len(dataset) == 15
        assert labels(dataset) == expected
        assert [int(dataset[i]["label"]) for i in range(-15, 15)] == expected * 2
        assert [int(sample["label"]) for sample in dataset[3:7]] == [3, 4, 30, 31]
        assert dataset.subset_name == "some"
        assert dataset.subsets == {"some": 15}
        assert "subset 'some', 15 samples in 3 shards" in repr(dataset)
        with pytest.raises(IndexError, match="sample 15 of 15") as caught:
            dataset[15]
        assert str(caught.value).startswith(str(folder))
    with open_dataset(folder) as dataset:
        assert (len(dataset), dataset.subset_name) == (N, None)


def test_an_unknown_subset_is_refused_and_those_there_are_are_named(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="no subset 'val'; there are: none"):
        open_dataset(folder, subset="val")
    with_subset(folder)
    with pytest.raises(InvalidArgument, match="no subset 'val'; there are: 'some'"):
        open_dataset(folder, subset="val")


def test_a_loader_goes_on_with_the_generation_that_it_opened(folder: Path) -> None:
    first = load(folder)
    with open_dataset(folder) as dataset:
        publish_next(folder, first, shards=first.shards[:1])
        with ShardLoader(dataset, 8, output="numpy", num_workers=1) as loader:
            assert sum(batch.n_rows for batch in loader) == N
    with ShardLoader(folder, 8, output="numpy", num_workers=1) as loader:
        assert sum(batch.n_rows for batch in loader) == first.shards[0].n_samples
