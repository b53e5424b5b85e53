"""Folders named like splits become subsets with shared classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import InvalidArgument
from shardio.conversion import Progress, journal
from shardio.conversion.classes import find_split_folders
from shardio.maintenance import compute_stats
from shardio.media import encode_jpeg
from shardio_tools import cli
from tests.lines import write


def make_pictures(root: Path, *folders: str) -> Path:
    for k, folder in enumerate(folders):
        (root / folder).mkdir(parents=True, exist_ok=True)
        picture = encode_jpeg(np.full((8, 8, 3), 9 * k, np.uint8))
        (root / folder / f"{k}.jpg").write_bytes(picture)
    return root


def contents(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.rglob("*") if file.is_file()}


def sources(out: Path, subset: str) -> list[str]:
    with shardio.open(out, subset=subset) as dataset:
        return [sample["source"] for sample in dataset]


def classes_by_source(out: Path) -> dict[str, str]:
    with shardio.open(out) as dataset:
        names = [*dataset.classes, ""]
        return {sample["source"]: names[sample["label"]] for sample in dataset}


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (["train/0", "train/1", "val/0"], "train val"),
        (["Train2017", "val2017", "notes"], "Train2017 val2017"),
        (["set/train/cat", "set/test_images/cat"], "set/test_images set/train"),
        (["a/train/x", "a/test/y", "b/train/x", "c/x"], "a/test a/train"),
        (["a/train", "a/test", "b/train", "b/test"], "*/test */train"),
        (["a/train", "a/test", "b/train", "c/val"], "*/test */train */val"),
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
        (["train\n/cat", "val/cat"], ""),
    ],
)
def test_splits_are_found(folders: list[str], splits: str) -> None:
    assert find_split_folders(folders) == {path.rpartition("/")[2]: path for path in splits.split()}


@pytest.mark.parametrize(
    ("folders", "classes", "subsets"),
    [
        # A class that some splits lack, and one of an empty folder
        (["train/cat", "train/dog", "val/dog", "val/fox"], ["cat", "dog", "fox"], "train val"),
        # Beside the splits: a class of its own, in no subset
        (["train/cat", "val/cat", "dog"], ["cat", "dog"], "train val"),
        # A folder around the splits is a part of the class
        (["set/train/cat", "set/test/cat", "more"], ["more", "set/cat"], "test train"),
        # Splits in the folders of classes
        (["cat/train", "cat/test", "dog/train", "dog/test"], ["cat", "dog"], "test train"),
        # … some of which have a single split
        (["cat/train", "cat/test", "dog/train", "emu/test"], ["cat", "dog", "emu"], "test train"),
        # Nested classes; no classes
        (["train/a/b", "validation/a/c"], ["a/b", "a/c"], "train validation"),
        (["train", "valid"], [], "train valid"),
    ],
)
def test_splits_become_subsets_with_shared_classes(
    folders: list[str], classes: list[str], subsets: str, tmp_path: Path
) -> None:
    source = make_pictures(tmp_path / "in", *folders)
    out = tmp_path / "out"
    report = shardio.convert(source, out, workers=0)
    assert [*report.classes] == classes and [*report.subsets] == subsets.split()
    for subset in report.subsets:
        found = sources(out, subset)
        assert found == sorted(
            f"{folder}/{k}.jpg" for k, folder in enumerate(folders) if subset in folder.split("/")
        )
        assert report.subsets[subset] == len(found)
    with shardio.open(out) as dataset:
        assert ("label" in dataset.schema) == bool(classes)
    if classes:
        for name, label in classes_by_source(out).items():
            parts = [part for part in name.split("/")[:-1] if part not in report.subsets]
            assert "/".join(parts[-label.count("/") - 1 :]) == label


def test_the_bytes_are_the_same_with_any_number_of_workers(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "train/dog", "val/dog")
    made = []
    for n in (0, 2):
        out = tmp_path / f"out{n}"
        shardio.convert(source, out, workers=n)
        made.append(contents(out))
    assert made[0] == made[1]


def test_a_resumed_conversion_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIN_UNIT_BYTES", "MIN_INPUT_BYTES"):
        monkeypatch.setattr(journal, name, 1)  # a unit for each file
    source = make_pictures(tmp_path / "in", "train/cat", "train/dog", "val/dog")

    def stop(state: Progress) -> None:
        if state.n_inputs_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardio.convert(source, tmp_path / "out", workers=0, progress=stop)
    report = shardio.convert(source, tmp_path / "out", workers=0, resume=True)
    assert report.subsets == {"train": 2, "val": 1}
    assert "'train' 2" in repr(report) and "'val' 1" in repr(report)
    shardio.convert(source, tmp_path / "whole", workers=0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_folders_are_classes_where_asked(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    report = shardio.convert(source, tmp_path / "out", workers=0, split_folders=False)
    assert (report.classes, report.subsets) == (("train/cat", "val/cat"), {})
    alone = make_pictures(tmp_path / "alone", "train/cat", "train/dog")
    report = shardio.convert(alone, tmp_path / "a", workers=0)
    assert (report.classes, report.subsets) == (("train/cat", "train/dog"), {})
    report = shardio.convert(alone, tmp_path / "b", workers=0, split_folders=True)
    assert (report.classes, report.subsets) == (("cat", "dog"), {"train": 2})
    with pytest.raises(InvalidArgument, match="split_folders: no folder .* named like a split"):
        shardio.convert(alone / "train", tmp_path / "c", workers=0, split_folders=True)
    assert not (tmp_path / "c").exists()


def test_a_subset_whose_files_give_no_sample_is_left_out(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    (source / "val" / "cat" / "1.jpg").write_bytes(b"none")
    report = shardio.convert(source, tmp_path / "out", workers=0)
    assert report.subsets == {"train": 1} and len(report.broken) == 1


def test_labels_of_a_file_go_with_subsets(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    write(tmp_path, {"labels.csv": "path,label\ntrain/cat/0.jpg,dog\nval/cat/1.jpg,cat\n"})
    out = tmp_path / "out"
    report = shardio.convert(source, out, workers=0, labels=tmp_path / "labels.csv")
    assert report.subsets == {"train": 1, "val": 1}
    assert classes_by_source(out) == {"train/cat/0.jpg": "dog", "val/cat/1.jpg": "cat"}


def test_an_append_extends_the_subsets(tmp_path: Path) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    out = tmp_path / "out"
    shardio.convert(source, out, workers=0)
    compute_stats(out, subset="val")
    # One split alone is enough now, and folders beside it are in no subset.
    more = make_pictures(tmp_path / "more", "test/cat/x", "val/dog", "emu")
    report = shardio.convert(more, out, workers=0, append=True)
    assert report.subsets == {"test": 1, "train": 1, "val": 2} and report.stats_dropped
    assert sources(out, "val") == ["val/cat/1.jpg", "val/dog/1.jpg"]
    assert classes_by_source(out)["test/cat/x/0.jpg"] == "cat/x"
    assert report.classes == ("cat", "cat/x", "dog", "emu")
    make_pictures(tmp_path / "last", "emu", "emu", "train/cat")
    report = shardio.convert(tmp_path / "last", out, workers=0, append=True)
    assert report.subsets == {"test": 1, "train": 2, "val": 2}
    with shardio.open(out) as dataset:
        assert len(dataset) == 8
    with pytest.raises(InvalidArgument, match="split_folders was True, is False"):
        shardio.convert(source, out, workers=0, append=True, split_folders=False)


def test_an_append_does_as_the_conversion_did(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardio.convert(make_pictures(tmp_path / "in", "cat", "dog"), out, workers=0)
    more = make_pictures(tmp_path / "more", "train/cat", "val/cat")
    with pytest.raises(InvalidArgument, match="split_folders was False, is True"):
        shardio.convert(more, out, workers=0, append=True, split_folders=True)
    report = shardio.convert(more, out, workers=0, append=True)
    assert (report.classes, report.subsets) == (("cat", "dog", "train/cat", "val/cat"), {})


def test_the_command_lists_the_subsets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "train/dog", "val/cat", "emu")
    command = ["convert", str(source), str(tmp_path / "out"), "--workers=0"]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    after = lines.index("2 subsets, from folders; --no-split-folders makes them classes")
    table = [
        "  subset   pictures",
        "  train           2",
        "  val             1",
        "  in none         1",
    ]
    assert lines[after + 1 : after + 5] == table
    assert cli.main([*command, "--overwrite", "--no-split-folders"]) == 0
    assert "subset" not in capsys.readouterr().out


def refused(source: Any, out: Path, *flags: str) -> int:
    return cli.main(["convert", str(source), str(out), "--workers=0", *flags])


def test_split_folders_and_a_random_split_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_pictures(tmp_path / "in", "train/cat", "val/cat")
    assert refused(source, tmp_path / "out", "--split", "a=0.5,b=0.5") == 2
    assert "the folders train, val are subsets already; leave split" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    flags = ["--split", "a=0.5,b=0.5", "--no-split-folders"]
    assert refused(source, tmp_path / "out", *flags) == 0
