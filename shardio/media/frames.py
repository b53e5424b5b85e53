"""Scale, crop and rotate decoded frames into pictures of one size.

swscale converts size and colours of the whole picture in one step. Then the crop is cut out, so
that the value of a pixel does not depend on the position of the crop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardio.media.pixels import (
    MATRICES,
    RANGES,
    FrameConverter,
    FrameFormat,
    Pixels,
    Planes,
    frame_format,
    plane_rows,
)

if TYPE_CHECKING:
    from av import VideoFrame

# The maximum height and width of a picture after scaling, in pixels. Without a limit, a picture of
# 4000x1 pixels could become 500,000 pixels wide.
MAX_SIDE = 16384


@dataclass(frozen=True, slots=True)
class CropPosition:
    """The position of a crop: 0 is at the left or upper edge, 1 at the right or lower edge.

    If x and y are drawn uniformly from [0, 1), all offsets of the crop are equally likely.
    """

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class CropGeometry:
    """The width and height of the whole scaled picture, and the crop's position in this picture."""

    width: int
    height: int
    left: int
    top: int


def display_size(width: int, height: int, aspect: Fraction, *, turned: bool) -> tuple[int, int]:
    """Return the width and height of a picture as displayed, with square pixels.

    The sides are swapped if the picture is `turned` by a quarter. `aspect` is the width of a stored
    pixel divided by its height; 0 (unknown) counts as 1.
    """
    wide = max(1, _round_half_up(width * (aspect or Fraction(1))))
    return (height, wide) if turned else (wide, height)


def covering_size(wide: Fraction, tall: Fraction, size: tuple[int, int]) -> tuple[int, int]:
    """Scale `wide` x `tall` to just cover `size` (height, width); return the width and height."""
    scale = max(size[1] / wide, size[0] / tall)
    wide, tall = wide * scale, tall * scale
    return max(size[1], _round_half_up(wide)), max(size[0], _round_half_up(tall))


def crop_geometry(
    shown: tuple[Fraction, Fraction], size: tuple[int, int], crop: CropPosition | None
) -> CropGeometry:
    """Compute how a picture that is displayed as `shown` (width, height) is scaled and cropped.

    `size` is the (height, width) of the crop.

    Raises:
        ValueError: a side of the scaled picture would be longer than `MAX_SIDE`.
    """
    height, width = size
    wide, tall = shown
    whole = covering_size(wide, tall, size)
    left = _crop_offset(whole[0] - width, None if crop is None else crop.x)
    top = _crop_offset(whole[1] - height, None if crop is None else crop.y)
    if max(whole) > MAX_SIDE:
        raise ValueError(
            f"frames of {_round_half_up(wide)}x{_round_half_up(tall)} pixels as shown would be "
            f"{whole[0]}x{whole[1]} after scaling for {width}x{height}; at most {MAX_SIDE} "
            f"are supported"
        )
    return CropGeometry(*whole, left, top)


def _crop_offset(left_over: int, share: float | None) -> int:
    return left_over // 2 if share is None else min(left_over, int(share * (left_over + 1)))


def _round_half_up(value: Fraction) -> int:
    """Round to the nearest integer, halves up. Python's `round` would round halves to even."""
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


_UPRIGHT = (False, 1, 1)
_UINT8 = np.dtype(np.uint8)


