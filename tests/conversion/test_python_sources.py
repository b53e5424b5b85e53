"""Dicts of arrays as sources, `overwrite` for samples from Python, and the number of shards."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, InvalidArgument, Json, Schema, Text
from shardio.conversion import sample_writing
from shardio.errors import DatasetExists, SchemaError
from tests.converters.helpers import plain


def numbers(n: int) -> Iterator[dict[str, Any]]:
    return ({"x": i} for i in range(n))


def values(out: Path) -> list[int]:
    with shardio.open(out) as dataset:
        return [int(sample["x"]) for sample in dataset]


# Dicts of arrays.


def test_a_dict_of_arrays_is_converted_row_by_row(tmp_path: Path) -> None:
    x = np.arange(24, dtype="float32").reshape(4, 2, 3)
    source: dict[str, Any] = {
        "x": x,
        "big": np.arange(4, dtype=">i2"),
        "y": [0, 1, 0, 1],
        "name": np.array(["a", "bb", "c", "d"]),
        "maybe": [None, "t", None, "u"],
        "ragged": [[1], [1, 2], [], [3]],
        "any": ({"a": 1}, [1, "x"], [], None),
        "number": range(4),
    }
    report = shardio.convert(source, tmp_path / "out")
    assert (report.n_samples, report.kind) == (4, "samples")
    with shardio.open(tmp_path / "out") as dataset:
        assert dict(dataset.schema) == {
            "x": Array("float32", (2, 3)),
            "big": Array("int16"),
            "y": Array("int64"),
            "name": Text(),
            "maybe": Text(optional=True),
            "ragged": Array("int64", (None,)),
            "any": Json(optional=True),
            "number": Array("int64"),
        }
        for i, sample in enumerate(dataset):
            assert (sample["x"] == x[i]).all() and sample["big"] == i
            for name in ("y", "name", "maybe", "ragged", "any", "number"):
                assert plain(sample[name]) == source[name][i]
    report = shardio.convert({**source, "y": [5] * 4}, tmp_path / "out", append=True)
    assert report.n_samples_before == 4


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"x": np.zeros((5, 2)), "y": [1, 2]}, "'x' has 5 rows, 'y' has 2; all arrays must have"),
        ({"x": 3}, r"column 'x': found int; expected an array .* pass a list: \[sample\]"),
        ({"x": "abc"}, "column 'x': found str"),
        ({"x": np.float32(3)}, "column 'x': found float32"),
        ({"x": np.array(3)}, "column 'x': found ndarray"),
        ({"x": {"y": [1]}}, "column 'x': found dict"),
        ({"x": {1, 2}}, "column 'x': found set"),
        ({"x": np.zeros(3, complex)}, "column 'x': unsupported dtype complex128"),
        ({"x": np.zeros(3, "M8[s]")}, r"column 'x': unsupported dtype datetime64\[s\].*; pass a S"),
        (
            {"x": np.zeros(3, [("a", "i4"), ("b", "f4")])},
            r"column 'x': found a structured array; .*: \{'a': x\['a'\], 'b': x\['b'\]\}",
        ),
        ({"x": [1, "a"]}, "column 'x', row 1: found Text, expected int64"),
        ({1: [1]}, "the name of column 1 is not a string"),
        ({}, "found an empty dict"),
    ],
)
def test_a_dict_of_something_else_is_refused(source: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=said):
        shardio.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"n": 2, "x": None}, "field 'x': expected float64, found None, which only a field with o"),
        ({"n": 2}, r"fields missing: \['x'\]; a field that some samples lack is declared with"),
        ({"n": 2.5, "x": 1.0}, "field 'n': expected int64, found float"),
    ],
)
def test_a_later_sample_that_does_not_fit_says_what_to_do(
    tmp_path: Path, second: dict[str, Any], text: str
) -> None:
    hint = r"the schema is that of the first sample; pass schema= for another\)$"
    samples = [{"n": 1, "x": 0.5}, second]
    with pytest.raises(SchemaError, match=f"out, sample 1: {text}.*{hint}"):
        shardio.convert(samples, tmp_path / "out")
    given = Schema({"n": Array("int64"), "x": Array("float64")})
    with pytest.raises(SchemaError, match=text) as caught:
        shardio.convert(samples, tmp_path / "out", schema=given)
    assert "pass schema=" not in str(caught.value)


def test_a_masked_array_and_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="column 'x': a masked array would lose its mask"):
        shardio.convert({"x": np.ma.masked_less([1, 2], 2)}, tmp_path / "out")
    with pytest.raises(InvalidArgument, match="names: not for data frames"):
        shardio.convert({"x": [1]}, tmp_path / "out", names=["y"])


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_nulls_of_a_series_change_no_number(package: str, tmp_path: Path) -> None:
    library = pytest.importorskip(package, reason="a series")
    dtype = {"dtype": "Int64"} if package == "pandas" else {}
    big = library.Series([2**60 + 1, None], **dtype)
    source = {"big": big, "text": library.Series(["a", None])}
    if package == "pandas":
        source["array"] = big.array
        source["time"] = library.Series(library.to_datetime(["2020-01-01", None]))
    shardio.convert(source, tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert [*dataset.schema] == [*source]
        assert dataset.schema["big"] == Array("int64", optional=True)
        assert dataset.schema["text"] == Text(optional=True)
        assert plain(dataset[0]["big"]) == 2**60 + 1
        assert all(value is None for value in dataset[1].values())


def test_a_sample_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="sample 1: .* found None; leave it out"):
        shardio.convert([{"x": 1}, None], tmp_path / "out")
    with pytest.raises(SchemaError, match=r"sample 1: .* found a tuple of 2; name its parts"):
        shardio.convert([{"x": 1}, (1, 2)], tmp_path / "out")


def test_a_list_of_paths_is_answered_with_how_to_convert_files(tmp_path: Path) -> None:
    for path in ("a.mp4", tmp_path / "a.mp4"):
        with pytest.raises(SchemaError, match="if these are paths, pass their folder or a pattern"):
            shardio.convert([path], tmp_path / "out")


@pytest.mark.external
def test_torch_tensors_are_arrays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is too large for the extra dev")
    source = {"x": torch.arange(6.0).reshape(3, 2), "half": torch.ones(3, dtype=torch.bfloat16)}
    shardio.convert(source, tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["half"] == Array("bfloat16")
        assert [sample["x"].tolist() for sample in dataset] == [[0, 1], [2, 3], [4, 5]]


# Overwrite.


SOURCES: dict[str, Any] = {
    "iterable": lambda: numbers(3),
    "list": lambda: [{"x": i} for i in range(3)],
    "dict": lambda: {"x": np.arange(3)},
    "frame": lambda: pytest.importorskip("pandas", reason="a frame").DataFrame({"x": [0, 1, 2]}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_overwrite_replaces_a_dataset(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = r"already holds a dataset; overwrite=True \(--overwrite\) replaces it, append=True"
    shardio.convert([{"y": "other"}] * 5, out)
    old = shardio.open(out)
    assert len([*old]) == 5  # it has opened its shards
    with pytest.raises(DatasetExists, match=said):
        shardio.convert(SOURCES[kind](), out)
    report = shardio.convert(SOURCES[kind](), out, overwrite=True)
    assert (report.generation, report.n_samples, report.n_samples_before) == (1, 3, 0)
    assert (report.dataset, report.kind, report.stats_dropped) == (out, "samples", False)
    assert report.n_bytes == (out / "000000-000.shard").stat().st_size
    assert values(out) == [0, 1, 2]
    assert sorted(os.listdir(out)) == ["000000-000.shard", "dataset.json", "generations"]
    assert [sample["y"] for sample in old] == ["other"] * 5  # a reader of the old one goes on
    old.close()
    shardio.convert(SOURCES[kind](), tmp_path / "new", overwrite=True)  # nothing to replace
    assert values(tmp_path / "new") == [0, 1, 2]


def test_overwrite_keeps_what_else_lies_there(tmp_path: Path) -> None:
    shardio.convert(numbers(5), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DatasetExists, match=r"holds notes\.txt beside the dataset") as caught:
        shardio.convert(numbers(3), tmp_path, overwrite=True)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert values(tmp_path) == [*range(5)]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_overwrite_that_fails_leaves_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> Iterator[dict[str, Any]]:
        yield from numbers(2)
        raise RuntimeError("broken")

    schema = Schema({"x": Array("int64")})
    shardio.convert(numbers(5), tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(RuntimeError, match="broken"):
        shardio.convert(breaks(), tmp_path, overwrite=True)
    with pytest.raises(SchemaError, match=f"^{tmp_path}, sample 0: field 'x': expected "):
        shardio.convert([{"x": 2**70}], tmp_path, overwrite=True, schema=schema)
    assert shardio.convert([], tmp_path, overwrite=True, schema=schema).generation == 0
    monkeypatch.setattr(sample_writing, "publish", lambda *_, **__: next(breaks(), 1 / 0))
    with pytest.raises(ZeroDivisionError):  # after the dataset was moved away
        shardio.convert(numbers(2), tmp_path, overwrite=True)
    assert values(tmp_path) == [*range(5)] and sorted(os.listdir(tmp_path)) == before
    with pytest.raises(InvalidArgument, match="append and overwrite are mutually exclusive"):
        shardio.convert(numbers(2), tmp_path, overwrite=True, append=True)


KILLED = """
import os, signal, sys
import shardio
from shardio.conversion import sample_writing

