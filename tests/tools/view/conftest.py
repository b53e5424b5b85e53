"""A dataset and a client of its viewer, which tests do not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.tools.view.served import make_dataset, viewing


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of 60 samples in 4 shards."""
    return make_dataset(tmp_path_factory.mktemp("view") / "set")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with viewing(folder) as made:
        yield made
