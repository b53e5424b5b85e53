"""Contact sheets, and files of pictures and animations, which are written atomically.

Drawing needs Pillow, from the extra `images`. The suffix determines the format: GIF, WebP, PNG (as
APNG) and MP4 support animations, JPEG does not.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import os
import secrets
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

import shardio
from shardio.media import pillow_image
from shardio_tools.inspect.frames import Pixels, Size
from shardio_tools.output import escaped

if TYPE_CHECKING:
    from av import VideoStream
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont, ImageFont

GAP: Final = 4
CAPTION: Final = 16
"""GAP is the space between tiles, CAPTION the height of a line of text; both in pixels."""
_MIN_SIDE: Final = 96
"""Minimum side of a tile, to fit its caption."""
_LETTERS: Final = 11
_WIDE: Final = 1.5
"""Ratio of columns to rows."""
_PAPER, _INK, _MARK, _EMPTY = (24, 24, 24), (225, 225, 225), (224, 64, 48), (60, 60, 60)


def draw_sheet(tiles: Sequence[tuple[str, Pixels | None]], side: int) -> Pixels:
    """Draw tiles of at most `side` x `side` pixels in rows; return RGB pixels.

    A tile is a caption and a picture; None is drawn as a crossed-out picture. Small pictures are
    enlarged by an integer factor; all tiles are as large as the largest picture.
    """
    image = pillow_image()
    from PIL import ImageDraw

    pictures = [None if pixels is None else enlarged(pixels, side) for _, pixels in tiles]
    largest = max((max(one.shape[:2]) for one in pictures if one is not None), default=0)
    side = min(side, max(largest, _MIN_SIDE))
    n_columns = max(1, min(len(tiles), math.ceil(math.sqrt(len(tiles) * _WIDE))))
    n_rows = -(-len(tiles) // n_columns)
    step = side + GAP, side + GAP + CAPTION
    canvas = image.new("RGB", (GAP + n_columns * step[0], GAP + n_rows * step[1]), _PAPER)
    draw = ImageDraw.Draw(canvas)
    for i, ((caption, _), found) in enumerate(zip(tiles, pictures, strict=True)):
        pixels = placeholder((side, side)) if found is None else found
        left = GAP + i % n_columns * step[0]
        top = GAP + i // n_columns * step[1]
        height, width = pixels.shape[:2]
        canvas.paste(image_of(pixels), (left + (side - width) // 2, top + (side - height) // 2))
        draw.text((left, top + side + 1), _written(caption, side), _INK, _font())
    return np.asarray(canvas)


def placeholder(size: Size) -> Pixels:
    """Draw the placeholder for a frame that cannot be shown, a crossed-out picture."""
    canvas = pillow_image().new("RGB", (size[1], size[0]), _EMPTY)
    from PIL import ImageDraw

    draw, right, bottom = ImageDraw.Draw(canvas), size[1] - 1, size[0] - 1
    width = max(1, min(right, bottom) // 40)
    draw.line((0, 0, right, bottom), fill=_MARK, width=width)
    draw.line((0, bottom, right, 0), fill=_MARK, width=width)
    draw.rectangle((0, 0, right, bottom), outline=_MARK, width=width)
    return np.asarray(canvas)


def enlarged(pixels: Pixels, side: int) -> Pixels:
    """Enlarge pixels by the largest integer factor that keeps the longest side within `side`."""
    factor = side // max(pixels.shape[:2])
    return pixels if factor < 2 else pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def _written(text: str, width: int) -> str:
    """Return `text` shortened to `width` pixels, with characters missing in the font escaped."""
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
    except ImportError:  # without FreeType, Pillow has one font size
        return ImageFont.load_default()


def image_of(pixels: Pixels) -> Image:
    """Return a Pillow image of RGB pixels."""
    found: Image = pillow_image().fromarray(np.ascontiguousarray(pixels))
    return found


def quantized(pixels: Pixels) -> Image:
    """Return an image in 256 colours; 50 times as fast as Pillow's default, and 1 dB worse."""
    return image_of(pixels).quantize(256, method=pillow_image().Quantize.FASTOCTREE)


STILLS: Final = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".gif": "GIF"}
MOVING: Final = (".gif", ".webp", ".png", ".mp4")
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "JPEG": {"quality": 92},
    "WEBP": {"quality": 92, "method": 4},
}
_SHORTEST_MS: Final = 10
"""The time unit of GIF, and the shortest duration of a frame."""
_MANIFEST: Final = "dataset.json"


def check_target(path: str, source: str, *, may_replace: bool) -> None:
    """Check that a picture of `source` may be written to `path`."""
    known = sorted({*STILLS, *MOVING})
    if suffix_of(path) not in known:
        raise shardio.InvalidArgument(
            f"{path}: unknown picture suffix; expected one of {', '.join(known)}"
        )
    folder = Path(os.path.realpath(path)).parent
    root = Path(os.path.realpath(source))
    for above in (folder, *folder.parents):
        if above == root or (above / _MANIFEST).is_file():
            raise shardio.InvalidArgument(
                f"{path}: {above} is a dataset folder: name another folder"
            )
    if not folder.is_dir():
        raise shardio.InvalidArgument(f"{path}: folder {folder} not found")
    if os.path.isdir(path) or (os.path.lexists(path) and not may_replace):
        raise shardio.InvalidArgument(f"{path}: already exists: pass --overwrite to replace a file")


def suffix_of(path: str) -> str:
    """Return the suffix of a name in lower case, with its dot."""
    return os.path.splitext(path)[1].lower()


def encoded_still(pixels: Pixels, suffix: str) -> bytes:
    """Encode RGB pixels in the format of `suffix`, one of `STILLS`."""
    out, kind = io.BytesIO(), STILLS[suffix]
    image_of(pixels).save(out, kind, **_OPTIONS.get(kind, {}))
    return out.getvalue()


def encoded_animation(frames: Sequence[Pixels], rate: float, suffix: str) -> bytes:
    """Encode RGB frames of one size in the format of `suffix`, one of `MOVING`.

    `rate` is the number of frames per second. GIF, WebP and PNG loop.
    """
    duration_ms = max(_SHORTEST_MS, round(1000 / rate))
    if suffix == ".mp4":
        return _encoded_film(frames, duration_ms)
    out, kind = io.BytesIO(), STILLS[suffix]
    first, *others = map(quantized if kind == "GIF" else image_of, frames)
    first.save(
        out,
        kind,
        save_all=True,
        append_images=others,
        duration=duration_ms,
        loop=0,
        **_OPTIONS.get(kind, {}),
    )
    return out.getvalue()


def _encoded_film(frames: Sequence[Pixels], duration_ms: int) -> bytes:
    """Encode frames with even sides as H.264, or MPEG-4 if FFmpeg was built without x264."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        name = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        stream = cast("VideoStream", container.add_stream(name, rate=25))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i * duration_ms, Fraction(1, 1000)
            frame.duration = duration_ms
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def write_whole(path: str, data: bytes, *, may_replace: bool) -> None:
    """Write a file atomically."""
    part = f"{path}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb") as file:
            file.write(data)
        if may_replace:
            os.replace(part, path)
        else:
            _name(part, path)
    except FileExistsError as error:
        raise shardio.InvalidArgument(
            f"{path}: already exists: pass --overwrite to replace a file"
        ) from error
    except OSError as error:
        error.filename = path
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


def _name(part: str, path: str) -> None:
    """Rename a file to `path`; raise FileExistsError if `path` exists."""
    try:
        os.link(part, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # Without hard links, a file that is created after this check is overwritten.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        os.rename(part, path)
