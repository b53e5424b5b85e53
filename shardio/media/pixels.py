"""Orient, convert and copy decoded pixels: EXIF for images, swscale for frames of video.

EXIF numbers eight orientations of a picture: 1 is upright; 2 to 4 are mirrored, upside down or
both; 5 to 8 are transposed, so height and width are swapped.

With swscale's flags "accurate" and "bit-exact", the result is the same on all machines of an
architecture. If a frame does not declare its range or matrix, limited range and BT.601 are assumed,
as in FFmpeg.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.reformatter import VideoReformatter
    from typing_extensions import Buffer

UPRIGHT = 1
TRANSPOSED = 5  # height and width are swapped in this orientation and all higher ones

_TAG = 0x0112
_SHORT, _LONG = 3, 4  # the integer types of EXIF; some writers use LONG instead of SHORT
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_EXIF_PREFIX = b"Exif\0\0"


def exif_orientation(exif: bytes) -> int:
    """Return the orientation in EXIF data; 1 if the orientation is missing or invalid."""
    block = exif.removeprefix(_EXIF_PREFIX)
    order = _BYTE_ORDERS.get(block[:4])
    if order is None:
        return UPRIGHT
    try:
        (at,) = struct.unpack_from(order + "I", block, 4)
        (n_entries,) = struct.unpack_from(order + "H", block, at)
        for entry in range(at + 2, at + 2 + 12 * n_entries, 12):
            tag, kind = struct.unpack_from(order + "HH", block, entry)
            if tag == _TAG and kind in (_SHORT, _LONG):
                (found,) = struct.unpack_from(order + "HI"[kind == _LONG], block, entry + 8)
                return int(found) if found in range(1, 9) else UPRIGHT
    except struct.error:
        pass  # the data is truncated
    return UPRIGHT


def turn_upright(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Return a view of pixels (height x width x channels) that is rotated and mirrored upright."""
    if orientation >= TRANSPOSED:
        pixels = pixels.transpose(1, 0, 2)
    down = -1 if orientation in (3, 4, 7, 8) else 1
    right = -1 if orientation in (2, 3, 6, 7) else 1
    return pixels[::down, ::right]


Pixels = npt.NDArray[np.uint8]

_UINT8 = np.dtype(np.uint8)


def to_output(pixels: Pixels, out: Pixels | None) -> Pixels:
    """Copy pixels into `out` and return `out`; if `out` is None, return C-contiguous pixels."""
    if out is None:
        return np.ascontiguousarray(pixels)
    check_out(out, pixels.shape)
    np.copyto(out, pixels)
    return out


def check_out(out: Pixels, shape: tuple[int, ...]) -> None:
    """Raise InvalidArgument unless `out` is writable C-contiguous uint8 of this shape."""
    flags = out.flags
    if out.shape == shape and out.dtype == _UINT8 and flags.carray:
        return
    kind = "" if flags.writeable else "read-only "
    kind += "" if flags.c_contiguous else "strided "
    raise InvalidArgument(
        f"out: expected writable C-contiguous uint8 of shape {shape}, "
        f"found {kind}{out.dtype} of shape {out.shape}"
    )


_FULL_RANGE = 2
MATRICES = {"bt709": 1, "fcc": 4, "bt601": 5, "smpte240m": 7, "bt2020": 9}
"""The numbers by which FFmpeg identifies colour matrices."""
_NAMES = {number: name for name, number in MATRICES.items()}
RANGES = {"limited": 1, "full": 2}
"""The numbers by which FFmpeg identifies colour ranges."""


def is_full_range(frame: VideoFrame) -> bool:
    """Return True if the frame has full range, in which black is 0 instead of 16."""
    return frame.color_range == _FULL_RANGE or frame.format.name.startswith("yuvj")


def matrix_name(frame: VideoFrame) -> str:
    """Return the name of the matrix that converts the frame's colours to RGB."""
    return _NAMES.get(frame.colorspace, "bt601")


def display_matrix(frame: VideoFrame) -> bytes | None:
    """Return the matrix of a frame's rotation and mirroring, nine int32, or None."""
    data = cast("Buffer | None", frame.side_data.get("DISPLAYMATRIX"))
    return bytes(data) if data is not None else None


def frame_facts(frame: VideoFrame) -> dict[str, Any]:
    """Return properties of the first frame of a stream: stored size, format, colours, rotation."""
    facts: dict[str, Any] = {
        "width": frame.width,
        "height": frame.height,
        "pixel_format": frame.format.name,
    }
    if not frame.format.is_rgb:
        facts["range"] = "full" if is_full_range(frame) else "limited"
        facts["matrix"] = matrix_name(frame)
    if frame.rotation:
        facts["rotation"] = frame.rotation
    return facts


FrameFormat = tuple[int, int, str, int, int]
"""Width, height, pixel format, matrix and range of a frame, which determine its conversion."""


def frame_format(frame: VideoFrame) -> FrameFormat:
    """Return the format of a frame."""
    return frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range


Planes = tuple[Any, ...]
"""The planes of a frame. They are buffers, but PyAV's types do not say so."""

_RESERVED_MATRIX = 3  # writers use this value for "unspecified", but swscale does not accept it
_BT601 = MATRICES["bt601"]
# The formats that swscale converts to planes of RGB five times as fast as to packed RGB. A test
# checks that the values are the same, except for the pictures that `_converts_to_planes` excludes,
# such as those of odd height or width.
_PLANAR_FORMATS = frozenset(
    f"yuv{j}{chroma}p{deep}"
    for j, deep in (("", ""), ("j", ""), ("", "10le"))
    for chroma in ("420", "422", "444")
)


