"""Whole shards in a folder that all processes share: verified, never downloaded twice, bounded."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from shardio import ShardReader
from shardio.dataset.manifest import load
from shardio.errors import CacheFull, ShardCorrupt, ShardUnsupported, UnsupportedEnvironment
from shardio.shard.writer import ShardSummary
from shardio.storage import fs
from shardio.storage.remote.cache import ShardCache, verify_download
from shardio.storage.remote.cache_folder import CacheEvictor, holds_folder_lock, try_exclusive
from shardio.storage.remote.object_store import ObjectStore
from tests.limits import files_of_at_most
from tests.loading import TWO_FIELDS, two_fields, write_dataset
from tests.shards import write_media, write_shard
from tests.storage.remote.scene import Fault, Scene, line_of, program

N = 5
HOLDER = """
import json, sys
from shardio.storage.remote.cache import ShardCache
from shardio.storage.remote.object_store import ObjectStore
from shardio.shard.writer import ShardSummary
folder, url, options, *shards = json.loads(sys.argv[1])
cache = ShardCache(folder, None, ObjectStore(url, options))
for shard in shards:
    cache.pin(ShardSummary(*shard))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset of 5 shards, all of about the same size."""
    place = tmp_path_factory.mktemp("cache") / "set"
    write_dataset(place, 50, N, TWO_FIELDS, two_fields(50))
    return place


@pytest.fixture(scope="module")
def shards(folder: Path) -> tuple[ShardSummary, ...]:
    return tuple(load(folder).shards)


@pytest.fixture
def url(store: Scene, folder: Path) -> str:
    return store.put_dataset(folder, "cached")


@contextmanager
def _cache(store: Scene, url: str, tmp_path: Path, most: int | None = None) -> Iterator[ShardCache]:
    cache = ShardCache(str(tmp_path / "cache"), most, ObjectStore(url, store.options))
    try:
        yield cache
    finally:
        cache.close()


@contextmanager
def _holder(
    store: Scene, url: str, tmp_path: Path, shards: tuple[ShardSummary, ...]
) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds some shards until it is told to end."""
    facts = [(s.name, s.n_samples, s.n_bytes, s.id) for s in shards]
    told = [str(tmp_path / "cache"), url, store.options, *facts]
    with program(HOLDER, told) as process:
        yield process


def _names(tmp_path: Path) -> list[str]:
    return sorted(path.name.split(".")[0] for path in (tmp_path / "cache").rglob("*.shard"))


def test_a_shard_is_downloaded_once_and_is_there_without_the_store(
    store: Scene, url: str, tmp_path: Path, folder: Path, shards: tuple[ShardSummary, ...]
) -> None:
    for _ in range(2):
        with _cache(store, url, tmp_path) as cache:
            for shard in shards:
                found = Path(cache.pin(shard)).read_bytes()
                assert found == (folder / shard.name).read_bytes()
        store.proxy.is_down = True
    assert store.proxy.n_bytes == {shard.name: shard.n_bytes for shard in shards}
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_shard_that_is_removed_while_it_is_held_is_an_error_and_not_waited_for(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
) -> None:
    monkeypatch.setattr("shardio.storage.remote.cache._MAX_WAIT_S", 0.1)
    with _cache(store, url, tmp_path) as cache:
        os.unlink(cache.pin(shards[0]))
        with pytest.raises(UnsupportedEnvironment, match="was removed or changed while"):
            cache.pin(shards[0])
        cache.unpin(shards[0])
        cache.pin(shards[0])


def test_shards_of_equal_content_are_held_and_make_room_each_by_itself(
    store: Scene, tmp_path: Path, equal_shards: Path
) -> None:
    found = load(equal_shards).shards
    one, other, third = found[0], found[8], found[16]
    assert one.id == other.id == third.id
    url = store.put_dataset(equal_shards, "equal")
    with _cache(store, url, tmp_path, 2 * one.n_bytes) as cache:
        content = (equal_shards / one.name).read_bytes()
        for shard in (one, other):
            assert Path(cache.pin(shard)).read_bytes() == content
        cache.unpin(one)
        cache.pin(third)
        assert _names(tmp_path) == [shard.name.split(".")[0] for shard in (other, third)]
    taken = {shard.name: shard.n_bytes for shard in (one, other, third)}
    assert store.proxy.n_bytes == taken


