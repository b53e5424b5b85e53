"""One server for all tests of object stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.remote.scene import Scene, scene


@pytest.fixture(scope="session")
def one_server() -> Iterator[Scene]:
    with scene() as found:
        yield found


@pytest.fixture
def store(one_server: Scene) -> Scene:
    """The server, with nothing wrong, and nothing counted yet."""
    one_server.proxy.forget()
    return one_server
