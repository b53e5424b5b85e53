"""Verification of a shard and of a dataset: every byte, every promise, and a report of failures.

`tests/corruption/` damages and forges shards in every way; these are about datasets and reports.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardio import Array, Bytes, DatasetWriter, Schema, Text
from shardio._workers.tasks.task_pool import TaskPool
from shardio.dataset.manifest import GENERATIONS, POINTER, load
from shardio.errors import (
    DatasetCorrupt,
    DatasetNotFound,
    MediaError,
    ShardCorrupt,
    ShardIncomplete,
    ShardNotFound,
    ShardUnsupported,
)
from shardio.maintenance import (
    Finding,
    MaintenanceProgress,
    add_column,
    jobs,
    survey_shard,
    verify_dataset,
    verify_shard,
)
from shardio.maintenance.verify import MAX_FINDINGS, Findings, shard
from shardio.maintenance.verify import dataset as verification
from shardio.maintenance.verify.shard import VerifiedShard
from tests.shards import flip, write_samples, write_shard

pytestmark = pytest.mark.process

SCHEMA = Schema({"label": Array("int64"), "text": Text(), "blob": Bytes()})
N_SHARDS = 5


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Write a dataset of five shards of four samples each."""
    folder = tmp_path / "data: new"
    with DatasetWriter(folder, SCHEMA, shard_bytes=4096) as writer:
        for i in range(4 * N_SHARDS):
            writer.append({"label": i, "text": f"sample {i}", "blob": bytes([i]) * 1010})
    return folder


def shard_names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".shard"))


@pytest.mark.parametrize("workers", [0, 1, 3, None])
def test_sound_dataset_is_counted_without_findings(dataset: Path, workers: int | None) -> None:
    report = verify_dataset(dataset, workers=workers)
    names = shard_names(dataset)
    assert len(names) == N_SHARDS
    assert (report.findings, report.unknown) == ((), ())
    assert (report.n_shards, report.n_samples, report.generation) == (N_SHARDS, 4 * N_SHARDS, 1)
    assert report.n_bytes == sum((dataset / name).stat().st_size for name in names)
    assert report.path == str(dataset)
    assert report.lineage == load(dataset).lineage
    content = json.loads(json.dumps(report.as_json()))
    assert (content["path"], content["lineage"]) == (str(dataset), report.lineage)
    assert (content["n_samples"], content["n_bytes"]) == (4 * N_SHARDS, report.n_bytes)
    assert (content["findings"], content["unknown"]) == ([], [])
    assert "no findings" in repr(report)


def test_progress_error_stops_workers(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []

    class NotedPool(TaskPool):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def interrupt(progress: MaintenanceProgress) -> None:
        if progress.n_shards_done:
            raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "TaskPool", NotedPool)
    operations: list[Callable[[], object]] = [
        lambda: verify_dataset(dataset, workers=1, progress=interrupt),
        lambda: add_column(dataset, "n", Array("int64"), len, workers=1, progress=interrupt),
    ]
    for operation in operations:
        closed.clear()
        with pytest.raises(KeyboardInterrupt) as kept:
            operation()
        assert len(closed) >= 1, kept


def test_a_shard_that_was_replaced_by_another_sound_one_is_found(dataset: Path) -> None:
    first = shard_names(dataset)[0]
    (dataset / first).unlink()
    write_shard(dataset / first, 3)
    report = verify_dataset(dataset, workers=0)
    assert {f.code for f in report.findings} == {"generation"}
    assert {f.path for f in report.findings} == {str(dataset / first)}
    assert all(f.expected != f.found for f in report.findings)
    told = " ".join(f.message for f in report.findings)
    assert all(word in told for word in ("bytes", "samples", "id", "schema"))


def test_a_stray_shard_is_a_finding_and_other_files_are_listed(dataset: Path) -> None:
    write_shard(dataset / "stray.shard", 1)
    (dataset / "notes.txt").touch()
    (dataset / ".000.shard.abc.tmp").touch()
    (dataset / GENERATIONS / "000001.json.orig").touch()
    report = verify_dataset(dataset, workers=0)
    (finding,) = report.findings
    assert (finding.code, os.path.basename(finding.path)) == ("unknown_shard", "stray.shard")
    names = (".000.shard.abc.tmp", "notes.txt", "stray.shard", f"{GENERATIONS}/000001.json.orig")
    assert report.unknown == names


