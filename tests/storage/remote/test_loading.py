"""A loader over a store gives the batches of one over a folder, whatever the network does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Image, Schema, ShardLoader
from shardio.errors import InvalidArgument, StoreAccessDenied, StoreUnavailable
from shardio.media import encode_jpeg
from shardio.order.sampling import ORDERS
from shardio.storage.remote.storage import N_THREADS
from tests.loading import TWO_FIELDS, make_loader, two_fields, write_dataset
from tests.order.strided import Strided
from tests.storage.remote.scene import Fault, Scene

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N, N_SHARDS = 240, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("loading") / "set"
    write_dataset(place, N, N_SHARDS, TWO_FIELDS, two_fields(N))
    return place


@pytest.fixture
def url(store: Scene, folder: Path) -> str:
    return store.put_dataset(folder, "loaded")


def _loader(store: Scene, url: str, tmp_path: Path, **options: Any) -> ShardLoader:
    given = {"output": "numpy", "num_workers": 2, "timeout_s": 60, **options}
    told = {**store.options, **given.pop("told", {})}
    return make_loader(url, 16, cache=tmp_path / "cache", storage_options=told, **given)


def _epoch(loader: ShardLoader) -> list[tuple[bytes, bytes]]:
    return [(batch["image"].tobytes(), batch["label"].tobytes()) for batch in loader]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[Any, list[tuple[bytes, bytes]]]:
    """Return the first epoch of loaders over the folder."""
    found = {}
    for shuffle in (False, True, "shards"):
        with ShardLoader(folder, 16, output="numpy", num_workers=0, shuffle=shuffle) as loader:
            found[shuffle] = _epoch(loader)
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_folder_and_each_shard_comes_once(
    store: Scene, url: str, tmp_path: Path, expected: Any, folder: Path, num_workers: int
) -> None:
    with _loader(store, url, tmp_path, num_workers=num_workers, shuffle=True) as loader:
        assert _epoch(loader) == expected[True]
        sizes = {shard.name: shard.n_bytes for shard in loader.dataset.shards}
    assert {name: store.proxy.n_bytes[name] for name in sizes} == sizes


@pytest.mark.parametrize("shuffle", [False, True, "blocks", "shards"])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_shards_of_equal_content_are_batches_like_any_other(
    store: Scene, tmp_path: Path, equal_shards: Path, num_workers: int, shuffle: Any
) -> None:
    url = store.put_dataset(equal_shards, "equal")
    given: Any = {"output": "numpy", "num_workers": 0, "shuffle": shuffle}
    with (
        ShardLoader(equal_shards, 16, **given) as expected,
        _loader(store, url, tmp_path, num_workers=num_workers, shuffle=shuffle) as loader,
    ):
        for _ in range(2):
            assert _epoch(loader) == _epoch(expected)
        sizes = {shard.name: shard.n_bytes for shard in loader.dataset.shards}
    assert {name: store.proxy.n_bytes[name] for name in sizes} == sizes


def test_an_order_that_is_added_is_downloaded_ahead_in_its_order(
    store: Scene, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ORDERS, "strided", Strided)
    with _loader(store, url, tmp_path, shuffle="strided") as loader:
        labels = [label for batch in loader for label in batch["label"].tolist()]
        assert labels == [*range(0, N, 2), *range(1, N, 2)]
        sizes = {shard.name: shard.n_bytes for shard in loader.dataset.shards}
    assert {name: store.proxy.n_bytes[name] for name in sizes} == sizes
    with _loader(store, url, tmp_path / "b", num_workers=0, shuffle="strided") as loader:
        hold = Fault("hold", r"000011-000\.shard")
        store.proxy.faults = [hold]
        assert next(iter(loader))["label"].tolist() == [*range(0, 32, 2)]
        assert hold.met.wait(60)  # nobody asks for a further batch
        hold.go_on.set()


@pytest.mark.parametrize("what", ["a store", "a mixture"])
def test_once_every_shard_has_come_no_pass_looks_for_more(
    store: Scene,
    tmp_path: Path,
    equal_shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    url = store.put_dataset(equal_shards, "equal")
    with ExitStack() as stack:
        source: Any = url
        given: Any = {"cache": tmp_path / "cache", "storage_options": store.options}
        if what == "a mixture":  # the same shards from two places, and from a folder
            also = store.put_dataset(equal_shards, "also-equal")
            remote = [stack.enter_context(shardio.open(each, **given)) for each in (url, also)]
            source, given = shardio.mix([*remote, equal_shards], weights=[1, 1, 1]), {}
        loader = stack.enter_context(make_loader(source, 16, num_workers=0, **given))
        batches = iter(loader)
        next(batches)
        for thread in threading.enumerate():
            if thread.name == "shardio-ahead":
                thread.join(60)
        for _ in batches:
            pass
        monkeypatch.setattr("shardio._loading.prefetch.Prefetcher", None)  # which cannot be made
        assert len(list(loader)) == len(loader)
    n_places = 2 if what == "a mixture" else 1
    assert len(list((tmp_path / "cache").rglob("*.shard"))) == 64 * n_places


def test_what_is_cached_needs_no_store(
    store: Scene, url: str, tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _loader(store, url, tmp_path) as loader:
        _epoch(loader)
    store.proxy.is_down = True
    monkeypatch.setattr("shardio.storage.remote.storage._REFRESH_DEADLINE_S", 0.2)
    with (
        pytest.warns(UserWarning, match="store unreachable; using the cached manifest"),
        _loader(store, url, tmp_path) as loader,
    ):
        assert _epoch(loader) == expected[False]


def test_an_epoch_is_exact_whatever_the_network_does(
    store: Scene, url: str, tmp_path: Path, expected: Any
) -> None:
    stall = Fault("stall", r"000003-000\.shard")
    store.proxy.faults = [
        Fault("error", times=3),
        Fault("cut", r"00000[0-5]-000\.shard", times=2),
        Fault("wrong", r"00000[6-9]-000\.shard", times=2),
        stall,
    ]
    client = {"timeout": "1s"}
    with _loader(store, url, tmp_path, shuffle=True, told={"client_options": client}) as loader:
        assert _epoch(loader) == expected[True]
    stall.go_on.set()
    assert all(fault.times == 0 for fault in store.proxy.faults)


def test_credentials_that_expire_are_the_error_that_the_loop_gets(
    store: Scene, url: str, tmp_path: Path
) -> None:
    with (
        _loader(store, url, tmp_path) as loader,
        pytest.raises(StoreAccessDenied, match="ExpiredToken"),
    ):
        store.proxy.faults = [Fault("denied", times=9999)]
        _epoch(loader)


def test_a_store_that_goes_away_is_an_error_at_the_deadline(
    store: Scene, url: str, tmp_path: Path
) -> None:
    with (
        _loader(store, url, tmp_path, told={"deadline_s": 0.5}) as loader,
        pytest.raises(StoreUnavailable),
    ):
        store.proxy.is_down = True
        _epoch(loader)


@pytest.mark.filterwarnings("ignore:.* a window of 8 shards is read at a time:UserWarning")
@pytest.mark.parametrize("shuffle", [False, "shards"])
def test_a_small_cache_stays_small_and_gives_the_same_batches(
    store: Scene, url: str, tmp_path: Path, expected: Any, shuffle: Any
) -> None:
    size = max(path.stat().st_size for path in folder_shards(store, url, tmp_path))
    with _loader(store, url, tmp_path / "small", shuffle=shuffle, cache_bytes=7 * size) as loader:
        assert _epoch(loader) == expected[shuffle]
        for _ in range(2):
            assert len(list((tmp_path / "small").rglob("*.shard"))) <= 7
            _epoch(loader)


def folder_shards(store: Scene, url: str, tmp_path: Path) -> Iterator[Path]:
    """All shards, cached."""
    with _loader(store, url, tmp_path, num_workers=0) as loader:
        _epoch(loader)
    return (tmp_path / "cache").rglob("*.shard")


def test_shards_come_ahead_in_the_order_in_which_they_are_needed(
    store: Scene, url: str, tmp_path: Path
) -> None:
    with _loader(store, url, tmp_path, num_workers=0) as loader:
        hold = Fault("hold", r"000011-000\.shard")
        store.proxy.faults = [hold]
        batches = iter(loader)
        assert np.array_equal(next(batches)["label"], np.arange(16))
        assert hold.met.wait(60)  # nobody asks for a further batch
        come = {path.name.split(".")[0] for path in tmp_path.rglob("*.shard")}
        hold.go_on.set()
        late = {f"{k:06d}-000" for k in range(11)} - come
        assert len(late) < N_THREADS  # the other threads may still be at one each


def test_a_full_shuffle_of_more_than_the_cache_holds_is_refused_and_blocks_warned_of(
    store: Scene, url: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=r"raise cache_bytes, or take shuffle='shards'"):
        _loader(store, url, tmp_path, num_workers=0, shuffle=True, cache_bytes=300_000)
    with (
        pytest.warns(UserWarning, match="shuffle='blocks' a window"),
        _loader(store, url, tmp_path, num_workers=0, shuffle="blocks", cache_bytes=300_000),
    ):
        pass


def test_a_cache_with_room_for_a_window_of_shards_downloads_each_once(
    store: Scene, url: str, tmp_path: Path, folder: Path, expected: Any
) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*.shard")}
    most = 10 * max(sizes.values())
    given: Any = {"num_workers": 0, "shuffle": "shards", "cache_bytes": most}
    with _loader(store, url, tmp_path, **given) as loader:
        assert _epoch(loader) == expected["shards"]
    assert {name: store.proxy.n_bytes[name] for name in sizes} == sizes
    given["cache_bytes"] = 7 * max(sizes.values())
    window = sum(sorted(sizes.values())[-8:])
    with (
        pytest.warns(UserWarning, match=f"a window of 8 shards .* up to {window} bytes"),
        _loader(store, url, tmp_path / "small", **given),
    ):
        pass


def test_preload_brings_every_shard(store: Scene, url: str, tmp_path: Path) -> None:
    given: Any = {"cache": tmp_path / "cache", "storage_options": store.options}
    with shardio.open(url, **given) as dataset:
        dataset.preload()
        assert len(list((tmp_path / "cache").rglob("*.shard"))) == N_SHARDS
    with (
        shardio.open(url, cache_bytes=300_000, **given) as dataset,
        pytest.raises(InvalidArgument, match=r"preload\(\) downloads .* raise cache_bytes"),
    ):
        dataset.preload()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_of_pictures_reads_their_sizes_by_ranges(
    store: Scene, tmp_path: Path, num_workers: int
) -> None:
    picture = encode_jpeg(np.zeros((64, 64, 3), np.uint8))
    schema = Schema({"image": Image(), "pad": Array("uint8", (1 << 18,))})
    made = ({"image": picture, "pad": np.full(1 << 18, i, np.uint8)} for i in range(12))
    url = store.put_dataset(write_dataset(tmp_path / "set", 12, 4, schema, made), "pictures")
    with _loader(store, url, tmp_path, fields=["image"], num_workers=num_workers) as loader:
        sizes = [shard.n_bytes for shard in loader.dataset.shards]
        whole = sizes[0] if num_workers == 0 else 0  # how much a batch takes, it tells
        assert sum(store.proxy.n_bytes.values()) < whole + sum(sizes) / 2
        assert [batch["image"].shape for batch in loader] == [(12, 64, 64, 3)]
    assert loader.dataset.access == ("pread" if num_workers else "mmap")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_mixture_of_a_store_and_a_folder_is_that_of_two_folders(
    store: Scene, url: str, tmp_path: Path, folder: Path, num_workers: int
) -> None:
    options: Any = {"output": "numpy", "num_workers": num_workers, "shuffle": True}
    remote = shardio.open(url, cache=tmp_path / "cache", storage_options=store.options)
    with remote, ShardLoader(shardio.mix([remote, folder], weights=[1, 2]), 16, **options) as mixed:
        found = _epoch(mixed)
    with ShardLoader(shardio.mix([folder, folder], weights=[1, 2]), 16, **options) as mixed:
        assert found == _epoch(mixed)
