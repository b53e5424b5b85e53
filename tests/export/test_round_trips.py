"""Exports are equal when converters or each format's own library read them."""

from __future__ import annotations

import gc
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Json, Schema, Text
from shardio.export import export
from tests.export.datasets import CLASSES, N, equal, load_npy, make, same, widen
from tests.loading import write_dataset

pytestmark = pytest.mark.usefixtures("quick_disk")
NO_LISTS = ("lines", "boxes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("export") / "d")


@pytest.fixture(scope="module")
def dataset(folder: Path) -> Iterator[shardio.ShardDataset]:
    with shardio.open(folder) as opened:
        yield opened


def without_lists(dataset: shardio.ShardDataset) -> list[str]:
    return [name for name in dataset.schema if name not in NO_LISTS]


def convert_back(source: Path, **options: Any) -> shardio.ShardDataset:
    """Convert an export, and open the dataset."""
    if (source / "_schema.json").exists():
        options = {"fields": json.loads((source / "_schema.json").read_text()), **options}
    out = source.with_name(f"{source.name}-back")
    report = shardio.convert(source, out, workers=0, **options)
    assert not report.broken
    return shardio.open(out)


def test_parquet_round_trips_every_type(dataset: shardio.ShardDataset, tmp_path: Path) -> None:
    report = export(dataset, tmp_path / "p", "parquet", shard_bytes=30_000)
    assert (report.n_samples, report.skipped) == (N, ())
    assert len([*(tmp_path / "p").glob("*.parquet")]) > 1
    with convert_back(tmp_path / "p", kind="arrow") as found:
        assert found.schema.keys() == dataset.schema.keys()
        for name, field in dataset.schema.items():
            assert found.schema[name].optional == field.optional, name
            assert [*map(lambda a, b: same(field, a[name], b[name]), dataset, found)] == [True] * N
        assert found.classes == CLASSES


def test_pyarrow_reads_exported_parquet(dataset: shardio.ShardDataset, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    names = ["x", "moved", "packed", "pair", "label", "brain", "text", "note", "raw", "camera"]
    export(dataset, tmp_path / "p", "parquet", fields=[*names, "lines", "picture", "meta"])
    table = pq.read_table(tmp_path / "p", page_checksum_verification=True)
    assert str(table.schema.field("x").type.value_type.value_type) == "float"
    rows = table.to_pylist()
    for sample, row in zip(dataset, rows, strict=True):
        for name in ("label", "text", "note", "raw"):
            assert row[name] == sample[name]
        for name in ("x", "packed", "moved"):
            assert np.array_equal(np.reshape(row[name], sample[name].shape), sample[name])
        assert row["brain"] == widen(sample["brain"]).tolist()
        assert (row["pair"] is None) == (sample["pair"] is None)
        assert row["camera"]["id"] == "c" and row["picture"]["bytes"] == sample["picture"]
        assert [np.reshape(one, (-1, 2)).tolist() for one in row["lines"]] == [
            one.tolist() for one in sample["lines"]
        ]
        assert json.loads(row["meta"]) == sample["meta"]


def test_tars_round_trip_all_but_lists(dataset: shardio.ShardDataset, tmp_path: Path) -> None:
    report = export(
        dataset, tmp_path / "t", "webdataset", fields=without_lists(dataset), shard_bytes=30_000
    )
    assert report.n_samples == N and len([*(tmp_path / "t").glob("*.tar")]) > 1
    ends = {
        **{"label": "label.cls", "text": "text", "note": "note.txt", "meta": "meta.json"},
        **{"film": "film.mp4", "sound": "sound.wav", "mask": "mask.png", "raw": "raw"},
        **{"camera.id": "camera.id.txt", "source": "source.txt"},
    }
    with convert_back(tmp_path / "t", kind="webdataset") as found:
        for i, (sample, again) in enumerate(zip(dataset, found, strict=True)):
            assert again["key"] == f"{i:09d}"
            ends["picture"] = "picture.png" if i % 2 else "picture.ppm"
            for name in without_lists(dataset):
                end = ends.get(name, f"{name}.npy")
                assert same(dataset.schema[name], sample[name], again[end]), (i, name)


DEEP: Any = []
for _ in range(255):
    DEEP = [DEEP]
JSON: list[Any] = [
    *(7, -1, 0, 2.5, -0.0, 5e-324, 1.7976931348623157e308, 10**30, 2**63, -(2**63)),
    *(True, False, None, "", "\u00df", "null", "1e400", "NaN", "\0", "\u2028\n"),
    *([], [1, 2], [1, None, "a", [True, {}]], {}, {"a": 1}, {"": {"a.b": [None]}}, [[]] * 3, DEEP),
]
"""Values of every JSON type."""


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize(
    ("format", "kind"), [("webdataset", "webdataset"), ("files", "tables"), ("parquet", "arrow")]
)
def test_every_json_round_trips(format: str, kind: str, tmp_path: Path, *, optional: bool) -> None:
    schema = {"meta": Json(optional=optional), "in.side": Json("zstd", optional=optional)}
    made = ({"meta": each, "in.side": JSON[n - 1], "n": str(n)} for n, each in enumerate(JSON))
    path = write_dataset(tmp_path / "d", len(JSON), 1, Schema({**schema, "n": Text()}), made)
    report = export(path, tmp_path / "e", format)
    assert report.n_samples == len(JSON)
    with convert_back(tmp_path / "e", kind=kind) as found:
        names = ("meta.json", "in.side.json") if kind == "webdataset" else ("meta", "in.side")
        for name in names:
            assert type(found.schema[name]) is Json
            values = [one[name] for one in found]
            expected = JSON if name.startswith("meta") else JSON[-1:] + JSON[:-1]
            assert list(map(repr, values)) == list(map(repr, expected))


def test_tarfile_reads_exported_tars(dataset: shardio.ShardDataset, tmp_path: Path) -> None:
    export(dataset, tmp_path / "t", "webdataset", fields=["x", "text", "label"])
    with tarfile.open(tmp_path / "t" / "000000.tar") as tar:
        names = tar.getnames()
        assert names[:3] == ["000000000.x.npy", "000000000.label.cls", "000000000.text"]
        for i, sample in enumerate(dataset):
            array, label, text = (tar.extractfile(name) for name in names[3 * i : 3 * i + 3])
            assert array is not None and text is not None and label is not None
            assert equal(load_npy(array.read()), sample["x"])
            assert text.read().decode() == sample["text"]
            assert int(label.read()) == sample["label"]


@pytest.mark.external
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it leaves its files to the collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_exported_tars(dataset: shardio.ShardDataset, tmp_path: Path) -> None:
    library = pytest.importorskip("webdataset", reason="webdataset is not installed")
    export(dataset, tmp_path / "t", "webdataset", fields=["x", "text", "label", "meta", "raw"])
    tar = str(tmp_path / "t" / "000000.tar")
    found = list(library.WebDataset(tar, shardshuffle=False).decode())
    gc.collect()
    for sample, again in zip(dataset, found, strict=True):
        assert equal(sample["x"], again["x.npy"])
        assert (again["text"], again["label.cls"]) == (sample["text"], sample["label"])
        assert again["raw"] == sample["raw"]
        assert sample["meta"] is None or again["meta.json"] == sample["meta"]


def test_field_names_survive_a_round_trip_through_tars(tmp_path: Path) -> None:
    fields = {"key": shardio.Text(), "cls": shardio.Array("int64"), "b.txt": shardio.Text()}
    schema = shardio.Schema({**fields, "json.gz": shardio.Bytes()})
    made = ({"key": f"a.b/{i}", "cls": i, "b.txt": "b", "json.gz": b"z"} for i in range(3))
    write_dataset(tmp_path / "d", 3, 1, schema, made)
    export(tmp_path / "d", tmp_path / "t", "webdataset")
    with shardio.open(tmp_path / "d") as dataset, convert_back(tmp_path / "t") as found:
        assert found.schema.keys() - {"label", "source"} == schema.keys()
        for sample, again in zip(dataset, found, strict=True):
            assert {name: again[name] for name in schema} == sample


@pytest.mark.parametrize("key", ["../a", "a.b", "", "/etc/x", "same", "a\nb", ".a"])
def test_texts_that_cannot_be_keys_become_members(key: str, tmp_path: Path) -> None:
    schema = Schema({"key": Text(), "n": shardio.Array("int64")})
    write_dataset(tmp_path / "d", 2, 1, schema, [{"key": key, "n": 0}, {"key": "same", "n": 1}])
    export(tmp_path / "d", tmp_path / "t", "webdataset")
    with tarfile.open(tmp_path / "t" / "000000.tar") as tar:
        assert tar.getnames()[0] == "000000000.key.txt"
        member = tar.extractfile("000000000.key.txt")
        assert member is not None and member.read().decode() == key


def test_files_round_trip_through_a_table(dataset: shardio.ShardDataset, tmp_path: Path) -> None:
    export(dataset, tmp_path / "f", "files", fields=without_lists(dataset))
    with convert_back(tmp_path / "f", kind="tables") as found:
        for sample, again in zip(dataset, found, strict=True):
            for name in without_lists(dataset):
                value = load_npy(again[name]) if name in ("moved", "big") else again[name]
                assert same(dataset.schema[name], sample[name], value), name


def test_images_round_trip_with_classes(dataset: shardio.ShardDataset, tmp_path: Path) -> None:
    labelled = dataset.select(lambda c: c["label"] >= 0, fields=["label"])
    with labelled:
        export(labelled, tmp_path / "f", "files", fields=["picture", "label", "source"])
        places = sorted(str(p.relative_to(tmp_path / "f")) for p in (tmp_path / "f").rglob("*.p*"))
        expected = ["cat/\u00e9 0.png", "cat/\u00e9 2.ppm"]
        assert places == [*expected, "d\u00f6g/\u00e9 1.ppm", "d\u00f6g/\u00e9 2.png"]
        out = tmp_path / "back"
        shardio.convert(tmp_path / "f", out, workers=0, kind="images")
        with shardio.open(out) as found:
            assert found.classes == CLASSES
            known = sorted((bytes(s["picture"]), int(s["label"])) for s in labelled)
            assert sorted((bytes(s["image"]), int(s["label"])) for s in found) == known
