"""Fixtures of the tests of conversions: a folder of texts, and the converter that reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lines import install, note_reads


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_disk: None) -> None:
    """Skip fsync."""


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of 7 files, of which 4 have samples; see `OLD`."""
    return install(tmp_path, monkeypatch)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of the inputs that are read from now on are added."""
    return note_reads(monkeypatch)
