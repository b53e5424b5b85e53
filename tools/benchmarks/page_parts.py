"""Parts of documentation pages that programs write: tables between comments that name them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as a page has it; the first row is its header."""
    header, *others = (f"| {' | '.join(row)} |\n" for row in rows)
    return header + "|---" * len(rows[0]) + "|\n" + "".join(others)


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """Return the text of a page with each part between `<!-- table: NAME -->` and `<!-- end -->`.

    Raises SystemExit unless the page has exactly one place for each part.
    """
    text = page.read_text("utf-8")
    for name, part in parts.items():
        place = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if len(place.findall(text)) != 1:
            raise SystemExit(f"{page}: expected one place for the table {name!r}")
        text = place.sub(lambda found, part=part: f"{found[1]}{part}{found[2]}", text)  # type: ignore[misc]
    return text
