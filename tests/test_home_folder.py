"""A leading `~` in a path is the home folder, as in a shell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardio
from shardio import maintenance
from shardio.export import export
from shardio.map_view import MapView
from shardio_tools.cli import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a new folder the home folder, and another one the working folder."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    return home


SAMPLES = [{"n": 1}, {"n": 2}]


def test_a_tilde_is_the_home_folder(home: Path) -> None:
    shardio.convert(SAMPLES, "~/set")
    with shardio.open("~/set") as dataset:
        assert (len(dataset), dataset.path) == (2, f"{home}/set")
    with shardio.ShardLoader(Path("~/set"), 2, output="numpy", num_workers=0) as loader:
        assert next(iter(loader))["n"].tolist() == [1, 2]
    with MapView("~/set") as view:
        assert len(view) == 2
    maintenance.merge("~/twice", "~/set", "~/set")
    export("~/set", "~/tars", "webdataset")
    with shardio.DatasetWriter("~/written", shardio.Schema({"n": shardio.Array("int64")})) as out:
        out.append(SAMPLES[0])
    (shard,) = (home / "written").glob("**/*.shard")
    with shardio.ShardReader(f"~/{shard.relative_to(home)}") as reader:
        assert len(reader) == 1
    assert sorted(os.listdir(home)) == ["set", "tars", "twice", "written"]
    assert os.listdir() == []


def test_files_and_labels_may_lie_in_the_home_folder(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "rows").mkdir()
    (home / "rows" / "a.csv").write_text("n\n1\n2\n")
    assert main(["convert", "~/rows", "~/set", "--workers", "0"]) == 0
    assert f"{home}/set" in capsys.readouterr().out
    assert main(["inspect", "~/set"]) == 0
    assert os.listdir() == []


def test_a_folder_with_such_a_name_is_reached_with_its_path(home: Path) -> None:
    shardio.convert(SAMPLES, "./~")
    with shardio.open("./~") as dataset:
        assert len(dataset) == 2
    assert os.listdir() == ["~"]
    assert not any(home.iterdir())
