"""Folders named like splits give a warning with commands that keep them apart."""

from __future__ import annotations

import shlex
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.conversion.subsets import find_split
from shardio.media import encode_jpeg
from shardio_tools import cli
from tests.lines import write


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
    with pytest.warns(UserWarning, match="named like splits"):  # called by code without __name__
        exec("convert()", {"convert": partial(shardio.convert, source, f"{out}2", **options)})
    return str(caught[0].message)


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (["train/0", "train/1", "val/0"], "train val"),
        (["Train2017", "val2017", "notes"], "Train2017 val2017"),
        (["set/train/cat", "set/test_images/cat"], "set/test_images set/train"),
        (["a/train/x", "a/test/y", "b/train/x", "c/x"], "a/test a/train"),
        (["a/train", "a/test", "b/train", "b/test"], "*/test */train"),
        (["training/x", "valid/x", "evaluation"], "evaluation training valid"),
        (["train-clean-100/1", "dev-clean/2"], "dev-clean train-clean-100"),
        ([], ""),
        (["train/cat", "train/dog"], ""),
        (["train1", "train2"], ""),
        (["val/x", "valid/y"], ""),
        (["train_station", "test_tube"], ""),
        (["cat/train", "dog/test"], ""),
        (["trains", "tests"], ""),
        (["train", "cat"], ""),
    ],
)
def test_splits_are_found(folders: list[str], splits: str) -> None:
    assert find_split(folders) == {path.rpartition("/")[2]: path for path in splits.split()}


def test_commands_of_the_warning_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_pictures(Path("my pictures"), "train/cat", "train/dog", "val/cat", "val/dog")
    text = warned("my pictures/", Path("out"))
    assert text == (
        "my pictures/: the folders train and val are named like splits; all their samples go into "
        "one dataset. To create a dataset of each, convert them separately: "
        "shardio convert 'my pictures/train' out-train; shardio convert 'my pictures/val' out-val"
    )
    with shardio.open("out") as dataset:
        assert dataset.classes == ("train/cat", "train/dog", "val/cat", "val/dog")
    for command in text.partition("separately: ")[2].split("; "):
        name, *arguments = shlex.split(command)
        assert name == "shardio" and cli.main([*arguments, "--workers=0", "--quiet"]) == 0
    for name in ("train", "val"):
        with shardio.open(f"out-{name}") as dataset:
            assert dataset.classes == ("cat", "dog") and len(dataset) == 2


def test_with_a_label_file_there_is_no_warning(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    write(tmp_path, {"labels.csv": "path,label\ntrain/cat/0.jpg,cat\nval/cat/1.jpg,cat\n"})
    out = tmp_path / "out"
    shardio.convert(source, out, workers=0, labels=tmp_path / "labels.csv")  # warnings are errors
    with shardio.open(out) as dataset:
        assert dataset.classes == ("cat",) and len(dataset) == 2


def test_a_warning_raised_as_an_error_leaves_nothing(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    with pytest.raises(UserWarning, match="named like splits"):
        shardio.convert(source, tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--quiet", "--json", "--workers=0"])
@pytest.mark.filterwarnings("default:.*named like splits:UserWarning")
def test_warns_in_one_line(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    out = tmp_path / "out"
    assert cli.main(["convert", str(source), str(out), "--workers=0", option]) == 0
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("shardio: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"shardio: warning: {source}: the folders train and val ")
    assert lines[0].endswith(f"shardio convert {source}/val {out}-val")
    assert "warning" not in output.out
    assert warnings.showwarning.__module__ != "shardio_tools.cli"
