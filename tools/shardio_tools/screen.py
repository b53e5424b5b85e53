"""The visual style of all commands: headings, tables, colours, the closing line, the next steps.

A command describes its report as a sequence of elements. On a terminal, `rendered` fits the
elements to the width of the terminal and, unless NO_COLOR is set, colours them by meaning. In a
pipe, in a file and on a dumb terminal, they are plain text of any width, without the next steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TextIO

from shardio._base.progress import display_kind

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

MAX_LISTED: Final = 20
"""The maximum number of rows of a list to print; the others are counted."""

Role = Literal["", "good", "warning", "bad", "dim"]
_STYLES: Final[dict[Role, str]] = {
    "": "",
    "good": "green",
    "warning": "yellow",
    "bad": "red",
    "dim": "dim",
}
_MARKS: Final[dict[Role, tuple[str, str]]] = {
    "good": ("✓", "+"),
    "warning": ("!", "!"),
    "bad": ("✗", "x"),
}
"""The mark before a closing line, and its form where the encoding of the terminal lacks it."""


class Cell(str):
    """A text with a role, which a terminal shows as a colour."""

    role: Role

    def __new__(cls, text: str, role: Role) -> Cell:
        """Return `text` with a role."""
        cell = super().__new__(cls, text)
        cell.role = role
        return cell


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of the elements that follow."""

    text: str
    role: Role = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, below column titles if there are any.

    `align` has one character per column: "<" left, ">" right, "." at the decimal point; further
    columns are aligned left. If there is a text `rest`, which says where to find all rows, at most
    MAX_LISTED rows are shown.
    """

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    align: str = ""
    rest: str = ""


def facts(rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with names in the first column, and the facts in the others."""
    return Table([[Cell(name, "dim"), *rest] for name, *rest in rows])


@dataclass(frozen=True, slots=True)
class Done:
    """The closing line: the work that was done, with its outcome as `role`."""

    text: str
    role: Role = "good"


@dataclass(frozen=True, slots=True)
class Next:
    """Suggestions for the next steps: commands and Python code, each with a remark or "".

    Only terminals show it.
    """

    steps: Sequence[tuple[str, str]] = ()
    code: Sequence[tuple[str, str]] = ()


Element = str | Heading | Table | Done | Next


def rendered(elements: Iterable[Element], stream: TextIO) -> Iterator[str]:
    """Yield the text of each element, styled if `stream` is a terminal, otherwise plain."""
    console = console_of(stream) if display_kind(stream) == "terminal" else None
    is_first, is_spaced = True, console is not None
    for element in elements:
        if isinstance(element, Next) and (console is None or element == Next()):
            continue
        # Plain text without headings is for scripts: it has no empty lines.
        is_spaced = is_spaced or isinstance(element, Heading)
        if isinstance(element, Heading | Done | Next) and is_spaced and not is_first:
            yield ""
        is_first = False
        if console is not None:
            yield _styled(element, console)
        else:
            yield _plain(element, stream.encoding or "utf-8")


def painted(text: str, role: Role, stream: TextIO) -> str:
    """Return a text in the colour of its role if `stream` is a terminal."""
    if display_kind(stream) != "terminal":
        return text
    console = console_of(stream)
    with console.capture() as captured:
        console.print(text, style=_STYLES[role], end="", soft_wrap=True)
    return captured.get()


def fitted(text: str, stream: TextIO) -> str:
    """Break a line between words so that it fits the width of `stream`, if this is a terminal."""
    if "\n" in text or display_kind(stream) != "terminal":
        return text
    return "\n".join(_wrapped(text, console_of(stream).width))


def console_of(stream: TextIO) -> Console:
    """Return a console of rich that prints text as it is: no markup, emoji or highlighting."""
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _plain(element: Element, encoding: str) -> str:
    if isinstance(element, Heading | Done):
        return element.text
    if isinstance(element, Table):
        return "\n".join(_plain_rows(element, encoding))
    return "" if isinstance(element, Next) else str(element)


