"""Figures and promises in the documentation name commands that exist in the repository."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import GROUPS, load_groups
from benchmarks.harness import CASES
from stress_tests.__main__ import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
TREES = ("shardio", "converters", "tests", "tools")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [page for tree in TREES for page in sorted((ROOT / tree).rglob("README.md"))]


def named(text: str) -> set[str]:
    """Return the commands of a page: programs below tools/ with their first word, and modules."""
    words = re.findall(r"(?<![\w/])tools/(?:stress |bench )?[\w/.*-]+", text)
    cases = re.findall(r"tools/bench ((?:[a-z]+\.[a-z0-9-]+ ?)+)", text)
    found = {word.rstrip(".") for word in words} | {*re.findall(r"-m (tests(?:\.\w+)+)", text)}
    return found | {f"tools/bench {case}" for several in cases for case in several.split()}


def exists(command: str) -> bool:
    """Return True if a command, or a file, is there."""
    if command.startswith("tools/stress "):
        return command.partition(" ")[2] in {*PROGRAMS, "NAME", "--list"}
    if command.startswith("tools/bench "):
        load_groups()
        return command.partition(" ")[2] in {*CASES, *GROUPS, "NAME", "--list", "--gate", "--page"}
    if command.startswith("tests."):
        return importlib.util.find_spec(command) is not None
    return any(ROOT.glob(command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    found = named(page.read_text("utf-8"))
    assert sorted(command for command in found if not exists(command)) == []


def test_the_page_about_trust_names_commands() -> None:
    found = named((ROOT / "docs" / "explanation" / "trust.md").read_text("utf-8"))
    assert len(found) >= 6 and "tests.corruption.list_crafted" in found


GONE = ["tools/stress sock", "tools/soak", "tests.corruption.nothing", "tools/bench media.clip"]


@pytest.mark.parametrize("command", GONE)
def test_a_command_that_is_gone_is_noticed(command: str) -> None:
    assert named(f"run `{command} --minutes 1`, or `python -m {command}`") >= {command}
    assert not exists(command)