sample_writing.publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
shardio.convert([{"x": 7}], sys.argv[1], overwrite=True)
"""


def test_a_kill_at_the_worst_moment_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardio.convert(numbers(5), out)
    done = subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(DatasetExists, match="already holds a dataset; overwrite=True"):
        shardio.convert(numbers(2), out)  # puts the old dataset back
    assert values(out) == [*range(5)] and ".conversion" not in os.listdir(out)
    subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert shardio.convert(numbers(1), out, append=True).n_samples_before == 5
    assert values(out) == [*range(5), 0] and ".conversion" not in os.listdir(out)
    subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    with pytest.raises(InvalidArgument, match="no samples to infer the schema from"):
        shardio.convert([], out, overwrite=True)
    schema = Schema({"x": Array("int64")})
    shardio.convert([], out, overwrite=True, schema=schema)  # puts the old dataset back
    assert values(out) == [*range(5), 0]
    shardio.convert(numbers(2), out, overwrite=True)
    assert values(out) == [0, 1] and ".conversion" not in os.listdir(out)
    new = tmp_path / "new"
    subprocess.run([sys.executable, "-c", KILLED, str(new)], check=False)
    shardio.convert(numbers(2), new)
    assert values(new) == [0, 1] and ".conversion" not in os.listdir(new)


# Shards.


class Squares:
    def __len__(self) -> int:
        return 200

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": i, "pad": np.zeros(40)}


def test_small_samples_make_one_shard(tmp_path: Path) -> None:
    known = Squares()
    made: dict[str, dict[str, Any]] = {
        "samples": {"src": [known[i] for i in range(200)]},
        "items": {"src": range(200), "samples": known.__getitem__, "workers": 2},
        "positions": {"src": known, "workers": 2},
        "arrays": {"src": {"x": np.arange(200), "pad": np.zeros((200, 40))}},
    }
    for name, options in made.items():
        report = shardio.convert(out=tmp_path / name, **options)
        assert [file.name for file in (tmp_path / name).glob("*.shard")] == ["000000-000.shard"]
        assert report.n_samples == 200 and report.n_bytes < 200_000
        assert values(tmp_path / name) == [*range(200)]


class Pictures:
    """A data set as torchvision's ImageFolder."""

    target_transform: Any = None
    class_to_idx: dict[Any, int]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i * i, i % 2


