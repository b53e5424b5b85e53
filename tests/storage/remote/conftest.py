"""One server for all tests of object stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardio.dataset.manifest import load
from tests.loading import TWO_FIELDS, two_fields, write_dataset
from tests.storage.remote.scene import OPTIONS, RemoteSet, Scene, scene


@pytest.fixture(scope="session")
def one_server() -> Iterator[Scene]:
    with scene() as found:
        yield found


@pytest.fixture
def store(one_server: Scene) -> Scene:
    """Return the server, without faults and with its counts reset."""
    one_server.proxy.forget()
    return one_server


@pytest.fixture
def told(store: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scene:
    """Return the store, fully configured by the environment."""
    monkeypatch.setenv("SHARDIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.options["aws_endpoint"])
    for name, value in OPTIONS.items():
        if name.startswith("aws_"):
            monkeypatch.setenv(name.upper(), str(value))
    return store


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset of N samples in N_SHARDS shards of about the same size."""
    n, place = request.module.N, tmp_path_factory.mktemp("remote") / "set"
    write_dataset(place, n, request.module.N_SHARDS, TWO_FIELDS, two_fields(n))
    return place


@pytest.fixture
def remote(
    request: pytest.FixtureRequest, store: Scene, folder: str | Path, tmp_path: Path
) -> RemoteSet:
    """Return the dataset of the module, in a store."""
    name = request.module.__name__.rpartition("test_")[2]
    return RemoteSet(store, Path(folder), store.put_dataset(folder, name), tmp_path / "cache")


@pytest.fixture(scope="session")
def equal_url(one_server: Scene, equal_shards: Path) -> str:
    return one_server.put_dataset(equal_shards, "equal")


@pytest.fixture
def equal(store: Scene, equal_shards: Path, equal_url: str, tmp_path: Path) -> RemoteSet:
    """Return the dataset of `equal_shards`, in a store; no test changes the objects."""
    return RemoteSet(store, equal_shards, equal_url, tmp_path / "cache")


@pytest.fixture(scope="session")
def equal_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset of 32 shards of four samples, in which each content occurs 8 times."""
    place = tmp_path_factory.mktemp("equal") / "set"
    samples = list(two_fields(16))
    write_dataset(place, 128, 32, TWO_FIELDS, (samples[i % 16] for i in range(128)))
    assert len({shard.id for shard in load(place).shards}) == 4
    return place