def test_a_process_waits_for_the_shard_that_it_needs_and_not_for_one_of_equal_content(
    store: Scene, tmp_path: Path, equal_shards: Path
) -> None:
    one, other = load(equal_shards).shards[0:9:8]
    url, hold = store.put_dataset(equal_shards, "equal"), Fault("hold", one.name)
    store.proxy.faults = [hold]
    with (
        _holder(store, url, tmp_path, (one,)) as process,
        _cache(store, url, tmp_path) as cache,
    ):
        assert hold.met.wait(60)
        cache.pin(other)
        hold.go_on.set()
        assert line_of(process) == "held"
        cache.pin(one)
    assert store.proxy.n_bytes == {shard.name: shard.n_bytes for shard in (one, other)}


@pytest.mark.parametrize("stem", ["a" * 249, "\N{SNOWMAN}" * 83])
def test_a_shard_of_the_longest_name_has_a_file_in_the_cache(
    store: Scene, tmp_path: Path, equal_shards: Path, stem: str
) -> None:
    known = load(equal_shards).shards[0]
    content = (equal_shards / known.name).read_bytes()
    shard = replace(known, name=f"{stem}.shard")
    store.put(f"long/{quote(shard.name)}", content)
    with _cache(store, store.url("long"), tmp_path) as cache:
        assert Path(cache.pin(shard)).read_bytes() == content
    assert CacheEvictor(str(tmp_path / "cache"), None).used_bytes() == shard.n_bytes


def test_what_is_not_of_the_cache_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    foreign = [tmp_path / "set" / name for name in ("a.shard", "a.12.shard", "a.30.part", "used")]
    (tmp_path / "set").mkdir()
    for path in foreign:
        path.write_bytes(bytes(30))
    room = CacheEvictor(str(tmp_path), 1)
    assert (room.used_bytes(), room.evict(99)) == (0, False)
    room.reserve(str(tmp_path / "set" / f".a.{'12' * 16}.shard.1.part"), 1)
    assert all(path.exists() for path in foreign)


def test_processes_share_what_one_has_downloaded(
    store: Scene, url: str, tmp_path: Path, shards: tuple[ShardSummary, ...]
) -> None:
    hold = Fault("hold", shards[0].name)
    store.proxy.faults = [hold]
    with _holder(store, url, tmp_path, shards) as one, _holder(store, url, tmp_path, shards) as two:
        assert hold.met.wait(60)
        hold.go_on.set()
        assert line_of(one) == line_of(two) == "held"
    assert store.proxy.n_bytes == {shard.name: shard.n_bytes for shard in shards}


def test_what_a_killed_process_was_downloading_is_gone_on_with(
    store: Scene,
    url: str,
    tmp_path: Path,
    shards: tuple[ShardSummary, ...],
    folder: Path,
) -> None:
    half = shards[0].n_bytes // 2
    with _holder(store, url, tmp_path, shards[1:2]) as process:  # for the names of its files
        assert line_of(process) == "held"
    with _cache(store, url, tmp_path) as cache:
        part = Path(cache.root) / f".{Path(cache.path_of(shards[0])).name}.{shards[0].n_bytes}.part"
    hold = Fault("hold", shards[0].name)
    store.proxy.faults = [hold]
    part.write_bytes((folder / shards[0].name).read_bytes()[:half])
    with _holder(store, url, tmp_path, shards[:1]) as process:
        assert hold.met.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
    hold.go_on.set()
    store.proxy.forget()
    with _cache(store, url, tmp_path) as cache:
        found = Path(cache.pin(shards[0])).read_bytes()
    assert found == (folder / shards[0].name).read_bytes()
    assert store.proxy.n_bytes[shards[0].name] == shards[0].n_bytes - half
    assert not part.exists()


def test_what_was_used_least_recently_makes_room_and_what_is_in_use_never_does(
    store: Scene, url: str, tmp_path: Path, shards: tuple[ShardSummary, ...]
) -> None:
    most = sum(shard.n_bytes for shard in shards[:3])
    with _holder(store, url, tmp_path, shards[:1]) as process:
        assert line_of(process) == "held"
        with _cache(store, url, tmp_path, most) as cache:
            for k in (1, 2, 1, 3):  # 2 is older than 1 when 3 comes
                path = cache.pin(shards[k])
                cache.unpin(shards[k])
                os.utime(f"{path}.ok", (k, k) if k == 2 else None)
            assert _names(tmp_path) == [shards[k].name.split(".")[0] for k in (0, 1, 3)]
            assert sum(p.stat().st_size for p in tmp_path.rglob("*.shard")) <= most


