"""Numbers of several dtypes in one field: all are the numbers that they were, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardio
from shardio import Array, List, MediaError
from shardio_converters.inference import common_dtype, widen
from shardio_converters.schema_spec import DTYPES
from tests.converters.helpers import convert, plain, stored
from tests.converters.kinds import WRITERS

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("int32", "int64", "int64"),
        ("int64", "float64", "float64"),
        ("int64", "float32", "float64"),
        ("int8", "float16", "float16"),
        ("float32", "float16", "float32"),
        ("uint8", "int8", "int16"),
        ("uint64", "float32", "float64"),
        ("uint64", "int8", None),
        ("bool", "int8", None),
        ("bfloat16", "float32", None),
        ("text", "int8", None),
    ],
)
def test_two_dtypes_have_one_in_either_order(one: str, other: str, both: str | None) -> None:
    assert common_dtype(one, other) == common_dtype(other, one) == both


@pytest.mark.parametrize("one", DTYPES)
def test_no_number_is_another_in_a_wider_dtype(one: str) -> None:
    for other in DTYPES:
        if not (both := common_dtype(one, other)):
            continue
        dtype = np.dtype(one)
        ends: Any = [0, 1]
        if dtype.kind in "iuf":
            limits: Any = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
            ends += [limits.min, limits.max]
        values = np.array(ends, dtype)
        try:
            found = widen(values, both)
        except MediaError:
            assert dtype.itemsize == 8 and dtype.kind in "iu" and both == "float64"
            continue
        assert found.dtype == both
        assert found.tolist() == values.tolist()  # Python compares numbers exactly


COLUMNS: dict[str, list[Any]] = {
    "x": [pa.array([1, None, 1 << 53]), pa.array([1.5, None]), pa.array([7], "uint8")],
    "y": [pa.array([1, 2, 3], "int16"), pa.array([1 << 40, -1]), pa.array([7], "uint8")],
    "v": [pa.array([[1, 2], None, []]), pa.array([[0.5], [2.5, 3]]), pa.array([[-1]])],
    "w": [pa.array([[[1], []]] * 3), pa.array([[[0.5]], []]), pa.array([[[2, 3], [4]]])],
}
"""Column types in each of three files."""


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_of_several_files_as_of_pyarrow(suffix: str, root: Path, tmp_path: Path) -> None:
    files = [{name: arrays[n] for name, arrays in COLUMNS.items()} for n in range(3)]
    for n, columns in enumerate(files):
        WRITERS[suffix](root / f"{n}.{suffix}", columns)
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 3}
    expected = pa.concat_tables(map(pa.table, files), promote_options="permissive")
    with shardio.open(tmp_path / "out") as dataset:
        schema = dict(dataset.schema)
        for name, field in (
            ("x", Array("float64", optional=True)),
            ("y", Array("int64")),
            ("v", Array("float64", (None,), optional=True)),
            ("w", List(Array("float64", (None,)))),
        ):
            assert schema[name] == field, name
        for name in COLUMNS:
            values = [plain(sample[name]) for sample in dataset]
            assert values == expected[name].to_pylist(), name


def test_what_lies_where_a_value_is_null_is_no_number(root: Path, tmp_path: Path) -> None:
    mask = pa.py_buffer(b"\x01")  # the second one is null
    numbers = pa.Array.from_buffers(pa.int64(), 2, [mask, pa.py_buffer(np.array([5, 1 << 60]))])
    WRITERS["arrow"](root / "0.arrow", {"x": numbers})
    WRITERS["arrow"](root / "1.arrow", {"x": [0.5]})
    convert(root, tmp_path / "out")
    assert [plain(one["x"]) for one in stored(tmp_path / "out")] == [5, None, 0.5]


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_a_whole_number_no_float_is_breaks_it(suffix: str, root: Path, tmp_path: Path) -> None:
    for n, value in enumerate(([1 << 53], [0.5], [(1 << 53) + 1])):
        path = root / f"{n}.{suffix}"
        if suffix == "npy":
            np.save(path, np.array(value))
        else:
            pq.write_table(pa.table({"x": value}), path)
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 2, "broken": 1}
    (broken,) = report.broken
    assert broken.name == f"2.{suffix}"
    said = "expected whole numbers up to 9007199254740992 as float64, found 9007199254740993"
    assert said in broken.reason


@pytest.mark.parametrize("suffix", ["npz", "h5"])
@pytest.mark.parametrize("rows", [True, False])
def test_arrays_of_several_files(suffix: str, root: Path, tmp_path: Path, *, rows: bool) -> None:
    files: list[dict[str, Any]] = [
        {"x": np.arange(6).reshape(2, 3), "y": np.arange(2, dtype="uint8")},
        {"x": np.arange(6).reshape(2, 3) / 4, "y": np.arange(2, dtype="int16") - 9},
        {"x": np.asfortranarray(np.ones((2, 3), "float32")), "y": np.ones(2, "int8")},
    ]
    for n, arrays in enumerate(files):
        WRITERS[suffix](root / f"{n}.{suffix}", arrays)
    report = convert(root, tmp_path / "out", rows=rows)
    assert report.counts == {"converted": 3}
    for name, dtype in (("x", "float64"), ("y", "int16")):
        found = np.stack([sample[name] for sample in stored(tmp_path / "out")])
        together = np.concatenate if rows else np.stack
        expected = together([arrays[name] for arrays in files])
        assert found.dtype == dtype
        assert np.array_equal(found, expected)


def test_an_append_makes_no_field_wider(root: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), root / "0.parquet")
    convert(root, tmp_path / "out")
    pq.write_table(pa.table({"x": pa.array([3], "int32")}), root / "1.parquet")
    pq.write_table(pa.table({"x": [0.5]}), root / "2.parquet")
    report = convert(root, tmp_path / "out", append=True)
    assert report.counts == {"duplicate": 1, "converted": 1, "broken": 1}
    assert report.broken[0].reason.endswith("column 'x': expected int64, found float64")
    assert [plain(one["x"]) for one in stored(tmp_path / "out")] == [1, 2, 3]
