"""Pixels to another size, by Pillow: bilinear over all pixels that a new one covers.

Its arithmetic is in integers and the same everywhere; what makes a picture smaller does not alias.
"""

from __future__ import annotations

import math

import numpy as np

from shardio.errors import InvalidArgument
from shardio.media.pillow import pillow_image
from shardio.media.pixels import Pixels, delivered

__all__ = ["resampled", "resize"]


_MAX_SIDE = 16384


def resize(pixels: Pixels, size: tuple[int, int], *, out: Pixels | None = None) -> Pixels:
    """Bring uint8 pixels, height x width x 3 (RGB) or 1 (grey), to `size` (height, width).

    Bilinear; the same bytes on every run and machine. `out` is filled and returned: uint8,
    C-contiguous, of the new shape.

    Raises:
        InvalidArgument: the pixels, the size, or `out` does not fit.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise InvalidArgument(
            "resize: expected uint8 pixels of height x width x 3 or 1, found "
            f"{pixels.dtype} of {pixels.shape}"
        )
    if not pixels.size:
        raise InvalidArgument(f"resize: there is no pixel in {pixels.shape}")
    return resampled(pixels, (0, 0, *pixels.shape[:2]), size, out)


def resampled(
    pixels: Pixels,
    box: tuple[float, float, float, float],
    size: tuple[int, int],
    out: Pixels | None,
) -> Pixels:
    """Resample the part `box` (top, left, height, width, in fractions of pixels) to `size`.

    Nothing outside of the pixels that the box touches has a part in the result.
    """
    if not all(0 < side <= _MAX_SIDE for side in size):
        raise InvalidArgument(f"size: expected height and width of 1 to {_MAX_SIDE}, found {size}")
    top, left, height, width = box
    first_row, first_column = math.floor(top), math.floor(left)
    part = pixels[first_row : math.ceil(top + height), first_column : math.ceil(left + width)]
    if part.shape[:2] == size == (height, width):
        return delivered(part, out) if out is not None else part.copy()
    within = (
        left - first_column,
        top - first_row,
        left - first_column + width,
        top - first_row + height,
    )
    image = pillow_image()
    grey = pixels.shape[2] == 1
    picture = image.fromarray(np.ascontiguousarray(part[..., 0] if grey else part))
    small = np.asarray(picture.resize((size[1], size[0]), image.Resampling.BILINEAR, within))
    return delivered(small[..., np.newaxis] if grey else small, out)
