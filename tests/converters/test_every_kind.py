"""Tests that apply to converters of every kind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import InvalidArgument
from shardio.conversion import BUILT_IN
from shardio_tools.cli import main
from tests.converters.helpers import convert, stored
from tests.converters.kinds import WRITERS
from tests.converters.test_lerobot import MADE as MADE_BY_LEROBOT
from tests.lines import contents
from tests.media_made import scene, write_video

pytestmark = pytest.mark.usefixtures("quick_disk", "warm_zygote")


def write(folder: Path, suffix: str, n: int, columns: list[str], n_rows: int = 4) -> None:
    """One of several files of a kind."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {name: [10 * n + i for i in range(n_rows)] for name in columns}
    WRITERS[suffix](folder / f"{n}.{suffix}", values)


@pytest.mark.parametrize("suffix", [suffix for suffix in WRITERS if suffix != "tar"])
def test_names_below_label_and_source_take_their_place(suffix: str, tmp_path: Path) -> None:
    options = {"rows": True} if suffix in ("npz", "safetensors") else {}
    for n, folder in enumerate("ab"):
        write(tmp_path / "in" / folder, suffix, n, ["label.x", "source.y", "z"])
    report = convert(tmp_path / "in", tmp_path / "out", **options)
    assert not report.broken and report.n_samples == 8
    with shardio.open(tmp_path / "out") as dataset:
        assert {*dataset.schema} - {"row"} == {"label.x", "source.y", "z"}
        assert [sample["label.x"] for sample in dataset] == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize("suffix", [suffix for suffix in WRITERS if suffix != "tar"])
def test_where_labels_are_the_files_own_folders_are_no_classes(suffix: str, tmp_path: Path) -> None:
    for n, folder in enumerate("ab"):
        write(tmp_path / "in" / folder, suffix, n, ["label"], n_rows=1)
    report = convert(tmp_path / "in", tmp_path / "out")
    assert not report.broken
    with shardio.open(tmp_path / "out") as dataset:
        assert np.ravel([sample["label"] for sample in dataset]).tolist() == [0, 10]
        assert dataset.classes == ()
    (tmp_path / "labels.csv").write_text("path,label\n")
    for labels in (tmp_path / "labels.csv", "label"):
        with pytest.raises(InvalidArgument, match="have labels of their own") as caught:
            convert(tmp_path / "in", tmp_path / "no", labels=labels)
        is_table = suffix in ("csv", "tsv", "jsonl", "parquet", "arrow", "feather")
        hint = ", because each column of a table is a field already" * is_table
        assert str(caught.value).endswith(f"leave labels out{hint}")


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_file_whose_names_clash_with_earlier_ones_is_broken(suffix: str, tmp_path: Path) -> None:
    write(tmp_path / "in", suffix, 0, ["x"])
    write(tmp_path / "in", suffix, 1, ["x.cls.y" if suffix == "tar" else "x.y"])
    report = convert(tmp_path / "in", tmp_path / "out")
    (one,) = report.broken
    assert one.name.startswith(f"1.{suffix}") and "x." in one.reason
    assert report.counts["converted"] == 1


def values(out: Path, name: str) -> list[Any]:
    return [None if one[name] is None else int(one[name]) for one in stored(out)]


def field_name(suffix: str, name: str) -> str:
    """Return the field of a column: members of a tar have their suffix in it."""
    return f"{name}.cls" if suffix == "tar" else name


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_field_that_some_files_lack_is_optional(suffix: str, tmp_path: Path) -> None:
    write(tmp_path / "in", suffix, 0, ["x", "y"])
    write(tmp_path / "in", suffix, 1, ["x"])
    options = {"rows": True} if suffix in ("npz", "safetensors") else {}
    report = convert(tmp_path / "in", tmp_path / "out", **options)
    assert report.counts["converted"] == 2 and not report.broken
    x, y = field_name(suffix, "x"), field_name(suffix, "y")
    with shardio.open(tmp_path / "out") as dataset:
        assert not dataset.schema[x].optional and dataset.schema[y].optional
    assert values(tmp_path / "out", x) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert values(tmp_path / "out", y) == [0, 1, 2, 3, None, None, None, None]


@pytest.mark.parametrize("suffix", WRITERS)
def test_an_append_takes_files_with_the_fields_of_the_dataset(suffix: str, tmp_path: Path) -> None:
    options = {"rows": True} if suffix in ("npz", "safetensors") else {}
    write(tmp_path / "in", suffix, 0, ["x", "y"])
    before = convert(tmp_path / "in", tmp_path / "out", **options)
    with shardio.open(tmp_path / "out") as dataset:
        schema = dict(dataset.schema)
    write(tmp_path / "in", suffix, 1, ["y", "x"])
    write(tmp_path / "in", suffix, 2, ["x"])
    write(tmp_path / "in", suffix, 3, ["x", "y", "more"])
    report = convert(tmp_path / "in", tmp_path / "out", append=True)
    assert report.counts["duplicate"] >= before.counts["converted"] == 1
    assert report.counts["converted"] == 1
    lacks, has_more = report.broken
    assert lacks.name.startswith(f"2.{suffix}") and "y" in lacks.reason
    assert has_more.name.startswith(f"3.{suffix}") and "more" in has_more.reason
    with shardio.open(tmp_path / "out") as dataset:
        assert dict(dataset.schema) == schema
    for name in ("x", "y"):
        assert values(tmp_path / "out", field_name(suffix, name)) == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize("suffix", WRITERS)