class FrameConverter:
    """A converter of frame sizes and colours. It reuses swscale contexts.

    Creating a context takes three times as long as converting a frame.
    """

    def __init__(self) -> None:
        from av.video.reformatter import Interpolation, VideoReformatter

        self._create_reformatter = VideoReformatter
        self._reformatters: dict[tuple[str, str], VideoReformatter] = {}
        # Convert the flags to int. Otherwise PyAV looks up their combination in its enum for every
        # frame.
        self._flags = int(
            Interpolation.BILINEAR
            | Interpolation.ACCURATE_RND
            | Interpolation.BITEXACT
            | Interpolation.FULL_CHR_H_INT
            | Interpolation.FULL_CHR_H_INP
        )
        self._fast_flags = int(Interpolation.BILINEAR)
        self._alpha: dict[str, bool] = {}

    def rgb(
        self, frame: VideoFrame, width: int, height: int, *, is_fast: bool = False
    ) -> tuple[Callable[[VideoFrame], Planes], tuple[int, ...]]:
        """Return a function that scales frames and makes them RGB; also return a tuple of channels.

        The function accepts all frames with the format of `frame`, and returns planes. The tuple
        lists the channel of each plane; it is empty for a single plane with interleaved channels.

        If `is_fast`, 8-bit 4:2:0 that is not scaled is converted in a sixth of the time: the four
        pixels that share chroma get the same chroma, without interpolation, and rounding is less
        exact.
        """
        if self._has_alpha(frame):

            def blend(each: VideoFrame) -> Planes:
                opaque = self._blend_over_black(each)
                return self._reformat(opaque, width, height, "rgb24")(opaque)

            return blend, ()
        if is_fast and _converts_fast(frame, width, height):
            return self._reformat(frame, width, height, "rgb24", self._fast_flags), ()
        if _converts_to_planes(frame, height):
            return self._reformat(frame, width, height, "gbrp"), (1, 2, 0)
        return self._reformat(frame, width, height, "rgb24"), ()

    def _reformat(
        self, frame: VideoFrame, width: int, height: int, target: str, flags: int | None = None
    ) -> Callable[[VideoFrame], Planes]:
        matrix = _BT601 if frame.colorspace == _RESERVED_MATRIX else None
        ranges_and_tags, n_threads = (None,) * 4, 1
        reformat = self._reformatter(frame, target).reformat
        options: tuple[Any, ...] = (width, height, target, matrix, matrix, flags or self._flags)
        options += (*ranges_and_tags, n_threads)
        return lambda each: reformat(each, *options).planes

    def yuv(
        self, frame: VideoFrame, width: int, height: int, chroma: str = "yuv420p"
    ) -> VideoFrame:
        """Scale and convert a frame to 8-bit YUV of BT.601 in limited range, of format `chroma`.

        Return `frame` itself if nothing has to change.
        """
        full = is_full_range(frame)
        if (frame.width, frame.height, frame.format.name) == (width, height, chroma) and not full:
            if matrix_name(frame) == "bt601":
                return frame
        if self._has_alpha(frame):
            frame = self._blend_over_black(frame)
        is_rgb = frame.format.is_rgb
        return self._reformatter(frame, chroma).reformat(
            frame,
            width,
            height,
            chroma,
            None if is_rgb else MATRICES[matrix_name(frame)],
            _BT601,
            self._flags,
            RANGES["full" if full or is_rgb else "limited"],
            RANGES["limited"],
            threads=1,
        )

    def _reformatter(self, frame: VideoFrame, target: str) -> VideoReformatter:
        key = (frame.format.name, target)
        found = self._reformatters.get(key)
        if found is None:
            found = self._reformatters[key] = self._create_reformatter()
        return found

    def _has_alpha(self, frame: VideoFrame) -> bool:
        name = frame.format.name
        if name not in self._alpha:
            parts = frame.format.components
            self._alpha[name] = frame.format.has_palette or any(part.is_alpha for part in parts)
        return self._alpha[name]

    def _blend_over_black(self, frame: VideoFrame) -> VideoFrame:
        """Blend a frame over black: scaling would mix in hidden colours of transparent pixels."""
        from av import VideoFrame

        rgba = frame.to_ndarray(format="rgba")
        alpha = rgba[..., 3:]
        if alpha.min() == 255:
            return frame
        blended = (rgba[..., :3].astype(np.uint16) * alpha + 127) // 255
        return VideoFrame.from_ndarray(blended.astype(np.uint8), format="rgb24")


def _converts_fast(frame: VideoFrame, width: int, height: int) -> bool:
    is_whole = (frame.width, frame.height) == (width, height) and not (width | height) & 1
    return is_whole and frame.format.name in ("yuv420p", "yuvj420p")


def _converts_to_planes(frame: VideoFrame, height: int) -> bool:
    if height > frame.height or height < 8 or (frame.width | frame.height) & 1:
        return False
    return frame.format.name in _PLANAR_FORMATS


def plane_rows(plane: Any, height: int, n_bytes: int) -> Pixels:
    """Return a view of the first `height` rows of a plane, as rows of `n_bytes` bytes."""
    return np.ndarray((height, n_bytes), np.uint8, plane, 0, (plane.line_size, 1))
