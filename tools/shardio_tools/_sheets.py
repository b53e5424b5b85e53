"""Tiles with captions on a sheet, drawn with Pillow and its own font.

Pillow is needed to draw, and comes with the extra `images`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shardio.media import pillow_image
from shardio_tools.frames import Pixels, Size
from shardio_tools.output import escaped

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

GAP: Final = 4
CAPTION: Final = 16
"""Pixels between tiles, and of a line of text."""
_LEAST_SIDE: Final = 96
"""Of a tile, so that there is room for its caption."""
_LETTERS: Final = 11
_WIDE: Final = 1.5
"""Columns for each row."""
_PAPER, _INK, _MARK, _EMPTY = (24, 24, 24), (225, 225, 225), (224, 64, 48), (60, 60, 60)


@dataclass(frozen=True, slots=True)
class Tile:
    """One picture of a sheet, or a note in its place: what is damaged is crossed out."""

    caption: str
    pixels: Pixels | None = None
    note: str = ""
    is_damaged: bool = False


def columns_of(n_tiles: int) -> int:
    """How many tiles stand side by side, for a sheet that is wider than high."""
    return max(1, min(n_tiles, math.ceil(math.sqrt(n_tiles * _WIDE))))


def draw_sheet(tiles: Sequence[Tile], side: int) -> Pixels:
    """Draw tiles of at most `side` x `side` pixels in rows, each with its caption below; RGB.

    Small pictures are enlarged by a whole number of pixels; a tile is as large as the largest.

    Raises:
        UnsupportedEnvironment: Pillow is not installed.
    """
    image = pillow_image()
    from PIL import ImageDraw

    pictures = [None if t.pixels is None else enlarged(t.pixels, side) for t in tiles]
    largest = max((max(one.shape[:2]) for one in pictures if one is not None), default=0)
    side = min(side, max(largest, _LEAST_SIDE))
    n_columns = columns_of(len(tiles))
    n_rows = -(-len(tiles) // n_columns)
    step = side + GAP, side + GAP + CAPTION
    canvas = image.new("RGB", (GAP + n_columns * step[0], GAP + n_rows * step[1]), _PAPER)
    draw = ImageDraw.Draw(canvas)
    for i, (tile, pixels) in enumerate(zip(tiles, pictures, strict=True)):
        left = GAP + i % n_columns * step[0]
        top = GAP + i // n_columns * step[1]
        if pixels is None:
            _draw_note(draw, tile, left, top, side)
        else:
            height, width = pixels.shape[:2]
            place = left + (side - width) // 2, top + (side - height) // 2
            canvas.paste(image_of(pixels), place)
        draw.text((left, top + side + 1), _written(tile.caption, side), _INK, _font())
    return np.asarray(canvas)


def placeholder(size: Size) -> Pixels:
    """Draw what stands for a frame that cannot be shown: a crossed out picture of that size."""
    canvas = pillow_image().new("RGB", (size[1], size[0]), _EMPTY)
    from PIL import ImageDraw

    _cross(ImageDraw.Draw(canvas), 0, 0, size[1] - 1, size[0] - 1)
    return np.asarray(canvas)


def enlarged(pixels: Pixels, side: int) -> Pixels:
    """Repeat pixels so often that the longest side has at most `side`."""
    factor = side // max(pixels.shape[:2])
    return pixels if factor < 2 else pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def _draw_note(draw: ImageDraw, tile: Tile, left: int, top: int, side: int) -> None:
    right, bottom = left + side - 1, top + side - 1
    draw.rectangle((left, top, right, bottom), fill=_EMPTY)
    if tile.is_damaged:
        _cross(draw, left, top, right, bottom)
    place = left + GAP, top + GAP
    draw.text(place, _written(tile.note, side - 2 * GAP), _INK, _font())


def _cross(draw: ImageDraw, left: int, top: int, right: int, bottom: int) -> None:
    width = max(1, min(right - left, bottom - top) // 40)
    draw.line((left, top, right, bottom), fill=_MARK, width=width)
    draw.line((left, bottom, right, top), fill=_MARK, width=width)
    draw.rectangle((left, top, right, bottom), outline=_MARK, width=width)


def _written(text: str, width: int) -> str:
    """Shorten `text` to so many pixels; what Pillow's font lacks is escaped, as in reports."""
    font = _font()
    known = escaped(text).encode("ascii", "backslashreplace").decode()
    if font.getlength(known) <= width:
        return known
    while known and font.getlength(known + "...") > width:
        known = known[:-1]
    return known + "..."


@functools.cache
def _font() -> FreeTypeFont | ImageFont:
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size=_LETTERS)
    except ImportError:  # a Pillow without FreeType has letters of one size
        return ImageFont.load_default()


def image_of(pixels: Pixels) -> Image:
    """Make Pillow's picture of RGB pixels.

    Raises:
        UnsupportedEnvironment: Pillow is not installed.
    """
    found: Image = pillow_image().fromarray(np.ascontiguousarray(pixels))
    return found


def quantized(pixels: Pixels) -> Image:
    """The same in 256 colours, found fifty times as fast as by default, and about 1 dB worse."""
    return image_of(pixels).quantize(256, method=pillow_image().Quantize.FASTOCTREE)
