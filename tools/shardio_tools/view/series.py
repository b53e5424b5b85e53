"""Arrays and sound as curves and heat maps: reduced to what is shown, and read only as far."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

import shardio
from shardio.media import AudioDecoder, to_png
from shardio_tools.view.stored import (
    READ_ERRORS,
    StoredArray,
    decode_sound,
    field_of,
    has_heatmap,
    has_series,
    n_columns,
    present_value,
    sound_format,
    stored_value,
)

MAX_POINTS: Final = 4_000
MAX_SIDE: Final = 512
"""The maximum height and width of a heat map, in pixels."""
_MAX_READ: Final = 32 << 20
"""The maximum number of bytes of an array that are read for a curve or a heat map."""
_MAX_SECONDS: Final = 600
"""The maximum length of the sound that is decoded for a waveform, in seconds."""
_SECONDS_AT_ONCE: Final = 20
_TIME_FIELDS: Final = ("timestamp", "timestamps", "times", "time", "t")
_MAX_UNEVEN: Final = 0.25
_WIDE: Final = 1_000
"""The maximum difference between the times of values and evenly spaced times: in steps, and as the
reciprocal of a part of the curve, for curves of many steps."""

Floats = npt.NDArray[np.float64]


class Heatmap(NamedTuple):
    """A PNG of a matrix, from dark (`low`) to light (`high`), and a note if it is not all of it."""

    data: bytes
    low: float
    high: float
    note: str | None = None


def series(dataset: Any, row: int, field: str, points: int) -> dict[str, Any]:
    """Return the least and the greatest value of each column of an array or a sound, per point.

    Each of at most `points` points stands for consecutive values. Points without a number are None.

    Raises:
        InvalidArgument: there is no such sample or field, the value is missing, it has no curve, or
            `points` is not from 1 to 4,000.
        ShardCorrupt, MediaError, …: the value is damaged.
    """
    if not 1 <= points <= MAX_POINTS:
        raise shardio.InvalidArgument(f"points must be 1 to {MAX_POINTS:,}; found {points}")
    if field_of(dataset, field).medium == "audio":
        return _waveform(present_value(dataset, row, field), row, points)
    found = StoredArray.of(dataset, row, field)
    if not has_series(found.shape):
        raise shardio.InvalidArgument(
            f"sample {row:,}: the field {field!r} of shape {found.shape} has no curve"
        )
    reduced, note = _reduce(found, points)
    names = _column_names(found.shape, field)
    return {
        "n": found.shape[0],
        "columns": [
            {"name": name, "min": _listed(low), "max": _listed(high)}
            for name, low, high in zip(names, *reduced, strict=True)
        ],
        "times": _times(dataset, row, field, found.shape[0]),
        "note": note,
    }


def _column_names(shape: tuple[int, ...], field: str) -> list[str]:
    if len(shape) == 1:
        return [field]
    return [",".join(map(str, index)) for index in np.ndindex(*shape[1:])]


def _listed(values: Floats) -> list[float | None]:
    return [each if math.isfinite(each) else None for each in values.tolist()]


def _bounds(n: int, points: int) -> npt.NDArray[np.int64]:
    """Return the first index of each point, and the number of values."""
    n_points = min(n, points)
    return np.arange(n_points + 1) * n // n_points


def _reduce(array: StoredArray, points: int) -> tuple[tuple[Floats, Floats], str | None]:
    """Return the least and the greatest values, (columns, points), and a note on unread values."""
    n, columns = array.shape[0], n_columns(array.shape)
    bounds = _bounds(n, points)
    row_bytes = columns * array.itemsize
    least, most = (np.empty((columns, len(bounds) - 1)) for _ in range(2))
    if n * row_bytes <= _MAX_READ:
        whole = _without_infinity(array.part(0, n)).reshape(n, columns)
        for out, reduce in ((least, np.fmin), (most, np.fmax)):
            out[...] = reduce.reduceat(whole, bounds[:-1], axis=0).T
        return (least, most), None
    n_each = max(1, _MAX_READ // row_bytes // (len(bounds) - 1))
    for i, start in enumerate(bounds[:-1].tolist()):
        read = array.part(start, min(start + n_each, n))
        part = _without_infinity(read).reshape(-1, columns)
        least[:, i], most[:, i] = np.fmin.reduce(part, axis=0), np.fmax.reduce(part, axis=0)
    per_point = n // (len(bounds) - 1)
    return (least, most), f"of each {per_point:,} values, the first {n_each:,} are shown"


def _without_infinity(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return numbers with NaN for infinity, and bools as 0 and 1."""
    if values.dtype.kind != "f":
        return values.view(np.uint8) if values.dtype == np.bool_ else values
    return np.where(np.isfinite(values), values, np.nan)


