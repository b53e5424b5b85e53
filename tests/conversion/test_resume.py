"""A resumed conversion keeps every finished unit, and ends as if it had not been interrupted."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import InvalidArgument
from shardio.conversion import Progress
from shardio.conversion.staging import Staging
from shardio.errors import DatasetCorrupt, DatasetExists
from shardio_tools import cli
from tests.faults.failing import before_calls
from tests.lines import (
    Lines,
    check_resumes,
    contents,
    convert,
    interrupt_after,
    outcomes,
    texts,
    write,
)
from tests.shards import flip

pytestmark = pytest.mark.process

N_INPUTS = 7


def interrupted(lines: Path, out: Path, n_inputs: int = 5, **options: Any) -> KeyboardInterrupt:
    with pytest.raises(KeyboardInterrupt) as caught:
        convert(lines, out, progress=interrupt_after(n_inputs), **options)
    return caught.value


@pytest.mark.parametrize(
    ("n_inputs", "workers", "then"),
    [*((n, 0, 0) for n in range(N_INPUTS + 1)), (3, 2, 0), (5, 0, 2), (6, 2, 2)],
)
def test_resumed_after_any_input_the_result_is_that_of_an_uninterrupted_conversion(
    lines: Path, tmp_path: Path, n_inputs: int, workers: int, then: int
) -> None:
    interrupted(lines, tmp_path / "out", n_inputs, workers=workers)
    check_resumes(lines, tmp_path / "out", workers=then)


def test_finished_inputs_are_reported_unread(lines: Path, tmp_path: Path, read: list[str]) -> None:
    whole = convert(lines, tmp_path / "whole")
    assert len(read) == N_INPUTS
    read.clear()
    interrupted(lines, tmp_path / "out", 5)
    n_read, updates = len(read), list[Progress]()
    resumed = convert(lines, tmp_path / "out", resume=True, progress=updates.append)
    assert n_read == 5 and len(read) < n_read + N_INPUTS
    assert set(read) == {source.name for source in whole.inputs}
    assert resumed.inputs == whole.inputs and resumed.n_bytes == whole.n_bytes
    assert (resumed.n_samples, resumed.generation) == (whole.n_samples, 1)
    assert (resumed.classes, resumed.n_samples_before) == (whole.classes, 0)
    assert [step.n_inputs_done for step in updates] == list(range(N_INPUTS + 1))


def test_an_interrupted_conversion_hints_and_hides_its_work(lines: Path, tmp_path: Path) -> None:
    (note,) = interrupted(lines, tmp_path / "out").__notes__
    assert "finished units are kept; resume (--resume) continues" in note
    assert os.listdir(tmp_path / "out") == [".conversion"]
    before = contents(tmp_path / "out")
    with pytest.raises(DatasetExists, match=r"interrupted .* resume \(--resume\) .* overwrite"):
        convert(lines, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_without_finished_units_nothing_is_left(lines: Path, tmp_path: Path) -> None:
    (note,) = interrupted(lines, tmp_path / "out", 1).__notes__
    assert "out: nothing is kept, because no unit was finished; a unit has consecutive" in note
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", ["new", "dataset"])
def test_resuming_without_samples_leaves_nothing(tmp_path: Path, lines: Path, folder: str) -> None:
    source, out, replaces = tmp_path / "none", tmp_path / "out", folder == "dataset"
    if replaces:
        convert(lines, out)
    before = contents(out)
    write(source, {"1.txt": "! and more", "2.txt": " " * 9, "3.txt": "! and more"})
    interrupted(source, out, 2, overwrite=replaces)
    assert (out / ".conversion").exists()
    report = convert(source, out, resume=True)
    assert list(outcomes(report).values()) == ["broken", "empty", "broken"]
    assert (report.n_samples, report.generation) == (0, 0)
    assert contents(out) == before and not (out / ".conversion").exists()
    write(source, {"1.txt": "one"})
    convert(source, out, overwrite=replaces)
    assert texts(out) == ["one"]


@pytest.mark.parametrize("n_inputs", [3, 5])
def test_conversions_may_be_interrupted_often(lines: Path, tmp_path: Path, n_inputs: int) -> None:
    interrupted(lines, tmp_path / "out", n_inputs)
    interrupted(lines, tmp_path / "out", n_inputs + 1, resume=True)
    interrupted(lines, tmp_path / "out", n_inputs, resume=True)
    check_resumes(lines, tmp_path / "out")


def test_a_resumed_conversion_stops_at_the_same_broken_input(lines: Path, tmp_path: Path) -> None:
    (lines / "b" / "3.txt").write_text("three !")
    whole = convert(lines, tmp_path / "whole", on_error="stop")
    interrupted(lines, tmp_path / "out", 3, on_error="stop")
    resumed = convert(lines, tmp_path / "out", on_error="stop", resume=True)
    assert resumed.stopped and outcomes(resumed) == outcomes(whole)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# What has changed meanwhile.


@pytest.mark.parametrize(
    ("change", "must_read"),
    [
        pytest.param({"a/1.txt": "new two"}, "a/1.txt", id="changed"),
        pytest.param({"a/1.txt": "one two and much more"}, "a/1.txt", id="longer"),
        pytest.param({"a/1.txt": None}, "a/2.txt", id="vanished"),
        pytest.param({"0.txt": "zero is new"}, "0.txt", id="appeared"),
        pytest.param({"0/0.txt": "zero is new"}, "0/0.txt", id="appeared with a class"),
    ],
)
def test_resuming_converts_the_current_source(
    lines: Path, tmp_path: Path, read: list[str], change: dict[str, str | None], must_read: str
) -> None:
    interrupted(lines, tmp_path / "out", 6)
    for name, content in change.items():
        if content is None:
            (lines / name).unlink()
        else:
            write(lines, {name: content})
    read.clear()
    convert(lines, tmp_path / "out", resume=True)
    assert must_read in read
    convert(lines, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_only_modified_units_are_converted(lines: Path, tmp_path: Path, read: list[str]) -> None:
    interrupted(lines, tmp_path / "out", 6)
    (lines / "a" / "1.txt").write_text("new two")  # as long as before
    read.clear()
    convert(lines, tmp_path / "out", resume=True)
    assert "a/1.txt" in read and "c/4.txt" not in read and "top.txt" in read


def test_a_change_that_keeps_size_and_mtime_is_noticed(lines: Path, tmp_path: Path) -> None:
    interrupted(lines, tmp_path / "out", 6)
    place = lines / "a" / "1.txt"
    status = place.stat()
    place.write_text("ONE TWO")
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    convert(lines, tmp_path / "out", resume=True)
    assert texts(tmp_path / "out")[:2] == ["ONE", "TWO"]


@pytest.mark.parametrize("suffix", [".shard", ".json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
def test_a_finished_unit_that_was_damaged_is_converted_again(
    lines: Path, tmp_path: Path, suffix: str, damage: str, read: list[str]
) -> None:
    interrupted(lines, tmp_path / "out", 6)
    read.clear()
    for path in (tmp_path / "out" / ".conversion").glob(f"*/*{suffix}"):
        if damage == "flipped":
            flip(path, path.stat().st_size // 2)
        elif damage == "truncated":
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.unlink()
    convert(lines, tmp_path / "out", resume=True)
    assert "a/1.txt" in read
    convert(lines, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_damaged_plan_is_an_error_and_can_be_overwritten(lines: Path, tmp_path: Path) -> None:
    interrupted(lines, tmp_path / "out")
    flip(tmp_path / "out" / ".conversion" / "plan.json", 30)
    before = contents(tmp_path / "out")
    with pytest.raises(DatasetCorrupt, match=r"plan\.json: .*; overwrite .* starts again"):
        convert(lines, tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == before
    convert(lines, tmp_path / "out", overwrite=True)
    assert len(texts(tmp_path / "out")) == 7


# Other settings.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"repeat": 2}, "converter.options.repeat was 1, is 2"),
        ({"keep_partial": True}, "keep_partial was False, is True"),
        ({"on_error": "stop"}, "on_error was 'skip', is 'stop'"),
        ({"shard_bytes": 999}, "shard_bytes was 268435456, is 999"),
    ],
)
def test_resume_conflicts(lines: Path, tmp_path: Path, options: dict[str, Any], named: str) -> None:
    interrupted(lines, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(InvalidArgument, match=f"{named}.*; use the original settings; overwrite"):
        convert(lines, tmp_path / "out", resume=True, **options)
    assert contents(tmp_path / "out") == before
    convert(lines, tmp_path / "out", resume=True)


@pytest.mark.parametrize(
    ("holder", "name", "value", "named"),
    [
        (Lines, "version", "8", r"converter\.version was '7', is '8'"),
        (Lines, "libraries", lambda _: {"alphabet": "27"}, r"versions\.alphabet was '26', is '27'"),
        (platform, "machine", lambda: "vax", "machine was '.*', is 'vax'"),
    ],
)
def test_resuming_needs_the_same_versions(
    lines: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holder: object,
    name: str,
    value: object,
    named: str,
) -> None:
    interrupted(lines, tmp_path / "out")
    monkeypatch.setattr(holder, name, value)
    before = contents(tmp_path / "out")
    with pytest.raises(InvalidArgument, match=named) as caught:
        convert(lines, tmp_path / "out", resume=True)
    assert "overwrite" in str(caught.value)
    assert contents(tmp_path / "out") == before


def test_resume_without_an_interrupted_conversion_starts_one(lines: Path, tmp_path: Path) -> None:
    convert(lines, tmp_path / "out", resume=True)
    assert len(texts(tmp_path / "out")) == 7


def test_resuming_a_complete_conversion_does_nothing(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "out", {"split": {"a": 0.5, "b": 0.5}}
    whole = convert(lines, out, **options)
    before = contents(out)
    report = convert(lines, out, resume=True, **options)
    assert (report.n_samples, report.n_samples_before, report.generation) == (0, 7, 1)
    renamed = {"converted": "duplicate"}
    assert report.counts == {renamed.get(each, each): n for each, n in whole.counts.items()}
    assert contents(out) == before
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    command = ["convert", str(tmp_path / "a.npy"), str(tmp_path / "set"), "--workers=0"]
    assert cli.main(command) == cli.main([*command, "--resume"]) == 0
    assert f"already complete: 3 samples in {tmp_path}/set" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "files", "named"),
    [
        ({"repeat": 2}, {}, r"converter\.options\.repeat was 1, is 2"),
        ({}, {"a/1.txt": "longer than before"}, r"a/1\.txt: 18 bytes, \d+ when it was converted"),
        ({}, {"new.txt": "new"}, r"new\.txt is a new input"),
        ({"split": {"a": 0.5}}, {}, "the subset 'a' has other samples"),
    ],
)
def test_a_dataset_of_another_conversion_is_not_resumed(
    lines: Path, tmp_path: Path, options: dict[str, Any], files: dict[str, str], named: str
) -> None:
    convert(lines, tmp_path / "out")
    before = contents(tmp_path / "out")
    write(lines, files)
    with pytest.raises(DatasetExists, match=f"already holds a dataset, which .*: {named}.*overwri"):
        convert(lines, tmp_path / "out", resume=True, **options)
    assert contents(tmp_path / "out") == before


# Overwriting.


def test_overwrite_starts_with_any_options(lines: Path, tmp_path: Path, read: list[str]) -> None:
    interrupted(lines, tmp_path / "out")
    read.clear()
    convert(lines, tmp_path / "out", overwrite=True, repeat=2)
    assert len(read) == N_INPUTS
    assert len(texts(tmp_path / "out")) == 14


def test_overwrite_replaces_a_dataset_by_a_complete_one(lines: Path, tmp_path: Path) -> None:
    convert(lines, tmp_path / "out", repeat=2, shard_bytes=5000)
    old = contents(tmp_path / "out")
    with shardio.open(tmp_path / "out") as opened:
        interrupted(lines, tmp_path / "out", overwrite=True)
        now = contents(tmp_path / "out")
        assert {name: now[name] for name in old} == old
        assert len(opened) == 14
    check_resumes(lines, tmp_path / "out")


def test_overwrite_replaces_only_datasets(lines: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", {"thesis.tex": "a year of work"})
    with pytest.raises(DatasetExists, match=r"thesis\.tex") as caught:
        convert(lines, tmp_path / "other", overwrite=True)
    assert str(caught.value).startswith(f"{tmp_path / 'other'}: ")
    assert contents(tmp_path / "other") == {"thesis.tex": b"a year of work"}
    for name in ("notes", "mine.shard"):
        out = tmp_path / f"out with {name}"
        convert(lines, out)
        write(out, {name: "mine"})
        with pytest.raises(DatasetExists, match=f"holds {name} beside the dataset"):
            convert(lines, out, overwrite=True)
        assert (out / name).exists() and len(texts(out)) == 7


def test_overwrite_refuses_a_dataset_of_unreadable_generations(lines: Path, tmp_path: Path) -> None:
    convert(lines, tmp_path / "out")
    flip(tmp_path / "out" / "generations" / "000001.json", 30)
    before = contents(tmp_path / "out")
    with pytest.raises(DatasetCorrupt, match=r"000001\.json"):
        convert(lines, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == before


def test_the_output_is_never_read_as_a_source(lines: Path, tmp_path: Path) -> None:
    report = convert(lines, tmp_path / "whole")
    interrupted(lines, lines / "out")
    assert convert(lines, lines / "out", resume=True).inputs == report.inputs
    assert contents(lines / "out") == contents(tmp_path / "whole")


# Workers that die.


@pytest.mark.parametrize("workers", [1, 2])
def test_an_input_that_kills_breaks_no_other(lines: Path, tmp_path: Path, workers: int) -> None:
    (lines / "c" / "4.txt").write_text("four !")
    broken = convert(lines, tmp_path / "broken")
    (lines / "c" / "4.txt").write_text("four kill")
    report = convert(lines, tmp_path / "out", workers=workers)
    assert outcomes(report) == outcomes(broken)
    (lost,) = report.broken
    assert (lost.name, lost.n_samples) == ("c/4.txt", 0)
    assert (
        lost.reason
        == "2 processes crashed while reading it; the last was killed by signal 9 (SIGKILL)"
    )
    shards = {name: c for name, c in contents(tmp_path / "out").items() if name.endswith(".shard")}
    assert shards.items() <= contents(tmp_path / "broken").items()


def test_two_such_inputs_in_one_unit_break_no_other(lines: Path, tmp_path: Path) -> None:
    write(lines, {"a/1.txt": "kill", "a/2.txt": "kill"})
    report = convert(lines, tmp_path / "out", workers=1)
    assert [source.name for source in report.broken] == ["a/1.txt", "a/2.txt"]
    assert texts(tmp_path / "out") == "three four five six seven".split()


def test_a_worker_that_crashes_once_breaks_nothing(lines: Path, tmp_path: Path) -> None:
    (lines / "c" / "4.txt").write_text(f"four once:{tmp_path}/ended six")
    report = convert(lines, tmp_path / "out", workers=2)
    assert (tmp_path / "ended").exists() and not report.broken
    convert(lines, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_on_error_stop_ends_at_an_input_that_crashes_workers(lines: Path, tmp_path: Path) -> None:
    (lines / "b" / "3.txt").write_text("kill")
    report = convert(lines, tmp_path / "out", workers=2, on_error="stop")
    assert report.stopped and texts(tmp_path / "out") == ["one", "two"]
    assert [source.name for source in report.broken] == ["b/3.txt"]
    assert "crashed while reading it" in report.broken[0].reason
    assert report.counts["not_processed"] == 4


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_conversion_killed_in_its_clean_up_is_resumed(
    lines: Path, tmp_path: Path, *, overwrite: bool
) -> None:
    out, finish, n_left = tmp_path / "out", Staging.finish, 0

    def act(*_: str) -> None:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise KeyboardInterrupt

    convert(lines, tmp_path / "whole")
    for limit in itertools.count():
        shutil.rmtree(out, ignore_errors=True)
        if overwrite:
            convert(lines, out, shard_bytes=77)
        n_left = limit
        with pytest.MonkeyPatch.context() as patch:
            watch = partial(before_calls, patch, act)
            patch.setattr(Staging, "finish", lambda self, watch=watch: (finish(self), watch()))
            with contextlib.suppress(KeyboardInterrupt):
                convert(lines, out, overwrite=overwrite)
                break
        if any(out.glob(".conversion/*")):
            assert len(convert(lines, out, resume=True).inputs) == N_INPUTS
            assert not (out / ".conversion").exists()
        assert contents(out) == contents(tmp_path / "whole")
    assert limit > 8
