"""Frames to another size and other colours, by swscale.

With its accurate and bit-exact flags: the same bytes on every machine of an architecture. What it
takes from the frame itself: colour range, matrix, bit depth, chroma layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardio.media.colours import MATRICES, RANGES, is_full_range, matrix_of
from shardio.media.straight import ChannelsMade, Picture

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.reformatter import VideoReformatter

__all__ = ["Converter", "Picture", "plane_rows"]


_RESERVED_MATRIX = 3  # "for future use": swscale refuses it, and writers mean "unspecified"
_BT601 = MATRICES["bt601"]
# From these, swscale makes planes of red, green and blue five times faster than packed pixels, and
# the same values, as long as the height is not enlarged and chroma lies evenly: a test tries it.
_PLANAR_FORMATS = frozenset(
    f"yuv{j}{chroma}p{deep}"
    for j, deep in (("", ""), ("j", ""), ("", "10le"))
    for chroma in ("420", "422", "444")
)
_GBR = (1, 2, 0)  # the channels of the planes, in their order


class Converter:
    """Scales frames and changes their colours; owns swscale's contexts, kept across frames.

    A context made anew for every frame costs three times the conversion itself.
    """

    def __init__(self) -> None:
        from av.video.reformatter import Interpolation, VideoReformatter

        self._new = VideoReformatter
        self._reformatters: dict[tuple[str, str], VideoReformatter] = {}
        # As an int: PyAV would look the combination up in its enum for every frame.
        self._flags = int(
            Interpolation.BILINEAR
            | Interpolation.ACCURATE_RND
            | Interpolation.BITEXACT
            | Interpolation.FULL_CHR_H_INT
            | Interpolation.FULL_CHR_H_INP
        )
        self._alpha: dict[str, bool] = {}

    def rgb(self, frame: VideoFrame, width: int, height: int) -> list[tuple[int | slice, Picture]]:
        """Scale `frame` to RGB: pairs of a channel (or all) and its values, views of new memory."""
        if self._has_alpha(frame):
            frame = self._over_black(frame)
        planar = _comes_in_planes(frame, height)
        target = "gbrp" if planar else "rgb24"
        arguments = self._rgb_arguments(frame, width, height, target)
        made = self._reformatter(frame, target).reformat(frame, *arguments)
        if planar:
            return [
                (n, plane_rows(plane, height, width))
                for n, plane in zip(_GBR, made.planes, strict=True)
            ]
        rows = plane_rows(made.planes[0], height, width * 3)
        return [(slice(None), rows.reshape(height, width, 3))]

    def straight_rgb(
        self,
        frame: VideoFrame,
        scaled: tuple[int, int],
        size: tuple[int, int],
        corner: tuple[int, int],
    ) -> ChannelsMade | None:
        """What writes upright frames that look like this one, if swscale makes planes of them."""
        width, height = scaled
        if not _comes_in_planes(frame, height):
            return None
        arguments = self._rgb_arguments(frame, width, height, "gbrp")
        reformatter = self._reformatter(frame, "gbrp")
        return ChannelsMade(reformatter, arguments, size, *corner)

    def _rgb_arguments(
        self, frame: VideoFrame, width: int, height: int, target: str
    ) -> tuple[Any, ...]:
        """What `reformat` takes after the frame."""
        matrix = _BT601 if frame.colorspace == _RESERVED_MATRIX else None
        ranges_and_tags, n_threads = (None,) * 4, 1
        return (width, height, target, matrix, matrix, self._flags, *ranges_and_tags, n_threads)

    def yuv(
        self,
        frame: VideoFrame,
        width: int,
        height: int,
        *,
        matrix: str,
        color_range: str,
        chroma: str = "yuv420p",
    ) -> VideoFrame:
        """Give `frame` at this size as 8-bit planes of this matrix and range.

        The frame itself, where it is that already.
        """
        full = is_full_range(frame)
        alike = matrix_of(frame) == matrix and full == (color_range == "full")
        if alike and frame.width == width and frame.height == height:
            if frame.format.name.replace("yuvj", "yuv") == chroma:
                return frame
        if self._has_alpha(frame):
            frame = self._over_black(frame)
        is_rgb = frame.format.is_rgb
        return self._reformatter(frame, chroma).reformat(
            frame,
            width,
            height,
            chroma,
            None if is_rgb else MATRICES[matrix_of(frame)],
            MATRICES[matrix],
            self._flags,
            RANGES["full" if full or is_rgb else "limited"],
            RANGES[color_range],
            threads=1,
        )

    def _reformatter(self, frame: VideoFrame, target: str) -> VideoReformatter:
        """The context for conversions from the frame's format to `target`."""
        key = (frame.format.name, target)
        found = self._reformatters.get(key)
        if found is None:
            found = self._reformatters[key] = self._new()
        return found

    def _has_alpha(self, frame: VideoFrame) -> bool:
        name = frame.format.name
        if name not in self._alpha:
            parts = frame.format.components
            self._alpha[name] = frame.format.has_palette or any(part.is_alpha for part in parts)
        return self._alpha[name]

    def _over_black(self, frame: VideoFrame) -> VideoFrame:
        """Lay a frame with transparent parts over black.

        Before scaling: afterwards, the colour that hides under transparent pixels has bled out.
        """
        from av import VideoFrame

        rgba = frame.to_ndarray(format="rgba")
        alpha = rgba[..., 3:]
        if alpha.min() == 255:
            return frame
        blended = (rgba[..., :3].astype(np.uint16) * alpha + 127) // 255
        return VideoFrame.from_ndarray(blended.astype(np.uint8), format="rgb24")


def _comes_in_planes(frame: VideoFrame, height: int) -> bool:
    if height > frame.height or height < 8 or (frame.width | frame.height) & 1:
        return False
    return frame.format.name in _PLANAR_FORMATS


def plane_rows(plane: Any, height: int, n_bytes: int, top: int = 0, left: int = 0) -> Picture:
    """A part of a plane, as a view; rows are padded."""
    line = plane.line_size
    return np.ndarray((height, n_bytes), np.uint8, plane, top * line + left, (line, 1))
