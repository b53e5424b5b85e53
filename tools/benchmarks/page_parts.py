"""Generated parts of documentation pages, such as tables, between comments that name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its header."""
    header, *others = (f"| {' | '.join(row)} |\n" for row in rows)
    return header + "|---" * len(rows[0]) + "|\n" + "".join(others)


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """Return the text of a page with each part between `<!-- table: NAME -->` and `<!-- end -->`.

    Raises SystemExit unless the page has exactly one place for each part.
    """
    text, end = page.read_text("utf-8"), "<!-- end -->"
    for name, part in parts.items():
        begin = f"<!-- table: {name} -->\n"
        before, *others = text.split(begin)
        if len(others) != 1 or end not in others[0]:
            raise SystemExit(f"{page}: expected one place for the table {name!r}")
        text = f"{before}{begin}{part}{end}{others[0].partition(end)[2]}"
    return text
