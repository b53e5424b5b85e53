"""Requests to the kernel before shards are opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardio import ShardDataset
from shardio.storage import file_access
from shardio.storage.file_access import END_BYTES, PAGE_BYTES, open_shard, prefetch_ends
from tests.loading import TWO_FIELDS, two_fields, write_dataset

SIZE = 100_000
Asked = list[tuple[str, int, int]]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Ten files, the third of which is short, and the eighth missing."""
    found = [str(tmp_path / f"{i}.shard") for i in range(10)]
    for i, path in enumerate(found):
        if i != 7:
            Path(path).write_bytes(bytes(100 if i == 2 else SIZE))
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Record the requests to the kernel: name, offset, length."""
    found = []

    def note(fd: int, offset: int, n_bytes: int) -> None:
        found.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), offset, n_bytes))
        if offset:  # the second request of a file
            raise OSError("the system refuses")

    monkeypatch.setattr(file_access, "prefetch_range", note)
    return found


def test_both_ends_asked(paths: list[str], asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_access, "is_cached", lambda _, offset: offset == 0)
    prefetch_ends(paths)
    expected = []
    for i in (0, 1, 2, 3, 4, 5, 6, 8, 9):
        size = 100 if i == 2 else SIZE
        rest = min(END_BYTES, size)
        expected += [(f"{i}.shard", 0, PAGE_BYTES), (f"{i}.shard", size - rest, rest)]
    assert asked == expected


@pytest.mark.parametrize("answer", [True, None])
def test_nothing_is_asked_for_where_all_is_in_memory_or_the_system_does_not_tell(
    paths: list[str], asked: Asked, monkeypatch: pytest.MonkeyPatch, *, answer: bool | None
) -> None:
    probed: list[int] = []

    def probe(_: int, offset: int) -> bool | None:
        probed.append(offset)
        return answer

    monkeypatch.setattr(file_access, "is_cached", probe)
    prefetch_ends(paths)
    assert asked == [] and 2 <= len(probed) <= 10  # not every file


def test_links_not_followed(tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x" * SIZE)
    (tmp_path / "link").symlink_to("file")
    opened = []

    def note(path: str) -> int:
        opened.append(os.path.basename(path))
        return open_shard(path)

    monkeypatch.setattr(file_access, "open_shard", note)
    monkeypatch.setattr(file_access, "is_cached", lambda *_: False)
    prefetch_ends([str(tmp_path / "link"), str(tmp_path / "file")])
    assert set(opened) == {"file"}
    assert len(asked) == 2, "the ends of the other"


def test_dataset_asks_first(tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_dataset(tmp_path / "set", 40, 6, TWO_FIELDS, two_fields(40))
    monkeypatch.setattr(file_access, "is_cached", lambda *_: False)
    with ShardDataset(folder) as dataset:
        dataset.gather("image")
        names = sorted({name for name, _, _ in asked})
        assert names == sorted(shard.name for shard in dataset.shards)
        assert len(names) == 6
