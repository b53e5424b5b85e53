"""Scale, crop and rotate decoded frames into pictures of one size.

Crop geometry is computed exactly, on upright pictures with square pixels. The whole picture is
scaled, and the crop is cut out of the result, so that the value of a pixel does not depend on the
position of the crop. swscale converts size and colours of the decoder's planes in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardio.errors import InvalidArgument
from shardio.media.pixels import (
    MATRICES,
    RANGES,
    FrameConverter,
    FrameFormat,
    Pixels,
    PlanarRgbPath,
    PlaneCopyPath,
    frame_format,
    plane_rows,
)

if TYPE_CHECKING:
    from av import VideoFrame

MAX_SIDE = 16384  # pixels after scaling; without a limit, 4000x1 pixels could get 500,000 wide


@dataclass(frozen=True, slots=True)
class CropPosition:
    """The position of a crop: 0 is at the left or upper edge, 1 at the right or lower edge.

    With numbers drawn uniformly from [0, 1), all offsets are equally likely. Functions that accept
    a position centre the crop if the position is None.
    """

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class CropBox:
    """A part of the displayed picture, in display pixels, to be scaled to the requested size."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class CropGeometry:
    """The size of the whole scaled picture, and the position of the crop in it."""

    width: int
    height: int
    left: int
    top: int

    @property
    def is_odd(self) -> bool:
        """True if the crop would split pairs of pixels, which share their chroma."""
        return bool((self.width | self.height | self.left | self.top) & 1)


def display_size(width: int, height: int, aspect: Fraction, *, turned: bool) -> tuple[int, int]:
    """Return width and height as displayed: with square pixels, swapped after a quarter turn.

    Everywhere in this module, `aspect` is the width / height of a stored pixel; 0 (unknown) counts
    as 1.
    """
    wide = max(1, _round_half_up(width * (aspect or Fraction(1))))
    return (height, wide) if turned else (wide, height)


def covering_size(wide: Fraction, tall: Fraction, size: tuple[int, int]) -> tuple[int, int]:
    """Return width and height after scaling a picture to cover `size` (height, width)."""
    scale = max(size[1] / wide, size[0] / tall)
    wide, tall = wide * scale, tall * scale
    return max(size[1], _round_half_up(wide)), max(size[0], _round_half_up(tall))


def crop_geometry(
    shown: tuple[Fraction, Fraction],
    size: tuple[int, int],
    crop: CropPosition | CropBox | None,
) -> CropGeometry:
    """Compute the geometry of a crop of `size` (height, width); None crops the centre.

    Args:
        shown: width and height of the displayed picture.

    Raises:
        InvalidArgument: the box is not within the picture.
        ValueError: the scaled picture would exceed `MAX_SIDE`.
    """
    height, width = size
    wide, tall = shown
    if isinstance(crop, CropBox):
        _check_box(crop, shown)
        whole = (
            max(width, _round_half_up(wide * width / crop.width)),
            max(height, _round_half_up(tall * height / crop.height)),
        )
        left = _round_half_up(Fraction(crop.left * width, crop.width))
        top = _round_half_up(Fraction(crop.top * height, crop.height))
    else:
        whole = covering_size(wide, tall, size)
        left = _crop_offset(whole[0] - width, None if crop is None else crop.x)
        top = _crop_offset(whole[1] - height, None if crop is None else crop.y)
    if max(whole) > MAX_SIDE:
        raise ValueError(
            f"frames of {_round_half_up(wide)}x{_round_half_up(tall)} pixels as shown would be "
            f"{whole[0]}x{whole[1]} after scaling for {width}x{height}; at most {MAX_SIDE} "
            f"are supported"
        )
    return CropGeometry(*whole, min(left, whole[0] - width), min(top, whole[1] - height))


def _crop_offset(left_over: int, share: float | None) -> int:
    return left_over // 2 if share is None else min(left_over, int(share * (left_over + 1)))


def _check_box(box: CropBox, shown: tuple[Fraction, Fraction]) -> None:
    wide, tall = _round_half_up(shown[0]), _round_half_up(shown[1])
    fits = 0 <= box.left and 0 <= box.top and box.width > 0 and box.height > 0
    if not fits or box.left + box.width > wide or box.top + box.height > tall:
        raise InvalidArgument(f"{box} is not within a picture of {wide}x{tall} pixels")


def _round_half_up(value: Fraction) -> int:
    """Round to the nearest integer, halves up; `round` would round halves to even."""
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


_UPRIGHT = (False, 1, 1)


