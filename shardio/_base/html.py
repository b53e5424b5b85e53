"""Bounded HTML fragments for notebooks, from which `_repr_html_` of public objects is built.

A fragment has inline styles only: no script, no style sheet, no external resource. It inherits the
colours of the notebook, so that it is legible in light and dark themes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

MAX_BYTES: Final = 20_000
"""The maximum size of a fragment in UTF-8."""
_MAX_TABLE_BYTES: Final = 6_500
_MAX_LIST_BYTES: Final = 1_200
_MAX_PICTURE_BYTES: Final = 10_500
_MAX_ROWS: Final = 20
_LINE: Final = "1px solid rgba(128,128,128,.4)"
_CELL: Final = "text-align:left;padding:1px 14px 1px 0"
_MUTED: Final = "opacity:.65"


def plain(value: object, max_length: int = 60) -> str:
    """Return a shortened, escaped text; characters that are not printable are replaced."""
    text = str(value)
    if len(text) > max_length:
        text = f"{text[: max_length - 1]}…"
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def dims(shape: Iterable[int | None]) -> str:
    """Return a shape as text; None is a dimension that varies."""
    return " × ".join("any" if n is None else f"{n}" for n in shape) or "scalar"


def fragment(kind: str, where: object, facts: Iterable[str], *parts: str) -> str:
    """Return the fragment of an object: its class, a path, facts, and the parts that fit.

    `where` and `facts` are escaped here; `parts` are HTML. Empty facts and parts are left out.
    """
    shown = [f"<b>{plain(kind)}</b>"]
    shown += [f"<code>{plain(where, 80)}</code>"] if str(where) else []
    shown += [plain(fact, 80) for fact in facts if fact]
    found, end = f'<div style="line-height:1.5">{" · ".join(shown)}', "</div>"
    for part in parts:
        if _size(found) + _size(part) + len(end) <= MAX_BYTES:
            found += part
    return found + end


def table(header: Sequence[str], rows: Iterable[Sequence[object]], n_rows: int) -> str:
    """Return a table of the first rows, and the number of the others; "" without any rows.

    `rows` is not read beyond the rows that are shown.
    """
    if not n_rows:
        return ""
    found = [_row("th", f"{_CELL};border-bottom:{_LINE};font-weight:600", header)]
    n_left, shown = _MAX_TABLE_BYTES, 0
    for row in rows:
        found.append(_row("td", _CELL, row))
        n_left -= _size(found[-1])
        if n_left < 0 or shown == _MAX_ROWS:
            more = f"… and {n_rows - shown:,} more"
            found[-1] = f'<tr><td colspan="{len(header)}" style="{_CELL};{_MUTED}">{more}</td></tr>'
            break
        shown += 1
    style = "border-collapse:collapse;border:0;margin:4px 0"
    return f'<table style="{style}">{"".join(found)}</table>'


def listing(label: str, items: Iterable[object], n_items: int) -> str:
    """Return a line with the first items, and the number of the others; "" without any items."""
    if not n_items:
        return ""
    found, n_left, shown = [f'<span style="{_MUTED}">{plain(label)}</span> '], _MAX_LIST_BYTES, 0
    for item in items:
        text = plain(item, 40)
        n_left -= _size(text) + 4
        if n_left < 0:
            break
        found.append(f"{' · ' * (shown > 0)}{text}")
        shown += 1
    if shown < n_items:
        found.append(f" · … and {n_items - shown:,} more")
    return f"<div>{''.join(found)}</div>"


def pictures(jpegs: Iterable[bytes | None], captions: Iterable[object]) -> str:
    """Return a strip of the pictures that fit, as data URIs; None is a picture that is missing."""
    found, n_left = "", _MAX_PICTURE_BYTES
    for jpeg, caption in zip(jpegs, captions, strict=True):
        if jpeg is None:
            continue
        data, text = b64encode(jpeg).decode(), plain(caption, 24)
        made = (
            '<span style="display:inline-block;margin:4px 8px 0 0;text-align:center">'
            f'<img src="data:image/jpeg;base64,{data}" alt="{text}" style="display:block;margin:0">'
            f'<small style="{_MUTED}">{text}</small></span>'
        )
        if (n_left := n_left - _size(made)) < 0:
            break
        found += made
    return f"<div>{found}</div>" if found else ""


def _row(tag: str, style: str, cells: Sequence[object]) -> str:
    made = (f'<{tag} style="{style}">{plain(cell)}</{tag}>' for cell in cells)
    return f'<tr style="background:none">{"".join(made)}</tr>'


def _size(text: str) -> int:
    return len(text.encode())
