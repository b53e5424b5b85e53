"""Thumbnails of samples, and frames of videos: made on demand, and kept in a bounded cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

import shardio
from shardio.media import (
    ClipDecoder,
    Pixels,
    StoredImage,
    fit,
    has_image_signature,
    keyframes_of,
    preview_pixels,
    probe,
    to_jpeg,
    to_png,
)
from shardio_tools.inspect.frames import within
from shardio_tools.view.series import heatmap, series
from shardio_tools.view.source import version_of
from shardio_tools.view.stored import (
    StoredArray,
    check_pixels,
    field_of,
    has_heatmap,
    has_series,
    kind_of,
    present_value,
)

MIN_SIDE: Final = 64
MAX_SIDE: Final = 512
MAX_FRAME_SIDE: Final = 4096
"""The minimum size of pictures, and the maximum sizes of thumbnails and frames, in pixels."""
CACHE_BYTES: Final = 64 << 20
_ENTRY_BYTES: Final = 500
"""The estimated size of an entry of the cache in addition to its bytes."""
_FRAMES_AT_ONCE: Final = 8
"""The number of frames that are decoded together, as players ask for one after the other."""
_MAX_FRAME_BYTES: Final = 32 << 20
"""The maximum size of the pixels of these frames, if there is more than one."""
_CURVES: Final = 4
_INK: Final = ((66, 133, 214), (214, 120, 44), (52, 156, 96), (160, 96, 190))
"""The colours of curves, which are legible on light and on dark."""


class Picture(NamedTuple):
    """The bytes of a picture, and their media type."""

    data: bytes
    media_type: str


class PictureCache:
    """The pictures that were used last, of at most `max_bytes` in total. Thread-safe."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._lock = threading.Lock()
        self._pictures: OrderedDict[Hashable, Picture] = OrderedDict()

    def get(self, key: Hashable) -> Picture | None:
        """Return a picture, or None if the cache does not contain it."""
        with self._lock:
            found = self._pictures.get(key)
            if found is not None:
                self._pictures.move_to_end(key)
            return found

    def add(self, key: Hashable, picture: Picture) -> None:
        """Add a picture, and drop those that were not used for the longest time."""
        with self._lock:
            self._drop(key)
            self._pictures[key] = picture
            self.n_bytes += len(picture.data) + _ENTRY_BYTES
            while self.n_bytes > self.max_bytes:
                self._drop(next(iter(self._pictures)))

    def _drop(self, key: Hashable) -> None:
        dropped = self._pictures.pop(key, None)
        if dropped is not None:
            self.n_bytes -= len(dropped.data) + _ENTRY_BYTES


