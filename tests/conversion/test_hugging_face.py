"""Data sets of Hugging Face's `datasets` as they are in memory: splits, classes, files."""

from __future__ import annotations

import datetime
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Image, InvalidArgument
from shardio.media import decode_image, encode_jpeg

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")

pytestmark = [pytest.mark.external, pytest.mark.process]
PIL = pytest.importorskip("PIL.Image", reason="Hugging Face's datasets needs it for pictures")

NAMES = ["cat", "dog"]


def picture(n: int) -> bytes:
    return encode_jpeg(np.full((8, 8, 3), 9 * n, np.uint8))


def make(n: int, names: list[str] = NAMES) -> Any:
    features = datasets.Features(
        {
            "words": datasets.Value("string"),
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=names),
        }
    )
    columns = {
        "words": [f"w{i}" for i in range(n)],
        "image": [{"bytes": picture(i), "path": None} for i in range(n)],
        "label": [i % 2 for i in range(n)],
    }
    return datasets.Dataset.from_dict(columns, features=features)


def check(out: Path, rows: list[int], subset: str | None = None) -> None:
    with shardio.open(out, subset=subset) as dataset:
        assert [*dataset.schema][:3] == ["words", "image", "label"]
        assert dataset.schema["image"] == Image() and dataset.classes == ("cat", "dog")
        assert [sample["words"] for sample in dataset] == [f"w{i}" for i in rows]
        assert [bytes(sample["image"]) for sample in dataset] == [picture(i) for i in rows]
        assert [int(sample["label"]) for sample in dataset] == [i % 2 for i in rows]


def test_a_data_set_keeps_its_files_classes_and_order(tmp_path: Path) -> None:
    known = make(6)
    chosen = {
        "all": (known, range(6)),
        "select": (known.select([4, 1, 3]), [4, 1, 3]),
        "filter": (known.filter(lambda row: row["label"] == 1), [1, 3, 5]),
        "many": (datasets.concatenate_datasets([known] * 30), [*range(6)] * 30),
    }
    for name, (data, rows) in chosen.items():
        report = shardio.convert(data, tmp_path / name)
        assert (report.classes, report.n_samples) == (("cat", "dog"), len(rows))
        check(tmp_path / name, [*rows])


def test_splits_are_subsets(tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"train": make(6), "validation": make(3)})
    out = tmp_path / "out"
    report = shardio.convert(splits, out)
    assert report.subsets == {"train": 6, "validation": 3}
    check(out, [*range(6), *range(3)])
    check(out, [*range(3)], "validation")
    more = {"test": make(2), "train": make(1)}
    report = shardio.convert(more, out, append=True)
    assert report.subsets == {"train": 7, "validation": 3, "test": 2}
    check(out, [*range(6), 0], "train")
    splits.save_to_disk(tmp_path / "saved")
    report = shardio.convert(tmp_path / "saved", tmp_path / "disk", workers=0)
    assert report.subsets == {"train": 6, "validation": 3}
    check(tmp_path / "disk", [*range(3)], "validation")
    with pytest.raises(InvalidArgument, match="split: the source has the splits train, validation"):
        shardio.convert(splits, tmp_path / "no", split={"a": 0.5})


def test_streams_have_splits_and_classes_too(tmp_path: Path) -> None:
    streams = datasets.IterableDatasetDict(
        {name: make(n).to_iterable_dataset() for name, n in (("train", 4), ("test", 2))}
    )
    report = shardio.convert(streams, tmp_path / "out")
    assert report.subsets == {"train": 4, "test": 2} and report.classes == ("cat", "dog")


def test_a_stream_beside_a_data_set_has_its_fields(tmp_path: Path) -> None:
    for k, order in enumerate((("train", "test"), ("test", "train"))):
        both = {"train": make(4), "test": make(2).to_iterable_dataset()}
        report = shardio.convert({name: both[name] for name in order}, tmp_path / str(k))
        assert report.subsets == {"train": 4, "test": 2}
        with shardio.open(tmp_path / str(k)) as dataset:
            assert dataset.schema["image"] == Image()


def test_splits_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"subset 'b': found the classes \['fox'\], expected"):
        shardio.convert({"a": make(2), "b": make(1, ["fox"])}, tmp_path / "out")
    other = make(2).remove_columns("words")
    with pytest.raises(InvalidArgument, match="subset 'b': found Schema.* as in 'a'; convert the"):
        shardio.convert({"a": make(2), "b": other}, tmp_path / "out")
    shardio.convert(make(2), tmp_path / "out")
    with pytest.raises(InvalidArgument, match=r"have the classes \['a', 'b'\], the dataset has"):
        shardio.convert(make(2, ["a", "b"]), tmp_path / "out", append=True)


