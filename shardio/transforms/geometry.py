"""Geometric transforms: random crops and flips."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.media import resize
from shardio.transforms.base import Change, PictureTransform, Pixels, check_bounds


def require_pillow(who: str) -> None:
    """Check that Pillow is installed, without importing it.

    Raises:
        UnsupportedEnvironment: it is not.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UnsupportedEnvironment(f"{who} needs Pillow: {install_hint('images')}")


def resize_frames(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resize a picture or each frame of a clip; the result is new memory.

    Linear; when shrinking, over all pixels that a new one covers, so that nothing flickers.
    """
    made = np.empty((*pixels.shape[:-3], height, width, 3), np.uint8)
    frames = pixels.reshape(-1, *pixels.shape[-3:]) if pixels.ndim == 3 else pixels
    for frame, out in zip(frames, made.reshape(-1, height, width, 3), strict=True):
        resize(frame, (height, width), out=out)
    return made


_MOST_TRIES: Final = 10
_MAX_SIDE: Final = 16384


class RandomResizedCrop(PictureTransform):
    """Crops a box of random area, aspect ratio and position, and resizes it to `size`.

    The draw is that of C. Szegedy et al., "Going deeper with convolutions" (2014), as in
    torchvision:
    the area is uniform between the bounds of `scale`, shares of the picture's; the ratio of width
    to
    height is log-uniform between the bounds of `ratio`; the position is uniform over all that fit.
    A box
    larger than the picture is drawn again; after ten tries it is the largest that `ratio` allows,
    in the
    centre. Resizing is linear, over all pixels of the box that a new pixel covers.

    Args:
        size: (height, width) of the result in pixels; a number stands for both.
        scale: shares of the picture's area.
        ratio: width over height.
        fields: names of the pictures; all by default.

    Raises:
        InvalidArgument: a parameter is not valid.
        UnsupportedEnvironment: Pillow is missing: pip install '.[images]'.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        *,
        fields: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(fields)
        self._height, self._width = _sides(size)
        self._scale = check_bounds("scale", scale, least=1e-6, most=1.0)
        low, high = check_bounds("ratio", ratio, least=1e-3, most=1e3)
        self._ratio, self._log_ratio = (low, high), (math.log(low), math.log(high))
        require_pillow(type(self).__name__)

    def box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw a crop for a picture of this size: top, left, height and width."""
        for _ in range(_MOST_TRIES):
            area = rng.uniform(*self._scale) * height * width
            aspect = math.exp(rng.uniform(*self._log_ratio))
            tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 0 < tall <= height and 0 < wide <= width:
                top = int(rng.integers(height - tall, endpoint=True))
                left = int(rng.integers(width - wide, endpoint=True))
                return top, left, tall, wide
        aspect = min(max(width / height, self._ratio[0]), self._ratio[1])
        tall = max(1, min(height, round(width / aspect)))
        wide = max(1, min(width, round(height * aspect)))
        return (height - tall) // 2, (width - wide) // 2, tall, wide

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        top, left, tall, wide = self.box(height, width, rng)

        def change(pixels: Pixels) -> Pixels:
            cut = pixels[..., top : top + tall, left : left + wide, :]
            return resize_frames(cut, self._height, self._width)

        return change


class HorizontalFlip(PictureTransform):
    """Mirrors left and right, with probability `p`.

    Raises:
        InvalidArgument: `p` is not from 0 to 1.
    """

    def __init__(self, p: float = 0.5, *, fields: str | Sequence[str] | None = None) -> None:
        super().__init__(fields)
        given: Any = p
        if not isinstance(given, int | float) or not 0 <= given <= 1:
            raise InvalidArgument(f"p must be a probability, from 0 to 1; found {p!r}")
        self._p = p

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        return _mirror if rng.random() < self._p else _unchanged


def _mirror(pixels: Pixels) -> Pixels:
    # As pixels of three bytes, not as bytes: less than half of the time.
    whole = np.ascontiguousarray(pixels).view("V3")
    return np.ascontiguousarray(whole[..., ::-1, :]).view(np.uint8)


def _unchanged(pixels: Pixels) -> Pixels:
    return pixels


def _sides(size: Any) -> tuple[int, int]:
    """Return height and width."""
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(isinstance(n, int) and 0 < n <= _MAX_SIDE for n in sides):
        raise InvalidArgument(
            f"size must be (height, width) in pixels, or a number for both, from 1 to {_MAX_SIDE}; "
            f"found {size!r}"
        )
    return sides
