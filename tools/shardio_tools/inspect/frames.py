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

    `size` is the size of the first frame. `take` yields frames by number, scaled to a size. `rate`
    is the number of frames per second.
    """

    n: int
    is_still: bool
    size: Size
    take: Callable[[Sequence[int], Size], Iterator[Frame]]
    rate: float = RATE


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


def frames_of(value: Any, kind: Any, rate: float = RATE) -> FrameSequence:
    """Return the frames of a value from a reader, whose data is read when frames are taken.

    `kind` is the type of a field that holds pictures or may hold picture files. `rate` is the
    number of frames per second, except for videos, which have a rate of their own.
    """
    if kind.medium == "video":
        size, take = (value.height, value.width), partial(_from_video, value)
        elapsed_s = float(value.duration * value.time_base)
        rate = value.n_frames / elapsed_s if value.n_frames and elapsed_s > 0 else RATE
        return FrameSequence(value.n_frames, False, size, take, rate)
    if kind.item:
        return FrameSequence(
            len(value), False, _size_of_list(value), partial(_from_items, value), rate
        )
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
    return FrameSequence(n_frames, is_still, (height, width), partial(_from_items, items), rate)


def _size_of_list(value: Sequence[Any]) -> Size:
    """Return the size of the first undamaged picture; raise the first error if all are damaged."""
    first_error: shardio.DataError | None = None
    for item in value:
        try:
            return _item_size(item)
        except shardio.DataError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    return 0, 0


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


def clip_rate(pts: npt.NDArray[Any] | None, time_base: npt.NDArray[Any] | None) -> float:
    """Return the mean number of frames per second, from the two fields that a conversion stores."""
    if pts is None or time_base is None or np.ndim(pts) != 1 or np.shape(time_base) != (2,):
        return RATE
    if len(pts) < 2 or pts[-1] <= pts[0] or min(time_base) < 1:
        return RATE
    return (len(pts) - 1) * int(time_base[1]) / (int(time_base[0]) * int(pts[-1] - pts[0]))


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
