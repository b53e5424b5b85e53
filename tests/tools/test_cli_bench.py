"""`shardio bench`: the form of what it prints, its options and exit codes; not how fast it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import shardio
from shardio_tools import cli
from tests.media_made import scene, write_video

Capture = pytest.CaptureFixture[str]
QUICK = ["--seconds", "0.01", "--batch-size", "2"]


@pytest.mark.process
def test_a_table_of_runs_and_their_limits(dataset: Path, capsys: Capture) -> None:
    assert cli.main(["bench", str(dataset), "--workers", "0", "1", *QUICK]) == 0
    out, err = capsys.readouterr()
    head, *lines = out.splitlines()
    assert head.split() == "workers samples/s first GB/s limit of limit waiting ready".split()
    assert [line.split()[0] for line in lines[:2]] == ["0", "1"]
    assert sum("limited by" in line for line in lines) == 2
    assert [line for line in lines if line.startswith("First reading: limited by ")]
    assert [line for line in lines if line.startswith("  → ")]
    assert any(line.startswith("samples/s and GB/s: read from memory; first: ") for line in lines)
    assert lines[-1].startswith("measured 5 samples in batches of 2, 2 runs on ")
    assert lines[-1].endswith(f": {dataset}")
    assert err.splitlines() == ["measuring with 0 workers", "measuring with 1 worker"]


def test_clips_of_videos_are_counted_as_such(tmp_path: Path, capsys: Capture) -> None:
    write_video(tmp_path / "videos" / "a.mp4", scene(24))
    shardio.convert(tmp_path / "videos", tmp_path / "out", kind="videos", frames=8, workers=0)
    assert cli.main(["bench", str(tmp_path / "out"), "--workers", "0", *QUICK]) == 0
    head, *_, last = capsys.readouterr().out.splitlines()
    assert head.split()[1] == "clips/s"
    assert last.startswith("measured 3 clips of 1 video in batches of 2, 1 run on ")


def test_as_json_there_is_nothing_but_json(dataset: Path, capsys: Capture) -> None:
    assert cli.main(["bench", str(dataset), "--workers", "0", "--json", *QUICK]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert (said["n_samples"], said["batch_size"]) == (5, 2)
    assert said["runs"][0]["warm"]["n_samples"] > 0
    assert err == ""


@pytest.mark.parametrize("option", ["--quiet", "--workers=0"])
def test_saved_trace_is_named(option: str, dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.json"
    more = ["--workers", "0", "--trace", str(path), option]
    assert cli.main(["bench", str(dataset), *more, *QUICK]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(path.read_text())["traceEvents"]) > 2
    if option == "--quiet":
        assert out == err == ""
    else:
        assert out.splitlines()[-1] == f"traced: {path}; https://ui.perfetto.dev draws it"


def test_only_the_fields_that_are_named_are_read(dataset: Path, capsys: Capture) -> None:
    n_bytes = {}
    for fields in ("label", "label,frames"):
        more = ["--workers", "0", "--json", "--fields", fields]
        assert cli.main(["bench", str(dataset), *more, *QUICK]) == 0
        warm = json.loads(capsys.readouterr().out)["runs"][0]["warm"]
        n_bytes[fields] = warm["n_bytes"] / warm["n_samples"]
    assert n_bytes["label"] == 8
    assert n_bytes["label,frames"] > 8


def test_on_a_device_batches_are_tensors(dataset: Path, capsys: Capture) -> None:
    more = ["--workers", "0", "--quiet", "--fields", "label"]
    assert cli.main(["bench", str(dataset), *more, "--device", "PYTHON", *QUICK]) == 0
    assert cli.main(["bench", str(dataset), *more, "--device", "NOWHERE", *QUICK]) != 0
    assert "NOWHERE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seconds", "0"], "seconds must be above 0 and finite; found"),
        (["--seconds", "nan"], "seconds must be above 0 and finite; found"),
        (["--batch-size", "0"], "batch_size must be an integer from 1 up; found 0"),
        (["--workers", "-1"], "num_workers must be an integer from 0 to 1024; found -1"),
        (["--fields", "nothing"], "fields must be different names among"),
        (["--subset", "nothing"], "nothing"),
    ],
)
def test_usage_errors(dataset: Path, capsys: Capture, more: list[str], said: str) -> None:
    assert cli.main(["bench", str(dataset), *more]) == cli.USAGE
    assert said in capsys.readouterr().err


def test_only_samples_of_the_subset(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    dataset = shutil.copytree(dataset, tmp_path / "copy")  # others use it, too
    assert cli.main(["split", str(dataset), "--parts", "train=0.6,rest=0.4", "--quiet"]) == 0
    more = ["--workers", "0", "--json", "--subset", "train"]
    assert cli.main(["bench", str(dataset), *more, *QUICK]) == 0
    assert json.loads(capsys.readouterr().out)["n_samples"] == 3


def test_unsaved_trace_keeps_the_report(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    more = ["--workers", "0", "--trace", str(tmp_path / "nowhere" / "trace.json")]
    assert cli.main(["bench", str(dataset), *more, *QUICK]) == 3
    out, err = capsys.readouterr()
    assert "measured 5 samples" in out
    assert "nowhere/trace.json" in err
