"""Convert YUV 4:2:0 frames to RGB with tinygrad operations: half the bytes to the device."""

from __future__ import annotations

from typing import Final, Literal, get_args

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

from shardio.errors import InvalidArgument

Matrix = Literal["bt601", "bt709", "bt2020", "fcc", "smpte240m"]
Range = Literal["limited", "full"]
Siting = Literal["left", "center"]
Levels = Literal["uint8", "float16", "float32"]

# The weights of red and blue in luma: MatrixCoefficients 5 (and 6), 1, 9, 4, 7 of ITU-T H.273.
_WEIGHTS: Final[dict[Matrix, tuple[float, float]]] = {
    "bt601": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020": (0.2627, 0.0593),
    "fcc": (0.30, 0.11),
    "smpte240m": (0.212, 0.087),
}


def yuv420_to_rgb(
    frames: Tensor,
    matrix: Matrix = "bt601",
    range: Range = "limited",
    *,
    siting: Siting = "left",
    dtype: Levels = "uint8",
) -> Tensor:
    """Convert frames of YUV 4:2:0 to RGB; the result is (..., H, W, 3), and lazy.

    Nothing is realized, so it may be called in a TinyJit. Colours outside of RGB are clipped.
    Chroma is interpolated linearly between its samples, and repeated at the edges.

    Args:
        frames: uint8 (..., H * 3 / 2, W), H and W even. The first H rows are luma. Each of the H /
            2 rows below has a row of U in its left half, and the same row of V in its right half.
        matrix: the matrix by which RGB was converted to luma and chroma.
        range: "limited" is luma from 16 to 235 and chroma from 16 to 240; "full" is 0 to 255.
        siting: the horizontal position of chroma relative to the two pixels that share it: on the
            "left" one, the default of H.264, HEVC, MPEG-2 and MPEG-4, or in the "center" of both,
            as in JPEG and MPEG-1. Vertically it lies in the centre with either.
        dtype: of the result: levels 0 to 255, rounded for "uint8" only.

    Raises:
        InvalidArgument: an argument or the shape is not valid.
    """
    _check("matrix", matrix, Matrix)
    _check("range", range, Range)
    _check("siting", siting, Siting)
    _check("dtype", dtype, Levels)
    height, width = _size(frames)
    luma, chroma = frames.split([height, height // 2], -2)
    lead = frames.shape[:-2]
    # (..., H / 2, 2, W / 2): U and V are processed together until they meet luma.
    both = chroma.reshape(*lead, height // 2, 2, width // 2).transpose(-3, -2).cast(dtypes.float)
    both = _wider(_doubled(both - 128, -2), siting)
    u, v = both.split(1, -3)
    rgb = _mixed(luma.cast(dtypes.float), u.squeeze(-3), v.squeeze(-3), matrix, range)
    levels = rgb.clip(0, 255)
    return (levels + 0.5).cast(dtypes.uint8) if dtype == "uint8" else levels.cast(dtype)


def _mixed(y: Tensor, u: Tensor, v: Tensor, matrix: Matrix, range: Range) -> Tensor:
    """Return unclipped RGB levels: the definition of the matrix, inverted."""
    red, blue = _WEIGHTS[matrix]
    green = 1 - red - blue
    grey, colour = (1.0, 1.0) if range == "full" else (255 / 219, 255 / 224)
    luma = y * grey if range == "full" else (y - 16) * grey
    of_v, of_u = 2 * (1 - red) * colour, 2 * (1 - blue) * colour
    less = u * (of_u * blue / green) + v * (of_v * red / green)
    return Tensor.stack(luma + v * of_v, luma - less, luma + u * of_u, dim=-1)


def _wider(chroma: Tensor, siting: Siting) -> Tensor:
    """Double the number of columns."""
    if siting == "center":
        return _doubled(chroma, -1)
    after = chroma[..., 1:].cat(chroma[..., -1:], dim=-1)
    return Tensor.stack(chroma, (chroma + after) * 0.5, dim=-1).flatten(-2)


def _doubled(chroma: Tensor, axis: int) -> Tensor:
    """Double an axis: each old sample lies in the middle of two new ones."""
    chroma = chroma.transpose(axis, -1)
    before = chroma[..., :1].cat(chroma[..., :-1], dim=-1)
    after = chroma[..., 1:].cat(chroma[..., -1:], dim=-1)
    near = chroma * 0.75
    both = Tensor.stack(near + before * 0.25, near + after * 0.25, dim=-1)
    return both.flatten(-2).transpose(axis, -1)


def _size(frames: Tensor) -> tuple[int, int]:
    """Return height and width of the pictures."""
    if frames.dtype != dtypes.uint8 or frames.ndim < 2:
        raise InvalidArgument(
            f"frames must be uint8 of (..., H * 3 / 2, W); found {frames.dtype.name} "
            f"of {tuple(frames.shape)}"
        )
    rows, width = frames.shape[-2:]
    if rows % 3 or width % 2 or not rows or not width:
        raise InvalidArgument(
            f"{rows} rows of {width} are not a YUV 4:2:0 frame: expected H * 3 / 2 rows of W, "
            "H and W even"
        )
    return int(rows) // 3 * 2, int(width)


def _check(name: str, value: object, kind: object) -> None:
    if value not in get_args(kind):
        known = ", ".join(repr(choice) for choice in get_args(kind))
        raise InvalidArgument(f"{name} must be one of {known}; found {value!r}")
