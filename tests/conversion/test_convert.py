"""`convert`: every input is accounted for, nothing is half-written, bytes are reproducible."""

from __future__ import annotations

import fcntl
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Generator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardio
from shardio import Array, Input, InvalidArgument, Outcome, Schema
from shardio.conversion import Progress, staging, worker
from shardio.conversion.inputs import list_inputs
from shardio.conversion.journal import (
    MAX_UNIT_BYTES,
    MIN_INPUT_BYTES,
    MIN_UNIT_BYTES,
    N_UNITS,
    cut_units,
)
from shardio.errors import DatasetConflict, DatasetExists
from shardio.format.checksum import hash_bytes
from shardio.storage.fs import lock_holder
from shardio_tools import cli
from tests.lines import OLD, Lines, contents, convert, outcomes, texts, write

pytestmark = pytest.mark.usefixtures("warm_zygote")

NUMBERS = Schema({"n": Array("int64")})


def test_every_input_is_in_the_report_and_in_the_generation(lines: Path, tmp_path: Path) -> None:
    report = convert(lines, tmp_path / "out")
    assert outcomes(report) == {
        **dict.fromkeys(["a/1.txt", "b/3.txt", "c/4.txt", "top.txt"], "converted"),
        **dict.fromkeys(["a/2.txt", "d/5.txt"], "empty"),
        "b/readme": "unsupported",
    }
    dataset = shardio.open(tmp_path / "out")
    assert [entry["path"] for entry in dataset.inputs] == list(outcomes(report))
    assert dataset.inputs[0] == {
        "path": "a/1.txt",
        "outcome": "converted",
        "samples": 2,
        "bytes": 7,
        "hash": f"{hash_bytes(b'one two'):016x}",
        "detail": {"lines": 2},
    }
    assert dataset.inputs[1]["reason"] == "no line"
    assert report.counts == {"converted": 4, "empty": 2, "unsupported": 1}
    assert report.n_samples == len(dataset) == 7
    assert report.n_bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.shard"))
    assert (report.dataset, report.kind, report.generation) == (tmp_path / "out", "lines", 1)
    assert (report.classes, report.view) == (("a", "b", "c", "d"), {"kind": "rows"})
    assert (report.n_samples_before, report.stats_dropped, report.subsets) == (0, False, {})
    assert (report.broken, report.modified, report.stopped) == ((), (), False)
    assert report.elapsed_s > 0
    first = report.inputs[0]
    assert (first.name, first.n_samples, first.n_bytes, first.label) == ("a/1.txt", 2, 7, 0)
    assert (first.reason, first.detail) == ("", {"lines": 2})
    assert first.as_json() == dataset.inputs[0]
    assert [source.as_json() for source in report.inputs] == [*dataset.inputs]
    assert report.inputs[-1].label == -1
    assert "1 unsupported" in repr(report)
    assert "generation 1" in repr(report)


def test_samples_come_in_order_of_names_with_folder_labels(lines: Path, tmp_path: Path) -> None:
    convert(lines, tmp_path / "out")
    dataset = shardio.open(tmp_path / "out")
    assert texts(tmp_path / "out") == OLD
    assert [int(sample["label"]) for sample in dataset] == [0, 0, 1, 2, 2, 2, -1]
    assert dataset.classes == ("a", "b", "c", "d")  # d gave nothing


def test_the_generation_records_settings_but_no_paths(lines: Path, tmp_path: Path) -> None:
    (lines / "a" / "1.txt").write_text("one !")
    convert(lines, tmp_path / "out", workers=1, repeat=2)
    dataset = shardio.open(tmp_path / "out")
    assert dataset.converter["name"] == "lines" and dataset.converter["version"] == "7"
    assert dataset.converter["options"]["repeat"] == 2
    assert dataset.versions == {"shardio": shardio.__version__, "alphabet": "26"}
    options = dataset.converter["options"]
    assert (options["on_error"], options["keep_partial"]) == ("skip", False)
    assert options["shard_bytes"] == 256 << 20
    assert dataset.operation == {}
    (generation,) = (tmp_path / "out" / "generations").iterdir()
    assert str(tmp_path) not in generation.read_text()
    assert "workers" not in generation.read_text()


