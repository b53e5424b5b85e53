"""The time steps of recordings as samples: `StepView`, and the sources of its fields."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio.batch.layout import FixedSlot
from shardio.dataset.dataset import Dataset, ShardSamples, scan
from shardio.errors import InvalidArgument, MediaError, ShardChanged, ShardCorrupt
from shardio.format.schema import Schema
from shardio.format.types import Array, Field
from shardio.samples.clip_view import common_size
from shardio.samples.clips import Clip, ClipDraws, Clips
from shardio.samples.decoding import ClipSource
from shardio.samples.field_sources import BatchRows, Bytes, FieldSource, IndexChunk, Keys, Present
from shardio.samples.media import AudioField, distinct_sizes, media_fields
from shardio.samples.video_index import FrameTimes, VideoIndex
from shardio.samples.view import DividedView, Table, Tables, sums_at
from shardio.shard.verification import Rows

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[Any]
"""Offsets from a step: int64 for steps, or float64 for seconds."""

_MAX_OFFSETS: Final = 1 << 16
_MAX_OFFSET: Final = 1 << 31
_CACHE_BYTES: Final = 32 << 20
"""The maximum size of the cached arrays of a view, in each worker."""
_MAX_CACHED_BYTES: Final = _CACHE_BYTES // 32
"""The maximum size of an array that is cached."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The options of `dataset.windows`, checked; `clip` holds the rate of steps and the size."""

    offsets: Mapping[str, Offsets]
    times: str | None
    clip: Clip

    @property
    def identity(self) -> str:
        """A text that identifies the set of steps; the values at the steps do not matter."""
        return "steps"


def resolve_steps(schema: Schema, given: Any, times: Any, fps: Any, size: Any) -> Steps:
    """Return the options of `dataset.windows`, checked against the fields of the dataset."""
    if not isinstance(given, Mapping) or not given:
        raise InvalidArgument(
            'windows takes a dict from fields to offsets, such as {"action": range(50)}; found '
            f"{given!r:.200}"
        )
    field = schema.get(times) if isinstance(times, str) else None
    if times is None and fps is None and _holds_times(schema.get("timestamp")):
        times = "timestamp"
    elif times is not None and (fps is not None or not _holds_times(field)):
        raise InvalidArgument(
            "times must be a field of floats in one dimension, the time of each step, without "
            f"fps=; found {times!r}: {field!r}, fps={fps!r}"
        )
    offsets = {name: _checked_offsets(schema, name, each) for name, each in given.items()}
    in_seconds = [name for name, each in offsets.items() if each.dtype.kind == "f"]
    if in_seconds and times is None and fps is None:
        raise InvalidArgument(
            f"the offsets of {in_seconds[0]!r} are seconds, and no field 'timestamp' has the times "
            "of the steps: pass times=, the name of such a field, or fps=; or pass whole numbers"
        )
    if not in_seconds and not media_fields(schema, offsets, "video"):
        times = None
    return Steps(offsets, times, Clip(fps=fps, size=size))


def _holds_times(field: Field | None) -> bool:
    array = None if field is None or field.optional else field.array
    return array is not None and len(array.shape) == 1 and array.numpy.kind == "f"


def _checked_offsets(schema: Schema, name: Any, given: Any) -> Offsets:
    field = schema.get(name) if isinstance(name, str) else None
    array = None if field is None else field.array
    is_series = array is not None and array.shape and None not in array.shape[1:]
    if field is None or not (is_series or field.medium == "video"):
        raise InvalidArgument(
            f"windows: {name!r} must be a video, or an array whose first axis is the steps and "
            f"whose other axes are fixed; found {field!r}; fields: {', '.join(schema)}"
        )
    if (mask := f"{name}_mask") in (*schema, *schema.groups):
        raise InvalidArgument(f"windows of {name!r} add the field {mask!r}, which exists")
    found = np.zeros(0)
    if isinstance(given, Sequence | np.ndarray) and 0 < len(given) <= _MAX_OFFSETS:
        with contextlib.suppress(ValueError):  # lists of different lengths
            found = np.asarray(given)
    fits = found.ndim == 1 and len(found) and found.dtype.kind in "iuf"
    if not fits or not (np.abs(found.astype(np.float64)) <= _MAX_OFFSET).all():
        raise InvalidArgument(
            f"windows: the offsets of {name!r} must be a list of whole numbers (steps) or of "
            f"floats (seconds), such as [-1, 0], from -2^31 to 2^31; found {given!r:.200}"
        )
    return found.astype(np.float64 if found.dtype.kind == "f" else np.int64)


