"""The dataset that the viewer shows: opened as far as it can be read, for several threads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np

import shardio
from shardio.errors import ClosedError, DatasetConflict, DatasetCorrupt, ShardUnsupported
from shardio_tools.arguments import is_url
from shardio_tools.output import decode_names

_N_OPEN: Final = 4
"""The maximum number of copies of the dataset that are open for requests at the same time."""
_ACCESS: Final = "pread"
"""Files are read, not mapped: a truncated file does not kill the server then, and visited
shards do not stay mapped.
"""
_REMOTE_CHECK_S: Final = 60.0
"""The time between two checks for a newer generation in an object store."""
_N_SUBSETS: Final = 20
"""The maximum number of subsets in which rows are looked up."""

RowChange = Literal["same", "appended", "changed"]


def row_change(before: shardio.ShardDataset, after: shardio.ShardDataset) -> RowChange:
    """Return how the rows have changed from one generation to another.

    In one lineage, rows are only appended and keep their numbers, even if compaction moves them to
    other shards.
    """
    n_more = len(after) - len(before)
    if before.lineage != after.lineage or n_more < 0:
        return "changed"
    return "appended" if n_more else "same"


def version_of(dataset: shardio.ShardDataset) -> str:
    """Return a key of a generation; datasets that replace one another have equal numbers."""
    return f"{dataset.lineage}-{dataset.generation}"


class Source:
    """A dataset, and a bounded pool of copies of it, because a dataset is not thread-safe.

    If the published generation is damaged, the newest one that can be read is shown; if none can,
    `dataset` is None. `problems` are the texts that the viewer then shows.
    """

    def __init__(self, path: str) -> None:
        self.path, self.is_remote = path, is_url(path)
        self.problems: list[str] = []
        self._free: list[shardio.ShardDataset] = []
        self._slots = threading.BoundedSemaphore(_N_OPEN)
        self._lock = threading.Lock()
        self._is_closed = False
        self._subsets: dict[tuple[str, str], Any] = {}
        self._subsets_lock = threading.Lock()
        self._before: shardio.ShardDataset | None = None
        self._newer: dict[str, Any] | None = None
        self._checked_version: Any = None
        self.dataset = self._open()
        """The dataset whose manifest is shown. Its samples are read through `borrow` only."""

    def _open(self) -> shardio.ShardDataset | None:
        try:
            return shardio.open(self.path, access=_ACCESS)
        except (DatasetCorrupt, ShardUnsupported) as error:
            self.problems = [str(error)]
        if self.is_remote:
            return None
        for number in sorted(_generation_numbers(self.path), reverse=True):
            with contextlib.suppress(shardio.ShardioError, OSError):
                dataset = shardio.open(self.path, generation=number, access=_ACCESS)
                self.problems.append(f"generation {number} is shown, the newest that can be read")
                return dataset
        self.problems.append(
            "no generation can be read; shardio repair writes the samples of sound shards to a new "
            "dataset"
        )
        return None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(os.path.abspath(self.path)) if not self.is_remote else self.path

    def reload(self) -> None:
        """Open the generation that is published now, and show it from the next request on."""
        self.problems = []
        opened = self._open()
        with self._lock:
            # The one before stays open: requests that have begun may still ask it.
            stale, self._free = [*self._free, self._before], []
            self._before, self.dataset = self.dataset, opened
            self._newer = self._checked_version = None
        with self._subsets_lock:
            self._subsets.clear()
        for each in stale:
            if each is not None:
                each.close()

    def newer(self) -> dict[str, Any] | None:
        """Return facts about the published generation; None if it is the one shown or unreadable.

        The facts are its number, its number of samples, and how the rows have changed.
        """
        try:
            published = self._version()
        except OSError:
            return None
        with self._lock:
            shown = self.dataset
            if published == self._checked_version:
                return self._newer
        newer = self._read_newer(shown)
        with self._lock:
            if shown is self.dataset:  # else it was compared with a generation of the past
                self._newer, self._checked_version = newer, published
            return self._newer

    def _version(self) -> object:
        """Return a value that changes if a generation is published; in a store, each minute."""
        if self.is_remote:
            return int(time.monotonic() // _REMOTE_CHECK_S)
        facts = os.stat(os.path.join(self.path, "dataset.json"))
        return facts.st_mtime_ns, facts.st_ino, facts.st_size

    def _read_newer(self, shown: shardio.ShardDataset | None) -> dict[str, Any] | None:
        try:
            with shardio.open(self.path, access=_ACCESS) as found:
                change = "changed" if shown is None else row_change(shown, found)
                if change == "same" and shown is not None and found.generation == shown.generation:
                    return None
                return {"generation": found.generation, "rows": change, "n_samples": len(found)}
        except (shardio.ShardioError, OSError):
            return None

    def required(self) -> shardio.ShardDataset:
        """Return `dataset`; raise DatasetCorrupt if there is none."""
        if (dataset := self.dataset) is None:
            raise DatasetCorrupt(" ".join(self.problems))
        return dataset

    @contextlib.contextmanager
    def borrow(self) -> Iterator[shardio.ShardDataset]:
        """Lend a copy of the dataset to the calling thread for a `with` block.

        Raises:
            DatasetCorrupt: no generation can be read.
            ClosedError: the source is closed.
        """
        with self._slots:
            lent = self._take()
            try:
                yield lent
            finally:
                self._give_back(lent)

    def _take(self) -> shardio.ShardDataset:
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"{self.path}: the viewer is closed")
            if self._free:
                return self._free.pop()
        return self._copy()

    def _copy(self) -> shardio.ShardDataset:
        shown = self.required()
        copy = shardio.open(self.path, generation=shown.generation, access=_ACCESS)
        if copy.lineage == shown.lineage:
            return copy
        copy.close()
        raise DatasetConflict(f"{self.path}: another dataset was written here")

    @contextlib.contextmanager
    def opened(self) -> Iterator[shardio.ShardDataset]:
        """Open a copy of the dataset for a `with` block, beside the pool: for background jobs.

        Raises:
            DatasetCorrupt: no generation can be read.
            ClosedError: the source is closed.
        """
        if self._is_closed:
            raise ClosedError(f"{self.path}: the viewer is closed")
        with self._copy() as dataset:
            yield dataset

    def _give_back(self, lent: shardio.ShardDataset) -> None:
        with self._lock:
            shown = None if self._is_closed else self.dataset
            if shown is not None and version_of(lent) == version_of(shown):
                self._free.append(lent)
                return
        lent.close()

    def subset_rows(self, name: str) -> Any:
        """Return the rows of a subset, with `len`, `rows(positions)` and `n_below(limits)`.

        Raises:
            InvalidArgument: there is no such subset.
        """
        dataset = self.required()
        key = version_of(dataset), name
        with self._subsets_lock:
            if key not in self._subsets:
                with dataset.subset(name) as part:
                    self._subsets[key] = part.rows.selected
            return self._subsets[key]

    def subsets_of(self, rows: Sequence[int]) -> list[str | None]:
        """Return the first subset that contains each row; None if there is none."""
        found: list[str | None] = [None] * len(rows)
        limits = np.array(rows, np.int64)
        for name in reversed([*self.required().subsets][:_N_SUBSETS]):
            subset = self.subset_rows(name)
            is_in = subset.n_below(limits + 1) > subset.n_below(limits)
            for i in np.flatnonzero(is_in).tolist():
                found[i] = decode_names(name)
        return found

    def close(self) -> None:
        """Close all copies that are not lent; those are closed when they are given back."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for each in (*free, self._before, self.dataset):
            if each is not None:
                each.close()


def _generation_numbers(path: str) -> list[int]:
    """Return the numbers of the generations whose files are in a dataset's folder."""
    try:
        names = os.listdir(os.path.join(path, "generations"))
    except OSError:
        return []
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return [int(stem) for stem in stems if stem.isascii() and stem.isdigit() and int(stem) > 0]
