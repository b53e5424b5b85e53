"""A dataset in a store is opened and looked at without a shard of it being downloaded."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.dataset.external_lists import external_list_names
from shardio.errors import DatasetCorrupt, DatasetNotFound, InvalidArgument, StoreUnavailable
from shardio.storage import fs
from shardio.storage.remote.connection import RemoteOptions
from shardio.storage.remote.object_store import ObjectStore
from shardio.storage.remote.storage import ManifestCache
from tests.loading import TWO_FIELDS, two_fields, write_dataset
from tests.shards import MEDIA_FIELDS, media_sample
from tests.storage.remote.scene import Fault, Scene

N = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset of two shards of 1.2 MB."""
    place = tmp_path_factory.mktemp("remote") / "set"
    write_dataset(place, N, 2, TWO_FIELDS, two_fields(N))
    return place


@pytest.fixture
def url(store: Scene, folder: Path) -> str:
    return store.put_dataset(folder, "looked-at")


def _open(store: Scene, url: str, tmp_path: Path, **options: Any) -> shardio.ShardDataset:
    return shardio.open(url, cache=tmp_path / "cache", storage_options={**store.options, **options})


def test_samples_are_read_by_ranges(store: Scene, url: str, tmp_path: Path, folder: Path) -> None:
    with _open(store, url, tmp_path) as remote, shardio.open(folder) as local:
        assert (len(remote), remote.schema) == (N, local.schema)
        assert sum(store.proxy.requests.values()) == 2  # dataset.json and a generation
        for i in (0, 1, 150, 399):
            assert remote[i]["label"] == i
            assert np.array_equal(remote[i]["image"], local[i]["image"])
        sizes = {shard.name: shard.n_bytes for shard in remote.shards}
    assert all(store.proxy.n_bytes[name] < size / 2 for name, size in sizes.items())


def test_one_read_of_its_end_opens_a_shard(store: Scene, url: str, tmp_path: Path) -> None:
    with _open(store, url, tmp_path) as remote:
        name = remote.shards[1].name
        assert len(remote.reader(1)) == N // 2
    assert (store.proxy.requests[name], store.proxy.n_bytes[name]) == (1, 64 << 10)


def test_of_a_web_server_samples_are_read_by_ranges(
    store: Scene, url: str, tmp_path: Path, folder: Path
) -> None:
    web = f"http://127.0.0.1:{store.proxy.server_port}/{url.removeprefix('s3://')}/"
    with shardio.open(web, cache=tmp_path / "cache") as remote, shardio.open(folder) as local:
        assert np.array_equal(remote[399]["image"], local[399]["image"])
        name, size = remote.shards[1].name, remote.shards[1].n_bytes
    assert 0 < store.proxy.n_bytes[name] < size / 2


def test_every_kind_of_field_is_read_by_ranges(store: Scene, tmp_path: Path) -> None:
    write_dataset(tmp_path / "media", 9, 2, MEDIA_FIELDS, (media_sample(i, 9000) for i in range(9)))
    write_dataset(tmp_path / "every", 9, 2)
    for name in ("media", "every"):
        url = store.put_dataset(tmp_path / name, name)
        with _open(store, url, tmp_path) as remote, shardio.open(tmp_path / name) as local:
            for one, other in zip(remote, local, strict=True):
                assert repr({k: _plain(v) for k, v in one.items()}) == repr(
                    {k: _plain(v) for k, v in other.items()}
                )


def _plain(value: Any) -> Any:
    """Return a value without its source."""
    data = getattr(value, "data", None)
    return bytes(data) if hasattr(value, "packets") and data is not None else value


def test_a_shard_that_changes_while_it_is_read_is_an_error(
    store: Scene, tmp_path: Path, folder: Path
) -> None:
    url = store.put_dataset(folder, "changing")
    with _open(store, url, tmp_path) as remote:
        name = remote.shards[0].name
        assert remote[0]["label"] == 0
        whole = (folder / name).read_bytes()
        store.put(f"changing/{name}", whole[:-5000] + bytes(5000))
        with pytest.raises(shardio.ShardCorrupt, match="the object was replaced by another one"):
            remote[190]


def test_a_dataset_travels_with_how_it_is_read(store: Scene, url: str, tmp_path: Path) -> None:
    with _open(store, url, tmp_path) as remote:
        assert remote.path == remote.place == url
        with pickle.loads(pickle.dumps(remote)) as other, other.select([5]) as some:
            assert (other[3]["label"], some[0]["label"]) == (3, 5)


def test_nothing_there_is_no_dataset(store: Scene, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match=r"s3://bucket/nowhere: holds no dataset\.json"):
        _open(store, store.url("nowhere"), tmp_path)


