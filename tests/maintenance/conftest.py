from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_disk(quick_disk: None) -> None:
    """Of every module here."""
