"""Fixtures of the tests of loaders: a dataset, a warm zygote, and a disk without fsync."""

from __future__ import annotations

import pytest

from tests.loading import TWO_FIELDS, two_fields, write_dataset


@pytest.fixture(scope="module", autouse=True)
def _quick(warm_zygote: None, quick_disk: None) -> None:
    """Start workers from a running zygote, and skip fsync."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the N samples of two fields of a module in its N_SHARDS shards, by default 2."""
    n: int = request.module.N
    n_shards: int = getattr(request.module, "N_SHARDS", 2)
    path = tmp_path_factory.mktemp(request.module.__name__) / "set"
    return write_dataset(path, n, n_shards, TWO_FIELDS, two_fields(n))


@pytest.fixture(scope="module")
def every(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the N samples of a module, with fields of every kind, in 3 shards."""
    return write_dataset(tmp_path_factory.mktemp("every") / "every", request.module.N, 3)
