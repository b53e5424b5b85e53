"""Leftovers of conversions and writers, whenever they end, and files that they never touch."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, DatasetWriter, InvalidArgument, Schema, Text
from shardio.conversion import Progress, execution
from shardio.conversion.inputs import list_inputs
from shardio.conversion.staging import Staging
from shardio.dataset import manifest
from shardio.errors import DatasetConflict, DatasetExists, SchemaError, WorkerDied
from tests.lines import convert, leave_killed, texts, write

NUMBERS = Schema({"n": Array("int64")})


@pytest.fixture
def source(lines: Path, tmp_path: Path) -> Path:
    """Return a folder with one input of one sample."""
    write(tmp_path / "src", {"1.txt": "fine"})
    return tmp_path / "src"


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}])
def test_only_own_generation_undone(source: Path, tmp_path: Path, options: dict[str, bool]) -> None:
    convert(source, tmp_path / "model")
    generation = (tmp_path / "model" / "generations" / "000001.json").read_bytes()
    with shardio.DatasetWriter(tmp_path / "other", NUMBERS) as writer:
        writer.append({"n": 7})
    anothers = (tmp_path / "other" / "generations" / "000001.json").read_bytes()
    for out, content in ((tmp_path / "ours", generation), (tmp_path / "theirs", anothers)):
        leave_killed(source, out, execution, "publish")
        (out / "generations").mkdir()
        (out / "generations" / "000001.json").write_bytes(content)
    convert(source, tmp_path / "ours", **options)
    with pytest.raises(DatasetExists, match="generations"):
        convert(source, tmp_path / "theirs", **options)
    kept = tmp_path / "theirs" / "generations" / "000001.json"
    assert kept.read_bytes() == anothers


def test_a_conversion_killed_after_publishing_only_cleans_up(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "model")
    leave_killed(source, tmp_path / "out", Staging, "finish")
    again = convert(source, tmp_path / "out", resume=True)
    assert not (tmp_path / "out" / ".conversion").exists()
    assert (again.counts, again.n_bytes) == (report.counts, report.n_bytes)
    assert again.inputs[0].detail == report.inputs[0].detail


@pytest.mark.parametrize("is_tidied", [False, True])
def test_a_refused_one_cleans_up_too(source: Path, tmp_path: Path, is_tidied: object) -> None:
    out = tmp_path / "out"
    leave_killed(source, out, Staging, "finish")
    if is_tidied:  # killed just before the empty folder is removed
        shutil.rmtree(out / ".conversion")
        (out / ".conversion").mkdir()
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        convert(source, out)
    assert not (out / ".conversion").exists()
    assert len(shardio.open(out)) == 1


def test_a_published_dataset_is_not_that_of_modified_inputs(source: Path, tmp_path: Path) -> None:
    leave_killed(source, tmp_path / "out", Staging, "finish")
    (source / "2.txt").write_text("2")
    message = "has published its dataset, and its inputs have changed"
    with pytest.raises(DatasetExists, match=message) as caught:
        convert(source, tmp_path / "out", resume=True)
    assert str(caught.value).startswith(f"{tmp_path / 'out'}: ")
    assert texts(tmp_path / "out") == ["fine"]
    report = convert(source, tmp_path / "out", overwrite=True)
    assert (report.n_samples, len(shardio.open(tmp_path / "out"))) == (2, 2)
    assert not (tmp_path / "out" / ".conversion").exists()


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_deleted_dataset_is_rebuilt(source: Path, tmp_path: Path, options: dict[str, bool]) -> None:
    out = tmp_path / "out"
    leave_killed(source, out, Staging, "finish")
    os.rename(out / ".conversion" / "plan.json", out / ".conversion" / "published.json")
    for name in ("dataset.json", "000000-000.shard"):
        (out / name).unlink()
    shutil.rmtree(out / "generations")
    convert(source, out, **options)
    assert len(shardio.open(out)) == 1
    assert not (out / ".conversion").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_after_publishing_does_not_move_the_shards_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def publish(*given: Any, **named: Any) -> None:
        manifest.publish(*given, **named)
        raise error

    monkeypatch.setattr(execution, "publish", publish)
    with pytest.raises(error):
        convert(source, tmp_path / "out")
    assert texts(tmp_path / "out") == ["fine"]
    monkeypatch.undo()
    with pytest.raises(InvalidArgument, match="'lines'"):
        convert(source, tmp_path / "out", resume=True)


def test_a_shard_created_by_another_writer_is_never_replaced(source: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "out" / "000000-000.shard"

    def meanwhile(state: Progress) -> None:
        if state.n_inputs_done == state.n_inputs:
            theirs.write_bytes(b"theirs")

    with pytest.raises(DatasetConflict, match=r"000000-000\.shard: created by another writer"):
        convert(source, tmp_path / "out", progress=meanwhile)
    assert theirs.read_bytes() == b"theirs"
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_locks_on_removed_folders_are_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, n_locks = fcntl.flock, 0

    def remove_first(fd: int, how: int) -> None:
        nonlocal n_locks
        n_locks += 1
        if n_locks == 1:  # its owner has just ended
            os.rmdir(tmp_path / "out" / ".conversion")
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with Staging(str(tmp_path / "out")) as made:
        assert n_locks == 2
        assert made.folder.is_dir()


def test_a_folder_just_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out" / ".conversion"
    folder.mkdir(parents=True)
    is_there = os.path.lexists

    def remove_then(path: str | os.PathLike[str]) -> bool:
        found = is_there(path)
        if Path(path) == folder and found:
            os.rmdir(folder)
        return found

    monkeypatch.setattr(os.path, "lexists", remove_then)
    with Staging(str(tmp_path / "out")) as made:
        assert made.folder.is_dir()


def test_an_out_that_is_a_device_is_refused_as_a_file(source: Path) -> None:
    with pytest.raises(DatasetExists, match="/dev/null: is a file"):
        convert(source, Path("/dev/null"))


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_converters_may_return_a_long_reason(source: Path, tmp_path: Path, workers: int) -> None:
    (source / "1.txt").write_text("fine returns:long")
    (found,) = convert(source, tmp_path / "out", workers=workers).inputs
    assert found.outcome == "converted"
    assert (len(found.reason), len(found.detail["long"])) == (1000, 200_000)


@pytest.mark.parametrize(("keep_partial", "n_kept"), [(False, 0), (True, 1)])
def test_returned_broken(source: Path, tmp_path: Path, *, keep_partial: bool, n_kept: int) -> None:
    (source / "1.txt").write_text("fine returns:broken")
    report = convert(source, tmp_path / "out", keep_partial=keep_partial)
    assert (report.inputs[0].outcome, report.n_samples) == ("broken", n_kept)
    assert report.inputs[0].reason == "it says so itself"
    assert (report.generation, len(report.broken)) == (n_kept, 1)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("returns:None", InvalidArgument, "must return an Outcome"),
        (
            "misfit",
            SchemaError,
            r"src/1\.txt, sample 1: field 'label': expected int64, found str: .*<U9$",
        ),
        ("bug", (KeyError, WorkerDied), "'a mistake in the converter'"),
    ],
)
def test_a_bug_in_a_converter_is_an_error_with_any_number_of_workers(
    source: Path, tmp_path: Path, workers: int, content: str, error: type[Exception], message: str
) -> None:
    (source / "1.txt").write_text(f"fine {content}")
    with pytest.raises(error, match=message) as caught:
        convert(source, tmp_path / "out", workers=workers)
    assert ".conversion" not in str(caught.value)
    if content == "bug":
        notes = getattr(caught.value, "__notes__", [])
        assert "while converting 1.txt" in f"{caught.value}{notes}"
    assert not (tmp_path / "out").exists()


def test_names_that_differ_in_bytes_differ_in_text(tmp_path: Path) -> None:
    names = [b"\xff", b"\\xff", b"\\\\xff", b"\\\xff", b"a\\b"]
    for name in names:
        os.mkdir(os.path.join(os.fsencode(tmp_path), name))
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name, b"f"))).touch()
    assert len(set(list_inputs(str(tmp_path)).classes)) == len(names)


# Writers.


def test_changing_folders_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with DatasetWriter("out", NUMBERS, shard_bytes=8) as writer:
        writer.append({"n": 1})
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.append({"n": 2})
    monkeypatch.chdir(tmp_path)
    with shardio.open("out") as dataset:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert [sample["n"] for sample in dataset] == [1, 2]


@pytest.mark.parametrize("classes", ["cat", ["a", "a"], [1, 2], None])
def test_class_names_are_checked_before_anything_is_written(tmp_path: Path, classes: Any) -> None:
    with pytest.raises(InvalidArgument, match="classes"):
        DatasetWriter(tmp_path / "out", NUMBERS, classes=classes)
    assert not (tmp_path / "out").exists()


def test_a_schema_is_a_schema(tmp_path: Path) -> None:
    for make in (shardio.ShardWriter, DatasetWriter):
        with pytest.raises(SchemaError, match=r"expected a shardio\.Schema, found dict"):
            make(tmp_path / "a.shard", {"n": Text()})  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


# Readers.


def test_numbers_to_be_rounded_are_refused(tmp_path: Path) -> None:
    schema = Schema({"x": Array("float64", (1,))})
    with shardio.ShardWriter(tmp_path / "a.shard", schema) as writer:
        with pytest.raises(SchemaError, match="cannot hold 9007199254740993 exactly"):
            writer.append({"x": np.array([2**53 + 1])})
        writer.append({"x": np.array([2**53])})
