"""Fixtures of the tests of conversions."""

from __future__ import annotations

import pytest

from tests.lines import note_reads


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_disk: None, shared_zygote: None) -> None:
    """Skip fsync, and start workers from a running zygote."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of the inputs that are read from now on are added."""
    return note_reads(monkeypatch)