@pytest.mark.parametrize(
    ("numbers", "transform", "names", "classes"),
    [
        ({"cat": 0, "dog": 1}, None, ("x", "label"), ("cat", "dog")),
        ({"cat": 0, "dog": 1}, None, ("x", "y"), ()),
        ({"cat": 0, "dog": 1}, str, ("x", "label"), ()),
        ({"cat": 0, "dog": 2}, None, ("x", "label"), ()),
        ({0: 0, 1: 1}, None, ("x", "label"), ()),
    ],
)
def test_class_names_of_torchvision_are_kept(
    numbers: dict[Any, int],
    transform: object,
    names: tuple[str, str],
    classes: tuple[str, ...],
    tmp_path: Path,
) -> None:
    source = Pictures()
    source.class_to_idx, source.target_transform = numbers, transform
    report = shardio.convert(source, tmp_path / "out", names=names, workers=0)
    assert (report.n_samples, report.classes) == (4, classes)
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.classes == classes
        assert [int(sample[names[1]]) for sample in dataset] == [0, 1, 0, 1]


def test_datasets_views_and_loaders_are_refused(tmp_path: Path) -> None:
    shardio.convert([{"x": i} for i in range(4)], tmp_path / "set")
    with shardio.open(tmp_path / "set") as dataset, shardio.ShardLoader(dataset, 2) as loader:
        for source in (dataset, dataset.select([1]), shardio.mix({tmp_path / "set": 1})):
            with pytest.raises(shardio.InvalidArgument, match=r"merge\(out, path\) copies"):
                shardio.convert(source, tmp_path / "out")
        with pytest.raises(shardio.InvalidArgument, match="pass the dataset of the loader"):
            shardio.convert(loader, tmp_path / "out")
        shardio.convert((dict(sample) for sample in dataset), tmp_path / "out")
    assert len(shardio.open(tmp_path / "out")) == 4


