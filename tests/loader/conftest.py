"""Fixtures of the tests of loaders: a warm zygote, and a disk that does not wait for fsync."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick(warm_zygote: None, quick_disk: None) -> None:
    """Start workers from a running zygote, and skip fsync."""
