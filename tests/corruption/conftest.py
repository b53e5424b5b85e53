"""Fixtures of the tests of forged shards."""

from __future__ import annotations

import pytest

from tests.corruption.forge import RULES, content_of, rules_samples


@pytest.fixture(scope="package")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytearray:
    """Return a shard of RULES that breaks none; not to be changed."""
    return content_of(tmp_path_factory.mktemp("rules") / "r.shard", RULES, rules_samples())