def test_a_shard_counts_as_used_until_it_is_released(
    store: Scene, url: str, tmp_path: Path, shards: tuple[ShardSummary, ...]
) -> None:
    with _cache(store, url, tmp_path, sum(shard.n_bytes for shard in shards[:2])) as cache:
        path = cache.pin(shards[0])
        os.utime(f"{path}.ok", (1, 1))  # held for long
        cache.pin(shards[1])
        cache.unpin(shards[0])
        assert os.stat(f"{path}.ok").st_mtime > 2
        cache.unpin(shards[1])
        os.utime(f"{cache.path_of(shards[1])}.ok", (2, 2))
        cache.pin(shards[2])
        assert _names(tmp_path) == [shards[k].name.split(".")[0] for k in (0, 2)]


def test_where_all_is_in_use_more_lies_there_than_was_asked_for_and_a_warning_says_so(
    store: Scene, url: str, tmp_path: Path, shards: tuple[ShardSummary, ...]
) -> None:
    with _cache(store, url, tmp_path, shards[0].n_bytes) as cache:
        cache.pin(shards[0])
        with pytest.warns(UserWarning, match="in use at once and .* beyond cache_bytes="):
            cache.pin(shards[1])
        cache.pin(shards[2])  # without another warning, which would be an error
        assert len(_names(tmp_path)) == 3


def test_what_was_too_much_goes_with_the_last_that_used_it(
    store: Scene, url: str, tmp_path: Path, shards: tuple[ShardSummary, ...]
) -> None:
    most = 2 * max(shard.n_bytes for shard in shards)
    with (
        _holder(store, url, tmp_path, shards[:2]) as other,
        _cache(store, url, tmp_path, most) as cache,
        pytest.warns(UserWarning, match="in use at once"),
    ):
        assert line_of(other) == "held"
        for shard in shards[2:4]:
            cache.pin(shard)
        for shard in shards[2:4]:
            cache.unpin(shard)
        assert len(_names(tmp_path)) == 4
        cache.close()
        assert _names(tmp_path) == [shard.name.split(".")[0] for shard in shards[:2]]
        n_bytes = sum(shard.n_bytes for shard in shards[:2])
        assert (tmp_path / "cache" / "used").read_text() == str(n_bytes)
        cache.close()
        assert len(_names(tmp_path)) == 2


def test_a_cache_that_is_closed_in_the_middle_of_a_download_waits_for_nobody(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
) -> None:
    perform = fs.perform

    def close(call: str, path: str, function: Any, *given: Any, **named: Any) -> Any:
        if call == "create" and path.endswith(".part"):
            other.close()  # as a finalizer may
        return perform(call, path, function, *given, **named)

    objects = ObjectStore(url, store.options)
    other, cache = (ShardCache(str(tmp_path / "cache"), 1 << 30, objects) for _ in range(2))
    monkeypatch.setattr(fs, "perform", close)
    thread = threading.Thread(target=cache.pin, args=(shards[0],), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(_names(tmp_path)) == 1
    cache.close()


def test_a_shard_gets_its_name_while_nobody_counts_what_lies_there(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
) -> None:
    perform, renamed = fs.perform, []

    def look(call: str, path: Any, function: Any, *given: Any, **named: Any) -> Any:
        if call == "rename":
            renamed.append(path)
            fd = os.open(tmp_path / "cache", os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)
        return perform(call, path, function, *given, **named)

    with _cache(store, url, tmp_path) as cache:
        monkeypatch.setattr(fs, "perform", look)
        cache.pin(shards[0])
    assert len(renamed) == 1


def test_who_only_had_a_look_removes_nothing(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
) -> None:
    with _cache(store, url, tmp_path, 1 << 30) as cache:
        cache.pin(shards[0])
        cache.unpin(shards[0])
    full = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    with monkeypatch.context() as during:
        during.setattr("os.statvfs", lambda _: full)
        with _cache(store, url, tmp_path) as cache:
            assert cache.max_bytes < shards[0].n_bytes
        assert len(_names(tmp_path)) == 1
        with _cache(store, url, tmp_path) as cache, pytest.warns(UserWarning, match="in use"):
            cache.pin(shards[1])
            cache.unpin(shards[1])
        assert _names(tmp_path) == []
    with _cache(store, url, tmp_path, 1 << 30) as cache:
        cache.pin(shards[0])
        cache.unpin(shards[0])
    (tmp_path / "cache" / "used").write_text("")  # as by who was killed while writing it
    with _cache(store, url, tmp_path, 1):
        pass
    assert _names(tmp_path) == []


def test_a_dataset_that_is_removed_meanwhile_is_not_counted(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
) -> None:
    scandir, gone = os.scandir, tmp_path / "cache" / "of another"

    def look(place: Any) -> Any:
        if os.fspath(place) == os.fspath(gone):
            gone.rmdir()
        return scandir(place)

    with _cache(store, url, tmp_path) as cache:
        gone.mkdir()
        monkeypatch.setattr(os, "scandir", look)
        cache.pin(shards[0])
    assert not gone.exists()


def test_a_dataset_that_is_removed_while_room_is_made_hinders_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"a.{'12' * 16}.shard").write_bytes(bytes(30))

    def remove(path: str, byte: int) -> Any:
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        return try_exclusive(path, byte)

    monkeypatch.setattr("shardio.storage.remote.cache_folder.try_exclusive", remove)
    assert CacheEvictor(str(tmp_path), 40).evict(60)
    assert list(tmp_path.rglob("*.shard")) == []


