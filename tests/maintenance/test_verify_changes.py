"""A file that changes while it is verified is a finding: what was checked is not what is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardio.maintenance import MaintenanceProgress, verify_dataset, verify_shard
from shardio.maintenance.verify import shard
from shardio.maintenance.verify.shard import VerifiedShard
from tests.maintenance.datasets import write
from tests.shards import write_shard


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
    monkeypatch.setattr(shard, "verify_bytes", meanwhile)
    (finding,) = verify_shard(path)
    assert (finding.code, finding.path) == ("changed", str(path))
    assert words in finding.message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(os.unlink, "changed", id="deleted"),
        pytest.param(lambda path: os.truncate(path, 5), "dataset", id="cut"),
    ],
)
def test_a_dataset_that_ends_during_its_audit_is_a_finding(
    tmp_path: Path, change: Callable[[str], None], code: str
) -> None:
    folder = write(tmp_path / "out", 3)
    pointer = str(folder / "dataset.json")

    def meanwhile(progress: MaintenanceProgress) -> None:
        if progress.n_shards_done == progress.n_shards:
            change(pointer)

    (finding,) = verify_dataset(folder, progress=meanwhile).findings
    assert (finding.code, finding.path) == (code, pointer)
