"""Histograms of numbers and lengths, and counts of classes, of all samples in one pass."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import shardio
from shardio_tools.output import decode_names, format_count
from shardio_tools.view.queries import RowSet
from shardio_tools.view.rows import class_field
from shardio_tools.view.stored import READ_ERRORS

Values = npt.NDArray[Any]

_ROWS_AT_ONCE: Final = 1 << 17
_N_FINE: Final = 2048
"""The maximum number of bins while values are added."""
_N_SHOWN: Final = 40
"""The maximum number of bins of a finished histogram."""


class Histogram:
    """Counts of numbers in bins whose width is a power of two, which grows with the range.

    Bin k contains the numbers from k * width to below (k + 1) * width. Two adjacent bins of one
    width are one bin of the double width, so no value is needed again when the width grows.
    """

    def __init__(self) -> None:
        self._exponent: int | None = None
        self._first = 0
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.n, self.n_not_finite = 0, 0
        self._mean = self._squares = 0.0
        self.low, self.high = math.inf, -math.inf
        self._is_whole = True

    def add(self, values: Values) -> None:
        """Add numbers."""
        numbers = values.astype(np.float64).reshape(-1)
        is_finite = np.isfinite(numbers)
        if not is_finite.all():
            self.n_not_finite += int((~is_finite).sum())
            numbers = numbers[is_finite]
        if not len(numbers):
            return
        self._is_whole &= values.dtype.kind in "biu"
        self.low = min(self.low, float(numbers.min()))
        self.high = max(self.high, float(numbers.max()))
        self._add_moments(numbers)
        exponent = self._needed_exponent()
        if self._exponent is not None:
            self._coarsen(exponent - self._exponent)
        self._exponent = max(exponent, self._exponent or exponent)
        bins = _bins(numbers, self._exponent).astype(np.int64)
        first, last, n = int(bins.min()), int(bins.max()), len(self._counts)
        if n:
            first, last = min(first, self._first), max(last, self._first + n - 1)
        counts = np.bincount(bins - first, minlength=last - first + 1)
        if n:
            counts[self._first - first :][:n] += self._counts
        self._first, self._counts = first, counts

    def _add_moments(self, numbers: npt.NDArray[np.float64]) -> None:
        """Combine the mean and the squared deviations with those of more numbers."""
        n = len(numbers)
        with np.errstate(all="ignore"):  # numbers near the largest float64 may overflow
            mean = float(numbers.mean())
            squares = float(np.square(numbers - mean).sum())
            total, delta = self.n + n, mean - self._mean
            self._squares += squares + delta * delta * self.n * n / total
            self._mean += delta * n / total
        self.n = total

    def _needed_exponent(self) -> int:
        """Return the least exponent at which the range has at most _N_FINE bins."""
        if self._exponent is not None:
            first, last = _bins(np.array([self.low, self.high]), self._exponent)
            if last - first < _N_FINE:
                return self._exponent
        span = self.high / 2 - self.low / 2  # the whole may overflow
        largest = max(abs(self.low), abs(self.high))
        least = math.frexp(largest)[1] - 52 if largest else -1000
        found = math.frexp(span)[1] + 2 - int(math.log2(_N_FINE)) if span else least
        found = max(found, least, -1000)
        return max(found, 0) if self._is_whole else found

    def _coarsen(self, n_times: int) -> None:
        for _ in range(n_times):
            if self._first % 2:
                self._counts, self._first = np.concatenate([[0], self._counts]), self._first - 1
            if len(self._counts) % 2:
                self._counts = np.append(self._counts, 0)
            self._counts = self._counts.reshape(-1, 2).sum(1)
            self._first //= 2

    def as_json(self) -> dict[str, Any] | None:
        """Return the edges and the counts of at most _N_SHOWN bins; None without numbers."""
        if self._exponent is None:
            return None
        shown = Histogram()
        shown._exponent, shown._first, shown._counts = self._exponent, self._first, self._counts
        n_times = 0
        while len(shown._counts) > _N_SHOWN:
            shown._coarsen(1)
            n_times += 1
        width = math.ldexp(1.0, self._exponent + n_times)
        edges = [(shown._first + k) * width for k in range(len(shown._counts) + 1)]
        return {"edges": edges, "counts": shown._counts.tolist()}

    def facts(self) -> dict[str, Any]:
        """Return count, range, mean and standard deviation."""
        if not self.n:
            return {"count": 0, "min": None, "max": None, "mean": None, "std": None}
        low, high = (int(x) if self._is_whole else x for x in (self.low, self.high))
        std = math.sqrt(max(0.0, self._squares) / self.n)
        return {"count": self.n, "min": low, "max": high, "mean": self._mean, "std": std}


def _bins(numbers: npt.NDArray[np.float64], exponent: int) -> npt.NDArray[np.float64]:
    """Return the bin of each number, whose width is 2 to the power of `exponent`."""
    with np.errstate(over="ignore"):  # infinity is in no bin: the width must grow
        found: npt.NDArray[np.float64] = np.floor(np.ldexp(numbers, -exponent))
    found[(found == 0) & (numbers < 0)] = -1  # the quotient is too small for a float
    return found


class FieldCounts:
    """The histograms, sizes and counts that one pass over all shards yields."""

    def __init__(self, dataset: shardio.ShardDataset) -> None:
        schema = dataset.schema
        self._labels = class_field(dataset) if dataset.classes else None
        self._n_classes = len(dataset.classes)
        self._numbers = {
            name: Histogram()
            for name, column in schema.columns.items()
            if not column.shape and column.dtype != "bfloat16" and name != self._labels
        }
        self._lengths = {name: Histogram() for name in schema.records if _has_length(schema[name])}
        self._sizes = dict.fromkeys(schema.records, 0)
        self._classes = np.zeros(self._n_classes + 1, np.int64)
        self.unreadable: dict[int, str] = {}
        """The first error about each shard that cannot be read in full."""

    def add_shard(self, dataset: shardio.ShardDataset, shard: int) -> None:
        """Add the samples of a shard; a field that cannot be read is noted."""
        for name in (*self._numbers, *([self._labels] if self._labels else ())):
            self._attempt(shard, partial(self._add_column, dataset, shard, name))
        for name in self._sizes:
            self._attempt(shard, partial(self._add_records, dataset, shard, name))

    def _attempt(self, shard: int, add: Callable[[], None]) -> None:
        try:
            add()
        except READ_ERRORS as error:
            self.unreadable.setdefault(shard, decode_names(str(error)))

    def _add_column(self, dataset: shardio.ShardDataset, shard: int, name: str) -> None:
        for rows in _parts(len(dataset.reader(shard, name))):
            values = _present(dataset, shard, name, rows)
            if name == self._labels:
                self._classes += _class_counts(values, self._n_classes)
            else:
                self._numbers[name].add(values)

    def _add_records(self, dataset: shardio.ShardDataset, shard: int, name: str) -> None:
        reader = dataset.reader(shard, name)
        for rows in _parts(len(reader)):
            self._sizes[name] += int(reader.stored_sizes(name, rows).sum())
            if name in self._lengths:
                self._lengths[name].add(reader.lengths(name, rows)[reader.present(name, rows)])

    def as_json(self, dataset: shardio.ShardDataset) -> dict[str, Any]:
        """Return the facts by field, and the counts of the classes."""
        fields: dict[str, Any] = {}
        for name in dataset.schema:
            numbers, lengths = self._numbers.get(name), self._lengths.get(name)
            bins = lengths.as_json() if lengths else None
            fields[name] = {
                **(numbers.facts() if numbers else dict.fromkeys(_NUMBERS)),
                "not_finite": numbers.n_not_finite if numbers else 0,
                "histogram": numbers.as_json() if numbers else None,
                "lengths": {**bins, **lengths.facts()} if bins and lengths else None,
                "n_bytes": self._sizes.get(name, column_bytes(dataset, name)),
            }
        *classes, without = self._classes.tolist()
        return {"fields": fields, "classes": classes, "without_class": without}


_NUMBERS: Final = ("count", "min", "max", "mean", "std")


def column_bytes(dataset: shardio.ShardDataset, name: str) -> int | None:
    """Return the size of a column's values; None if the field is stored as records."""
    column = dataset.schema.columns.get(name)
    return None if column is None else (column.row_bytes or 0) * len(dataset)


