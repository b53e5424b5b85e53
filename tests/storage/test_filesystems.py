"""The access that "auto" chooses, by the kind of file system, which is simulated here."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardio
from shardio.errors import InvalidArgument
from shardio.storage.file_access import UNSAFE_FILE_SYSTEMS, file_system_type
from tests.loading import write_dataset
from tests.shards import write_shard

PROC = 0x9FA0  # PROC_SUPER_MAGIC of linux/magic.h
SCHEMA = shardio.Schema({"n": shardio.Array("int64")})
MAGIC_H = Path("/usr/include/linux/magic.h")


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that counts as one of a network."""
    found = file_system_type(str(tmp_path))
    assert found is not None
    monkeypatch.setitem(UNSAFE_FILE_SYSTEMS, found, "the disk of the tests")
    return tmp_path


def test_the_kernel_says_which_file_system_a_path_lies_on(tmp_path: Path) -> None:
    assert file_system_type("/proc/self") == PROC
    assert file_system_type(str(tmp_path)) != PROC
    assert file_system_type(str(tmp_path / "nothing")) is None


def test_readers_and_loaders_choose_by_their_file_system(remote: Path) -> None:
    write_dataset(remote / "d", 1, 1, SCHEMA, [{"n": 3}])
    with shardio.open(remote / "d") as dataset, shardio.open(remote / "d", access="mmap") as mapped:
        assert (dataset.access, dataset.reader(0).access) == ("pread", "pread")
        assert (mapped.access, mapped.reader(0).access) == ("mmap", "mmap")
    with shardio.ShardReader(write_shard(remote / "a.shard", 2)) as reader:
        assert reader.access == "pread"
    with shardio.ShardLoader(remote / "d", 1, num_workers=0, output="numpy") as loader:
        assert loader.dataset.access == "pread"


def test_another_word_is_refused_with_those_there_are(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", 1, 1, SCHEMA, [{"n": 3}])
    shard = tmp_path / "d" / "000000-000.shard"
    for use in (
        lambda: shardio.open(tmp_path / "d", access="read"),  # type: ignore[arg-type]
        lambda: shardio.ShardReader(shard, access="read"),  # type: ignore[arg-type]
        lambda: shardio.ShardLoader(shardio.open(tmp_path / "d", access="read"), 1),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match="one of auto, mmap, pread; found 'read'"):
            use()


@pytest.mark.skipif(not MAGIC_H.exists(), reason="the kernel's headers are not installed")
def test_the_numbers_of_the_kernel_are_those_of_its_header() -> None:
    defined = {
        words[1].removesuffix("_MAGIC").removesuffix("_SUPER"): int(words[2], 16)
        for line in MAGIC_H.read_text().splitlines()
        if len(words := line.split()) > 2 and words[0] == "#define" and words[2].startswith("0x")
    }
    names = {"NFS", "SMB", "CIFS", "SMB2", "FUSE", "V9FS", "CEPH", "AFS", "AFS_FS", "CODA"}
    assert "NFS" in defined  # older headers lack some of the others
    assert {defined[name] for name in names & defined.keys()} <= UNSAFE_FILE_SYSTEMS.keys()
