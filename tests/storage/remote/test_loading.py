"""A loader over a store gives the batches of one over a folder, whatever the network does."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Image, Schema, ShardLoader
from shardio.errors import InvalidArgument, StoreAccessDenied
from shardio.media import encode_jpeg
from shardio.order.sampling import ORDERS
from shardio.storage.remote.storage import N_THREADS
from tests.loading import make_loader, write_dataset
from tests.order.strided import Strided
from tests.storage.remote.scene import RemoteSet, Scene

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N, N_SHARDS = 240, 12


def _loader(remote: RemoteSet, *, told: Any = None, **options: Any) -> ShardLoader:
    given = {"output": "numpy", "num_workers": 2, "timeout_s": 60, **remote.given, **options}
    given["storage_options"] = {**given["storage_options"], **(told or {})}
    return make_loader(remote.url, 16, **given)


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


@pytest.mark.parametrize("shuffle", [False, True, "blocks", "shards"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_equal_shards_load_like_others(equal: RemoteSet, num_workers: int, shuffle: Any) -> None:
    given: Any = {"output": "numpy", "num_workers": 0, "shuffle": shuffle}
    with (
        ShardLoader(equal.folder, 16, **given) as expected,
        _loader(equal, num_workers=num_workers, shuffle=shuffle) as loader,
    ):
        for _ in range(2):
            assert _epoch(loader) == _epoch(expected)
    assert equal.downloaded() == equal.sizes


def test_custom_order_downloads_once(remote: RemoteSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "strided", Strided)
    with _loader(remote, shuffle="strided") as loader:
        labels = [label for batch in loader for label in batch["label"].tolist()]
        assert labels == [*range(0, N, 2), *range(1, N, 2)]
    assert remote.downloaded() == remote.sizes


@pytest.mark.parametrize("what", ["a store", "a mixture"])
def test_prefetching_ends(equal: RemoteSet, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with ExitStack() as stack:
        source: Any = stack.enter_context(equal.open())
        if what == "a mixture":  # the same shards from two places, and from a folder
            url = equal.store.put_dataset(equal.folder, "also-equal")
            also = stack.enter_context(shardio.open(url, **equal.given))
            source = shardio.mix([source, also, equal.folder], weights=[1, 1, 1])
        loader = stack.enter_context(make_loader(source, 16, num_workers=0))
        batches = iter(loader)
        next(batches)
        for thread in threading.enumerate():
            if thread.name == "shardio-ahead":
                thread.join(60)
        for _ in batches:
            pass
        monkeypatch.setattr("shardio._loading.prefetch.Prefetcher", None)  # which cannot be made
        assert len(list(loader)) == len(loader)
    assert len(equal.files()) == 32 * (2 if what == "a mixture" else 1)


def test_an_epoch_is_exact_whatever_the_network_does(remote: RemoteSet, expected: Any) -> None:
    remote.store.fail("error", times=3)
    remote.store.fail("cut", r"00000[0-5]-000\.shard", times=2)
    remote.store.fail("wrong", r"00000[6-9]-000\.shard", times=2)
    stall = remote.store.fail("stall", r"000003-000\.shard")
    client = {"timeout": "1s"}
    with _loader(remote, shuffle=True, told={"client_options": client}) as loader:
        assert _epoch(loader) == expected[True]
    stall.go_on.set()
    assert all(fault.times == 0 for fault in remote.store.proxy.faults)


def test_credentials_that_expire_are_the_error_that_the_loop_gets(remote: RemoteSet) -> None:
    with _loader(remote) as loader, pytest.raises(StoreAccessDenied, match="ExpiredToken"):
        remote.store.fail("denied", times=9999)
        _epoch(loader)


@pytest.mark.filterwarnings("ignore:.* a window of 8 shards is read at a time:UserWarning")
@pytest.mark.parametrize("shuffle", [False, "shards"])
def test_small_cache_same_batches(remote: RemoteSet, expected: Any, shuffle: Any) -> None:
    most = 7 * max(remote.sizes.values())
    with _loader(remote, shuffle=shuffle, cache_bytes=most) as loader:
        assert _epoch(loader) == expected[shuffle]
        for _ in range(2):
            assert len(remote.files()) <= 7
            _epoch(loader)


def test_shards_come_ahead_in_the_order_in_which_they_are_needed(remote: RemoteSet) -> None:
    with _loader(remote, num_workers=0) as loader:
        hold = remote.store.fail("hold", r"000011-000\.shard")
        batches = iter(loader)
        assert np.array_equal(next(batches)["label"], np.arange(16))
        assert hold.met.wait(60)  # nobody asks for a further batch
        come = remote.cached()
        hold.go_on.set()
        late = {*range(11)} - {*come}
        assert len(late) < N_THREADS  # the other threads may still be at one each


def test_full_shuffle_beyond_the_cache_is_refused_and_blocks_warn(remote: RemoteSet) -> None:
    small: Any = {"num_workers": 0, "cache_bytes": 300_000}
    with pytest.raises(InvalidArgument, match=r"raise cache_bytes, or pass shuffle='shards'"):
        _loader(remote, shuffle=True, **small)
    with (
        pytest.warns(UserWarning, match="shuffle='blocks' a window"),
        _loader(remote, shuffle="blocks", **small),
    ):
        pass


def test_window_in_cache_downloads_once(remote: RemoteSet, tmp_path: Path, expected: Any) -> None:
    sizes = sorted(remote.sizes.values())
    given: Any = {"num_workers": 0, "shuffle": "shards"}
    with _loader(remote, cache_bytes=10 * sizes[-1], **given) as loader:
        assert _epoch(loader) == expected["shards"]
    assert remote.downloaded() == remote.sizes
    words = f"a window of 8 shards .* up to {sum(sizes[-8:])} bytes"
    with (
        pytest.warns(UserWarning, match=words),
        _loader(remote, cache=tmp_path / "small", cache_bytes=7 * sizes[-1], **given),
    ):
        pass


def test_preload_brings_every_shard(remote: RemoteSet) -> None:
    with remote.open() as dataset:
        dataset.preload()
        assert len(remote.files()) == N_SHARDS
    words = r"preload\(\) downloads .* raise cache_bytes"
    with remote.open(cache_bytes=300_000) as dataset, pytest.raises(InvalidArgument, match=words):
        dataset.preload()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_image_sizes_are_read_by_ranges(store: Scene, tmp_path: Path, num_workers: int) -> None:
    picture = encode_jpeg(np.zeros((64, 64, 3), np.uint8))
    schema = Schema({"image": Image(), "pad": Array("uint8", (1 << 18,))})
    made = ({"image": picture, "pad": np.full(1 << 18, i, np.uint8)} for i in range(12))
    folder = Path(write_dataset(tmp_path / "set", 12, 4, schema, made))
    remote = RemoteSet(store, folder, store.put_dataset(folder, "pictures"), tmp_path / "cache")
    with _loader(remote, fields=["image"], num_workers=num_workers) as loader:
        sizes = [*remote.sizes.values()]
        whole = sizes[0] if num_workers == 0 else 0  # how much a batch takes, it tells
        assert sum(store.proxy.n_bytes.values()) < whole + sum(sizes) / 2
        assert [batch["image"].shape for batch in loader] == [(12, 64, 64, 3)]
    assert loader.dataset.access == ("pread" if num_workers else "mmap")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_mixture_of_store_and_folder(remote: RemoteSet, folder: Path, num_workers: int) -> None:
    options: Any = {"output": "numpy", "num_workers": num_workers, "shuffle": True}
    found = []
    with remote.open() as far:
        for first in (far, folder):
            mixture = shardio.mix([first, folder], weights=[1, 2])
            with ShardLoader(mixture, 16, **options) as mixed:
                found.append(_epoch(mixed))
    assert found[0] == found[1]
