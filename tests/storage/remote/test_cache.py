"""Whole shards in a folder that all processes share: verified, never downloaded twice, bounded."""

from __future__ import annotations

import errno
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
from shardio.errors import CacheFull, ShardCorrupt, ShardUnsupported, UnsupportedEnvironment
from shardio.shard.writer import ShardSummary
from shardio.storage.remote.cache import ShardCache, verify_download
from shardio.storage.remote.cache_folder import CacheEvictor, holds_folder_lock, try_exclusive
from tests.faults.failing import before_calls, fill_disk
from tests.limits import files_of_at_most
from tests.shards import write_media, write_shard
from tests.storage.remote.scene import RemoteSet, line_of

N, N_SHARDS = 50, 5
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


@contextmanager
def _holder(remote: RemoteSet, *shards: ShardSummary) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds some shards until it is told to end."""
    facts = [(s.name, s.n_samples, s.n_bytes, s.id) for s in shards]
    argument = [str(remote.cache), remote.url, remote.store.options, *facts]
    with remote.store.program(HOLDER, argument) as process:
        yield process


def _pinned(cache: ShardCache, shard: ShardSummary) -> bytes:
    """Pin a shard and return its content."""
    return Path(cache.pin(shard)).read_bytes()


def _use(cache: ShardCache, *shards: ShardSummary) -> None:
    for shard in shards:
        cache.pin(shard)
        cache.unpin(shard)


def _part_of(cache: ShardCache, shard: ShardSummary) -> Path:
    """Return the path of a partial download."""
    path = Path(cache.path_of(shard))
    return path.with_name(f".{path.name}.{shard.n_bytes}.part")


def test_a_shard_is_downloaded_once_and_is_there_without_the_store(remote: RemoteSet) -> None:
    for _ in range(2):
        with remote.open_cache() as cache:
            for shard in remote.shards:
                assert _pinned(cache, shard) == remote.content(shard)
        remote.store.proxy.is_down = True
    assert remote.store.proxy.n_bytes == remote.sizes
    assert remote.cache.stat().st_mode & 0o777 == 0o700


def test_removed_pinned_shard_is_error(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.storage.remote.cache._MAX_WAIT_S", 0.1)
    with remote.open_cache() as cache:
        os.unlink(cache.pin(remote.shards[0]))
        with pytest.raises(UnsupportedEnvironment, match="was removed or changed while"):
            cache.pin(remote.shards[0])
        cache.unpin(remote.shards[0])
        cache.pin(remote.shards[0])


def test_shards_of_equal_content_are_held_and_make_room_each_by_itself(equal: RemoteSet) -> None:
    one, other, third = (equal.shards[k] for k in (0, 8, 16))
    assert one.id == other.id == third.id
    with equal.open_cache(2 * one.n_bytes) as cache:
        for shard in (one, other):
            assert _pinned(cache, shard) == equal.content(one)
        cache.unpin(one)
        cache.pin(third)
        assert equal.cached() == [8, 16]
    assert equal.store.proxy.n_bytes == {s.name: s.n_bytes for s in (one, other, third)}


def test_waits_for_its_own_shard_but_not_for_an_equal_one(equal: RemoteSet) -> None:
    one, other = equal.shards[0:9:8]
    hold = equal.store.fail("hold", one.name)
    with _holder(equal, one) as process, equal.open_cache() as cache:
        assert hold.met.wait(60)
        cache.pin(other)
        hold.go_on.set()
        assert line_of(process) == "held"
        cache.pin(one)
    assert equal.store.proxy.n_bytes == {shard.name: shard.n_bytes for shard in (one, other)}


@pytest.mark.parametrize("stem", ["a" * 249, "\N{SNOWMAN}" * 83])
def test_a_shard_of_the_longest_name_has_a_file_in_the_cache(remote: RemoteSet, stem: str) -> None:
    content = remote.content(remote.shards[0])
    shard = replace(remote.shards[0], name=f"{stem}.shard")
    remote.store.put(f"cache/{quote(shard.name)}", content)
    with remote.open_cache() as cache:
        assert _pinned(cache, shard) == content
    assert CacheEvictor(str(remote.cache), None).used_bytes() == shard.n_bytes


def test_what_is_not_of_the_cache_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    foreign = [tmp_path / "set" / name for name in ("a.shard", "a.12.shard", "a.30.part", "used")]
    (tmp_path / "set").mkdir()
    for path in foreign:
        path.write_bytes(bytes(30))
    room = CacheEvictor(str(tmp_path), 1)
    assert (room.used_bytes(), room.evict(99)) == (0, False)
    room.reserve(str(tmp_path / "set" / f".a.{'12' * 16}.shard.1.part"), 1)
    assert all(path.exists() for path in foreign)


def test_what_a_killed_process_was_downloading_is_gone_on_with(remote: RemoteSet) -> None:
    shard, half = remote.shards[0], remote.shards[0].n_bytes // 2
    with remote.open_cache() as cache:
        part = _part_of(cache, shard)
    part.write_bytes(remote.content(shard)[:half])
    hold = remote.store.fail("hold", shard.name)
    with _holder(remote, shard) as process:
        assert hold.met.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
    hold.go_on.set()
    remote.store.proxy.forget()
    with remote.open_cache() as cache:
        assert _pinned(cache, shard) == remote.content(shard)
    assert remote.store.proxy.n_bytes == {shard.name: shard.n_bytes - half}
    assert not part.exists()


def test_least_recently_used_is_evicted_and_never_a_pinned_shard(remote: RemoteSet) -> None:
    most = sum(shard.n_bytes for shard in remote.shards[:3])
    with _holder(remote, remote.shards[0]) as process:
        assert line_of(process) == "held"
        with remote.open_cache(most) as cache:
            for k in (1, 2, 1, 3):  # 2 is older than 1 when 3 comes
                _use(cache, remote.shards[k])
                os.utime(f"{cache.path_of(remote.shards[k])}.ok", (k, k) if k == 2 else None)
            assert remote.cached() == [0, 1, 3]
            assert sum(path.stat().st_size for path in remote.files()) <= most


def test_a_shard_counts_as_used_until_it_is_released(remote: RemoteSet) -> None:
    first, second, third, *_ = remote.shards
    with remote.open_cache(first.n_bytes + second.n_bytes) as cache:
        path = cache.pin(first)
        os.utime(f"{path}.ok", (1, 1))  # held for long
        cache.pin(second)
        cache.unpin(first)
        assert os.stat(f"{path}.ok").st_mtime > 2
        cache.unpin(second)
        os.utime(f"{cache.path_of(second)}.ok", (2, 2))
        cache.pin(third)
        assert remote.cached() == [0, 2]


def test_pinned_shards_may_exceed_cache_bytes_with_one_warning(remote: RemoteSet) -> None:
    with remote.open_cache(remote.shards[0].n_bytes) as cache:
        cache.pin(remote.shards[0])
        with pytest.warns(UserWarning, match="in use at once and .* beyond cache_bytes="):
            cache.pin(remote.shards[1])
        cache.pin(remote.shards[2])  # without another warning, which would be an error
        assert remote.cached() == [0, 1, 2]


def test_what_was_too_much_goes_with_the_last_that_used_it(remote: RemoteSet) -> None:
    most = 2 * max(remote.sizes.values())
    with (
        _holder(remote, *remote.shards[:2]) as other,
        remote.open_cache(most) as cache,
        pytest.warns(UserWarning, match="in use at once"),
    ):
        assert line_of(other) == "held"
        for change in (cache.pin, cache.unpin):
            for shard in remote.shards[2:4]:
                change(shard)
        assert remote.cached() == [0, 1, 2, 3]
        for _ in range(2):
            cache.close()
            assert remote.cached() == [0, 1]
            n_bytes = sum(shard.n_bytes for shard in remote.shards[:2])
            assert (remote.cache / "used").read_text() == str(n_bytes)


def test_close_during_download_returns(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(call: str, path: str) -> None:
        if call == "create" and path.endswith(".part"):
            other.close()  # as a finalizer may

    with remote.open_cache(1 << 30) as other, remote.open_cache(1 << 30) as cache:
        before_calls(monkeypatch, close)
        thread = threading.Thread(target=cache.pin, args=(remote.shards[0],), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert remote.cached() == [0]


def test_opening_alone_evicts_nothing(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    with remote.open_cache(1 << 30) as cache:
        _use(cache, remote.shards[0])
    full = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    with monkeypatch.context() as during:
        during.setattr("os.statvfs", lambda _: full)
        with remote.open_cache() as cache:
            assert cache.max_bytes < remote.shards[0].n_bytes
        assert remote.cached() == [0]
        with remote.open_cache() as cache, pytest.warns(UserWarning, match="in use"):
            _use(cache, remote.shards[1])
        assert remote.cached() == []
    with remote.open_cache(1 << 30) as cache:
        _use(cache, remote.shards[0])
    (remote.cache / "used").write_text("")  # as by who was killed while writing it
    with remote.open_cache(1):
        pass
    assert remote.cached() == []


def test_a_cache_that_is_removed_while_it_is_in_use_is_an_error(remote: RemoteSet) -> None:
    with remote.open_cache() as cache:
        shutil.rmtree(cache.root)
        assert cache.pin_if_cached(remote.shards[0]) is None
        words = f"^{cache.root}: the cache was removed while"
        with pytest.raises(UnsupportedEnvironment, match=words):
            cache.pin(remote.shards[0])


@pytest.mark.parametrize("what", ["a file", "read-only", "no locks"])
def test_unusable_cache_folder_is_reported(
    remote: RemoteSet, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "a file":
        remote.cache.write_text(what)
    elif what == "no locks":

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr("shardio.storage.remote.cache_folder.fcntl.fcntl", refuse)
    else:
        with remote.open_cache() as cache:
            locks = Path(cache.root, "locks")
        locks.unlink()
        locks.mkdir()  # which not even root can write to
    words = r"/cache: not usable as a cache .* with `cache`"
    with pytest.raises(UnsupportedEnvironment, match=words), remote.open_cache():
        pass


def test_killed_eviction_overcounts(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, kind="create")
    with remote.open_cache() as cache:
        with pytest.raises(CacheFull) as caught:
            cache.pin(remote.shards[0])
        assert str(remote.cache) in str(caught.value)
        assert (remote.cache / "used").read_text() == str(remote.shards[0].n_bytes)


def test_bytes_that_came_as_of_another_version_are_downloaded_again(remote: RemoteSet) -> None:
    shard = remote.shards[0]
    whole = remote.content(shard)
    newer = whole[:8] + bytes([whole[8] ^ 128]) + whole[9:]
    with remote.open_cache() as cache:
        path, part = Path(cache.path_of(shard)), _part_of(cache, shard)
        for damaged in (part, path):
            damaged.write_bytes(newer)
            assert _pinned(cache, shard) == whole
            cache.unpin(shard)
        path.unlink()
        remote.store.put(f"cache/{shard.name}", newer)
        words = f"^{remote.url}/{shard.name}: format version 129"
        with pytest.raises(ShardUnsupported, match=words):
            cache.pin(shard)
        assert not part.exists()


def test_wrong_bytes_are_retried_and_a_damaged_object_is_named(remote: RemoteSet) -> None:
    shard, other, *_ = remote.shards
    remote.store.fail("wrong", shard.name, times=2)
    fault = remote.store.fail("wrong", other.name, times=9)
    words = f"^{remote.url}/{other.name}: the object .* is damaged"
    with remote.open_cache() as cache:
        assert _pinned(cache, shard) == remote.content(shard)
        with pytest.raises(ShardCorrupt, match=words):
            cache.pin(other)
    assert (fault.times, remote.cached()) == (6, [0])


def test_eviction_survives_removed_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gone", "here", "last"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"a.{'12' * 16}.shard").write_bytes(bytes(30))
    scandir = os.scandir

    def scan(place: Any) -> Any:
        if str(place).endswith("last"):
            shutil.rmtree(tmp_path / "last", ignore_errors=True)
        return scandir(place)

    def remove(path: str, byte: int) -> Any:
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        return try_exclusive(path, byte)

    evictor = CacheEvictor(str(tmp_path), 40)
    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr("shardio.storage.remote.cache_folder.try_exclusive", remove)
    assert evictor.evict(60)
    assert list(tmp_path.rglob("*.shard")) == []


def test_renames_happen_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evictor = CacheEvictor(str(tmp_path), 100)
    half = tmp_path / "set" / f".a.{'12' * 16}.shard.30.part"
    half.parent.mkdir()
    for _ in range(2):  # what is gone on with is counted once
        evictor.reserve(str(half), 30)
        assert (tmp_path / "used").read_text() == "30" and evictor.used_bytes() == 30
    locked: list[str] = []
    before_calls(monkeypatch, lambda call, _: locked.append(call * holds_folder_lock()))
    evictor.finish(str(half), str(half.with_name(f"a.{'12' * 16}.shard")))
    monkeypatch.setattr(evictor, "_evict_unused", lambda _: int(holds_folder_lock()))
    assert locked == ["rename"] and evictor.evict(5)


@pytest.mark.parametrize("call", ["create", "write"])
@pytest.mark.parametrize("end", [".part", ".ok"])
def test_a_full_disk_gets_room_from_what_nobody_uses(
    remote: RemoteSet, monkeypatch: pytest.MonkeyPatch, call: str, end: str
) -> None:
    with remote.open_cache() as cache:
        _use(cache, remote.shards[0])
        fill_disk(monkeypatch, 1, call, end)
        cache.pin(remote.shards[1])
    assert remote.cached() == [1]


def test_full_disk_reports_bytes_needed(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = remote.shards
    with remote.open_cache() as cache:
        cache.pin(first)
        fill_disk(monkeypatch)
        with pytest.raises(CacheFull, match=f"{second.n_bytes} bytes are needed .* in use"):
            cache.pin(second)


def test_download_resumes_after_the_file_size_limit_is_raised(remote: RemoteSet) -> None:
    shard, half = remote.shards[0], remote.shards[0].n_bytes // 2
    words = f"RLIMIT_FSIZE allows {half}: .*{shard.id}"
    with remote.open_cache() as cache:
        with files_of_at_most(half), pytest.raises(OSError, match=words):
            cache.pin(shard)
        remote.store.proxy.forget()
        cache.pin(shard)
    assert remote.store.proxy.n_bytes == {shard.name: shard.n_bytes - half}


def test_reboot_verifies_the_cache(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    both = remote.shards[:2]
    with remote.open_cache() as cache:
        _use(cache, *both)
        sound, torn = map(cache.path_of, both)
    with open(torn, "r+b") as file:
        file.seek(5000)
        file.write(b"torn")
    monkeypatch.setattr("shardio.storage.remote.cache._boot_id", lambda: "another")
    remote.store.proxy.forget()
    with remote.open_cache() as cache:
        assert [cache.pin(shard) for shard in both] == [sound, torn]
    assert remote.store.proxy.n_bytes == {both[1].name: both[1].n_bytes}


@pytest.mark.parametrize("write", [write_shard, write_media])
def test_any_corrupted_byte_of_a_download_is_detected(tmp_path: Path, write: Any) -> None:
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


def test_a_manifest_makes_room_on_a_full_disk(
    remote: RemoteSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote.open_cache() as cache:
        _use(cache, *remote.shards)
    assert remote.cached() == [0, 1, 2, 3, 4]
    with monkeypatch.context() as during:
        fill_disk(during, 1, "write", ".tmp")
        with remote.open() as dataset:
            assert len(dataset) == N
    assert remote.cached() == []
    (pointer,) = remote.cache.rglob("dataset.json")
    pointer.unlink()
    fill_disk(monkeypatch, end=".tmp")
    with pytest.raises(CacheFull, match=r"needed for s3://.*/dataset\.json, \d+ are free"):
        remote.open()
