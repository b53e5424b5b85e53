"""Repair: every undamaged sample is saved, every other one is named, the source stays as it is."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardio import Array
from shardio import open as open_dataset
from shardio.dataset.manifest import load
from shardio.errors import DatasetCorrupt, DatasetExists, DatasetNotFound, ShardNotFound
from shardio.format.layout import PAGE, Kind
from shardio.maintenance import Loss, RepairReport, add_column, repair, verify_dataset
from tests.maintenance.datasets import place, shard_of, tree, write
from tests.shards import as_read, every_field_sample, flip, same_sample, write_shard

N, N_SHARDS = 12, 3
PER_SHARD = N // N_SHARDS


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "data"
    return write(folder, N, N_SHARDS, classes=["a", "b"])


@pytest.fixture
def source(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "source"))


def repaired(source: Path, expected: list[int]) -> RepairReport:
    """Repair, and make sure that just those samples are saved, and that the source is as before."""
    before = tree(source) if source.is_dir() else {}
    out = (source if source.is_dir() else source.parent).with_name("out")
    report = repair(source, out)
    if source.is_dir():
        assert tree(source) == before
    with open_dataset(out) as dataset:
        found = list(dataset)
        assert [int(sample["label"]) for sample in found] == expected
        for i, sample in zip(expected, found, strict=True):
            assert same_sample(sample, as_read(every_field_sample(i)))
        assert [dict(entry) for entry in dataset.inputs] == [s.as_json() for s in report.shards]
        assert dataset.operation["name"] == "repair"
    assert verify_dataset(out, workers=0).findings == ()
    assert verify_dataset(out, workers=0).unknown == ()
    assert report.n_samples == len(expected)
    assert (report.source, report.dataset) == (str(source), out)
    assert report.as_json() == {
        "source": str(source),
        "dataset": str(out),
        "samples": len(expected),
        "lost": report.n_lost,
        "shards": [shard.as_json() for shard in report.shards],
    }
    assert sum(shard.n_kept for shard in report.shards) == len(expected)
    return report


def outcomes(report: RepairReport) -> list[str]:
    return [shard.outcome for shard in report.shards]


def test_of_a_sound_dataset_all_is_saved_byte_for_byte(source: Path, tmp_path: Path) -> None:
    report = repaired(source, [*range(N)])
    assert (report.is_whole, report.n_lost, outcomes(report)) == (True, 0, ["sound"] * 3)
    for k in range(N_SHARDS):
        assert shard_of(tmp_path / "out", k).read_bytes() == shard_of(source, k).read_bytes()
    assert load(tmp_path / "out").classes == ("a", "b")
    assert report.shards[0].as_json() == {
        "path": "000000-000.shard",
        "outcome": "sound",
        "samples": PER_SHARD,
    }
    assert repr(report.shards[0]).startswith("ShardRepair(")
    assert f"{N_SHARDS} sound shards" in repr(report)


Offsets = Callable[[Path], list[int]]


def at(*offsets: int) -> Offsets:
    """Return a function of a path that returns offsets; negative ones count from the end."""
    return lambda path: [offset % path.stat().st_size for offset in offsets]


def inside(
    kind: Kind, field: str | None = None, of_kind: int = 0, *, row: int = 0, plus: int = 0
) -> Offsets:
    """Return a function that returns the offset of a row in a section, plus some bytes."""

    def offsets(path: Path) -> list[int]:
        offset, size = place(path, kind, field, of_kind)
        return [offset + row * size // PER_SHARD + plus]

    return offsets


def both(*parts: Offsets) -> Offsets:
    return lambda path: [offset for part in parts for offset in part(path)]


FIRST, LAST = "the first page is restored from the last", "the last page is restored from the first"
HASHES, BLOCKS = Kind.COLUMN_HASHES, Kind.BLOCK_HASHES


@pytest.mark.parametrize(
    ("damage", "mended"),
    [
        (at(0), FIRST),
        (at(90, 2000), FIRST),
        (at(-PAGE), LAST),
        (at(-1), LAST),
        (inside(HASHES, "frames"), "hashes of field 'frames' are computed again"),
        (inside(HASHES, "label"), "hashes of field 'label' are computed again"),
        (inside(BLOCKS, "frames", HASHES), "hashes of section column_hashes are computed"),
        (inside(BLOCKS, "label", HASHES), "hashes of section column_hashes are computed"),
        (inside(BLOCKS, None, Kind.INDEX), "hashes of section index are computed again"),
        (inside(Kind.SCHEMA, plus=9), "the schema is that of the dataset"),
        (inside(Kind.COLUMN, "odd", plus=2101), None),  # padding between rows
    ],
    ids=range(11),
)
def test_redundant_parts_are_restored(source: Path, damage: Offsets, mended: str | None) -> None:
    path = shard_of(source, 1)
    flip(path, *damage(path))
    (_, shard, _) = repaired(source, [*range(N)]).shards
    assert shard.losses == []
    assert [note[: len(mended or "")] for note in shard.mended] == ([mended] if mended else [])


@pytest.mark.parametrize(
    ("damage", "lost", "reason"),
    [
        (at(20, 20 - PAGE), [0, 1, 2, 3], "header"),
        (inside(Kind.COLUMN, "frames", row=2), [2], "'frames': the data of a sample does not"),
        (inside(Kind.COLUMN, "label"), [0, 1, 2, 3], "field 'label': "),  # small rows share a hash
        (inside(Kind.PAYLOAD), [0], "field 'packed': "),
        # A hash is not made to fit damaged rows.
        (both(inside(HASHES, "frames"), inside(Kind.COLUMN, "frames", row=1)), [0, 1, 2, 3], ""),
    ],
)
def test_damage_loses_its_rows(source: Path, damage: Offsets, lost: list[int], reason: str) -> None:
    path = shard_of(source, 1)
    flip(path, *damage(path))
    rows = [i for i in range(N) if i - PER_SHARD not in lost]
    report = repaired(source, rows)
    outcome = "lost" if len(lost) == PER_SHARD else "damaged"
    assert outcomes(report) == ["sound", outcome, "sound"]
    assert (report.n_lost, report.is_whole) == (len(lost), False)
    (loss,) = report.shards[1].losses
    assert (loss.first, loss.last, loss.n_samples) == (lost[0], lost[-1], len(lost))
    assert reason in loss.reason
    assert str(source) not in loss.reason
    entry = report.shards[1].as_json()
    assert (entry["path"], entry["samples"]) == ("000000-001.shard", PER_SHARD - len(lost))
    assert entry["reason"] == loss.reason
    assert entry["lost"] == [{"first": lost[0], "last": lost[-1], "reason": loss.reason}]


def test_a_file_that_lost_its_last_page_is_mended(source: Path) -> None:
    path = shard_of(source, 1)
    os.truncate(path, path.stat().st_size - PAGE - 100)
    report = repaired(source, [*range(N)])
    assert outcomes(report) == ["sound", "mended", "sound"]
    assert (report.is_whole, report.n_lost) == (True, 0)
    assert report.shards[1].as_json()["mended"] == list(report.shards[1].mended)


def test_trailing_bytes_are_dropped_with_a_damaged_header(source: Path) -> None:
    path = shard_of(source, 1)
    with open(path, "ab") as file:
        file.write(b"appended" * 1000)
    flip(path, 20)
    report = repaired(source, [*range(N)])
    assert report.shards[1].mended[-1] == "8000 bytes after the shard's end are left out"


def cut(path: Path) -> None:
    os.truncate(path, 20_000)


def replaced(path: Path) -> None:
    path.unlink()
    write_shard(path, 2)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "truncated, and its section table is lost"),
        (Path.unlink, "there is no such shard"),
        (replaced, "another shard has replaced it"),
    ],
)
def test_absent_shard_is_lost(source: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(shard_of(source, 2))
    report = repaired(source, [*range(8)])
    assert outcomes(report) == ["sound", "sound", "lost"]
    assert reason in report.shards[2].losses[0].reason
    assert report.n_lost == PER_SHARD
    assert (report.shards[2].losses[0].first, report.shards[2].losses[0].last) == (0, 3)
    assert (report.shards[2].n_kept, report.is_whole) == (0, False)


def test_missing_pointer_falls_back_to_last_generation(source: Path, tmp_path: Path) -> None:
    (source / "dataset.json").write_bytes(b"{}")
    shard_of(source, 2).unlink()
    report = repaired(source, [*range(8)])
    assert outcomes(report) == ["sound", "sound", "lost"]
    assert load(tmp_path / "out").classes == ("a", "b")


def test_missing_generations_fall_back_to_all_shards(source: Path) -> None:
    shutil.rmtree(source / "generations")
    flip(shard_of(source, 0), 20)
    os.truncate(shard_of(source, 1), 20_000)
    report = repaired(source, [0, 1, 2, 3, 8, 9, 10, 11])
    assert outcomes(report) == ["mended", "lost", "sound"]
    assert report.shards[1].losses[0].n_samples is None
    assert report.shards[1].as_json()["lost"][0]["first"] is None


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: flip(path, 50)], ids=["gone", "bit"])
def test_orphans_are_reported(source: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    shutil.copy(shard_of(source, 0), source / "stray.shard")  # of a writer that was killed
    assert repair(source, tmp_path / "first").is_whole
    (source / "stray.shard").unlink()
    add_column(source, "new", Array("int8"), range(N))
    sides = [shard.name for shard in load(source).column_groups[0].shards]
    damage(source / "generations" / "000002.json")
    report = repaired(source, [*range(N)])
    assert outcomes(report) == ["sound"] * N_SHARDS + ["lost"] * N_SHARDS
    assert [shard.name for shard in report.shards[N_SHARDS:]] == sides
    reason = report.shards[-1].losses[0].reason
    assert "it may belong to generation 2 or a later one" in reason
    assert f"shardio repair {sides[-1]} saves its samples" in reason
    assert not report.is_whole


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "is a folder or device; a shard is a file"),
        (lambda p: p.symlink_to(p.name), "is a link that leads to itself; a shard is a file"),
    ],
    ids=["pipe", "link"],
)
def test_what_is_no_file_is_lost(source: Path, make: Callable[[Path], None], reason: str) -> None:
    shard_of(source, 1).unlink()
    make(shard_of(source, 1))
    (finding,) = verify_dataset(source, workers=0).findings
    assert (finding.code, finding.message) == ("unreadable", reason)
    report = repaired(source, [0, 1, 2, 3, 8, 9, 10, 11])
    assert outcomes(report) == ["sound", "lost", "sound"]
    assert report.shards[1].losses == [Loss(0, 3, reason)]


def test_one_shard_can_be_repaired_alone(source: Path) -> None:
    flip(shard_of(source, 1), 20)
    report = repaired(shard_of(source, 1), [4, 5, 6, 7])
    assert [shard.name for shard in report.shards] == ["000000-001.shard"]


def test_bad_page_loses_rows(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard_of(source, 1)
    offset, size = place(path, Kind.COLUMN, "frames")
    row = size // PER_SHARD
    bad = (offset + row + PAGE - 1) // PAGE * PAGE  # a page inside of row 1
    assert offset + row <= bad and bad + 64 < offset + 2 * row
    inode, pread = path.stat().st_ino, os.pread

    def failing_pread(fd: int, n: int, at: int) -> bytes:
        if os.fstat(fd).st_ino == inode and at <= bad < at + n:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, n, at)

    monkeypatch.setattr(os, "pread", failing_pread)
    report = repair(source, tmp_path / "out")
    assert outcomes(report) == ["sound", "damaged", "sound"]
    assert report.shards[1].mended == ("4096 bytes that the disk cannot read are treated as zeros",)
    lost = {loss.first for loss in report.shards[1].losses}
    assert 1 in lost
    assert len(lost) <= 2  # the page may hold the beginning of the next row


def test_unrepairable_sources_leave_no_output(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DatasetNotFound, match="contains neither a dataset nor a shard") as caught:
        repair(tmp_path, out)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    with pytest.raises(ShardNotFound, match=r"no\.shard: there is no such shard"):
        repair(tmp_path / "no.shard", out)
    hopeless = tmp_path / "hopeless.shard"
    hopeless.write_bytes(b"x" * 20_000)
    with pytest.raises(DatasetCorrupt, match="no schema can be read"):
        repair(hopeless, out)
    assert not out.exists()
    before = tree(source)
    with pytest.raises(DatasetExists, match="already holds a dataset") as exists:
        repair(source, source)
    assert str(exists.value).startswith(f"{source}: ")
    assert tree(source) == before
