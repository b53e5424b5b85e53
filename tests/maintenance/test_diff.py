"""Diff: every sample that is not the same is named, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, List, Schema, Text
from shardio.format.layout import Kind
from shardio.format.types import Field
from shardio.maintenance import comparison, diff
from tests.maintenance.datasets import LABELS, labelled, place, shard_of, write
from tests.shards import EVERY_FIELD, every_field_sample, flip, samples

N = 10


def other_value(value: Any) -> Any:
    """Return a different value of the same field."""
    if isinstance(value, np.ndarray):
        return ~value if value.dtype.kind == "b" else value + 1
    if isinstance(value, dict):
        return {**value, "more": 1}
    if isinstance(value, list):
        return value[:-1]
    return value + (b"x" if isinstance(value, bytes) else "x" if isinstance(value, str) else 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("diff") / "a", N, 3)


def changed(tmp_path: Path, name: str, row: int) -> Path:
    """Write the dataset, cut otherwise, with another value of one field of one sample."""
    values = list(samples(N))
    values[row] = {**values[row], name: other_value(values[row][name])}
    return write(tmp_path / "b", N, 2, samples=values)


OPTIONAL = [name for name, field in EVERY_FIELD.items() if field.optional]


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("n_more", [0, 1])
def test_none_differs_from_an_empty_value(tmp_path: Path, name: str, n_more: int) -> None:
    schema, field = Schema({name: EVERY_FIELD[name]}), EVERY_FIELD[name]
    nothing: Any = ""
    if isinstance(field, Array):
        nothing = np.zeros([d or 0 for d in field.shape], field.dtype)
    elif isinstance(field, List):
        nothing = []
    a = write(tmp_path / "a", 2, schema=schema, samples=[{name: nothing}, {name: None}])
    values = [{name: None}] * (2 + n_more)
    report = diff(a, write(tmp_path / "b", 2 + n_more, schema=schema, samples=values))
    if n_more:
        assert (report.only_a, report.only_b) == ([0], [1, 2])
    else:
        assert report.changed == [(0, (name,))]


@pytest.mark.parametrize("name", list(EVERY_FIELD))
def test_a_changed_value_of_any_field_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    report = diff(whole, changed(tmp_path, name, 7))
    assert not report.is_same
    assert (report.n_changed, report.changed) == (1, [(7, (name,))])
    assert report.as_json()["changed"] == [{"sample": 7, "fields": [name]}]


@pytest.mark.parametrize("name", list(EVERY_FIELD))
def test_other_lengths_list_changes_on_both_sides(whole: Path, tmp_path: Path, name: str) -> None:
    values = list(samples(N))
    values[7] = {**values[7], name: other_value(values[7][name])}
    report = diff(whole, write(tmp_path / "b", N + 1, 2, samples=[every_field_sample(50), *values]))
    assert (report.only_a, report.only_b) == ([7], [0, 8])
    assert (report.n_only_a, report.n_only_b, report.n_changed) == (1, 2, 0)


def test_a_missing_sample_is_found_whatever_the_order(whole: Path, tmp_path: Path) -> None:
    values = [every_field_sample(i) for i in range(N) if i != 4]
    random.Random(0).shuffle(values)
    report = diff(whole, write(tmp_path / "b", N - 1, 2, samples=values))
    assert (report.only_a, report.only_b, report.n_only_a) == ([4], [], 1)
    assert not report.is_same


def test_a_sample_that_is_there_more_often_is_told(tmp_path: Path) -> None:
    some = labelled(5)
    a = write(tmp_path / "a", 5, schema=LABELS, samples=some)
    b = write(tmp_path / "b", 7, schema=LABELS, samples=[*some, some[2], some[2]])
    report = diff(a, b)
    assert (report.only_a, report.only_b) == ([], [5, 6])
    assert (report.n_only_a, report.n_only_b, report.n_changed) == (0, 2, 0)
    assert not report.is_same
    assert (report.n_a, report.n_b) == (5, 7)
    assert "and 7 samples" in report._repr_html_()


def as_zstd(field: Field) -> Field:
    if field.medium:
        return field
    return dataclasses.replace(field, codec="zstd")  # type: ignore[type-var]


@pytest.mark.parametrize("n_more", [0, 1])
def test_other_codecs_are_the_same_samples(whole: Path, tmp_path: Path, n_more: int) -> None:
    packed = Schema({name: as_zstd(field) for name, field in EVERY_FIELD.items()})
    report = diff(whole, write(tmp_path / "b", N + n_more, 1, schema=packed))
    redefined = [name for name, field in EVERY_FIELD.items() if field.codec != "zstd"]
    assert report.fields_redefined == redefined
    assert (report.n_changed, report.only_a) == (0, [])
    assert report.only_b == [N] * n_more
    assert not report.is_same


def test_fields_and_classes_that_differ_are_named(tmp_path: Path) -> None:
    a = write(tmp_path / "a", 3, schema=LABELS, samples=labelled(3), classes=["x", "y"])
    other = Schema({"label": Array("int32"), "note": Text()})
    values = [{"label": i % 2, "note": ""} for i in range(3)]
    report = diff(a, write(tmp_path / "b", 3, schema=other, samples=values))
    assert (report.fields_only_a, report.fields_only_b) == (["source"], ["note"])
    assert (report.fields_redefined, report.classes_differ) == (["label"], True)
    assert (report.n_a, report.n_b, report.n_changed) == (3, 3, 0)
    content = json.loads(json.dumps(report.as_json()))
    assert (content["is_same"], content["a"], content["b"]) == (False, str(a), str(tmp_path / "b"))
    assert (content["fields_only_a"], content["fields_redefined"]) == (["source"], ["label"])
    assert content["classes_differ"]
    assert ": different, class names differ, " in repr(report)
    assert "3 samples each" in report._repr_html_()
    b = write(tmp_path / "c", 3, schema=LABELS, samples=labelled(3), classes=["y", "x"])
    assert (diff(a, b).is_same, diff(a, b).n_changed) == (False, 0)


def test_a_shard_can_be_compared_with_a_dataset(whole: Path, tmp_path: Path) -> None:
    assert diff(shard_of(whole, 0), write(tmp_path / "b", 3)).is_same
    assert diff(shard_of(whole, 0), shard_of(whole, 1)).n_changed == 3
    assert diff(shard_of(whole, 0), shard_of(whole, 2)).n_only_b == 4


def test_large_rows_are_compared_without_being_read(whole: Path, tmp_path: Path) -> None:
    b = write(tmp_path / "b", N, 3)
    flip(shard_of(b, 0), place(shard_of(b, 0), Kind.COLUMN, "frames")[0])
    assert diff(whole, b).is_same


def test_counts_are_unlimited(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MAX_LISTED", 4)
    monkeypatch.setattr(comparison, "_CHUNK_ROWS", 3)
    others = [every_field_sample(i) for i in range(20, 20 + N)]
    report = diff(whole, write(tmp_path / "b", N, 1, samples=others))
    assert (report.n_changed, [row for row, _ in report.changed]) == (N, [0, 1, 2, 3])
    more = write(tmp_path / "c", N + 1, 1, samples=[*others, every_field_sample(90)])
    report = diff(whole, more)
    assert (report.n_only_a, report.n_only_b) == (N, N + 1)
    assert (report.only_a, report.only_b) == ([0, 1, 2, 3], [0, 1, 2, 3])