def _has_length(field: Any) -> bool:
    """Return True if the length of values varies, and is no mere size of an encoding."""
    if field.medium == "image" or field.is_json:
        return False
    return bool(field.is_streamed or field.is_utf8 or field.is_opaque or field.stored_dims)


def _parts(n: int) -> Iterator[npt.NDArray[np.int64]]:
    return (np.arange(i, min(n, i + _ROWS_AT_ONCE)) for i in range(0, n, _ROWS_AT_ONCE))


def _present(dataset: shardio.ShardDataset, shard: int, name: str, rows: Values) -> Values:
    """Return the values of a column at rows of a shard, without those that are missing."""
    reader = dataset.reader(shard, name)
    if dataset.schema[name].optional:
        rows = rows[reader.present(name, rows)]
    return np.asarray(reader.column(name, rows))


def _class_counts(labels: Values, n: int) -> npt.NDArray[np.int64]:
    """Return the number of samples of each of `n` classes, and, last, of those without a class."""
    found = labels.astype(np.int64)
    found[(found < 0) | (found >= n)] = n
    return np.bincount(found, minlength=n + 1)


def count_classes(
    dataset: shardio.ShardDataset, subset: RowSet, report: Callable[[float, str], None]
) -> list[int]:
    """Read the labels of a subset; return the number of samples of each class.

    Shards that cannot be read are left out. `report` is called as by `count_fields`.
    """
    label, n, n_shards = class_field(dataset), len(dataset.classes), len(dataset.shards)
    counts = np.zeros(n + 1, np.int64)
    limits = subset.n_below(dataset.shard_starts).tolist() if label is not None else []
    for shard, (first, end) in enumerate(itertools.pairwise(limits)):
        for start in range(first, end, _ROWS_AT_ONCE):
            positions = np.arange(start, min(end, start + _ROWS_AT_ONCE))
            rows = np.asarray(subset.rows(positions), np.int64) - int(dataset.shard_starts[shard])
            with contextlib.suppress(*READ_ERRORS):
                counts += _class_counts(_present(dataset, shard, str(label), rows), n)
        report((shard + 1) / n_shards, f"{shard + 1:,} of {format_count(n_shards, 'shard')}")
    found: list[int] = counts[:n].tolist()
    return found


def count_fields(
    dataset: shardio.ShardDataset, report: Callable[[float, str], None]
) -> dict[str, Any]:
    """Read all columns and tables of a dataset; return histograms, counts and sizes.

    `report` is called after each shard with the progress and a text.
    """
    counts, n = FieldCounts(dataset), len(dataset.shards)
    for shard in range(n):
        counts.add_shard(dataset, shard)
        report((shard + 1) / n, f"{shard + 1:,} of {format_count(n, 'shard')}")
    lost = [*counts.unreadable.values()]
    text = f"{format_count(len(lost), 'shard')} could not be counted in full: " if lost else ""
    text += lost[0] if lost else ""
    return {**counts.as_json(dataset), "text": text}
