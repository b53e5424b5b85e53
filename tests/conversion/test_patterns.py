"""Sources given as patterns: the files they match, and their names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardio import InvalidArgument
from shardio.conversion.inputs import list_inputs
from shardio_tools import cli
from tests.lines import OLD, contents, convert, outcomes, texts, write

TREE = {
    "train-1.tar": "",
    "train-2.tar": "",
    "test-1.tar": "",
    "notes": "",
    ".hidden.tar": "",
    "cat/1.tar": "",
    "cat/1.txt": "",
    "cat/deep/2.tar": "",
    "cow/3.tar": "",
    ".git/4.tar": "",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    write(root, TREE)
    (root / "cow" / "empty").mkdir()
    return root


def names(source: Path | str) -> list[str]:
    return [one.name for one in list_inputs(str(source)).inputs]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("train-*.tar", "train-1.tar train-2.tar"),
        ("train-?.tar", "train-1.tar train-2.tar"),
        ("t*-[!2].tar", "test-1.tar train-1.tar"),
        ("*.tar", "test-1.tar train-1.tar train-2.tar"),
        (".*.tar", ".hidden.tar"),
        ("*/*.tar", "cat/1.tar cow/3.tar"),
        ("**/*.tar", "cat/1.tar cat/deep/2.tar cow/3.tar test-1.tar train-1.tar train-2.tar"),
        ("**/**/2.*", "cat/deep/2.tar"),
        ("c*", "cat/1.tar cat/1.txt cat/deep/2.tar cow/3.tar"),
        ("[cn]o*", "cow/3.tar notes"),
        ("[cn]o*/", "cow/3.tar"),
        ("**/d*p", "cat/deep/2.tar"),
        ("**/deep/*", "cat/deep/2.tar"),
        ("**", " ".join(sorted({*TREE} - {".git/4.tar", ".hidden.tar"}))),
        (".*", ".git/4.tar .hidden.tar"),
        ("c*/**", "cat/1.tar cat/1.txt cat/deep/2.tar cow/3.tar"),
        (".//c*/./1.txt", "cat/1.txt"),
    ],
)
def test_a_pattern_lists_matching_files_and_folders(tree: Path, pattern: str, matched: str) -> None:
    assert names(f"{tree}/{pattern}") == matched.split()


def test_paths_and_classes_are_relative_to_the_root_of_the_pattern(tree: Path) -> None:
    assert names(tree / "cat" / "*.tar") == ["1.tar"]
    assert list_inputs(f"{tree}/cat/*.tar").classes == ()
    listing = list_inputs(f"{tree}/c*/*.tar")
    assert listing.classes == ("cat", "cow")  # folders that hold what matches
    assert [one.label for one in listing.inputs] == [0, 1]
    assert list_inputs(f"{tree}/c*").classes == ("cat", "cat/deep", "cow", "cow/empty")


def test_patterns_may_begin_in_any_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert names("train-*") == ["train-1.tar", "train-2.tar"]
    monkeypatch.chdir(tree / "cat")
    assert names("../cow/*.tar") == ["3.tar"]
    assert names("**/2.tar") == ["deep/2.tar"]


def test_an_existing_path_is_never_a_pattern(tmp_path: Path) -> None:
    write(tmp_path, {"clip [1].mp4": "", "clip 1.mp4": "", "old [x]/1.mp4": "", "old x/2.mp4": ""})
    assert names(tmp_path / "clip [1].mp4") == ["clip [1].mp4"]
    assert names(tmp_path / "clip [[]1].mp4") == ["clip [1].mp4"]
    assert names(tmp_path / "old [x]" / "*.mp4") == ["1.mp4"]
    assert names(tmp_path / "ol[d] [x]" / "*.mp4") == ["old x/2.mp4"]


def test_only_folders_that_may_match_are_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, scandir = list[str](), os.scandir

    def noted(path: str) -> object:
        looked.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noted)
    names(tree / "c[a]t" / "*.tar")
    assert [os.path.relpath(path, tree) for path in looked] == [".", "cat"]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("*.mp4", "matches no file below the folder {root}"),
        ("cow/emp*", "matches no file below the folder {root}/cow"),
        ("dog/*.tar", "matches no file: the folder {root}/dog does not exist"),
        ("notes/*", "matches no file: the folder {root}/notes does not exist"),
    ],
)
def test_a_pattern_without_matches_is_refused_with_the_folder_searched(
    tree: Path, tmp_path: Path, pattern: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", f"{tree}/{pattern}", str(tmp_path / "out")]) == cli.USAGE
    assert f"{tree}/{pattern}: {reason.format(root=tree)}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_patterns_give_datasets_of_a_folder(lines: Path, tmp_path: Path, read: list[str]) -> None:
    report = convert(lines / "[ac]" / "*.txt", tmp_path / "out")
    assert outcomes(report) == {"a/1.txt": "converted", "a/2.txt": "empty", "c/4.txt": "converted"}
    assert [*outcomes(report)] == read
    for name in ("b/readme", "b/3.txt", "d/5.txt", "top.txt"):
        (lines / name).unlink()
    (lines / "b").rmdir()
    (lines / "d").rmdir()
    convert(lines, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_matches_of_another_pattern_can_be_appended(lines: Path, tmp_path: Path) -> None:
    out = lines / "out"  # which matches, too, and is left out
    convert(lines / "[a]" / "*.txt", out)
    report = convert(lines / "*", out, append=True)
    assert outcomes(report)["a/1.txt"] == "duplicate"
    assert texts(out) == OLD
    assert not any(name.startswith("out") for name in outcomes(report))
    with pytest.raises(InvalidArgument, match="is the output folder"):
        convert(out / "*.shard", out, append=True)


def test_the_command_accepts_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"in/1.csv": "x\n1\n2\n", "in/2.csv": "x\n3\n", "in/3.mp4": ""})
    source, out = f"{tmp_path}/in/*.csv", str(tmp_path / "out")
    assert cli.main(["convert", source, out, "--workers=0"]) == cli.OK
    assert "converted 2 of 2 files into 3 samples" in capsys.readouterr().out
