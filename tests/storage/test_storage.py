"""Storage: columns of many files in one range of addresses, and bytes that wait for their place."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from shardio.dataset.gather import MappedRows
from shardio.errors import InsufficientMemory, ShardIncomplete, UnsupportedEnvironment
from shardio.storage import fs
from shardio.storage.file_access import map_file
from shardio.storage.fs import rename_exclusive


def n_maps(path: Path) -> int:
    """Return the number of maps of the file this process has."""
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_range_larger_than_the_address_space_is_refused() -> None:
    with pytest.raises(InsufficientMemory, match="no address range of"):
        MappedRows(1 << 40, 1 << 40, np.zeros(1, np.int64), [1 << 18])


def test_mapping_beyond_rlimit_as_names_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "large.shard"
    path.touch()
    os.truncate(path, 1 << 30)  # sparse
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29), hard))
    try:
        words = r"1073741824 bytes .* for .*large.shard; RLIMIT_AS"
        with pytest.raises(InsufficientMemory, match=words):
            map_file(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_larger_memory_pages_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.storage.file_access.mmap.PAGESIZE", 65536)
    words = "memory pages of this kernel have 65536 bytes"
    with pytest.raises(UnsupportedEnvironment, match=words):
        MappedRows(64, 64, np.zeros(0, np.int64), [])


@pytest.mark.usefixtures("swept")
def test_a_map_needs_no_descriptor_and_goes_with_its_last_view(tmp_path: Path) -> None:
    path = tmp_path / "a.shard"
    path.write_bytes(b"abc" * 5000)
    (tmp_path / "empty.shard").touch()
    n_open = len(os.listdir("/proc/self/fd"))
    mapped, _ = map_file(str(path))
    part = np.frombuffer(mapped, np.uint8)[3:6]
    del mapped
    for _ in range(5):
        map_file(str(path))
        with pytest.raises(ShardIncomplete, match=r"empty\.shard: the file is empty"):
            map_file(str(tmp_path / "empty.shard"))
    assert len(os.listdir("/proc/self/fd")) == n_open
    assert (n_maps(path), part.tobytes()) == (1, b"abc")
    del part
    assert n_maps(path) == 0


@pytest.mark.parametrize("system_can", [True, False])
def test_renaming_takes_no_name_from_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, system_can: bool
) -> None:
    if not system_can:
        monkeypatch.setattr(fs, "_RENAMEAT2", None)
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_bytes(b"new")
    old.write_bytes(b"old")
    with pytest.raises(FileExistsError) as caught:
        rename_exclusive(str(new), str(old))
    assert str(old) in (caught.value.filename, caught.value.filename2)
    assert (new.read_bytes(), old.read_bytes()) == (b"new", b"old")
    rename_exclusive(str(new), str(tmp_path / "free"))
    assert (tmp_path / "free").read_bytes() == b"new"
    assert not new.exists()