def test_a_null_in_one_split_makes_the_field_optional(tmp_path: Path) -> None:
    whole, gaps = (datasets.Dataset.from_dict({"x": values}) for values in ([1, 2], [3, None]))
    shardio.convert({"a": whole, "b": gaps}, tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert [sample["x"] for sample in dataset] == [1, 2, 3, None]


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_read_by_index_have_the_types_of_their_table(tmp_path: Path, workers: int) -> None:
    table = datasets.Dataset.from_dict(
        {
            "x": [1, None],
            "words": ["a", None],
            "points": [[0.5], None],
            "struct": [{"y": 1}, None],
            "time": [None, datetime.datetime(2020, 1, 1)],
            "date": [datetime.date(2020, 1, 2)] * 2,
        }
    )
    shardio.convert(table, tmp_path / "whole")
    report = shardio.convert(table, tmp_path / "rows", workers=workers)
    assert not report.broken
    with shardio.open(tmp_path / "whole") as whole, shardio.open(tmp_path / "rows") as rows:
        assert rows.schema == whole.schema
        assert len(rows) == 2 and "struct.y" in rows.schema
        for name in rows.schema:
            assert [*map(str, rows.column(name))] == [*map(str, whole.column(name))]


@pytest.mark.parametrize("workers", [None, 0])
def test_columns_are_not_renamed_by_names(tmp_path: Path, workers: int | None) -> None:
    with pytest.raises(InvalidArgument, match="names: not for data frames; rename the columns"):
        shardio.convert(make(2), tmp_path / "out", workers=workers, names=("a", "b"))
    assert not (tmp_path / "out").exists()


def test_formats_and_transforms_are_what_is_stored(tmp_path: Path) -> None:
    known = make(3)
    shardio.convert(known.with_format("numpy"), tmp_path / "numpy")
    with shardio.open(tmp_path / "numpy") as dataset:
        assert dataset.schema["image"] == Array("uint8", (8, 8, 3))
        assert dataset.classes == ("cat", "dog")
    for every, names in ((True, ["words", "image", "label"]), (False, ["label"])):
        few = known.with_format(columns=["label"], output_all_columns=every)
        shardio.convert(few, tmp_path / f"few{every}")
        with shardio.open(tmp_path / f"few{every}") as dataset:
            assert [*dataset.schema] == names
    changed = known.with_transform(lambda rows: {"n": [len(word) for word in rows["words"]]})
    shardio.convert(changed, tmp_path / "changed")
    with shardio.open(tmp_path / "changed") as dataset:
        assert [*dataset.schema] == ["n"] and dataset.classes == ()
    shardio.convert(known, tmp_path / "workers", workers=1)  # decoded there, by position
    with shardio.open(tmp_path / "workers") as dataset:
        assert dataset.classes == ("cat", "dog")
        found = decode_image(dataset[1]["image"])
        assert (found == np.asarray(PIL.open(io.BytesIO(picture(1))))).all()


def test_files_given_by_path_are_stored(tmp_path: Path) -> None:
    for n, name in enumerate(NAMES):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "a.jpg").write_bytes(picture(n))
    cache = str(tmp_path / "cache")
    folder = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "in"), cache_dir=cache)
    report = shardio.convert(folder, tmp_path / "out")
    assert report.subsets == {"train": 2} and report.classes == ("cat", "dog")
    with shardio.open(tmp_path / "out") as dataset:
        assert [bytes(sample["image"]) for sample in dataset] == [picture(0), picture(1)]


def test_parquet_that_datasets_wrote(tmp_path: Path) -> None:
    make(4).to_parquet(tmp_path / "in" / "x.parquet")
    shardio.convert(tmp_path / "in", tmp_path / "out", workers=0)
    check(tmp_path / "out", [*range(4)])


def test_parquet_of_several_splits_gives_subsets(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "data"
    for name, n in (("train-00000-of-00002", 4), ("train-00001-of-00002", 3)):
        make(n).to_parquet(folder / f"{name}.parquet")
    report = shardio.convert(tmp_path / "in", tmp_path / "one", workers=0, split={"a": 1.0})
    assert report.subsets == {"a": 7}  # a single split is no reason for a subset
    make(2).to_parquet(folder / "test.clean-00000-of-00001.parquet")
    make(1).to_parquet(folder / "more.parquet")
    report = shardio.convert(tmp_path / "in", tmp_path / "out", workers=0)
    assert report.subsets == {"test.clean": 2, "train": 7} and report.n_samples == 10
    check(tmp_path / "out", [*range(4), *range(3)], "train")
    report = shardio.convert(tmp_path / "in", tmp_path / "no", workers=0, split_folders=False)
    assert report.subsets == {}
