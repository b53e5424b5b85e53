"""Lists of rows: all, a subset, or those that a background scan finds, optionally sorted."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

import shardio
from shardio_tools.output import decode_names, format_count
from shardio_tools.view.jobs import FairSemaphore, Job
from shardio_tools.view.rows import class_field
from shardio_tools.view.source import Source
from shardio_tools.view.stored import READ_ERRORS

Rows = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

MAX_MATCHES: Final = 5_000_000
"""The maximum number of rows that a filter keeps and that are sorted: 40 MB, and 80 MB to sort."""
_MAX_WORDS: Final = 200
"""The maximum length of a text to search for, in characters."""
_ROWS_AT_ONCE: Final = 1 << 16
_TEXT_BYTES: Final = 4 << 20
"""The size of the texts that are searched at a time, unless one text is larger."""


class RowSet(Protocol):
    """A set of rows with positions and `n_below`, as a subset of a dataset has."""

    def __len__(self) -> int: ...

    def rows(self, positions: Any) -> Any:
        """Return the rows at positions."""

    def n_below(self, limits: Any) -> Any:
        """Return the number of rows below each limit."""


@dataclass(frozen=True)
class Filter:
    """The conditions of a list of rows. `values` is a field with the lowest and highest value."""

    class_index: int | None = None
    subset: str | None = None
    values: tuple[str, float, float] | None = None
    words: tuple[str, tuple[str, ...]] | None = None
    sort: str | None = None
    is_descending: bool = False

    @property
    def needs_scan(self) -> bool:
        """True if values of the samples decide."""
        return bool(self.class_index is not None or self.values or self.words or self.sort)


def parse_filter(params: Mapping[str, str], dataset: shardio.ShardDataset) -> Filter:
    """Return the filter that a request names.

    Raises:
        InvalidArgument: there is no such field, class or subset; or a value is invalid.
    """
    given = {key: value for key, value in params.items() if value != ""}
    subset, sort = given.get("subset"), given.get("sort")
    if subset is not None and subset not in dataset.subsets:
        raise shardio.InvalidArgument(f"there is no subset {subset!r:.80}")
    if sort is not None and sort not in number_fields(dataset):
        raise shardio.InvalidArgument(f"{sort!r:.80} is not a field of single numbers")
    return Filter(
        _class(given.get("class"), dataset),
        subset,
        _values(given.get("range"), dataset),
        _words(given.get("text"), dataset),
        sort,
        sort is not None and given.get("desc") == "1",
    )


def number_fields(dataset: shardio.ShardDataset) -> list[str]:
    """Return the fields with one number for each sample, which can be sorted and limited."""
    columns = dataset.schema.columns.items()
    return [name for name, each in columns if not each.shape and each.dtype != "bfloat16"]


def _class(text: str | None, dataset: shardio.ShardDataset) -> int | None:
    if text is None:
        return None
    if class_field(dataset) is None:
        raise shardio.InvalidArgument("the dataset has no field `label` with classes")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise shardio.InvalidArgument(f"class must be the index of a class; found {text!r:.40}")
    return int(text)


def _values(text: str | None, dataset: shardio.ShardDataset) -> tuple[str, float, float] | None:
    if text is None:
        return None
    name, *limits = text.rsplit(":", 2)
    if len(limits) != 2 or name not in number_fields(dataset):
        raise shardio.InvalidArgument(
            f"range must be FIELD:LOW:HIGH, with a field of single numbers; found {text!r:.80}"
        )
    try:
        low, high = (
            float(limit or end) for limit, end in zip(limits, ("-inf", "inf"), strict=True)
        )
    except ValueError:
        low = math.nan
        high = math.nan
    if math.isnan(low) or math.isnan(high):
        raise shardio.InvalidArgument(f"range: LOW and HIGH must be numbers; found {text!r:.80}")
    return name, low, high


def _words(text: str | None, dataset: shardio.ShardDataset) -> tuple[str, tuple[str, ...]] | None:
    if text is None:
        return None
    names = [name for name, field in dataset.schema.items() if field.is_utf8]
    name = max((n for n in names if text.startswith(f"{n}:")), key=len, default=None)
    if name is None:
        raise shardio.InvalidArgument(
            f"text must be FIELD:WORDS, with a field of text; found {text!r:.80}"
        )
    words = text[len(name) + 1 :]
    if len(words) > _MAX_WORDS:
        raise shardio.InvalidArgument(f"at most {_MAX_WORDS} characters are searched for")
    return (name, tuple(words.casefold().split())) if words.split() else None


class MatchedRows:
    """A complete list of rows: all of a dataset (`found` is None), or those of a subset."""

    text = ""
    has_failed = False

    def __init__(self, n_total: int, found: RowSet | None = None) -> None:
        self._n_total, self._found = n_total, found

    @property
    def n(self) -> int:
        """The number of rows."""
        return self._n_total if self._found is None else len(self._found)

    @property
    def progress(self) -> float:
        """The share of the dataset that has been searched."""
        return 1.0

    @property
    def is_complete(self) -> bool:
        """True if no row will be added."""
        return True

    def wait(self, n: int, timeout_s: float) -> None:
        """Wait until there are `n` rows, or the list is complete."""

    def rows(self, start: int, stop: int) -> list[int]:
        """Return the rows at some positions."""
        positions = np.arange(start, max(start, min(stop, self.n)))
        found = positions if self._found is None else self._found.rows(positions)
        return [int(row) for row in found]

    def position(self, row: int) -> int | None:
        """Return the position of a row; None if it is not in the list."""
        if self._found is None:
            return row if 0 <= row < self._n_total else None
        before, after = self._found.n_below(np.array([row, row + 1])).tolist()
        return before if after > before else None


class Scan:
    """A list of the rows that a filter finds, in a thread of its own.

    Without sorting, the list grows while shards are read, in ascending order. A sorted list has no
    rows until all are found. At most MAX_MATCHES rows are kept; `text` says so, and which shards
    could not be read.
    """

    def __init__(self, source: Source, wanted: Filter, semaphore: FairSemaphore) -> None:
        self._source, self._filter, self._semaphore = source, wanted, semaphore
        dataset = source.required()
        self._n_total = len(dataset)
        self._labels = class_field(dataset)
        self._subset: RowSet | None = None
        if wanted.subset is not None:
            self._subset = source.subset_rows(wanted.subset)
        n_first = self._n_total if self._subset is None else len(self._subset)
        is_plain = replace(wanted, subset=None, sort=None, is_descending=False) == Filter()
        if wanted.sort is not None and is_plain and n_first > MAX_MATCHES:
            raise shardio.InvalidArgument(_too_many_to_sort(n_first))
        dtype = np.uint32 if self._n_total < 1 << 32 else np.uint64
        self._rows: Values = np.empty(1024, dtype)
        self._keys: list[Values] = []
        self._n_found = self._n_unreadable = 0
        self._first_error = ""
        self._is_cut = self._is_sorted = False
        self._lock = threading.Lock()
        self._job = Job(self._run)

    @property
    def n(self) -> int:
        """The number of rows found."""
        return self._n_found if self._filter.sort is None or self._is_sorted else 0

    @property
    def progress(self) -> float:
        """The share of the dataset that has been searched."""
        return self._job.progress

    @property
    def is_complete(self) -> bool:
        """True if no row will be added; False for a scan that was stopped: it is to be repeated."""
        return self._job.state != "running" and not self.is_cancelled

    @property
    def has_failed(self) -> bool:
        """True if the rows could not be found; `text` says why."""
        return self._job.state == "failed" and not self.is_cancelled

    @property
    def text(self) -> str:
        """A text on rows that the list lacks, or ""; for a failed scan, the reason."""
        if self.has_failed:
            return self._job.text
        parts = []
        if self._is_cut:
            parts.append(f"the first {MAX_MATCHES:,} rows are listed; there are more")
        if self._n_unreadable:
            lost = format_count(self._n_unreadable, "shard")
            parts.append(f"{lost} could not be searched: {self._first_error}")
        return "; ".join(parts)

    def wait(self, n: int, timeout_s: float) -> None:
        """Wait until there are `n` rows, or the list is complete."""
        self._job.wait(timeout_s, lambda: self.n >= n)

    def rows(self, start: int, stop: int) -> list[int]:
        """Return the rows at some positions."""
        with self._lock:
            return [int(row) for row in self._rows[start : min(stop, self.n)]]

    def position(self, row: int) -> int | None:
        """Return the position of a row; None if it is not in the list, or not yet."""
        with self._lock:
            found = self._rows[: self.n]
            if self._filter.sort is not None:
                places = np.flatnonzero(found == row)
                return int(places[0]) if len(places) else None
            at = int(np.searchsorted(found, row))
            return at if at < len(found) and int(found[at]) == row else None

    @property
    def is_cancelled(self) -> bool:
        """True if `cancel` was called before all shards were searched."""
        return self._job.is_cancelled

    def cancel(self) -> None:
        """Stop searching."""
        self._job.cancel()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._job.join(timeout_s)

    def _run(self, job: Job) -> None:
        try:
            self._semaphore.acquire(job)
            with contextlib.closing(self._find()) as parts:
                for progress in parts:
                    job.report(progress)
                    self._semaphore.yield_if_due(job)
        finally:
            self._semaphore.release(job)

    def _find(self) -> Generator[float, None, None]:
        """Search all shards, and yield the progress after each part."""
        with self._source.opened() as dataset:
            for shard in range(len(dataset.shards)):
                try:
                    for end, found, keys in self._search(dataset, shard):
                        self._add(found, keys)
                        yield end / max(1, self._n_total)
                except READ_ERRORS as error:
                    self._n_unreadable += 1
                    self._first_error = self._first_error or decode_names(str(error))
                yield float(dataset.shard_starts[shard + 1]) / max(1, self._n_total)
                if self._is_cut:
                    break
        if self._filter.sort is not None:
            self._sort()

    def _search(
        self, dataset: shardio.ShardDataset, shard: int
    ) -> Iterator[tuple[int, Rows, Values | None]]:
        """Yield the matching rows of parts of a shard, with their keys for sorting.

        The first value is the row up to which the shard has been searched.
        """
        first, end = (int(n) for n in dataset.shard_starts[shard : shard + 2])
        for start in range(first, end, _ROWS_AT_ONCE):
            stop = min(end, start + _ROWS_AT_ONCE)
            rows = self._with_numbers(dataset, shard, self._in_subset(np.arange(start, stop)))
            for part in self._parts(dataset, shard, rows):
                found, keys = part, None
                if self._filter.words is not None:
                    found = _with_words(dataset, *self._filter.words, part)
                if self._filter.sort is not None and len(found):
                    keys = _numbers(dataset, shard, self._filter.sort, found - first)
                yield int(part[-1]) + 1 if len(part) else stop, found, keys

    def _in_subset(self, rows: Rows) -> Rows:
        if self._subset is None:
            return rows
        is_in = self._subset.n_below(rows + 1) > self._subset.n_below(rows)
        return rows[np.asarray(is_in, np.bool_)]

    def _with_numbers(self, dataset: shardio.ShardDataset, shard: int, rows: Rows) -> Rows:
        """Return the rows of a class, with a number in the range that is wanted."""
        wanted, first = self._filter, int(dataset.shard_starts[shard])
        if wanted.class_index is not None and self._labels is not None and len(rows):
            labels = _numbers(dataset, shard, self._labels, rows - first)
            rows = rows[labels == wanted.class_index]
        if wanted.values is not None and len(rows):
            name, low, high = wanted.values
            numbers = _numbers(dataset, shard, name, rows - first)
            with np.errstate(invalid="ignore", over="ignore"):
                rows = rows[(numbers >= low) & (numbers <= high)]
        return rows

    def _parts(self, dataset: shardio.ShardDataset, shard: int, rows: Rows) -> list[Rows]:
        """Split rows into parts whose texts have at most _TEXT_BYTES together, or are one text."""
        if self._filter.words is None or not len(rows):
            return [rows]
        name, local = self._filter.words[0], rows - int(dataset.shard_starts[shard])
        numbers = np.cumsum(dataset.reader(shard, name).lengths(name, local)) // _TEXT_BYTES
        return np.split(rows, np.flatnonzero(np.diff(numbers)) + 1)

    def _add(self, found: Rows, keys: Values | None) -> None:
        with self._lock:
            room = MAX_MATCHES - self._n_found
            if len(found) > room:
                self._is_cut = True
                found = found[:room]
            end = self._n_found + len(found)
            if end > len(self._rows):
                self._rows = np.resize(self._rows, max(end, min(2 * end, MAX_MATCHES)))
            self._rows[self._n_found : end] = found
            self._n_found = end
            if keys is not None and len(found):
                self._keys.append(keys[: len(found)])

    def _sort(self) -> None:
        if self._is_cut:
            raise shardio.InvalidArgument(_too_many_to_sort(None))
        keys = np.concatenate(self._keys) if self._keys else np.zeros(0)
        self._keys.clear()
        order = sorting_order(keys, is_descending=self._filter.is_descending)
        with self._lock:
            self._rows = self._rows[: self._n_found][order]
            self._is_sorted = True


def sorting_order(keys: Values, *, is_descending: bool) -> Rows:
    """Return the indices that sort keys; NaN comes last, and equal keys stay in their order."""
    is_number = ~np.isnan(keys) if keys.dtype.kind == "f" else np.ones(len(keys), np.bool_)
    places = np.flatnonzero(is_number)
    chosen = keys[places]
    if is_descending:
        order = (len(chosen) - 1 - np.argsort(chosen[::-1], kind="stable"))[::-1]
    else:
        order = np.argsort(chosen, kind="stable")
    return np.concatenate([places[order], np.flatnonzero(~is_number)])


def _with_words(
    dataset: shardio.ShardDataset, name: str, words: tuple[str, ...], rows: Rows
) -> Rows:
    """Return the rows whose texts contain all words."""
    texts = (str(text or "").casefold() for text in dataset.column(name, rows))
    return rows[np.fromiter((all(word in text for word in words) for text in texts), np.bool_)]


def _too_many_to_sort(n: int | None) -> str:
    found = f"{n:,}" if n is not None else "more"
    return (
        f"at most {MAX_MATCHES:,} samples are sorted in memory, and {found} match: filter by "
        "class, subset, range or text"
    )


def _numbers(dataset: shardio.ShardDataset, shard: int, name: str, local: Rows) -> Values:
    """Return the numbers of rows of a shard; as floats with NaN if some values are missing."""
    reader = dataset.reader(shard, name)
    found = reader.column(name, local)
    if dataset.schema[name].optional:
        found = np.where(reader.present(name, local), found.astype(np.float64), math.nan)
    return found
