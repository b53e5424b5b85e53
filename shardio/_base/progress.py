"""The display of progress: one line on a terminal or in a notebook, otherwise plain lines.

The command line and the HTML for notebooks use the same functions for counts and sizes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TextIO, TypeVar

from shardio.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.live import Live

P = ParamSpec("P")
R = TypeVar("R")
Part = tuple[str, str]
"""A piece of a progress line, and its rich style."""

Speeds = tuple[float, float]
"""The work per second, in the unit of the state, and the files per second."""

_EVERY_S: Final = 0.1
"""The shortest time between two displayed states on a terminal or in a notebook."""
_N_PLAIN_LINES: Final = 10
"""The number of plain lines from start to end."""
_NOTEBOOK_COLUMNS: Final = 100
_MIN_BAR, _MAX_BAR, _MIN_NAME, _MIN_TITLE = 6, 30, 12, 12
_BAR_SHARE, _BAR_SHARE_OF_FILES = 7, 13
"""A bar takes 1 / 7 of the width, or 1 / 13 if files per second are displayed, so that a line of 80
columns has room for both rates and the time left."""
_GAP: Final = "  "
_WHOLE_RATE: Final = 100
"""The smallest number of files or items per second that is displayed without a decimal."""
_BY_IMPORTANCE: Final = ("faults", "counts", "rate", "files", "left", "percent", "more")
"""The parts of a line that are shown as far as there is room, the most important first."""
_STYLES: Final = {"percent": "bold", "rate": "cyan", "files": "cyan", "faults": "bold yellow"}


@dataclass(frozen=True, slots=True)
class ProgressState:
    """The state of an operation, to be displayed.

    Attributes:
        title: the name of the operation, such as "converting".
        done, total: the finished work and all work, in `unit`; `total` is 0 if it is unknown.
        counts: the progress as text, such as "3 of 10 files".
        rate: the speed as text; by default, a rewritten line shows the mean speed.
        faults: the number of faults as text, such as "1 broken"; "" for none.
        name: the input that finished last.
        more: another text, the first to be left out if there is no room.
        unit: the unit of `done` and `total`.
        n_files: the number of finished files; None if files per second are not displayed.
    """

    title: str
    done: int
    total: int
    counts: str
    rate: str = ""
    faults: str = ""
    name: str = ""
    more: str = ""
    unit: str = "bytes"
    n_files: int | None = None

    def as_text(self, speeds: Speeds = (0.0, 0.0)) -> str:
        """Return the state as one plain line; it has both speeds if `n_files` is not None."""
        rates = _rates(self, speeds) if self.n_files is not None else {}
        parts = [self.counts, self.rate, self.more, self.faults, *rates.values()]
        if self.total and self.unit == "bytes":
            parts.insert(0, f"{100 * self.done // self.total}% of {format_size(self.total)}")
        return f"{self.title}: {', '.join(filter(None, parts))}"


class ProgressLine:
    """A display of one or more operations, one after another.

    A terminal or a notebook shows one line, no wider than the terminal, which is rewritten; in a
    notebook, it is an output of the cell, as standard error looks like a fault there. Any other
    file gets a plain line after each tenth of the work. `close` removes the line from the terminal,
    unless `stays` is True.

    Errors of the file are ignored: an operation works without its display.
    """

    def __init__(self, file: TextIO | None = None, *, stays: bool = False) -> None:
        self._file = sys.stderr if file is None else file
        self._encoding = getattr(self._file, "encoding", None) or "utf-8"
        self.kind = display_kind(self._file)
        self._title, self._began, self._shown_s, self._n_printed = "", (0.0, 0, 0), 0.0, 0
        self._is_empty, self._stays = True, stays
        self._live: Live | None = None
        self._output: Any = None
        # The finalizer restores the terminal if the caller never closes the display.
        self._stop: Callable[[], object] = lambda: None

    def is_due(self) -> bool:
        """Return True if a state would be displayed now; False for plain lines."""
        return self.kind != "plain" and time.monotonic() >= self._shown_s + _EVERY_S

    def show(self, state: ProgressState, *, is_last: bool = False) -> None:
        """Display a state, unless the previous one is too recent and this is not the last."""
        now_s = time.monotonic()
        is_new = self._is_empty or state.title != self._title
        if is_new:
            self._title, self._n_printed = state.title, 0
            self._began = now_s, state.done, state.n_files or 0
        if self.kind == "plain":
            step = _N_PLAIN_LINES * state.done // state.total if state.total else 0
            if step > self._n_printed:
                self._n_printed = step
                self.print(state, self._speeds(state, now_s))
        elif is_new or is_last or state.done == state.total or self.is_due():
            self._shown_s = now_s
            speeds = self._speeds(state, now_s)
            self._rewrite(line_parts(state, speeds, self._width(), self._encoding))
        self._is_empty = False

    def _speeds(self, state: ProgressState, now_s: float) -> Speeds:
        """Return the mean speeds since the display began."""
        began_s, n_before, n_files_before = self._began
        taken_s = now_s - began_s
        if taken_s <= 0:
            return 0.0, 0.0
        n_files = (state.n_files or 0) - n_files_before
        return (state.done - n_before) / taken_s, n_files / taken_s

    def print(self, state: ProgressState, speeds: Speeds = (0.0, 0.0)) -> None:
        """Print a state as a plain line."""
        with contextlib.suppress(OSError, ValueError):
            self._file.write(_writable(state.as_text(speeds), self._encoding) + "\n")
            self._file.flush()

    def close(self) -> None:
        """End the display."""
        if self.kind == "notebook" and not self._is_empty and self._output is None:
            with contextlib.suppress(OSError, ValueError):
                self._file.write("\n")
                self._file.flush()
        self._stop()
        self._live, self._output, self._is_empty = None, None, True

    def _width(self) -> int:
        if self.kind == "notebook":
            return _NOTEBOOK_COLUMNS
        if self._live is None:
            self._live = _start_live(self._file, stays=self._stays)
            self._stop = weakref.finalize(self, _stop_live, self._live)
        # The last column stays empty: some terminals begin a new line after it.
        return self._live.console.width - 1

    def _rewrite(self, parts: Sequence[Part]) -> None:
        from rich.cells import cell_len
        from rich.text import Text

        with contextlib.suppress(OSError, ValueError):
            if self._live is None:
                text = _GAP.join(text for text, _ in parts)
                if self._put_out(text):
                    return
                # Cover the previous line, which may be longer.
                self._file.write(f"\r{text}{' ' * (_NOTEBOOK_COLUMNS - cell_len(text))}")
                self._file.flush()
                return
            styled = [part for each in parts for part in (each, (_GAP, ""))][:-1]
            line = Text.assemble(*styled, no_wrap=True, overflow="crop")
            self._live.update(line, refresh=True)

    def _put_out(self, text: str) -> bool:
        """Display a text below the cell of a notebook; return False if that fails."""
        notebook = sys.modules.get("IPython.display")
        if notebook is None:
            return False
        try:
            if self._output is None:
                self._output = notebook.display({"text/plain": text}, raw=True, display_id=True)
            else:
                self._output.update({"text/plain": text}, raw=True)
        except Exception:  # noqa: BLE001  # an operation does not depend on its display
            return False
        return self._output is not None


def display_kind(file: TextIO) -> Literal["terminal", "notebook", "plain"]:
    """Return the kind of display that suits a file."""
    if type(file).__module__.startswith("ipykernel."):
        return "notebook"
    is_capable = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return "terminal" if is_capable and file.isatty() else "plain"


def line_parts(
    state: ProgressState, speeds: Speeds, width: int, encoding: str = "utf-8"
) -> list[Part]:
    """Return the parts of a line of at most `width` columns, including gaps of two columns.

    If there is not enough room, the name is shortened first; then whole parts are left out.
    """
    from rich.cells import cell_len

    title, name = (_writable(printable(text), encoding) for text in (state.title, state.name))
    title = keep_end(title, max(_MIN_TITLE, width // 3), encoding)
    parts = _texts(state, speeds)
    # The bar does not depend on the texts, so that it keeps its length as they change.
    share = _BAR_SHARE if state.n_files is None else _BAR_SHARE_OF_FILES
    bar_width = max(_MIN_BAR, min(_MAX_BAR, width // share))
    room = width - cell_len(title) - (bar_width + len(_GAP) if state.total else 0)
    shown = {}
    for key in _BY_IMPORTANCE:
        n_columns = cell_len(parts[key]) + len(_GAP)
        if parts[key] and n_columns <= room:
            room -= n_columns
            shown[key] = parts[key]
    name = keep_end(name, room - len(_GAP), encoding) if room - len(_GAP) >= _MIN_NAME else ""
    line = [(title, "bold")]
    if state.total:
        line.append((_bar(state.done / state.total, bar_width, encoding), "cyan"))
    line += [(text, _STYLES.get(key, "")) for key, text in parts.items() if key in shown]
    return [*line, (name, "dim")] if name else line


def _texts(state: ProgressState, speeds: Speeds) -> dict[str, str]:
    """Return the texts of a line in their order; "" for one without a value."""
    left, speed = state.total - state.done, speeds[0]
    rates = _rates(state, speeds)
    return {
        "percent": f"{100 * state.done // state.total:3d}%" if state.total else "",
        "counts": state.counts,
        "files": rates.get("files", ""),
        "rate": state.rate or rates.get("rate", ""),
        "left": f"{_clock(left / speed)} left" if left > 0 and speed > 0 else "",
        "more": state.more,
        "faults": state.faults,
    }


def _rates(state: ProgressState, speeds: Speeds) -> dict[str, str]:
    """Return the mean speeds as texts, without those that are 0 or not displayed."""
    speed, files_per_s = speeds
    found = {}
    if state.n_files is not None and files_per_s > 0:
        found["files"] = _rate(files_per_s, "files")
    if speed > 0:
        found["rate"] = _rate(speed, state.unit)
    return found


def keep_end(text: str, width: int, encoding: str = "utf-8") -> str:
    """Return `text`, shortened to an ellipsis and its end if it has more than `width` columns.

    The characters of some scripts take two columns.
    """
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return f"{'…' if _is_unicode(encoding) else '~'}{text}"


def counted(n: int, things: str) -> str:
    """Return a count and its noun: "1 file", "2,000 files". `things` is the plural with "s"."""
    return f"{n:,} {things.removesuffix('s') if n == 1 else things}"


def format_size(n_bytes: float) -> str:
    """Return a number of bytes in the largest binary unit in which it is at least 1: "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:,.0f} bytes" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.1f} TiB"


