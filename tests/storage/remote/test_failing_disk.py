"""A disk that refuses a call to the cache: a clear error or none, and a cache that still works."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import shardio
from shardio import ShardLoader
from shardio.errors import UnsupportedEnvironment
from tests.faults.failing import FailingDisk
from tests.loading import TWO_FIELDS, two_fields, write_dataset
from tests.storage.remote.scene import Scene

EVERY = int(os.environ.get("SHARDIO_FAIL_EVERY", "4"))
"""One of this many calls fails; in tools/dev/fail_disk.py each does."""
N = 40


def _labels(store: Scene, url: str, cache: Path) -> list[int]:
    """Read a dataset as a loop does, which downloads its shards."""
    dataset = shardio.open(url, cache=cache, storage_options=store.options)
    with dataset, ShardLoader(dataset, 8, num_workers=0, output="numpy") as loader:
        return [int(label) for batch in loader for label in batch["label"]]


@pytest.mark.parametrize(
    ("code", "for_good"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO", "ENOSPC for good"]
)
def test_a_cache_works_after_any_failing_call(
    store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, for_good: bool
) -> None:
    write_dataset(tmp_path / "set", N, 2, TWO_FIELDS, two_fields(N))
    url, undisturbed = store.put_dataset(tmp_path / "set", f"failing-{code}"), FailingDisk()
    with monkeypatch.context() as during:
        undisturbed.install(during)
        expected = _labels(store, url, tmp_path / "whole")
    assert expected == list(range(N))
    assert {call.kind for call in undisturbed.calls} >= {"mkdir", "create", "write", "rename"}
    n_failed = 0
    for at in range(code % EVERY, len(undisturbed.calls), EVERY):
        cache, failing = tmp_path / f"cache{at}", FailingDisk(code, at, for_good=for_good)
        with monkeypatch.context() as during:
            failing.install(during)
            try:
                assert _labels(store, url, cache) == expected
            except (OSError, UnsupportedEnvironment) as error:
                n_failed += 1
                assert str(cache) in str(error)
        assert _labels(store, url, cache) == expected, failing.refused
    assert n_failed > 1
