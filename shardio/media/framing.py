"""Which part of a picture is taken, and how large the whole of it has to become for that.

All in exact arithmetic, upright, with square pixels: the whole picture is scaled once, and the
part is cut out of it, so that a pixel does not depend on where the cut lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from shardio.errors import InvalidArgument

__all__ = ["MAX_SIDE", "Box", "Framing", "Place", "fitted", "framed", "shown_size"]

MAX_SIDE = 16384  # pixels after scaling: a strip of 4000x1 would become half a million wide


@dataclass(frozen=True, slots=True)
class Place:
    """Where the cut lies in what is left over once the picture covers it; the centre by default.

    0 is the left or upper edge, 1 the right or lower; evenly drawn numbers in [0, 1) give every
    offset the same chance.
    """

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Box:
    """A part of the picture as shown, in pixels as shown; it is scaled to the size wanted."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Framing:
    """The whole picture as shown becomes `width` x `height`; the part begins at `left`, `top`."""

    width: int
    height: int
    left: int
    top: int


def shown_size(width: int, height: int, aspect: Fraction, *, turned: bool) -> tuple[int, int]:
    """Width and height as shown: pixels made square, and swapped after a quarter turn.

    `aspect` is a stored pixel's width over its height; 0 means unknown, that is square.
    """
    wide = max(1, _rounded(width * (aspect or Fraction(1))))
    return (height, wide) if turned else (wide, height)


def fitted(
    width: int | Fraction,
    height: int | Fraction,
    aspect: Fraction,
    size: int | tuple[int, int],
) -> tuple[int, int]:
    """Width and height after scaling to the smallest that covers `size`, pixels made square.

    `size` is (height, width), or one side of a square: the short side is fitted to it.
    """
    tall_size, wide_size = (size, size) if isinstance(size, int) else size
    wide, tall = width * (aspect or Fraction(1)), Fraction(height)
    scale = max(wide_size / wide, tall_size / tall)
    return max(wide_size, _rounded(wide * scale)), max(tall_size, _rounded(tall * scale))


def framed(
    shown: tuple[Fraction, Fraction],
    size: tuple[int, int],
    crop: Place | Box | None,
) -> Framing:
    """Frame a picture of `shown` (width, height) pixels for a part of `size` (height, width).

    Raises:
        InvalidArgument: the box does not lie within the picture.
        ValueError: the scaled picture would be out of all proportion.
    """
    height, width = size
    wide, tall = shown
    if isinstance(crop, Box):
        _check_box(crop, shown)
        whole = (
            max(width, _rounded(wide * width / crop.width)),
            max(height, _rounded(tall * height / crop.height)),
        )
        left = _rounded(Fraction(crop.left * width, crop.width))
        top = _rounded(Fraction(crop.top * height, crop.height))
    else:
        whole = fitted(wide, tall, Fraction(1), size)
        left = _placed(whole[0] - width, None if crop is None else crop.x)
        top = _placed(whole[1] - height, None if crop is None else crop.y)
    if max(whole) > MAX_SIDE:
        raise ValueError(
            f"frames of {_rounded(wide)}x{_rounded(tall)} pixels as shown would be "
            f"{whole[0]}x{whole[1]} after scaling for {width}x{height}; at most {MAX_SIDE} "
            f"are supported"
        )
    return Framing(*whole, min(left, whole[0] - width), min(top, whole[1] - height))


def _placed(left_over: int, share: float | None) -> int:
    return left_over // 2 if share is None else min(left_over, int(share * (left_over + 1)))


def _check_box(box: Box, shown: tuple[Fraction, Fraction]) -> None:
    wide, tall = _rounded(shown[0]), _rounded(shown[1])
    fits = 0 <= box.left and 0 <= box.top and box.width > 0 and box.height > 0
    if not fits or box.left + box.width > wide or box.top + box.height > tall:
        raise InvalidArgument(f"{box} does not lie within a picture of {wide}x{tall} pixels")


def _rounded(value: Fraction) -> int:
    """Round half up; `round` would go to the even neighbour."""
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)
