"""The folder that most tests of converters convert."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def two_folders(root: Path) -> None:
    for name in ("a", "b"):
        (root / name).mkdir()
