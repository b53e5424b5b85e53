"""The option `split`: samples of a conversion are assigned to subsets at random."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import InvalidArgument
from shardio.maintenance import split
from shardio_tools import cli
from tests.lines import write

PARTS = {"train": 0.7, "val": 0.2, "test": 0.1}


def rows_of(out: Path, subset: str) -> list[int]:
    with shardio.open(out, subset=subset) as dataset:
        return [int(sample["x"]) for sample in dataset]


def numbers(n: int) -> Iterator[dict[str, Any]]:
    return ({"x": i} for i in range(n))


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    for k in range(8):
        rows = "\n".join(str(5 * k + i) for i in range(5))
        write(tmp_path / "in", {f"{k}.csv": f"x\n{rows}\n"})
    return tmp_path / "in"


@pytest.mark.process
def test_files_items_and_samples_are_split_as_by_the_command(tables: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"split": PARTS, "split_seed": 3}
    shardio.convert(tables, tmp_path / "files", workers=0, **options)
    shardio.convert(tables, tmp_path / "workers", workers=2, **options)
    shardio.convert(range(40), tmp_path / "items", samples=lambda i: {"x": i}, **options)
    shardio.convert(numbers(40), tmp_path / "samples", **options)
    shardio.convert({"x": [*range(40)]}, tmp_path / "arrays", **options)
    shardio.convert(numbers(40), tmp_path / "later")
    known = split(tmp_path / "later", PARTS, seed=3)
    assert known.n_samples == {"train": 28, "val": 8, "test": 4}
    for name in ("files", "workers", "items", "samples", "arrays"):
        for subset in PARTS:
            assert rows_of(tmp_path / name, subset) == rows_of(tmp_path / "later", subset)
    shardio.convert(numbers(40), tmp_path / "other", split=PARTS, split_seed=4)
    assert rows_of(tmp_path / "other", "val") != rows_of(tmp_path / "later", "val")


def test_shares_below_1_leave_samples_in_no_subset(tmp_path: Path) -> None:
    report = shardio.convert(numbers(40), tmp_path / "out", split={"a": 0.25, "b": 0.5})
    assert report.subsets == {"a": 10, "b": 20} and report.n_samples == 40
    assert not {*rows_of(tmp_path / "out", "a")} & {*rows_of(tmp_path / "out", "b")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": {"a": 0.8, "b": 0.4}}, r"must add up to 1 or less; found 1\.2"),
        ({"split": {"a": 1.5}}, "'a': a share must be above 0 and at most 1; found 1.5"),
        ({"split": {"a": -0.5}}, "a share must be above 0"),
        ({"split": {"a": "0.5"}}, "a share must be above 0"),
        ({"split": {}}, "split must map names to their shares"),
        ({"split": 0.9}, "split must map names to their shares"),
        ({"split": {"": 0.9}}, "printable text"),
        ({"split": {"a": 0.5}, "split_seed": -1}, "split_seed must be an integer from 0 up"),
        ({"split_seed": 1}, "only together with split"),
        ({"split": {"a": 0.5}, "append": True}, "split and append are mutually exclusive"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    for source in (numbers(9), {"x": [1, 2]}):
        with pytest.raises(InvalidArgument, match=said):
            shardio.convert(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


def test_an_empty_subset_publishes_nothing(tables: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"split": {"a": 0.999, "b": 0.001}}
    with pytest.raises(InvalidArgument, match="'b' would have no sample: there are 40 samples"):
        shardio.convert(numbers(40), tmp_path / "samples", **options)
    assert not (tmp_path / "samples").exists()
    with pytest.raises(InvalidArgument, match="'b' would have no sample"):
        shardio.convert(tables, tmp_path / "out", workers=0, **options)
    assert not (tmp_path / "out" / "dataset.json").exists()
    # What is converted is kept, and can be split otherwise.
    report = shardio.convert(tables, tmp_path / "out", workers=0, resume=True, split={"a": 0.5})
    assert report.subsets == {"a": 20}


def test_the_command_splits(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(tables), str(tmp_path / "out"), "--workers=0"]
    assert cli.main([*command, "--split", "train=0.9, val=0.1", "--split-seed=7"]) == 0
    said = capsys.readouterr().out.splitlines()
    after = said.index("2 subsets, at random")
    table = ["  subset  samples", "  train        36", "  val           4"]
    assert said[after + 1 : after + 4] == table
    assert cli.main(["inspect", str(tmp_path / "out"), "--verbose"]) == 0
    assert 'made by     split group=null parts={"train": 0.9, "val": 0.1} seed=7' in (
        capsys.readouterr().out
    )
    assert cli.main([*command, "--overwrite", "--split", "a=0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["subsets"] == {"a": 20}
    for nonsense in ("train", "train=0.9;val=0.1", "train=0.9 val=0.1", "train=90%", "=1"):
        with pytest.raises(SystemExit):
            cli.main([*command, "--split", nonsense])
        assert "expected NAME=SHARE, as in train=0.9" in capsys.readouterr().err
