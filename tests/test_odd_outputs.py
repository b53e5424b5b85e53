"""What lies in the folder of a conversion and is not its own, or is of a writer that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardio import DatasetExists, InvalidArgument
from shardio.sealed import sealed
from tests.lines import contents, convert, install, write

OPTIONS: tuple[dict[str, bool], ...] = ({}, {"resume": True}, {"overwrite": True}, {"append": True})


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path, monkeypatch)


def make_out(lines: Path, out: Path, options: dict[str, bool]) -> Path:
    """Where a conversion with these options can go; the folder in which it will work."""
    out.mkdir()
    if "append" in options:
        convert(lines, out)
    return out / ".conversion"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_folder_that_has_the_name_of_the_work_is_not_emptied(
    lines: Path, tmp_path: Path, options: dict[str, bool]
) -> None:
    place = make_out(lines, tmp_path / "out", options)
    write(place, {"thesis.tex": "a year of work"})
    before = contents(tmp_path / "out")
    with pytest.raises(DatasetExists, match=r"\.conversion: holds thesis\.tex .* choose another"):
        convert(lines, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_link_that_has_the_name_of_the_work_is_not_followed(
    lines: Path, tmp_path: Path, options: dict[str, bool]
) -> None:
    place = make_out(lines, tmp_path / "out", options)
    write(tmp_path / "elsewhere", {"plan.json": "mine", "0123456789abcdef/000.shard": "mine"})
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DatasetExists, match=r"\.conversion: expected a folder.*found a link"):
        convert(lines, tmp_path / "out", **options)
    assert {*contents(tmp_path / "elsewhere").values()} == {b"mine"}


def test_overwrite_replaces_a_dataset_beside_which_a_writer_was_killed(
    lines: Path, tmp_path: Path
) -> None:
    convert(lines, tmp_path / "out")
    before = contents(tmp_path / "out")
    halves = {".dataset.json.0123456789ab.tmp": "{", "generations/.000002.json.01.tmp": "{"}
    write(tmp_path / "out", {**halves, ".surgery-0a1b2c/000000.shard": "half"})
    convert(lines, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"resume": True}, r"overwrite \(--overwrite\) starts again"),
        ({"resume": True, "append": True}, r"to give it up, delete .*\.conversion: the dataset is"),
    ],
    ids=["conversion", "append"],
)
def test_a_plan_of_another_version_is_told_with_a_way_out_that_loses_nothing(
    lines: Path, tmp_path: Path, options: dict[str, bool], way_out: str
) -> None:
    place = make_out(lines, tmp_path / "out", options)
    place.mkdir()
    (place / "plan.json").write_bytes(sealed({"version": 1}))
    with pytest.raises(InvalidArgument, match=f"version 1 .* began; {way_out}") as caught:
        convert(lines, tmp_path / "out", **options)
    assert ("overwrite" in str(caught.value)) == ("append" not in options)
