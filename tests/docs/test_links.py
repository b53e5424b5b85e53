"""Links of all Markdown pages lead to files and headings that exist; the web is not read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = ("docs", "shardio", "converters", "tools")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for tree in TREES for page in sorted((ROOT / tree).rglob("*.md"))),
]


def prose(text: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as a repository's web page and MyST make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        numbered = (f"{slug}-{n}" if n else slug for n in range(len(found) + 1))
        found.add(next(each for each in numbered if each not in found))
    return found


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to files or headings that do not exist."""
    broken = []
    text = prose(page.read_text("utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        path = page.parent / target if target else page
        if "://" in target or target.startswith("mailto:"):
            continue
        if not path.exists():
            broken.append(target)
        elif anchor and anchor not in anchors(path.read_text("utf-8")):
            broken.append(f"{target}#{anchor}")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text(
        "# What `--x` does\n\n## A\n\n## A\n\n```sh\n# no heading\n```\n"
    )
    page = tmp_path / "a.md"
    sound = "[1](b.md) [2](b.md#what---x-does) [3](b.md#a-1) [4](#here) [5](https://no.example/#x)"
    page.write_text(f"# Here\n\n{sound}\n\n```text\n[x](none.md)\n```\n")
    assert broken_links(page) == []
    page.write_text("# Here\n\n[1](none.md) [2](b.md#no-heading) [3](b.md#a-2) [4](#there)\n")
    assert broken_links(page) == ["none.md", "b.md#no-heading", "b.md#a-2", "#there"]
