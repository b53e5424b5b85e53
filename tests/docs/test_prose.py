"""Docstrings open as those of a maintained library do, in all trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_collections")

ROOT = Path(__file__).resolve().parents[2]
TREES = ("converters", "docs", "shardio", "tests", "tools")

# A docstring that opens so has a subordinate clause or a pronoun in the place of a verb or a noun.
BANNED = re.compile(
    r"(What|Who|Whoever|Which|Where|Wherever|How|Whether|Those|That|These|It|Its|Nothing|Have"
    r"|One of (these|them)|So (many|much|long)|Likewise|As)\b"
)


def docstrings(block: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring, those of attributes included."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(block, field, ()):
            if not isinstance(statement, ast.Expr):
                yield from docstrings(statement)
            elif isinstance(value := statement.value, ast.Constant) and isinstance(
                value.value, str
            ):
                yield statement.lineno, value.value.strip()


def banned(text: str) -> list[str]:
    """Return the openings that are banned, of all docstrings of a module's source."""
    return [
        f"{line}: {opening.splitlines()[0]}"
        for line, opening in docstrings(ast.parse(text))
        if BANNED.match(opening)
    ]


@pytest.mark.parametrize("tree", TREES)
def test_no_docstring_opens_with_a_clause(tree: str) -> None:
    paths = sorted((ROOT / tree).rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{opening}"
        for path in paths
        for opening in banned(path.read_text("utf-8"))
    ]
    assert paths and found == []


@pytest.mark.parametrize(
    ("docstring", "is_banned"),
    [
        ("What a worker does.", True),
        ("\n    So many bytes.", True),
        ("Return what a worker does.", False),
        ("Whatever happens, close the file.", False),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        '"""{}"""',
        'def f():\n    """{}"""',
        'x = 1\n"""{}"""',
        'try:\n    f()\nexcept OSError:\n    """{}"""',
        'for x in y:\n    pass\nelse:\n    """{}"""',
        'match x:\n    case 1:\n        """{}"""',
    ],
)
def test_opening_found_in_every_docstring(form: str, docstring: str, is_banned: object) -> None:
    assert bool(banned(form.format(docstring))) is is_banned


def misplaced(changelog: str) -> list[str]:
    """Return the lines of a changelog that are no entries, or stand behind a table."""
    unreleased = changelog.partition("\n## Unreleased\n")[2].partition("\n## ")[0]
    entry = re.compile(r"\* (Add|Change|Fix|Remove) .*[.:)]")
    found = [line for line in unreleased.splitlines() if line and not entry.fullmatch(line)]
    return found + re.findall(r"^\|.*\n\s*(\*.*)", changelog, re.MULTILINE)


def test_entries_of_the_changelog_are_in_their_places() -> None:
    """Lines of an older changelog come back when branches are merged: take that of main then."""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert misplaced(changelog) == []
    headings = re.findall(r"^##+ .*", changelog, re.MULTILINE)
    assert len(headings) == len({*headings})


def test_misplaced_entries_are_found() -> None:
    text = "# Changes\n\n## Unreleased\n\n* Add x.\n* A loader is y.\n\n## 1\n\n| a |\n|---|\n"
    assert misplaced(text) == ["* A loader is y."]
    text += "\n* Fix z.\n"
    assert misplaced(text) == ["* A loader is y.", "* Fix z."]
