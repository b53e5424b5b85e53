"""Pages that promise something name tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = "| promise | test |"
PAGES = [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if HEADER in page.read_text("utf-8")
]


def promises(page: Path) -> list[tuple[str, list[str]]]:
    """Return what a page promises, with the tests that each promise names."""
    table = page.read_text("utf-8").partition(HEADER)[2].partition("\n\n")[0]
    rows = [line.strip("| ").rpartition(" | ") for line in table.splitlines()[2:]]
    return [(promise, re.findall(r"`(test_\w+)`", names)) for promise, _, names in rows]


@functools.cache
def promised_tests() -> set[str]:
    """Return the tests that the pages name and a module defines; others are not parsed."""
    names = {name for page in PAGES for _, tests in promises(page) for name in tests}
    definition = re.compile(rf"def ({'|'.join(names)})\(")
    sources = (path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    trees = (ast.parse(source) for source in sources if definition.search(source))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_promise_names_tests_that_are_there(page: Path) -> None:
    found, known = promises(page), promised_tests()
    assert len(found) > 5
    for promise, names in found:
        assert names, promise
        assert not set(names) - known, promise


def test_the_pages_about_loading_promise_something() -> None:
    assert {"determinism", "faults", "shared-memory"} <= {page.stem for page in PAGES}
