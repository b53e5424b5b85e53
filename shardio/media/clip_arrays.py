"""What the arrays that clips are decoded into have to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument
from shardio.media.colours import MATRICES, RANGES

__all__ = ["checked_size"]

Output = npt.NDArray[np.uint8]


def checked_size(
    clips: Sequence[tuple[npt.ArrayLike, Output]],
    numbers: Sequence[npt.NDArray[np.int64]],
    pixels: str,
    matrix: str,
    color_range: str,
) -> tuple[int, int]:
    """The height and width of every clip's rows, as pictures.

    Raises:
        InvalidArgument: an option is none, or an array has another shape.
    """
    if pixels not in ("rgb", "yuv420"):
        raise InvalidArgument(f"pixels is {pixels!r}; expected 'rgb' or 'yuv420'")
    if matrix not in MATRICES or color_range not in RANGES:
        raise InvalidArgument(
            f"matrix {matrix!r}, color_range {color_range!r}; expected one of "
            f"{', '.join(MATRICES)}, and one of {', '.join(RANGES)}"
        )
    row = clips[0][1].shape[1:]
    is_rgb = pixels == "rgb"
    if not (len(row) == 3 and row[2] == 3 if is_rgb else len(row) == 2 and row[0] % 3 == 0):
        expected = "(n, height, width, 3)" if is_rgb else "(n, height * 3 / 2, width)"
        raise InvalidArgument(f"out has the shape {clips[0][1].shape}; {pixels} needs {expected}")
    for (_, out), frames in zip(clips, numbers, strict=True):
        if out.dtype != np.uint8 or out.shape != (*frames.shape, *row) or frames.ndim != 1:
            raise InvalidArgument(
                f"out is {out.dtype} of {out.shape}; {frames.size} frames need uint8 of "
                f"{(frames.size, *row)}"
            )
    height, width = row[0] if is_rgb else row[0] * 2 // 3, row[1]
    if min(height, width) < 1 or (not is_rgb and (height | width) & 1):
        raise InvalidArgument(f"{width}x{height} pixels as {pixels}: expected even sides above 0")
    return height, width
