"""Loaders in several processes share one cache, whatever becomes of one of them."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import ShardLoader
from shardio._workers.processes import zygote as zygotes
from shardio.errors import CacheFull
from shardio.storage import fs
from tests.loading import TWO_FIELDS, two_fields, write_dataset
from tests.storage.remote.scene import Fault, Scene, line_of, program

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sharing") / "set"
    write_dataset(place, N, N_SHARDS, TWO_FIELDS, two_fields(N))
    return place


@pytest.fixture(scope="module")
def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.rglob("*.shard")}


@pytest.fixture
def url(store: Scene, folder: Path) -> str:
    return store.put_dataset(folder, "shared")


def _expected(folder: Path, shuffle: Any, n_epochs: int = 1) -> str:
    digest = hashlib.sha256()
    with ShardLoader(folder, 16, output="numpy", num_workers=0, shuffle=shuffle) as loader:
        for _ in range(n_epochs):
            for batch in loader:
                digest.update(batch["image"].tobytes() + batch["label"].tobytes())
    return digest.hexdigest()


@contextmanager
def _program(
    store: Scene, url: str, tmp_path: Path, n_epochs: int = 1, **given: Any
) -> Iterator[subprocess.Popen[str]]:
    """Return a program that loads epochs and prints a hash of all their bytes."""
    where = {"cache": str(tmp_path / "cache"), "storage_options": store.options}
    if "cache_bytes" in given:
        where["cache_bytes"] = given.pop("cache_bytes")
    with program(PROGRAM, [url, n_epochs, where, given]) as process:
        yield process


def test_two_loaders_on_a_machine_download_every_shard_once(
    store: Scene, url: str, tmp_path: Path, folder: Path, sizes: dict[str, int]
) -> None:
    hold = Fault("hold")  # until both are there, one is downloading
    store.proxy.faults = [hold]
    given: Any = {"num_workers": 1, "shuffle": True}
    with (
        _program(store, url, tmp_path, **given) as one,
        _program(store, url, tmp_path, **given) as two,
    ):
        assert (line_of(one), line_of(two)) == ("open", "open")
        hold.go_on.set()
        assert line_of(one) == line_of(two) == _expected(folder, True)
    assert {name: store.proxy.n_bytes[name] for name in sizes} == sizes


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True, "shards"])
def test_two_loaders_download_shards_of_equal_content_once_each(
    store: Scene, tmp_path: Path, equal_shards: Path, num_workers: int, shuffle: Any
) -> None:
    url, hold = store.put_dataset(equal_shards, "equal"), Fault("hold")
    store.proxy.faults = [hold]
    given: Any = {"num_workers": num_workers, "shuffle": shuffle}
    with (
        _program(store, url, tmp_path, 2, **given) as one,
        _program(store, url, tmp_path, 2, **given) as two,
    ):
        assert (line_of(one), line_of(two)) == ("open", "open")
        hold.go_on.set()
        assert line_of(one) == line_of(two) == _expected(equal_shards, shuffle, 2)
    sizes = {path.name: path.stat().st_size for path in equal_shards.rglob("*.shard")}
    assert {name: store.proxy.n_bytes[name] for name in sizes} == sizes


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_two_loaders_make_room_among_shards_of_equal_content(
    store: Scene, tmp_path: Path, equal_shards: Path, num_workers: int
) -> None:
    url = store.put_dataset(equal_shards, "equal")
    most = 20 * max(path.stat().st_size for path in equal_shards.rglob("*.shard"))
    given: Any = {"num_workers": num_workers, "shuffle": "shards", "cache_bytes": most}
    with (
        _program(store, url, tmp_path, 2, **given) as one,
        _program(store, url, tmp_path, 2, **given) as two,
    ):
        assert (line_of(one), line_of(two)) == ("open", "open")
        assert line_of(one) == line_of(two) == _expected(equal_shards, "shards", 2)
    shards = list((tmp_path / "cache").rglob("*.shard"))
    assert 0 < sum(path.stat().st_size for path in shards) <= most


def test_what_a_killed_loader_was_downloading_another_goes_on_with(
    store: Scene, url: str, tmp_path: Path, folder: Path, sizes: dict[str, int]
) -> None:
    first, *others = sorted(sizes)
    hold = Fault("hold", "|".join(others), times=len(others))
    store.proxy.faults = [hold]
    with _program(store, url, tmp_path, num_workers=2) as process:
        assert line_of(process) == "open"
        while not list((tmp_path / "cache").rglob(f"{first.removesuffix('.shard')}.*.ok")):
            time.sleep(0.01)
        assert hold.met.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
    hold.go_on.set()
    store.proxy.faults = []
    with _program(store, url, tmp_path, num_workers=2) as process:
        assert line_of(process) == "open"
        assert line_of(process) == _expected(folder, False)
    assert store.proxy.n_bytes[first] == sizes[first]
    assert all(store.proxy.n_bytes[name] <= 2 * sizes[name] for name in others)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_worker_that_is_killed_while_it_downloads_costs_nothing(
    store: Scene, url: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.storage.remote.storage.N_THREADS", 0)  # so nobody but it does
    hold = Fault("hold", r"000000-000\.shard")
    store.proxy.faults = [hold]
    given: Any = {"output": "numpy", "num_workers": 1, "timeout_s": 60}
    digest = hashlib.sha256()
    with ShardLoader(
        shardio.open(url, cache=tmp_path / "cache", storage_options=store.options), 16, **given
    ) as loader:
        batches = iter(loader)
        assert hold.met.wait(60)
        for pid in _workers():
            os.kill(pid, signal.SIGKILL)
        hold.go_on.set()
        for batch in batches:
            digest.update(batch["image"].tobytes() + batch["label"].tobytes())
    assert digest.hexdigest() == _expected(folder, False)


def _workers() -> list[int]:
    """Return the processes that this one's zygote has forked."""
    zygote = zygotes._current
    assert zygote is not None
    stats = [place.read_text() for place in Path("/proc").glob("[0-9]*/stat")]
    fields = [(int(stat.split()[0]), stat.rpartition(")")[2].split()) for stat in stats]
    return [pid for pid, (_, parent, *_) in fields if int(parent) == zygote.pid]


def test_two_loaders_that_make_room_for_each_other_give_every_sample(
    store: Scene, url: str, tmp_path: Path, folder: Path, sizes: dict[str, int]
) -> None:
    most = 10 * max(sizes.values())  # each needs 8 at a time, not the same
    given: Any = {"num_workers": 1, "shuffle": "shards", "cache_bytes": most}
    with (
        _program(store, url, tmp_path, 3, **given) as one,
        _program(store, url, tmp_path, 3, seed=1, **given) as two,
    ):
        assert (line_of(one), line_of(two)) == ("open", "open")
        assert line_of(one) == _expected(folder, "shards", 3)
        assert len(line_of(two)) == 64
    held = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.shard"))
    assert held <= most


def test_a_full_disk_is_the_error_that_the_loop_gets(
    store: Scene, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perform = fs.perform

    def refuse(call: str, path: Any, function: Any, *given: Any, **named: Any) -> Any:
        if call == "write" and str(path).endswith(".part"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return perform(call, path, function, *given, **named)

    monkeypatch.setattr(fs, "perform", refuse)
    given: Any = {"output": "numpy", "num_workers": 0}
    with (
        ShardLoader(
            shardio.open(url, cache=tmp_path / "cache", storage_options=store.options), 16, **given
        ) as loader,
        pytest.raises(CacheFull, match="the disk is full: .* bytes are needed"),
    ):
        next(iter(loader))
