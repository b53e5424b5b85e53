"""One decoded frame becomes one upright picture of the training size.

Size, colour and crop are one pass of swscale over the planes that the decoder filled, with the
accurate and bit-exact flags: the same bytes on every machine of an architecture. What swscale
takes from the frame itself: colour range, matrix, bit depth, chroma layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from shardio.media.colours import MATRICES, RANGES, is_full_range, matrix_of
from shardio.media.framing import MAX_SIDE, Box, Framing, Place, fitted, framed

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.reformatter import VideoReformatter

__all__ = [
    "MAX_SIDE",
    "Converter",
    "Picture",
    "PictureMaker",
    "PictureWriter",
    "fitted",
    "plane_rows",
    "turned_by",
    "yuv_frame",
]

Picture = np.ndarray[Any, np.dtype[np.uint8]]

_RESERVED_MATRIX = 3  # "for future use": swscale refuses it, and writers mean "unspecified"
_BT601 = MATRICES["bt601"]
_UPRIGHT = (False, 1, 1)
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
        matrix = _BT601 if frame.colorspace == _RESERVED_MATRIX else None
        target = "gbrp" if planar else "rgb24"
        made = self._reformatter(frame, target).reformat(
            frame,
            width,
            height,
            target,
            matrix,
            matrix,
            self._flags,
            threads=1,
        )
        if planar:
            return [
                (n, plane_rows(plane, height, width))
                for n, plane in zip(_GBR, made.planes, strict=True)
            ]
        rows = plane_rows(made.planes[0], height, width * 3)
        return [(slice(None), rows.reshape(height, width, 3))]

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


class PictureWriter:
    """Writes frames into arrays of `size` (height, width), upright, with square pixels.

    Args:
        size: height and width of what is written.
        aspect: a stored pixel's width over its height; 0 if unknown.
        crop: which part is taken; None is the largest in the centre.
        pixels: "rgb" writes (height, width, 3); "yuv420" writes (height * 3 / 2, width): Y above U
            and V side by side, of this `matrix` and `color_range`, height and width even.
    """

    def __init__(
        self,
        size: tuple[int, int],
        aspect: Fraction,
        crop: Place | Box | None = None,
        pixels: str = "rgb",
        matrix: str = "bt601",
        color_range: str = "limited",
        converter: Converter | None = None,
    ) -> None:
        self._size, self._aspect, self._crop = size, aspect, crop
        self._is_yuv = pixels == "yuv420"
        self._matrix, self._range = matrix, color_range
        self._converter = converter or Converter()
        self._framings: dict[tuple[int, int, bool], Framing] = {}

    def write(self, frame: VideoFrame, display: bytes | None, out: Picture) -> None:
        """Scale, convert, turn upright and cut `frame` into `out`.

        `display` is the frame's display matrix as FFmpeg stores it (nine int32), or None.

        Raises:
            ValueError: the shape of the frame is out of all proportion.
            av.FFmpegError: swscale refuses the frame's colours (YCgCo, constant luminance, …).
        """
        turns = _UPRIGHT if display is None else turned_by(display)
        framing = self._framing(frame, turned=turns[0])
        width, height = framing.width, framing.height
        if turns[0]:
            width, height = height, width
        if self._is_yuv:
            self._write_yuv(frame, (width, height), turns, framing, out)
            return
        for channel, part in self._converter.rgb(frame, width, height):
            out[..., channel] = self._cut(part, turns, framing)

    def _write_yuv(
        self,
        frame: VideoFrame,
        whole: tuple[int, int],
        turns: tuple[bool, int, int],
        framing: Framing,
        out: Picture,
    ) -> None:
        """Write planes; where chroma's pairs are not those of the whole, by way of whole chroma."""
        colours: dict[str, Any] = {"matrix": self._matrix, "color_range": self._range}
        tall, wide = self._size
        odd = (framing.width | framing.height | framing.left | framing.top) & 1
        if odd or turns != _UPRIGHT:
            whole_chroma = self._converter.yuv(frame, *whole, chroma="yuv444p", **colours)
            planes = [plane_rows(each, whole[1], whole[0]) for each in whole_chroma.planes]
            parts = [self._cut(plane, turns, framing) for plane in planes]
            made = self._converter.yuv(
                yuv_frame(parts, "yuv444p", **colours), wide, tall, **colours
            )
            top = left = 0
        else:
            made = self._converter.yuv(frame, *whole, **colours)
            top, left = framing.top, framing.left
        luma, blue, red = made.planes
        out[:tall] = plane_rows(luma, tall, wide, top, left)
        tall, wide, top, left = tall // 2, wide // 2, top // 2, left // 2
        out[-tall:, :wide] = plane_rows(blue, tall, wide, top, left)
        out[-tall:, wide:] = plane_rows(red, tall, wide, top, left)

    def _cut(self, image: Picture, turns: tuple[bool, int, int], framing: Framing) -> Picture:
        """Turn the whole picture upright, and cut the part out of it; a view."""
        turned, down, right = turns
        if turned:
            image = image.swapaxes(0, 1)
        tall, wide = self._size
        top, left = framing.top, framing.left
        return image[::down, ::right][top : top + tall, left : left + wide]

    def _framing(self, frame: VideoFrame, *, turned: bool) -> Framing:
        key = (frame.width, frame.height, turned)
        found = self._framings.get(key)
        if found is None:
            wide, tall = frame.width * (self._aspect or Fraction(1)), Fraction(frame.height)
            shown = (tall, wide) if turned else (wide, tall)
            found = framed(shown, self._size, self._crop)
            self._framings[key] = found
        return found