@pytest.mark.parametrize("place", [POINTER, f"{GENERATIONS}/000001.json"])
def test_unreadable_generation_still_checks_all_shards(dataset: Path, place: str) -> None:
    flip(dataset / place, 30)
    flip(dataset / shard_names(dataset)[3], 4096)
    report = verify_dataset(dataset, workers=0)
    assert [f.code for f in report.findings] == ["dataset", "checksum"]
    assert POINTER not in report.findings[0].message
    assert (report.generation, report.n_shards, report.n_samples) == (None, N_SHARDS, 20)


def test_flipped_bits_in_the_manifest_are_found(dataset: Path) -> None:
    for place in (POINTER, f"{GENERATIONS}/000001.json"):
        path = dataset / place
        content = path.read_bytes()
        for at in range(0, len(content), 5):
            flip(path, at)
            _, findings = verification._verify_generations(dataset)
            assert findings, (place, at)
            path.write_bytes(content)


def test_a_folder_that_holds_no_dataset_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match="holds no dataset.json") as caught:
        verify_dataset(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    with pytest.raises(DatasetNotFound, match="nowhere: there is no such folder"):
        verify_dataset(tmp_path / "nowhere")
    with pytest.raises(ShardNotFound, match=r"a\.shard: there is no such shard"):
        verify_shard(tmp_path / "a.shard")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_report_is_json_with_findings_in_the_order_of_shards(dataset: Path, workers: int) -> None:
    names = shard_names(dataset)
    for name, offset in ((names[4], 4096), (names[1], 8), (names[2], 4096)):
        flip(dataset / name, offset)
    content = json.loads(json.dumps(verify_dataset(dataset, workers=workers).as_json()))
    assert content["n_shards"] == N_SHARDS
    found = [(os.path.basename(f["path"]), f["code"]) for f in content["findings"]]
    assert found == [(names[1], "unsupported"), (names[2], "checksum"), (names[4], "checksum")]
    assert set(content["findings"][0]) == set(Finding.__dataclass_fields__)
    last = content["findings"][2]
    assert (last["path"], last["field"], last["sample"]) == (str(dataset / names[4]), "text", 0)
    assert last["offset"] == 4096
    assert len(last["expected"]) == len(last["found"]) == 16
    assert last["expected"] != last["found"]


def test_a_long_list_of_findings_ends_with_their_number(tmp_path: Path) -> None:
    made = ({"x": [i] * 2048} for i in range(150))
    path = write_samples(tmp_path / "a.shard", Schema({"x": Array("uint8", (2048,))}), made)
    content = bytearray(path.read_bytes())
    for row in range(150):
        content[4096 + 2048 * row] ^= 1
    path.write_bytes(content)
    found = verify_shard(path)
    assert len(found) == MAX_FINDINGS + 1
    assert {f.code for f in found[:-1]} == {"checksum"}
    assert (found[-1].code, found[-1].found) == ("more", 50)
    assert found[-1].message == "50 more findings are not listed"
    assert [f.sample for f in found[:-1]] == [*range(MAX_FINDINGS)]
    assert [f.offset for f in found[:-1]] == [4096 + 2048 * row for row in range(MAX_FINDINGS)]
    assert {(f.path, f.field) for f in found[:-1]} == {(str(path), "x")}


def test_an_error_keeps_its_place_takes_the_rest_from_the_block_and_is_short() -> None:
    findings = Findings("a.shard")
    with findings.catching(section="table", offset=7):
        raise ShardCorrupt("x" * 999, code="x", path="a.shard", offset=99, expected=b"\xff" * 999)
    (found,) = findings.close()
    assert (found.section, found.offset, found.code) == ("table", 99, "x")
    assert len(found.message) == 300 and str(found.expected).startswith("ffff")
    assert found.message.endswith("x…")
    assert (found.path, found.field, found.found) == ("a.shard", None, None)


def test_an_error_becomes_a_finding_about_the_file_that_it_names() -> None:
    for error, expected in (
        (
            ShardIncomplete("d/a.shard: the file is empty"),
            ("d/a.shard", "incomplete", "the file is empty"),
        ),
        (ShardUnsupported("needs float8"), ("d", "unsupported", "needs float8")),
        (DatasetCorrupt("d/dataset.json: expected"), ("d/dataset.json", "dataset", "expected")),
        (MediaError("elsewhere: no video"), ("d", "media", "elsewhere: no video")),
        (
            OSError(errno.EIO, "Input/output error", "d/b"),
            ("d/b", "unreadable", "the file cannot be read: Input/output error"),
        ),
        (OSError("no such thing"), ("d", "unreadable", "the file cannot be read: no such thing")),
    ):
        found = Finding.of("d", error, section="table")
        assert (found.path, found.code, found.message) == expected
    corrupt = ShardCorrupt("wrong", code="magic", field="x", sample=3, expected=b"ab", found=7)
    found = Finding.of("d", corrupt, field="y", offset=5)
    assert (found.path, found.code, found.field, found.sample) == ("d", "magic", "x", 3)
    assert (found.offset, found.expected, found.found) == (5, "6162", 7)
    assert str(found) == "d: wrong, field 'x', sample 3, offset 5, expected 6162, found 7"
    assert repr(found).endswith("magic, field 'x', sample 3, wrong)")


# --- workers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_cpus", "little_bytes", "options", "asked"),
    [
        (3, 1, {}, [3]),
        (3, 1, {"workers": 1}, [1]),
        (3, 1, {"workers": 9}, [N_SHARDS]),
        (3, 1 << 20, {}, []),
        (1, 1, {}, []),
    ],
)
def test_as_many_processes_work_as_there_are_cpus_or_as_asked_for(
    dataset: Path,
    monkeypatch: pytest.MonkeyPatch,
    n_cpus: int,
    little_bytes: int,
    options: Any,
    asked: list[int],
) -> None:
    begun: list[int] = []

    def refuse(function: object, n: int, **options: Any) -> None:
        begun.append(n)
        raise InterruptedError

    monkeypatch.setattr(jobs, "TaskPool", refuse)
    monkeypatch.setattr(verification, "usable_cpus", lambda: n_cpus)
    monkeypatch.setattr(verification, "MAX_BYTES_WITHOUT_WORKERS", little_bytes)
    with contextlib.suppress(InterruptedError):
        verify_dataset(dataset, **options)
    assert begun == asked


