"""What a decoded frame says about itself: its matrix, its range, how it is to be turned.

What is untagged is taken as FFmpeg takes it: limited range, BT.601.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from av import VideoFrame
    from typing_extensions import Buffer

__all__ = ["MATRICES", "RANGES", "display_of", "is_full_range", "matrix_of", "stream_facts"]

_FULL_RANGE = 2
_NAMES = {1: "bt709", 4: "fcc", 7: "smpte240m", 9: "bt2020"}
MATRICES = {"bt709": 1, "fcc": 4, "bt601": 5, "smpte240m": 7, "bt2020": 9}
"""FFmpeg's numbers of the matrices."""
RANGES = {"limited": 1, "full": 2}
"""FFmpeg's numbers of the ranges."""


def is_full_range(frame: VideoFrame) -> bool:
    """Whether black is 0, not 16."""
    return frame.color_range == _FULL_RANGE or frame.format.name.startswith("yuvj")


def matrix_of(frame: VideoFrame) -> str:
    """The name of the matrix that takes the frame's colours to RGB."""
    return _NAMES.get(frame.colorspace, "bt601")


def display_of(frame: VideoFrame) -> bytes | None:
    """The display matrix of a frame, its rotation and mirroring: nine int32, as FFmpeg has them."""
    data = cast("Buffer | None", frame.side_data.get("DISPLAYMATRIX"))
    return bytes(data) if data is not None else None


def stream_facts(frame: VideoFrame) -> dict[str, Any]:
    """Say in JSON's terms what a stream's first frame is, and what of it has to be normalised."""
    facts: dict[str, Any] = {
        "width": frame.width,
        "height": frame.height,
        "pixel_format": frame.format.name,
    }
    if not frame.format.is_rgb:
        facts["range"] = "full" if is_full_range(frame) else "limited"
        facts["matrix"] = matrix_of(frame)
    if frame.rotation:
        facts["rotation"] = frame.rotation
    return facts
