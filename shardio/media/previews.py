"""Encode pixels as small JPEG and PNG files for display, with PyAV alone."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument
from shardio.media.pixels import Pixels

if TYPE_CHECKING:
    from av import VideoFrame

_QUANTIZER: Final = 4
"""The quantizer of JPEGs, from 1 (best) to 31: about quality 90 of libjpeg."""


def fit(pixels: Pixels, side: int) -> Pixels:
    """Scale RGB pixels so that they are at most `side` high and wide.

    Larger pixels are averaged; smaller ones are enlarged by a whole factor, so that they are sharp.
    """
    import av

    height, width = pixels.shape[:2]
    factor = max(1, side // max(height, width))
    if factor > 1:
        return pixels.repeat(factor, axis=0).repeat(factor, axis=1)
    if max(height, width) <= side:
        return pixels
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    found: Any = frame.reformat(*size, "rgb24", interpolation="AREA").to_ndarray()
    return np.asarray(found, np.uint8)


def to_jpeg(pixels: Pixels) -> bytes:
    """Encode RGB pixels as a JPEG."""
    from av import VideoFrame

    _check(pixels)
    frame = VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    return _encode(
        frame.reformat(format="yuvj420p", dst_colorspace="ITU601", dst_color_range="JPEG"), "mjpeg"
    )


def to_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode uint8 pixels as a PNG: grey, (height, width), or RGB or RGBA, (height, width, n)."""
    from av import VideoFrame

    _check(pixels, (1, 3, 4))
    form = {1: "gray", 3: "rgb24", 4: "rgba"}[1 if pixels.ndim == 2 else pixels.shape[2]]
    return _encode(VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=form), "png")


def _check(pixels: npt.NDArray[np.uint8], channels: tuple[int, ...] = (3,)) -> None:
    n_channels = {2: 1, 3: pixels.shape[-1]}.get(pixels.ndim) if pixels.size else None
    if pixels.dtype != np.uint8 or n_channels not in channels:
        raise InvalidArgument(
            f"expected uint8 pixels of {' or '.join(map(str, channels))} channels, found "
            f"{pixels.dtype} of {pixels.shape}"
        )


def _encode(frame: VideoFrame, codec: str) -> bytes:
    from av import CodecContext

    encoder: Any = CodecContext.create(codec, "w")
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, frame.format.name
    encoder.framerate, encoder.time_base = Fraction(25), Fraction(1, 25)
    encoder.thread_count = 1
    if codec == "mjpeg":
        encoder.qmin = encoder.qmax = _QUANTIZER
    return b"".join(map(bytes, [*encoder.encode(frame), *encoder.encode(None)]))