def test_disk_errors_are_findings(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    first = dataset / shard_names(dataset)[0]
    monkeypatch.setattr("shardio.storage.content.map_file", None)
    assert (verify_shard(first), survey_shard(first).findings) == ([], ())
    monkeypatch.setattr(os, "preadv", refuse)
    for findings in (verify_shard(first), verify_dataset(dataset, workers=0).findings[:1]):
        (finding,) = findings
        assert finding.code == "unreadable"
        assert finding.message == "the file cannot be read: Input/output error"


# --- files that change meanwhile: what was checked is not what is there ------------------------


def replace(path: str) -> None:
    os.rename(shutil.copy(path, path + "~"), path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(replace, "replaced or written to", id="replaced"),
        pytest.param(lambda path: os.utime(path, (5, 5)), "replaced or written to", id="written"),
        pytest.param(os.unlink, "was removed", id="deleted"),
    ],
)
def test_a_change_during_the_audit_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[str], None], words: str
) -> None:
    path = write_shard(tmp_path / "a.shard", 3)
    real = shard.verify_bytes

    def meanwhile(whole: memoryview, name: str) -> VerifiedShard:
        found = real(whole, name)
        change(name)
        return found

    assert verify_shard(path) == []
    flip(path, 4096)
    monkeypatch.setattr(shard, "verify_bytes", meanwhile)
    damage, finding = verify_shard(path)
    assert (damage.code, damage.offset) == ("checksum", 4096)
    assert (finding.code, finding.path) == ("changed", str(path))
    assert words in finding.message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(os.unlink, "changed", id="deleted"),
        pytest.param(lambda path: os.truncate(path, 5), "dataset", id="cut"),
    ],
)
def test_pointer_lost_meanwhile(dataset: Path, change: Callable[[str], None], code: str) -> None:
    pointer = str(dataset / POINTER)

    def meanwhile(progress: MaintenanceProgress) -> None:
        if progress.n_shards_done == progress.n_shards:
            change(pointer)

    (finding,) = verify_dataset(dataset, progress=meanwhile).findings
    assert (finding.code, finding.path) == (code, pointer)
