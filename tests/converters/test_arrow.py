"""Parquet, Arrow and data sets of Hugging Face's: what is stored is what pyarrow reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Audio, Bytes, Image, InvalidArgument, Json, List, Text
from shardio.media import decode_image, encode_jpeg
from tests.converters.helpers import check_refused, convert, plain, reasons, stored

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
feather = pytest.importorskip("pyarrow.feather", reason="pyarrow is not installed")

pytestmark = pytest.mark.usefixtures("quick_disk")

MADE = Path(__file__).parent / "made" / "arrow"


def write_stream(table: Any, path: Path, n_rows: int = 2, **options: Any) -> None:
    with (
        pa.OSFile(os.fspath(path), "wb") as file,
        pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer,
    ):
        writer.write_table(table, max_chunksize=n_rows)


def write_feather(table: Any, path: Path) -> None:
    feather.write_feather(table, path, compression="zstd", chunksize=2)


def write_parquet(table: Any, path: Path) -> None:
    pq.write_table(table, path, row_group_size=2, write_page_checksum=True)


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "x.parquet": write_parquet,
    "x.pq": lambda table, path: pq.write_table(table, path, write_statistics=False),
    "x.arrow": write_stream,
    "x.feather": write_feather,
}


def every_type() -> Any:
    numbers = {
        dtype: pa.array(np.arange(3).astype(dtype))
        for dtype in "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
    }
    numbers |= {f"float{n}": pa.array(np.arange(3) / 2, f"float{n}") for n in (16, 32, 64)}
    return pa.table(
        numbers
        | {
            "bool": [True, False, True],
            "some": pa.array([1, None, 3], pa.int16()),
            "maybe": [None, True, False],
            "\u00e9t\u00e9": ["a", "", "\u00fc\U0001f600"],
            "large": pa.array(["x", None, "z"], pa.large_string()),
            "bytes": [b"\0\xff", b"", b"x"],
            "fixed": pa.array([b"ab", b"cd", b"ef"], pa.binary(2)),
            "category": pa.array(["p", "q", "p"]).dictionary_encode(),
            "list": pa.array([[1, 2], [], [3]], pa.list_(pa.int32())),
            "lists": pa.array([[[1], [2, 3]], [], [[]]], pa.list_(pa.list_(pa.uint8()))),
            "no list": [[1.5], None, []],
            "pairs": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int8(), 2)),
            "no pair": pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int8(), 2)),
            "boxes": pa.array([[[1, 2], [3, 4]], [], [[5, 6]]], pa.list_(pa.list_(pa.int8(), 2))),
            "gaps": [[1, None], [], None],
            "words": [["a", "b"], [], ["c"]],
            "records": [[{"a": 1, "b": None}], [], [{"a": None, "b": "x"}]],
            "group": [{"a": 1, "b": {"c": "x"}}, {"a": 2, "b": None}, {"a": 3, "b": {"c": "z"}}],
            "nothing": pa.nulls(3),
        }
    )


@pytest.mark.parametrize("name", WRITERS)
def test_values_are_those_that_pyarrow_reads(name: str, tmp_path: Path) -> None:
    table = every_type()
    WRITERS[name](table, tmp_path / name)
    report = convert(tmp_path / name, tmp_path / "out")
    assert (report.kind, report.counts) == ("arrow", {"converted": 1})
    with shardio.open(tmp_path / "out") as dataset:
        for field in (*table.column_names[:11], "bool"):
            assert dataset.schema[field] == Array(field)
        assert dataset.schema["some"] == Array("int16", optional=True)
        assert dataset.schema["fixed"] == Bytes() and dataset.schema["category"] == Text()
        assert dataset.schema["list"] == Array("int32", (None,))
        assert dataset.schema["lists"] == List(Array("uint8", (None,)))
        assert dataset.schema["no pair"] == Array("int8", (2,), optional=True)
        assert dataset.schema["boxes"] == Array("int8", (None, 2))
        assert dataset.schema["gaps"] == Json(optional=True)
        assert dataset.schema["group.b.c"] == Text(optional=True)
        for sample, known in zip(dataset, table.to_pylist(), strict=True):
            group = known.pop("group")
            known |= {"group.a": group["a"], "group.b.c": (group["b"] or {"c": None})["c"]}
            assert plain(dict(sample)) == known | {"source": name}


def test_times_are_whole_numbers_in_the_unit_of_the_file(root: Path, tmp_path: Path) -> None:
    when = pa.array([1, None, -3], pa.timestamp("us", "UTC"))
    table = pa.table(
        {
            "when": when,
            "day": pa.array([1, 2, 3], pa.date32()),
            "ms": pa.array([0, 86_400_000, 0], pa.date64()),
            "clock": pa.array([1, 2, 3], pa.time32("ms")),
            "long": pa.array([1, 2, 3], pa.time64("ns")),
            "span": pa.array([1, 2, 3], pa.duration("s")),
            "spans": pa.array([[1], [], [2, 3]], pa.list_(pa.duration("s"))),
        }
    )
    write_stream(table, root / "1.arrow")
    seconds = table.set_column(0, "when", when.cast("timestamp[s]", safe=False))
    write_stream(seconds, root / "2.arrow")
    numbers = table.set_column(0, "when", pa.array([1, 2, 3]))
    write_stream(numbers, root / "3.arrow")
    report = convert(root, tmp_path / "out")
    assert reasons(report) == {
        "2.arrow": "column 'when': expected timestamp[us, tz=UTC], found timestamp[s]",
        "3.arrow": "column 'when': expected timestamp[us, tz=UTC], found no times",
    }
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["when"] == Array("int64", optional=True)
        assert dataset.schema["day"] == dataset.schema["clock"] == Array("int32")
        assert [plain(one["when"]) for one in dataset] == [1, None, -3]
        assert [plain(one["ms"]) for one in dataset] == [0, 86_400_000, 0]
        assert [plain(one["spans"]) for one in dataset] == [[1], [], [2, 3]]
    recorded = (tmp_path / "out" / "generations" / "000001.json").read_text()
    assert "timestamp[us, tz=UTC]" in recorded and "duration[s]" in recorded


@pytest.mark.parametrize("name", WRITERS)
def test_empty_lists_of_arrays_keep_their_shape(name: str, root: Path, tmp_path: Path) -> None:
    pairs = [[[[1, 2], [3, 4]], []], [[], []], []]
    for part in range(2):
        rows = pa.array(pairs[part:], pa.list_(pa.list_(pa.list_(pa.int8(), 2))))
        WRITERS[name](pa.table({"pairs": rows}), root / f"{part}{name}")
    assert not convert(root, tmp_path / "out").broken
    with shardio.open(tmp_path / "out") as dataset:
        assert plain([sample["pairs"] for sample in dataset]) == pairs + pairs[1:]
        assert [one.shape for one in dataset[3]["pairs"]] == [(0, 2), (0, 2)]


@pytest.mark.parametrize("name", WRITERS)
def test_tables_whose_names_are_no_utf_8_are_read(name: str, root: Path, tmp_path: Path) -> None:
    WRITERS[name](pa.table({"x": [1, 2]}), tmp_path / "table")
    os.rename(tmp_path / "table", os.fsencode(tmp_path) + b"/in/\xff" + name.encode())
    report = convert(root, tmp_path / "out")
    assert [(one.name, one.n_samples) for one in report.inputs] == [(f"\\xff{name}", 2)]


def test_tensors_and_runs_and_views_are_what_they_stand_for(tmp_path: Path) -> None:
    tensors = np.arange(18, dtype="float32").reshape(3, 2, 3)
    views = pa.array([[1, 2], [], [3]], pa.list_view(pa.int16()))
    made = {
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors),
        "runs": pa.RunEndEncodedArray.from_arrays([2, 3], [7, 8]),
        "views": views,
        "text": pa.array(["a", None, "c"], pa.string_view()),
        "words": pa.array([["a"], [], ["b"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    }
    write_stream(pa.table(made), tmp_path / "x.arrow", 3)
    convert(tmp_path / "x.arrow", tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["tensor"] == Array("float32", (2, 3))
        np.testing.assert_array_equal([one["tensor"] for one in dataset], tensors)
        assert [plain(one["runs"]) for one in dataset] == [7, 7, 8]
        assert [plain(one["views"]) for one in dataset] == [[1, 2], [], [3]]
        assert [one["text"] for one in dataset] == ["a", None, "c"]
        assert [one["words"] for one in dataset] == [["a"], [], ["b"]]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_lists_are_whole_where_batches_are_cut(name: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    made = [generator.integers(0, 9, n % 7).tolist() for n in range(4_200)]
    images = [np.full((n % 3 + 1, 2, 2), n % 251).tolist() for n in range(4_200)]
    table = pa.table(
        {
            "tokens": pa.array(made, pa.list_(pa.uint16())),
            "nested": pa.array(images, pa.list_(pa.list_(pa.list_(pa.uint8(), 2), 2))),
            "row": np.arange(4_200),
            "odd": [None if n % 3 else n for n in range(4_200)],
        }
    )
    if name == "x.arrow":
        write_stream(table, tmp_path / name, 4_200)
    else:
        pq.write_table(table, tmp_path / name)
    assert convert(tmp_path / name, tmp_path / "out").n_samples == 4_200
    with shardio.open(tmp_path / "out") as dataset:
        for row, sample in enumerate(dataset):
            assert sample["row"] == row and sample["odd"] == (None if row % 3 else row)
            assert sample["tokens"].tolist() == made[row]
            assert sample["nested"].tolist() == images[row]


def test_a_data_set_that_was_saved_to_disk_is_as_its_own_library_reads_it(tmp_path: Path) -> None:
    known = json.loads((MADE / "values.json").read_text(encoding="utf-8"))
    report = convert(MADE / "saved", tmp_path / "out")
    assert report.counts == {"converted": 3, "part": 5}
    assert report.subsets == {name: len(known[name]) for name in ("test", "train")}
    assert report.classes == ("cat", "\u00e9l\u00e9phant")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["image"] == Image() and dataset.schema["sound"] == Audio()
        assert dataset.schema["matrix"] == Array("float32", (2, 3))
        assert dataset.schema["box.names"] == Json()
        rows = known["test"] + known["train"]
        for row in rows:
            row |= {f"box.{name}": value for name, value in row.pop("box").items()}
        for sample, row in zip(dataset, rows, strict=True):
            assert decode_image(sample["image"]).tolist() == row["image"]
            assert sample["sound"].n_frames == 160
            for name in row.keys() - {"image", "sound"}:
                assert plain(sample[name]) == row[name], name


def test_splits_of_any_name_are_subsets(tmp_path: Path) -> None:
    shutil.copytree(MADE / "saved", tmp_path / "in")
    (tmp_path / "in" / "train").rename(tmp_path / "in" / "unsupervised")
    (tmp_path / "in" / "dataset_dict.json").write_text('{"splits": ["test", "unsupervised"]}')
    report = convert(tmp_path / "in", tmp_path / "out")
    assert [*report.subsets] == ["test", "unsupervised"]
    shutil.copytree(tmp_path / "in", tmp_path / "both" / "more")
    (tmp_path / "in").rename(tmp_path / "both" / "in")
    twice = convert(tmp_path / "both", tmp_path / "out of both").subsets
    assert twice == {name: 2 * n for name, n in report.subsets.items()}
    (tmp_path / "both" / "in").rename(tmp_path / "in")
    for damage in ("{", "[]", '{"splits": [1]}'):
        (tmp_path / "in" / "dataset_dict.json").write_text(damage)
        assert convert(tmp_path / "in", tmp_path / damage).subsets == {}


@pytest.mark.parametrize(
    ("names", "subsets"),
    [
        (["data/train-00000-of-00002", "data/train-00001-of-00002"], {}),
        (["train-00000-of-00001", "test.a-00000-of-00001", "x"], {"test.a": 1, "train": 1}),
        # One in each of several folders: the folders may be anything
        (["a/train-00000-of-00001", "b/test-00000-of-00001"], {}),
        (["train/train-00000-of-00001", "val/val-00000-of-00001"], {"train": 1, "val": 1}),
        (["data/train-0-of-1", "data/test-0-of-1"], {"test": 1, "train": 1}),
        (["data/a-0-of-1", "data/b-0-of-1"], {}),
    ],
)
def test_names_of_parquet_files_give_subsets(
    names: list[str], subsets: dict[str, int], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [1]}), tmp_path / "in" / f"{name}.parquet")
    report = convert(tmp_path / "in", tmp_path / "out")
    assert report.subsets == subsets and report.n_samples == len(names)


def test_parquet_with_the_metadata_of_hugging_face(tmp_path: Path) -> None:
    features = {
        "words": {"dtype": "string", "_type": "Value"},
        "image": {"_type": "Image"},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    pictures = [encode_jpeg(np.full((8, 8, 3), n, np.uint8)) for n in range(3)]
    columns = {
        "words": ["a", "b", None],
        "image": [{"bytes": data, "path": f"{n}.jpg"} for n, data in enumerate(pictures)],
        "label": [1, 0, 1],
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table(columns).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "x.parquet")
    convert(tmp_path / "x.parquet", tmp_path / "file")
    shardio.convert(table, tmp_path / "table")
    for name, others in (("file", ["source"]), ("table", [])):
        with shardio.open(tmp_path / name) as dataset:
            assert [*dataset.schema] == ["words", "image", "label", *others]
            assert dataset.schema["image"] == Image() and dataset.classes == ("cat", "dog")
            assert [bytes(sample["image"]) for sample in dataset] == pictures
            assert [int(sample["label"]) for sample in dataset] == [1, 0, 1]
            assert [sample["words"] for sample in dataset] == ["a", "b", None]


def test_columns_keep_their_order_also_in_an_append(root: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"z": [1], "a": ["x"], "m": [0.5]}), root / "1.parquet")
    convert(root, tmp_path / "out")
    pq.write_table(pa.table({"m": [1.5], "z": [2], "a": ["y"]}), root / "2.parquet")
    assert convert(root, tmp_path / "out", append=True).n_samples == 1
    with shardio.open(tmp_path / "out") as dataset:
        assert [*dataset.schema] == ["z", "a", "m", "source"]
        assert [(one["z"], one["a"], one["m"]) for one in dataset] == [(1, "x", 0.5), (2, "y", 1.5)]


ARRAYS: dict[str, dict[str, Any]] = {
    "x": {"shape": [2, 3], "dtype": "int32", "_type": "Array2D"},
    "y": {"shape": [None, 2, 2], "dtype": "float32", "_type": "Array3D"},
}
"""Metadata that Hugging Face's `datasets` writes for columns of arrays."""