class FrameWriter:
    """A writer of frames into arrays of `size` (height, width), upright, with square pixels.

    Args:
        crop: the part of the picture; None is the largest centred part.
        pixels: "rgb" writes (height, width, 3); "yuv420" writes (height * 3 / 2, width), with Y
            above U and V side by side, and requires even height and width.
    """

    def __init__(
        self,
        size: tuple[int, int],
        aspect: Fraction,
        crop: CropPosition | CropBox | None = None,
        pixels: str = "rgb",
        converter: FrameConverter | None = None,
    ) -> None:
        self._size, self._aspect, self._crop = size, aspect, crop
        self._is_yuv = pixels == "yuv420"
        self._converter = converter or FrameConverter()
        self._geometries: dict[tuple[int, int, bool], CropGeometry] = {}
        self._format: FrameFormat | None = None
        self._fast_path: PlaneCopyPath | PlanarRgbPath | None = None

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
            ValueError: the scaled frame would exceed `MAX_SIDE`.
            av.FFmpegError: swscale does not support the frame's colours (YCgCo, constant luminance,
                …).
        """
        if display is None:
            found = frame_format(frame)
            if found != self._format:
                self._fast_path, self._format = self._find_fast_path(frame), found
            if self._fast_path is not None:
                self._fast_path.write(frame, out)
                return
        self._write_generic(frame, _UPRIGHT if display is None else display_rotation(display), out)

    def _find_fast_path(self, frame: VideoFrame) -> PlaneCopyPath | PlanarRgbPath | None:
        """Return the fast path for upright frames of this format, or None."""
        geometry = self._geometry(frame, turned=False)
        whole, (top, left) = (geometry.width, geometry.height), (geometry.top, geometry.left)
        if not self._is_yuv:
            return self._converter.rgb_path(frame, whole, self._size, (top, left))
        if geometry.is_odd or self._converter.yuv(frame, *whole) is not frame:
            return None
        return PlaneCopyPath(self._size, top, left)

    def _write_generic(self, frame: VideoFrame, turns: tuple[bool, int, int], out: Pixels) -> None:
        """Write any frame, without the fast path."""
        geometry = self._geometry(frame, turned=turns[0])
        width, height = geometry.width, geometry.height
        if turns[0]:
            width, height = height, width
        if self._is_yuv:
            self._write_yuv(frame, (width, height), turns, geometry, out)
            return
        for channel, part in self._converter.rgb(frame, width, height):
            out[..., channel] = self._oriented_crop(part, turns, geometry)

    def _write_yuv(
        self,
        frame: VideoFrame,
        whole: tuple[int, int],
        turns: tuple[bool, int, int],
        geometry: CropGeometry,
        out: Pixels,
    ) -> None:
        """Write YUV planes; use full-resolution chroma if the crop would split pairs of pixels."""
        tall, wide = self._size
        top, left = geometry.top, geometry.left
        if geometry.is_odd or turns != _UPRIGHT:
            full = self._converter.yuv(frame, *whole, "yuv444p")
            planes = [plane_rows(each, whole[1], whole[0]) for each in full.planes]
            parts = [self._oriented_crop(plane, turns, geometry) for plane in planes]
            frame, whole = frame_from_planes(parts, "yuv444p"), (wide, tall)
            top = left = 0
        luma, blue, red = self._converter.yuv(frame, *whole).planes
        out[:tall] = plane_rows(luma, tall, wide, top, left)
        tall, wide, top, left = tall // 2, wide // 2, top // 2, left // 2
        out[-tall:, :wide] = plane_rows(blue, tall, wide, top, left)
        out[-tall:, wide:] = plane_rows(red, tall, wide, top, left)

    def _oriented_crop(
        self, image: Pixels, turns: tuple[bool, int, int], geometry: CropGeometry
    ) -> Pixels:
        """Return the crop of the whole picture, rotated upright, as a view."""
        turned, down, right = turns
        if turned:
            image = image.swapaxes(0, 1)
        tall, wide = self._size
        top, left = geometry.top, geometry.left
        return image[::down, ::right][top : top + tall, left : left + wide]

    def _geometry(self, frame: VideoFrame, *, turned: bool) -> CropGeometry:
        key = (frame.width, frame.height, turned)
        found = self._geometries.get(key)
        if found is None:
            wide, tall = frame.width * (self._aspect or Fraction(1)), Fraction(frame.height)
            shown = (tall, wide) if turned else (wide, tall)
            found = self._geometries[key] = crop_geometry(shown, self._size, self._crop)
        return found


def display_rotation(display: bytes | None) -> tuple[bool, int, int]:
    """Return the nearest quarter turn: (is transposed, sign of down, sign of right).

    The matrix ((a, b), (c, d)) maps pixel (x, y) to (ax + cy, bx + dy).
    """
    if display is None:
        return _UPRIGHT
    a, b, _, c, d = np.frombuffer(display, np.int32, 5).tolist()
    turned = abs(b) + abs(c) > abs(a) + abs(d)
    down, right = (b, c) if turned else (d, a)
    return turned, -1 if down < 0 else 1, -1 if right < 0 else 1


def frame_from_planes(parts: Sequence[Pixels], pixel_format: str) -> VideoFrame:
    """Copy planes of Y, U and V, of BT.601 in limited range, into a frame."""
    from av import VideoFrame

    height, width = parts[0].shape
    frame = VideoFrame(width, height, pixel_format)
    for plane, part in zip(frame.planes, parts, strict=True):
        plane_rows(plane, *part.shape)[...] = part
    frame.colorspace, frame.color_range = MATRICES["bt601"], RANGES["limited"]
    return frame
