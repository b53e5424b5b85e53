"""Fixtures of the tests of loaders: a dataset, a warm zygote, and a disk without fsync."""

from __future__ import annotations

import pytest

from tests.loading import TWO_FIELDS, two_fields, write_dataset


@pytest.fixture(scope="module", autouse=True)
def _quick(warm_zygote: None, quick_disk: None) -> None:
    """Start workers from a running zygote, and skip fsync."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the N samples of two fields of a module in 2 shards."""
    n: int = request.module.N
    path = tmp_path_factory.mktemp(request.module.__name__) / "set"
    return write_dataset(path, n, 2, TWO_FIELDS, two_fields(n))
