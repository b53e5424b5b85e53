"""Compute statistics of numbers and of decoded pixels, and count the samples of classes."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.callers import warn
from shardio._base.classes import listed, one_line
from shardio._base.html import fragment, note
from shardio._base.progress import counted
from shardio._base.statistics import DatasetStats
from shardio._workers.processes.limits import usable_cpus
from shardio._workers.ray_cluster import Engine, EngineName
from shardio.dataset.manifest import load_generation, publish_next
from shardio.dataset.transaction import detect_conflict
from shardio.errors import InvalidArgument, MediaError
from shardio.format.types import Array
from shardio.format.types.streams import EncodedStream
from shardio.maintenance.jobs import Progress, displays_progress, run_for_shards, takes_paths
from shardio.maintenance.resharding import LABEL, has_labels
from shardio.media import ClipDecoder, decode_image
from shardio.samples.shard_dataset import ShardDataset
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows

_CHUNK_ITEMS: Final = 1 << 20
"""The number of values that are processed at a time. Converted to float64, they take 8 MiB."""
_FOLDED_ROWS: Final = 128
"""The number of rows, each with a value per channel, that are joined before they are added."""
_FRAME_BYTES: Final = 256 << 20
"""The size of the frames of a video that are decoded at a time."""
_MAX_CHANNELS: Final = 4
_MAX_COMPONENTS: Final = 64
"""The maximum sizes of a last dimension for which each channel or component has statistics."""
_READ_ONLY_ERRORS: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_PICTURE_MEDIA: Final = ("image", "video")
_PIXELS: Final = Array("uint8", (None, None, 3))

Floats = npt.NDArray[np.float64]
_Moments = tuple[Any, Any, Any]
"""A count, a mean and a sum of squared deviations; for channels, arrays with one item for each."""


@dataclass(frozen=True, slots=True)
class StatsReport:
    """The statistics of a dataset or subset, and the number of the generation that stores them.

    If the dataset is read-only, the statistics are not stored: `not_stored` is then the reason, and
    `generation` is the number of the generation that was read. Otherwise, `not_stored` is "".

    `stats["samples"]` is the number of samples. `stats["fields"]` maps the name of each numeric
    field to a dict with these keys:

    * `count`, `mean`, `std`, `min`, `max` of all finite values,
    * `not_finite`: the number of values that are infinite or NaN,
    * `missing`: the number of samples without a value,
    * `smallest`, `largest`: the smallest and the largest size of each dimension,
    * `channels`: lists with the `mean` and `std` of each channel (for pictures) or of each
      component (for vectors of floats); missing for other arrays,
    * `pictures`: the number of pictures; only for uint8 arrays of shape (…, height, width, 3).

    Decoded images and videos count as pictures. `frames_per_video` is the maximum number of frames
    that were decoded from each video; None for all. The `mean` and `std` of labels with class names
    are None.

    An open dataset keeps the statistics of its generation: reopen the dataset to see new ones.

    If the dataset has class names and labels, `stats["classes"]` maps the name of each class to its
    number of samples, and `stats["without_class"]` is the number of all other samples.
    """

    dataset: Path
    generation: int
    subset: str | None
    stats: Mapping[str, Any]
    not_stored: str = ""

    def _origin(self) -> tuple[str, str]:
        subset = "" if self.subset is None else f"subset {self.subset!r}"
        lost = f"not stored: {self.not_stored}"
        return subset, lost if self.not_stored else f"generation {self.generation}"

    @property
    def _advice(self) -> str:
        return "" if self.not_stored else "reopen the dataset for dataset.stats"

    def __repr__(self) -> str:
        fields = f"fields {listed(self.stats['fields'], 32)}"
        facts = *self._origin(), fields, self._advice
        return one_line(self, [self.dataset], *facts, samples=self.stats["samples"])

    def _repr_html_(self) -> str:
        facts = *self._origin(), counted(self.stats["samples"], "samples")
        advice = "" if self.not_stored else "Reopen the dataset to see them in dataset.stats."
        parts = DatasetStats(whole=self.stats).html_parts()
        return fragment("StatsReport", self.dataset, facts, *parts, note(advice))

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {
            "dataset": str(self.dataset),
            "generation": self.generation,
            "subset": self.subset,
            "not_stored": self.not_stored,
            **self.stats,
        }


@displays_progress
@takes_paths("compute_stats(folder)", "folder")
def compute_stats(
    folder: str | os.PathLike[str],
    *,
    subset: str | None = None,
    decode: bool = False,
    frames: int | None = 8,
    workers: int | None = None,
    progress: Progress | None = None,
    engine: EngineName = "local",
    address: str | None = None,
) -> StatsReport:
    """Compute statistics of a dataset or a subset, and publish them with the next generation.

    If the current generation has the same statistics, nothing is published. All data that is read
    is verified. A dataset that is already open keeps its old `stats`: reopen the dataset to see the
    new ones. If the dataset is read-only, a warning says that the statistics are only returned.

    Args:
        folder: the folder of the dataset.
        subset: the name of a subset; by default, the statistics are about all samples.
        decode: True to decode images and videos for statistics of their pixels. With False, the
            statistics of pixels in the current generation are kept.
        frames: the maximum number of frames to decode from each video, evenly spread over it; None
            for all.
        workers: the number of processes; 0 to compute in the calling process. By default one per
            CPU if `decode` is True, otherwise 0; on a cluster, one per CPU of the cluster.
        progress: called in the calling process, at the start and after every shard; or
            True to show a bar on standard error, as `shardio.convert` does.
        engine, address: "local", or "ray" with the address of the cluster. The result is the same.

    Raises:
        InvalidArgument: there is no such subset, or `frames` is below 1.
        MediaError: an image or video cannot be decoded. Nothing is published.
        DatasetNotFound, ShardCorrupt, …: data cannot be read. Nothing is published.
        DatasetConflict: another writer has published in the meantime. Nothing is changed.
    """
    if frames is not None and frames < 1:
        raise InvalidArgument(f"frames must be 1 or more, or None for all; found {frames!r}")
    where = Engine(engine, address)
    with detect_conflict(folder), ShardDataset(folder, subset=subset) as dataset:
        previous = load_generation(folder, dataset.generation)
        previous.check_inputs()
        kept = dict(previous.stats)
        of_subsets = kept.get("subsets")
        of_subsets = of_subsets if isinstance(of_subsets, dict) else {}
        if workers is None and decode and len(dataset.shards) > 1 and not where.is_ray:
            workers = usable_cpus()
        arrays = _counted_fields(dataset, decode=decode)
        found = _compute(dataset, arrays, frames, where, workers, progress)
        if not decode:
            older = kept.get("whole") if subset is None else of_subsets.get(subset)
            _keep_pixels(dataset, older, found)
    kept |= {"whole": found} if subset is None else {"subsets": {**of_subsets, subset: found}}
    generation, not_stored = previous, ""
    if kept != previous.stats:
        try:
            generation = publish_next(folder, previous, stats=kept, operation={"name": "stats"})
        except OSError as error:
            if error.errno not in _READ_ONLY_ERRORS:
                raise
            not_stored = f"the dataset is read-only ({error.strerror})"
            with contextlib.suppress(UserWarning):  # filters that raise it would lose the report
                warn(f"{os.fspath(folder)}: {not_stored}: its statistics are not stored")
    return StatsReport(Path(folder), generation.number, subset, found, not_stored)


def _counted_fields(dataset: ShardDataset, *, decode: bool) -> dict[str, Array]:
    """Return, for each field with statistics, the type of the values that are counted."""
    found = {}
    for name, field in dataset.schema.items():
        array = _PIXELS if decode and field.medium in _PICTURE_MEDIA else field.array or field.item
        if array is not None:
            found[name] = array
    return found


def _keep_pixels(dataset: ShardDataset, older: Any, found: dict[str, Any]) -> None:
    """Copy the statistics of images and videos from `older` (JSON, not checked yet) to `found`."""
    fields = older.get("fields") if isinstance(older, dict) else None
    known = fields if isinstance(fields, dict) else {}
    pixels = {
        n: known[n] for n, f in dataset.schema.items() if f.medium in _PICTURE_MEDIA and n in known
    }
    both = found["fields"] | pixels
    found["fields"] = {name: both[name] for name in dataset.schema if name in both}


def _compute(
    dataset: ShardDataset,
    arrays: Mapping[str, Array],
    frames: int | None,
    engine: Engine,
    workers: int | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Combine the statistics of the shards in their order, so that rounding is repeatable."""
    ends = [0, *dataset.rows.shard_ends.tolist()]
    whole = _DatasetStatistics(dataset, arrays)
    job = partial(_compute_shard, arrays, frames, ends)
    for found in run_for_shards(
        job, dataset, "counting", progress, workers=workers, engine=engine, preload=__name__
    ):
        whole.merge(found)
    fields = whole.as_json()
    for name, statistics in fields["fields"].items():
        if dataset.schema[name].medium == "video":
            statistics["frames_per_video"] = frames
    return {"samples": len(dataset), **fields}


