"""Inputs of several files: one gives the samples, the others are its parts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import Input
from shardio.conversion.inputs import join_parts, list_inputs
from shardio.conversion.journal import cut_units
from shardio.maintenance import verify_dataset
from shardio_tools.cli import main
from tests.lines import Lines, contents, convert, during, install, outcomes, texts, write


def parts(_: Lines, inputs: Sequence[Input]) -> Mapping[str, Sequence[str]]:
    """Make parts of a text in a folder `.many`: everything else in there, and the file `shared`."""
    anchors = [one.name for one in inputs if one.name.endswith(".many/0.txt")]
    shared = [one.name for one in inputs if one.name == "shared"]
    return {
        name: [one.name for one in inputs if one.name.startswith(name[:-5]) and one.name != name]
        + shared
        for name in anchors
    }


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Lines, "parts", parts, raising=False)
    root = install(tmp_path, monkeypatch)
    write(root, {"cats/1.many/0.txt": "miau", "cats/1.many/x/1.txt": "and", "cats/1.many/2": "so"})
    write(root, {"dogs/2.many/0.txt": "wau", "dogs/2.many/1.txt": "on", "shared": "with both"})
    return root


def test_parts_are_listed(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = convert(lines, tmp_path / "out")
    assert texts(tmp_path / "out") == "one two three four five six miau wau seven".split()
    found = {one.name: one for one in report.inputs}
    assert report.counts == {"converted": 6, "empty": 2, "unsupported": 1, "part": 4}
    assert found["cats/1.many/x/1.txt"].reason == "of cats/1.many/0.txt"
    assert found["shared"].reason == "of cats/1.many/0.txt"
    assert found["cats/1.many/0.txt"].n_bytes == len("miauandsowith both")
    assert verify_dataset(tmp_path / "out", workers=0).findings == ()
    assert main(["convert", str(lines), str(tmp_path / "2"), "--kind=lines", "--workers=0"]) == 0
    assert "Part of another: 4 files\n\nOf another kind: 1 file" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "2")]) == 0
    assert "4 part of another" in capsys.readouterr().out


def test_a_folder_of_parts_is_not_a_class(lines: Path, tmp_path: Path) -> None:
    (lines / "empty").mkdir()
    report = convert(lines, tmp_path / "out")
    assert report.classes == ("a", "b", "c", "cats", "d", "dogs")
    assert report.ignored == ("empty/",)
    label = {sample["text"]: sample["label"] for sample in shardio.open(tmp_path / "out")}
    assert (label["miau"], label["wau"], label["six"], label["seven"]) == (3, 5, 2, -1)


def test_an_input_that_could_have_parts_stands_for_its_folder(lines: Path, tmp_path: Path) -> None:
    write(tmp_path, {"in/x/y.many/0.txt": "one", "in/z.many/0.txt": "two"})
    report = convert(tmp_path / "in", tmp_path / "out")
    assert report.classes == ("x",)
    assert [sample["label"] for sample in shardio.open(tmp_path / "out")] == [0, -1]


def test_changed_part_breaks(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(source: Input) -> None:
        if source.name.startswith("cats"):
            write(lines, {"cats/1.many/2": "something else"})
        if source.name.startswith("dogs"):
            os.unlink(lines / "dogs/2.many/1.txt")

    during(monkeypatch, act)
    report = convert(lines, tmp_path / "out")
    assert {one.name: one.reason for one in report.broken} == {
        "cats/1.many/0.txt": "its part cats/1.many/2 changed while it was read",
        "dogs/2.many/0.txt": "its part dogs/2.many/1.txt vanished while it was read",
    }


def test_a_part_that_is_no_file_breaks_its_input_unopened(lines: Path, tmp_path: Path) -> None:
    os.mkfifo(lines / "cats" / "1.many" / "pipe")
    os.symlink("nowhere", lines / "dogs" / "2.many" / "link")
    report = convert(lines, tmp_path / "out")
    assert {one.reason for one in report.broken} == {
        "its part cats/1.many/pipe is not a regular file",
        "its part dogs/2.many/link is missing, or a broken link",
    }


def test_an_append_reports_a_modified_part(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(lines, out)
    assert convert(lines, out, append=True).generation == 1
    write(lines, {"cats/1.many/2": "os", "birds/3.many/0.txt": "ko", "birds/3.many/1": "ko"})
    report = convert(lines, out, append=True)
    assert [one.name for one in report.modified] == ["cats/1.many/0.txt"]
    assert outcomes(report)["birds/3.many/1"] == "part" and texts(out)[-1] == "ko"
    (lines / "dogs/2.many/1.txt").write_text("on and on")
    report = convert(lines, out, append=True)
    assert "bytes, 14 when it was converted" in report.modified[1].reason


def test_resume_rereads_parts(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(state: Any) -> None:
        if state.name == "top.txt":
            raise KeyboardInterrupt

    read: list[str] = []
    during(monkeypatch, lambda source: read.append(source.name))
    with pytest.raises(KeyboardInterrupt):
        convert(lines, tmp_path / "out", progress=stop)
    write(lines, {"dogs/2.many/1.txt": "other"})
    read.clear()
    convert(lines, tmp_path / "out", resume=True)
    assert [name for name in read if "many" in name] == ["dogs/2.many/0.txt"]
    convert(lines, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_parts_count_for_the_unit_with_them(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(lines, {"dogs/2.many/1.txt": "x" * 100})
    joined = join_parts(list_inputs(str(lines)), Lines())
    monkeypatch.setattr("shardio.conversion.journal.MIN_UNIT_BYTES", 100)
    ends = [unit.inputs[-1].name for unit in cut_units(joined.inputs)]
    assert ends == ["dogs/2.many/0.txt", "top.txt"]