class StepTable:
    """The number of steps of each row, and the times of all steps in seconds.

    The times of a row are NaN if those in the field `steps.times` are damaged or do not ascend.
    """

    def __init__(self, n_steps: Rows, times: Floats | None, steps: Steps) -> None:
        self.n_steps, self.times, self.fps = n_steps, times, steps.clip.rate
        self._times_field = steps.times
        self.ends: Rows = np.cumsum(n_steps)

    def find(self, number: int, offsets: Offsets) -> tuple[Rows, Floats | None, Mask]:
        """Return the steps at some offsets from a step, their times, and which of them exist.

        Steps before the first or after the last of the row are replaced by the first or the last.
        The times are those of the offsets, not of the nearest steps; None if they are unknown.
        Raises MediaError if the times of the row are NaN.
        """
        row = int(np.searchsorted(self.ends, number, "right"))
        end, n = int(self.ends[row]), int(self.n_steps[row])
        step, last = number - (end - n), n - 1
        times = None if self.times is None else self.times[end - n : end]
        if times is not None and np.isnan(times[0]):
            raise MediaError(
                f"the times of its steps in {self._times_field!r} are damaged or not ascending: "
                "each time must be later than the one before (float32 has 7 digits); leave the "
                "sample out with dataset.select, or pass fps="
            )
        if offsets.dtype.kind == "i":
            wanted = step + offsets
            steps = np.clip(wanted, 0, last)
            return steps, None if times is None else times[steps], wanted == steps
        if times is None:
            times = np.arange(n) / float(self.fps or 1)
        wanted = times[step] + offsets
        # Times in 32 bits are rounded, so allow half a step before the first and after the last
        # step.
        before, after = np.diff(times[[0, min(1, last), max(0, last - 1), last]])[::2] / 2
        mask = (wanted > times[0] - (before or 1e-6)) & (wanted < times[-1] + (after or 1e-6))
        wanted = np.clip(wanted, times[0], times[-1])
        return nearest(times, wanted), None if self.times is None else wanted, mask


def nearest(times: Floats, wanted: Floats) -> Rows:
    """Return the index of the nearest of the ascending `times`; if two are equally near, the first.

    There is one index for each element of `wanted`.
    """
    after = np.searchsorted(times, wanted).clip(min(1, len(times) - 1), len(times) - 1)
    before = np.maximum(after - 1, 0)
    found: Rows = np.where(wanted - times[before] <= times[after] - wanted, before, after)
    return found


