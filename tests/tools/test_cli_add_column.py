"""`shardio add-column`: what it takes as values and types, what it prints, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Bytes, Json, List, Text
from shardio_tools import cli
from shardio_tools.add_column import parse_field
from tests.maintenance.datasets import LABELS, labelled, write

Capture = pytest.CaptureFixture[str]
N = 4


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write(tmp_path / "d", N, 2, schema=LABELS, samples=labelled(N))


def add(dataset: Path, content: str, *options: str, name: str = "x", kind: str = "jsonl") -> int:
    file = dataset.parent / f"values.{kind}"
    file.write_text(content, "utf-8")
    return cli.main(["add-column", str(dataset), name, "--from", str(file), *options])


def values(dataset: Path, name: str = "x") -> list[Any]:
    with shardio.open(dataset) as opened:
        return [sample[name] for sample in opened]


def field(dataset: Path, name: str = "x") -> Any:
    with shardio.open(dataset) as opened:
        return opened.schema[name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("float32", Array("float32")),
        ("float32[3]", Array("float32", (3,))),
        ("uint8[ any , 2 ], zstd", Array("uint8", (None, 2), "zstd")),
        ("int8[2],optional", Array("int8", (2,), optional=True)),
        ("list of float64[any,4], zstd, optional", None),
        ("list of int64", List(Array("int64"))),
        ("text, zstd_dictionary", Text("zstd_dictionary")),
        (" bytes ", Bytes()),
        ("json, optional, zstd", Json("zstd", optional=True)),
    ],
)
def test_a_type_is_said_as_inspect_says_it(text: str, expected: Any) -> None:
    if expected is None:
        expected = List(Array("float64", (None, 4)), "zstd", optional=True)
    assert parse_field(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "float32[", "float32[x]", "text[3]", "list of text", "int8,zstd,zstd", "int8 3", "a,b,c"]
    + ["float31", "float32[0]", "text, lz4", "json, optional, optional"],
)
def test_what_is_no_type_is_refused(dataset: Path, text: str, capsys: Capture) -> None:
    assert add(dataset, "1\n" * N, "--field", text) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_an_array_has_a_type_of_its_own(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    file, rows = tmp_path / "rows.npy", np.arange(N * 6, dtype=">i2").reshape(N, 2, 3)
    np.save(file, rows)
    assert cli.main(["add-column", str(dataset), "x", "--from", str(file)]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("added x: 4 samples in 2 shards, ")
    assert out.endswith(f"generation 2: {dataset}\n")
    assert field(dataset) == Array("int16", (2, 3))
    assert np.array_equal(values(dataset), rows)
    given = ["--field", "int64[2,3], zstd, optional"]
    assert cli.main(["add-column", str(dataset), "y", "--from", str(file), *given]) == 0
    assert field(dataset, "y") == Array("int64", (2, 3), "zstd", optional=True)
    assert np.array_equal(values(dataset, "y"), rows)


def test_lines_of_json_are_values(dataset: Path) -> None:
    assert add(dataset, '{"a": 1}\nnull\n\n[2]\n"ü"', "--field", "json") == 0
    assert values(dataset) == [{"a": 1}, None, [2], "ü"]
    lines = "[[1, 2]]\n[]\n[[3, 4], [5, 6]]\nnull\n"
    boxes = ("--field", "list of float32[2], optional")
    assert add(dataset, lines, *boxes, name="deep.boxes", kind="ndjson") == 0
    found = values(dataset, "deep.boxes")
    lists = [value and [array.tolist() for array in value] for value in found]
    assert lists == [[[1, 2]], [], [[3, 4], [5, 6]], None]


@pytest.mark.parametrize(
    ("kind", "cells", "expected"),
    [
        ("text", ["a", '"b, c"', "", "ü"], ["a", "b, c", "", "ü"]),
        ("text, optional", ["a", "", "b", "c"], ["a", None, "b", "c"]),
        ("int64", ["1", "-2", " 3", "4"], [1, -2, 3, 4]),
        ("float32", ["1", "-2.5", "1e3", "inf"], [1, -2.5, 1000, np.inf]),
        ("float64", ["0", "-0.0", "0e400", "5e-324"], [0, 0, 0, 5e-324]),
        ("bool", ["true", "0", "False", "1"], [True, False, False, True]),
        ("uint8, optional", ["1", "", "3", "4"], [1, None, 3, 4]),
    ],
)
def test_csv_named_column(dataset: Path, kind: str, cells: list[str], expected: list[Any]) -> None:
    lines = "\n".join(f"{i},{cell}" for i, cell in enumerate(cells))
    assert add(dataset, f"id,x\n{lines}\n", "--field", kind, kind="csv") == 0
    assert values(dataset) == expected


@pytest.mark.parametrize(
    ("kind", "content", "options", "message"),
    [
        ("jsonl", "1\n", ("--field", "int8"), "has 4 samples, but there are only 1 values"),
        ("jsonl", "1\n" * 5, ("--field", "int8"), "there are more values"),
        ("jsonl", "1\n2\nx\n", ("--field", "int8"), "line 3: 'x' is not a value of x: Expecting"),
        ("jsonl", "1\n2\n300\n", ("--field", "int8"), "sample 2: field 'x'"),
        ("jsonl", "1\n", (), "does not state the type of x; pass it, such as --field float32 or"),
        ("jsonl", '"a"\n', ("--field", "bytes"), "for bytes use shardio.maintenance"),
        ("csv", "id,y\n1,2\n", ("--field", "int8"), "has no column 'x'; there are 'id', 'y'"),
        ("csv", "x\n1\nb\n", ("--field", "int8"), "line 3: 'b' is not a value of x"),
        ("csv", "x\nyes\n", ("--field", "bool"), "'yes' is not a value of x"),
        ("csv", "x\n1_0\n", ("--field", "float32"), "line 2: '1_0' is not a value of x"),
        ("csv", "x\n٣\n", ("--field", "int8"), "line 2: '٣' is not a value of x"),
        ("csv", f"x\n{'9' * 5000}\n", ("--field", "int8"), f"{'9' * 60}…' is not a value of x"),
        ("csv", f"x\n{'9' * 20}\n", ("--field", "int64"), "more than 64 bits"),
        ("csv", "x,y\n1,a\n1\n", ("--field", "int8"), "line 3: found 1 cells, expected 2"),
        ("csv", "y,x\n1,a, b\n", ("--field", "text"), "quote text that contains a comma"),
        ("csv", "x,y,x\n1,2,3\n", ("--field", "int8"), "has 2 columns 'x'; expected one"),
        ("csv", "", ("--field", "int8"), "has no column 'x'; there are none"),
        ("csv", f"x\n{'a' * 140_000}\n", ("--field", "text"), "use .jsonl for values of any form"),
        ("jsonl", '{"a": 1, "b": {"c": 1, "c": 2}}\n', ("--field", "json"), "duplicate key 'c'"),
        ("csv", 'x\n"1"2\n', ("--field", "int8"), "line 2: not CSV"),
        ("csv", "x\n1\n", ("--field", "int8[1]"), "CSV cells hold numbers or text"),
        ("csv", "x\n1\n1e400\n", ("--field", "float32"), "line 3: '1e400' is not a value of x"),
        ("csv", "x\n1e-400\n", ("--field", "float64"), "outside the range of float64"),
        ("jsonl", "1\n-1e400\n", ("--field", "float32"), "line 2: '-1e400' is not a value of x"),
        ("jsonl", "[1e-400]\n", ("--field", "json"), "'1e-400' is outside the range of float64"),
        ("npy", "1\n", (), "not a readable array"),
        ("parquet", "1\n", ("--field", "int8"), "ends in .npy, .jsonl or .csv"),
    ],
)
def test_values_that_cannot_be_are_refused_and_nothing_is_added(
    dataset: Path, kind: str, content: str, options: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert add(dataset, content, *options, kind=kind) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "values." in err or str(dataset) in err
    with shardio.open(dataset) as opened:
        assert (opened.generation, opened.column_groups) == (1, {})


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.float32(3), "one row per sample"),
        (np.array([{}]), "not a readable array"),
        (np.array(["a"] * N), "x.npy: unknown dtype 'str"),
        (None, "file of values not found"),
    ],
    ids=["scalar", "objects", "texts", "none"],
)
def test_arrays_that_hold_no_values_are_refused(
    dataset: Path, tmp_path: Path, array: Any, message: str, capsys: Capture
) -> None:
    if array is not None:
        np.save(tmp_path / "x.npy", array, allow_pickle=True)
    given = ["--from", str(tmp_path / "x.npy")]
    assert cli.main(["add-column", str(dataset), "x", *given]) == 2
    assert message in capsys.readouterr().err


def test_text_that_is_not_utf8_is_refused(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n\xff\n")
    given = ["--from", str(tmp_path / "x.jsonl"), "--field", "int8"]
    assert cli.main(["add-column", str(dataset), "x", *given]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_inspect_and_verify_show_what_was_added(dataset: Path, capsys: Capture) -> None:
    add(dataset, "1\n2\n3\n4\n", "--field", "int8", "--quiet")
    assert cli.main(["inspect", str(dataset), "--sample", "3", "--verbose"]) == 0
    out, _ = capsys.readouterr()
    lines = out.splitlines()
    assert lines.count("Shards of the added column x") == 1
    names = [line.split()[0] for line in lines if ".shard        2 " in line]
    assert names == [f"{stem}-00{k}.shard" for stem in ("000000", "g000002") for k in (0, 1)]
    shown = [line.split() for line in lines if line.startswith("  x ")]
    assert shown == [["x", "int8"], ["x", "int8", "4"]]
    assert 'made by     add_column name="x"' in out
    assert "  samples     4\n" in out and " in 2 shards\n" in out
    assert cli.main(["verify", str(dataset), "--workers", "0"]) == 0
    assert "verified 4 shards, " in capsys.readouterr().out


def test_inspect_reports_what_is_wrong_with_a_file_beside(dataset: Path, capsys: Capture) -> None:
    add(dataset, "1\n2\n3\n4\n", "--field", "int8", "--quiet")
    second = dataset / "g000002-001.shard"
    second.write_bytes((dataset / "g000002-000.shard").read_bytes())
    assert cli.main(["inspect", str(dataset), "--json", "--sample", "2"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert [finding["code"] for finding in facts["damage"]] == ["dataset"]
    assert facts["damage"][0]["path"] == str(second)
    assert list(facts["sample"]["fields"]) == ["label", "source"]
    assert [shard["samples"] for shard in facts["column_groups"]["x"]] == [2, 2]
    second.unlink()
    assert cli.main(["inspect", str(dataset), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["sample"]["fields"]) == ["label", "source", "x"]
    assert [shard["is_readable"] for shard in facts["column_groups"]["x"]] == [True, False]


def compute(dataset: Path, code: str, *options: str) -> int:
    file = dataset.parent / "made.py"
    file.write_text(code, "utf-8")
    place = f"{file}:value"
    return cli.main(["add-column", str(dataset), "x", "--function", place, *options])


def test_a_function_in_a_file_computes_the_values(dataset: Path) -> None:
    code = "def value(sample):\n    return len(sample['source'])\n"
    assert compute(dataset, code, "--field", "int64") == 0
    assert values(dataset) == [len("clip 0")] * N


@pytest.mark.process
def test_it_may_be_called_with_batches_in_processes_of_its_own(dataset: Path) -> None:
    code = "import os\nME = os.getpid()\ndef value(samples):\n"
    code += "    return [[len(samples), os.getpid() - ME] for each in samples]\n"
    options = ["--batch-size", "2", "--workers", "1"]
    assert compute(dataset, code, "--field", "int64[2]", *options) == 0
    sizes, processes = zip(*(value.tolist() for value in values(dataset)), strict=True)
    assert set(sizes) == {2}
    assert len(set(processes)) == 1
    assert set(processes) != {0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--function", "gone.py:value", "--field", "text"], "there is no file 'gone.py'"),
        (["--function", "value", "--field", "text"], "expected FILE.py:NAME"),
        (["--function", "MADE:other", "--field", "text"], "has no function 'other'"),
        (
            ["--function", "MADE:value"],
            "does not state the type of x; pass it, such as --field float32 or",
        ),
    ],
)
def test_missing_functions(dataset: Path, options: list[str], said: str, capsys: Capture) -> None:
    file = dataset.parent / "made.py"
    file.write_text("def value(sample):\n    return 1\n", "utf-8")
    given = [option.replace("MADE", str(file)) for option in options]
    assert cli.main(["add-column", str(dataset), "x", *given]) == cli.USAGE
    assert said in capsys.readouterr().err
