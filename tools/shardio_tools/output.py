"""Output of commands: reports, errors and JSON; sizes, counts and names as text.

Reports and JSON go to standard output; progress and errors to standard error.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import math
import os
import re
import select
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TextIO

from shardio._base.progress import format_size, printable
from shardio_tools.screen import Done, Element, Next, Role, fitted, painted, rendered

if TYPE_CHECKING:
    from shardio.maintenance import MaintenanceReport, SplitReport, StatsReport

_UNDECODED: Final = re.compile("[\udc80-\udcff]+")
"""Bytes of a file name that are invalid in the locale's encoding, as Python's surrogate escapes."""
_is_report_lost = False
"""True if a part of the report could not be written."""
_shows_progress = False
"""True if the command displays its progress."""


OUTCOMES: Final = {
    "converted": "converted",
    "empty": "too short for one clip",
    "broken": "broken",
    "unsupported": "not a video",
    "part": "part of another",
    "not_processed": "not reached",
    "duplicate": "already in the dataset",
    "modified": "changed since it was converted",
}
"""Text for the outcome of an input; repaired datasets record further outcomes."""


def escape_unwritable() -> None:
    """Make standard output and error escape characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_out(text: str = "") -> None:
    """Print a line of the report."""
    _attempt(sys.stdout, partial(print, text))


def print_screen(elements: Iterable[Element]) -> None:
    """Print elements of a report, in the form for standard output."""
    for text in rendered(elements, sys.stdout):
        print_out(text)


def print_error(text: str, role: Role = "bad") -> None:
    """Flush the report, then print an error on standard error; wrap it if that is a terminal."""
    flush()
    name, text = "shardio:", fitted(f"shardio: {text}", sys.stderr)
    line = painted(name, role, sys.stderr) + text.removeprefix(name)
    _attempt(sys.stderr, partial(print, line, file=sys.stderr, flush=True))


def print_now(text: str, stream: TextIO) -> None:
    """Print a line and flush: plain progress, or output of the argument parser."""
    _attempt(stream, partial(print, text, file=stream, flush=True))


def flush() -> None:
    """Flush the report."""
    _attempt(sys.stdout, sys.stdout.flush)


def _attempt(stream: TextIO, write: Callable[[], object]) -> None:
    """Write; ignore any OSError but BrokenPipeError, because a command works without its output."""
    global _is_report_lost
    try:
        write()
    except BrokenPipeError:
        raise
    except OSError as error:
        redirect_to_null(stream)
        if stream is sys.stdout:
            _is_report_lost = True
            print_error(f"standard output: {error.strerror}; the report is incomplete")


def begin_report() -> None:
    """Reset the state of the report."""
    global _is_report_lost, _shows_progress
    _is_report_lost = _shows_progress = False


def is_report_lost() -> bool:
    """Return True if a part of the report could not be written."""
    return _is_report_lost


def redirect_to_null(stream: TextIO) -> None:
    """Redirect a stream, including its buffered text, to /dev/null."""
    with contextlib.suppress(OSError):  # a stream without a file descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def print_json(content: Mapping[str, Any]) -> None:
    """Print one standard JSON object, without NaN, infinities or invalid escapes."""
    text = decode_names(json.dumps(_finite(content), ensure_ascii=False, indent=1))
    if codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8":
        # For characters that the encoding lacks, Python would write \x or \U, which are not JSON.
        text = re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    print_out(text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def escaped(text: str) -> str:
    """Return `text` with line breaks and control characters escaped: names are untrusted."""
    return printable(decode_names(text))


def decode_names(text: str) -> str:
    """Return `text` with undecoded bytes of file names decoded as UTF-8."""
    return _UNDECODED.sub(
        lambda found: (
            found[0].encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
        ),
        text,
    )


def utf8_name(name: str) -> str:
    """Decode a command-line argument as UTF-8, the encoding of the names of fields and subsets.

    Bytes that are not UTF-8 become surrogates.
    """
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def shorten(text: str, n_chars: int = 72) -> str:
    """Return at most `n_chars` of `text`, on one line."""
    text = escaped(text)
    return text if len(text) <= n_chars else text[: n_chars - 1] + "…"


def format_count(n: int, thing: str, things: str = "") -> str:
    """Return a count with its noun: "1 file", "2,000 files"."""
    return f"{n:,} {thing if n == 1 else things or thing + 's'}"


def format_duration(elapsed_s: float) -> str:
    """Return a duration as text: in seconds (0.1 s or more), in minutes or in hours."""
    if elapsed_s < 60:
        return f"{max(elapsed_s, 0.1):.1f} s"
    minutes, rest = divmod(round(elapsed_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def shown_path(path: str) -> str:
    """Return a path as an argument for a shell: quoted if need be, with odd characters escaped."""
    return escaped(shlex.quote(path))


def inspect_step(path: str) -> tuple[str, str]:
    """Return the next step of inspecting a dataset."""
    return f"shardio inspect {shown_path(path)}", "fields, counts, classes and a sample"


def wants_progress(options: argparse.Namespace) -> bool:
    """Return True if the command is to display its progress."""
    global _shows_progress
    _shows_progress = not (options.quiet or options.json)
    return _shows_progress


def check_progress_is_read() -> None:
    """Raise BrokenPipeError if progress was displayed, and nobody reads standard error any more.

    The display itself ignores errors of its stream, as the operation matters more.
    """
    if not _shows_progress:
        return
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
        poll.register(sys.stderr, 0)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        raise BrokenPipeError


def print_result(report: Any, options: argparse.Namespace, elements: Iterable[Element]) -> None:
    """Print a report: as JSON with --json, else as a screen; nothing with --quiet."""
    if options.json:
        print_json(report.as_json())
    elif not options.quiet:
        print_screen(elements)


def run_rewrite(
    operation: Callable[..., MaintenanceReport],
    options: argparse.Namespace,
    *places: str,
    **more: object,
) -> MaintenanceReport:
    """Call `operation`, which rewrites datasets, with the shared options; show its progress."""
    return operation(
        *places,
        shard_bytes=options.shard_bytes,
        workers=options.workers,
        progress=wants_progress(options),
        **more,
    )


def print_report(
    report: MaintenanceReport, options: argparse.Namespace, did: str, *steps: tuple[str, str]
) -> None:
    """Print the result of a rewriting operation; the line begins with `did`."""
    counts = format_count(report.n_samples, "sample"), format_count(report.n_shards, "shard")
    line = f"{did}: {' in '.join(counts)}, {format_size(report.n_bytes)}, "
    print_result(report, options, [Done(line + generation_text(report, options)), Next(steps)])


def generation_text(
    report: MaintenanceReport | SplitReport | StatsReport, options: argparse.Namespace
) -> str:
    """Return a text that names the published generation, and the dataset's path as given."""
    given = vars(options)
    place: str = given["out"] if "out" in given else given["path"]
    return f"generation {report.generation}: {escaped(place)}"
