"""What the tests of forged shards begin with."""

from __future__ import annotations

import pytest

from tests.corruption.forge import RULES, content_of, rules_samples


@pytest.fixture(scope="package")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytearray:
    """A shard of RULES that breaks none; not to be changed."""
    return content_of(tmp_path_factory.mktemp("rules") / "r.shard", RULES, rules_samples())