def check_arrays(out: Path) -> None:
    with shardio.open(out) as dataset:
        assert dataset.schema["x"] == Array("int32", (2, 3))
        assert dataset.schema["y"] == Array("float32", (None, 2, 2))
        assert [plain(one["x"]) for one in dataset] == [[[i, 1, 2], [3, 4, 5]] for i in range(3)]
        assert [one["y"].shape for one in dataset] == [(n, 2, 2) for n in range(3)]
        assert all((one["y"] == i).all() for i, one in enumerate(dataset))


class Array2DType(pa.ExtensionType):  # type: ignore[misc, name-defined]
    """A type as `datasets` registers it once it is imported: `shape`, and no `permutation`."""

    def __init__(self, shape: tuple[int | None, ...], dtype: str) -> None:
        self.shape, self.value_type = shape, dtype
        storage = pa.type_for_alias(dtype)
        for _ in shape:
            storage = pa.list_(storage)
        super().__init__(storage, "tests.Array2DType")

    def __arrow_ext_serialize__(self) -> bytes:
        return json.dumps((self.shape, self.value_type)).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> Array2DType:
        shape, dtype = json.loads(serialized)
        return cls(tuple(shape), dtype)


@pytest.mark.parametrize("name", WRITERS)
def test_arrays_of_hugging_face_while_types_are_registered(name: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "x": [[[i, 1, 2], [3, 4, 5]] for i in range(3)],
        "y": [[[[i, i], [i, i]]] * i for i in range(3)],
    }
    arrays = {}
    for column, about in ARRAYS.items():
        kind = Array2DType(tuple(about["shape"]), about["dtype"])
        storage = pa.array(values[column], kind.storage_type)
        arrays[column] = pa.ExtensionArray.from_storage(kind, storage)
    metadata = {"huggingface": json.dumps({"info": {"features": ARRAYS}})}
    WRITERS[name](pa.table(arrays).replace_schema_metadata(metadata), tmp_path / name)
    convert(tmp_path / name, tmp_path / "out")
    pa.register_extension_type(Array2DType((2, 3), "int32"))
    try:
        convert(tmp_path / name, tmp_path / "registered")
    finally:
        pa.unregister_extension_type("tests.Array2DType")
    check_arrays(tmp_path / "out")
    check_arrays(tmp_path / "registered")