def _times(dataset: Any, row: int, field: str, n: int) -> list[float] | None:
    """Return the time of the first value and the time between values, in seconds, if known.

    They are those of a field of times in the same record, or of a video with as many frames.
    """
    group = field.rpartition(".")[0]
    for prefix in dict.fromkeys((f"{group}." if group else "", "")):
        for name in _TIME_FIELDS:
            if prefix + name in dataset.schema:
                found = _even_times(dataset, row, prefix + name, n)
                if found is not None:
                    return found
    for name, kind in dataset.schema.items():
        if kind.medium == "video":
            try:
                video = stored_value(dataset, row, name)
            except READ_ERRORS:
                continue
            if video is not None and video.n_frames == n and video.duration:
                return [0.0, float(video.duration * video.time_base) / n]
    return None


def _even_times(dataset: Any, row: int, name: str, n: int) -> list[float] | None:
    try:
        found = StoredArray.of(dataset, row, name)
        if found.shape != (n,) or n < 2 or n * found.itemsize > _MAX_READ:
            return None
        values = found.part(0, n).astype(np.float64)
    except READ_ERRORS:
        return None
    start, step = float(values[0]), float(values[-1] - values[0]) / (n - 1)
    if not step > 0 or not np.isfinite(values).all():
        return None
    uneven = np.abs(values - (start + step * np.arange(n))).max() / step
    return [start, step] if uneven <= max(_MAX_UNEVEN, n / _WIDE) else None


def _waveform(sound: Any, row: int, points: int) -> dict[str, Any]:
    (rate, n_channels), n_all = sound_format(sound), sound.n_frames
    n = min(n_all, _MAX_SECONDS * rate)
    if not n:
        raise shardio.InvalidArgument(f"sample {row:,}: the sound has no sample")
    bounds = _bounds(n, points)
    least = np.full((n_channels, len(bounds) - 1), np.inf)
    most = np.full((n_channels, len(bounds) - 1), -np.inf)
    with AudioDecoder() as decoder:
        for start in range(0, n, _SECONDS_AT_ONCE * rate):
            stop = min(n, start + _SECONDS_AT_ONCE * rate)
            samples = decode_sound(decoder, sound, start, stop)
            first = int(np.searchsorted(bounds, start, "right")) - 1
            last = int(np.searchsorted(bounds, stop, "left"))
            firsts = np.maximum(bounds[first:last] - start, 0)
            part = slice(first, last)
            least[:, part] = np.minimum(least[:, part], np.minimum.reduceat(samples, firsts).T)
            most[:, part] = np.maximum(most[:, part], np.maximum.reduceat(samples, firsts).T)
    names = ["left", "right"] if n_channels == 2 else [str(i) for i in range(n_channels)]
    columns = [
        {"name": name, "min": np.round(low, 4).tolist(), "max": np.round(high, 4).tolist()}
        for name, low, high in zip(names, least, most, strict=True)
    ]
    note = None if n == n_all else f"the first {_MAX_SECONDS // 60} minutes"
    return {"n": n, "columns": columns, "times": [0.0, 1 / rate], "note": note}


def heatmap(dataset: Any, row: int, field: str) -> Heatmap:
    """Return a matrix as a picture, at most 512 pixels high and wide: each pixel is a mean.

    Raises:
        InvalidArgument: there is no such sample or field, or its value is no matrix.
        ShardCorrupt, …: the value is damaged.
    """
    found = StoredArray.of(dataset, row, field)
    if not has_heatmap(found.shape):
        raise shardio.InvalidArgument(
            f"sample {row:,}: the field {field!r} of shape {found.shape} is no matrix"
        )
    height, width = found.shape
    n_rows = min(height, _MAX_READ // (width * found.itemsize))
    if not n_rows:
        raise shardio.InvalidArgument(
            f"sample {row:,}: a row of the field {field!r} has {width * found.itemsize:,} bytes; "
            f"up to {_MAX_READ:,} are read for a heat map"
        )
    note = None if n_rows == height else f"the first {n_rows:,} of {height:,} rows"
    columns = _bounds(width, MAX_SIDE)[:-1]
    edges = _bounds(n_rows, MAX_SIDE)
    means = np.empty((len(edges) - 1, len(columns)))
    for i, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        part = found.part(start, stop).astype(np.float64)
        known = np.isfinite(part)
        sums = np.add.reduceat(np.where(known, part, 0).sum(0), columns)
        counts = np.add.reduceat(known.sum(0), columns)
        means[i] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    known = np.isfinite(means)
    low, high = (float(means[known].min()), float(means[known].max())) if known.any() else (0, 0)
    levels = np.nan_to_num((means - low) / ((high - low) or 1.0))
    factor = max(1, MAX_SIDE // max(means.shape) // 2)
    pixels = _COLOURS[(levels * 255).round().astype(np.uint8)]
    return Heatmap(to_png(pixels.repeat(factor, 0).repeat(factor, 1)), low, high, note)


def _colour_map() -> npt.NDArray[np.uint8]:
    """Return 256 colours, RGB, from dark blue over green to yellow, of rising lightness."""
    known = np.array(
        [
            [24, 20, 60],
            [40, 60, 120],
            [32, 110, 130],
            [50, 155, 115],
            [140, 195, 80],
            [250, 230, 60],
        ]
    )
    at = np.linspace(0, len(known) - 1, 256)
    channels = [np.interp(at, range(len(known)), known[:, i]) for i in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)


_COLOURS: Final = _colour_map()
