"""Progress of an epoch: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Self, TextIO

from shardio._base.statistics import LoadingStats
from shardio.batch.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress

_EVERY_S: Final = 0.2
_LINE_EVERY_S: Final = 10.0


class ProgressBar:
    """An iterator over batches that shows its progress. It keeps no reference to batches.

    Args:
        batches: the iterator to wrap.
        n_batches: the number of batches of the epoch.
        n_done: the number of batches consumed before this iteration.
        stats: a function that returns the loading figures.
        title: the text before the bar.
        file: the output; standard error by default.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        *,
        n_batches: int,
        n_done: int,
        stats: Callable[[], LoadingStats],
        title: str,
        file: TextIO | None,
    ) -> None:
        self._batches, self._stats = batches, stats
        self._n_batches, self._n_done = n_batches, n_done
        self._file = sys.stderr if file is None else file
        self._title = title = _writable(title, self._file)
        self._bar = _bar(self._file, title, n_batches, n_done) if self._file.isatty() else None
        self._every_s = _LINE_EVERY_S if self._bar is None else _EVERY_S
        self._next_s = time.monotonic() + self._every_s
        # Restore the terminal even if the loop is left early.
        self._stop = weakref.finalize(self, _stopped, self._bar)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except BaseException:
            if self._stop.alive:
                self._show()
                self._stop()
            raise
        self._n_done += 1
        if time.monotonic() >= self._next_s:
            self._show()
        return batch

    def _show(self) -> None:
        """Show the progress; ignore an output that cannot be written."""
        stats = self._stats()
        elapsed_s = stats.elapsed_s or 1.0
        rate = f"{stats.n_samples / elapsed_s:,.0f} samples/s"
        note = f"{rate}, waiting {stats.waiting_s / elapsed_s:.0%} of the time"
        # Errors mean that the terminal is gone, or that the file is closed.
        with contextlib.suppress(OSError, ValueError):
            if self._bar is None:
                done = f"{self._n_done:,} of {self._n_batches:,} batches"
                self._file.write(f"{self._title}: {done}, {note}\n")
                self._file.flush()
            else:
                (task,) = self._bar.task_ids
                self._bar.update(task, completed=self._n_done, note=note, refresh=True)
        self._next_s = time.monotonic() + self._every_s


def _writable(title: str, file: TextIO) -> str:
    """Escape the characters of a title that the encoding of a file lacks."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return title.encode(encoding, "backslashreplace").decode(encoding)


def _bar(file: TextIO, title: str, n_batches: int, n_done: int) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(file=file),
        auto_refresh=False,  # no thread: the loop itself refreshes the bar
    )
    bar.add_task(title, total=n_batches, completed=n_done, note="")
    bar.start()
    return bar


def _stopped(bar: Progress | None) -> None:
    """Restore the terminal."""
    if bar is not None:
        with contextlib.suppress(OSError, ValueError):
            bar.stop()
