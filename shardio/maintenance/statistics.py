"""Compute statistics of the numeric fields of a dataset, and count the samples of its classes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import listed, one_line
from shardio._base.html import fragment, listing, table
from shardio._workers.ray_cluster import Engine, EngineName
from shardio.dataset.manifest import load_generation, publish_next
from shardio.dataset.transaction import detect_conflict
from shardio.format.types import Array
from shardio.maintenance.jobs import Progress, run_for_shards
from shardio.maintenance.resharding import LABEL, has_labels
from shardio.samples.shard_dataset import ShardDataset
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows

_CHUNK_ITEMS: Final = 1 << 20
"""The number of values that are processed at a time. Converted to float64, they take 8 MiB."""


@dataclass(frozen=True, slots=True)
class StatsReport:
    """The statistics of a dataset or subset, and the number of the generation that stores them.

    `stats["samples"]` is the number of samples. `stats["fields"]` has, for each numeric field:

    * `count`, `mean`, `std`, `min`, `max` of all finite values,
    * `not_finite`: the number of values that are infinite or NaN,
    * `missing`: the number of samples without a value,
    * `smallest`, `largest`: the smallest and the largest size of each dimension.

    If the dataset has class names and labels, `stats["classes"]` has the number of samples of each
    class, and `stats["without_class"]` the number of all others.
    """

    dataset: Path
    generation: int
    subset: str | None
    stats: Mapping[str, Any]

    def __repr__(self) -> str:
        subset = "" if self.subset is None else f"subset {self.subset!r}"
        fields = f"fields {listed(self.stats['fields'], 80)}"
        generation, n_samples = f"generation {self.generation}", self.stats["samples"]
        return one_line(self, [self.dataset], subset, generation, fields, samples=n_samples)

    def _repr_html_(self) -> str:
        subset = "" if self.subset is None else f"subset {self.subset!r}"
        facts = subset, f"generation {self.generation}", f"{self.stats['samples']:,} samples"
        classes = self.stats.get("classes", {})
        counts = (f"{name} {n:,}" for name, n in classes.items())
        fields, names = self.stats["fields"], ("count", "mean", "std", "min", "max", "missing")
        rows = ((field, *map(found.get, names)) for field, found in fields.items())
        parts = (
            listing("classes", counts, len(classes)),
            table(("field", *names), rows, len(fields)),
        )
        return fragment("StatsReport", self.dataset, facts, *parts)

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

    If the current generation has the same statistics, nothing is published. All data that is read
    is verified.

    Args:
        folder: the folder of the dataset.
        subset: the name of a subset; by default, the statistics are about all samples.
        progress: called in the calling process, at the start and after every shard.
        engine, address: "local", or "ray" with the address of the cluster. The result is the same.

    Raises:
        InvalidArgument: there is no such subset.
        DatasetNotFound, ShardCorrupt, …: data cannot be read. Nothing is published.
        DatasetConflict: another writer has published in the meantime. Nothing is changed.
    """
    where = Engine(engine, address)
    with detect_conflict(folder), ShardDataset(folder, subset=subset) as dataset:
        previous = load_generation(folder, dataset.generation)
        previous.check_inputs()
        found = _compute(dataset, where, progress)
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


def _compute(dataset: ShardDataset, engine: Engine, progress: Progress | None) -> dict[str, Any]:
    """Combine the statistics of the shards in their order, so that rounding is repeatable."""
    arrays = {
        name: array
        for name, field in dataset.schema.items()
        if (array := field.array or field.item)
    }
    ends = [0, *dataset.rows.shard_ends.tolist()]
    whole = _DatasetStatistics(dataset, arrays)
    job = partial(_compute_shard, arrays, ends)
    for found in run_for_shards(
        job, dataset, "counting", progress, engine=engine, preload=__name__
    ):
        whole.merge(found)
    return {"samples": len(dataset), **whole.as_json()}


