from __future__ import annotations

import sys
import warnings

import pytest

from shardio.errors import UnsupportedEnvironment
from shardio.outputs import create_adapter, resolve_output


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_a_missing_package_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedEnvironment, match=rf"pip install '\.\[{package}\]'"):
        create_adapter(package, None)


def test_arrays_need_no_maker() -> None:
    assert create_adapter("numpy", None) is None


def test_the_default_warns_programs_that_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for imported, uses_torch in ((["torch"], False), (["torch", "tinygrad"], True)):
        for name in ("torch", "tinygrad"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        for name in imported:
            monkeypatch.setitem(sys.modules, name, pytest)
        with pytest.warns(RuntimeWarning, match='for tensors of torch, write output="torch"'):
            assert resolve_output(None, uses_torch=uses_torch) == "tinygrad"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert resolve_output("tinygrad", uses_torch=uses_torch) == "tinygrad"


@pytest.mark.parametrize("imported", [[], ["tinygrad"], ["torch", "tinygrad"]])
def test_the_default_warns_no_other_program(
    imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "tinygrad"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in imported:
        monkeypatch.setitem(sys.modules, name, pytest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_output(None, uses_torch=False) == "tinygrad"
