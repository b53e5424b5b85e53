"""Type checkers accept the typed programs in this folder, and find the mistakes in one of them."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import json
import operator
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import Converter, InvalidArgument, ShardLoader
from shardio._loading.options import LoaderKeywords
from shardio.conversion import option_types
from shardio.conversion.converter import BUILT_IN, converter_class
from shardio.serving.client import handshake
from shardio.serving.client.remote_loader import RemoteKeywords, RemoteLoader

HERE = Path(__file__).parent
PROGRAMS = sorted(str(path) for path in HERE.glob("*.py") if not path.name.startswith("test_"))
FRAMEWORKS = HERE / "frameworks"
COMMON = typing.get_type_hints(option_types.CommonOptions)


def run(*command: str | Path, cwd: Path, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def strict() -> Iterator[tuple[str, ...]]:
    """Return options for mypy without this project's configuration.

    The cache is kept from run to run, beside that of mypy --strict; one test at a time has it.
    """
    cache = HERE.parents[1] / ".mypy_cache" / "typing"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield "--strict", "--config-file=", f"--cache-dir={cache}"


@pytest.mark.slow
def test_mypy_accepts_the_programs(strict: tuple[str, ...], tmp_path: Path) -> None:
    """The programs are checked with stubs of torch and JAX."""
    run("mypy", *strict, *PROGRAMS, cwd=tmp_path, MYPYPATH=str(FRAMEWORKS))


@pytest.mark.slow
def test_mypy_needs_no_torch(strict: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import shardio\n"
        'for batch in shardio.ShardLoader("data/", 8, output="torch"):\n'
        '    print(batch["x"].float().mean())\n'
    )
    run("mypy", *strict, program, cwd=tmp_path)


@pytest.mark.external
def test_pyright_accepts_the_programs(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed; it downloads itself from the registry of Node.js")
    found = {
        "include": [os.path.relpath(each, tmp_path) for each in PROGRAMS],
        "extraPaths": [os.path.relpath(FRAMEWORKS, tmp_path)],
        "reportMissingModuleSource": "none",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(found))
    run("pyright", "--pythonpath", sys.executable, cwd=tmp_path)


def hints_of(function: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    return {name: hint for name, hint in hints.items() if name not in ("self", "return")}


def test_the_keywords_of_loaders_are_those_of_type_checkers() -> None:
    hints = hints_of(ShardLoader.__init__)
    for name in ("dataset", "batch_size", "output"):
        del hints[name]
    assert hints == typing.get_type_hints(LoaderKeywords)


def test_the_keywords_of_remote_loaders_are_those_of_type_checkers() -> None:
    hints, typed = hints_of(RemoteLoader.__init__), typing.get_type_hints(RemoteKeywords)
    for name in ("address", "batch_size", "output", "options"):
        del hints[name]
    assert hints.items() <= typed.items()
    assert typed.keys() == (handshake.KNOWN - {"batch_size"}) | hints.keys()


def test_the_common_options_of_convert_are_its_parameters() -> None:
    hints = hints_of(shardio.convert)
    for name in ("src", "out", "kind", "options"):
        del hints[name]
    assert hints == COMMON


def typed_options(kind: object) -> dict[str, Any]:
    """Return the options that the overload of `convert` for a kind has in addition."""
    for overload in typing.get_overloads(shardio.convert):
        hints = typing.get_type_hints(overload, localns=vars(option_types))
        known = typing.get_args(hints["kind"]) or (hints["kind"],)
        if kind in known:
            (typed,) = typing.get_args(hints["options"])
            return {k: v for k, v in typing.get_type_hints(typed).items() if k not in COMMON}
    return {}


def options_of(kind: str) -> dict[str, Any]:
    converter = converter_class(kind)
    hints = typing.get_type_hints(converter)
    return {each.name: hints[each.name] for each in fields(converter) if each.init}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", BUILT_IN)
def test_the_typed_options_of_a_kind_are_those_of_its_converter(kind: str) -> None:
    assert typed_options(kind) == options_of(kind)


def test_without_a_kind_the_options_of_all_converters_are_typed() -> None:
    found: dict[str, list[Any]] = {}
    for kind in BUILT_IN:
        for name, hint in options_of(kind).items():
            found.setdefault(name, []).append(hint)
    unions = {name: functools.reduce(operator.or_, hints) for name, hints in found.items()}
    assert typed_options(type(None)) == unions


def test_a_kind_may_be_the_class_of_its_converter(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("x\n1\n2\n")
    kind = converter_class("tables")
    report = shardio.convert(tmp_path, tmp_path / "out", kind=kind, fields={"x": "int64"})
    assert (report.kind, report.n_samples) == ("tables", 2)


@pytest.mark.parametrize("inherits", [Converter, int])
def test_a_class_that_is_not_installed_is_refused(tmp_path: Path, inherits: Any) -> None:
    class Tables(inherits):  # type: ignore[misc]
        kind = "tables"

    for kind in (inherits, Tables):
        with pytest.raises(InvalidArgument, match=f"{kind.__name__} is not an installed converter"):
            shardio.convert(tmp_path, tmp_path / "out", kind=kind)
    assert not (tmp_path / "out").exists()
