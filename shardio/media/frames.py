"""Scale, crop and rotate decoded frames into pictures of one size.

The position and size of a crop are computed exactly, as a part of the upright picture with square
pixels. The whole picture is scaled first; then the crop is cut out. The value of a pixel therefore
does not depend on the position of the crop. swscale converts the size and the colours of a decoded
frame in one step.
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

# The maximum height and width of a picture after scaling, in pixels. Without a limit, a picture of
# 4000x1 pixels could become 500,000 pixels wide.
MAX_SIDE = 16384


@dataclass(frozen=True, slots=True)
class CropPosition:
    """The position of a crop: 0 is at the left or upper edge, 1 at the right or lower edge.

    If x and y are drawn uniformly from [0, 1), all offsets of the crop are equally likely. If a
    function gets None instead of a position, the crop is in the centre.
    """

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class CropBox:
    """A crop: a part of the picture as displayed, which is then scaled to the requested size.

    The unit is a pixel of the displayed picture before scaling.
    """

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class CropGeometry:
    """The width and height of the whole scaled picture, and the crop's position in this picture."""

    width: int
    height: int
    left: int
    top: int

    @property
    def is_odd(self) -> bool:
        """True if the crop, or the edge of the picture, splits a pair of pixels with one chroma."""
        return bool((self.width | self.height | self.left | self.top) & 1)


def display_size(width: int, height: int, aspect: Fraction, *, turned: bool) -> tuple[int, int]:
    """Return the width and height of a picture as displayed, with square pixels.

    If the picture is `turned` by a quarter turn, width and height are swapped. Everywhere in this
    module, `aspect` is the width of a stored pixel divided by its height; 0 means that it is
    unknown, and counts as 1.
    """
    wide = max(1, _round_half_up(width * (aspect or Fraction(1))))
    return (height, wide) if turned else (wide, height)


def covering_size(wide: Fraction, tall: Fraction, size: tuple[int, int]) -> tuple[int, int]:
    """Return the width and height of the smallest scaled picture that covers a size.

    `wide` and `tall` are the width and height before scaling. `size` is the (height, width) that
    the scaled picture must cover.
    """
    scale = max(size[1] / wide, size[0] / tall)
    wide, tall = wide * scale, tall * scale
    return max(size[1], _round_half_up(wide)), max(size[0], _round_half_up(tall))


def crop_geometry(
    shown: tuple[Fraction, Fraction],
    size: tuple[int, int],
    crop: CropPosition | CropBox | None,
) -> CropGeometry:
    """Compute the geometry of a crop.

    Args:
        shown: the width and height of the displayed picture.
        size: the height and width of the result.
        crop: the position or the box of the crop; None means the centre.

    Raises:
        InvalidArgument: the box is not within the picture.
        ValueError: a side of the scaled picture would be longer than `MAX_SIDE`.
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
    """Round to the nearest integer, halves up. Python's `round` would round halves to even."""
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


_UPRIGHT = (False, 1, 1)


class FrameWriter:
    """A writer of frames into arrays: each frame is made upright, scaled and cropped.

    Args:
        size: the height and width of the written pictures, whose pixels are square.
        aspect: the width of a stored pixel divided by its height; 0 if unknown.
        crop: the part of the picture; None means the largest centred part with the aspect ratio of
            `size`.
        pixels: "rgb" for arrays of (height, width, 3); "yuv420" for arrays of (height * 3 / 2,
            width), in which Y is above, and U and V are side by side below Y. "yuv420" requires
            that height and width are even.
        converter: the converter to use; None creates a converter.
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
            ValueError: a side of the scaled frame would be longer than `MAX_SIDE`.
            av.FFmpegError: swscale cannot convert the frame's colours (YCgCo, constant luminance,
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
        """Return the fast path for upright frames with the format of `frame`, or None."""
        geometry = self._geometry(frame, turned=False)
        whole, (top, left) = (geometry.width, geometry.height), (geometry.top, geometry.left)
        if not self._is_yuv:
            return self._converter.rgb_path(frame, whole, self._size, (top, left))
        if geometry.is_odd or self._converter.yuv(frame, *whole) is not frame:
            return None
        return PlaneCopyPath(self._size, top, left)

    def _write_generic(self, frame: VideoFrame, turns: tuple[bool, int, int], out: Pixels) -> None:
        """Write a frame of any format and rotation; see `display_rotation` for `turns`."""
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
        """Scale a frame to `whole` (width, height), and write the crop as YUV planes.

        If the crop splits pairs of pixels with one chroma, or if the frame is rotated, the frame is
        first converted to 4:4:4, where every pixel has its own chroma.
        """
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
        """Turn a whole picture upright, and return a view of the crop."""
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
    """Return the nearest quarter turn to the display matrix of a picture, to turn it upright.

    The result has three items. If the first item is True, height and width are transposed. If the
    second item is -1, the picture is then flipped vertically; if the third item is -1, the picture
    is flipped horizontally. The matrix ((a, b), (c, d)) maps pixel (x, y) to (ax + cy, bx + dy).
    """
    if display is None:
        return _UPRIGHT
    a, b, _, c, d = np.frombuffer(display, np.int32, 5).tolist()
    turned = abs(b) + abs(c) > abs(a) + abs(d)
    down, right = (b, c) if turned else (d, a)
    return turned, -1 if down < 0 else 1, -1 if right < 0 else 1


def frame_from_planes(parts: Sequence[Pixels], pixel_format: str) -> VideoFrame:
    """Return a new frame with the planes Y, U and V, which are BT.601 in limited range."""
    from av import VideoFrame

    height, width = parts[0].shape
    frame = VideoFrame(width, height, pixel_format)
    for plane, part in zip(frame.planes, parts, strict=True):
        plane_rows(plane, *part.shape)[...] = part
    frame.colorspace, frame.color_range = MATRICES["bt601"], RANGES["limited"]
    return frame
