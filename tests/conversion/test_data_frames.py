"""Data frames as sources: a row is a sample, a column a field."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import shardio
from shardio import Array, InvalidArgument, Json, Schema, Text
from shardio.conversion.data_frames import FrameRows
from shardio.errors import SchemaError, UnsupportedEnvironment
from shardio_converters.schema_spec import parse_field
from tests.converters.helpers import plain

pd = pytest.importorskip("pandas", reason="its frames are converted")
pl = pytest.importorskip("polars", reason="its frames are converted")

DAYS = [datetime.datetime(2020, 1, 1), None, datetime.datetime(1960, 5, 5, 1)]
DAY_MS, DAY_US = 1577836800000, 86_400_000_000
VARIES = (None,)


def converted(frame: Any, out: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    shardio.convert(frame, out)
    with shardio.open(out) as dataset:
        values = {name: [sample[name] for sample in dataset] for name in dataset.schema}
        return dict(dataset.schema), values


PANDAS: dict[str, Any] = {
    "int": (np.array([1, 2, 3], "i2"), "int16", [1, 2, 3]),
    "bool": ([True, False, True], "bool", [True, False, True]),
    "nan": ([1.0, np.nan, 3.0], "float64", [1.0, np.nan, 3.0]),
    "text": (["a", None, "ü"], "text?", ["a", None, "ü"]),
    "classes": (pd.Categorical(["x", "y", "x"]), "text", ["x", "y", "x"]),
    "numbers": (pd.Categorical([7, None, 7]), "int64?", [7, None, 7]),
    "nullable": (pd.array([1, None, 3], "UInt8"), "uint8?", [1, None, 3]),
    "boolean": (pd.array([True, None, False], "boolean"), "bool?", [True, None, False]),
    "whole": (pd.array([1, 2, 3], "Int32"), "int32", [1, 2, 3]),
    "arrow": (pd.array([1.5, None, 2], "float[pyarrow]"), "float32?", [1.5, None, 2]),
    "sparse": (pd.arrays.SparseArray([0, 0, 1]), "int64", [0, 0, 1]),
    "when": (pd.to_datetime(DAYS).as_unit("s"), "int64?", [1577836800, None, -304815600]),
    "where": (
        pd.to_datetime(["2020-01-01"] * 3).tz_localize("Asia/Tokyo").as_unit("s"),
        "int64",
        [1577804400] * 3,
    ),
    "long": (pd.to_timedelta([1, 2, 3], unit="s").as_unit("ms"), "int64", [1000, 2000, 3000]),
    "arrays": (
        [np.zeros((1, 2), "f4"), np.ones((2, 2), "f4"), None],
        "float32[*,2]?",
        [[[0, 0]], [[1, 1]] * 2, None],
    ),
    "same": ([np.zeros(2), np.ones(2), np.ones(2)], "float64[2]", [[0, 0], [1, 1], [1, 1]]),
    "lists": ([[1, 2], [], [3.5]], "float64[*]", [[1, 2], [], [3.5]]),
    "ragged": ([[[1], [2, 3]], [], [[4]]], "list[int64[*]]", [[[1], [2, 3]], [], [[4]]]),
    "dicts": ([{"a": 1}, None, {"b": [1]}], "json?", [{"a": 1}, None, {"b": [1]}]),
    "mixed": ([[1], ["a"], {"b": 2}], "json", [[1], ["a"], {"b": 2}]),
    "flags": ([[1, True], [2], []], "json", [[1, True], [2], []]),
    "bytes": ([b"1", b"", b"3"], "bytes", [b"1", b"", b"3"]),
    "price": ([decimal.Decimal("1.50"), None, decimal.Decimal(2)], "text?", ["1.50", None, "2"]),
    "half": ([1, 2.5, None], "float64", [1, 2.5, np.nan]),
    "nothing": ([None] * 3, "json?", [None] * 3),
}

POLARS: dict[str, Any] = {
    "int": (pl.Series([1, None, 3], dtype=pl.Int16), "int16?", [1, None, 3]),
    "bool": (pl.Series([True, None, False]), "bool?", [True, None, False]),
    "float": (pl.Series([1.5, 2.5, float("nan")], dtype=pl.Float32), "float32", [1.5, 2.5, np.nan]),
    "text": (pl.Series(["a", None, "ü"]), "text?", ["a", None, "ü"]),
    "classes": (pl.Series(["x", "y", "x"], dtype=pl.Categorical), "text", ["x", "y", "x"]),
    "enum": (pl.Series(["x", "y", None], dtype=pl.Enum(["x", "y"])), "text?", ["x", "y", None]),
    "when": (pl.Series(DAYS, dtype=pl.Datetime("ms")), "int64?", [DAY_MS, None, -304815600000]),
    "day": (pl.Series([datetime.date(1970, 1, 2)] * 3), "int32", [1, 1, 1]),
    "long": (
        pl.Series([datetime.timedelta(1)] * 3, dtype=pl.Duration("us")),
        "int64",
        [DAY_US] * 3,
    ),
    "price": (pl.Series([decimal.Decimal("1.50"), None, None]), "text?", ["1.50", None, None]),
    "bytes": (pl.Series([b"1", None, b""]), "bytes?", [b"1", None, b""]),
    "lists": (pl.Series([[1, 2], [], None]), "int64[*]?", [[1, 2], [], None]),
    "holes": (pl.Series([[1, None], [], [3]]), "json", [[1, None], [], [3]]),
    "words": (pl.Series([["a"], [], None]), "json?", [["a"], [], None]),
    "ragged": (pl.Series([[[1], [2, 3]], [], [[]]]), "list[int64[*]]", [[[1], [2, 3]], [], [[]]]),
    "deep": (pl.Series([[[[1]]], [], []]), "json", [[[[1]]], [], []]),
    "fixed": (
        pl.Series([[[1, 2]] * 2] * 3, dtype=pl.Array(pl.Int32, (2, 2))),
        "int32[2,2]",
        [[[1, 2]] * 2] * 3,
    ),
    "boxes": (
        pl.Series([[[1, 2]], [], None], dtype=pl.List(pl.Array(pl.UInt8, 2))),
        "uint8[*,2]?",
        [[[1, 2]], [], None],
    ),
    "records": (pl.Series([[{"a": 1}], [], None]), "json?", [[{"a": 1}], [], None]),
    "nothing": (pl.Series([None] * 3), "json?", [None] * 3),
    "objects": (pl.Series([np.ones(2)] * 3, dtype=pl.Object), "float64[2]", [[1, 1]] * 3),
}


@pytest.fixture(scope="module")
def of_pandas(tmp_path_factory: pytest.TempPathFactory) -> Any:
    frame = pd.DataFrame({name: pd.Series(values) for name, (values, _, _) in PANDAS.items()})
    return converted(frame, tmp_path_factory.mktemp("pandas") / "out")


@pytest.fixture(scope="module")
def of_polars(tmp_path_factory: pytest.TempPathFactory) -> Any:
    frame = pl.DataFrame([series.alias(name) for name, (series, _, _) in POLARS.items()])
    return converted(frame, tmp_path_factory.mktemp("polars") / "out")


def same(found: list[Any], expected: list[Any]) -> bool:
    def comparable(value: Any) -> Any:
        if isinstance(value, list):
            return [comparable(each) for each in value]
        return "nan" if value != value else value

    return bool(comparable(plain(found)) == comparable(plain(expected)))


@pytest.mark.parametrize(
    ("library", "name"),
    [("pandas", name) for name in sorted(PANDAS)] + [("polars", name) for name in sorted(POLARS)],
)
def test_a_column_becomes_a_field_of_its_type(
    library: str, name: str, request: pytest.FixtureRequest
) -> None:
    schema, values = request.getfixturevalue(f"of_{library}")
    _, spec, expected = {"pandas": PANDAS, "polars": POLARS}[library][name]
    assert schema[name] == parse_field(name, spec)
    assert same(values[name], expected)


def test_a_polars_struct_becomes_a_nested_record(tmp_path: Path) -> None:
    frame = pl.DataFrame({"camera": [{"id": "a", "at": {"x": 1}}, None, {"id": "c", "at": None}]})
    schema, values = converted(frame, tmp_path / "out")
    assert schema == {
        "camera.id": Text(optional=True),
        "camera.at.x": Array("int64", optional=True),
    }
    assert values["camera.id"] == ["a", None, "c"] and values["camera.at.x"] == [1, None, None]


class Exported:
    """A data frame of a library that is not known here."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def test_anything_that_exports_an_arrow_stream_is_a_data_frame(tmp_path: Path) -> None:
    columns = {
        "x": pa.chunked_array([pa.array([1, None], "int16"), pa.array([3, 4], "int16")]),
        "box": pa.array([[1.5, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32(), 2)),
        "camera": pa.array([{"id": "a"}, None, {"id": "c"}, {"id": None}]),
        "kind": pa.array(["cat", "dog", None, "cat"]).dictionary_encode(),
    }
    table = pa.table(columns)
    expected = {
        "x": Array("int16", optional=True),
        "box": Array("float32", (2,)),
        "camera.id": Text(optional=True),
        "kind": Text(optional=True),
    }
    for n, frame in enumerate((table, Exported(table), table.to_reader(max_chunksize=3))):
        schema, values = converted(frame, tmp_path / str(n))
        assert schema == expected
        assert plain(values["x"]) == [1, None, 3, 4]
        assert plain(values["box"]) == [[1.5, 2], [3, 4], [5, 6], [7, 8]]
        assert values["camera.id"] == ["a", None, "c", None]
        assert values["kind"] == ["cat", "dog", None, "cat"]
    with pytest.raises(InvalidArgument, match="the data frame cannot be read"):
        shardio.convert(columns["x"], tmp_path / "no")


def test_without_pyarrow_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("shardio_converters.tabular")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedEnvironment, match=r"'pyarrow', .* pip install '\.\[arrow\]'"):
        shardio.convert(pl.DataFrame({"x": [1]}), tmp_path / "out")
    assert len(FrameRows(pd.DataFrame({"x": [1], "t": ["a"]})).schema) == 2


