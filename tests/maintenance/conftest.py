from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_disk: None, shared_zygote: None) -> None:
    """Skip fsync, and start workers from a running zygote."""