def test_the_command_says(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", suffix, 0, ["x", "y"])
    (tmp_path / "in" / "notes.md").write_text("notes")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "0"]) == 0
    said = capsys.readouterr().out
    with shardio.open(tmp_path / "out") as dataset:
        kind = str((dataset.converter or {})["name"])
        names = [*dataset.schema]
    words = BUILT_IN[kind].unsupported
    words = re.escape(words[0].upper() + words[1:])
    assert re.search(rf"^{words}: 1 file\n  notes\.md(  .*)?$", said, re.MULTILINE)
    assert re.search(r"converted 1 of \d+ files into 4 samples", said)
    (line,) = re.findall("  fields +(.*)", said)
    assert [field.split()[0] for field in line.split(", ")] == names
    assert f"{field_name(suffix, 'x')} int64" in line and "source text" in line


@pytest.mark.parametrize(
    ("suffix", "flags", "sample"),
    [
        ("npz", ["--no-rows"], "x int64[4], y int64[4], source text"),
        ("parquet", ["--column", "y", "--column", "x"], "x int64, y int64, source text"),
        ("parquet", ["--column", "y"], "y int64, source text"),
        ("tfrecord", ["--records", "bytes"], "record bytes, source text"),
    ],
)
def test_the_options_of_converters_are_flags(
    suffix: str, flags: list[str], sample: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", suffix, 0, ["x", "y"])
    command = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "0"]
    assert main([*command, *flags]) == 0
    assert f"  fields  {sample}" in capsys.readouterr().out


KILLED = """
import json, os, signal, sys
import shardio
from shardio.conversion import journal, worker

journal.MIN_UNIT_BYTES, journal.MIN_INPUT_BYTES = 1, 0
os.fsync, write_record = lambda fd: None, worker.write_record
finished = []


def killed_at_the_second(folder, done, end):
    if end.shards and finished:
        os.kill(os.getpid(), signal.SIGKILL)
    finished.extend(end.shards)
    write_record(folder, done, end)


worker.write_record = killed_at_the_second
for src, out, options in json.loads(sys.argv[1]):
    if (pid := os.fork()) == 0:
        shardio.convert(src, out, workers=0, **options)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""Kills each conversion when the shard of its second unit is sealed and not yet recorded."""

OPTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"kind": "tokens", "dtype": "uint16", "length": 10},
    **{suffix: {} for suffix in WRITERS},
    "lerobot": {},
    "mp4": {"store": "h264", "frames": 4, "size": 32},
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of each kind, with a source `in`, and a conversion that was killed, `out`."""
    root = tmp_path_factory.mktemp("killed")
    for kind in OPTIONS:
        for n in range(3):
            place = root / kind / "in"
            if kind == "lerobot":
                copytree(MADE_BY_LEROBOT / "arm", place / f"{n}")
            elif kind == "mp4":
                write_video(place / f"{n}.mp4", scene(9))
            elif kind == "tokens":
                place.mkdir(parents=True, exist_ok=True)
                np.arange(90, dtype="uint16").tofile(place / f"{n}.bin")
            else:
                write(place, kind, n, ["x", "y.z"], n_rows=9)
    asked = [(f"{root}/{kind}/in", f"{root}/{kind}/out", OPTIONS[kind]) for kind in OPTIONS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    told = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(asked)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert told.split() == [str(-signal.SIGKILL)] * len(OPTIONS)
    return root


@pytest.mark.parametrize("kind", OPTIONS)
def test_resuming(kind: str, killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.conversion.journal.MIN_UNIT_BYTES", 1)
    monkeypatch.setattr("shardio.conversion.journal.MIN_INPUT_BYTES", 0)
    src, out = killed / kind / "in", killed / kind / "out"
    records = [*(out / ".conversion").glob("*/unit.json")]
    kept = {shard.stat().st_ino for one in records for shard in one.parent.glob("*.shard")}
    report = convert(src, out, resume=True, **OPTIONS[kind])
    assert report.counts["converted"] == 3
    assert len(kept) == 1 and kept < {path.stat().st_ino for path in out.glob("*.shard")}
    convert(src, tmp_path / "whole", workers=2, **OPTIONS[kind])
    assert contents(out) == contents(tmp_path / "whole")
