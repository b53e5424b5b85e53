"""Tables from CSV and JSON Lines: values are those that Python's own csv and json read."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardio
from shardio import Array, Bytes, Image, Input, InvalidArgument, Json, Text
from shardio_converters.parsing import may_be_out_of_range
from shardio_converters.tabular.table_files import read_blocks
from shardio_converters.tabular.tables import Tables
from tests.converters.helpers import check_broken, check_refused, convert, reasons, stored, write

pytestmark = pytest.mark.usefixtures("quick_disk")


def told(content: str, tmp_path: Path, name: str = "t.csv") -> dict[str, str]:
    """Return the inferred field specs of a table."""
    write(tmp_path, {name: content})
    fields = Tables().fitted([Input(name, str(tmp_path / name), 0, -1)]).fields
    return dict(fields or {})


def test_rows_of_csv_are_those_that_csv_reads(root: Path, tmp_path: Path) -> None:
    rows = [{"id": n, "x": n / 7, "ok": n % 2 == 0, "text": f'"a",\né {n}'} for n in range(3000)]
    with open(root / "a.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert convert(root, tmp_path / "out").counts == {"converted": 1}
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["x"] == Array("float64") and dataset.schema["ok"] == Array("bool")
        for sample, row in zip(dataset, rows, strict=True):
            assert {name: sample[name] for name in row} == row
            assert [*sample] == [*row, "source"] and sample["source"] == "a.csv"


def test_columns_keep_their_order_whatever_an_append_has(root: Path, tmp_path: Path) -> None:
    write(root, {"1.csv": "z.b,m,z.a\n1,x,2\n", "2.jsonl": '{"m": "y", "z": {"a": 4, "b": 3}}\n'})
    convert(root, tmp_path / "out")
    write(root, {"3.csv": "m,z.a,z.b\nw,6,5\n"})
    fields = {"m": "text", "z.a": "int64", "z.b": "int64"}
    assert convert(root, tmp_path / "out", append=True, fields=fields).n_samples == 1
    with shardio.open(tmp_path / "out") as dataset:
        assert [*dataset.schema] == ["z.b", "m", "z.a", "source"]
        assert [[*sample.values()][:3] for sample in dataset] == [
            [1, "x", 2],
            [3, "y", 4],
            [5, "w", 6],
        ]
    convert(root / "1.csv", tmp_path / "given", fields=fields)
    with shardio.open(tmp_path / "given") as dataset:
        assert [*dataset.schema] == ["m", "z.a", "z.b", "source"]


def test_a_dataset_without_labels_takes_no_classes(root: Path, tmp_path: Path) -> None:
    write(root, {"1.csv": "x\n1\n"})
    convert(root, tmp_path / "out")
    write(root, {"cat/2.csv": "x\n2\n"})
    with pytest.raises(InvalidArgument, match="no field 'label', while .* the classes 'cat'; "):
        convert(root, tmp_path / "out", append=True)
    convert(root, tmp_path / "out", overwrite=True)
    write(root, {"3.csv": "x\n3\n"})
    convert(root, tmp_path / "out", append=True)
    with shardio.open(tmp_path / "out") as dataset:
        assert [(int(one["x"]), int(one["label"])) for one in dataset] == [(1, -1), (2, 0), (3, -1)]


def test_rows_of_json_lines_are_those_that_json_reads(root: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "id": n,
            "cam": {"id": f"c{n}", "pose": [[n, 0.5], [1, 2]], "on": {"ü": True}},
            "tokens": [*range(n % 4)],
            "any": [n, "text", None, {"a": []}][n % 4],
            "words": ["a", "\U0001f600"],
        }
        for n in range(1500)
    ]
    write(root, {"a/1.jsonl": "\r\n\r\n".join(map(json.dumps, rows)), "notes.txt": "notes"})
    report = convert(root, tmp_path / "out")
    assert report.kind == "tables" and report.counts == {"converted": 1, "unsupported": 1}
    with shardio.open(tmp_path / "out") as dataset:
        schema = dataset.schema
        assert schema["cam.pose"] == Array("float64", (2, 2))
        assert schema["tokens"] == Array("int64", (None,))
        assert schema["any"] == Json(optional=True) and schema["words"] == Json()
        for sample, row in zip(dataset, rows, strict=True):
            assert sample["label"] == 0
            assert sample["any"] == row["any"] and sample["words"] == row["words"]
            assert sample["cam.id"] == row["cam"]["id"] and sample["cam.on.ü"]
            np.testing.assert_array_equal(sample["cam.pose"], row["cam"]["pose"])
            np.testing.assert_array_equal(sample["tokens"], row["tokens"])


@pytest.mark.parametrize(
    ("cells", "word"),
    [
        (["1", " 2 ", "-3", "+4"], "int64"),
        (["1", "18446744073709551615"], "uint64"),
        (["-1", "18446744073709551615"], "text"),
        (["1", "9" * 30], "text"),
        (["1", "9" * 5000], "text"),
        (["1", "2.5", "1e3", ".5", "nan", "-Inf"], "float64"),
        (["0.5", "9007199254740993"], "text"),
        (["1.5", "1e999"], "text"),
        (["1.5", "-1e999"], "text"),
        (["1.5", "1e-999"], "text"),
        (["-0.0", "0e999", "5e-324", " inf "], "float64"),
        (["0123", "0456"], "text"),
        (["0123", "1.5"], "text"),
        (["1_000", "2"], "text"),
        (["٣", "2"], "text"),
        (["true", "FALSE", "True"], "bool"),
        (["true", "1"], "text"),
        (["1", ""], "int64?"),
        (["", "x"], "text"),
        (['""', '""'], "text"),
        (["1", "x"], "text"),
        (['"1\n2"', "3"], "text"),
    ],
)
def test_a_column_of_csv_fits_all_its_cells(cells: list[str], word: str, tmp_path: Path) -> None:
    text = "".join(f"a,{cell}\n" for cell in cells)
    assert told(f"id,x\n{text}", tmp_path)["x"] == word
    many = "a,1\n" * 300  # a block of its own
    if "true" not in cells and any(cell.strip('"') for cell in cells):
        assert told(f"id,x\n{many}{text}", tmp_path)["x"] == word


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([1, None], "int64?"),
        ([1, 2.5], "float64"),
        ([1, True], "json"),
        ([2**53 + 1, 0.5], "json"),
        ([2**63], "uint64"),
        ([2**64], "json"),
        ([True, False], "bool"),
        (["a", None], "text?"),
        (["a", 1], "json"),
        ([None, None], "json?"),
        ([[1, 2], [3, 4]], "int64[2]"),
        ([[1, 2], [3]], "int64[*]"),
        ([[1], [2.5, 3]], "float64[*]"),
        ([[1], [2**63]], "uint64[1]"),
        ([[[1, 2]], []], "int64[*,2]"),
        ([[], []], "json"),
        ([[1, True], [2, 3]], "json"),
        ([[1, None]], "json"),
        ([[[1], [2, 3]]], "json"),
        ([[1], [[1]]], "json"),
        ([[1], 1], "json"),
        (["a", {"b": 1}], "json"),
        ([{}, {}], "json"),
        ([{"a.b": 1}], "json"),
        ([{"": 1}], "json"),
        ([{str(n): n} for n in range(300)], "json"),
    ],
)
def test_a_column_of_json_lines_fits_all(values: list[Any], word: str, tmp_path: Path) -> None:
    text = "".join(json.dumps({"id": 0, "x": value}) + "\n" for value in values)
    assert told(text, tmp_path, "t.jsonl")["x"] == word


def test_deep_objects_are_json(tmp_path: Path) -> None:
    text = '{"a": ' * 200 + "1" + "}" * 200
    assert [*told(text, tmp_path, "t.ndjson").values()] == ["json"]


def test_columns_that_some_tables_lack_are_optional(root: Path, tmp_path: Path) -> None:
    write(root, {"1.csv": "id,x,s\n1,2,a\n2,,", "2.tsv": "id\tx\n3\t0.5\n", "3.jsonl": '{"id":4}'})
    assert convert(root, tmp_path / "out").counts == {"converted": 3}
    with shardio.open(tmp_path / "out") as dataset:
        assert [sample["id"] for sample in dataset] == [1, 2, 3, 4]
        assert [sample["x"] for sample in dataset] == [2.0, None, 0.5, None]
        assert [sample["s"] for sample in dataset] == ["a", None, None, None]


def test_empty_text_is_text_where_no_row_lacks_the_column(root: Path, tmp_path: Path) -> None:
    write(root, {"1.csv": 'a,label,source\n,x,"\x00"\n'})
    convert(root, tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["a"] == Text()
        assert dict(dataset[0]) == {"a": "", "label": "x", "source": "\x00"}


def test_long_cells_are_read(root: Path, tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    write(root, {"1.csv": f"a,b\n{'x' * 3_000_000},1\n{'y' * 200_000},2\n"})
    for _ in read_blocks(str(root / "1.csv"), "1.csv"):
        assert limit < 200_000 and csv.field_size_limit() == limit  # that of the process
    convert(root, tmp_path / "out")
    assert [len(sample["a"]) for sample in stored(tmp_path / "out")] == [3_000_000, 200_000]


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "ragged.csv": ("id,x\n1,2\n3\n", "line 3: expected 2 cells, as the first line has, found 1"),
    "long.csv": ("id,x\n1,2\n\n3,4,5\n", "line 4: expected 2 cells"),
    "quote.csv": ('id,x\n1,"2\n', "line 2: not CSV: unexpected end of data"),
    "after.csv": ('id,x\n1,"2"3\n', "line 2: not CSV"),
    "unnamed.csv": (",x\n1,2\n", "found ''; rename it or leave it out (pandas: to_csv"),
    "twice.csv": ("id,id\n1,2\n", "two columns would become the field 'id'; rename"),
    "group.csv": ("id,id.x\n1,2\n", "names of columns must be valid field names"),
    "beside.csv": ("a,a.b\n1,2\n", "field names: field 'a' conflicts with field 'a.b'"),
    "beside.jsonl": ('{"id": 1, "x": 1, "id.x": 2}\n', "column 'id.x': expected no such column"),
    "name.csv": (f"id,{'n' * 300}\n1,2\n", "a name has at most 255 bytes, found 300; rename it"),
    "names.jsonl": (f'{{"{"n" * 300}": 1}}\n', "name has at most 255 bytes, found 300; rename it"),
    "empty.jsonl": ('{"": 1}\n', "a field's name must be a non-empty string; found ''; rename it"),
    "latin.csv": (b"id,x\n1,\xe9\n", "not UTF-8"),
    "utf16.csv": ("id,x\n1,2\n".encode("utf-16"), "not UTF-8"),
    "list.jsonl": ('{"id": 1, "x": 1}\n[1]\n', "line 2: expected an object, found [1]"),
    "cut.jsonl": ('{"id": 1, "x": 1}\n{"id": 2,', "line 2: not JSON"),
    "name.jsonl": ('{"a": 1, "a" : 2, "b": "x"}\n', "an object repeats a name"),
    "text.jsonl": ('{"a": "b\\": c : {", "a": 2}\n', "an object repeats a name"),
    "keys.jsonl": ('{"id": 1, "x": {"a": 1, "a": 2}}\n', "an object repeats a name"),
    "digits.jsonl": (f'{{"id": {"9" * 5000}}}\n', "line 1: not JSON"),
    "deep.jsonl": ('{"id": ' + "[" * 100_000, "line 1: not JSON"),
    "tab.jsonl": ('{"id": "\t"}\n', "line 1: not JSON"),
    "both.jsonl": ('{"id": 1, "x": 1, "a.b": 1, "a": {"b": 1}}\n', "expected no such column"),
}


def test_what_is_no_table_is_listed_with_its_line(root: Path, tmp_path: Path) -> None:
    write(root, {"good.csv": "id,x\n1,2\n", "none.csv": "", "names.csv": "x,id\n", "0.jsonl": "\n"})
    os.mkfifo(root / "pipe.csv")
    report = check_broken(root, tmp_path / "out", BROKEN)
    assert report.n_samples == 1
    assert report.counts == {"converted": 1, "empty": 3, "broken": len(BROKEN), "unsupported": 1}


MISFITS: dict[str, tuple[str | bytes, str]] = {
    "1.csv": ("i\n1\n007\n", "line 3, column 'i': expected int8, found '007'"),
    "2.csv": ("i\n300\n", "line 2, column 'i': expected int8, found 300, outside -128"),
    "3.csv": ('x,i\n1,2\n3,""\n', "line 3, column 'i': is missing; expected int8"),
    "4.csv": ("x\n1\n", "column 'i' is missing"),
    "5.csv": ("i,more\n1,2\n", "column 'more': expected no such column"),
    "6.csv": ("i,f\n1,1e39\n", "column 'f': expected float32, found a number out of range"),
    "7.csv": ('i,a\n1,"[1,2,3]"\n', "column 'a': expected float32[2], found float32[3]"),
    "8.csv": ("i,label\n1,x\n", "column 'label': expected no such column"),
    "1.jsonl": ('{"i": 1}\n{"i": "1"}\n', "line 2, column 'i': expected int8, found '1'"),
    "2.jsonl": ('{"i": 1.0}\n', "column 'i': expected int8, found float64"),
    "3.jsonl": ('{"i": 1, "j": NaN}\n', "line 1, column 'j': Out of range float values"),
    "4.jsonl": ('{"i": 1, "t": "\\ud800"}\n', "line 1, column 't': 'utf-8' codec can't encode"),
    "5.jsonl": ('{"i": 1, "j": ' + "[" * 300 + "]" * 300 + "}", "column 'j': nested more than 256"),
    "6.jsonl": ('{"i": 1, "a": [1, true]}', "column 'a': expected float32[2], found [1, True]"),
    "7.jsonl": ('{"i": 1, "g": 3}', "line 1, column 'g': expected an object, found 3"),
    "8.jsonl": ('{"i": 1, "g": {"x": 1, "z": 2}}', "column 'g.z': expected no such column"),
    "9.jsonl": ('{"i": 1, "t": 5}', "column 't': expected text, found 5"),
}


def test_rows_that_do_not_fit_given_fields_are_named(root: Path, tmp_path: Path) -> None:
    fields = {
        "i": "int8", "x": "int64?", "f": "float32?", "a": "float32[2]?", "j": "json?",
        "t": "text?", "g.x": "int64?",
    }  # fmt: skip
    write(root, {"good.csv": 'i,x,f,a,j,t\n1,,2.5,"[1, 2]","{""k"": null}",\n'})
    check_broken(root, tmp_path / "out", MISFITS, fields=fields)
    with shardio.open(tmp_path / "out") as dataset:
        (sample,) = dataset
        np.testing.assert_array_equal(sample["a"], np.array([1, 2], "float32"))
        assert sample["j"] == {"k": None} and sample["t"] is None and sample["x"] is None


def test_nan_of_json_lines_is_a_number(root: Path, tmp_path: Path) -> None:
    write(root, {"1.jsonl": '{"x": NaN}\n{"x": -Infinity}\n{"x": 1}\n'})
    convert(root, tmp_path / "out")
    np.testing.assert_array_equal([s["x"] for s in stored(tmp_path / "out")], [np.nan, -np.inf, 1])


OUT_OF_RANGE = (
    *("1e400", "-1e400", "1E+0400", "1e-400", "-1.5e-0400", "2e-324", "1.8e308"),
    *(f"1{'0' * 350}.0", f"2{'0' * 209}e99", f"0.{'0' * 350}1", f"-0.{'0' * 250}1e-99"),
)
IN_RANGE = ("0.0", "-0.0", "0e400", "0.000E-999", "5e-324", "3e-324", "1.7e308", "1e0022", "1e99")


@pytest.mark.parametrize("number", OUT_OF_RANGE)
def test_no_number_becomes_infinite_or_0(number: str, root: Path, tmp_path: Path) -> None:
    shown = number if len(number) <= 40 else f"{number[:40]}…"
    why = f"expected a number in the range of float64, found {shown}, which would become"
    write(root, {"1.csv": f"x\n1.50\n{number}\n"})
    convert(root / "1.csv", tmp_path / "csv")
    assert [sample["x"] for sample in stored(tmp_path / "csv")] == ["1.50", number]
    values = (number, f"[0.5, {number}]", f'{{"y": {number}}}', f'[{{"y.z": [{number}]}}]')
    lines: dict[str, str | bytes] = {
        f"{n}.jsonl": f'{{"x": 1.5}}\n{{"a": 0, "x": {v}}}\n' for n, v in enumerate(values)
    }
    write(root, lines)
    for name in lines:
        with pytest.raises(InvalidArgument, match=f"{name}: line 2, column 'x': {re.escape(why)}"):
            convert(root / name, tmp_path / "none")
    write(root, {"lists.csv": f'x\n"[1.5, {number}]"\n', "good.jsonl": '{"x": [0.5]}\n'})
    for n, (word, names) in enumerate(
        {"float64": ["1.csv", "0.jsonl"], "float32[*]": ["lists.csv"], "json": [*lines]}.items()
    ):
        report = convert(root, tmp_path / f"out {n}", fields={"x": word, "a": "int64?"})
        assert {name: why in reasons(report)[name] for name in names} == dict.fromkeys(names, True)


@pytest.mark.parametrize("row", ['{"x": 1e400, "y": 1,}', '{"x": 1e400, "y": ' + "[" * 100_000])
def test_a_damaged_row_with_number_out_of_range_named(row: str, root: Path, tmp_path: Path) -> None:
    write(root, {"1.jsonl": f'{{"x": 1}}\n{row}\n'})
    with pytest.raises(InvalidArgument, match="1.jsonl: line 2: expected a number in the range"):
        convert(root, tmp_path / "out")


@pytest.mark.parametrize("name", ["1.csv", "1.jsonl"])
def test_numbers_that_float64_has_are_stored(name: str, root: Path, tmp_path: Path) -> None:
    lines = [f'{{"x": {number}}}' if name == "1.jsonl" else number for number in IN_RANGE]
    write(root, {name: "\n".join(["x"] * (name == "1.csv") + lines)})
    convert(root, tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["x"] == Array("float64")
        assert [repr(float(one["x"])) for one in dataset] == [repr(float(n)) for n in IN_RANGE]


@given(
    before=st.text(max_size=50),
    number=st.sampled_from(OUT_OF_RANGE),
    at=st.one_of(st.integers(0, 300), st.integers((1 << 15) - 700, (1 << 15) + 300)),
)
def test_no_number_out_of_range_is_overlooked(before: str, number: str, at: int) -> None:
    assert may_be_out_of_range(f"{json.dumps(before)}{' ' * at}{number}")
    assert may_be_out_of_range(f"{' ' * at}{number}, {json.dumps(before)}")
    assert not may_be_out_of_range("".join(f"{' ' * at}{n}," for n in ("1e22", "-1.5E-07", "e")))


@pytest.fixture
def pictures(root: Path) -> Path:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for name in ("train/images/1.png", "train/images/é 2.png", "shared/3.png"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 6), "red").save(path)
    return root


def test_files_that_a_table_names_become_values(pictures: Path, tmp_path: Path) -> None:
    names = ["images/1.png", "images/é 2.png", "../shared/3.png", ""]
    rows = "".join(f"{name},{number}\n" for number, name in enumerate(names))
    write(pictures, {"train/t.csv": f"file,n\n{rows}", "train/other.txt": "-"})
    report = convert(pictures, tmp_path / "out", kind="tables", references=["file"])
    assert report.counts == {"converted": 1, "part": 3, "unsupported": 1}
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["file"] == Image(optional=True) and dataset.classes == ("train",)
        for name, sample in zip(names, dataset, strict=True):
            read = (pictures / "train" / name).read_bytes() if name else None
            assert sample["file"] == read
    (pictures / "shared/3.png").write_bytes((pictures / "shared/3.png").read_bytes() + b" ")
    again = convert(pictures, tmp_path / "out", append=True)
    assert [one.name for one in again.modified] == ["train/t.csv"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("images/none.png", "'images/none.png': not a file of the source"),
        ("../../secret.png", "'../../secret.png': not a file of the source"),
        ("/etc/hostname", "'/etc/hostname': not a file of the source"),
        ("images/", "not a file of the source"),
        ("t.csv/../images/1.txt", "not a file of the source"),
    ],
)
def test_what_no_table_may_name(name: str, reason: str, pictures: Path, tmp_path: Path) -> None:
    write(tmp_path, {"secret.png": b"secret"})
    write(pictures, {"train/t.csv": f"file\nimages/1.png\n{name}\n"})
    report = convert(pictures, tmp_path / "out", kind="tables", fields={"file": "file"})
    (found,) = reasons(report).values()
    assert found.startswith("line 3, column 'file': ") and reason in found


def test_a_damaged_picture_breaks_the_table_that_names_it(pictures: Path, tmp_path: Path) -> None:
    whole = (pictures / "train/images/1.png").read_bytes()
    write(pictures, {"train/images/1.png": whole[:-30], "train/t.jsonl": '{"a": "images/1.png"}'})
    report = convert(pictures, tmp_path / "out", kind="tables", references=["a"])
    assert "line 1, column 'a'" in reasons(report)["train/t.jsonl"]


def test_suffixes_say_as_what_files_are_stored(root: Path, tmp_path: Path) -> None:
    write(root, {"t.jsonl": '{"a": {"b": "1.bin"}}\n{"a": {"b": "t.jsonl.txt"}}', "1.bin": b"\0\1"})
    write(root, {"t.jsonl.txt": "x"})
    convert(root, tmp_path / "out", references=["a.b"])
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["a.b"] == Bytes()
        assert [sample["a.b"] for sample in dataset] == [b"\0\1", b"x"]
    inputs = [Input("t.csv", str(root / "t.csv"), 0, -1)]
    for text, word in [("1.mp4,2.MKV", "video"), ("1.wav,2.mp3", "audio"), ("1.mp4,2.wav", "file")]:
        write(root, {"t.csv": "f,n\n" + "".join(f"{name},1\n" for name in text.split(","))})
        assert (Tables(references=["f"]).fitted(inputs).fields or {})["f"] == word


def test_options_that_cannot_be_are_refused(root: Path, tmp_path: Path) -> None:
    write(root, {"1.csv": "x\n1\n"})
    refused: list[tuple[dict[str, Any], str]] = [
        ({"references": "x"}, "expected a list of column names"),
        ({"references": ["y"]}, "no table has a column 'y'; there are x"),
        (
            {"fields": {"x": "int8"}, "references": ["x"]},
            "found 'int8'; expected one of file, image",
        ),
        ({"fields": {"x": "bytes"}}, "found 'bytes'; in tables, use 'file'"),
        ({"fields": {"x": "list[int8[*]]"}}, "use an array, or 'json'"),
        ({"fields": {"x": "int31"}}, "field 'x'"),
    ]
    check_refused(root, tmp_path / "out", refused, kind="tables")
    write(root, {"1.csv": "x\n1,2\n"})
    with pytest.raises(InvalidArgument, match=r"looked at: 1; 1.csv: line 2: expected 1 cells"):
        convert(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
