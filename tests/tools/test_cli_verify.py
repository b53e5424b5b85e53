from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardio_tools import cli
from tests.shards import flip

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def damaged(dataset: Path, tmp_path: Path) -> Path:
    """Return a copy of the dataset with one bit of the first shard's first sample flipped."""
    copy = tmp_path / "damaged"
    shutil.copytree(dataset, copy)
    flip(min(copy.glob("*.shard")), 4096 + 100)
    return copy


def test_a_sound_dataset_is_said_to_be_so(dataset: Path, capsys: Capture) -> None:
    assert cli.main(["verify", str(dataset), "--workers", "0"]) == 0
    out, err = capsys.readouterr()
    n_shards = len(list(dataset.glob("*.shard")))
    assert out.startswith(f"verified {n_shards} shards, ") and out.count("\n") == 1
    assert out.endswith(f": no damage found: {dataset}\n")
    assert "verifying: 100%" in err


@pytest.mark.process
def test_a_flipped_bit_names_file_field_and_offset(damaged: Path, capsys: Capture) -> None:
    assert cli.main(["verify", str(damaged), "--workers", "2"]) == 1
    finding, summary = capsys.readouterr().out.splitlines()
    assert finding.startswith(f"{damaged}/000000-000.shard: ")
    assert "field 'frames', sample 0, offset 4096" in finding
    assert "1 finding in 1 file" in summary


def test_one_shard_can_be_verified_alone(damaged: Path, capsys: Capture) -> None:
    first, *rest = sorted(damaged.glob("*.shard"))
    assert cli.main(["verify", str(first)]) == 1
    assert "field 'frames'" in capsys.readouterr().out
    assert cli.main(["verify", str(rest[0])]) == 0
    assert "verified 1 shard, " in capsys.readouterr().out


def test_the_json_report_holds_the_findings(damaged: Path, capsys: Capture) -> None:
    assert cli.main(["verify", str(damaged), "--json"]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    (finding,) = report["findings"]
    assert (finding["field"], finding["sample"], finding["offset"]) == ("frames", 0, 4096)
    assert captured.err == ""
    assert cli.main(["verify", str(min(damaged.glob("*.shard"))), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 1


def test_quiet_prints_findings_only(dataset: Path, damaged: Path, capsys: Capture) -> None:
    assert cli.main(["verify", str(dataset), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert cli.main(["verify", str(damaged), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1


def test_other_files_are_listed_as_no_error(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    (copy / "notes.txt").touch()
    assert cli.main(["verify", str(copy)]) == 0
    assert "not part of the dataset: notes.txt" in capsys.readouterr().out.splitlines()


def test_what_does_not_exist_is_one_line_and_exit_code_2(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["verify", str(tmp_path / "no")]) == 2
    assert cli.main(["verify", str(tmp_path)]) == 2
    assert cli.main(["verify", str(tmp_path), "--workers", "-1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 3


@pytest.mark.parametrize("option", [("--workers", "1"), ("--engine", "ray")])
def test_a_shard_has_fewer_options(dataset: Path, capsys: Capture, option: tuple[str, str]) -> None:
    assert cli.main(["verify", str(min(dataset.glob("*.shard"))), *option]) == 2
    assert "are for datasets, not for one shard" in capsys.readouterr().err
