"""`dataset["label"]` and `dataset.column` have one field of all samples, or of some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import InvalidArgument
from shardio.maintenance import add_column
from tests.loading import damage_row, write_dataset
from tests.shards import EVERY_FIELD, MEDIA_FIELDS, every_field_sample, media_sample, same_value

pytestmark = pytest.mark.usefixtures("quick_disk")

N = 50
ROBOT = shardio.Array("int64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("columns") / "set", N, 3)


def check(found: Any, name: str, rows: list[int]) -> None:
    """Compare a column with the samples that were written."""
    field, expected = EVERY_FIELD[name], [every_field_sample(i)[name] for i in rows]
    assert len(found) == len(rows)
    if field.array is None or field.array.row_bytes is None:
        assert isinstance(found, list)
        for a, b in zip(found, expected, strict=True):
            assert same_value(a, b) or (field.array and np.array_equal(a, b)), name
        return
    shape = tuple(n or 0 for n in field.array.shape)
    assert (found.shape, found.dtype) == ((len(rows), *shape), field.array.numpy)
    zeros = np.zeros(shape, field.array.numpy)
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a, zeros if b is None else b), name


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_column_has_the_values_of_all_samples(folder: str, access: Any) -> None:
    with shardio.open(folder, access=access) as dataset:
        for name in EVERY_FIELD:
            check(dataset[name], name, list(range(N)))


def test_a_column_of_chosen_rows(folder: str) -> None:
    rows = [49, 0, 17, 17, 30]
    mask = np.arange(N) % 7 == 3
    with shardio.open(folder) as dataset:
        for name in EVERY_FIELD:
            check(dataset.column(name, rows), name, rows)
            check(dataset.column(name, mask), name, list(range(3, N, 7)))
            check(dataset.column(name, []), name, [])
        assert dataset.column("label", range(2, 5)).tolist() == [2, 3, 4]


def test_a_nested_record_is_a_dict_of_columns(folder: str) -> None:
    with shardio.open(folder) as dataset:
        found = dataset["camera"]
        assert found.keys() == {"id", "lens"} and found["lens"].keys() == {"focus"}
        check(found["id"], "camera.id", list(range(N)))
        check(found["lens"]["focus"], "camera.lens.focus", list(range(N)))


def test_columns_of_selections_mixtures_and_added_fields(folder: str, tmp_path: Path) -> None:
    with shardio.open(folder) as dataset, dataset.select([40, 3, 3]) as few:
        assert few["label"].tolist() == [40, 3, 3]
        assert few.column("label", [1]).tolist() == [3]
        check(few["note"], "note", [40, 3, 3])
        with shardio.mix({few: 1, folder: 1}) as mixture:
            assert mixture["label"].tolist() == [40, 3, 3, *range(N)]
            check(mixture.column("hint", [0, 4]), "hint", [40, 1])
    small = write_dataset(tmp_path / "set", 9, 2, shardio.Schema({"label": shardio.Array("int8")}))
    add_column(small, "text", shardio.Text(), map(str, range(9)))
    with shardio.open(small) as dataset:
        assert dataset["text"] == list("012345678")


def test_a_column_of_media_has_stored_values(tmp_path: Path) -> None:
    made = write_dataset(tmp_path / "set", 9, 2, MEDIA_FIELDS, map(media_sample, range(9)))
    with shardio.open(made) as dataset:
        for name in MEDIA_FIELDS:
            whole = [sample[name] for sample in dataset]
            assert all(map(same_value, dataset[name], whole)), name


def test_a_wrong_name_is_a_key_error_that_suggests_another(folder: str) -> None:
    with shardio.open(folder) as dataset:
        for name, hint in (
            ("lable", "did you mean 'label'"),
            ("zzz", "its fields are frames, odd"),
        ):
            with pytest.raises(KeyError, match=f"no field '{name}'; {hint}"):
                dataset[name]


def test_rows_that_do_not_fit(folder: str) -> None:
    with shardio.open(folder) as dataset:
        for rows, said in (
            ([N], f"from 0 to {N - 1}; found {N} at 0"),
            ([3, -1], "found -1 at 1"),
            ([True], r"found bool \(1,\)"),
            ([0.5], r"found float64 \(1,\)"),
            (3, "found 3$"),
        ):
            with pytest.raises(InvalidArgument, match=said) as caught:
                dataset.column("label", rows)
            comma = ", a mask," * (rows == [True])
            assert str(caught.value).startswith(f"{folder}: rows{comma} must be")
    with pytest.raises(shardio.ShardioError, match="closed"):
        dataset["label"]


def test_a_damaged_value_is_an_error(folder: str, tmp_path: Path) -> None:
    made = write_dataset(tmp_path / "set", 9, 1)
    damage_row(made, "frames", 4)
    with shardio.open(made) as dataset:
        assert dataset.column("frames", [3]).shape == (1, 4, 24, 24, 3)
        with pytest.raises(shardio.ShardCorrupt, match="frames") as caught:
            dataset["frames"]
        assert (caught.value.field, caught.value.sample) == ("frames", 4)
        assert caught.value.path == f"{made}/000000-000.shard"


def test_views_have_the_columns_that_are_not_decoded(tmp_path: Path) -> None:
    schema = shardio.Schema(
        {"tokens": shardio.Array("uint16", (None,)), "label": shardio.Array("int64")}
    )
    samples = [{"tokens": range(i), "label": i} for i in range(9)]
    made = write_dataset(tmp_path / "tokens", 9, 2, schema, samples)
    with shardio.open(made) as dataset, pytest.raises(InvalidArgument, match="no column"):
        dataset.pack("tokens", length=4)["tokens"]
    made = write_dataset(tmp_path / "media", 9, 2, MEDIA_FIELDS, map(media_sample, range(9)))
    with shardio.open(made) as dataset:
        clips = dataset.clips(2, size=(8, 8))
        labels = clips["label"]
        assert len(labels) == len(clips) > 9 and set(labels) == set(range(9))
        assert labels[5] == dataset[int(clips.at(np.array([5]))[0])]["label"]
        assert clips.column("note", [5]) == [dataset[labels[5]]["note"]]
        for name in ("video", "image", "sound"):
            with pytest.raises(InvalidArgument, match=rf"view\.dataset\['{name}'\]"):
                clips[name]
        with pytest.raises(KeyError, match="did you mean 'label'"):
            clips["lable"]


def test_steps_have_the_columns_of_their_rows(tmp_path: Path) -> None:
    schema = shardio.Schema(
        {"action": shardio.Array("float32", (None, 2)), "task": shardio.Text(), "robot": ROBOT}
    )
    samples = [
        {"action": np.ones((n, 2), np.float32), "task": f"task {n}", "robot": n} for n in (3, 1, 2)
    ]
    made = write_dataset(tmp_path / "set", 3, 2, schema, samples)
    with shardio.open(made) as dataset:
        steps = dataset.windows({"action": [0, 1]})
        assert steps["robot"].tolist() == [3, 3, 3, 1, 2, 2]
        assert steps.column("task", [0, 5]) == ["task 3", "task 2"]
        for name, hint in (
            ("action", "or view.dataset"),
            ("action_mask", r"for sample in view\]$"),
        ):
            with pytest.raises(InvalidArgument, match=hint):
                steps[name]
