"""Columns that lie in shards beside the others are read as any others, whatever reads them.

Two datasets hold the same samples: one was written whole, of the other most fields were added
later. Nobody who reads them can tell the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Batch, List, Schema, ShardLoader
from shardio import open as open_dataset
from shardio._engine.dispatch.crashes import InFlightRows, crash_error
from shardio.batch.batch import BatchSource
from shardio.batch.layout import CLAIMED, layout_for_samples
from shardio.dataset.manifest import load, publish_next
from shardio.dataset.selection import RowRuns
from shardio.errors import ChecksumMismatch, DatasetCorrupt, ShardChanged, ShardCorrupt
from shardio.format.layout import Kind
from shardio.maintenance import add_column
from shardio.samples.shard_dataset import ShardDataset
from tests.loading import bits, make_loader, write_dataset
from tests.maintenance.datasets import place, side_of
from tests.shards import EVERY_FIELD, as_read, every_field_sample, flip, same_sample

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N, N_SHARDS = 24, 3
MAIN = ("odd", "label", "blob", "hint", "boxes")
ADDED = tuple(name for name in EVERY_FIELD if name not in MAIN)
SCHEMA = Schema({name: EVERY_FIELD[name] for name in (*MAIN, *ADDED)})
SAMPLES = [{name: every_field_sample(i)[name] for name in SCHEMA} for i in range(N)]
READ = [as_read(sample) for sample in SAMPLES]
SUBSETS = {"some": RowRuns([1, 9, 20], [3, 4, 4])}


def with_added(folder: Path, *names: str) -> Path:
    """Make a dataset to which these fields were added one by one."""
    main = Schema({name: SCHEMA[name] for name in MAIN})
    samples = ({name: sample[name] for name in MAIN} for sample in SAMPLES)
    write_dataset(folder, N, N_SHARDS, main, samples)
    for name in names:
        add_column(folder, name, SCHEMA[name], (sample[name] for sample in SAMPLES))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sides") / "whole"
    write_dataset(folder, N, N_SHARDS, SCHEMA, SAMPLES)
    publish_next(folder, load(folder), subsets=SUBSETS)
    return folder


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_added(tmp_path_factory.mktemp("sides") / "added", *ADDED)
    publish_next(folder, load(folder), subsets=SUBSETS)
    return folder


# Samples.


@pytest.mark.parametrize(("access", "verify"), [("mmap", "first"), ("pread", "always")])
def test_samples_list_added_fields_last(added: Path, access: Any, verify: Any) -> None:
    with open_dataset(added, access=access, verify=verify) as dataset:
        assert dataset.schema == SCHEMA
        assert [list(sample) for sample in dataset[:2]] == [list(SCHEMA)] * 2
        assert all(map(same_sample, dataset, READ))
        assert all(map(same_sample, dataset[::-5], READ[::-5]))
        assert all(map(same_sample, dataset.samples(1), READ[8:16]))
        names = ["meta", "label", "camera.id", "frames", "hint"]
        some = dataset.sample(2, 3, names)
        assert list(some) == names
        assert same_sample(some, {name: READ[19][name] for name in names})
    with open_dataset(added, access=access, subset="some") as dataset:
        assert all(map(same_sample, dataset, [READ[i] for i in SUBSETS["some"].all_rows()]))


def test_a_dataset_tells_what_was_added_and_in_which_shards(added: Path) -> None:
    with open_dataset(added) as dataset:
        assert tuple(dataset.column_groups) == ADDED
        counts = {
            tuple(shard.n_samples for shard in shards) for shards in dataset.column_groups.values()
        }
        assert counts == {(8, 8, 8)}
        for name in ADDED:
            assert list(dataset.reader(1, name).schema) == [name]
        assert list(dataset.reader(1).schema) == list(MAIN)
        assert dataset.reader(1, "hint") is dataset.reader(1)
        assert dataset.reader(-1, "frames") is dataset.reader(N_SHARDS - 1, "frames")
        for field in (None, "frames"):
            for shard in (N_SHARDS, -N_SHARDS - 1):
                with pytest.raises(IndexError) as caught:
                    dataset.reader(shard, field)
                assert str(caught.value) == f"{added}: shard {shard} of {N_SHARDS}"
        files = dataset.files.files_of_shard(1)
        assert [len(files), files[0][0]] == [1 + len(ADDED), dataset.shards[1]]
        ((frames, where),) = dataset.files.files_of_shard(1, "frames")
        assert where == str(added / frames.name)


# Batches.


def batches(folder: Path, **options: Any) -> list[Any]:
    given: dict[str, Any] = {"shuffle": True, "num_workers": 0, "output": "numpy", **options}
    with make_loader(str(folder), 5, **given) as loader:
        return [bits(batch) for _ in range(2) for batch in loader]


def transformed(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {
        "frames": sample["frames"][0] + rng.integers(0, 9, dtype=np.uint8),
        "note": sample["note"].upper(),
        "total": np.float64(0 if sample["maybe"] is None else sample["maybe"].sum()),
        "n_boxes": len(sample["boxes"]),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1},
        {"access": "pread"},
        {"shuffle": False, "verify": "always", "access": "pread"},
        {"verify": "off"},
        {"subset": "some"},
        {"fields": ["frames", "boxes", "tight", "maybe"]},
        {"fields": ["cloud"]},
        {"fields": ["label"]},
        {"transform": transformed},
        {
            "transform": transformed,
            "num_workers": 1,
            "fields": ["frames", "note", "maybe", "boxes"],
        },
    ],
    ids=lambda options: str(options).replace(str(transformed), "transformed"),
)
def test_batches_match_a_whole_dataset(whole: Path, added: Path, options: dict[str, Any]) -> None:
    found = batches(added, **options)
    assert found == batches(whole, **options)
    assert len(found) == 2 * -(-(11 if "subset" in options else N) // 5)


# What is wrong with them.


@pytest.mark.parametrize(
    ("name", "kind", "offset", "sample"),
    [
        ("frames", Kind.COLUMN, 3 * 6912 + 7, 3),
        ("vector", Kind.COLUMN, 2 * 128, 0),  # rows that share a hash
        ("note", Kind.PAYLOAD, 0, 0),
        ("packed", Kind.PAYLOAD, 0, 0),
    ],
)
def test_flipped_bit_named(tmp_path: Path, name: str, kind: Kind, offset: int, sample: int) -> None:
    folder = with_added(tmp_path / "d", "vector", "frames", "note", "packed")
    path = side_of(folder, name, 1)
    flip(path, place(path, kind, name if kind == Kind.COLUMN else None)[0] + offset)
    with ShardLoader(str(folder), 4, output="numpy", num_workers=0) as loader:
        with pytest.raises(ChecksumMismatch) as caught:
            list(loader)
        error = caught.value
        assert (error.path, error.field, error.sample) == (str(path), name, sample)
    with ShardLoader(str(folder), 4, output="numpy", num_workers=0, fields=["odd"]) as loader:
        assert sum(batch.n_rows for batch in loader) == N


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_file_beside_that_is_cut_short_is_named(tmp_path: Path, access: Any) -> None:
    folder = with_added(tmp_path / "d", "frames", "note")
    path = side_of(folder, "frames", 1)
    options: dict[str, Any] = {"output": "numpy", "num_workers": 0, "access": access}
    with make_loader(str(folder), 4, **options) as loader:
        for _ in loader:  # all is mapped
            break
        os.truncate(path, 4096 + 6912 * 2)
        with pytest.raises(ShardChanged) as caught:
            list(loader)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("field", ["frames", "note", None])
def test_crash_error_checks_the_files_of_the_field(tmp_path: Path, field: str | None) -> None:
    folder = with_added(tmp_path / "d", "note", "frames")
    with open_dataset(folder) as dataset:
        assert len(dataset.reader(1, "frames")) == 8
        path = side_of(folder, "frames", 1)
        os.truncate(path, 4096 + 6912 * 5 + 1)
        error = crash_error(
            "a worker died", 7, InFlightRows("at", {1: [2, 5, 6]}, field), "", dataset
        )
    if field == "note":  # whose file is whole
        assert not isinstance(error, ShardChanged)
        return
    assert isinstance(error, ShardChanged)
    assert (error.path, error.sample) == (str(path), 5 if field else 2)


def test_an_error_about_a_value_names_the_file_that_it_came_from() -> None:
    schema = Schema({"a": List(Array("uint8", (2,))), "b": List(Array("uint8", (2,)))})
    layout = layout_for_samples(schema, 1)
    block = np.zeros(layout.heap + 4096, np.uint8)
    block[layout.heap] = 9  # nine arrays in a record that has no room for one
    layout.origins(block)["status"] = CLAIMED
    for slot in layout.varying:
        layout.extents(block, slot)["n_bytes"] = 64
    batch = Batch.of_block(layout, block, 1, {}, 0, 0, BatchSource(["main"], {"b": ["beside"]}))
    for name, path in (("a", "main"), ("b", "beside")):
        with pytest.raises(ShardCorrupt) as caught:
            batch[name]
        assert (caught.value.path, caught.value.field) == (path, name)


def test_another_file_in_the_place_of_one_beside_is_refused(tmp_path: Path) -> None:
    folder = with_added(tmp_path / "d", "frames")
    path = side_of(folder, "frames", 1)
    path.write_bytes(side_of(folder, "frames", 0).read_bytes())
    with ShardDataset(folder) as dataset:
        assert same_sample(dataset[0], {name: READ[0][name] for name in (*MAIN, "frames")})
        with pytest.raises(DatasetCorrupt, match="not the shard that the generation names"):
            dataset[8]
        assert dataset.sample(1, 0, ["label"])["label"] == 8