def _plain_rows(table: Table, encoding: str) -> Iterator[str]:
    from rich.cells import cell_len

    rows, n_more = _visible_rows(table)
    rows = [list(table.head), *rows] if table.head else rows
    # Characters that the encoding lacks become escapes, which are wider.
    rows = [[c.encode(encoding, "backslashreplace").decode(encoding) for c in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if table.align[i : i + 1] in (">", ".") else cell + space)
        yield ("  " + "  ".join(cells)).rstrip()
    if n_more:
        yield f"  … and {n_more:,} more ({table.rest})"


def _visible_rows(table: Table) -> tuple[list[Sequence[str]], int]:
    """Return the rows to show, with aligned decimal points, and the number of rows left out."""
    limit = MAX_LISTED if table.rest else len(table.rows)
    columns = [list(column) for column in zip(*table.rows[:limit], strict=True)]
    for i, column in enumerate(columns):
        if table.align[i : i + 1] == ".":
            columns[i] = _align_points(column, len(table.head[i]) if table.head else 0)
    return [*map(list, zip(*columns, strict=True))], max(0, len(table.rows) - limit)


def _align_points(cells: Sequence[str], width: int) -> list[str]:
    """Pad numbers on both sides, to at least `width` characters, so that their points align."""
    lengths = [len(cell) - cell.find(".") if "." in cell else 0 for cell in cells]
    longest = max(lengths, default=0)
    padded = [cell + " " * (longest - n) for cell, n in zip(cells, lengths, strict=True)]
    width = max([width, *map(len, padded)])
    return [_with_role(cell, text.rjust(width)) for cell, text in zip(cells, padded, strict=True)]


def _with_role(cell: str, text: str) -> str:
    return Cell(text, cell.role) if isinstance(cell, Cell) else text


def _styled(element: Element, console: Console) -> str:
    with console.capture() as captured:
        if isinstance(element, Table):
            _print_table(element, console)
        elif isinstance(element, Next):
            _print_next(element, console)
        elif isinstance(element, Heading):
            _print_line(element.text, f"bold {_STYLES[element.role]}", console)
        elif isinstance(element, Done):
            mark, plain = _MARKS[element.role]
            is_unicode = console.encoding.startswith("utf")
            _print_line(
                f"{mark if is_unicode else plain} {element.text}", _STYLES[element.role], console
            )
        else:
            _print_line(element, _style_of(element), console)
    # Blanks at the ends of lines would become lines of their own if the terminal gets narrower.
    return "\n".join(line.rstrip(" ") for line in captured.get().splitlines())


def _print_next(element: Next, console: Console) -> None:
    if element.steps:
        console.print("Next", style="bold")
        _print_steps(element.steps, console)
    if element.code:
        console.print("\nIn Python" if element.steps else "In Python", style="bold")
        _print_steps([("import shardio", ""), *element.code], console)


def _print_steps(steps: Sequence[tuple[str, str]], console: Console) -> None:
    """Print steps that can be copied as they are; a remark is a comment, omitted if too long."""
    from rich.cells import cell_len

    width = max(cell_len(step) for step, _ in steps)
    for step, remark in steps:
        console.print(f"  {step}", end="", soft_wrap=True)
        remark = f"  # {remark}" if remark else ""
        if remark and 2 + width + cell_len(remark) <= console.width:
            remark = " " * (width - cell_len(step)) + remark
        fits = 2 + cell_len(step) + cell_len(remark) <= console.width
        console.print(remark if fits else "", style="dim", soft_wrap=True)


def _style_of(cell: str) -> str:
    return _STYLES[cell.role] if isinstance(cell, Cell) else ""


def _print_line(text: str, style: str, console: Console) -> None:
    for line in _wrapped(text, console.width):
        console.print(line, style=style, soft_wrap=True)


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Yield lines of whole words; a word longer than the width, such as a path, stays whole."""
    from rich.cells import cell_len

    indent = " " * (len(text) - len(text.lstrip(" ")))
    line, hang = indent, indent + "  "
    for word in text.split():
        longer = line + word if line.isspace() or not line else f"{line} {word}"
        if line.strip() and cell_len(longer) > width:
            yield line
            longer = hang + word
        line = longer
    yield line


def _print_table(table: Table, console: Console) -> None:
    from rich.padding import Padding

    rows, n_more = _visible_rows(table)
    if rows or table.head:
        console.print(Padding(_rich_table(table, rows), (0, 0, 0, 2), expand=False))
    if n_more:
        console.print(f"  … and {n_more:,} more ({table.rest})", style="dim")


def _rich_table(table: Table, rows: Sequence[Sequence[str]]) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(
        box=None,
        show_header=bool(table.head),
        header_style="dim",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    n_columns = len(rows[0]) if rows else len(table.head)
    for i in range(n_columns):
        is_last, align = i == n_columns - 1, table.align[i : i + 1]
        head = table.head[i] if table.head else ""
        if align == "." and rows:  # rich would strip the spaces behind numbers that it aligns right
            head = head.rjust(len(rows[0][i]))
        made.add_column(
            Text(head),
            justify="right" if align == ">" else "left",
            no_wrap=not is_last,
            overflow="fold" if is_last else "ellipsis",
        )
    for row in rows:
        made.add_row(*(Text(cell, _style_of(cell)) for cell in row))
    return made