def test_parquet_of_hugging_face_has_its_pictures_and_classes(tmp_path: Path) -> None:
    report = convert(MADE / "plain.parquet", tmp_path / "out")
    assert report.classes == ("cat", "\u00e9l\u00e9phant") and report.n_samples == 4
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["image"] == Image()
        assert dataset.schema["matrix"] == Array("float32", (2, 3))
        assert [plain(one["label"]) for one in dataset] == [0, 1, 1, 0]
    with pytest.raises(InvalidArgument, match="have labels of their own"):
        (tmp_path / "labels.csv").write_text("path,label\nplain.parquet,a\n")
        labels = tmp_path / "labels.csv"
        convert(MADE / "plain.parquet", tmp_path / "two", labels=labels)


def test_what_a_saved_data_set_lists_is_what_is_read(tmp_path: Path) -> None:
    root = shutil.copytree(MADE / "saved" / "train", tmp_path / "in")
    shutil.copy(root / "data-00000-of-00002.arrow", root / "cache-1234.arrow")
    (root / "data-00001-of-00002.arrow").unlink()
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 1, "part": 1, "unsupported": 1, "broken": 1}
    why = "'data-00001-of-00002.arrow', which it lists, is missing"
    assert reasons(report) == {"state.json": why}


def test_pictures_without_their_bytes_are_refused(root: Path, tmp_path: Path) -> None:
    features = {"info": {"features": {"image": {"_type": "Image"}}}}
    metadata = {"huggingface": json.dumps(features)}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    good = pq.read_table(MADE / "plain.parquet")["image"].to_pylist()[0]["bytes"]
    for name, value in {
        "1": {"bytes": good, "path": "a.png"},
        "2": None,
        "3": {"bytes": None, "path": "../a.png"},
        "4": {"bytes": b"no picture", "path": None},
    }.items():
        table = pa.table({"image": pa.array([value], kind)}).replace_schema_metadata(metadata)
        write_stream(table, root / f"{name}.arrow")
    report = convert(root, tmp_path / "out")
    found = reasons(report)
    assert [*found] == ["3.arrow", "4.arrow"] and report.n_samples == 2
    assert "found only its path, '../a.png': save the data set with its files" in found["3.arrow"]
    assert "column 'image', rows 0 to 0" in found["4.arrow"]
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["image"] == Image(optional=True)
        assert [one["image"] for one in dataset] == [good, None]