class DataLoader(list[Any]):
    batch_size: int | None = 2


def test_a_data_loader_is_refused_unless_it_gives_samples(tmp_path: Path) -> None:
    source = DataLoader([{"x": np.zeros(2)}])
    with pytest.raises(shardio.InvalidArgument, match="found a DataLoader, which yields batches"):
        shardio.convert(source, tmp_path / "out")
    source.batch_size = None
    assert shardio.convert(source, tmp_path / "out").n_samples == 1


@pytest.mark.parametrize("source", [[{"label": 1}, {"label": 0}], {"label": np.array([1, 0])}])
def test_classes_name_the_labels_of_samples(tmp_path: Path, source: Any) -> None:
    out, names = tmp_path / "out", ["neg", "pos"]
    assert shardio.convert(source, out, classes=names).classes == ("neg", "pos")
    shardio.convert(source, out, classes=names, append=True)
    with shardio.open(out) as dataset:
        assert (len(dataset), dataset.classes) == (4, ("neg", "pos"))
    with pytest.raises(SchemaError, match="sample 0: label 1 has no name; classes has 1 name,"):
        shardio.convert(source, tmp_path / "fewer", classes=["neg"])
    with pytest.raises(InvalidArgument, match="classes must be a list of names; found 'neg'"):
        shardio.convert(source, tmp_path / "fewer", classes="neg")
    assert not (tmp_path / "fewer").exists()


@pytest.mark.parametrize("sample", [{"label": "pos"}, {"label": 0.5}, {"other": 1}])
def test_classes_need_a_field_label_of_integers(tmp_path: Path, sample: Any) -> None:
    with pytest.raises(InvalidArgument, match="names of the integers in the field 'label'"):
        shardio.convert([sample], tmp_path / "out", classes=["neg", "pos"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            datetime.datetime(2020, 1, 1),
            r"datetime cannot be .* return a text, its \.isoformat\(\), or a",
        ),
        (datetime.date(2020, 1, 1), r"date cannot be .* return a text, its \.isoformat\(\)"),
        (np.datetime64("2020-01-01", "s"), r"datetime64\[s\] is not .*value\.astype\('int64'\)"),
    ],
)
def test_times_in_samples_are_answered(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=said):
        shardio.convert([{"t": value}], tmp_path / "out")
