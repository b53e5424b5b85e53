"""A verification by reading finds what one of the map finds, maps nothing, and is not killed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Bytes, Schema, ShardReader, ShardWriter
from shardio._workers.ray_cluster import Engine
from shardio.errors import InvalidArgument
from shardio.maintenance import jobs, survey_shard, verify_dataset, verify_shard
from shardio.maintenance.verify import dataset as verification
from shardio.maintenance.verify.shard import verify_bytes, verify_file
from shardio.maintenance.verify.window import Content
from shardio.storage import content, file_access
from shardio.storage.content import PreadFile
from tests.maintenance.datasets import flip
from tests.maintenance.test_verify import dataset, shard_names
from tests.shards import write_shard

pytestmark = pytest.mark.usefixtures("quick_disk")

__all__ = ["dataset"]

N_LARGE = 1100
"""Rows and records that fill some windows of 1 MiB, and not the last of them."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.shard"
    schema = Schema({"row": Array("float32", (768,)), "odd": Array("uint8", (2100,)), "x": Bytes()})
    content = np.random.default_rng(0).bytes(9000)
    with ShardWriter(path, schema) as writer:
        for i in range(N_LARGE):
            row, odd = np.full(768, i, "f4"), np.full(2100, i % 255, "u1")
            writer.append({"row": row, "odd": odd, "x": content[: 3000 + i * 5]})
    return path


def test_every_kind_of_field_is_sound_either_way(tmp_path: Path) -> None:
    for n in (0, 1, 50):
        path = write_shard(tmp_path / f"{n}.shard", n)
        assert verify_file(path, "pread") == verify_file(path, "mmap")
        assert verify_file(path, "pread").findings == ()


