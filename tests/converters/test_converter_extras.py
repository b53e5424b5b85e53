"""A converter whose package is missing names the extra that brings it."""

from __future__ import annotations

import tomllib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shardio import Converter, Input, Outcome, Schema
from shardio.conversion import converter
from shardio.conversion.converter import make_converter
from shardio.errors import UnsupportedEnvironment

PACKAGES = {
    package: kind for kind, known in converter.BUILT_IN.items() for package in known.packages
}
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@dataclass(frozen=True)
class Lacking(Converter):
    """A converter that misses the package it is told."""

    kind: ClassVar[str] = "lacking"
    version: ClassVar[str] = "1"
    package: str = ""

    def schema(self) -> Schema:
        raise NotImplementedError

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        raise NotImplementedError

    def libraries(self) -> Mapping[str, str]:
        raise ModuleNotFoundError(f"No module named '{self.package}.inner'", name=self.package)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("lacking", f"{__name__}:Lacking", converter.ENTRY_POINT_GROUP)
    monkeypatch.setattr(converter, "entry_points", lambda group: [entry])


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_of_an_extra_is_named_by_it(package: str) -> None:
    assert PACKAGES[package] in PROJECT["optional-dependencies"]
    with pytest.raises(UnsupportedEnvironment, match=rf"'\.\[{PACKAGES[package]}\]'"):
        make_converter("lacking", {"package": f"{package}.inner"})


def test_another_package_is_named_by_itself() -> None:
    with pytest.raises(UnsupportedEnvironment, match="pip install theirs$"):
        make_converter("lacking", {"package": "theirs"})