def test_what_cannot_be_stored_is_refused_with_the_reason(root: Path, tmp_path: Path) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], "int8"), [pa.array([1])])
    tables = {
        "map": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), "map<string, int8>"),
        "union": (union, "sparse_union"),
        "interval": (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "cannot be stored"),
        "bytes": (pa.array([[b"x"]]), "binary cannot be stored in a list or in JSON"),
        "nan": (pa.array([[{"a": float("nan")}]]), "NaN or infinity"),
        "type": (pa.array([1], "int16"), "expected json, found int16"),
    }  # fmt: skip
    write_stream(pa.table({"x": [[{"a": 1.5}]]}), root / "0.arrow")
    for name, (array, _) in tables.items():
        write_stream(pa.table({"x": array}), root / f"{name}.arrow")
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([1])], names=["x", "x"])
    write_stream(twice, root / "twice.arrow")
    write_stream(pa.table({"y": [1]}), root / "other.arrow")
    report = convert(root, tmp_path / "out", fields={"x": "json"})
    assert report.counts["converted"] >= 1
    found = reasons(report)
    for name, (_, why) in tables.items():
        if name != "type":
            assert why in found[f"{name}.arrow"], name
    assert found["twice.arrow"].startswith("two columns would become the field 'x'; rename it")
    assert found["other.arrow"] == "column 'y': int64, expected no such column"