def test_the_bytes_are_the_same_for_any_number_of_workers(lines: Path, tmp_path: Path) -> None:
    write(lines, {"e/6.txt": "eight ! nine", "f/7.txt": "ten"})
    found = []
    for workers in (0, 1, 2, 3):
        convert(lines, tmp_path / f"out{workers}", workers=workers)
        found.append(contents(tmp_path / f"out{workers}"))
    assert len(found[0]) > 4
    assert found[0] == found[1] == found[2] == found[3]


def test_a_broken_input_gives_no_samples_or_those_to_keep(lines: Path, tmp_path: Path) -> None:
    (lines / "b" / "3.txt").write_text("three and ! more")
    report = convert(lines, tmp_path / "out")
    assert texts(tmp_path / "out") == "one two four five six seven".split()
    (broken,) = report.broken
    assert (broken.name, broken.reason, broken.n_samples) == ("b/3.txt", "breaks after 2 lines", 0)
    assert not report.stopped and "not_processed" not in report.counts
    assert broken.hash == ""
    assert report.n_samples == 6
    entry = next(e for e in shardio.open(tmp_path / "out").inputs if e["path"] == "b/3.txt")
    assert entry == {"path": "b/3.txt", "outcome": "broken", "reason": "breaks after 2 lines"}
    report = convert(lines, tmp_path / "kept", keep_partial=True)
    assert texts(tmp_path / "kept") == "one two three and four five six seven".split()
    assert report.broken[0].n_samples == 2
    kept = next(e for e in shardio.open(tmp_path / "kept").inputs if e["path"] == "b/3.txt")
    assert (kept["outcome"], kept["samples"]) == ("broken", 2)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_on_error_stop_publishes_what_came_first(lines: Path, tmp_path: Path, workers: int) -> None:
    (lines / "b" / "3.txt").write_text("three !")
    (lines / "c" / "4.txt").write_text("!")
    report = convert(lines, tmp_path / "out", on_error="stop", workers=workers)
    assert report.stopped
    assert texts(tmp_path / "out") == ["one", "two"]
    assert list(outcomes(report).values()) == [
        "converted",
        "empty",
        "broken",
        *["not_processed"] * 4,
    ]
    assert sorted(os.listdir(tmp_path / "out")) == [
        "000000-000.shard",
        "dataset.json",
        "generations",
    ]
    assert (report.n_samples, report.generation) == (2, 1)
    assert report.broken[0].reason == "breaks after 1 lines"
    assert {source.n_samples for source in report.inputs[2:]} == {0}


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("folder", ["missing", "empty"])
@pytest.mark.parametrize(
    ("content", "outcome", "on_error"),
    [("", "empty", "skip"), ("!", "broken", "skip"), ("!", "broken", "stop")],
)
def test_without_samples_nothing_is_published(
    lines: Path,
    tmp_path: Path,
    content: str,
    outcome: str,
    on_error: str,
    folder: str,
    n_workers: int,
) -> None:
    source, out = tmp_path / "none", tmp_path / "out"
    write(source, {"a/1.txt": content, "b/2.txt": content})
    if folder == "empty":
        out.mkdir()
    for _ in range(2):
        report = convert(source, out, on_error=on_error, workers=n_workers)
        after = outcome if on_error == "skip" else "not_processed"
        assert outcomes(report) == {"a/1.txt": outcome, "b/2.txt": after}
        assert (report.n_samples, report.n_bytes, report.generation) == (0, 0, 0)
        assert (report.dataset, report.classes) == (out, ("a", "b"))
        assert not [*out.iterdir()] if folder == "empty" else not out.exists()
    write(source, {"a/1.txt": "one"})
    report = convert(source, out, workers=n_workers)
    assert texts(out) == ["one"] and report.generation == 1


