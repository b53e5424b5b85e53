"""Output folders with foreign files, or with leftovers of a killed writer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import Array, InvalidArgument
from shardio.conversion import execution
from shardio.errors import DatasetExists, DatasetNotFound
from shardio.export import export
from shardio.maintenance import merge, reshard
from shardio.storage.fs import lock_folder, to_checksummed_json
from tests.faults.failing import before_calls
from tests.lines import OLD, contents, convert, leave_killed, texts, write

OPTIONS: tuple[dict[str, bool], ...] = ({}, {"resume": True}, {"overwrite": True}, {"append": True})


def create_out(lines: Path, out: Path, options: dict[str, bool]) -> Path:
    """Create an output folder that suits the options; return its work folder."""
    out.mkdir()
    if "append" in options:
        convert(lines, out)
    return out / ".conversion"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_foreign_work_folders_stay(lines: Path, tmp_path: Path, options: dict[str, bool]) -> None:
    place = create_out(lines, tmp_path / "out", options)
    write(place, {"thesis.tex": "a year of work"})
    before = contents(tmp_path / "out")
    with pytest.raises(DatasetExists, match=r"\.conversion: holds thesis\.tex .* choose another"):
        convert(lines, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_linked_work_folders_stay(lines: Path, tmp_path: Path, options: dict[str, bool]) -> None:
    place = create_out(lines, tmp_path / "out", options)
    write(tmp_path / "elsewhere", {"plan.json": "mine", "0123456789abcdef/000.shard": "mine"})
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DatasetExists, match=r"\.conversion: expected a folder.*found a link"):
        convert(lines, tmp_path / "out", **options)
    assert {*contents(tmp_path / "elsewhere").values()} == {b"mine"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_running_operation_is_named_and_a_killed_one_is_removed(
    lines: Path, tmp_path: Path, *, overwrite: bool
) -> None:
    out = tmp_path / "out"
    write(out, {".shardio-staging-0a1b2c3d/000000.shard": "half"})
    lock = lock_folder(out / ".shardio-staging-0a1b2c3d")
    before = contents(out)
    with pytest.raises(DatasetExists, match="out: another operation is writing here; wait for it"):
        convert(lines, out, overwrite=overwrite)
    assert contents(out) == before
    os.close(lock)
    convert(lines, out, overwrite=overwrite)
    assert not list(out.glob(".*"))


def test_an_interrupted_conversion_is_named(lines: Path, tmp_path: Path) -> None:
    convert(lines, tmp_path / "source")
    write(tmp_path / "out", {".conversion/plan.json": "{}"})
    before = contents(tmp_path / "out")
    with pytest.raises(DatasetExists, match=r"holds an interrupted conversion, .*\(--resume\)"):
        merge(tmp_path / "out", tmp_path / "source")
    with pytest.raises(DatasetNotFound, match="holds a conversion that is running or was inter"):
        shardio.open(tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_overwrite_replaces_leftovers_of_a_killed_writer(lines: Path, tmp_path: Path) -> None:
    convert(lines, tmp_path / "out")
    before = contents(tmp_path / "out")
    halves = {".dataset.json.0123456789ab.tmp": "{", "generations/.000002.json.01.tmp": "{"}
    write(tmp_path / "out", {**halves, ".shardio-staging-0a1b2c/000000.shard": "half"})
    convert(lines, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"resume": True}, r"overwrite \(--overwrite\) starts again"),
        ({"resume": True, "append": True}, r"to abandon it, delete .*\.conversion: the dataset is"),
    ],
    ids=["conversion", "append"],
)
def test_a_plan_of_another_version_is_an_error_with_a_hint_that_loses_nothing(
    lines: Path, tmp_path: Path, options: dict[str, bool], hint: str
) -> None:
    place = create_out(lines, tmp_path / "out", options)
    place.mkdir()
    (place / "plan.json").write_bytes(to_checksummed_json({"version": 1}))
    message = f"version 1 .* started the conversion; {hint}"
    with pytest.raises(InvalidArgument, match=message) as caught:
        convert(lines, tmp_path / "out", **options)
    assert ("overwrite" in str(caught.value)) == ("append" not in options)


@pytest.fixture
def killed_append(lines: Path, tmp_path: Path) -> Path:
    """Return a dataset with an append that was killed after its shards got their names."""
    convert(lines, tmp_path / "out")
    write(lines, {"z/8.txt": "eight"})
    leave_killed(lines, tmp_path / "out", execution, "publish_next", append=True)
    return tmp_path / "out"


@pytest.fixture
def killed_replacement(lines: Path, tmp_path: Path) -> Path:
    """Return a folder in which a conversion was killed after moving the old dataset away."""
    convert(lines, tmp_path / "out")
    leave_killed(lines, tmp_path / "out", execution, "publish", overwrite=True)
    return tmp_path / "out"


@pytest.mark.parametrize("options", [{"append": True}, {"overwrite": True}], ids=str)
def test_only_own_files_removed(lines: Path, killed_append: Path, options: dict[str, bool]) -> None:
    (name,) = (path.name for path in killed_append.glob("g000002-*.shard"))
    another = killed_append / name.replace("g000002", "g000003")
    shutil.copyfile(killed_append / name, another)
    with pytest.raises(DatasetExists, match="beside the dataset|interrupted append"):
        convert(lines, killed_append, **options)
    assert not (killed_append / name).exists() and another.exists()


def test_a_dataset_being_replaced_takes_no_append(lines: Path, killed_replacement: Path) -> None:
    with pytest.raises(DatasetNotFound, match=r"resume it \(--resume\) before appending"):
        convert(lines, killed_replacement, append=True)
    convert(lines, killed_replacement, resume=True)
    assert texts(killed_replacement) == OLD


def test_a_replaced_dataset_returns_with_its_pointer_last(
    lines: Path, killed_replacement: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[str] = []
    before_calls(monkeypatch, lambda kind, path: restored.append(path))
    convert(lines, killed_replacement, resume=True)
    places = [
        restored.index(str(killed_replacement / name)) for name in ("generations", "dataset.json")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_none_is_its_own_source(lines: Path, tmp_path: Path, options: dict[str, bool]) -> None:
    convert(lines, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(InvalidArgument, match="out: is the output folder"):
        convert(tmp_path / "out", tmp_path / "out", **options)
    assert contents(tmp_path / "out") == before


def test_an_impossible_out_is_an_error(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.conversion.staging.LOCK_TIMEOUT_S", 0)
    with pytest.raises(FileNotFoundError, match="/proc/none"):  # the kernel's own: no entry is made
        convert(lines, Path("/proc/none/out"))


@pytest.mark.parametrize("source", ["files", "samples"])
@pytest.mark.parametrize("out", ["", "a\0b", "a\ud800b"])
def test_invalid_names(lines: Path, monkeypatch: pytest.MonkeyPatch, source: str, out: str) -> None:
    (lines / "cwd").mkdir()
    monkeypatch.chdir(lines / "cwd")
    message = r"out \(OUT\) is (empty|'a.*, not a valid folder name|'a.* not a valid file name)"
    with pytest.raises(InvalidArgument, match=message):
        shardio.convert(lines if source == "files" else [{"x": 1}], out)
    assert not [*Path().iterdir()]


def test_a_url_that_is_no_text_or_not_for_convert_is_not_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"'s3:/bucket/set', a URL without its second slash"):
        shardio.convert([{"x": 1}], Path("s3://bucket/set"))
    with pytest.raises(InvalidArgument, match=r"a URL: only shardio\.convert writes to an object"):
        shardio.DatasetWriter("s3://bucket/set", shardio.Schema({"x": Array("int64")}))
    nothing: Any = None
    with pytest.raises(InvalidArgument, match="out must be the path of a folder; found None"):
        shardio.convert([{"x": 1}], nothing)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "run",
    [
        lambda made: reshard(made, ""),
        lambda made: merge("", made),
        lambda made: export(made, "", "files"),
        lambda _: shardio.DatasetWriter("", shardio.Schema({"x": Array("int64")})),
    ],
    ids=["reshard", "merge", "export", "write"],
)
def test_an_empty_name_fails(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Path], object]
) -> None:
    made = tmp_path / "made"
    convert(lines, made)
    (lines / "cwd").mkdir()
    monkeypatch.chdir(lines / "cwd")
    with pytest.raises(InvalidArgument, match="is empty; expected the name of a folder"):
        run(made)
    assert not [*Path().iterdir()]
