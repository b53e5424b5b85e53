"""One decoded frame becomes one upright RGB picture of the training size.

Size, colour and crop are one pass of swscale over the planes that the decoder filled, with the
accurate and bit-exact flags: the same bytes on every machine of an architecture. What swscale
takes from the frame itself: colour range, matrix, bit depth, chroma layout. An untagged matrix is
BT.601 and an untagged range is limited, as FFmpeg has them.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from av import VideoFrame

__all__ = ["Picture", "PictureMaker", "fitted"]

Picture = np.ndarray[Any, np.dtype[np.uint8]]

MAX_SIDE = 16384  # pixels after scaling: a strip of 4000x1 would become half a million wide
_RESERVED_MATRIX = 3  # "for future use": swscale refuses it, and writers mean "unspecified"
_BT601 = 5


def fitted(width: int, height: int, aspect: Fraction, size: int) -> tuple[int, int]:
    """Width and height after scaling the short side to `size`, pixels made square.

    `aspect` is a stored pixel's width over its height; 0 means unknown, that is square.
    """
    wide, tall = width * (aspect or Fraction(1)), Fraction(height)
    scale = size / min(wide, tall)
    return max(size, _rounded(wide * scale)), max(size, _rounded(tall * scale))


def _rounded(value: Fraction) -> int:
    """Round half up; `round` would go to the even neighbour."""
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


class PictureMaker:
    """Makes pictures of `size` x `size` pixels; owns one swscale context, kept across frames.

    A context made anew for every frame costs three times the conversion itself.
    """

    def __init__(self, size: int, aspect: Fraction) -> None:
        from av.video.reformatter import Interpolation, VideoReformatter

        self._size, self._aspect = size, aspect
        self._reformatter = VideoReformatter()
        self._flags = (
            Interpolation.BILINEAR
            | Interpolation.ACCURATE_RND
            | Interpolation.BITEXACT
            | Interpolation.FULL_CHR_H_INT
            | Interpolation.FULL_CHR_H_INP
        )
        self._fits: dict[tuple[int, int], tuple[int, int]] = {}
        self._alpha: dict[str, bool] = {}

    def picture(self, frame: VideoFrame, display: bytes | None) -> Picture:
        """Scale, convert, turn upright and crop `frame`; the result is a view of new memory.

        `display` is the frame's display matrix as FFmpeg stores it (nine int32), or None.

        Raises:
            ValueError: the shape of the frame is out of all proportion.
            av.FFmpegError: swscale refuses the frame's colours (YCgCo, constant luminance, …).
        """
        width, height = self._fit(frame.width, frame.height)
        if self._has_alpha(frame):
            frame = self._over_black(frame)
        matrix = _BT601 if frame.colorspace == _RESERVED_MATRIX else None
        rgb = self._reformatter.reformat(
            frame,
            width,
            height,
            "rgb24",
            src_colorspace=matrix,
            dst_colorspace=matrix,
            interpolation=self._flags,
            threads=1,
        )
        plane = rgb.planes[0]
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(height, plane.line_size)
        image = rows[:, : width * 3].reshape(height, width, 3)
        return _centre(_upright(image, display), self._size)

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        fit = self._fits.get((width, height))
        if fit is None:
            fit = self._fits[width, height] = fitted(width, height, self._aspect, self._size)
            if max(fit) > MAX_SIDE:
                raise ValueError(
                    f"frames of {width}x{height} pixels would be {fit[0]}x{fit[1]} after scaling "
                    f"the short side to {self._size}; at most {MAX_SIDE} are supported"
                )
        return fit

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


def _upright(image: Picture, display: bytes | None) -> Picture:
    """Turn and mirror `image` as the display matrix says, to the nearest quarter turn; a view.

    The matrix ((a, b), (c, d)) takes pixel (x, y) to (ax + cy, bx + dy).
    """
    if display is None:
        return image
    a, b, _, c, d = np.frombuffer(display, np.int32, 5).tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        down, right = b, c
        image = image.transpose(1, 0, 2)
    else:
        down, right = d, a
    return image[:: -1 if down < 0 else 1, :: -1 if right < 0 else 1]


def _centre(image: Picture, size: int) -> Picture:
    top, left = (image.shape[0] - size) // 2, (image.shape[1] - size) // 2
    return image[top : top + size, left : left + size]
