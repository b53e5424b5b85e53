"""Bounded HTML fragments for notebooks, from which `_repr_html_` of public objects is built.

A fragment has inline styles only: no script, no style sheet, no external resource. It inherits the
colours of the notebook, so that it is legible in light and dark themes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from itertools import compress, islice
from typing import Final

MAX_BYTES: Final = 20_000
"""The maximum size of a fragment, in bytes of UTF-8."""
_MAX_TABLE_BYTES: Final = 6_500
_MAX_LIST_BYTES: Final = 600
_MAX_PICTURE_BYTES: Final = 10_800
_MAX_ROWS: Final = 20
_ESCAPES: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}
)  # the same as `html.escape`, whose module takes a millisecond to import in every process
_LINE: Final = "1px solid rgba(128,128,128,.4)"
_PADDING: Final = "padding:1px 14px 1px 0"
_MUTED: Final = "opacity:.65"
_POINT: Final = "\N{PUNCTUATION SPACE}"
_DIGIT: Final = "\N{FIGURE SPACE}"
"""Spaces as wide as a decimal point and as a digit."""


def escaped(value: object, max_length: int = 60) -> str:
    """Return the text of a value: shortened, escaped for HTML, unprintable characters replaced."""
    text = str(value)
    if len(text) > max_length:
        text = f"{text[: max_length - 1]}…"
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return shown.translate(_ESCAPES)


def format_shape(shape: Iterable[int | None]) -> str:
    """Return a shape as text; None is a dimension that varies."""
    return " × ".join("any" if n is None else f"{n}" for n in shape) or "scalar"


def format_number(value: object) -> str:
    """Return a number as text, with four digits for a float; a list with commas; "–" for None."""
    if isinstance(value, list | tuple):
        return ", ".join(map(format_number, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def fragment(kind: str, where: object, facts: Iterable[str], *parts: str) -> str:
    """Return the fragment of an object: its class, a path, facts, and the parts that fit.

    `kind`, `where` (the path, or "") and `facts` are escaped here; `parts` are HTML, such as a
    `table`. Empty facts and parts are left out.
    """
    shown = [f"<b>{escaped(kind)}</b>"]
    shown += [f"<code>{escaped(where, 80)}</code>"] if str(where) else []
    shown += [escaped(fact, 80) for fact in facts if fact]
    found, end = f'<div style="line-height:1.5">{" · ".join(shown)}', "</div>"
    for part in parts:
        if _size(found) + _size(part) + len(end) <= MAX_BYTES:
            found += part
    return found + end


def table(header: Sequence[str], rows: Iterable[Sequence[object]], n_rows: int) -> str:
    """Return a table of the first rows, and the number of the others; "" without any rows.

    `n_rows` is the number of all rows; at most 20 are read from `rows`. A cell is a text, a number
    or a list of numbers. Numbers are aligned at the decimal point, lists of numbers right; columns
    of empty texts are left out.
    """
    if not n_rows:
        return ""
    first = list(islice(rows, _MAX_ROWS))
    used = [any(cell != "" for cell in column) for column in zip(*first, strict=True)]
    header = list(compress(header, used))
    columns = list(compress(zip(*first, strict=True), used))
    numeric = [any(isinstance(cell, int | float | list) for cell in column) for column in columns]
    found = [_row("th", header, numeric)]
    n_left = _MAX_TABLE_BYTES
    for row in zip(*map(_texts, columns), strict=True):
        made = _row("td", row, numeric)
        if (n_left := n_left - _size(made)) < 0:
            break
        found.append(made)
    if n_more := n_rows - (len(found) - 1):
        cell = f'<td colspan="{len(header)}" style="text-align:left;{_PADDING};{_MUTED}">'
        found.append(f'<tr style="background:none">{cell}… and {n_more:,} more</td></tr>')
    style = "border-collapse:separate;border-spacing:0;border:0;margin:4px 0;font-size:inherit"
    return f'<table style="{style}">{"".join(found)}</table>'


def listing(label: str, items: Iterable[object], n_items: int) -> str:
    """Return a line with the first items, and the number of the others; "" without any items.

    `n_items` is the number of all items; `items` is read only while there is room.
    """
    if not n_items:
        return ""
    found, n_left, shown = [f'<span style="{_MUTED}">{escaped(label)}</span> '], _MAX_LIST_BYTES, 0
    for item in items:
        text = escaped(item, 40)
        n_left -= _size(text) + 4
        if n_left < 0:
            break
        found.append(f"{' · ' * (shown > 0)}{text}")
        shown += 1
    if shown < n_items:
        found.append(f" · … and {n_items - shown:,} more")
    return f"<div>{''.join(found)}</div>"


def note(text: str) -> str:
    """Return a paragraph; "" without text."""
    return f"<div>{escaped(text, 300)}</div>" if text else ""


def pictures(shown: Iterable[tuple[bytes | None, object]]) -> str:
    """Return a row of the JPEGs that fit, each with its caption; "" without any.

    A picture that is None is left out.
    """
    found, n_left = "", _MAX_PICTURE_BYTES
    for jpeg, caption in shown:
        if jpeg is None:
            continue
        data, text = b64encode(jpeg).decode(), escaped(caption, 16)
        made = (
            '<span style="display:inline-block;margin:4px 8px 0 0;text-align:center">'
            f'<img src="data:image/jpeg;base64,{data}" alt="{text}" style="display:block;margin:0">'
            f'<small style="{_MUTED}">{text}</small></span>'
        )
        if (n_left := n_left - _size(made)) < 0:
            break
        found += made
    return f"<div>{found}</div>" if found else ""


def _texts(column: Sequence[object]) -> list[str]:
    """Return the escaped texts of a column; spaces after numbers align their decimal points."""
    texts = [escaped(cell if isinstance(cell, str) else format_number(cell)) for cell in column]
    if any(isinstance(cell, list) for cell in column):
        return texts
    is_float = any(isinstance(cell, float) for cell in column)
    lengths = [len(text) - text.find(".") if "." in text else 0 for text in texts]
    longest = max(lengths) if is_float else 0
    return [
        text + _POINT * (n == 0 < longest) + _DIGIT * (longest - max(n, 1))
        for text, n in zip(texts, lengths, strict=True)
    ]


def _row(tag: str, cells: Sequence[str], numeric: Sequence[bool]) -> str:
    made, line = "", f";border-bottom:{_LINE}" if tag == "th" else ""
    for text, is_number in zip(cells, numeric, strict=True):
        side = "right" if is_number else "left"
        made += f'<{tag} style="text-align:{side};{_PADDING}{line}">{text}</{tag}>'
    return f'<tr style="background:none">{made}</tr>'


def _size(text: str) -> int:
    return len(text.encode())