def test_a_cache_that_is_removed_while_it_is_in_use_is_an_error(
    store: Scene, url: str, tmp_path: Path, shards: tuple[ShardSummary, ...]
) -> None:
    with _cache(store, url, tmp_path) as cache:
        shutil.rmtree(cache.root)
        assert cache.pin_if_cached(shards[0]) is None
        with pytest.raises(
            UnsupportedEnvironment, match=f"^{cache.root}: the cache was removed while"
        ):
            cache.pin(shards[0])


@pytest.mark.parametrize("what", ["a file", "read-only"])
def test_what_cannot_be_a_cache_is_an_error_that_says_how_to_name_another(
    store: Scene, url: str, tmp_path: Path, what: str
) -> None:
    if what == "a file":
        (tmp_path / "cache").write_text(what)
    else:
        with _cache(store, url, tmp_path) as cache:
            locks = Path(cache.root, "locks")
        locks.unlink()
        locks.mkdir()  # which not even root can write to
    with (
        pytest.raises(UnsupportedEnvironment, match=r"/cache: not usable as a cache .* by `cache`"),
        _cache(store, url, tmp_path),
    ):
        pass


def test_who_is_killed_while_room_is_made_has_counted_too_much_rather_than_too_little(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
) -> None:
    _fill_disk(monkeypatch, 99, "create")
    with _cache(store, url, tmp_path) as cache:
        with pytest.raises(CacheFull):
            cache.pin(shards[0])
        assert (tmp_path / "cache" / "used").read_text() == str(shards[0].n_bytes)


def test_bytes_that_came_as_of_another_version_are_downloaded_again(
    store: Scene, url: str, tmp_path: Path, folder: Path, shards: tuple[ShardSummary, ...]
) -> None:
    whole = (folder / shards[0].name).read_bytes()
    newer = whole[:8] + bytes([whole[8] ^ 128]) + whole[9:]
    with _cache(store, url, tmp_path) as cache:
        path = Path(cache.path_of(shards[0]))
        part = path.with_name(f".{path.name}.{shards[0].n_bytes}.part")
        part.write_bytes(newer)
        assert Path(cache.pin(shards[0])).read_bytes() == whole
        cache.unpin(shards[0])
        path.write_bytes(newer)
        assert Path(cache.pin(shards[0])).read_bytes() == whole
        cache.unpin(shards[0])
        path.unlink()
        store.put(f"cached/{shards[0].name}", newer)
        with pytest.raises(ShardUnsupported, match=f"^{url}/{shards[0].name}: format version 129"):
            cache.pin(shards[0])
        assert not part.exists()


def test_wrong_bytes_are_downloaded_again(
    store: Scene, url: str, tmp_path: Path, folder: Path, shards: tuple[ShardSummary, ...]
) -> None:
    store.proxy.faults = [Fault("wrong", times=2)]
    with _cache(store, url, tmp_path) as cache:
        found = Path(cache.pin(shards[0])).read_bytes()
    assert found == (folder / shards[0].name).read_bytes()


def test_an_object_that_is_damaged_is_an_error_that_names_its_url(
    store: Scene, url: str, tmp_path: Path, shards: tuple[ShardSummary, ...]
) -> None:
    store.proxy.faults = [Fault("wrong", times=9)]
    with (
        _cache(store, url, tmp_path) as cache,
        pytest.raises(ShardCorrupt, match=f"^{url}/{shards[0].name}: the object .* is damaged"),
    ):
        cache.pin(shards[0])
    assert store.proxy.faults[0].times == 6
    assert _names(tmp_path) == []


def _fill_disk(
    monkeypatch: pytest.MonkeyPatch, n_refused: int, call_refused: str = "write", end: str = ".part"
) -> None:
    """Make the disk refuse n writes of downloads."""
    left, perform = [n_refused], fs.perform

    def refuse(call: str, path: str, function: Any, *given: Any, **named: Any) -> Any:
        if call == call_refused and path.endswith(end) and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return perform(call, path, function, *given, **named)

    monkeypatch.setattr(fs, "perform", refuse)


