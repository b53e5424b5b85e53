"""A dataset in a store is opened and looked at without a shard of it being downloaded."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.dataset.external_lists import external_list_names
from shardio.errors import CacheFull, DatasetCorrupt, InvalidArgument, StoreUnavailable
from shardio.storage.remote.connection import RemoteOptions
from shardio.storage.remote.object_store import ObjectStore
from shardio.storage.remote.storage import ManifestCache
from tests.faults.failing import before_calls, fill_disk
from tests.loading import TWO_FIELDS, two_fields, write_dataset
from tests.shards import MEDIA_FIELDS, media_sample
from tests.storage.remote.scene import RemoteSet, Scene

N, N_SHARDS = 400, 2  # two shards of 1.2 MB


def test_samples_are_read_by_ranges(remote: RemoteSet) -> None:
    with remote.open() as far, shardio.open(remote.folder) as local:
        assert (len(far), far.schema) == (N, local.schema)
        assert sum(remote.store.proxy.requests.values()) == 2  # dataset.json and a generation
        for i in (0, 1, 150, 399):
            assert far[i]["label"] == i
            assert np.array_equal(far[i]["image"], local[i]["image"])
    assert all(n < remote.sizes[name] / 2 for name, n in remote.downloaded().items())


def test_one_read_of_its_end_opens_a_shard(remote: RemoteSet) -> None:
    name, proxy = remote.shards[1].name, remote.store.proxy
    with remote.open() as far:
        assert len(far.reader(1)) == N // 2
    assert (proxy.requests[name], proxy.n_bytes[name]) == (1, 64 << 10)


def test_of_a_web_server_samples_are_read_by_ranges(remote: RemoteSet) -> None:
    web = f"http://127.0.0.1:{remote.store.proxy.server_port}/{remote.url.removeprefix('s3://')}/"
    with shardio.open(web, cache=remote.cache) as far, shardio.open(remote.folder) as local:
        assert np.array_equal(far[399]["image"], local[399]["image"])
    shard = remote.shards[1]
    assert 0 < remote.store.proxy.n_bytes[shard.name] < shard.n_bytes / 2


def test_every_kind_of_field_is_read_by_ranges(store: Scene, tmp_path: Path) -> None:
    write_dataset(tmp_path / "media", 9, 2, MEDIA_FIELDS, (media_sample(i, 9000) for i in range(9)))
    write_dataset(tmp_path / "every", 9, 2)
    for name in ("media", "every"):
        url = store.put_dataset(tmp_path / name, name)
        remote = RemoteSet(store, tmp_path / name, url, tmp_path / "cache")
        with remote.open() as far, shardio.open(remote.folder) as local:
            for one, other in zip(far, local, strict=True):
                found, given = ({k: _plain(v) for k, v in s.items()} for s in (one, other))
                assert repr(found) == repr(given)
            for field in local.schema:
                columns = ([_plain(v) for v in each[field]] for each in (far, local))
                assert len(set(map(repr, columns))) == 1


def _plain(value: Any) -> Any:
    """Return a value without its source."""
    if isinstance(value, bytes):
        return bytes(value)
    data = getattr(value, "data", None)
    return bytes(data) if hasattr(value, "packets") and data is not None else value


def test_a_shard_that_changes_while_it_is_read_is_an_error(remote: RemoteSet) -> None:
    shard = remote.shards[0]
    with remote.open() as far:
        assert far[0]["label"] == 0
        remote.store.put(f"dataset/{shard.name}", remote.content(shard)[:-5000] + bytes(5000))
        with pytest.raises(shardio.ShardCorrupt, match="the object was replaced by another one"):
            far[190]


def test_a_dataset_travels_with_how_it_is_read(remote: RemoteSet) -> None:
    with remote.open() as far:
        assert far.path == far.current_path == remote.url
        with pickle.loads(pickle.dumps(far)) as other, other.select([5]) as some:
            assert (other[3]["label"], some[0]["label"]) == (3, 5)


def test_unreachable_store_uses_mirror(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    with remote.open():
        pass
    remote.store.proxy.is_down = True
    monkeypatch.setattr("shardio.storage.remote.storage._REFRESH_DEADLINE_S", 0.2)
    words = "store unreachable; using the cached manifest"
    with pytest.warns(UserWarning, match=words), remote.open() as far:
        assert len(far) == N
    remote.url = remote.store.url("another")
    with pytest.raises(StoreUnavailable) as caught:
        remote.open(storage_options={**remote.store.options, "deadline_s": 0.2})
    assert remote.url in str(caught.value)


def test_damaged_state_is_downloaded_again(remote: RemoteSet, tmp_path: Path) -> None:
    remote.store.fail("wrong", "generations")
    with remote.open() as far:
        assert len(far) == N
    remote.store.fail("wrong", "generations", times=9)
    with pytest.raises(DatasetCorrupt) as caught:
        remote.open(cache=tmp_path / "other")
    assert "generations/000001.json" in str(caught.value)


def test_another_dataset_in_its_place_is_that_one(remote: RemoteSet, tmp_path: Path) -> None:
    with remote.open():
        pass
    write_dataset(tmp_path / "new", 10, 1, TWO_FIELDS, two_fields(10))
    remote.store.put_dataset(tmp_path / "new", "dataset")
    with remote.open() as far:
        assert (len(far), far[9]["label"]) == (10, 9)


@pytest.mark.parametrize("content", [b"", b'{"generation": 1e999}', b"[[", b"7"])
def test_a_dataset_json_that_is_none_is_damaged(remote: RemoteSet, content: bytes) -> None:
    remote.store.put("dataset/dataset.json", content)
    with pytest.raises(DatasetCorrupt, match=r"dataset\.json"):
        remote.open()


@pytest.mark.parametrize("options", [{5: "word"}, {"client_options": "word"}, "a word"])
def test_options_without_names_are_refused_and_not_shown(options: Any) -> None:
    words = "must be a dict( with string keys|; found a str)"
    with pytest.raises(InvalidArgument, match=words) as caught:
        RemoteOptions.of(None, None, options)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_access_applies_to_downloaded_shards(remote: RemoteSet, access: Any) -> None:
    with remote.open(access=access) as far:
        assert far.access == "pread"  # by ranges
        with shardio.ShardLoader(far, 4, num_workers=0, output="numpy") as loader:
            assert loader.dataset.access == access
            assert len(list(loader)) == -(-N // 4)
    with pytest.raises(InvalidArgument, match="access"):
        remote.open(access="map")


def test_a_file_url_is_refused_with_what_to_pass(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="a dataset is a folder, or a URL that begins with"):
        shardio.open(folder.as_uri())


def test_the_folder_of_the_cache_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDIO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert RemoteOptions().cache_folder == str(Path.cwd() / "here" / "shardio")


def test_full_disk_leaves_no_state(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, end=".tmp")
    with pytest.raises(CacheFull, match=r"disk is full: .* s3://bucket/dataset/dataset\.json,"):
        remote.open()
    assert list(remote.cache.rglob("*.tmp")) == []


def test_how_it_is_read_never_shows_what_is_secret(store: Scene, tmp_path: Path) -> None:
    assert "secret" not in repr(RemoteOptions.of(tmp_path, 5, store.options))


def test_external_lists_are_downloaded_with_the_state(store: Scene, tmp_path: Path) -> None:
    lists = {"shards": {"id": "ab12"}, "inputs": {"id": "cd34"}, "required": ["external_lists"]}
    content = {**lists, "column_groups": [{"shards": {"id": "ef56"}}]}
    names = ["generations/ab12.shards", "generations/cd34.inputs", "generations/ef56.shards"]
    store.put("long/dataset.json", b'{"generation": 1}')
    store.put("long/generations/000001.json", json.dumps(content).encode())
    for name in names:
        store.put(f"long/{name}", name.encode())
    _mirror(tmp_path, ObjectStore(store.url("long"), store.options)).download(None)
    assert [(tmp_path / name).read_text() for name in names] == names


@pytest.mark.parametrize("was_known", [None, "of another dataset"])
def test_newer_state_is_kept(remote: RemoteSet, tmp_path: Path, was_known: str | None) -> None:
    first = _mirror(tmp_path, ObjectStore(remote.url, remote.store.options))
    overtaken = _Overtaken(remote.url, remote.store.options, lambda: first.download(None))
    if was_known:
        first.write("dataset.json", b'{"generation": 1, "lineage": "0123456789abcdef"}')
        first.write("generations/000001.json", was_known.encode())
    _mirror(tmp_path, overtaken).download(None)
    assert (tmp_path / STATE).read_bytes() == (remote.folder / STATE).read_bytes()
    assert remote.store.proxy.requests["000001.json"] == 1


def test_a_state_that_is_being_written_is_not_removed_by_another_process(
    remote: RemoteSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = ObjectStore(remote.url, remote.store.options)
    mirror, other = (_mirror(tmp_path, objects) for _ in range(2))

    def remove(call: str, path: str) -> None:
        if call == "rename":
            other.invalidate()

    before_calls(monkeypatch, remove)
    mirror.download(None)
    assert (tmp_path / STATE).read_bytes() == (remote.folder / STATE).read_bytes()


STATE = "generations/000001.json"


def _mirror(folder: Path, objects: ObjectStore) -> ManifestCache:
    return ManifestCache(str(folder), objects, external_list_names)


class _Overtaken(ObjectStore):
    """Objects of a process that gets `dataset.json`, and then is overtaken by another one."""

    def __init__(self, url: str, options: Any, overtake: Callable[[], None]) -> None:
        super().__init__(url, options)
        self._overtake = overtake

    def read(self, name: str, **given: Any) -> bytes:
        found = super().read(name, **given)
        if name == "dataset.json":
            self._overtake()
        return found
