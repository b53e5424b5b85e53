"""The markers of tests: where they are, what they select, and in which order slow tests run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests import markers

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "tests").rglob("test_*.py"))
EXTERNAL = set(
    "accelerate albumentations datasets ffcv jax lightning pyright ray spdl tinyloader torch "
    "torchvision webdataset".split()
)
Def = ast.FunctionDef | ast.AsyncFunctionDef


def needs(node: ast.AST) -> set[str]:
    """Return the packages outside the extra `dev` without which code skips tests."""
    found = set()
    for each in ast.walk(node):
        match each:
            case ast.Call(
                func=ast.Attribute(attr="importorskip" | "find_spec") | ast.Name(id="find_spec"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.add(name.partition(".")[0])
    return found & EXTERNAL


def may_need(source: bytes) -> bool:
    """Return True unless a module has none of the words that `needs` looks for."""
    return b"importorskip" in source or b"find_spec" in source


def is_marked(tree: ast.AST) -> bool:
    return "pytest.mark.external" in ast.unparse(tree)


def unmarked(module: ast.Module) -> Iterator[str]:
    """Yield what in a module of tests needs other packages and is not marked as `external`."""
    lists = [
        node
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    if any(map(is_marked, lists)):
        return
    for node in module.body:
        if needs(node) and not (isinstance(node, Def) and any(map(is_marked, node.decorator_list))):
            yield f"{getattr(node, 'name', 'the module')}: {', '.join(sorted(needs(node)))}"


def test_what_needs_another_package_is_marked_as_external() -> None:
    found = {
        str(path.relative_to(ROOT)): problems
        for path in MODULES
        if may_need(source := path.read_bytes())
        if (problems := [*unmarked(ast.parse(source))])
    }
    assert found == {}


def test_a_forgotten_marker_of_external_is_found() -> None:
    code = "def test_it(): pytest.importorskip('torch.nn')\n"
    assert may_need(code.encode()) and may_need(b"find_spec('torch')") and not may_need(b"torch")
    assert [*unmarked(ast.parse(code))] == ["test_it: torch"]
    assert [*unmarked(ast.parse(f"@pytest.mark.external\n{code}"))] == []
    assert [*unmarked(ast.parse(f"pytestmark = [pytest.mark.external]\n{code}"))] == []
    assert [*unmarked(ast.parse("pytest.importorskip('numpy')"))] == []


def test_every_marker_is_explained_on_the_page_about_tests() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = [
        line.partition(":")[0] for line in settings["tool"]["pytest"]["ini_options"]["markers"]
    ]
    page = (ROOT / "docs" / "contributing" / "README.md").read_text("utf-8")
    assert listed == sorted(listed)
    assert listed == re.findall(r"^\| `(\w+)` \| ", page.partition("| marker |")[2], re.MULTILINE)


@pytest.mark.process
def test_a_test_that_starts_a_process_without_the_marker_fails(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert markers.unmarked_start(request.node) is None
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    assert markers.unmarked_start(request.node) is None
    monkeypatch.setattr(request.node, "get_closest_marker", lambda name: None)
    assert "(subprocess.Popen): mark it with" in (markers.unmarked_start(request.node) or "")


class Item:
    def __init__(self, name: str) -> None:
        self.name = name
        self.fixturenames = ["shared_zygote"] if name in "zZ" else []

    def get_closest_marker(self, name: str) -> str | None:
        return name if self.name.isupper() else None


@pytest.mark.parametrize(
    ("names", "n_workers", "ordered"),
    [
        ("aBcDef", 2, "BacDef"),
        ("abcABCdef", 3, "AabBcdCef"),
        ("abA", 2, "aAb"),
        ("abcdef", 4, "abcdef"),
        ("aZzAbzB", 1, "ABZzzab"),
        ("aZzAbzBb", 2, "AzaBZzbb"),
        ("", 3, ""),
    ],
)
def test_the_tests_of_each_worker_begin_with_slow_ones(
    names: str, n_workers: int, ordered: str
) -> None:
    items = cast("list[pytest.Item]", [*map(Item, names)])
    assert "".join(item.name for item in markers.slow_first(items, n_workers)) == ordered


def test_what_took_long_without_the_marker_slow_is_listed() -> None:
    found = markers.Durations()
    for name, seconds, keywords in (
        ("a", 6, {}),
        ("b", 4, {}),
        ("c", 9, {"slow": 1}),
        ("b", 3, {}),
    ):
        given: dict[str, Any] = {"nodeid": name, "duration": seconds, "keywords": keywords}
        report = cast("pytest.TestReport", type("Report", (), given)())
        found.pytest_runtest_logreport(report)
    assert found.lines() == [
        "7.0 s without the marker slow: b",
        "6.0 s without the marker slow: a",
    ]