def _compute_shard(
    arrays: Mapping[str, Array], ends: Sequence[int], dataset: ShardDataset, k: int
) -> _DatasetStatistics:
    """Return statistics of the dataset's samples in shard k: `ends[k]` to `ends[k + 1] - 1`."""
    found = _DatasetStatistics(dataset, arrays)
    rows = dataset.rows.at(np.arange(ends[k], ends[k + 1])) - int(dataset.shard_starts[k])
    for name, array in arrays.items() if len(rows) else ():
        for values in _values(dataset.reader(k, name), name, array, rows):
            found.add(name, values)
    return found


class _DatasetStatistics:
    """Statistics of samples. The last number in `_class_counts` counts samples without a class."""

    def __init__(self, dataset: ShardDataset, arrays: Mapping[str, Array]) -> None:
        self._fields = {name: _FieldStatistics(array) for name, array in arrays.items()}
        self._classes = dataset.classes
        self._has_labels = bool(self._classes) and has_labels(dataset.schema)
        self._class_counts = np.zeros(len(self._classes) + 1, np.int64)

    def add(self, name: str, values: npt.NDArray[Any] | None) -> None:
        self._fields[name].add(values)
        if name == LABEL and self._has_labels:
            n_classes = len(self._classes)
            labels = np.array([-1]) if values is None else values.reshape(-1).astype(np.int64)
            labels[(labels < 0) | (labels >= n_classes)] = n_classes
            self._class_counts += np.bincount(labels, minlength=n_classes + 1)

    def merge(self, other: _DatasetStatistics) -> None:
        for name, statistics in self._fields.items():
            statistics.merge(other._fields[name])
        self._class_counts += other._class_counts

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "fields": {name: statistics.as_json() for name, statistics in self._fields.items()}
        }
        if self._has_labels:
            *counts, found["without_class"] = self._class_counts.tolist()
            found["classes"] = dict(zip(self._classes, counts, strict=True))
        return found


def _values(
    reader: ShardReader, name: str, array: Array, rows: Rows
) -> Iterator[npt.NDArray[Any] | None]:
    """Yield the values of a field at `rows`: arrays of values, and None for a missing value."""
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


class _FieldStatistics:
    """The running mean, standard deviation and range of the values of a field.

    The means and sums of squares of two sets of values are combined as described in T. F. Chan,
    G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """

    def __init__(self, field: Array) -> None:
        self._dtype = field.dtype
        self._n = self._n_not_finite = self._n_missing = 0
        self._mean = self._squared_deviations = 0.0
        self._min: Any = None
        self._max: Any = None
        self._smallest: list[int] | None = None
        self._largest: list[int] = []

    def add(self, values: npt.NDArray[Any] | None) -> None:
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

    def _add_numbers(self, numbers: npt.NDArray[Any]) -> None:
        if numbers.dtype.kind == "f":
            finite = np.isfinite(numbers)
            if not finite.all():
                self._n_not_finite += int((~finite).sum())
                numbers = numbers[finite]
        if not len(numbers):
            return
        wide = numbers.astype(np.float64)
        with np.errstate(all="ignore"):  # sums of values near the largest float64 may overflow
            n, mean = len(wide), float(wide.mean())
            wide -= mean
            self._combine(n, mean, float(wide @ wide), numbers.min().item(), numbers.max().item())

    def _combine(self, n: int, mean: float, squares: float, low: Any, high: Any) -> None:
        """Add n finite values, given their mean, sum of squared deviations, minimum and maximum."""
        total, step = self._n + n, mean - self._mean
        self._squared_deviations += squares + step * step * self._n * n / total
        self._mean += step * n / total
        self._min = min(self._min, low) if self._n else low
        self._max = max(self._max, high) if self._n else high
        self._n = total

    def merge(self, other: _FieldStatistics) -> None:
        self._n_not_finite += other._n_not_finite
        self._n_missing += other._n_missing
        for shape in (other._smallest, other._largest) if other._smallest is not None else ():
            self._update_shapes(tuple(shape or ()))
        if other._n:
            self._combine(other._n, other._mean, other._squared_deviations, other._min, other._max)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict. A statistic that is unknown or infinite is None."""
        deviation = math.sqrt(self._squared_deviations / self._n) if self._n else None
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