@pytest.mark.parametrize("buffer_bytes", [1, 12_000])
def test_the_samples_of_a_long_input_are_spilled_to_a_file(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    convert(lines, tmp_path / "memory", repeat=9)
    monkeypatch.setattr(worker, "BUFFER_BYTES", buffer_bytes)
    (lines / "b" / "zz.txt").write_text("gone gone gone !")
    convert(lines, tmp_path / "file", repeat=9)
    assert texts(tmp_path / "file") == texts(tmp_path / "memory")


def test_samples_freed_early(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[weakref.ref[Any]] = []
    n_alive = []
    samples = Lines.samples

    def watched(self: Lines, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        n_alive.append(sum(one() is not None for one in given))
        made = samples(self, source)
        while True:
            try:
                sample = next(made)
            except StopIteration as end:
                return cast(Outcome, end.value)
            given.append(weakref.ref(sample["pad"]))
            yield sample

    monkeypatch.setattr(Lines, "samples", watched)
    convert(lines, tmp_path / "out", workers=0)
    assert len(given) == 7 and not any(n_alive)


def test_a_folder_that_holds_data_is_refused_and_left_alone(lines: Path, tmp_path: Path) -> None:
    convert(lines, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(DatasetExists, match="already holds a dataset") as caught:
        convert(lines, tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path / 'out'}: ")
    for way_out in ("overwrite", "append"):
        assert way_out in str(caught.value)
    assert contents(tmp_path / "out") == before
    with pytest.raises(DatasetExists, match=r"top\.txt: is a file"):
        convert(lines, lines / "top.txt")
    assert (lines / "top.txt").read_text() == "seven"


def test_lock_while_running(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "LOCK_TIMEOUT_S", 0.0)
    write(tmp_path / "out" / ".conversion", {"0123456789abcdef/000.shard": "half"})
    fd = os.open(tmp_path / "out" / ".conversion", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        holder = rf"out: another conversion is writing here, in process {os.getpid()} \(.*python"
        with pytest.raises(DatasetConflict, match=holder):
            convert(lines, tmp_path / "out")
        monkeypatch.setattr(staging, "lock_holder", lambda _: None)  # as in another container
        with pytest.raises(DatasetConflict, match="writing here: wait for it, or choose another"):
            convert(lines, tmp_path / "out")
    finally:
        os.close(fd)
    assert (tmp_path / "out" / ".conversion" / "0123456789abcdef").exists()


_LOCKS = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
if os.fork() == 0:
    sys.stdin.read()  # as a worker that is about to notice
"""


@pytest.mark.process
def test_workers_of_a_killed_conversion_are_waited_for(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "LOCK_TIMEOUT_S", 0.0)
    folder = tmp_path / "out" / ".conversion"
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", _LOCKS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as holder:
        holder.wait(60)
        if lock_holder(folder) is None:
            pytest.skip("in this container, the kernel does not show who has held a lock")
        with monkeypatch.context() as patch:
            patch.setattr(staging, "_WORKERS_TIMEOUT_S", 0.0)
            exited = rf"its process {holder.pid} has exited, but its workers still run after 0 s"
            with pytest.raises(DatasetConflict, match=exited):
                convert(lines, tmp_path / "out")
        monkeypatch.setattr("time.sleep", lambda _: holder.stdin and holder.stdin.close())
        assert convert(lines, tmp_path / "out").n_samples


def test_errors_of_unknown_kinds_and_options_list_known_ones(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="'films': unknown converter; .* lines, .*videos"):
        shardio.convert(lines, tmp_path / "out", kind="films")
    with pytest.raises(InvalidArgument, match="unknown converter; .*; did you mean 'videos'"):
        shardio.convert(lines, tmp_path / "out", kind="Video")
    with pytest.raises(InvalidArgument, match="speed: not an option .* options are repeat"):
        convert(lines, tmp_path / "out", speed=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers must be an integer from 0 up; found -1"),
        ({"on_error": "raise"}, "on_error is 'raise'"),
        ({"shard_bytes": 0}, "shard_bytes must be an integer from 1 up; found 0"),
        ({"schema": NUMBERS}, "schema: only for samples"),
        ({"resume": True, "overwrite": True}, "resume and overwrite are mutually exclusive"),
        ({"append": True, "overwrite": True}, "append and overwrite are mutually exclusive"),
    ],
)
def test_wrong_options(lines: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        convert(lines, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_progress_starts_with_totals_and_counts_every_input(lines: Path, tmp_path: Path) -> None:
    (lines / "b" / "3.txt").write_text("!")
    updates: list[Progress] = []
    report = convert(lines, tmp_path / "out", progress=updates.append, workers=2)
    n_bytes = sum(source.n_bytes for source in report.inputs)
    assert updates[0] == Progress(0, 7, 0, n_bytes, 0, 0)
    assert [step.n_inputs_done for step in updates] == list(range(8))
    last = updates[-1]
    assert (last.n_bytes_done, last.n_samples, last.n_broken) == (n_bytes, 6, 1)
    assert {step.name for step in updates[1:]} == {source.name for source in report.inputs}
    assert {step.name: step.outcome for step in updates[1:]} == outcomes(report)
    (broken,) = (step for step in updates if step.outcome == "broken")
    assert (broken.name, broken.reason) == ("b/3.txt", "breaks after 0 lines")
    assert {(step.n_inputs, step.n_bytes) for step in updates} == {(7, n_bytes)}
    done = [(step.n_bytes_done, step.n_samples, step.n_broken) for step in updates]
    assert all((np.diff(done, axis=0) >= 0).ravel())


def test_a_single_file_is_a_source_without_classes(lines: Path, tmp_path: Path) -> None:
    report = convert(lines / "c" / "4.txt", tmp_path / "out")
    dataset = shardio.open(tmp_path / "out")
    assert [source.name for source in report.inputs] == ["4.txt"]
    assert (dataset.classes, int(dataset[0]["label"])) == ((), -1)


def test_classes_are_folders_with_files_and_empty_ones(tmp_path: Path) -> None:
    write(tmp_path, {"train/cat/1": "", "train/dog/2": "", "3": ""})
    (tmp_path / "train" / "empty").mkdir()
    listing = list_inputs(str(tmp_path))
    assert listing.classes == ("train/cat", "train/dog", "train/empty")
    assert [(source.name, source.label) for source in listing.inputs] == [
        ("3", -1),
        ("train/cat/1", 0),
        ("train/dog/2", 1),
    ]


def test_linked_folders_are_followed_except_in_circles(tmp_path: Path) -> None:
    write(tmp_path / "real", {"1": "x"})
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "circle").symlink_to(tmp_path / "root")
    assert [source.name for source in list_inputs(str(tmp_path / "root")).inputs] == ["linked/1"]


@given(st.lists(st.integers(0, 3 << 20), min_size=1, max_size=120))
def test_units_cover_the_inputs_in_order_and_end_as_soon_as_they_are_full(sizes: list[int]) -> None:
    inputs = [Input(f"{n:03d}", "", size, -1) for n, size in enumerate(sizes)]
    units = cut_units(inputs)
    assert [source for part in units for source in part.inputs] == inputs
    assert [part.number for part in units] == list(range(len(units)))
    assert [part.first for part in units] == [inputs.index(part.inputs[0]) for part in units]
    total = sum(max(size, MIN_INPUT_BYTES) for size in sizes)
    aim = min(max(total / N_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    full = 2 ** math.floor(math.log2(aim))
    for part in units[:-1]:
        part_sizes = [max(source.n_bytes, MIN_INPUT_BYTES) for source in part.inputs]
        assert sum(part_sizes) >= full > sum(part_sizes[:-1])


def test_built_in_converters_ignore_the_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardio.conversion import converter

    moved = EntryPoint("videos", "shardio_converters.nowhere:Videos", converter.ENTRY_POINT_GROUP)
    monkeypatch.setattr(converter, "_installed", lambda folders: [moved])
    assert converter.make_converter("videos", {"frames": 8}).kind == "videos"


def test_a_converter_that_is_installed_later_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardio.conversion import converter

    monkeypatch.syspath_prepend(str(tmp_path))
    for n in range(2):
        meta = tmp_path / f"theirs{n}-1.0.dist-info"
        meta.mkdir()
        (meta / "entry_points.txt").write_text(f"[shardio.converters]\nkind{n} = theirs:Theirs\n")
        os.utime(tmp_path, ns=(n, n))
        assert f"kind{n}" in converter.known_kinds()


def test_samples_of_an_iterable_are_written_with_the_schema_of_the_first(tmp_path: Path) -> None:
    samples = (
        {
            "image": np.full((4, 4), n, ">f4"),
            "n": n,
            "share": n / 2,
            "flag": n > 1,
            "text": f"{n}",
            "raw": bytes([n]),
            "extra": {"n": [n]},
        }
        for n in range(3)
    )
    report = shardio.convert(samples, tmp_path / "out")
    dataset = shardio.open(tmp_path / "out")
    assert report.n_samples == len(dataset) == 3
    assert (report.kind, report.inputs, report.classes) == ("samples", (), ())
    assert report.n_bytes == sum(shard.n_bytes for shard in dataset.shards)
    assert (report.generation, report.dataset) == (1, tmp_path / "out")
    assert dataset.schema["image"] == Array("float32", (4, 4))
    last = dataset[2]
    assert last["image"].tolist() == [[2.0] * 4] * 4
    assert (int(last["n"]), float(last["share"]), bool(last["flag"])) == (2, 1.0, True)
    assert (last["text"], bytes(last["raw"]), last["extra"]) == ("2", b"\x02", {"n": [2]})


def test_an_empty_iterable_publishes_nothing_and_needs_a_schema(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InvalidArgument, match="no samples to infer the schema from"):
        shardio.convert([], out)
    assert not out.exists()
    for _ in range(2):
        report = shardio.convert([], out, schema=NUMBERS)
        assert (report.n_samples, report.n_bytes, report.generation) == (0, 0, 0)
        assert not out.exists()
    shardio.convert([{"n": 1}], out, schema=Schema({"n": Array("int64")}))
    with pytest.raises(DatasetExists, match="already holds a dataset; overwrite=True"):
        shardio.convert([], out, schema=NUMBERS)
    assert [sample["n"] for sample in shardio.open(out)] == [1]


HIDDEN = ".DS_Store .ipynb_checkpoints/a.npy __MACOSX/cat/._a.npy cat/._a.npy cat/.old/a.npy"


def test_hidden_entries_and_empty_folders_are_named_and_not_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "src", tmp_path / "out"
    write(source, {"cat/a.npy": "", "dog/big/b.npy": "", "fish/c": ""})
    write(source, dict.fromkeys(HIDDEN.split(), "z"))
    (source / "fish" / "c").unlink()
    for name in ("cat/a.npy", "dog/big/b.npy"):
        np.save(source / name, np.zeros(3))
    report = shardio.convert(source, out, workers=0)
    assert report.classes == ("cat", "dog/big")
    assert [(one.name, one.label) for one in report.inputs] == [
        ("cat/a.npy", 0),
        ("dog/big/b.npy", 1),
    ]
    ignored = ".DS_Store .ipynb_checkpoints/ __MACOSX/ cat/._a.npy cat/.old/ fish/"
    assert report.ignored == tuple(ignored.split())
    assert "6 hidden or empty" in report._repr_html_()
    assert cli.main(["convert", str(source), str(out), "--overwrite", "--workers=0"]) == 0
    printed = capsys.readouterr().out
    shown = ".DS_Store, .ipynb_checkpoints/, __MACOSX/, cat/._a.npy and 2 more"
    assert f"ignored 6 hidden or empty: {shown}" in printed
    assert "classes are whole paths: dog/big is no part of dog" in printed


def test_hidden_folders_are_converted_if_they_are_the_source(tmp_path: Path) -> None:
    write(tmp_path, {".hidden/a.txt": "", ".hidden/.git/b": "", "__MACOSX/cat/._a.txt": ""})
    assert [one.name for one in list_inputs(str(tmp_path / ".hidden")).inputs] == ["a.txt"]
    with pytest.raises(InvalidArgument, match=r"no file .* hidden ones, such as 'cat/\._a\.txt'"):
        list_inputs(str(tmp_path / "__MACOSX"))


def test_an_empty_folder_of_a_split_makes_the_others_subsets(lines: Path, tmp_path: Path) -> None:
    write(lines / "src", {"train/cat/a.txt": "x"})
    (lines / "src" / "val").mkdir()
    report = convert(lines / "src", tmp_path / "out")
    assert (report.classes, dict(report.subsets)) == (("cat",), {"train": 1})
