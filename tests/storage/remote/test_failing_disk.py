"""A disk that refuses a call to the cache: a clear error or none, and a cache that still works."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardio import ShardLoader
from shardio.errors import UnsupportedEnvironment
from tests.faults.failing import FailingDisk
from tests.storage.remote.scene import RemoteSet

EVERY = int(os.environ.get("SHARDIO_FAIL_EVERY", "4"))
"""One of this many calls fails; in tools/stress disk each does."""
N, N_SHARDS = 40, 2


def _labels(remote: RemoteSet, cache: Path) -> list[int]:
    """Read a dataset as a loop does, which downloads its shards."""
    with (
        remote.open(cache=cache) as dataset,
        ShardLoader(dataset, 8, num_workers=0, output="numpy") as loader,
    ):
        return [int(label) for batch in loader for label in batch["label"]]


@pytest.mark.parametrize(
    ("code", "for_good"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO", "ENOSPC for good"]
)
def test_a_cache_works_after_any_failing_call(
    remote: RemoteSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, for_good: bool
) -> None:
    undisturbed = FailingDisk()
    with monkeypatch.context() as during:
        undisturbed.install(during)
        expected = _labels(remote, tmp_path / "whole")
    assert expected == list(range(N))
    assert {call.kind for call in undisturbed.calls} >= {"mkdir", "create", "write", "rename"}
    n_failed = 0
    for at in range(code % EVERY, len(undisturbed.calls), EVERY):
        cache, failing = tmp_path / f"cache{at}", FailingDisk(code, at, for_good=for_good)
        with monkeypatch.context() as during:
            failing.install(during)
            try:
                assert _labels(remote, cache) == expected
            except (OSError, UnsupportedEnvironment) as error:
                n_failed += 1
                assert str(cache) in str(error)
        assert _labels(remote, cache) == expected, failing.refused
    assert n_failed > 1