class FrameWriter:
    """A writer of frames into arrays: each frame is made upright, scaled and cropped.

    The conversion is chosen for the first frame, and again when the format or the display matrix
    changes.

    Args:
        size: the height and width of the written pictures, whose pixels are square.
        aspect: the width of a stored pixel divided by its height; 0 if unknown.
        crop: the position of the crop, which has the aspect ratio of `size`; None for the centre.
        pixels: "rgb" for arrays of (height, width, 3); "rgb-fast" for the same with less exact
            colours (see `FrameConverter.rgb`); "yuv420" for arrays of (height * 3 / 2, width) with
            even sides: Y is above, and U and V are side by side below Y.
        converter: the converter to use; None creates a converter.
    """

    def __init__(
        self,
        size: tuple[int, int],
        aspect: Fraction,
        crop: CropPosition | None = None,
        pixels: str = "rgb",
        converter: FrameConverter | None = None,
    ) -> None:
        self._size, self._aspect, self._crop = size, aspect, crop
        self._is_yuv, self._is_fast = pixels == "yuv420", pixels == "rgb-fast"
        self._converter = converter or FrameConverter()
        self._format: tuple[FrameFormat, bytes | None] | None = None
        self._planes: tuple[VideoFrame, list[Pixels]] | None = None
        """A frame that `write_planes` reuses, and its planes: creating one takes 6 us."""

    def render(self, frame: VideoFrame, display: bytes | None) -> Pixels:
        """Scale, convert, rotate and crop `frame` into a new array."""
        height, width = self._size
        out = np.empty((height * 3 // 2, width) if self._is_yuv else (height, width, 3), np.uint8)
        self.write(frame, display, out)
        return out

    def write(self, frame: VideoFrame, display: bytes | None, out: Pixels) -> None:
        """Scale, convert, rotate and crop `frame` into `out`.

        `display` is the frame's display matrix as FFmpeg stores it (nine int32), or None.

        Raises:
            ValueError: a side of the scaled frame would be longer than `MAX_SIDE`.
            av.FFmpegError: swscale cannot convert the frame's colours (YCgCo, …).
        """
        found = frame_format(frame), display
        if found != self._format:
            self._format = None  # if this frame is refused, choose again for the next one
            self._choose_conversion(frame, display)
            self._format = found
        if self._is_yuv:
            self._write_yuv(frame, out)
            return
        planes = self._to_rgb(frame)
        if not self._channels:
            (out[...],) = self._cropped(planes, 3)
            return
        for channel, part in zip(self._channels, self._cropped(planes), strict=True):
            out[..., channel] = part

    def write_planes(self, picture: Pixels, out: Pixels) -> None:
        """Scale and crop a picture of square pixels, as `split_planes` describes it, into `out`.

        Raises the errors of `write`.
        """
        if self._is_yuv and picture.shape == out.shape:
            out[...] = picture
            return
        parts = split_planes(picture)
        if self._planes is None or self._planes[1][0].shape != parts[0].shape:
            frame = frame_from_planes(parts, "yuv420p")
            pairs = zip(frame.planes, parts, strict=True)
            self._planes = frame, [plane_rows(plane, *part.shape) for plane, part in pairs]
        frame, targets = self._planes
        for target, part in zip(targets, parts, strict=True):
            target[...] = part
        self.write(frame, None, out)

    def _choose_conversion(self, frame: VideoFrame, display: bytes | None) -> None:
        self._rotation = turned, down, right = display_rotation(display)
        wide, tall = frame.width * (self._aspect or Fraction(1)), Fraction(frame.height)
        shown = (tall, wide) if turned else (wide, tall)
        self._geometry = found = crop_geometry(shown, self._size, self._crop)
        self._scaled_size = (found.height, found.width) if turned else (found.width, found.height)
        self._top = found.top if down > 0 else found.height - 1 - found.top
        self._left = found.left if right > 0 else found.width - 1 - found.left
        if self._is_yuv:
            # Two neighbouring pixels share a chroma value, so offsets and sizes must be even.
            is_even = not (found.width | found.height | found.left | found.top) & 1
            self._is_even = is_even and self._rotation == _UPRIGHT
            self._is_copy = (
                self._is_even and self._converter.yuv(frame, *self._scaled_size) is frame
            )
        else:
            self._to_rgb, self._channels = self._converter.rgb(
                frame, *self._scaled_size, is_fast=self._is_fast
            )

    def _cropped(self, planes: Planes, n_bytes: int = 1) -> list[Pixels]:
        """Return the crop of each plane of the scaled picture, as an upright view.

        If a pixel of a plane has several bytes (`n_bytes`), these bytes are the last axis.
        """
        turned, down, right = self._rotation
        row, column = planes[0].line_size, n_bytes
        if turned:
            row, column = column, row
        start, strides = self._top * row + self._left * column, (down * row, right * column)
        if n_bytes == 1:
            return [np.ndarray(self._size, _UINT8, plane, start, strides) for plane in planes]
        shape = (*self._size, n_bytes)
        return [np.ndarray(shape, _UINT8, plane, start, (*strides, 1)) for plane in planes]

    def _write_yuv(self, frame: VideoFrame, out: Pixels) -> None:
        """Scale a frame, and write the crop as YUV planes.

        If the frame is rotated, or the crop splits pairs of pixels that share chroma, the frame is
        first converted to 4:4:4.
        """
        (tall, wide), whole = self._size, self._scaled_size
        top, left = self._geometry.top, self._geometry.left
        if not self._is_even:
            full = self._converter.yuv(frame, *whole, "yuv444p")
            frame = frame_from_planes(self._cropped(full.planes), "yuv444p")
            whole, top, left = (wide, tall), 0, 0
        if not self._is_copy:
            frame = self._converter.yuv(frame, *whole)
        planes: Planes = frame.planes
        luma, blue, red = planes
        stride = luma.line_size
        out[:tall] = np.ndarray((tall, wide), _UINT8, luma, top * stride + left, (stride, 1))
        chroma, half, stride = out[tall:], wide // 2, blue.line_size
        size, start, strides = (tall // 2, half), (top * stride + left) // 2, (stride, 1)
        chroma[:, :half] = np.ndarray(size, _UINT8, blue, start, strides)
        chroma[:, half:] = np.ndarray(size, _UINT8, red, start, strides)


def display_rotation(display: bytes | None) -> tuple[bool, int, int]:
    """Return the flips and the quarter turn that make a picture upright; other angles are rounded.

    If the first item is True, height and width are transposed. If the second item is -1, the
    picture is then flipped vertically; if the third is -1, horizontally. The matrix
    ((a, b), (c, d)) maps pixel (x, y) to (ax + cy, bx + dy).
    """
    if display is None:
        return _UPRIGHT
    a, b, _, c, d = np.frombuffer(display, np.int32, 5).tolist()
    turned = abs(b) + abs(c) > abs(a) + abs(d)
    down, right = (b, c) if turned else (d, a)
    return turned, -1 if down < 0 else 1, -1 if right < 0 else 1


def split_planes(picture: Pixels) -> tuple[Pixels, Pixels, Pixels]:
    """Return views of Y, U and V of a picture of (height * 3 / 2, width).

    Y is above, and U and V are side by side below Y.
    """
    height, half = len(picture) * 2 // 3, picture.shape[1] // 2
    return picture[:height], picture[height:, :half], picture[height:, half:]


def frame_from_planes(parts: Sequence[Pixels], pixel_format: str) -> VideoFrame:
    """Return a new frame with the planes Y, U and V, which are BT.601 in limited range."""
    from av import VideoFrame

    height, width = parts[0].shape
    frame = VideoFrame(width, height, pixel_format)
    for plane, part in zip(frame.planes, parts, strict=True):
        plane_rows(plane, *part.shape)[...] = part
    frame.colorspace, frame.color_range = MATRICES["bt601"], RANGES["limited"]
    return frame