def test_without_its_store_it_is_what_it_was_last_with_a_warning(
    store: Scene, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _open(store, url, tmp_path):
        pass
    store.proxy.is_down = True
    monkeypatch.setattr("shardio.storage.remote.storage._REFRESH_DEADLINE_S", 0.2)
    with (
        pytest.warns(UserWarning, match="store unreachable; using the cached manifest"),
        _open(store, url, tmp_path) as remote,
    ):
        assert len(remote) == N
    with pytest.raises(StoreUnavailable):
        _open(store, store.url("another"), tmp_path, deadline_s=0.2)


def test_a_state_that_was_damaged_on_its_way_is_brought_again(
    store: Scene, url: str, tmp_path: Path
) -> None:
    store.proxy.faults = [Fault("wrong", "generations")]
    with _open(store, url, tmp_path) as remote:
        assert len(remote) == N
    store.proxy.faults = [Fault("wrong", "generations", times=9)]
    with pytest.raises(DatasetCorrupt):
        _open(store, url, tmp_path / "other")


def test_another_dataset_in_its_place_is_that_one(
    store: Scene, tmp_path: Path, folder: Path
) -> None:
    url = store.put_dataset(folder, "replaced")
    with _open(store, url, tmp_path):
        pass
    write_dataset(tmp_path / "new", 10, 1, TWO_FIELDS, two_fields(10))
    store.put_dataset(tmp_path / "new", "replaced")
    with _open(store, url, tmp_path) as remote:
        assert (len(remote), remote[9]["label"]) == (10, 9)


@pytest.mark.parametrize("content", [b"", b'{"generation": 1e999}', b"[[", b"7"])
def test_a_dataset_json_that_is_none_is_damaged(
    store: Scene, tmp_path: Path, content: bytes
) -> None:
    store.put("damaged/dataset.json", content)
    with pytest.raises(DatasetCorrupt, match=r"dataset\.json"):
        _open(store, store.url("damaged"), tmp_path)


@pytest.mark.parametrize("options", [{5: "word"}, {"client_options": "word"}])
def test_options_without_names_are_refused_and_not_shown(options: Any) -> None:
    with pytest.raises(InvalidArgument, match="a dict with string keys") as caught:
        RemoteOptions.of(None, None, options)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_access_is_that_of_shards_which_a_loader_has_downloaded(
    store: Scene, url: str, tmp_path: Path, access: Any
) -> None:
    given: Any = {"cache": tmp_path / "cache", "storage_options": store.options}
    with shardio.open(url, access=access, **given) as remote:
        assert remote.access == "pread"  # by ranges
        with shardio.ShardLoader(remote, 4, num_workers=0, output="numpy") as loader:
            assert loader.dataset.access == access
            assert len(list(loader)) == -(-N // 4)
    with pytest.raises(InvalidArgument, match="access"):
        shardio.open(url, access="map", **given)  # type: ignore[arg-type]


def test_a_file_url_is_a_folder(folder: Path) -> None:
    with shardio.open(folder.as_uri()) as local:
        assert len(local) == N


def test_the_folder_of_the_cache_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDIO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert RemoteOptions().cache_folder == str(Path.cwd() / "here" / "shardio")


def test_a_full_disk_keeps_nothing_of_a_state(
    store: Scene, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perform = fs.perform

    def refuse(call: str, path: Any, function: Any, *given: Any, **named: Any) -> Any:
        if call == "write" and path.endswith(".tmp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return perform(call, path, function, *given, **named)

    monkeypatch.setattr(fs, "perform", refuse)
    with pytest.raises(OSError, match=r"No space left on device: .*dataset\.json"):
        _open(store, url, tmp_path)
    assert list(tmp_path.rglob("*.tmp")) == []


def test_how_it_is_read_never_shows_what_is_secret(store: Scene, tmp_path: Path) -> None:
    assert "secret" not in repr(RemoteOptions.of(tmp_path, 5, store.options))
    with pytest.raises(InvalidArgument) as caught:
        RemoteOptions.of(tmp_path, None, "a secret")  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


def test_the_files_of_long_lists_come_with_the_state_that_names_them(
    store: Scene, tmp_path: Path
) -> None:
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
def test_a_state_that_another_process_has_just_brought_stays(
    store: Scene, url: str, tmp_path: Path, folder: Path, was_known: str | None
) -> None:
    first = _mirror(tmp_path, ObjectStore(url, store.options))
    second = _mirror(tmp_path, _Overtaken(url, store.options, lambda: first.download(None)))
    if was_known:
        first.write("dataset.json", b'{"generation": 1, "lineage": "0123456789abcdef"}')
        first.write("generations/000001.json", was_known.encode())
    second.download(None)
    state = tmp_path / "generations" / "000001.json"
    assert state.read_bytes() == (folder / "generations" / "000001.json").read_bytes()
    assert store.proxy.requests["000001.json"] == 1


def test_a_state_that_is_being_written_is_not_removed_by_another_process(
    store: Scene, url: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, other = (_mirror(tmp_path, ObjectStore(url, store.options)) for _ in range(2))
    perform = fs.perform

    def remove(call: str, path: Any, function: Any, *given: Any, **named: Any) -> Any:
        if call == "rename":
            other.invalidate()
        return perform(call, path, function, *given, **named)

    monkeypatch.setattr(fs, "perform", remove)
    mirror.download(None)
    state = (tmp_path / "generations" / "000001.json").read_bytes()
    assert state == (folder / "generations" / "000001.json").read_bytes()


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
