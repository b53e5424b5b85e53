from __future__ import annotations

import sys

import pytest

from shardio.errors import UnsupportedEnvironment
from shardio.outputs import create_adapter


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_a_missing_package_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedEnvironment, match=rf"pip install '\.\[{package}\]'"):
        create_adapter(package, None)


def test_arrays_need_no_maker() -> None:
    assert create_adapter("numpy", None) is None
