"""One server for all tests of object stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.scene import OPTIONS, Scene, scene


@pytest.fixture(scope="session")
def one_server() -> Iterator[Scene]:
    with scene() as found:
        yield found


@pytest.fixture
def store(one_server: Scene) -> Scene:
    """The server, with nothing wrong, and nothing counted yet."""
    one_server.proxy.forget()
    return one_server


@pytest.fixture
def told(store: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scene:
    """The store, of which the environment says all."""
    monkeypatch.setenv("SHARDIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.options["aws_endpoint"])
    for name, value in OPTIONS.items():
        if name.startswith("aws_"):
            monkeypatch.setenv(name.upper(), str(value))
    return store