def format_sides(height: object, width: object) -> str:
    """Return the size of a picture as text: "120 high × 160 wide", as in shapes of arrays."""
    return f"{height} high × {width} wide"


def shows_progress(
    describe: Callable[[Any], ProgressState],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function with the option `progress`: True displays the progress.

    The function calls `progress` with states of its own, which `describe` converts to
    `ProgressState`. If the caller passes True, the decorator replaces it with a callable that
    displays each state.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def displayed(*args: P.args, **options: P.kwargs) -> R:
            progress = options.get("progress")
            if not (progress is None or isinstance(progress, bool) or callable(progress)):
                raise InvalidArgument(
                    f"progress must be True, False, None or a function; found {progress!r}"
                )
            if progress is not True:
                return function(*args, **options)
            with contextlib.closing(ProgressLine()) as line:
                options["progress"] = lambda state: line.show(describe(state))
                return function(*args, **options)

        return displayed

    return decorate


def _bar(share: float, width: int, encoding: str) -> str:
    n_halves = round(2 * width * min(1.0, max(0.0, share)))
    if not _is_unicode(encoding):
        return ("#" * (n_halves // 2)).ljust(width, ".")
    return ("━" * (n_halves // 2) + "╸" * (n_halves % 2)).ljust(width, "─")


def _is_unicode(encoding: str) -> bool:
    return encoding.lower().startswith("utf")


def _rate(speed: float, unit: str) -> str:
    if unit == "bytes":
        return f"{format_size(speed)}/s"
    return f"{speed:,.0f} {unit}/s" if speed >= _WHOLE_RATE else f"{speed:,.1f} {unit}/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(text: str) -> str:
    """Return the text with control characters escaped, because names of files are untrusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _writable(text: str, encoding: str) -> str:
    """Return the text; escape the characters that the encoding lacks."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _start_live(file: TextIO, *, stays: bool) -> Live:
    from rich.console import Console
    from rich.live import Live

    live = Live(
        console=Console(file=file, highlight=False),
        auto_refresh=False,  # do not start a thread
        transient=not stays,
        # Lines that the program prints meanwhile appear above the progress line; but text that
        # goes to a file or a pipe must still go there.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )
    live.start()
    return live


def _stop_live(live: Live) -> None:
    with contextlib.suppress(OSError, ValueError):
        live.stop()