NO_FIELDS = {
    "": "a field's name must be a non-empty string; found ''",
    "n" * 300: f"field '{'n' * 40}…': a name has at most 255 bytes, found 300",
    "a.b": "field 'a' conflicts with field 'a.b'",
    "x..y": "field 'x..y': a part of a dotted name is empty",
    "x\n": "field 'x\\n': only printable characters are allowed",
}


@pytest.mark.parametrize("name", WRITERS)
def test_names_that_are_no_fields_are_told_with_the_reason(name: str, tmp_path: Path) -> None:
    for number, (column, why) in enumerate(NO_FIELDS.items()):
        root = tmp_path / f"in {number}"
        root.mkdir()
        WRITERS[name](pa.table({"a": [1], column: [2]}), root / name)
        with pytest.raises(InvalidArgument) as told:
            convert(root, tmp_path / f"out {number}", kind="arrow")
        assert f"names of columns must be valid field names: {why[:7]}" in str(told.value)
        assert why in str(told.value)
        assert "; rename it or leave it out (--column" in str(told.value)
        convert(root, tmp_path / f"left {number}", kind="arrow", columns=["a"])
        write_parquet(pa.table({"g": [1]}), root / "good.parquet")
        report = convert(root, tmp_path / f"both {number}", kind="arrow")
        assert why in reasons(report)[name]


