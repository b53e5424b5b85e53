"""Samples of a dataset or shard by number, and their pictures or the frames of clips and videos.

A damaged frame is represented by its error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import shardio
from shardio.media import ClipDecoder, decode_image, probe, resize

Pixels = npt.NDArray[np.uint8]
Frame = Pixels | shardio.DataError
"""RGB pixels, height x width x 3, or the error of a damaged frame."""
Size = tuple[int, int]
"""Height and width, in pixels."""

RATE: Final = 25.0
"""Frames per second for clips without times."""
_SMALLEST: Final = 8
"""Minimum side in pixels of an array that counts as a picture."""
_CHANNELS: Final = (1, 3)


@dataclass(frozen=True, slots=True)
class FrameSequence:
    """The frames of a value: `n` frames, or one picture if `is_still`.

    `size` is the size of the first frame. `take` yields frames by number, scaled to a size.
    `times_s` has the frames' times in seconds from any origin; None if they are unknown.
    """

    n: int
    is_still: bool
    size: Size
    take: Callable[[Sequence[int], Size], Iterator[Frame]]
    times_s: npt.NDArray[np.float64] | None = None

    def durations_s(self, numbers: Sequence[int]) -> list[float]:
        """Return the duration of each frame; the last duration repeats the one before."""
        if self.times_s is None:
            times = np.asarray(numbers, np.float64) / RATE
        else:
            times = self.times_s[np.asarray(numbers, np.int64)]
        gaps = np.diff(times)
        last = gaps[-1] if len(gaps) else 1 / RATE
        found: list[float] = np.maximum([*gaps, last], 0).tolist()
        return found


def holds_pictures(kind: Any) -> bool:
    """Return True if a field's type holds pictures, clips or videos."""
    if kind.medium in ("image", "video"):
        return True
    if kind.item:
        return kind.item.dtype == "uint8" and (
            kind.item.shape == (None,) or _layout(kind.item.shape) in ("HW", "HWC", "CHW")
        )
    if kind.array:
        return kind.dtype == "uint8" and _layout(kind.shape) is not None
    return False


def can_hold_files(kind: Any) -> bool:
    """Return True if the values of a field can be the bytes of picture files."""
    if kind.array:
        return kind.dtype == "uint8" and len(kind.shape) == 1
    return bool(kind.is_opaque)


def _layout(shape: Sequence[int | None]) -> str | None:
    """Guess which dimensions are time, height, width and channels; None if not an image."""
    layout = None
    if len(shape) == 2:
        layout = "HW"
    elif len(shape) == 3:
        layout = "HWC" if shape[2] in _CHANNELS else "CHW" if shape[0] in _CHANNELS else "THW"
    elif len(shape) == 4:
        layout = "THWC" if shape[3] in _CHANNELS else "TCHW" if shape[1] in _CHANNELS else None
    if layout is None:
        return None
    sides = [side for side, what in zip(shape, layout, strict=True) if what in "HW"]
    return layout if all(side is None or side >= _SMALLEST for side in sides) else None


def frames_of(
    value: Any, kind: Any, times_s: npt.NDArray[np.float64] | None = None
) -> FrameSequence:
    """Return the frames of a value.

    Args:
        value: a value from a reader; its data is read when frames are taken.
        kind: the type of its field, which holds pictures or may hold picture files.
        times_s: the time of each frame, if another field has them.
    """
    if kind.medium == "video":
        return FrameSequence(
            value.n_frames,
            is_still=False,
            size=(value.height, value.width),
            take=partial(_from_video, value),
            times_s=_times_s(value),
        )
    if kind.item:
        return _frames_of_list(value, times_s)
    if kind.medium == "image" or can_hold_files(kind):
        return FrameSequence(1, True, _encoded_size(value), partial(_from_items, [value]))
    pixels = np.asarray(value)
    layout = _layout(kind.shape) or ""
    if "C" in layout:
        pixels = np.moveaxis(pixels, layout.index("C"), -1)
    else:
        pixels = pixels[..., np.newaxis]
    is_still = "T" not in layout
    items = pixels[np.newaxis] if is_still else pixels
    n_frames = len(items) if items.size else 0
    height, width = items.shape[1:3]
    return FrameSequence(n_frames, is_still, (height, width), partial(_from_items, items), times_s)


def _frames_of_list(value: Sequence[Any], times_s: npt.NDArray[np.float64] | None) -> FrameSequence:
    """Return the frames of a list: arrays of pixels, or the bytes of picture files."""
    size, failure = None, None
    for item in value:
        try:
            size = _item_size(item)
        except shardio.DataError as error:
            failure = failure or error
        else:
            break
    if size is None and failure is not None:
        raise failure
    return FrameSequence(len(value), False, size or (0, 0), partial(_from_items, value), times_s)


def _item_size(item: npt.NDArray[Any]) -> Size:
    if item.ndim == 1:
        return _encoded_size(item)
    height, width = _as_rgb(item).shape[:2]
    return height, width


