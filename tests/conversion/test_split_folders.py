"""Folders named like splits give a warning with commands that keep them apart."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.conversion.classes import find_split
from shardio.media import encode_jpeg
from shardio_tools import cli
from tests.lines import install, write
from tests.media_made import scene, write_video


def make_pictures(root: Path, *folders: str) -> Path:
    for k, folder in enumerate(folders):
        (root / folder).mkdir(parents=True, exist_ok=True)
        picture = encode_jpeg(np.full((8, 8, 3), 9 * k, np.uint8))
        (root / folder / f"{k}.jpg").write_bytes(picture)
    return root


def warned(source: Any, out: Path, **options: Any) -> str:
    with pytest.warns(UserWarning, match="named like splits") as caught:
        shardio.convert(source, out, workers=0, **options)
    assert [one.filename for one in caught] == [__file__]
    return str(caught[0].message)


@pytest.mark.parametrize(
    ("folders", "parents", "names"),
    [
        (["train/0", "train/1", "val/0"], [""], ["train", "val"]),
        (["Train2017", "val2017", "notes"], [""], ["Train2017", "val2017"]),
        (["set/train/cat", "set/test_images/cat"], ["set"], ["test_images", "train"]),
        (["a/train/x", "a/test/y", "b/train/x", "c/x"], ["a"], ["test", "train"]),
        (["a/train", "a/test", "b/train", "b/test"], ["a", "b"], ["test", "train"]),
        (["training/x", "valid/x", "evaluation"], [""], ["evaluation", "training", "valid"]),
        (["train-clean-100/1", "dev-clean/2"], [""], ["dev-clean", "train-clean-100"]),
    ],
)
def test_splits_are_found(folders: list[str], parents: list[str], names: list[str]) -> None:
    found = find_split(folders)
    assert found is not None
    assert (list(found.parents), list(found.classes)) == (parents, names)


@pytest.mark.parametrize(
    "folders",
    [
        [],
        ["train/cat", "train/dog"],
        ["train1", "train2"],
        ["val/x", "valid/y"],
        ["train_station", "test_tube"],
        ["cat/train", "dog/test"],
        ["trains", "tests"],
        ["train", "cat"],
    ],
)
def test_other_folders_are_not_a_split(folders: list[str]) -> None:
    assert find_split(folders) is None


def test_commands_of_the_warning_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_pictures(Path("my pictures"), "train/cat", "train/dog", "val/cat", "val/dog")
    text = warned("my pictures/", Path("out"))
    assert text == (
        "my pictures/: the folders train (2 folders) and val (2 folders) are named like splits; "
        "all their samples go into one dataset, with classes such as 'train/cat' and "
        "'val/cat'. To create a dataset of each, convert them separately: "
        "shardio convert 'my pictures/train' out-train; shardio convert 'my pictures/val' out-val"
    )
    with shardio.open("out") as dataset:
        assert dataset.classes == ("train/cat", "train/dog", "val/cat", "val/dog")
    run_commands(text)
    for name in ("train", "val"):
        with shardio.open(f"out-{name}") as dataset:
            assert dataset.classes == ("cat", "dog") and len(dataset) == 2


def run_commands(text: str) -> None:
    commands = text.partition("separately: ")[2].partition(". ")[0].split("; ")
    for command in commands:
        name, *arguments = shlex.split(command)
        assert name == "shardio" and cli.main([*arguments, "--workers=0", "--quiet"]) == 0


def test_missing_classes_of_a_part_are_named_and_fixed_by_an_empty_folder(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "train/dog", "test/dog", "unlabelled")
    text = warned(source, tmp_path / "out")
    assert text.endswith(
        "create an empty folder for each class that a split lacks, such as test/cat"
    )
    (source / "test/cat").mkdir()
    text = warned(source, tmp_path / "out", overwrite=True)
    assert "empty folder" not in text
    run_commands(text)
    with shardio.open(tmp_path / "out-test") as dataset:
        assert dataset.classes == ("cat", "dog") and int(dataset[0]["label"]) == 1


@pytest.mark.parametrize(
    ("pattern", "commands"),
    [
        ("in/**/*.jpg", ["in/train/**/*.jpg", "in/val/**/*.jpg"]),
        ("in/*/*/*.jpg", ["in/train/*/*.jpg", "in/val/*/*.jpg"]),
        ("in/*/cat", ["in/train/cat", "in/val/cat"]),
        ("i*", ["in/train", "in/val"]),
    ],
)
def test_the_commands_keep_the_rest_of_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, commands: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_pictures(Path("in"), "train/cat", "val/cat")
    text = warned(pattern, Path("out"))
    for name, command in zip(("train", "val"), commands, strict=True):
        assert f"convert {shlex.quote(f'./{command}' if pattern == 'i*' else command)} " in text
        assert f"out-{name}" in text
    run_commands(text)


def test_every_kind_gives_the_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "test"):
        (tmp_path / "videos" / name).mkdir(parents=True)
        write_video(tmp_path / "videos" / name / "a.mp4", scene(9))
    text = warned(tmp_path / "videos", tmp_path / "of-videos", frames=4, size=16)
    assert "with classes such as 'test' and 'train'" in text
    for name in ("train", "val"):
        (tmp_path / "arrays" / name).mkdir(parents=True)
        np.save(tmp_path / "arrays" / name / "a.npy", np.zeros(3))
    assert "convert them separately" in warned(tmp_path / "arrays", tmp_path / "of-arrays")
    lines = install(tmp_path, monkeypatch)
    write(lines, {"train/a.txt": "one", "eval/b.txt": "two"})
    assert "eval" in warned(lines, tmp_path / "of-lines", kind="lines")


def test_the_warning_for_tables_with_labels_mentions_no_classes(tmp_path: Path) -> None:
    write(tmp_path / "in", {"train/a.csv": "label,x\n1,2\n", "test/b.csv": "label,x\n0,3\n"})
    text = warned(tmp_path / "in", tmp_path / "out")
    assert "go into one dataset. To create" in text and "classes" not in text


def test_with_a_label_file_there_is_no_warning(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    write(tmp_path, {"labels.csv": "path,label\ntrain/cat/0.jpg,cat\nval/cat/1.jpg,cat\n"})
    shardio.convert(source, tmp_path / "out", workers=0, labels=tmp_path / "labels.csv")


def test_a_warning_raised_as_an_error_leaves_nothing(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    with pytest.raises(UserWarning, match="named like splits"):
        shardio.convert(source, tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--quiet", "--json", "--workers=0"])
@pytest.mark.filterwarnings("default:.*named like splits:UserWarning")
def test_the_command_line_prints_the_warning_in_a_line_on_standard_error(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    out = tmp_path / "out"
    assert cli.main(["convert", str(source), str(out), "--workers=0", option]) == 0
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("shardio: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"shardio: warning: {source}: the folders train (1 folder) and val")
    assert lines[0].endswith(f"shardio convert {source}/val {out}-val")
    assert "warning" not in output.out
    assert warnings.showwarning.__module__ != "shardio_tools.cli"