@pytest.mark.parametrize("name", WRITERS)
def test_columns_that_would_be_one_field_are_refused(name: str, root: Path, tmp_path: Path) -> None:
    twins = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["b", "b"])
    tables = {
        "column": pa.table({"a.b": [1], "a": [{"b": 2}]}),
        "inside": pa.table({"a": [{"b": {"c": 1}, "b.c": 2}]}),
        "twins": pa.table({"a": twins}),
    }
    WRITERS[name](pa.table({"a": [{"b": 3}]}), root / f"0{name}")
    for stem, table in tables.items():
        WRITERS[name](table, root / f"{stem}{name}")
        with pytest.raises(InvalidArgument, match="two columns would become the field 'a.b(.c)?'"):
            convert(root / f"{stem}{name}", tmp_path / stem)
    for fields in (None, {"a.b": "int64"}):
        report = convert(root, tmp_path / f"out {fields}", fields=fields)
        assert {*reasons(report)} == {f"{stem}{name}" for stem in tables}
        why = "would become the field 'a.b'; rename it or leave"
        assert why in reasons(report)[f"column{name}"]
        assert [plain(one["a.b"]) for one in stored(tmp_path / f"out {fields}")] == [3]
    for column, value in (("a.b", 1), ("a", 2)):
        convert(root / f"column{name}", tmp_path / column, columns=[column])
        assert [plain(one["a.b"]) for one in stored(tmp_path / column)] == [value]


def test_columns_can_be_left_out(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2], "map": pa.array([[], []], pa.map_(pa.string(), pa.int8()))})
    for name in ("x.parquet", "x.arrow"):
        WRITERS[name](table, tmp_path / name)
        convert(tmp_path / name, tmp_path / f"out {name}", columns=["x"])
        with shardio.open(tmp_path / f"out {name}") as dataset:
            assert [*dataset.schema] == ["x", "source"]
            assert [plain(one["x"]) for one in dataset] == [1, 2]
    with pytest.raises(InvalidArgument, match="column 'z' is missing, found x, map"):
        convert(tmp_path / "x.parquet", tmp_path / "none", columns=["z"])


def test_fields_can_be_given(tmp_path: Path) -> None:
    picture = pq.read_table(MADE / "plain.parquet")["image"].to_pylist()[0]["bytes"]
    table = pa.table(
        {
            "matrix": [[[1, 2], [3, 4]], [[5, 6]], []],
            "group": [{"a": 1}, None, {"a": 3}],
            "picture": [picture] * 3,
        }
    )
    write_parquet(table, tmp_path / "x.parquet")
    fields = {"matrix": "int64[*,2]", "group": "json?", "picture": "image", "more": "text?"}
    convert(tmp_path / "x.parquet", tmp_path / "out", fields=fields)
    with shardio.open(tmp_path / "out") as dataset:
        assert [one["matrix"].shape for one in dataset] == [(2, 2), (1, 2), (0, 2)]
        assert [one["group"] for one in dataset] == [{"a": 1}, None, {"a": 3}]
        assert dataset[0]["picture"].shape == (2, 3, 3) and dataset[0]["more"] is None
    for word, reason in {
        "int64[*,3]": "expected shape [*,3], found [2, 2]",
        "int32[*,2]": "column 'matrix': expected int32[*,2], found list[int64[*]]",
        "text": "column 'matrix': expected text, found list[int64[*]]",
    }.items():
        report = convert(tmp_path / "x.parquet", tmp_path / word, fields={**fields, "matrix": word})
        assert reason in reasons(report)["x.parquet"]
    ragged = pa.table({"matrix": [[[1], [2, 3]], [[1], [2]], [[1, 2]]]})
    write_parquet(ragged, tmp_path / "y.parquet")
    report = convert(tmp_path / "y.parquet", tmp_path / "y", fields={"matrix": "int64[*,*]"})
    assert "expected lists of one length in an array" in reasons(report)["y.parquet"]


