"""Folders named like splits become subsets with shared classes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import InvalidArgument
from shardio.conversion import Progress, journal
from shardio.conversion.classes import find_split_files, find_split_folders
from shardio.maintenance import compute_stats
from shardio.media import encode_jpeg
from shardio_tools import cli
from tests.converters.test_records import example, framed, ints
from tests.converters.test_webdataset import tar
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


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        ("train.csv test.csv other.csv", "train test -"),
        ("Train.jsonl my_validation_2.jsonl", "Train validation"),
        ("cat/train.jsonl cat/val.jsonl dog/train.jsonl", "train val train"),
        ("imagenet1k-train-0001.tar imagenet1k-validation-00.tar", "train validation"),
        ("mnist-train.tfrecord-00000-of-00002 mnist-test.tfrecord-00000-of-00001", "train test"),
        ("train-00000-of-00002 validation-00000-of-00001", "train validation"),
        ("a-00000-of-00002.parquet b.c-00000-of-00001.parquet x.parquet", "a b.c -"),
        ("a-00000-of-00002.jsonl.gz b-00000-of-00001.jsonl.gz", "a b"),
        # No splits
        ("train.csv", "-"),
        ("x/a-00000-of-00001.csv y/b-00000-of-00001.csv", "- -"),
        ("a.tfrecord-00000-of-00001 b.tfrecord-00000-of-00001", "- -"),
        ("x/train-00000-of-00001.csv y/test-00000-of-00001.csv", "- -"),
        ("x/train.csv y/test.csv", "- -"),
        ("val.csv valid.csv", "- -"),
        ("train.csv test.txt", "- -"),
        ("train_test.csv test.csv", "- -"),
        ("trainer.csv tests.csv", "- -"),
        ("train/1.csv test/1.csv", "- -"),
    ],
)
def test_splits_are_found_in_the_names_of_files(files: str, splits: str) -> None:
    found = find_split_files(files.split())
    assert [found.get(name, "-") for name in files.split()] == splits.split()


def write_files(root: Path, *names: str) -> Path:
    for k, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'{{"x": {k}}}\n' if "json" in name else f"x\n{k}\n")
    return root


@pytest.mark.parametrize(
    ("files", "classes", "subsets"),
    [
        ("train.csv val.csv", [], {"train": [0], "val": [1]}),
        # The folder of all files is no class, and others are
        (
            "data/test.jsonl data/train-1.jsonl data/train-2.jsonl",
            [],
            {"test": [0], "train": [1, 2]},
        ),
        ("a/test.csv a/train.csv b/train.csv", ["a", "b"], {"test": [0], "train": [1, 2]}),
        ("data/dev.csv data/train.csv more/x.csv", ["more"], {"dev": [0], "train": [1]}),
        # Folders come first
        ("test/train.csv train/test.csv", [], {"test": [0], "train": [1]}),
    ],
)
def test_names_of_tables_give_subsets(
    files: str, classes: list[str], subsets: dict[str, list[int]], tmp_path: Path
) -> None:
    source, out = write_files(tmp_path / "in", *files.split()), tmp_path / "out"
    report = shardio.convert(source, out, workers=0)
    assert [*report.classes] == classes
    assert report.subsets == {name: len(values) for name, values in subsets.items()}
    for name, values in subsets.items():
        with shardio.open(out, subset=name) as dataset:
            assert dataset["x"].tolist() == values
    off = shardio.convert(source, tmp_path / "off", workers=0, split_folders=False)
    assert off.subsets == {} and [*off.classes] == sorted(
        {name.rpartition("/")[0] for name in files.split()} - {""}
    )


@pytest.mark.parametrize("kind", ["tar", "tfrecord", "h5"])
def test_names_of_tars_records_and_hdf5_give_subsets(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name, n in (("train", 3), ("val", 2)):
        path = source / f"x-{name}-000.{kind}"
        if kind == "tar":
            path.write_bytes(tar([(f"{k}.cls", b"%d" % k) for k in range(n)]))
        elif kind == "tfrecord":
            path.write_bytes(framed(example(x=ints(k)) for k in range(n)))
        else:
            h5py = pytest.importorskip("h5py", reason="h5py is not installed")
            with h5py.File(path, "w") as file:
                file["x"] = np.arange(n)
    report = shardio.convert(source, tmp_path / "out", workers=0)
    assert report.subsets == {"train": 3, "val": 2}
    assert len(set(sources(tmp_path / "out", "val"))) == 1


def test_names_of_files_in_appends_and_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    source = write_files(tmp_path / "in", "test.csv", "train.csv")
    assert cli.main(["convert", str(source), str(out), "--workers", "0"]) == 0
    screen = capsys.readouterr().out.splitlines()
    assert "2 subsets, from names of files; --no-split-folders ignores the names" in screen
    more = write_files(tmp_path / "more", "more.csv", "train-2.csv")
    report = shardio.convert(more, out, workers=0, append=True)
    assert report.subsets == {"test": 1, "train": 2}
    one = write_files(tmp_path / "one", "train.csv")
    assert shardio.convert(one, tmp_path / "no", workers=0).subsets == {}
    report = shardio.convert(one, tmp_path / "yes", workers=0, split_folders=True)
    assert report.subsets == {"train": 1}
    with pytest.raises(InvalidArgument, match="no folder or file of the source is named like a"):
        other = write_files(tmp_path / "other", "x.csv")
        shardio.convert(other, tmp_path / "no2", workers=0, split_folders=True)


def test_names_of_pictures_give_no_subsets(tmp_path: Path) -> None:
    for k, name in enumerate(("test", "train")):
        picture = encode_jpeg(np.full((8, 8, 3), 9 * k, np.uint8))
        (tmp_path / f"{name}.jpg").write_bytes(picture)
    (tmp_path / "all.csv").write_text("file\ntest.jpg\ntrain.jpg\n")
    given: list[dict[str, Any]] = [{}, {"kind": "tables", "references": ["file"]}]
    for options in given:
        report = shardio.convert(
            tmp_path, tmp_path.parent / str(len(options)), workers=0, **options
        )
        assert report.n_samples == 2 and report.subsets == {}


@pytest.mark.process
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
    assert (
        "train, val are subsets already, because folders or files have these names; leave"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    flags = ["--split", "a=0.5,b=0.5", "--no-split-folders"]
    assert refused(source, tmp_path / "out", *flags) == 0


def test_a_class_in_two_forms_of_unicode_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed, decomposed = "caf\xe9", "cafe\u0301"
    source = make_pictures(tmp_path / "in", composed, decomposed, "tea")
    said = (
        f"{source}: 2 classes look like '{composed}', but their names are in different Unicode "
        r"normal forms: 'cafe\u0301' and 'caf\xe9'; to have one class, give them one name"
    )
    with pytest.warns(UserWarning) as caught:
        shardio.convert(source, tmp_path / "out", workers=0)
    assert [str(one.message).startswith(said) for one in caught] == [True]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main(["convert", str(source), str(tmp_path / "cli"), "--workers", "0"]) == 0
    assert f"warning: {said}" in capsys.readouterr().err
    shardio.convert(make_pictures(tmp_path / "one", "a", composed), tmp_path / "two", workers=0)
    more = make_pictures(tmp_path / "more", decomposed)
    with pytest.warns(UserWarning, match="2 classes look like"):
        report = shardio.convert(more, tmp_path / "two", workers=0, append=True)
    assert report.classes == ("a", composed, decomposed)
