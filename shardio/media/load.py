"""Decode picture and video files, or their bytes, directly into a row of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from shardio.errors import InvalidArgument, MediaError
from shardio.media.clip_decoder import ClipDecoder
from shardio.media.demuxing import demux
from shardio.media.image import decode_crop, decode_image, probe
from shardio.media.pixels import Pixels

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["load_clip", "load_image"]

Fit = Literal["crop", "stretch"]
_FITS: Final = ("crop", "stretch")
_MAX_FRAMES: Final = 1 << 31
"""The upper limit for `start` and `step`; no video has more frames."""


def load_image(
    source: str | os.PathLike[str] | Buffer,
    out: Pixels,
    *,
    fit: Fit = "crop",
) -> Pixels:
    """Decode a picture into `out`, whose shape sets the size, and return it.

    Args:
        source: a path, or the bytes of a file.
        out: uint8, height x width x 3, C-contiguous, as a row of a batch. Undefined after an error.
        fit: "crop" takes the largest part in the centre that has the proportions of `out`;
            "stretch" takes the whole picture and ignores its proportions.

    Raises:
        MediaError: the picture is damaged, truncated, too large or in no known format.
        InvalidArgument: an option is not valid, or `out` does not fit.
        FileNotFoundError: there is no such file.
    """
    if fit not in _FITS:
        raise InvalidArgument(f"fit: expected one of {', '.join(_FITS)}, found {fit!r}")
    _check_out(out, "height", "width", "3")
    if not isinstance(source, str | os.PathLike):
        return _decode_to_fit(source, out, fit)
    with open(source, "rb") as file:
        data = file.read()
    return _with_file_name(source, lambda: _decode_to_fit(data, out, fit))


def _decode_to_fit(data: Buffer, out: Pixels, fit: Fit) -> Pixels:
    facts, (height, width) = probe(data), out.shape[:2]
    if (facts.height, facts.width) == (height, width):
        return decode_image(data, out=out)
    tall, wide = facts.height, facts.width
    if fit == "crop":
        scale = min(tall / height, wide / width)
        tall, wide = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (facts.height - tall) // 2, (facts.width - wide) // 2
    return decode_crop(data, (top, left, tall, wide), (height, width), out=out)


def load_clip(
    source: str | os.PathLike[str] | bytes, out: Pixels, *, start: int = 0, step: int = 1
) -> Pixels:
    """Decode frames of a video into `out`, whose shape sets their number and size, and return it.

    Each frame is the largest part in the centre that has the proportions of `out`. The whole file
    is read: to take many clips out of long videos, make a dataset of them.

    Args:
        source: a path, or the bytes of a file.
        out: uint8, frames x height x width x 3, as a row of a batch. Undefined after an error.
        start: the number of the first frame in presentation order, from 0.
        step: the distance between frames.

    Raises:
        MediaError: the video is damaged, or there is no decoder for it.
        InvalidArgument: it has no such frames, or `out` has the wrong shape.
        FileNotFoundError: there is no such file.
    """
    _check_out(out, "frames", "height", "width", "3")
    _check_n_frames("start", start)
    _check_n_frames("step", step)
    frames = start + step * np.arange(len(out))
    data = source if isinstance(source, bytes) else os.fspath(source)

    def decode() -> Pixels:
        with ClipDecoder(max_decoders=1, max_streams=1) as decoder:
            decoder.decode(demux(data), frames, out)
        return out

    return decode() if isinstance(data, bytes) else _with_file_name(data, decode)


def _check_out(out: Any, *axes: str) -> None:
    """Raise InvalidArgument unless `out` has the shape of pixels along these axes."""
    shape: tuple[int, ...] | None = getattr(out, "shape", None)
    if shape is None or len(shape) != len(axes) or shape[-1] != 3 or 0 in shape[-3:]:
        found = type(out).__name__ if shape is None else shape
        raise InvalidArgument(f"out: expected pixels of {' x '.join(axes)}, found {found}")


def _check_n_frames(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or abs(int(value)) > _MAX_FRAMES:
        raise InvalidArgument(
            f"{name}: expected an integer of at most {_MAX_FRAMES} frames, found {value!r}"
        )


def _with_file_name(path: str | os.PathLike[str], decode: Callable[[], Pixels]) -> Pixels:
    """Call `decode`, and name the file in its errors."""
    name = os.fspath(path)
    try:
        return decode()
    except MediaError as error:
        if str(error).startswith(name):
            raise
        raise MediaError(f"{name}: {error}") from error