class ArrayCache:
    """An LRU cache of arrays by field, shard and row, of up to `_CACHE_BYTES`.

    In a shuffled epoch, steps of the same array are read again and again, and decompressing the
    array takes longer than all else: 130 µs for 1,000 steps of 14 floats.
    """

    def __init__(self) -> None:
        self._arrays: OrderedDict[tuple[Any, ...], npt.NDArray[Any]] = OrderedDict()
        self._n_bytes = 0

    def get(self, key: tuple[Any, ...], read: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the array with a key; if it is not cached, `read` it, and cache it if small."""
        found = self._arrays.get(key)
        if found is not None:
            self._arrays.move_to_end(key)
            return found
        found = read()
        if found.nbytes <= _MAX_CACHED_BYTES:
            found = self._arrays[key] = found.copy()  # a view would keep its file mapped
            self._n_bytes += found.nbytes
            while self._n_bytes > _CACHE_BYTES:
                self._n_bytes -= self._arrays.popitem(last=False)[1].nbytes
        return found

    def clear(self) -> None:
        """Release all arrays."""
        self._arrays.clear()
        self._n_bytes = 0


class StepSource(FieldSource):
    """A source of the values of an array at offsets from a step, and of their mask."""

    def __init__(
        self, dataset: Dataset, name: str, offsets: Offsets, table: StepTable, cache: ArrayCache
    ) -> None:
        super().__init__(dataset, name, (name, f"{name}_mask"))
        self._offsets, self._table, self._cache = offsets, table, cache
        self._latest: tuple[tuple[int, int], npt.NDArray[Any]] | None = None
        """The last array read, with its shard and row; the next step is often in the same array."""

    def read_sample(self, chunk: IndexChunk, k: int) -> dict[str, Any]:
        """Return the values and the mask for one step."""
        return {name: self._read(chunk, k, name) for name in self.names}

    def fill_fixed(
        self, batch: BatchRows, slot: FixedSlot, out: Bytes, present: Present | None
    ) -> None:
        """Write the values, or the mask, for each step of a batch."""
        rows = out.view(slot.dtype).reshape(-1, *slot.shape)
        for i in range(batch.n_read):
            rows[i] = self._read(batch.chunk, batch.part.start + i, slot.name)

    def _read(self, chunk: IndexChunk, k: int, name: str) -> npt.NDArray[Any]:
        key = chunk.shard_rows[k]
        try:
            steps, _, mask = self._table.find(int(chunk.numbers[k]), self._offsets)
        except MediaError as error:
            raise self._media_error(error, *key) from error
        if name != self.name:
            return mask
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._cache.get((self.name, *key), partial(self._load, *key))
        found: npt.NDArray[Any] = self._latest[1][steps]
        return found

    def _load(self, shard: int, row: int) -> npt.NDArray[Any]:
        sample = self._dataset.files.sample(shard, row, (self.name,), check_truncated=False)
        found: npt.NDArray[Any] = sample[self.name]
        return found

    def close(self) -> None:
        """Release the arrays."""
        self._latest = None
        self._cache.clear()


class FrameSource(ClipSource):
    """A source of the frames of a video at offsets from a step, and of their mask."""

    def __init__(self, dataset: Dataset, clip: Clip, offsets: Offsets, table: StepTable) -> None:
        super().__init__(dataset, Clips(clip, np.zeros(0, np.int64)))
        self._offsets, self._table = offsets, table
        self.names = (self.name, f"{self.name}_mask")

    def _added_fields(self, shard: int, row: int, start_code: int) -> dict[str, Any]:
        try:
            return {self.names[1]: self._table.find(start_code, self._offsets)[2]}
        except MediaError as error:
            raise self._media_error(error, shard, row) from error

    def _frames(self, start_code: int, times: FrameTimes) -> Rows:
        steps, seconds, _ = self._table.find(start_code, self._offsets)
        if seconds is None:
            return steps
        shown = times.pts.astype(np.float64) * float(times.time_base)
        interval = times.length * float(times.time_base) / len(shown)
        for far in seconds[np.abs(np.clip(seconds, shown[0], shown[-1]) - seconds) > interval]:
            raise MediaError(
                f"no frame is near the time {far:g} s of a step: the video has frames from "
                f"{shown[0]:g} to {shown[-1]:g} s; pass times=, a field that counts the seconds "
                "as the video does, or fps="
            )
        return nearest(shown, seconds)


class StepView(DividedView):
    """A view whose samples are the time steps of the rows. It borrows the dataset.

    On first use, the lengths of arrays and videos are read from the index and, if times are needed,
    the times of all steps, which take 8 bytes per step in memory.

    Raises:
        InvalidArgument: (on first use) the fields of a row have different numbers of steps; or the
            sizes of videos differ, and `size` is not given.
        ShardCorrupt: (on first use) an index is damaged.
        MediaError: (from reading a step) the times of its row are damaged or do not ascend.
    """

    def __init__(self, dataset: Dataset, steps: Steps) -> None:
        super().__init__(dataset)
        self.steps = steps
        self.videos = media_fields(dataset.schema, steps.offsets, "video")

    @property
    def options(self) -> tuple[Any, ...]:
        """The options of the view."""
        return (self.steps,)

    def restore(self, tables: Tables) -> None:
        """Take the `tables` of an equal view."""
        sizes = tables["sizes"].reshape(-1, 2).tolist()
        self.__dict__["_found"] = (
            StepTable(tables["n_steps"], tables.get("times"), self.steps),
            dict(zip(self.videos, map(tuple, sizes), strict=True)),
        )

    @cached_property
    def _found(self) -> tuple[StepTable, dict[str, tuple[int, int]]]:
        return _find_steps(self.dataset, self.steps)

    @property
    def is_read(self) -> bool:
        """True if the lengths of the fields were read."""
        return "_found" in self.__dict__

    def tables(self) -> Mapping[str, Table]:
        """Return the tables from which another process creates the view again."""
        table, sizes = self._found
        flat = [n for size in sizes.values() for n in size]
        found = {
            "n_steps": Table(table.n_steps, "how many steps each row has"),
            "sizes": Table(np.array(flat, np.int64), "the size of frames"),
        }
        return (
            found
            if table.times is None
            else found | {"times": Table(table.times, "the times of steps")}
        )

    @property
    def sample_ends(self) -> Rows:
        """The cumulative numbers of steps of the rows."""
        return self._found[0].ends

    @property
    def summary(self) -> str:
        """A text with the number of steps and the fields that have offsets."""
        count = f"{len(self)} " if self.is_read else ""
        return f"{count}steps with {', '.join(self.steps.offsets)}"

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields with offsets, and those with one value for the whole row."""
        schema, offsets = self.dataset.schema, self.steps.offsets
        return tuple(name for name in schema if name in offsets or _is_single(schema[name]))

    def stored_fields(self, names: tuple[str, ...], *, is_explicit: bool) -> tuple[str, ...]:
        """Return the stored fields that the view reads for a loader with `fields=names`."""
        if not is_explicit:
            return self.fields
        if lost := [name for name in self.steps.offsets if name not in names]:
            raise InvalidArgument(f"fields leaves out {lost}, which windows() asks for")
        schema = self.dataset.schema
        others = [
            n for n in names if n not in self.fields and schema[n].medium in ("video", "audio")
        ]
        if others:
            raise InvalidArgument(
                f"a sample is a step of a row: leave {others} out of fields, or pass offsets for "
                "the videos to windows()"
            )
        return names

    def sample_schema(self, schema: Schema) -> Schema:
        """Return the schema of the view's samples, given the schema of the stored fields."""
        fields: dict[str, Field] = {}
        for name, field in schema.items():
            fields[name] = field
            if (offsets := self.steps.offsets.get(name)) is not None:
                if (array := field.array) is not None:
                    fields[name] = Array(array.dtype, (len(offsets), *array.shape[1:]))
                else:
                    fields[name] = self._clip(name).array
                fields[f"{name}_mask"] = Array("bool", (len(offsets),))
        return Schema(fields)

    def _clip(self, name: str) -> Clip:
        return Clip(len(self.steps.offsets[name]), size=self._found[1][name], field=name)

    def sources(self, audio: Mapping[str, AudioField]) -> dict[str, FieldSource]:
        """Return the sources of the fields with offsets, by name."""
        dataset, table, videos = self.dataset, self._found[0], self.videos
        cache = ArrayCache()
        return {
            name: FrameSource(dataset, self._clip(name), offsets, table)
            if name in videos
            else StepSource(dataset, name, offsets, table, cache)
            for name, offsets in self.steps.offsets.items()
        }

    def draws(self, numbers: Rows, keys: Keys) -> ClipDraws:
        """Return the number of each step as the start code of its frames; nothing is drawn."""
        return ClipDraws(numbers)


def _is_single(field: Field) -> bool:
    """Return True if a field has one value for a whole row, not a value for each step."""
    is_fixed = field.array is None or None not in field.array.shape
    return is_fixed and field.medium not in ("video", "audio")


def _find_steps(dataset: Dataset, steps: Steps) -> tuple[StepTable, dict[str, tuple[int, int]]]:
    """Read the number of steps of each row, their times, and the size of each video's frames."""
    schema, names = dataset.schema, list(steps.offsets)
    times = steps.times
    arrays = [
        name for name in dict.fromkeys([*filter(None, [times]), *names]) if schema[name].array
    ]
    videos = media_fields(schema, names, "video")
    n_steps = np.zeros(len(dataset), np.int64)
    sizes: dict[str, set[tuple[int, int]]] = {name: set() for name in videos}
    times_of_rows: dict[int, Floats] = {}

    def look(part: ShardSamples) -> tuple[dict[str, Rows], dict[str, VideoIndex], list[Floats]]:
        lengths = {name: _lengths(part, name, schema[name]) for name in arrays}
        found = {n: VideoIndex(part.reader(n), n, part.rows, Clip()) for n in videos}
        return lengths, found, [] if times is None else _times(part, times, lengths[times])

    for part, (lengths, found, values) in scan(dataset, look):
        for name, video in found.items():
            lengths[name] = video.n_frames
            if times is not None:  # frames are found by time, so their number is not compared
                lengths[name] = np.where(video.n_frames > 0, lengths[times], 0)
            streams = video.streams[video.n_frames > 0]
            shape = np.stack([streams["height"], streams["width"]], axis=1)
            sizes[name] |= distinct_sizes(shape) if len(sizes[name]) < 2 else set()
        _check_lengths(dataset, part, lengths)
        n_steps[part.numbers] = next(iter(lengths.values()))
        times_of_rows.update(zip(part.numbers.tolist(), values, strict=times is not None))
    known = {
        n: steps.clip.size or common_size(dataset, steps.clip, n, sizes[n], "windows")
        for n in videos
    }
    source_ends = sums_at(np.cumsum(n_steps), np.cumsum(dataset.rows.source_counts))
    dataset.rows.check_sources(np.diff(source_ends, prepend=0), "none of its rows has a step")
    all_times = None
    if times is not None:
        by_row = (times_of_rows[i] for i in range(len(dataset)))
        all_times = np.concatenate([np.zeros(0), *by_row])
    return StepTable(n_steps, all_times, steps), known


def _lengths(part: ShardSamples, name: str, field: Field) -> Rows:
    array = field.array
    if array is not None and array.shape[0] is not None:
        return array.shape[0] * part.reader(name).present(name, part.rows).astype(np.int64)
    found: Rows = part.reader(name).records.shapes(name, part.rows)[:, 0].astype(np.int64)
    return found


def _times(part: ShardSamples, name: str, n_steps: Rows) -> list[Floats]:
    """Return the times of the steps of each row; NaN if they are damaged or do not ascend."""
    reader = part.reader(name)
    is_column = name in reader.schema.columns

    def read(rows: Rows) -> list[Floats]:
        values = reader.column(name, rows) if is_column else reader.records.values(name, rows)
        return [np.asarray(each, np.float64) for each in values]

    def read_one(row: int, n: int) -> Floats:
        try:
            return read(np.array([row]))[0]
        except ShardChanged:
            raise
        except ShardCorrupt:
            return np.full(n, np.nan)

    try:
        found = read(part.rows)
    except ShardCorrupt:
        found = [*map(read_one, part.rows.tolist(), n_steps.tolist())]
    return [
        each
        if np.isfinite(each).all() and (np.diff(each) > 0).all()
        else np.full(len(each), np.nan)
        for each in found
    ]


def _check_lengths(dataset: Dataset, part: ShardSamples, lengths: Mapping[str, Rows]) -> None:
    (first, expected), *others = lengths.items()
    for name, found in others:
        for i in np.flatnonzero(found != expected)[:1].tolist():
            raise InvalidArgument(
                f"{dataset.path}, sample {int(part.numbers[i])}: {first!r} has {expected[i]} "
                f"steps, {name!r} has {found[i]}: leave the sample out with dataset.select"
            )