def test_a_named_index_is_stored(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1, 2]}, index=[5, 6])
    assert list(converted(frame, tmp_path / "a")[0]) == ["x"]
    frame.index.name = "key"
    _, values = converted(frame, tmp_path / "b")
    assert values["key"] == [5, 6] and list(values) == ["key", "x"]
    index = pd.MultiIndex.from_tuples([(1, "a"), (2, "b")], names=["n", None])
    both = pd.DataFrame({"x": [1, 2]}, index=index)
    assert list(converted(both, tmp_path / "c")[0]) == ["n", "x"]


def test_empty_frames_have_fields(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": np.zeros(0, "f4"), "t": pd.Series([], dtype=object)})
    assert dict(FrameRows(frame).schema) == {"x": Array("float32"), "t": Json()}
    empty = pl.DataFrame(schema={"x": pl.List(pl.Int8), "t": pl.String})
    assert dict(FrameRows(empty).schema) == {"x": Array("int8", VARIES), "t": Text()}
    for each in (frame, empty):
        report = shardio.convert(each, tmp_path / "out")
        assert (report.n_samples, report.generation) == (0, 0)
        assert not (tmp_path / "out").exists()


def test_many_rows_keep_their_order(tmp_path: Path) -> None:
    _, values = converted(pl.DataFrame({"x": range(10_000)}), tmp_path / "out")
    assert plain(values["x"]) == list(range(10_000))


def with_classes(*names: str) -> Any:
    """Return a table of two labels whose names Hugging Face's metadata has, if there are any."""
    feature = {"names": names, "_type": "ClassLabel"} if names else {"dtype": "int64"}
    info = {"info": {"features": {"label": feature}}}
    return pa.table({"label": [0, 1]}).replace_schema_metadata({"huggingface": json.dumps(info)})


@pytest.mark.parametrize("n_first", [0, 2])
def test_an_append_never_drops_the_names_of_classes(n_first: int, tmp_path: Path) -> None:
    out, schema = tmp_path / "out", Schema({"label": Array("int64")})
    with shardio.DatasetWriter(out, schema) as writer:
        for label in range(n_first):
            writer.append({"label": label})
    if n_first:
        said = "labels but no class names, while the samples have the classes 'cat', 'dog'; append"
        with pytest.raises(InvalidArgument, match=said):
            shardio.convert(with_classes("cat", "dog"), out, append=True)
        assert shardio.convert(with_classes(), out, append=True).n_samples == 2
    else:
        shardio.convert(with_classes("cat", "dog"), out, append=True)
        assert shardio.convert(with_classes(), out, append=True).classes == ("cat", "dog")
    with shardio.open(out) as dataset:
        assert dataset.classes == (() if n_first else ("cat", "dog"))


def test_categories_cannot_be_appended_to_labels_of_text(tmp_path: Path) -> None:
    shardio.convert(pl.DataFrame({"label": ["cat", "dog"]}), tmp_path / "out")
    more = pl.DataFrame({"label": pl.Series(["cat"], dtype=pl.Categorical)})
    said = "has labels that are texts, while the samples have the classes 'cat'; append labels that"
    with pytest.raises(InvalidArgument, match=said):
        shardio.convert(more, tmp_path / "out", append=True)
    as_text = more.cast({"label": pl.String})
    assert shardio.convert(as_text, tmp_path / "out", append=True).n_samples_before == 2


def test_a_frame_can_be_converted_with_a_schema_and_appended(tmp_path: Path) -> None:
    out = tmp_path / "out"
    schema = Schema({"x": Array("float32"), "t": Text(optional=True)})
    frame = pd.DataFrame({"x": np.array([1, 2], "f4"), "t": ["a", "b"]})
    shardio.convert(frame, out, schema=schema)
    more = pl.DataFrame({"x": [3], "t": [None]}, schema={"x": pl.Float32, "t": pl.String})
    report = shardio.convert(more, out, append=True)
    with shardio.open(out) as dataset:
        assert [sample["t"] for sample in dataset] == ["a", "b", None]
    assert (report.n_samples_before, report.n_samples) == (2, 1)
    with pytest.raises(SchemaError, match="sample 0: field 'x'"):
        shardio.convert(pd.DataFrame({"x": ["text"], "t": ["a"]}), out, append=True)


REFUSED = [
    (pd.DataFrame({"x": ["a", "b", 3]}), r"column 'x', row 2: found int64, expected Text as in"),
    (pd.DataFrame({"x": [np.zeros(2), np.zeros((2, 2))]}), r"found float64\[2, 2\], expected fl"),
    (pd.DataFrame({"x": [[1], np.zeros(1, "f4")]}), r"row 1: found float32\[1\], expected int64"),
    (pd.DataFrame({"x": [[1], [2**63]]}), "column 'x', row 1: an integer is too large for int64"),
    (pd.DataFrame({"x": [{"a": 1}, "t"]}), "row 1: found Text, expected lists or dicts"),
    (pd.DataFrame({"x": [1, datetime.date(2020, 1, 1)]}), r"row 1: found datetime\.date; expected"),
    (pd.DataFrame({"x": np.zeros(2, complex)}), "column 'x': unsupported dtype complex128"),
    (pd.DataFrame({"x": pd.interval_range(0, 2)}), r"row 0: found pandas\..*Interval; expected"),
    (pd.DataFrame({1: [1]}), "column 1 is not a string"),
    (pd.DataFrame([[1, 2]], columns=["x", "x"]), "column 'x' is not unique"),
    (pl.DataFrame({"a": [1], "a.b": [2]}), "field 'a' conflicts with field 'a.b': .*; rename or"),
    (pd.DataFrame({"": [1]}), "a field's name must be a non-empty string; found ''; rename or"),
    (pl.DataFrame({"n" * 300: [1]}), "field 'nnn.*…': a name has at most 255 bytes, found 300; re"),
    (pl.DataFrame({"a.b": [1], "a": [{"b": 2}]}), "the name of column 'a.b' is not unique"),
    (pd.DataFrame({}), "cannot map the columns to field types: a schema needs at least one field"),
    (pd.Series([1]), r"expected a DataFrame: call \.to_frame\(\)"),
    (pl.DataFrame({"x": pl.Series([1], dtype=pl.Int128)}), "'x': unsupported type Int128"),
    (pl.DataFrame({"x": [[datetime.date(2020, 1, 1)]]}), r"date32\[day\] cannot be stored in a l"),
    (pl.DataFrame({"x": [1]}).lazy(), r"expected a DataFrame: call \.collect\(\)"),
]


@pytest.mark.parametrize(("frame", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused_values_are_named_by_place(tmp_path: Path, frame: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        shardio.convert(frame, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("values", [[0.5, 2**53 + 1], [[0.5], [2**53 + 1]]], ids=["one", "list"])
def test_integers_of_a_column_with_floats_are_not_rounded(tmp_path: Path, values: Any) -> None:
    with pytest.raises(SchemaError, match="sample 1: .* cannot hold 9007199254740993 exactly"):
        shardio.convert({"x": values}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_object_that_cannot_be_stored_is_named_by_column_and_row(tmp_path: Path) -> None:
    class Lost:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise KeyError("lost")

    picture = pytest.importorskip("PIL.Image", reason="pictures are Pillow's").new("RGB", (1, 1))
    odd = {
        "KeyError: 'lost'": [np.ones(2), Lost()],
        "cannot write empty image": [picture, picture.resize((1, 1)).crop((0, 0, 0, 0))],
    }
    for expected, values in odd.items():
        with pytest.raises(InvalidArgument, match=f"column 'x', row 1: .*{expected}"):
            shardio.convert(pd.DataFrame({"x": values}), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_frame_refuses_names_and_workers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1]})
    with pytest.raises(InvalidArgument, match="names: not for data frames"):
        shardio.convert(frame, tmp_path / "out", names=("y",))
    with pytest.raises(InvalidArgument, match="workers: not for samples"):
        shardio.convert(frame, tmp_path / "out", workers=2)


def test_the_categories_of_a_pandas_label_are_the_classes(tmp_path: Path) -> None:
    labels = pd.Categorical(["dog", "cat", "dog"], categories=["cat", "dog", "fox"])
    frame = pd.DataFrame({"x": [1, 2, 3], "label": labels})
    assert shardio.convert(frame, tmp_path / "out").classes == ("cat", "dog", "fox")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["label"] == Array("int64")
        assert dataset["label"].tolist() == [1, 0, 1]
    frame.loc[1, "label"] = None
    shardio.convert(frame, tmp_path / "gaps")
    with shardio.open(tmp_path / "gaps") as dataset:
        assert dataset.schema["label"] == Array("int64", optional=True)
        assert [sample["label"] for sample in dataset] == [1, None, 1]


@pytest.mark.parametrize(
    ("dtype", "names"),
    [(pl.Enum(["cat", "dog", "fox"]), ("cat", "dog", "fox")), (pl.Categorical, ("dog", "cat"))],
)
def test_the_categories_of_a_polars_label_are_the_classes(
    dtype: Any, names: tuple[str, ...], tmp_path: Path
) -> None:
    labels = ["dog", "cat", "dog"]
    frame = pl.DataFrame({"label": pl.Series(labels, dtype=dtype)})
    assert shardio.convert(frame, tmp_path / "out").classes == names
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["label"] == Array("int64")
        assert [dataset.classes[k] for k in dataset["label"]] == labels
    gaps = pl.DataFrame({"label": pl.Series([*labels, None], dtype=dtype)})
    shardio.convert(gaps, tmp_path / "gaps")
    with shardio.open(tmp_path / "gaps") as dataset:
        assert dataset.schema["label"] == Array("int64", optional=True)
        assert dataset.classes == names and dataset[3]["label"] is None


def test_the_categories_of_an_arrow_label_are_the_classes(tmp_path: Path) -> None:
    parts = [pa.array(each).dictionary_encode() for each in (["b", "a"], ["c", "a"])]
    frame = pa.table({"label": pa.chunked_array(parts), "other": pa.chunked_array(parts)})
    assert shardio.convert(frame, tmp_path / "out").classes == ("b", "a", "c")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset["label"].tolist() == [0, 1, 2, 1]
        assert dataset["other"] == ["b", "a", "c", "a"]
    numbers = pa.table({"label": pa.array([7, 8]).dictionary_encode()})
    assert shardio.convert(numbers, tmp_path / "numbers").classes == ()


ARROW_TIMES: dict[str, Any] = {
    "when": pa.array(DAYS, pa.timestamp("us")),
    "where": pa.array(DAYS, pa.timestamp("ms", "Asia/Tokyo")),
    "long": pa.array([1, 2, 3], pa.duration("s")),
}
UNITS = {"when": "timestamp[us]", "where": "timestamp[ms, tz=Asia/Tokyo]", "long": "duration[s]"}


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow"])
def test_a_dataset_records_the_units_of_times(kind: str, tmp_path: Path) -> None:
    frame: Any = pa.table(ARROW_TIMES)
    units = dict(UNITS)
    if kind == "pandas":
        frame = frame.to_pandas()
        frame["month"] = pd.period_range("2020-01", periods=3, freq="M")
        units["month"] = "period[M]"
    if kind == "polars":
        frame = pl.DataFrame(frame).with_columns(day=pl.col("when").dt.date())
        units |= {"day": "date32[day]", "long": "duration[ms]"}  # Polars has no seconds
    frame_dict = {name: frame[name] for name in units}
    for out, source in (("frame", frame), ("dict", frame_dict)):
        if kind == "arrow" and out == "dict":
            continue
        shardio.convert(source, tmp_path / out)
        shardio.convert(source, tmp_path / out, append=True)
        shardio.convert(source, tmp_path / out, overwrite=True)
        with shardio.open(tmp_path / out) as dataset:
            assert dataset.converter == {"options": {"units": units}}
            assert ">times</span> " in dataset._repr_html_() and "timestamp[us]" in str(
                dataset._repr_html_()
            )


def test_an_append_with_another_unit_is_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame({"when": pd.to_datetime(["2020-01-01"]).as_unit("us")})
    shardio.convert(frame, tmp_path / "out")
    said = r"column 'when': expected timestamp\[us\] as in earlier rows, found timestamp\[s\]"
    with pytest.raises(InvalidArgument, match=said):
        shardio.convert(frame.astype("datetime64[s]"), tmp_path / "out", append=True)
    assert shardio.convert(frame, tmp_path / "out", append=True).n_samples_before == 1


def test_a_file_with_the_same_fields_is_appended_to_rows_with_times(tmp_path: Path) -> None:
    frame = pd.DataFrame({"when": pd.to_datetime(["2020-01-01"]), "source": ["here"]})
    shardio.convert(frame, tmp_path / "out")
    (tmp_path / "more.jsonl").write_text(json.dumps({"when": 5}))
    more = tmp_path / "more.jsonl"
    shardio.convert(more, tmp_path / "out", kind="tables", append=True, workers=0)
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset["source"] == ["here", "more.jsonl"]
        assert dataset.converter == {"options": {"units": {"when": "timestamp[us]"}}}