def _compute_shard(
    arrays: Mapping[str, Array],
    frames: int | None,
    ends: Sequence[int],
    dataset: ShardDataset,
    k: int,
) -> _DatasetStatistics:
    """Return statistics of samples `ends[k]` to `ends[k + 1] - 1`, which are stored in shard k."""
    found = _DatasetStatistics(dataset, arrays)
    rows = dataset.rows.at(np.arange(ends[k], ends[k + 1])) - int(dataset.shard_starts[k])
    for name, array in arrays.items() if len(rows) else ():
        reader, medium = dataset.reader(k, name), dataset.schema[name].medium
        values = _pixels(reader, name, rows, frames) if medium else None
        for each in values or _values(reader, name, array, rows):
            found.add(name, each)
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
            # A mean of class indices has no meaning.
            found["fields"][LABEL] |= {"mean": None, "std": None}
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


def _pixels(
    reader: ShardReader, name: str, rows: Rows, frames: int | None
) -> Iterator[npt.NDArray[np.uint8] | None]:
    """Yield the pictures of a field of images or videos, as arrays (n, height, width, 3).

    Yield None for a missing value. Decode at most `frames` frames of a video: the video is divided
    into `frames` equal parts, and the middle frame of each part is decoded.
    """
    with ClipDecoder() as decoder:
        for row, value in zip(rows.tolist(), reader.records.values(name, rows), strict=True):
            try:
                if value is None:
                    yield None
                elif not isinstance(value, EncodedStream):
                    yield decode_image(value)[None]
                else:
                    n = min(value.n_frames, frames or value.n_frames)
                    numbers = (np.arange(n) * value.n_frames + value.n_frames // 2) // n
                    yield from _decoded(decoder, value, numbers)
            except (MediaError, InvalidArgument) as error:
                where = f"{reader.path}, field {name!r}, sample {row}"
                raise MediaError(f"{where}: {error}") from error


def _decoded(
    decoder: ClipDecoder, video: EncodedStream, numbers: Rows
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield frames of a video, as many at a time as fit into _FRAME_BYTES."""
    shape = video.height, video.width, 3
    step = max(1, _FRAME_BYTES // math.prod(shape))
    for first in range(0, len(numbers), step):
        part = numbers[first : first + step]
        made = np.empty((len(part), *shape), np.uint8)
        decoder.decode(video, part, made)
        yield made


class _FieldStatistics:
    """The running mean, standard deviation and range of the values of a field, per channel.

    The means and sums of squares of two sets of values are combined as described in T. F. Chan,
    G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """

    def __init__(self, field: Array) -> None:
        self._dtype, self._n_channels = field.dtype, _n_channels(field)
        self._has_pictures = field.dtype == "uint8" and self._n_channels == 3
        self._n_pictures = self._n_not_finite = self._n_missing = 0
        self._n = np.zeros(self._n_channels, np.int64)
        self._mean, self._squared_deviations = np.zeros((2, self._n_channels))
        self._min: Any = None
        self._max: Any = None
        self._smallest: list[int] | None = None
        self._largest: list[int] = []

    def add(self, values: npt.NDArray[Any] | None) -> None:
        if values is None:
            self._n_missing += 1
            return
        self._update_shapes(values.shape[1:])
        self._n_pictures += math.prod(values.shape[:-3]) if self._has_pictures else 0
        if values.dtype.kind == "b":
            values = values.view(np.uint8)
        if self._dtype == "bfloat16":  # the bits of a bfloat16 are the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        # NumPy adds rows of a few values slowly, so join as many rows as possible into one.
        width = self._n_channels * (_FOLDED_ROWS if self._n_channels > 1 else 1)
        flat = values.reshape(-1)
        folded, rest = np.split(flat, [len(flat) // width * width])
        for part, n_columns in ((folded, width), (rest, self._n_channels)):
            rows, step = part.reshape(-1, n_columns), max(1, _CHUNK_ITEMS // n_columns)
            for first in range(0, len(rows), step):
                self._add_numbers(rows[first : first + step])

    def _update_shapes(self, shape: tuple[int, ...]) -> None:
        if self._smallest is None:
            self._smallest, self._largest = list(shape), list(shape)
            return
        self._smallest = [min(pair) for pair in zip(self._smallest, shape, strict=True)]
        self._largest = [max(pair) for pair in zip(self._largest, shape, strict=True)]

    def _add_numbers(self, numbers: npt.NDArray[Any]) -> None:
        """Add an array (rows, columns) in which column k has values of channel k % n_channels."""
        wide, n = numbers.astype(np.float64), np.full(self._n_channels, len(numbers))
        n *= numbers.shape[1] // self._n_channels
        not_finite = ~np.isfinite(numbers) if numbers.dtype.kind == "f" else None
        if not_finite is not None and not_finite.any():
            n -= self._sums(not_finite)
            self._n_not_finite += int(not_finite.sum())
            numbers, wide[not_finite] = numbers[~not_finite], 0
        if not numbers.size:
            return
        with np.errstate(all="ignore"):  # sums of values near the largest float64 may overflow
            mean = self._sums(wide) / np.maximum(n, 1)
            wide -= np.tile(mean, wide.shape[1] // self._n_channels)
            if not_finite is not None:
                wide[not_finite] = 0
            squares = self._sums(np.square(wide, out=wide))
            self._combine(n, mean, squares, numbers.min().item(), numbers.max().item())

    def _sums(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the sum of each channel."""
        found: npt.NDArray[Any] = values.sum(0).reshape(-1, self._n_channels).sum(0)
        return found

    def _combine(self, n: Rows, mean: Floats, squares: Floats, low: Any, high: Any) -> None:
        """Add n finite values, given their mean, sum of squared deviations, minimum and maximum."""
        if self._n.any():
            low, high = min(self._min, low), max(self._max, high)
        self._min, self._max = low, high
        self._n, self._mean, self._squared_deviations = _merge_moments(
            (self._n, self._mean, self._squared_deviations), (n, mean, squares)
        )

    def merge(self, other: _FieldStatistics) -> None:
        self._n_pictures += other._n_pictures
        self._n_not_finite += other._n_not_finite
        self._n_missing += other._n_missing
        for shape in (other._smallest, other._largest) if other._smallest is not None else ():
            self._update_shapes(tuple(shape or ()))
        if other._n.any():
            self._combine(other._n, other._mean, other._squared_deviations, other._min, other._max)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict. A statistic that is unknown or infinite is None."""
        each = [*zip(self._n, self._mean, self._squared_deviations, strict=True)]
        n, mean, squares = functools.reduce(_merge_moments, each)
        found = {
            "count": int(n),
            "mean": _finite(mean) if n else None,
            "std": _finite(math.sqrt(squares / n)) if n else None,
            "min": self._min,
            "max": self._max,
            "not_finite": self._n_not_finite,
            "missing": self._n_missing,
            "smallest": self._smallest,
            "largest": self._largest if self._smallest is not None else None,
        }
        if self._n_channels > 1:
            found["channels"] = {
                "mean": [_finite(mean) if n else None for n, mean, _ in each],
                "std": [_finite(math.sqrt(squares / n)) if n else None for n, _, squares in each],
            }
        if self._has_pictures:
            found["pictures"] = self._n_pictures
        return found


def _n_channels(field: Array) -> int:
    """Return the number of channels or components that have their own statistics; otherwise 1."""
    n = (field.shape[-1] if field.shape else None) or 1
    if len(field.shape) >= 3:
        return n if n <= _MAX_CHANNELS else 1
    return n if "float" in field.dtype and n <= _MAX_COMPONENTS else 1


def _merge_moments(one: _Moments, other: _Moments) -> _Moments:
    """Return the count, mean and sum of squared deviations of two sets of values together."""
    (n, mean, squares), (n_more, mean_more, squares_more) = one, other
    with np.errstate(all="ignore"):  # values near the largest float64 may overflow
        total, delta = n + n_more, mean_more - mean
        share = n_more / np.maximum(total, 1)
        return total, mean + delta * share, squares + squares_more + delta * delta * n * share


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None
