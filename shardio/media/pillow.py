"""Decode still pictures other than JPEG with Pillow, to upright 8-bit grey or RGB; resample pixels.

Only the formats in `FORMATS` are tried. EPS is not among them, because Pillow runs Ghostscript to
decode it. Neither is JPEG 2000, because Pillow decodes a truncated file to black without an error.
Pillow checks only some checksums of a PNG; this module checks all.
"""

from __future__ import annotations

import functools
import io
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from shardio.errors import InvalidArgument, MediaError, import_extra
from shardio.media.pixels import UPRIGHT, Pixels, exif_orientation, to_output, turn_upright

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "QOI")
_PNG = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {"1": 1, "L": 1, "LA": 2, "La": 2, "RGBA": 4, "RGBa": 4, "PA": 4, "CMYK": 4}
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}


@contextmanager
def open_picture(data: bytes | memoryview) -> Iterator[Image]:
    """Open a picture; turn any exception within the `with` block into MediaError.

    Pillow raises more types of exceptions for invalid data than its documentation lists.
    """
    image = pillow_image()
    try:
        with image.open(io.BytesIO(data), formats=FORMATS) as picture:
            yield picture
    except (MediaError, MemoryError):
        raise
    except image.UnidentifiedImageError as error:
        raise MediaError(
            f"not a picture in a known format ({', '.join(('JPEG', *FORMATS))}): "
            f"its {len(data)} bytes begin with {bytes(data[:12]).hex(' ') or 'nothing'}"
        ) from error
    except Exception as error:
        raise MediaError(f"the picture does not decode: {error or type(error).__name__}") from error


def header_channels(picture: Image, data: bytes | memoryview) -> int:
    """Return the number of channels in the file; for a palette, the channels of its colours."""
    if picture.format == "PNG":  # Pillow's mode for 16-bit grey with alpha is RGBA
        return _PNG_CHANNELS[data[25]] + ("transparency" in picture.info)
    mode, transparent = picture.mode, picture.has_transparency_data
    if mode == "P" or mode[0] in "IF":
        return (3 if mode == "P" else 1) + transparent
    channels = _CHANNELS.get(mode, 3)
    return channels + ("transparency" in picture.info and channels in (1, 3))


def orientation(picture: Image) -> int:
    """Return the EXIF orientation (1 to 8) of a picture. Pillow itself turns a TIFF upright."""
    if picture.format == "TIFF":
        found = picture.getexif().get(0x0112, UPRIGHT)
        return int(found) if found in range(1, 9) else UPRIGHT
    exif = picture.info.get("exif")
    return exif_orientation(exif) if isinstance(exif, bytes) else UPRIGHT


def decode_pixels(picture: Image, data: bytes | memoryview, channels: int) -> Pixels:
    """Decode the first frame, blended over black, to upright pixels of 1 or 3 channels."""
    turned = orientation(picture) if picture.format != "TIFF" else UPRIGHT
    picture.load()
    if picture.format == "PNG":
        _scale_transparent_color(picture, data[24])
    flat = _flatten(picture)
    if flat.shape[2] > channels:
        # The luma of BT.601, which is also the first component of a JPEG.
        flat = np.asarray(pillow_image().fromarray(flat).convert("L"))[..., np.newaxis]
    shape = (*flat.shape[:2], channels)
    return turn_upright(np.broadcast_to(flat, shape), turned)


