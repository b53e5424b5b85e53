"""No operation writes into a dataset, or around its sources: they stay as they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import DatasetWriter
from shardio.errors import DatasetExists, InvalidArgument
from shardio.export import export
from shardio.maintenance import merge, repair, reshard
from tests.maintenance.datasets import LABELS, labelled, shard_of, tree, write

pytestmark = pytest.mark.process
Operation = Callable[[Path, Any], object]
FROM_DATASETS: dict[str, Operation] = {
    "export": lambda source, out: export(source, out, "files"),
    "merge": lambda source, out: merge(out, source, workers=0),
    "repair": repair,
    "repair a shard": lambda source, out: repair(shard_of(source, 0), out),
    "reshard": lambda source, out: reshard(source, out, workers=0),
}
ALL: dict[str, Operation] = {
    **FROM_DATASETS,
    "convert files": lambda source, out: shardio.convert(source.parent / "texts", out),
    "convert samples": lambda source, out: shardio.convert(labelled(2), out, schema=LABELS),
    "write": lambda source, out: DatasetWriter(out, LABELS),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.csv").write_text("n\n1\n")
    return write(tmp_path / "source", 4, 2, schema=LABELS, samples=labelled(4))


OUTS: dict[str, Callable[[Path], str]] = {
    "inside": lambda source: f"{source}/out",
    "deep inside": lambda source: f"{source}/generations/new/out",
    "hidden": lambda source: f"{source}/.conversion",
    "relative": lambda source: f"{os.path.relpath(source)}/out",
    "dots": lambda source: f"{source.parent}/elsewhere/../source/out",
    "link": lambda source: f"{source.parent}/link/out",
}


@pytest.mark.parametrize("operation", list(ALL))
def test_an_output_in_a_dataset_is_refused(source: Path, operation: str) -> None:
    (source.parent / "link").symlink_to(source)
    before = tree(source.parent)
    for out in OUTS.values():
        with pytest.raises(InvalidArgument, match=r": lies in the dataset .*source; choose a fol"):
            ALL[operation](source, out(source))
    assert tree(source.parent) == before
    assert sorted(os.listdir(source.parent)) == ["link", "source", "texts"]


@pytest.mark.parametrize("operation", list(FROM_DATASETS))
def test_an_output_around_its_source_is_refused(source: Path, operation: str) -> None:
    (source.parent / "link").symlink_to(source.parent)
    before = tree(source.parent)
    for out in (source.parent, source.parent / "link", Path(os.path.relpath(source.parent))):
        with pytest.raises(InvalidArgument, match=r": contains the source .*; choose another fol"):
            FROM_DATASETS[operation](source, out)
    assert tree(source.parent) == before


@pytest.mark.parametrize("operation", list(ALL))
def test_a_dataset_is_not_its_own_output(source: Path, operation: str) -> None:
    (source.parent / "link").symlink_to(source)
    before = tree(source)
    for out in (source, source.parent / "link", Path(os.path.relpath(source))):
        with pytest.raises((DatasetExists, InvalidArgument), match="holds a dataset|contains"):
            ALL[operation](source, out)
    assert tree(source) == before


def test_an_output_in_a_damaged_source_is_refused(source: Path) -> None:
    (source / "dataset.json").unlink()
    before = tree(source)
    with pytest.raises(InvalidArgument, match="lies in the dataset"):
        repair(source, source / "out")
    assert tree(source) == before


@pytest.mark.parametrize("operation", list(ALL))
def test_a_file_of_another_program_is_no_dataset(source: Path, operation: str) -> None:
    raw = source.parent / "raw"
    raw.mkdir()
    (raw / "dataset.json").write_text('{"labels": {}}')
    writer = ALL[operation](source, raw / "out")
    if isinstance(writer, DatasetWriter):
        writer.close()
    assert os.listdir(raw / "out")


def test_input_files_in_a_dataset_are_appended_and_not_replaced(source: Path) -> None:
    out = source.parent / "out"
    shardio.convert(source.parent / "texts", out)
    (out / "more").mkdir()
    (out / "more" / "b.csv").write_text("n\n2\n")
    before = tree(out)
    with pytest.raises(DatasetExists, match="holds more beside the dataset"):
        shardio.convert(out / "more", out, overwrite=True)
    assert tree(out) == before
    assert shardio.convert(out / "more", out, append=True).n_samples == 1
    assert before.items() - tree(out).items() == {("dataset.json", before["dataset.json"])}


def test_an_older_dataset_in_a_dataset_can_be_extended(source: Path, tmp_path: Path) -> None:
    inner = source / "inner"
    shardio.convert(labelled(2), tmp_path / "new", schema=LABELS)
    (tmp_path / "new").rename(inner)
    shardio.convert(labelled(3), inner, append=True)
    assert len(shardio.open(inner)) == 5
    shardio.convert(labelled(3), inner, schema=LABELS, overwrite=True)
    assert len(shardio.open(inner)) == 3


@pytest.mark.parametrize("operation", list(FROM_DATASETS))
def test_hidden_folders_of_the_user_stay(source: Path, operation: str) -> None:
    mine = [source.parent / ".staging-0", source.parent / ".new" / ".staging-0a1b2c3d"]
    for folder in mine:
        folder.mkdir(parents=True)
        (folder / "thesis.txt").write_text("a year of work")
    FROM_DATASETS[operation](source, source.parent / "out")
    with pytest.raises(DatasetExists, match=r"already holds data|not an export"):
        FROM_DATASETS[operation](source, source.parent / ".new")
    assert all((folder / "thesis.txt").exists() for folder in mine)
