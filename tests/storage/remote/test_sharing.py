"""Loaders in several processes share one cache, whatever becomes of one of them."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardio import ShardLoader
from shardio._workers.processes import zygote as zygotes
from shardio.errors import CacheFull
from tests.faults.failing import fill_disk
from tests.storage.remote.scene import RemoteSet, line_of

N, N_SHARDS = 240, 12
PROGRAM = """
import hashlib, json, sys
import shardio
url, n_epochs, store, given = json.loads(sys.argv[1])
digest = hashlib.sha256()
dataset = shardio.open(url, **store)
with shardio.ShardLoader(dataset, 16, output="numpy", timeout_s=60, **given) as loader:
    print("open", flush=True)
    for _ in range(n_epochs):
        for batch in loader:
            digest.update(batch["image"].tobytes() + batch["label"].tobytes())
print(digest.hexdigest(), flush=True)
"""


def _expected(folder: Path, shuffle: Any, n_epochs: int = 1, **more: Any) -> str:
    options = {"output": "numpy", "num_workers": 0, "shuffle": shuffle, **more}
    with ShardLoader(folder, 16, **options) as loader:
        return _digest(batch for _ in range(n_epochs) for batch in loader)


def _digest(batches: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch["image"].tobytes() + batch["label"].tobytes())
    return digest.hexdigest()


@contextmanager
def _program(
    remote: RemoteSet, n_epochs: int = 1, *, cache_bytes: int | None = None, **given: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a program that loads epochs and prints a hash of all their bytes."""
    where = {**remote.given, "cache": str(remote.cache), "cache_bytes": cache_bytes}
    with remote.store.program(PROGRAM, [remote.url, n_epochs, where, given]) as process:
        yield process


@contextmanager
def _two(
    remote: RemoteSet, n_epochs: int, other: Any = None, **given: Any
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Start two programs, the second with `other` options too, and wait until both are open."""
    with (
        _program(remote, n_epochs, **given) as one,
        _program(remote, n_epochs, **given, **(other or {})) as two,
    ):
        assert (line_of(one), line_of(two)) == ("open", "open")
        yield one, two


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True, "shards"])
def test_two_loaders_download_equal_once(equal: RemoteSet, num_workers: int, shuffle: Any) -> None:
    hold = equal.store.fail("hold")
    given: Any = {"num_workers": num_workers, "shuffle": shuffle}
    with _two(equal, 2, **given) as (one, two):
        hold.go_on.set()
        assert line_of(one) == line_of(two) == _expected(equal.folder, shuffle, 2)
    assert equal.downloaded() == equal.sizes


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_two_loaders_evict_equal_shards(equal: RemoteSet, num_workers: int) -> None:
    most = 20 * max(equal.sizes.values())
    given: Any = {"num_workers": num_workers, "shuffle": "shards", "cache_bytes": most}
    with _two(equal, 2, {"seed": 1}, **given) as (one, two):  # each needs others at a time
        assert line_of(one) == _expected(equal.folder, "shards", 2)
        assert line_of(two) == _expected(equal.folder, "shards", 2, seed=1)
    assert 0 < sum(path.stat().st_size for path in equal.files()) <= most


def test_what_a_killed_loader_was_downloading_another_goes_on_with(remote: RemoteSet) -> None:
    first, *others = sorted(remote.sizes)
    hold = remote.store.fail("hold", "|".join(others), times=len(others))
    with _program(remote, num_workers=2) as process:
        assert line_of(process) == "open"
        while not list(remote.cache.rglob(f"{first.removesuffix('.shard')}.*.ok")):
            time.sleep(0.01)
        assert hold.met.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
    hold.go_on.set()
    remote.store.proxy.faults = []
    with _program(remote, num_workers=2) as process:
        assert line_of(process) == "open"
        assert line_of(process) == _expected(remote.folder, False)
    n_bytes = remote.downloaded()
    assert n_bytes[first] == remote.sizes[first]
    assert all(n_bytes[name] <= 2 * remote.sizes[name] for name in others)
    assert not list(remote.cache.rglob("*.part"))


def test_killed_download_is_taken_over(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.storage.remote.storage.N_THREADS", 0)  # so nobody but it does
    hold = remote.store.fail("hold", r"000000-000\.shard")
    given: Any = {"output": "numpy", "num_workers": 1, "timeout_s": 60}
    with ShardLoader(remote.open(), 16, **given) as loader:
        batches = iter(loader)
        assert hold.met.wait(60)
        for pid in _workers():
            os.kill(pid, signal.SIGKILL)
        hold.go_on.set()
        assert _digest(batches) == _expected(remote.folder, False)


def _workers() -> list[int]:
    """Return the processes that this one's zygote has forked."""
    zygote = zygotes._current
    assert zygote is not None
    stats = [place.read_text() for place in Path("/proc").glob("[0-9]*/stat")]
    fields = [(int(stat.split()[0]), stat.rpartition(")")[2].split()) for stat in stats]
    return [pid for pid, (_, parent, *_) in fields if int(parent) == zygote.pid]


def test_full_disk_reaches_the_loop(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    with (
        ShardLoader(remote.open(), 16, output="numpy", num_workers=0) as loader,
        pytest.raises(CacheFull, match="the disk is full: .* bytes are needed"),
    ):
        next(iter(loader))
