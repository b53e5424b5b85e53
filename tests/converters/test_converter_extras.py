"""Converters that cannot be used: of a missing package, broken, or with impossible options."""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

import shardio
from shardio import Converter, Input, InvalidArgument, Outcome, Schema
from shardio.conversion import converter
from shardio.conversion.converter import make_converter
from shardio.errors import ShardioError, UnsupportedEnvironment

PACKAGES = {package: kind for kind, one in converter.BUILT_IN.items() for package in one.packages}
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
    monkeypatch.setattr(converter, "_installed", lambda folders: [entry])


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_of_an_extra_is_named_by_it(package: str) -> None:
    assert PACKAGES[package] in PROJECT["optional-dependencies"]
    with pytest.raises(UnsupportedEnvironment, match=rf"'\.\[{PACKAGES[package]}\]'"):
        make_converter("lacking", {"package": f"{package}.inner"})


def test_another_package_is_named_by_itself() -> None:
    with pytest.raises(UnsupportedEnvironment, match="pip install theirs$"):
        make_converter("lacking", {"package": "theirs"})


OURS = f"from dataclasses import dataclass\nfrom {__name__} import Lacking\n"


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (
            "raise ImportError('libx.so: cannot open')",
            UnsupportedEnvironment,
            r"'theirs' \(theirs:Theirs, of the package theirs\) cannot be imported: ImportError: "
            r"libx\.so: cannot open; update or repair this package",
        ),
        ("", UnsupportedEnvironment, "cannot be imported: AttributeError: .*'Theirs'"),
        ("import nowhere.at.all", UnsupportedEnvironment, "needs the package 'nowhere'"),
        ("Theirs = 3", InvalidArgument, "expected a dataclass derived from shardio.Converter"),
        (
            f"{OURS}@dataclass(frozen=True)\nclass Theirs(Lacking):\n    names: str = ''",
            InvalidArgument,
            "theirs:Theirs: the field 'names' is named like a parameter of shardio.convert",
        ),
    ],
    ids=["import fails", "no class", "no package", "no converter", "field"],
)
def test_a_third_party_converter_that_cannot_be_used_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    error: type[ShardioError],
    message: str,
) -> None:
    (tmp_path / "theirs.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    entry = EntryPoint("theirs", "theirs:Theirs", converter.ENTRY_POINT_GROUP)
    monkeypatch.setattr(converter, "_installed", lambda folders: [entry])
    with pytest.raises(error, match=message):
        shardio.convert(tmp_path, tmp_path / "out", kind="theirs")


def test_no_parameter_of_convert_can_be_the_name_of_an_option() -> None:
    assert converter.PARAMETERS == {*inspect.signature(shardio.convert).parameters} - {"options"}