class Thumbnails:
    """Thumbnails and frames of the samples of one dataset.

    Several threads may use it at the same time, each with its own copy of the dataset.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._cache = PictureCache(max_bytes)

    @property
    def n_bytes(self) -> int:
        """The size of the cached pictures in bytes."""
        return self._cache.n_bytes

    def get(self, dataset: Any, row: int, field: str, size: int) -> Picture:
        """Return a thumbnail of a field of a sample, at most `size` pixels high and wide.

        Of a video, one keyframe is decoded. Arrays without a picture, and sound, are drawn.

        Raises:
            InvalidArgument: there is no such sample or field, the size is invalid, or the value is
                missing or has no picture.
            ShardCorrupt, MediaError, …: the value is damaged.
        """
        _check_size(size, MAX_SIDE)
        key = (version_of(dataset), row, field, size)
        return self._cached(key, lambda: _thumbnail(dataset, row, field, size))

    def frame(self, dataset: Any, row: int, field: str, frame: int, size: int) -> Picture:
        """Return a decoded frame of a video or an array of frames, scaled down to fit `size`.

        Frame 0 of an image is the image. If the frame before is cached, as in a player, the frames
        that follow are decoded, too.

        Raises:
            InvalidArgument: there is no such sample, field or frame, the size is invalid, or the
                value is missing or has no frames.
            ShardCorrupt, MediaError, …: the value is damaged.
        """
        _check_size(size, MAX_FRAME_SIDE)
        key = (version_of(dataset), row, field, size)
        found = self._cache.get((*key, frame))
        if found is not None:
            return found
        medium = field_of(dataset, field).medium
        if medium == "video":
            stream = present_value(dataset, row, field)
            n = _FRAMES_AT_ONCE if self._cache.get((*key, frame - 1)) is not None else 1
            pictures = _video_frames(stream, frame, n, size, f"sample {row:,}: {field!r}")
        else:
            pictures = [_single_frame(dataset, row, field, frame, size)]
        made = [Picture(to_jpeg(each), "image/jpeg") for each in pictures]
        for i, picture in reversed(list(enumerate(made))):
            self._cache.add((*key, frame + i), picture)
        return made[0]

    def _cached(self, key: Hashable, make: Callable[[], Picture]) -> Picture:
        found = self._cache.get(key)
        if found is None:
            found = make()
            self._cache.add(key, found)
        return found


def _check_size(size: int, most: int) -> None:
    if not MIN_SIDE <= size <= most:
        raise shardio.InvalidArgument(
            f"the size of a picture is {MIN_SIDE} to {most} pixels; found {size}"
        )


def _thumbnail(dataset: Any, row: int, name: str, size: int) -> Picture:
    field = field_of(dataset, name)
    if field.array is not None:
        return _array_thumbnail(dataset, row, name, size)
    if field.medium == "audio":
        return _curves(series(dataset, row, name, size // 2), size, (-1.0, 1.0))
    pixels = preview_pixels(_as_image(present_value(dataset, row, name)), size)
    if pixels is None:
        raise shardio.InvalidArgument(f"sample {row:,}: the field {name!r} has no picture")
    return Picture(to_jpeg(fit(np.asarray(pixels), size)), "image/jpeg")


def _as_image(value: Any) -> Any:
    """Return bytes of an image file as an image; any other value unchanged.

    Raises InvalidArgument for an image of so many pixels that decoding it takes too much memory.
    """
    if not isinstance(value, StoredImage):
        if not isinstance(value, bytes) or not has_image_signature(value[:64]):
            return value
    facts = probe(value)
    check_pixels(facts)
    return StoredImage(value, facts.height, facts.width, facts.channels)


def _array_thumbnail(dataset: Any, row: int, name: str, size: int) -> Picture:
    array = StoredArray.of(dataset, row, name)
    shape = array.shape
    kind = kind_of(name, array.array)
    if kind == "video" and shape[0]:
        middle = shape[0] // 2
        pixels = preview_pixels(array.part(middle, middle + 1)[0], size)
    else:
        pixels = None if array.is_large or not shape else preview_pixels(array.part(0, shape[0]))
    if pixels is not None:
        return Picture(to_jpeg(fit(np.asarray(pixels), size)), "image/jpeg")
    if has_heatmap(shape) and not has_series(shape):
        return Picture(heatmap(dataset, row, name).data, "image/png")
    if has_series(shape) and kind != "tokens":
        return _curves(series(dataset, row, name, size // 2), size)
    raise shardio.InvalidArgument(f"sample {row:,}: the field {name!r} has no picture")


def _video_frames(stream: Any, frame: int, n: int, size: int, where: str) -> list[Pixels]:
    """Decode a frame and those after it, `n` in all, up to the next keyframe."""
    if not 0 <= frame < stream.n_frames:
        raise shardio.InvalidArgument(
            f"{where}: there is no frame {frame:,}; the video has {stream.n_frames:,}"
        )
    keys = keyframes_of(stream)
    later = keys[keys > frame]
    height, width = within((stream.height, stream.width), size)
    n = max(1, min(n, _MAX_FRAME_BYTES // (3 * height * width)))
    end = min(frame + n, int(later[0]) if len(later) else stream.n_frames)
    out = np.empty((end - frame, height, width, 3), np.uint8)
    with ClipDecoder() as decoder:
        try:
            decoder.decode(stream, np.arange(frame, end), out)
        except shardio.DataError:  # perhaps a frame after the one that was asked for is damaged
            out = out[:1]
            decoder.decode(stream, [frame], out)
    return list(out)


def _single_frame(dataset: Any, row: int, name: str, frame: int, size: int) -> Pixels:
    field, pixels = field_of(dataset, name), None
    n = 1
    if field.array is None and field.medium != "audio":
        value = _as_image(present_value(dataset, row, name))
        pixels = preview_pixels(value, size) if frame == 0 else None
    elif field.array is not None:
        array, kind = StoredArray.of(dataset, row, name), kind_of(name, field)
        n = array.shape[0] if kind == "video" else 1
        if kind in ("video", "image") and 0 <= frame < n:
            part = slice(frame, frame + 1) if kind == "video" else slice(0, array.shape[0])
            found = array.part(part.start, part.stop)
            pixels = preview_pixels(found[0] if kind == "video" else found, size)
    if pixels is None:
        raise shardio.InvalidArgument(
            f"sample {row:,}: the field {name!r} has no frame {frame:,}; it has {n:,}"
        )
    found = np.asarray(pixels)
    return fit(found, size) if max(found.shape[:2]) > size else found


def _curves(found: dict[str, Any], size: int, limits: tuple[float, float] | None = None) -> Picture:
    """Draw the first columns of a series, without a background.

    `limits` are the numbers at the bottom and at the top, by default the least and the greatest.
    """
    height, width = size // 2, size
    canvas = np.zeros((height, width, 4), np.uint8)
    columns = found["columns"][:_CURVES]
    values = np.array([[each["min"], each["max"]] for each in columns], np.float64)
    known = values[np.isfinite(values)]
    low, high = limits or ((known.min(), known.max()) if known.size else (0.0, 1.0))
    at = (high - values.clip(low, high)) / ((high - low) or 1.0) * (height - 5) + 2
    for (tops, bottoms), colour in reversed(list(zip(at[:, ::-1], _INK, strict=False))):
        _draw(canvas, tops, bottoms, colour)
    return Picture(to_png(canvas), "image/png")


def _draw(
    canvas: Pixels,
    tops: npt.NDArray[np.float64],
    bottoms: npt.NDArray[np.float64],
    colour: tuple[int, int, int],
) -> None:
    """Draw a curve from the top and the bottom of each of its points; NaN leaves a gap."""
    width, n = canvas.shape[1], len(tops)
    before: float | None = None
    for i, (top, bottom) in enumerate(zip(tops.tolist(), bottoms.tolist(), strict=True)):
        if not (np.isfinite(top) and np.isfinite(bottom)):
            before = None
            continue
        first, last = (top, bottom) if before is None else (min(top, before), max(bottom, before))
        left, right = i * width // n, max(i * width // n + 1, (i + 1) * width // n)
        canvas[int(first) : int(last) + 2, left : left + 1] = (*colour, 255)
        canvas[int(top) : int(bottom) + 2, left:right] = (*colour, 255)
        before = (top + bottom) / 2
