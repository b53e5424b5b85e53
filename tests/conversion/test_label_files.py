"""Labels from a file: every path must exist, and every file has a class or -1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import InvalidArgument
from shardio.conversion.classes import read_labels
from shardio_tools import cli
from tests.lines import check_resumes, convert, interrupt_after

CSV = "path,label\na/1.txt,zebra\nb/3.txt,ant\n./c/4.txt,zebra\n"


def written(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_classes_come_from_the_file_and_not_from_folders(lines: Path, tmp_path: Path) -> None:
    report = convert(lines, tmp_path / "out", labels=written(tmp_path, "labels.csv", CSV))
    with shardio.open(tmp_path / "out") as dataset:
        found = {sample["text"]: int(sample["label"]) for sample in dataset}
        assert dataset.classes == report.classes == ("ant", "zebra")
    zebras = dict.fromkeys(("one", "two", "four", "five", "six"), 1)
    assert found == {**zebras, "three": 0, "seven": -1}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("labels.csv", "\ufefflabel,path,more\r\nzebra,a/1.txt,x\r\n,top.txt,\r\n"),
        ("labels", 'path,label\n"a/1.txt","zebra"\n'),
        ("labels.jsonl", '{"path": "a/1.txt", "label": "zebra", "more": 1}\n\n'),
        ("l.json", '{"path": "a/1.txt", "label": "zebra"}\n{"path": "b", "label": null}'),
    ],
)
def test_csv_and_json_lines_are_equal(lines: Path, tmp_path: Path, name: str, content: str) -> None:
    assert read_labels(str(written(tmp_path, name, content))) == {"a/1.txt": "zebra"}


def test_whole_numbers_are_sorted_numerically(lines: Path, tmp_path: Path) -> None:
    content = "path,label\na/1.txt,10\nb/3.txt,9\n"
    convert(lines, tmp_path / "out", labels=written(tmp_path, "labels.csv", content))
    assert shardio.open(tmp_path / "out").classes == ("9", "10")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.csv", "path,label\na/1.txt,x\na/no,y\n", r"not files of the source \(1\): 'a/no'"),
        ("l.csv", "path,class\na/1.txt,x\n", "it lacks label, found 'path', 'class'"),
        ("l.csv", "", "it lacks path and label"),
        ("l.csv", "path,label\na,x\n./a,x\n", "line 3: 'a' is already labelled in line 2"),
        ("l.csv", "path,label\n,x\n", "line 2: expected a path, found ''"),
        ("l.csv", 'path,label\n"a/1.txt"x,y\n', "line 2: not CSV"),
        ("l.csv", b"path,label\n\xff,y\n", "not UTF-8: invalid start byte at byte 11"),
        ("l.jsonl", '{"path": "a/1.txt", "label": "x"}\n{"path": ', "line 2: not JSON"),
        ("l.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("l.jsonl", '{"path": "a/1.txt"}', "line 1: expected an object with path and label"),
        ("l.jsonl", '{"path": "a", "label": 1.5}', "line 1: expected a name or a whole number"),
        ("l.jsonl", '{"path": "a/1.txt", "label": "\\ud800"}', r"found '\\ud800'"),
        ("l.jsonl", '{"path": 3, "label": "x"}', "line 1: expected a path, found 3"),
    ],
)
def test_an_invalid_label_file_is_refused_with_the_line_before_anything_is_created(
    lines: Path, tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        convert(lines, tmp_path / "out", labels=written(tmp_path, name, content))
    assert not (tmp_path / "out").exists()


def test_units_with_other_labels_are_converted_again(lines: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"labels": written(tmp_path, "labels.csv", CSV)}
    with pytest.raises(KeyboardInterrupt):
        convert(lines, tmp_path / "out", progress=interrupt_after(6), **options)
    written(tmp_path, "labels.csv", CSV.replace("a/1.txt,zebra", "a/1.txt,ant"))
    check_resumes(lines, tmp_path / "out", **options)


def test_command_labels(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = str(written(tmp_path, "labels.csv", CSV))
    arguments = ["convert", str(lines), str(tmp_path / "out"), "--kind=lines", "--workers=0"]
    assert cli.main([*arguments, "--labels", labels]) == 0
    output = capsys.readouterr().out
    assert "  ant          1\n  zebra        5\n" in output
    assert "1 sample without a class (label -1): not in the file of labels" in output
    arguments[2] = str(tmp_path / "json")
    assert cli.main([*arguments, "--labels", labels, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == {"ant": 1, "zebra": 5}
    arguments[2] = str(tmp_path / "missing")
    assert cli.main([*arguments, "--labels", str(tmp_path / "no.csv")]) == cli.USAGE
    assert f"{tmp_path}/no.csv: label file not found" in capsys.readouterr().err