class PictureMaker:
    """Makes pictures, each in memory of its own, as `PictureWriter` writes them.

    Args:
        size: (height, width), or the side of a square.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        aspect: Fraction,
        pixels: str = "rgb",
        matrix: str = "bt601",
        color_range: str = "limited",
    ) -> None:
        height, width = (size, size) if isinstance(size, int) else size
        self._shape = (height, width, 3) if pixels == "rgb" else (height * 3 // 2, width)
        self._writer = PictureWriter((height, width), aspect, None, pixels, matrix, color_range)

    def picture(self, frame: VideoFrame, display: bytes | None) -> Picture:
        """Scale, convert, turn upright and crop `frame`."""
        made = np.empty(self._shape, np.uint8)
        self._writer.write(frame, display, made)
        return made


def _comes_in_planes(frame: VideoFrame, height: int) -> bool:
    if height > frame.height or height < 8 or (frame.width | frame.height) & 1:
        return False
    return frame.format.name in _PLANAR_FORMATS


def plane_rows(plane: Any, height: int, n_bytes: int, top: int = 0, left: int = 0) -> Picture:
    """A part of a plane, as a view; rows are padded."""
    line = plane.line_size
    return np.ndarray((height, n_bytes), np.uint8, plane, top * line + left, (line, 1))


def turned_by(display: bytes | None) -> tuple[bool, int, int]:
    """Whether rows become columns, then the signs of down and right: to the nearest quarter turn.

    The matrix ((a, b), (c, d)) takes pixel (x, y) to (ax + cy, bx + dy).
    """
    if display is None:
        return _UPRIGHT
    a, b, _, c, d = np.frombuffer(display, np.int32, 5).tolist()
    turned = abs(b) + abs(c) > abs(a) + abs(d)
    down, right = (b, c) if turned else (d, a)
    return turned, -1 if down < 0 else 1, -1 if right < 0 else 1


def yuv_frame(
    parts: Sequence[Picture], pixel_format: str, *, matrix: str, color_range: str
) -> VideoFrame:
    """Copy planes of Y, U and V into a frame."""
    from av import VideoFrame

    height, width = parts[0].shape
    frame = VideoFrame(width, height, pixel_format)
    for plane, part in zip(frame.planes, parts, strict=True):
        plane_rows(plane, *part.shape)[...] = part
    frame.colorspace, frame.color_range = MATRICES[matrix], RANGES[color_range]
    return frame