def _flatten(picture: Image) -> Pixels:
    """Convert a picture in any of Pillow's modes to 8-bit grey or RGB."""
    if picture.mode[0] in "IF":
        return _high_bytes_of_grey(picture)
    if picture.has_transparency_data:
        rgba = np.asarray(picture.convert("RGBA"))
        alpha = rgba[..., 3:]
        # Blend over black, as for video frames, because the colour of transparent pixels is
        # meaningless.
        blended: Pixels = ((rgba[..., :3].astype(np.uint16) * alpha + 127) // 255).astype(np.uint8)
        return blended
    if picture.mode in ("1", "L"):
        return np.asarray(picture.convert("L"))[..., np.newaxis]
    return np.asarray(picture.convert("RGB"))


def _scale_transparent_color(picture: Image, bits: int) -> None:
    """Adapt the transparent colour of a PNG to 8 bits, because Pillow converts only the pixels."""
    key = picture.info.get("transparency")
    if key is None:
        return
    if picture.mode == "L" and bits < 8:
        picture.info["transparency"] = key * 255 // (2**bits - 1)
    elif picture.mode == "RGB" and bits == 16:
        # Ignore the transparent colour: reduced to 8 bits, other colours could become equal to it.
        del picture.info["transparency"]


def _high_bytes_of_grey(picture: Image) -> Pixels:
    """Return the upper 8 bits of 16-bit grey, as Pillow and libpng reduce 16-bit colours."""
    if picture.mode[:4] != "I;16" and picture.format != "PPM":
        raise MediaError(
            f"a {picture.format} of 32-bit numbers ({picture.mode}): black and "
            "white are not defined; store it as an array, or as 8 or 16 bits"
        )
    deep = np.asarray(picture)
    grey = deep >> 8
    key = picture.info.get("transparency")
    if isinstance(key, int):
        grey = np.where(deep == key, 0, grey)
    return grey.astype(np.uint8)[..., np.newaxis]


def check_png_checksums(data: bytes | memoryview) -> None:
    """Check the checksums of all chunks of a PNG up to IEND; do nothing for other formats."""
    if data[:8] != _PNG:
        return
    at = 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        kind = bytes(data[at + 4 : at + 8])
        end = at + 8 + size
        stored = int.from_bytes(data[end : end + 4], "big")
        if end + 4 > len(data):
            break
        found = zlib.crc32(data[at + 4 : end])
        if found != stored:
            raise MediaError(
                f"PNG: the chunk {kind!r} at offset {at} is damaged: expected CRC {stored:#010x}, "
                f"found {found:#010x}"
            )
        if kind == b"IEND":
            return
        at = end + 4
    raise MediaError(f"PNG: its {len(data)} bytes end within the chunk at offset {at}")


@functools.cache
def pillow_image() -> ModuleType:
    """Import Pillow's module Image; raise UnsupportedEnvironment if it is not installed."""
    module: ModuleType = import_extra("pictures need Pillow", "images", "PIL", "PIL.Image").Image
    return module


_MAX_SIDE = 16384


def resize(pixels: Pixels, size: tuple[int, int], *, out: Pixels | None = None) -> Pixels:
    """Resize uint8 pixels, height x width x 3 (RGB) or 1 (grey), to `size` (height, width).

    Resampling is bilinear with antialiasing, and gives the same bytes on every run and machine.
    If `out` is not None, it is filled and returned; it must be C-contiguous uint8 of the new shape.

    Raises:
        InvalidArgument: the pixels, the size or `out` is invalid.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise InvalidArgument(
            "resize: expected uint8 pixels of height x width x 3 or 1, found "
            f"{pixels.dtype} of {pixels.shape}"
        )
    if not pixels.size:
        raise InvalidArgument(f"resize: expected at least one pixel, found {pixels.shape}")
    return resample(pixels, (0, 0, *pixels.shape[:2]), size, out)


def resample(
    pixels: Pixels,
    box: tuple[float, float, float, float],
    size: tuple[int, int],
    out: Pixels | None,
) -> Pixels:
    """Resample a part of a picture, (top, left, height, width), to `size` (height, width).

    The numbers of `box` may be fractional. Only pixels within the box contribute to the result.
    """
    if not all(0 < side <= _MAX_SIDE for side in size):
        raise InvalidArgument(f"size: expected height and width of 1 to {_MAX_SIDE}, found {size}")
    top, left, height, width = box
    first_row, first_column = math.floor(top), math.floor(left)
    part = pixels[first_row : math.ceil(top + height), first_column : math.ceil(left + width)]
    if part.shape[:2] == size == (height, width):
        return to_output(part, out) if out is not None else part.copy()
    x, y = left - first_column, top - first_row
    image = pillow_image()
    grey = pixels.shape[2] == 1
    picture = image.fromarray(np.ascontiguousarray(part[..., 0] if grey else part))
    within = x, y, x + width, y + height
    small = np.asarray(picture.resize((size[1], size[0]), image.Resampling.BILINEAR, within))
    return to_output(small[..., np.newaxis] if grey else small, out)


def rotate(
    pixels: Pixels, degrees: float, interpolation: str, fill: tuple[int, int, int]
) -> Pixels:
    """Return RGB pixels, rotated counterclockwise around their centre; the size stays the same.

    `interpolation` is "nearest" or "bilinear"; `fill` is the colour of pixels from outside.
    """
    image = pillow_image()
    kernel = image.Resampling[interpolation.upper()]
    picture = image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(picture.rotate(degrees, kernel, fillcolor=fill))