def test_what_is_empty_or_null_in_one_file_is_what_others_have(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for name, table in {
        "a": pa.table({}),
        "b": pa.table({"x": pa.array([], "int32"), "v": pa.array([], pa.list_(pa.int8()))}),
        "c": pa.table({"x": pa.array([None]), "v": [None], "s": [None]}),
        "d": pa.table({"x": [7], "v": pa.array([[1]], pa.list_(pa.int8())), "s": [{"λ": "é"}]}),
        "e": pa.table({"x": pa.array([None]), "s": [None]}),
    }.items():
        (root / name).mkdir(parents=True)
        write_parquet(table, root / name / "t.parquet")
    report = convert(root, tmp_path / "out")
    assert report.counts == {"empty": 2, "converted": 3}
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["x"] == Array("int64", optional=True)
        assert dataset.schema["s.\u03bb"] == Text(optional=True)
        null, full, last = dataset
        for one in (null, last):
            assert (one["x"], one["v"], one["s.\u03bb"]) == (None, None, None)
        assert (full["x"], full["v"].tolist(), full["s.\u03bb"]) == (7, [1], "\xe9")
    with pytest.raises(InvalidArgument, match="Feather that can be read and has columns"):
        convert(root / "a", tmp_path / "none")


def test_damaged_files_are_listed(root: Path, tmp_path: Path) -> None:
    table = pa.table({"x": np.random.default_rng(0).integers(0, 1 << 62, 999)})
    for name in ("x.parquet", "x.arrow", "x.feather"):
        WRITERS[name](table, root / name)
        whole = (root / name).read_bytes()
        wrong = {"empty": b"", "short": whole[:-1], "half": whole[: len(whole) // 2]}
        wrong |= {"head": whole[:4], "more": whole + b"x"}
        for kind, content in wrong.items():
            (root / f"{kind} {name}").write_bytes(content)
    pq.write_table(table, root / "flipped x.parquet", write_page_checksum=True, compression=None)
    flipped = bytearray((root / "flipped x.parquet").read_bytes())
    flipped[2_000] ^= 1
    (root / "flipped x.parquet").write_bytes(flipped)
    write_stream(table, root / "two.arrow", 999)
    one = (root / "two.arrow").read_bytes()
    (root / "no end.arrow").write_bytes(one[:-8])
    (root / "two.arrow").write_bytes(one + one)
    (root / "old.feather").write_bytes(b"FEA1" + bytes(60))
    os.mkfifo(root / "pipe.parquet")
    report = convert(root, tmp_path / "out")
    assert {one.name for one in report.inputs if one.outcome == "converted"} == {
        "x.arrow", "x.feather", "x.parquet"
    }  # fmt: skip
    found = reasons(report)
    assert len(found) == 5 * 3 + 4 and "empty" in found["empty x.arrow"]
    assert "CRC" in found["flipped x.parquet"]
    assert "the stream has no end" in found["no end.arrow"]
    assert "several streams, only the first would be read" in found["two.arrow"]
    assert "Feather of version 1" in found["old.feather"]


def test_text_that_is_none_is_named(tmp_path: Path) -> None:
    text = pa.StringArray.from_buffers(
        1, pa.py_buffer(np.array([0, 2], "int32")), pa.py_buffer(b"\xff\xfe")
    )
    write_parquet(pa.table({"x": text}), tmp_path / "x.parquet")
    report = convert(tmp_path / "x.parquet", tmp_path / "out")
    assert "column 'x', rows 0 to 0: damaged: 'utf-8'" in reasons(report)["x.parquet"]


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    write_stream(pa.table({"x": pa.array([{}], pa.struct([]))}), tmp_path / "x.arrow")
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "no Parquet, Arrow or Feather that can be read and has columns, so fields cannot"),
        ({}, "files looked at: 1; x.arrow: column 'x': a struct without fields"),
        ({"columns": []}, "columns is []; expected names of columns"),
        ({"columns": "x"}, "columns is 'x'"),
        ({"fields": {"x": "list[text]"}}, "found 'list[text]'; expected a list of arrays"),
    ]
    check_refused(tmp_path / "x.arrow", tmp_path / "out", refused)
