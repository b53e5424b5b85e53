"""Compute statistics of a dataset.

The statistics of a numeric field are its mean, its standard deviation, its range, and the sizes of
its dimensions. The statistic of a class is its number of samples.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._workers.ray_cluster import Engine, EngineName
from shardio.dataset.manifest import load_generation, publish_next
from shardio.dataset.transaction import detect_conflict
from shardio.format.types import Array
from shardio.maintenance.jobs import Progress, ShardJob, run_for_shards
from shardio.maintenance.resharding import has_labels
from shardio.samples.shard_dataset import ShardDataset
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows

_CHUNK_ITEMS: Final = 1 << 20
"""The number of values that are processed at a time. Converted to float64, they take 8 MiB."""


@dataclass(frozen=True, slots=True)
class StatsReport:
    """The statistics of a dataset or subset, and the number of the generation that stores them.

    `stats["samples"]` is the number of samples. `stats["fields"]` has a dict for each numeric
    field, with the following entries:

    * `count`, `mean`, `std`, `min`, `max`: the number of finite values, and their statistics. A
      sample may have many values.
    * `not_finite`: the number of values that are infinite or NaN.
    * `missing`: the number of samples without a value.
    * `smallest`, `largest`: the smallest and the largest size of each dimension.

    If the dataset has class names and labels, `stats["classes"]` has the number of samples of each
    class, and `stats["without_class"]` the number of samples without a class.
    """

    dataset: Path
    generation: int
    subset: str | None
    stats: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {
            "dataset": str(self.dataset),
            "generation": self.generation,
            "subset": self.subset,
            **self.stats,
        }


def compute_stats(
    folder: str | os.PathLike[str],
    *,
    subset: str | None = None,
    progress: Progress | None = None,
    engine: EngineName = "local",
    address: str | None = None,
) -> StatsReport:
    """Compute statistics of a dataset or a subset, and publish them with the next generation.

    If the current generation already has the same statistics, nothing is published. All data that
    is read is verified.

    Args:
        folder: the folder of the dataset.
        subset: the name of a subset; by default, the statistics are about all samples.
        progress: called in the calling process, at the start and after every shard.
        engine, address: as in `add_column`. The result does not depend on the engine.

    Raises:
        InvalidArgument: there is no such subset.
        ChecksumMismatch, ShardCorrupt: data is damaged. Nothing is published.
        DatasetNotFound, DatasetConflict: as in `split`.
    """
    where = Engine(engine, address)
    with detect_conflict(folder), ShardDataset(folder, subset=subset) as dataset:
        previous = load_generation(folder, dataset.generation)
        previous.check_inputs()
        found = _count(dataset, where, progress)
    kept = dict(previous.stats)
    if subset is None:
        kept["whole"] = found
    else:
        of_subsets = kept.get("subsets", {})
        kept["subsets"] = {**(of_subsets if isinstance(of_subsets, dict) else {}), subset: found}
    generation = previous
    if kept != previous.stats:
        generation = publish_next(folder, previous, stats=kept, operation={"name": "stats"})
    return StatsReport(Path(folder), generation.number, subset, found)


def _count(dataset: ShardDataset, engine: Engine, progress: Progress | None) -> dict[str, Any]:
    """Return the statistics of all samples.

    The statistics of each shard are computed separately and then combined in the order of the
    shards. The result is thus exactly the same each time, in spite of rounding.
    """
    schema = dataset.schema.items()
    arrays = {name: array for name, field in schema if (array := field.array or field.item)}
    whole = _Counts({name: _Tally(array) for name, array in arrays.items()}, _ClassTally(dataset))
    for found in run_for_shards(
        _Counting(dataset, arrays), dataset, "counting", progress, engine=engine
    ):
        whole.join(found)
    fields = {name: tally.as_json() for name, tally in whole.tallies.items()}
    return {"samples": len(dataset), "fields": fields, **whole.by_class.as_json()}


class _Counting(ShardJob):
    """A job that computes the statistics of the samples of one shard.

    If the dataset was opened with a subset, only samples of the subset are counted.
    """

    def __init__(self, dataset: ShardDataset, arrays: Mapping[str, Array]) -> None:
        super().__init__(dataset)
        self._arrays = arrays
        self._rows: Rows | None = None

    def __call__(self, k: int) -> _Counts:
        """Return the statistics of shard k."""
        dataset = self.dataset
        found = _Counts({n: _Tally(a) for n, a in self._arrays.items()}, _ClassTally(dataset))
        local = self._rows_in(k)
        if not len(local):
            return found
        for name, tally in found.tallies.items():
            for values in _values(dataset.reader(k, name), name, self._arrays[name], local):
                tally.add(values)
                found.by_class.add(name, values)
        return found

    def _rows_in(self, k: int) -> Rows:
        """Return the rows of shard k that are selected from the dataset."""
        dataset, n_samples = self.dataset, self.dataset.shards[k].n_samples
        if dataset.rows.is_plain:
            return np.arange(n_samples)
        if self._rows is None:
            self._rows = dataset.rows.at(np.arange(len(dataset)))
        start = int(dataset.starts[k])
        first, last = np.searchsorted(self._rows, [start, start + n_samples])
        return self._rows[first:last] - start


@dataclass(frozen=True, slots=True)
class _Counts:
    """The statistics of some samples: one _Tally for each numeric field, and the class counts."""

    tallies: dict[str, _Tally]
    by_class: _ClassTally

    def join(self, other: _Counts) -> None:
        """Add the statistics of other samples."""
        for name, tally in self.tallies.items():
            tally.join(other.tallies[name])
        self.by_class.join(other.by_class)


def _values(
    reader: ShardReader, name: str, array: Array, rows: Rows
) -> Iterator[npt.NDArray[Any] | None]:
    """Yield the values of a field at `rows`.

    Each item is an array whose first dimension counts values, or None for a missing value. If the
    field is a column, an array has the values of many rows.
    """
    if name not in reader.schema.columns:
        for row in rows.tolist():
            value = reader.sample(row, [name])[name]
            values = value if isinstance(value, list) else [value]
            yield from (None if one is None else np.asarray(one)[None] for one in values)
        return
    present = reader.present(name, rows)
    yield from [None] * int((~present).sum())
    rows = rows[present]
    step = max(1, _CHUNK_ITEMS // max(1, (array.row_bytes or 0) // array.numpy.itemsize))
    for first in range(0, len(rows), step):
        yield reader.column(name, rows[first : first + step])


class _Tally:
    """The mean, standard deviation and range of the values of a field that were added so far.

    The means and sums of squares of two sets of values are combined as described in T. F. Chan,
    G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """

    def __init__(self, field: Array) -> None:
        self._dtype = field.dtype
        self._n = self._n_not_finite = self._n_missing = 0
        self._mean = self._squares = 0.0
        self._min: Any = None
        self._max: Any = None
        self._smallest: list[int] | None = None
        self._largest: list[int] = []

    def add(self, values: npt.NDArray[Any] | None) -> None:
        """Add values. The first dimension of the array counts values; None is a missing value."""
        if values is None:
            self._n_missing += 1
            return
        self._update_shapes(values.shape[1:])
        if values.dtype.kind == "b":
            values = values.view(np.uint8)
        if self._dtype == "bfloat16":  # the bits of a bfloat16 are the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        flat = values.reshape(-1)
        for first in range(0, len(flat), _CHUNK_ITEMS):
            self._add_numbers(flat[first : first + _CHUNK_ITEMS])

    def _update_shapes(self, shape: tuple[int, ...]) -> None:
        if self._smallest is None:
            self._smallest, self._largest = list(shape), list(shape)
            return
        self._smallest = [min(pair) for pair in zip(self._smallest, shape, strict=True)]
        self._largest = [max(pair) for pair in zip(self._largest, shape, strict=True)]

    def _update_range(self, low: Any, high: Any) -> None:
        self._min = low if self._min is None else min(self._min, low)
        self._max = high if self._max is None else max(self._max, high)

    def _add_numbers(self, numbers: npt.NDArray[Any]) -> None:
        if numbers.dtype.kind == "f":
            finite = np.isfinite(numbers)
            if not finite.all():
                self._n_not_finite += int((~finite).sum())
                numbers = numbers[finite]
        if not len(numbers):
            return
        self._update_range(numbers.min().item(), numbers.max().item())
        wide = numbers.astype(np.float64)
        with np.errstate(all="ignore"):  # sums of values near the largest float64 may overflow
            n, mean = len(wide), float(wide.mean())
            wide -= mean
            squares = float(wide @ wide)
            self._combine_moments(n, mean, squares)

    def _combine_moments(self, n: int, mean: float, squares: float) -> None:
        total, step = self._n + n, mean - self._mean
        self._squares += squares + step * step * self._n * n / total
        self._mean += step * n / total
        self._n = total

    def join(self, other: _Tally) -> None:
        """Add the values that were added to another tally."""
        self._n_not_finite += other._n_not_finite
        self._n_missing += other._n_missing
        for shape in (other._smallest, other._largest) if other._smallest is not None else ():
            self._update_shapes(tuple(shape or ()))
        if not other._n:
            return
        self._update_range(other._min, other._max)
        self._combine_moments(other._n, other._mean, other._squares)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict. A statistic that is unknown or infinite is None."""
        deviation = math.sqrt(self._squares / self._n) if self._n else None
        return {
            "count": self._n,
            "mean": _finite(self._mean) if self._n else None,
            "std": _finite(deviation),
            "min": self._min,
            "max": self._max,
            "not_finite": self._n_not_finite,
            "missing": self._n_missing,
            "smallest": self._smallest,
            "largest": self._largest if self._smallest is not None else None,
        }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


class _ClassTally:
    """The number of samples of each class, which is given by the field `label`."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._names = dataset.classes
        self._is_known = bool(self._names) and has_labels(dataset.schema)
        self._counts = np.zeros(len(self._names), np.int64)
        self._n_without = 0

    def add(self, name: str, values: npt.NDArray[Any] | None) -> None:
        """Add values of the field `name`. Fields other than `label` are ignored."""
        if name != "label" or not self._is_known:
            return
        if values is None:
            self._n_without += 1
            return
        labels = values.reshape(-1)
        inside = labels[(labels >= 0) & (labels < len(self._names))].astype(np.int64)
        self._counts += np.bincount(inside, minlength=len(self._names))
        self._n_without += len(labels) - len(inside)

    def join(self, other: _ClassTally) -> None:
        """Add the counts of other samples."""
        self._counts += other._counts
        self._n_without += other._n_without

    def as_json(self) -> dict[str, Any]:
        """Return the counts as a dict, which is empty if the dataset has no classes or labels."""
        if not self._is_known:
            return {}
        counts = dict(zip(self._names, self._counts.tolist(), strict=True))
        return {"classes": counts, "without_class": self._n_without}
