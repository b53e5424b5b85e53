"""Names of files made of text that comes from anywhere: they never lead out of their folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_MAX_BYTES: Final = 120
"""Of a part of a name: with what is put behind it, a file system takes it."""


def safe_part(text: str) -> str:
    """A text as the name of one file or folder; never empty, hidden, or more than one part."""
    kept = "".join("_" if c in '/\\:*?"<>|' or not c.isprintable() else c for c in text)
    kept = kept.encode()[:_MAX_BYTES].decode(errors="ignore").rstrip(". ")
    if kept.startswith((".", "_", "~")):
        kept = f"x{kept}"
    return kept or "x"


def safe_path(text: str) -> str:
    """A text as a path below some folder, of any number of parts."""
    parts = [safe_part(part) for part in text.split("/") if part not in ("", ".", "..")]
    return "/".join(parts[-8:]) or "x"


def distinct_names(names: Iterable[str], *reserved: str) -> dict[str, str]:
    """A name of a file for each of some names, also where upper and lower case are the same."""
    found: dict[str, str] = {}
    taken = {*reserved}
    for name in names:
        base = made = safe_part(name)
        number = 1
        while made.casefold() in taken:
            number += 1
            made = f"{base}-{number}"
        taken.add(made.casefold())
        found[name] = made
    return found