@pytest.mark.parametrize(
    ("call", "end"), [("create", ".part"), ("write", ".part"), ("create", ".ok"), ("write", ".ok")]
)
def test_a_full_disk_gets_room_from_what_nobody_uses(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
    call: str,
    end: str,
) -> None:
    with _cache(store, url, tmp_path) as cache:
        cache.pin(shards[0])
        cache.unpin(shards[0])
        _fill_disk(monkeypatch, 1, call, end)
        cache.pin(shards[1])
    assert _names(tmp_path) == [shards[1].name.split(".")[0]]


def test_room_for_a_full_disk_is_made_while_nobody_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheEvictor, "_evict_unused", lambda *_: int(holds_folder_lock()))
    assert CacheEvictor(str(tmp_path), None).evict(5)


def test_what_is_gone_on_with_is_counted_once(tmp_path: Path) -> None:
    room, half = (
        CacheEvictor(str(tmp_path), 100),
        tmp_path / "set" / f".a.{'12' * 16}.shard.30.part",
    )
    half.parent.mkdir()
    for _ in range(2):
        room.reserve(str(half), 30)
        assert (tmp_path / "used").read_text() == "30"
        assert room.used_bytes() == 30  # though nothing of it has come yet


def test_where_many_shards_are_there_more_is_removed_at_a_time(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
) -> None:
    most = sum(shard.n_bytes for shard in shards[:3])
    with _cache(store, url, tmp_path, most) as cache:
        for shard in shards[:4]:
            cache.pin(shard)
            cache.unpin(shard)
        assert len(_names(tmp_path)) == 3
        monkeypatch.setattr("shardio.storage.remote.cache_folder._MANY_FILES", 2)
        cache.pin(shards[4])
        assert len(_names(tmp_path)) == 2


def test_a_full_disk_with_nothing_to_remove_is_an_error_that_says_what_is_needed(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
) -> None:
    with _cache(store, url, tmp_path) as cache:
        cache.pin(shards[0])
        _fill_disk(monkeypatch, 99)
        with pytest.raises(CacheFull, match=f"{shards[1].n_bytes} bytes are needed .* in use"):
            cache.pin(shards[1])


def test_a_shard_that_is_larger_than_a_file_may_be_says_so_and_is_gone_on_with_later(
    store: Scene, url: str, tmp_path: Path, shards: tuple[ShardSummary, ...]
) -> None:
    n_bytes, half = shards[0].n_bytes, shards[0].n_bytes // 2
    words = f"needs at least {n_bytes} bytes, and RLIMIT_FSIZE allows {half}: .*{shards[0].id}"
    with _cache(store, url, tmp_path) as cache:
        with files_of_at_most(half), pytest.raises(OSError, match=words):
            cache.pin(shards[0])
        store.proxy.forget()
        cache.pin(shards[0])
    assert store.proxy.n_bytes == {shards[0].name: n_bytes - half}


def test_after_the_machine_has_started_anew_what_is_there_is_verified_once_more(
    store: Scene,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shards: tuple[ShardSummary, ...],
) -> None:
    with _cache(store, url, tmp_path) as cache:
        sound, torn = cache.pin(shards[0]), cache.pin(shards[1])
        for shard in shards[:2]:
            cache.unpin(shard)
    with open(torn, "r+b") as file:
        file.seek(5000)
        file.write(b"torn")
    monkeypatch.setattr("shardio.storage.remote.cache._boot_id", lambda: "another")
    store.proxy.forget()
    with _cache(store, url, tmp_path) as cache:
        assert [cache.pin(shard) for shard in shards[:2]] == [sound, torn]
    assert store.proxy.n_bytes == {shards[1].name: shards[1].n_bytes}


@pytest.mark.parametrize("write", [write_shard, write_media])
def test_a_byte_that_changed_on_its_way_is_noticed_wherever_it_lies(
    tmp_path: Path, write: Any
) -> None:
    path = tmp_path / "a.shard"
    write(path, 12)
    whole = path.read_bytes()
    with ShardReader(path) as reader:
        sections = [s for s in reader.sections if s.size]
        shard = ShardSummary("a.shard", len(reader), len(whole), reader.id)
    verify_download(str(path), shard)
    # Not the last bytes: behind the last row of a column may be padding, which nobody reads.
    places = [s.offset + at for s in sections for at in {0, s.size // 2, max(0, s.size - 99)}]
    missed = []
    for at in (100, *places, len(whole) - 4000):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            verify_download(str(path), shard)
        except ShardCorrupt:
            continue
        missed.append(next((s.name for s in sections if s.offset <= at < s.end), at))
    assert missed == []
