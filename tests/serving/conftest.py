"""A dataset with a field of every kind, and a server of it, shared by a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardio.serving import Server
from tests.loading import write_dataset
from tests.serving.served import serving


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "every", 30, 2)


@pytest.fixture(scope="module")
def server(path: str) -> Iterator[Server]:
    with serving(path) as made:
        yield made


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "other", 31, 2)
