"""Frames on the shortest way to where they go: upright ones, as bare planes or by swscale's planes.

The frames of a stream look alike. What `PictureWriter` asks about a frame before it converts it is
asked here of the first that looks so; for all others, five attributes are compared, and the rest is
the copy itself. What comes out is bit for bit what the long way gives: a test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.reformatter import VideoReformatter

__all__ = ["ChannelsMade", "Look", "PlanesCopied", "look_of"]

Picture = np.ndarray[Any, np.dtype[np.uint8]]
Look = tuple[int, int, str, int, int]
"""All that decides how a frame is converted, but for its rotation."""

_UINT8 = np.dtype(np.uint8)


def look_of(frame: VideoFrame) -> Look:
    """Width, height, format, matrix and range of a frame."""
    return frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range


class PlanesCopied:
    """Copies a part of frames that are 4:2:0 already, as they were decoded.

    Args:
        size: height and width of the part; even.
        top, left: where it begins; even.
    """

    def __init__(self, size: tuple[int, int], top: int, left: int) -> None:
        self._luma, self._luma_at = size, (top, left)
        self._chroma, self._chroma_at = (size[0] // 2, size[1] // 2), (top // 2, left // 2)

    def write(self, frame: VideoFrame, out: Picture) -> None:
        """Copy Y, and below it U and V side by side."""
        planes: Any = frame.planes  # a buffer each, which PyAV's types do not say
        luma, blue, red = planes
        (top, left), line = self._luma_at, luma.line_size
        tall, wide = self._luma
        start = top * line + left
        out[:tall] = np.ndarray(self._luma, _UINT8, luma, start, (line, 1))
        (top, left), wide = self._chroma_at, wide // 2
        line = blue.line_size
        start = top * line + left
        out[tall:, :wide] = np.ndarray(self._chroma, _UINT8, blue, start, (line, 1))
        line = red.line_size
        start = top * line + left
        out[tall:, wide:] = np.ndarray(self._chroma, _UINT8, red, start, (line, 1))


class ChannelsMade:
    """Has swscale make planes of green, blue and red, and lays a part of them side by side.

    Args:
        reformatter: borrowed, for frames of one look.
        arguments: its own, after the frame, for a target of "gbrp".
        size: height and width of the part.
        top, left: where it begins in what is made.
    """

    def __init__(
        self,
        reformatter: VideoReformatter,
        arguments: tuple[Any, ...],
        size: tuple[int, int],
        top: int,
        left: int,
    ) -> None:
        self._reformat, self._arguments = reformatter.reformat, arguments
        self._size, self._at = size, (top, left)

    def write(self, frame: VideoFrame, out: Picture) -> None:
        """Scale, convert and cut `frame` into RGB."""
        planes: Any = self._reformat(frame, *self._arguments).planes
        green, blue, red = planes
        line = green.line_size
        start, size = self._at[0] * line + self._at[1], self._size
        out[..., 1] = np.ndarray(size, _UINT8, green, start, (line, 1))
        out[..., 2] = np.ndarray(size, _UINT8, blue, start, (line, 1))
        out[..., 0] = np.ndarray(size, _UINT8, red, start, (line, 1))
