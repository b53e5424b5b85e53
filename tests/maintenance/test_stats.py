"""Statistics: what NumPy says of all values at once, kept in the generation."""

from __future__ import annotations

import errno
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, List, Schema, Text
from shardio import open as open_dataset
from shardio.dataset import manifest
from shardio.dataset.manifest import load, publish_next
from shardio.dataset.selection import RowRuns
from shardio.errors import InvalidArgument, ShardCorrupt
from shardio.format.layout import Kind
from shardio.maintenance import compute_stats, statistics, verify_dataset
from tests.maintenance.datasets import LABELS, labelled, place, shard_of, write
from tests.shards import EVERY_FIELD, every_field_sample, flip

N = 20


def as_numbers(values: list[Any], dtype: str) -> Any:
    flat = np.concatenate([np.asarray(value).reshape(-1) for value in values])
    if dtype == "bfloat16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat[np.isfinite(flat)].astype(np.float64)


@pytest.mark.parametrize("chunk", [1 << 20, 1000])
def test_stats_of_all_values(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_CHUNK_ITEMS", chunk)
    report = compute_stats(write(tmp_path / "d", N, 3))
    samples = [every_field_sample(i) for i in range(N)]
    arrays = {
        name: found for name, field in EVERY_FIELD.items() if (found := field.array or field.item)
    }
    assert list(report.stats["fields"]) == list(arrays)
    assert report.stats["samples"] == N
    for name, field in arrays.items():
        found = report.stats["fields"][name]
        given = [sample[name] for sample in samples if sample[name] is not None]
        if isinstance(EVERY_FIELD[name], List):
            given = [array for arrays_ in given for array in arrays_]
        values = as_numbers(given, field.dtype)
        assert found["count"] == len(values), name
        assert found["mean"] == pytest.approx(values.mean(), rel=1e-9)
        assert found["std"] == pytest.approx(values.std(), rel=1e-9)
        assert (found["min"], found["max"]) == (values.min(), values.max())
        shapes = np.array([np.shape(array) for array in given])
        assert found["smallest"] == shapes.min(0).tolist()
        assert found["largest"] == shapes.max(0).tolist()
        assert found["missing"] == sum(sample[name] is None for sample in samples)


def test_they_are_kept_in_the_next_generation_and_not_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", N, 3)
    report = compute_stats(folder)
    assert (report.generation, report.subset) == (2, None)
    said = json.loads(json.dumps(report.as_json()))
    assert (said["samples"], said["subset"], said["dataset"]) == (N, None, str(folder))
    with open_dataset(folder) as dataset:
        assert dataset.stats == {"whole": report.stats}
        assert dataset.operation == {"name": "stats"}
        assert len(dataset) == N
    assert compute_stats(folder).generation == 2
    assert verify_dataset(folder, workers=0).findings == ()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_of_a_read_only_dataset_they_are_returned(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = write(tmp_path / "d", N, 3), write(tmp_path / "other", N, 3)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "lock_folder", fail_with(code))
        words = re.escape(
            f"{folder}: the dataset is read-only ({os.strerror(code)}): its statistics"
        )
        with pytest.warns(UserWarning, match=words):
            report = compute_stats(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert compute_stats(folder).as_json() == report.as_json()
        patch.setattr(manifest, "lock_folder", fail_with(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            compute_stats(folder)
    assert report.generation == 1 and load(folder).stats == {}
    assert report.as_json()["not_stored"] == f"the dataset is read-only ({os.strerror(code)})"
    stored = compute_stats(other)
    assert (report.stats, stored.not_stored) == (stored.stats, "")
    for text in (repr(report), report._repr_html_()):
        assert "not stored: the dataset is read-only" in text and "eopen" not in text


def fail_with(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_subset_is_counted_beside_the_whole(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", N, 3, schema=LABELS, samples=labelled(N, n_classes=N))
    subsets = {"s": RowRuns([3, 9], [2, 4]), "t": RowRuns([0], [1])}
    publish_next(folder, load(folder), subsets=subsets)
    whole = compute_stats(folder)
    report = compute_stats(folder, subset="s")
    found = report.stats["fields"]["label"]
    assert (report.stats["samples"], found["count"], found["min"], found["max"]) == (6, 6, 3, 12)
    assert found["mean"] == pytest.approx(np.mean([3, 4, 9, 10, 11, 12]))
    compute_stats(folder, subset="t")
    stats = load(folder).stats
    assert stats["whole"] == whole.stats
    assert list(stats["subsets"]) == ["s", "t"]
    with pytest.raises(InvalidArgument, match="no subset 'no'; there are: 's', 't'"):
        compute_stats(folder, subset="no")
    assert load(folder).stats == stats
    assert (report.subset, report.as_json()["subset"]) == ("s", "s")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("label", "write dataset.stats['whole']['fields']['label']"),
        ("other", "write dataset.stats['whole']['fields']['label']['mean']"),
        ("s", "write dataset.stats['subsets']['s']"),
    ],
)
def test_a_field_as_a_key_or_attribute_of_stats_gets_a_hint(
    tmp_path: Path, name: str, hint: str
) -> None:
    folder = write(tmp_path / "d", N, 3, schema=LABELS, samples=labelled(N, n_classes=N))
    publish_next(folder, load(folder), subsets={"s": RowRuns([3], [2])})
    with open_dataset(folder) as dataset, pytest.raises(KeyError, match="no statistics: shardio"):
        dataset.stats[name]
    for subset in (None, "s"):
        compute_stats(folder, subset=subset)
    with open_dataset(folder) as dataset:
        stats: Any = dataset.stats
        for read in (stats.__getitem__, lambda key: getattr(stats, key)):
            with pytest.raises((KeyError, AttributeError), match=re.escape(hint) + r'"?$'):
                read(name)
        assert eval(hint.removeprefix("write "), {"dataset": dataset}) is not None
        assert stats.get(name) is None and name not in stats


def test_classes_are_counted_where_labels_say(tmp_path: Path) -> None:
    values = [{"label": label, "source": ""} for label in (0, 1, 1, -1, 7, 1)]
    classes = ["cat", "dog", "eel"]
    folder = write(tmp_path / "d", 6, 2, schema=LABELS, samples=values, classes=classes)
    stats = compute_stats(folder).stats
    assert stats["classes"] == {"cat": 1, "dog": 3, "eel": 0}
    assert stats["without_class"] == 2
    label = stats["fields"]["label"]
    assert (label["mean"], label["std"], label["max"], label["count"]) == (None, None, 7, 6)
    bare = write(tmp_path / "e", 6, 2, schema=LABELS, samples=values)
    assert "classes" not in compute_stats(bare).stats
    assert compute_stats(bare).stats["fields"]["label"]["mean"] == 1.5


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    schema = Schema({"x": Array("float32", (3,)), "y": Array("float64", (None,))})
    values = [{"x": [1, np.nan, 3], "y": []}, {"x": [np.inf, -np.inf, 5], "y": [np.nan]}]
    fields = compute_stats(write(tmp_path / "d", 2, schema=schema, samples=values)).stats["fields"]
    x, y = fields["x"], fields["y"]
    assert (x["count"], x["not_finite"], x["mean"], x["min"], x["max"]) == (3, 3, 3.0, 1.0, 5.0)
    assert (y["count"], y["not_finite"], y["mean"], y["std"], y["min"]) == (0, 1, None, None, None)
    assert (y["smallest"], y["largest"]) == ([0], [1])


def test_numbers_at_the_end_of_their_range_are_told_as_far_as_json_can(tmp_path: Path) -> None:
    schema = Schema(
        {"x": Array("float64"), "i": Array("int64"), "u": Array("uint64"), "b": Array("bool")}
    )
    values = [
        {"x": 1.7e308, "i": (1 << 63) - 1, "u": (1 << 64) - 1, "b": True},
        {"x": -1.7e308, "i": -(1 << 63), "u": 0, "b": False},
    ]
    folder = write(tmp_path / "d", 2, schema=schema, samples=values)
    fields = json.loads(json.dumps(compute_stats(folder).stats["fields"], allow_nan=False))
    assert (fields["x"]["max"], fields["x"]["std"]) == (1.7e308, None)
    assert (fields["i"]["min"], fields["i"]["max"]) == (-(1 << 63), (1 << 63) - 1)
    assert fields["u"]["max"] == (1 << 64) - 1
    assert (fields["b"]["min"], fields["b"]["max"], fields["b"]["mean"]) == (0, 1, 0.5)
    assert load(folder).stats["whole"]["fields"] == fields


def test_an_empty_dataset_and_one_without_numbers_have_statistics(tmp_path: Path) -> None:
    found = compute_stats(write(tmp_path / "d", 0, schema=LABELS)).stats["fields"]["label"]
    counts = {"count": 0, "not_finite": 0, "missing": 0}
    unknown = ("mean", "std", "min", "max", "smallest", "largest")
    assert found == counts | dict.fromkeys(unknown)
    words = Schema({"note": Text()})
    report = compute_stats(write(tmp_path / "e", 1, schema=words, samples=[{"note": "x"}]))
    assert report.stats["fields"] == {}


def test_damaged_data_is_not_counted(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", 4, 2)
    flip(shard_of(folder, 1), place(shard_of(folder, 1), Kind.COLUMN, "frames")[0])
    with pytest.raises(ShardCorrupt) as caught:
        compute_stats(folder)
    assert (caught.value.path, caught.value.field) == (str(shard_of(folder, 1)), "frames")
    assert caught.value.sample == 0
    assert load(folder).number == 1
    assert not load(folder).stats
