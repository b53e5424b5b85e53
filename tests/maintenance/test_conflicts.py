"""All operations: their progress, and errors for shards that another writer has removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardio import Array, ShardDataset
from shardio.dataset.manifest import load, publish_next
from shardio.errors import (
    DataError,
    DatasetConflict,
    DatasetCorrupt,
    DatasetNotFound,
    ShardNotFound,
)
from shardio.export import export
from shardio.format.layout import Kind
from shardio.maintenance import (
    MaintenanceProgress,
    add_column,
    compact,
    compute_stats,
    diff,
    merge,
    repair,
    reshard,
    split,
    verify_dataset,
)
from tests.maintenance.datasets import LABELS, labelled, place, shard_of, write
from tests.shards import flip

Options = dict[str, Any]
OPERATIONS: dict[str, tuple[str, Callable[[Path, Path, Options], Any]]] = {
    "add_column": (
        "writing",
        lambda source, _, options: add_column(source, "n", Array("int64"), len, **options),
    ),
    "compact": ("verifying writing", lambda source, _, options: compact(source, **options)),
    "diff": ("", lambda source, *_: diff(source, source)),
    "export": ("", lambda source, out, _: export(source, out, "files")),
    "merge": ("verifying writing", lambda source, out, options: merge(out, source, **options)),
    "reshard": ("verifying writing", lambda source, out, options: reshard(source, out, **options)),
    "split": ("", lambda source, *_: split(source, {"a": 0.5, "b": 0.5}, group="source")),
    "stats": (
        "counting",
        lambda source, _, options: compute_stats(source, progress=options.get("progress")),
    ),
}
"""The steps of each operation that reports its progress, and a function that does it."""
WITH_PROGRESS = {name: each for name, each in OPERATIONS.items() if each[0]} | {
    "add_column, values": (
        "writing",
        lambda source, _, options: add_column(
            source, "n", Array("int64"), range(6), progress=options["progress"]
        ),
    ),
    "repair": (
        "repairing",
        lambda source, out, options: repair(source, out, progress=options["progress"]),
    ),
    "verify": ("verifying", lambda source, _, options: verify_dataset(source, **options)),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "a", 6, 3, schema=LABELS, samples=labelled(6))


def intrude(monkeypatch: pytest.MonkeyPatch, writer: Callable[[Path], object]) -> None:
    """Run a writer once, as soon as a dataset is open, before its shards are."""
    is_done, init = False, ShardDataset.__init__

    def interrupted(self: ShardDataset, folder: Any, **options: Any) -> None:
        nonlocal is_done
        init(self, folder, **options)
        if not is_done:
            is_done = True
            writer(Path(folder))

    monkeypatch.setattr(ShardDataset, "__init__", interrupted)


def clean_up(folder: Path) -> None:
    compact(folder, remove_old=True, workers=0)


def count(folder: Path) -> None:
    publish_next(folder, load(folder), stats={"whole": {}})


@pytest.mark.process
@pytest.mark.parametrize("name", sorted(WITH_PROGRESS))
@pytest.mark.parametrize("workers", [0, 1])
def test_progress_reports_steps(source: Path, tmp_path: Path, name: str, workers: int) -> None:
    told, sizes = list[MaintenanceProgress](), [s.n_bytes for s in load(source).shards]
    steps, call = WITH_PROGRESS[name]
    call(source, tmp_path / "out", {"workers": workers, "progress": told.append})
    assert list(dict.fromkeys(state.step for state in told)) == steps.split()
    for step in steps.split():
        states = [state for state in told if state.step == step]
        assert [state.n_shards_done for state in states] == [0, 1, 2, 3]
        assert {(state.n_shards, state.n_bytes) for state in states} == {(3, sum(sizes))}
        n_bytes = [state.n_bytes_done for state in states]
        assert (n_bytes[0], n_bytes[-1]) == (0, sum(sizes)) and n_bytes == sorted(n_bytes)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_folder_without_a_dataset_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatasetNotFound) as caught:
        OPERATIONS[name][1](tmp_path / "no", tmp_path / "out", {})
    assert str(caught.value).startswith(f"{tmp_path / 'no'}: there is no such folder")
    assert not (tmp_path / "no").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_removed_shards_conflict(source: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    intrude(monkeypatch, clean_up)
    with pytest.raises(DatasetConflict, match="published generation 2 .* removed shards") as caught:
        OPERATIONS[name][1](source, source.with_name("out"), {})
    assert isinstance(caught.value.__cause__, DatasetCorrupt | FileNotFoundError)
    assert load(source).number == 2
    assert not (source.with_name("out")).exists()
    assert not list(source.glob(".shardio-staging-*"))


@pytest.mark.parametrize("name", ["compact", "stats"])
def test_damage_is_no_conflict(source: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(shard_of(source, 1), place(shard_of(source, 1), Kind.COLUMN, "label")[0])
    intrude(monkeypatch, count)
    with pytest.raises(DataError, match="hash|match") as caught:
        OPERATIONS[name][1](source, source.with_name("out"), {})
    assert shard_of(source, 1).name in str(caught.value)
    assert load(source).operation == {}
    assert not list(source.glob(".shardio-staging-*"))


@pytest.mark.parametrize("name", ["compact", "stats"])
def test_gone_shard_is_missing(source: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    intrude(monkeypatch, lambda folder: shard_of(folder, 1).unlink())
    with pytest.raises((DatasetCorrupt, ShardNotFound), match=r"000000-001\.shard"):
        OPERATIONS[name][1](source, source.with_name("out"), {})


@pytest.mark.parametrize("name", ["repair", "verify"])
def test_concurrently_removed_shards_conflict(source: Path, tmp_path: Path, name: str) -> None:
    def told(state: MaintenanceProgress) -> None:
        if state.n_shards_done == 1:
            clean_up(source)

    with pytest.raises(DatasetConflict, match="removed shards"):
        WITH_PROGRESS[name][1](source, tmp_path / "out", {"progress": told})
    assert not (tmp_path / "out").exists()
    report = WITH_PROGRESS[name][1](source, tmp_path / "out", {"progress": None})
    assert report.is_whole if name == "repair" else not report.findings


def test_an_audit_tells_damage_though_another_writer_has_published(source: Path) -> None:
    flip(shard_of(source, 1), place(shard_of(source, 1), Kind.COLUMN, "label")[0])
    assert verify_dataset(source, workers=0, progress=lambda _: count(source)).findings