def test_damage_to_any_part_is_found_alike_either_way(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.shard", 30)
    content = path.read_bytes()
    for at in range(0, len(content), 4099):
        damaged = bytearray(content)
        for near in range(at, min(at + 600, len(content)), 97):
            damaged[near] ^= 1 << near % 8
        path.write_bytes(damaged)
        found = verify_bytes(PreadFile(str(path)), "a.shard")
        assert found == verify_bytes(memoryview(damaged), "a.shard")
        assert found.findings, at


@pytest.mark.parametrize("access", ["pread", "mmap"])
def test_a_flipped_bit_is_placed_in_whichever_window_it_lies(large: Path, access: Any) -> None:
    content, places = bytearray(large.read_bytes()), {}
    with ShardReader(large) as reader:
        for row in (0, 340, 341, 487, 499, 520, 1000, N_LARGE - 1):
            for name in ("row", "odd"):
                section = reader.column_section(name)
                places[name, row] = section.offset + row * section.stride
            entry = reader.records.entries("x", np.array([row]))
            places["x", row] = reader.records.offset + int(entry["offset"][0])
    for place in places.values():
        content[place + 77] ^= 2
    damaged = large.with_name("damaged.shard")
    damaged.write_bytes(content)
    found = verify_file(damaged, access).findings
    assert {(f.field, f.sample): f.offset for f in found} == places
    assert {f.code for f in found} == {"checksum"}


@pytest.mark.parametrize("access", ["auto", "pread"])
def test_nothing_is_mapped_unless_it_is_asked_for(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, access: Any
) -> None:
    first = dataset / shard_names(dataset)[0]
    mapped: list[str] = []
    real = file_access.map_file

    def spy(path: str) -> Any:
        mapped.append(path)
        return real(path)

    for module in (content, file_access):
        monkeypatch.setattr(module, "map_file", spy)
    for chosen in (access, "mmap"):
        assert verify_shard(first, access=chosen) == []
        assert verify_dataset(dataset, workers=0, access=chosen).findings == ()
        assert survey_shard(first, access=chosen).findings == ()
        assert bool(mapped) == (chosen == "mmap")


@pytest.mark.parametrize("verify", [verify_shard, verify_dataset, survey_shard])
def test_another_access_is_refused(dataset: Path, verify: Any) -> None:
    with pytest.raises(InvalidArgument, match="access must be one of auto, mmap, pread"):
        verify(dataset, access="telepathy")


class OneWorker:
    """Stands in for a pool: one worker, in this process, that is there after `n_waits` waits."""

    n_waits = 0

    def __init__(self, function: Any, n_workers: int, **options: object) -> None:
        self.n_workers, self._function, self._n_waits = n_workers, function, 0
        self._told: list[tuple[int, str]] = []
        self._ready: list[tuple[int, Any]] = []
        self.examined: list[str] = []

    def __enter__(self) -> OneWorker:
        return self

    def __exit__(self, *what: object) -> None: ...

    def put(self, name: str, label: str) -> int:
        number = len(self._told) + len(self._ready) + len(self.examined)
        self._told.append((number, name))
        return number

    def wait(self, timeout_s: float | None = None) -> None:
        """Let the worker examine the first shard that it was given."""
        self._n_waits += 1
        if timeout_s == 0 and self._n_waits <= self.n_waits:
            return
        number, name = self._told.pop(0)
        self._ready.append((number, self._function(name)))
        self.examined.append(name)

    def take(self) -> tuple[int, Any] | None:
        return self._ready.pop() if self._ready else None


@pytest.mark.parametrize("workers", [0, 1])
def test_bytes_that_the_disk_cannot_read_are_a_finding(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def refuse(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = write_shard(dataset / "a.shard", 5)
    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(jobs, "TaskPool", OneWorker)
    (finding,) = verify_shard(path, workers=workers)
    assert (finding.code, finding.message.partition(":")[0]) == (
        "unreadable",
        "the file cannot be read",
    )


def test_a_file_that_is_cut_short_while_it_is_read_is_a_finding(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.shard"
    path.write_bytes(large.read_bytes())
    real = Content.window

    def cut_first(content: Content, start: int, end: int) -> memoryview:
        os.truncate(path, start + 1)
        return real(content, start, end)

    monkeypatch.setattr(Content, "window", cut_first)
    cut, _ = findings = verify_shard(path)
    assert [finding.code for finding in findings] == ["file_size", "changed"]
    assert cut.offset is not None
    assert cut.offset <= path.stat().st_size < large.stat().st_size


@pytest.mark.parametrize("n_waits", [0, 9])
def test_main_audits_too_while_shards_wait(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, n_waits: int
) -> None:
    crews: list[OneWorker] = []

    def make(*arguments: Any, **options: Any) -> OneWorker:
        crews.append(OneWorker(*arguments, **options))
        crews[0].n_waits = n_waits
        return crews[0]

    flip(dataset / shard_names(dataset)[3], 4096)
    monkeypatch.setattr(jobs, "TaskPool", make)
    monkeypatch.setattr(verification, "usable_cpus", lambda: 2)
    monkeypatch.setattr(verification, "LITTLE_BYTES", 1)
    report = verify_dataset(dataset)
    assert [f.code for f in report.findings] == ["checksum"]
    (pool,) = crews
    first, second, _, _, fifth = shard_names(dataset)  # one in hand and one ahead, to begin with
    there = [first, second, fifth] if n_waits == 0 else [first, second]
    assert (pool.n_workers, pool.examined) == (1, there)


@pytest.mark.parametrize("most_ahead", [0, 1, 3])
def test_a_worker_has_shards_ahead_so_that_it_need_not_wait_for_main(
    monkeypatch: pytest.MonkeyPatch, most_ahead: int
) -> None:
    crews: list[OneWorker] = []

    def make(*arguments: Any, **options: Any) -> OneWorker:
        crews.append(OneWorker(*arguments, **options))
        crews[0].n_waits = 99
        return crews[0]

    names = [f"{k:02d}.shard" for k in range(20)]
    monkeypatch.setattr(jobs, "TaskPool", make)
    monkeypatch.setattr(jobs, "MAX_AHEAD", most_ahead)
    given: dict[str, Any] = {"engine": Engine(), "sees": "", "preload": __name__}
    found = jobs.run_jobs(str.upper, names, workers=1, takes_part=True, **given)
    assert sorted(found) == [(k, name.upper()) for k, name in enumerate(names)]
    assert crews[0].examined == names[: 1 + most_ahead]  # main does the others


@pytest.mark.parametrize(
    ("options", "n_workers"),
    [
        ({}, 2),
        ({"access": "mmap"}, 3),
        ({"workers": 1}, 1),
        ({"workers": 2}, 2),
        ({"workers": 9}, 5),
    ],
)
def test_as_many_processes_work_as_there_are_cpus_or_as_asked_for(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, options: Any, n_workers: int
) -> None:
    asked: list[int] = []

    def refuse(function: object, n: int, **options: Any) -> None:
        asked.append(n)
        raise InterruptedError

    monkeypatch.setattr(jobs, "TaskPool", refuse)
    monkeypatch.setattr(verification, "usable_cpus", lambda: 3)
    monkeypatch.setattr(verification, "LITTLE_BYTES", 1)
    with pytest.raises(InterruptedError):
        verify_dataset(dataset, **options)
    assert asked == [n_workers]


def test_little_data_starts_no_process(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "usable_cpus", lambda: 3)
    monkeypatch.setattr(jobs, "TaskPool", None)
    report = verify_dataset(dataset)
    assert (report.findings, report.n_shards) == ((), 5)