def _encoded_size(data: Any) -> Size:
    facts = probe(_as_bytes(data))
    return facts.height, facts.width


def _as_bytes(data: Any) -> bytes:
    return bytes(data) if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()


def _times_s(stream: shardio.EncodedStream) -> npt.NDArray[np.float64] | None:
    """Return the times of a video's frames; evenly spaced ones if some packets show no frame."""
    n, tick_s = stream.n_frames, float(stream.time_base)
    if len(stream.packets) == n:
        return _from_zero(np.sort(stream.packets["pts"]), tick_s)
    if not stream.duration or not 0 < n < len(stream.packets):
        return None
    return _from_zero(np.arange(n), stream.duration * tick_s / n)


def clip_times_s(
    pts: npt.NDArray[Any] | None, time_base: npt.NDArray[Any] | None
) -> npt.NDArray[np.float64] | None:
    """Return the times of a clip's frames, from the two fields that a conversion stores."""
    if pts is None or time_base is None or np.ndim(pts) != 1 or np.shape(time_base) != (2,):
        return None
    if min(time_base) < 1:
        return None
    return _from_zero(pts, int(time_base[0]) / int(time_base[1]))


def _from_zero(ticks: npt.NDArray[Any], tick_s: float) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = (ticks - ticks[:1]).astype(np.float64) * tick_s
    return found


def _from_video(
    stream: shardio.EncodedStream, numbers: Sequence[int], size: Size
) -> Iterator[Frame]:
    """Decode frames of a video; if that fails, decode each alone, and yield errors for damage."""
    out = np.empty((len(numbers), *size, 3), np.uint8)
    with ClipDecoder() as decoder:
        try:
            decoder.decode(stream, numbers, out)
        except shardio.DataError:
            return iter([_decoded(decoder, stream, n, out[i]) for i, n in enumerate(numbers)])
    return iter(out)


def _decoded(
    decoder: ClipDecoder, stream: shardio.EncodedStream, number: int, out: Pixels
) -> Frame:
    try:
        decoder.decode(stream, [number], out[np.newaxis])
    except shardio.DataError as error:
        return error
    return out


def _from_items(
    items: Sequence[Any] | npt.NDArray[Any], numbers: Iterable[int], size: Size
) -> Iterator[Frame]:
    """Yield independent frames: pixels, or decoded picture files."""
    for number in numbers:
        item = items[number]
        try:
            if isinstance(item, bytes) or item.ndim == 1:
                pixels = decode_image(_as_bytes(item), min_size=size)
            else:
                pixels = _as_rgb(item)
        except shardio.DataError as error:
            yield error
        else:
            yield fitted(pixels, size)


def _as_rgb(pixels: npt.NDArray[Any]) -> Pixels:
    """Convert height x width pixels, with channels first, last or absent, to RGB."""
    if not pixels.size:
        raise shardio.MediaError(f"an array of {pixels.shape} has no pixel")
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    elif pixels.shape[2] not in _CHANNELS:
        pixels = np.moveaxis(pixels, 0, -1)
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3))


def fitted(pixels: Pixels, size: Size) -> Pixels:
    """Scale RGB pixels to fit `size`, padded with black."""
    if pixels.shape[:2] == size:
        return pixels
    height, width = pixels.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    inner = (max(1, round(height * scale)), max(1, round(width * scale)))
    scaled = resize(np.ascontiguousarray(pixels), inner)
    if inner == size:
        return scaled
    found = np.zeros((*size, 3), np.uint8)
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    found[top : top + inner[0], left : left + inner[1]] = scaled
    return found


def within(size: Size, side: int) -> Size:
    """Return a size scaled down so that its longest side has at most `side` pixels."""
    longest = max(size)
    if longest <= side:
        return size
    return max(1, round(size[0] * side / longest)), max(1, round(size[1] * side / longest))


Samples = shardio.ShardDataset | shardio.ShardReader
"""An open dataset or shard, whose samples are found by number."""


def open_samples(path: str) -> Samples:
    """Open the dataset or shard at `path`."""
    return shardio.open(path) if os.path.isdir(path) else shardio.ShardReader(path)


def place_of(samples: Samples, number: int, name: str) -> tuple[str, int]:
    """Return the path of the file that stores a field of a sample, and the row in that file."""
    if isinstance(samples, shardio.ShardReader):
        return samples.path, number
    shard, row = _located(samples, number)
    ((summary, _),) = samples.files.files_of_shard(shard, name)
    return os.path.join(samples.path, summary.name), row


def value_of(samples: Samples, number: int, name: str) -> Any:
    """Return a field of a sample; None if missing. A stream's data is read on access."""
    if isinstance(samples, shardio.ShardReader):
        return samples.sample(number, [name])[name]
    shard, row = _located(samples, number)
    return samples.sample(shard, row, [name])[name]


def _located(dataset: shardio.ShardDataset, number: int) -> tuple[int, int]:
    """Return the shard that has a sample, and the row in it."""
    shard = int(dataset.locate(np.array([number]))[0])
    return shard, number - int(dataset.starts[shard])
