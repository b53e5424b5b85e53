"""The pictures in a value of a sample: one picture, or the frames of a clip or video."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

_RATE: Final = 25.0
_SMALLEST: Final = 8
"""Minimum side in pixels of an array that counts as a picture."""
_CHANNELS: Final = (1, 3)


@dataclass(frozen=True, slots=True)
class FrameSequence:
    """The frames of a value: `n` frames, or one picture if `is_still`.

    `size` is the size of the first undamaged frame. `take` yields frames by number, scaled to a
    size. `rate` is the number of frames per second.
    """

    n: int
    is_still: bool
    size: Size
    take: Callable[[Sequence[int], Size], Iterator[Frame]]
    rate: float = _RATE


def holds_pictures(kind: Any) -> bool:
    """Return True if a field's type holds pictures, clips or videos."""
    if kind.medium in ("image", "video"):
        return True
    array = kind.array or kind.item
    if not array or array.dtype != "uint8":
        return False
    is_clip = _is_clip(array.shape)
    return is_clip is not None if kind.array else is_clip is False or array.shape == (None,)


def can_hold_files(kind: Any) -> bool:
    """Return True if the values of a field can be the bytes of picture files."""
    if kind.array:
        return kind.dtype == "uint8" and len(kind.shape) == 1
    return bool(kind.is_opaque)


def _is_clip(shape: Sequence[int | None]) -> bool | None:
    """Return True for an array of frames, False for one picture, and None for other arrays.

    Channels come last or before the height, or are absent.
    """
    dims = list(shape)
    if len(dims) > 2:
        if dims[-1] in _CHANNELS:
            del dims[-1]
        elif dims[-3] in _CHANNELS:
            del dims[-3]
        elif len(dims) > 3:
            return None
    if len(dims) not in (2, 3) or any(n is not None and n < _SMALLEST for n in dims[-2:]):
        return None
    return len(dims) == 3


def frames_of(value: Any, kind: Any) -> FrameSequence:
    """Return the frames of a value from a reader. The data is read when frames are taken.

    `kind` is the type of a field that holds pictures or may hold picture files.
    """
    if kind.medium == "video":
        elapsed_s = float(value.duration * value.time_base)
        rate = value.n_frames / elapsed_s if value.n_frames and elapsed_s > 0 else _RATE
        size = value.height, value.width
        return FrameSequence(value.n_frames, False, size, partial(_from_video, value), rate)
    is_clip = bool(kind.item) or (bool(kind.array) and bool(_is_clip(kind.shape)))
    items = value if is_clip else [value]
    if kind.array and not np.size(value):
        items = []
    return FrameSequence(len(items), not is_clip, _size_of(items), partial(_from_items, items))


def _size_of(items: Sequence[Any]) -> Size:
    """Return the size of the first undamaged picture; raise the first error if all are damaged."""
    first_error: shardio.DataError | None = None
    for item in items:
        try:
            if _is_encoded(item):
                facts = probe(_as_bytes(item))
                return facts.height, facts.width
            height, width = _as_rgb(item).shape[:2]
            return height, width
        except shardio.DataError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    return 0, 0


def _is_encoded(item: Any) -> bool:
    return isinstance(item, bytes) or item.ndim == 1


def _as_bytes(data: Any) -> bytes:
    return bytes(data) if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()


def _from_video(
    stream: shardio.EncodedStream, numbers: Sequence[int], size: Size
) -> Iterator[Frame]:
    """Decode frames together or, if that fails, one by one; yield an error for a damaged frame."""
    out = np.empty((len(numbers), *size, 3), np.uint8)
    with ClipDecoder() as decoder:
        try:
            decoder.decode(stream, numbers, out)
        except shardio.DataError:
            for i, number in enumerate(numbers):
                try:
                    decoder.decode(stream, [number], out[i : i + 1])
                except shardio.DataError as error:
                    yield error
                else:
                    yield out[i]
        else:
            yield from out


def _from_items(items: Sequence[Any], numbers: Sequence[int], size: Size) -> Iterator[Frame]:
    """Yield independent frames: pixels, or decoded picture files."""
    for number in numbers:
        item = items[number]
        try:
            is_encoded = _is_encoded(item)
            pixels = decode_image(_as_bytes(item), min_size=size) if is_encoded else _as_rgb(item)
        except shardio.DataError as error:
            yield error
        else:
            yield _fitted(pixels, size)


def _as_rgb(pixels: npt.NDArray[Any]) -> Pixels:
    """Convert height x width pixels, with channels first, last or absent, to RGB."""
    if not pixels.size:
        raise shardio.MediaError(f"an array of shape {pixels.shape} has no pixels")
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    elif pixels.shape[2] not in _CHANNELS:
        pixels = np.moveaxis(pixels, 0, -1)
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3))


def _fitted(pixels: Pixels, size: Size) -> Pixels:
    """Scale RGB pixels to fit within `size`, and pad them with black."""
    if pixels.shape[:2] == size:
        return pixels
    height, width = pixels.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    inner = (max(1, round(height * scale)), max(1, round(width * scale)))
    found = np.zeros((*size, 3), np.uint8)
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    found[top : top + inner[0], left : left + inner[1]] = resize(
        np.ascontiguousarray(pixels), inner
    )
    return found


def within(size: Size, side: int) -> Size:
    """Return a size scaled down so that its longest side has at most `side` pixels."""
    longest = max(size)
    if longest <= side:
        return size
    return max(1, round(size[0] * side / longest)), max(1, round(size[1] * side / longest))
