"""Probe, decode and crop still pictures, and encode JPEG.

docs/reference/images.md documents the conversion of grey, alpha, CMYK, palettes, 16 bits, several
frames, orientation and colour profiles.

A truncated or damaged picture is an error, even if viewers show the intact part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardio.errors import InvalidArgument, MediaError
from shardio.media import jpeg, pillow
from shardio.media.pillow import resample
from shardio.media.pixels import TRANSPOSED, Pixels, check_out, to_output, turn_upright

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ImageFacts",
    "MAX_PIXELS",
    "decode_crop",
    "decode_image",
    "encode_jpeg",
    "has_image_signature",
    "has_image_suffix",
    "probe",
]


_SUFFIXES = frozenset(
    ".avif .bmp .dib .gif .heic .heif .jfif .jp2 .jpe .jpeg .jpg .jxl .pbm .pgm .png .pnm .ppm .qoi"
    " .tif .tiff .webp".split()
)
_STARTS = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF87a",
    b"GIF89a",
    b"II*\0",
    b"MM\0*",
    b"qoif",
)
_STILL_BRANDS = frozenset((b"avif", b"avis", b"heic", b"heix", b"mif1"))


def has_image_suffix(name: str) -> bool:
    """Return True if `name` has a suffix of still pictures."""
    return PurePath(name).suffix.lower() in _SUFFIXES


def has_image_signature(head: bytes) -> bool:
    """Return True if a file's first 16 bytes (or fewer) are those of a still picture.

    Formats with a signature of only two letters (BMP, PPM) are recognised by their suffix instead.
    """
    if head[:4] == b"RIFF":
        return head[8:12] == b"WEBP"
    if head[4:8] == b"ftyp":
        return head[8:12] in _STILL_BRANDS
    return head.startswith(_STARTS)


# Pillow's own limit. A picture of this size takes 0.5 GB as RGB; its file may have a few KB.
MAX_PIXELS = 178_956_970
_CHANNELS = {"rgb": 3, "grey": 1}
_SUBSAMPLINGS = ("444", "422", "420", "440", "411")


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The properties in a picture's header; `height` and `width` are of the upright picture.

    `channels` is 1 (grey), 2 (grey and alpha), 3 (RGB), or 4 (RGBA or CMYK); for a palette, it is
    the number of channels of the colours. `bits` is the depth of each channel; `orientation` is
    EXIF's number, 1 to 8.
    """

    format: str
    height: int
    width: int
    channels: int
    bits: int
    orientation: int

    def decoded_size(self, min_size: tuple[int, int] | None) -> tuple[int, int]:
        """Return height and width of the result of `decode_image` for `min_size`."""
        if min_size is None or self.format != "JPEG":
            return self.height, self.width
        divisor = jpeg.scale_divisor(self.height, self.width, min_size)
        return -(-self.height // divisor), -(-self.width // divisor)


def probe(data: Buffer) -> ImageFacts:
    """Read a picture's header; no pixel is decoded.

    Raises:
        MediaError: the format is unknown, the header is truncated or invalid, or the picture has
            more than `MAX_PIXELS`.
    """
    view = _view(data)
    if jpeg.is_jpeg(view):
        header = _header(view)
        return ImageFacts("JPEG", *header.shown, header.components, header.bits, header.orientation)
    with pillow.open_picture(view) as picture:
        turned = pillow.orientation(picture)
        width, height = picture.size
        _check_size(height, width)
        if turned >= TRANSPOSED and picture.format != "TIFF":  # Pillow has rotated a TIFF
            height, width = width, height
        channels, bits = pillow.header_channels_and_bits(picture, view)
        return ImageFacts(picture.format or "", height, width, channels, bits, turned)


def decode_image(
    data: Buffer,
    *,
    out: Pixels | None = None,
    mode: Literal["rgb", "grey"] = "rgb",
    min_size: tuple[int, int] | None = None,
) -> Pixels:
    """Decode a picture to upright uint8 pixels, height x width x 3 (`"grey"`: 1).

    Args:
        data: the bytes of a file.
        out: an array to fill and return: uint8, C-contiguous, of the picture's shape. An upright
            JPEG is decoded directly into `out`. After an error, the contents of `out` are
            undefined. None allocates an array.
        mode: "rgb" for three channels, "grey" for one.
        min_size: the minimum (height, width). To save time, a JPEG is decoded at the smallest of
            full, half, quarter and eighth size that is not below `min_size`. Other formats are
            decoded at full size.

    Raises:
        MediaError: the picture is damaged, truncated, too large or in an unknown format.
        InvalidArgument: an option is invalid, or `out` does not fit.
    """
    channels = _CHANNELS.get(mode)
    if channels is None:
        raise InvalidArgument(f"mode: expected one of {', '.join(_CHANNELS)}, found {mode!r}")
    view = _view(data)
    if not jpeg.is_jpeg(view):
        with pillow.open_picture(view) as picture:
            _check_size(*picture.size)
            pillow.check_png_checksums(view)
            found = pillow.decode_pixels(picture, view, channels)
        return to_output(found, out)
    header = _header(view)
    if out is not None and min_size is None and header.orientation == 1 and not header.progressive:
        # A fast path for most pictures, which saves 10 µs of Python per picture.
        height, width = header.height, header.width
        check_out(out, (height, width, channels))
        return jpeg.decode(view, height=height, width=width, channels=channels, out=out)
    divisor = 1 if min_size is None else jpeg.scale_divisor(*header.shown, min_size)
    return _jpeg_pixels(view, header, divisor, channels=channels, out=out)


def decode_crop(
    data: Buffer,
    box: tuple[int, int, int, int],
    size: tuple[int, int],
    *,
    out: Pixels | None = None,
) -> Pixels:
    """Decode the part `box` of a picture, resampled to `size`: uint8 height x width x 3, RGB.

    `box` is (top, left, height, width) in display pixels; `size` is (height, width). A JPEG is
    decoded at the smallest size (see `min_size` of `decode_image`) at which the part is not below
    `size`. Resampling is bilinear with antialiasing, and gives the same bytes on every run. `out`
    is as in `decode_image`.

    Raises:
        MediaError: the picture is damaged, truncated, too large or in an unknown format.
        InvalidArgument: `box` is not within the picture, an option is invalid, or `out` does not
            fit.
    """
    view = _view(data)
    divisor = 1
    if jpeg.is_jpeg(view):
        header = _header(view)
        _check_box(box, header.shown)
        divisor = jpeg.scale_divisor(box[2], box[3], size)
        whole = _jpeg_pixels(view, header, divisor, channels=3, out=None)
    else:
        whole = decode_image(view)
        _check_box(box, whole.shape[:2])
    top, left, height, width = (edge / divisor for edge in box)
    return resample(whole, (top, left, height, width), size, out)


def encode_jpeg(
    pixels: Pixels,
    *,
    quality: int = 90,
    subsampling: Literal["444", "422", "420", "440", "411"] = "420",
) -> bytes:
    """Encode uint8 pixels, height x width x 3 (RGB) or 1 (grey), as a JPEG file.

    `quality` is libjpeg's, 1 to 100; `subsampling` is the chroma subsampling (`"444"` for none).

    Raises:
        InvalidArgument: the pixels or an option are invalid.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise InvalidArgument(
            "encode_jpeg: expected uint8 pixels of height x width x 3 or 1, found "
            f"{pixels.dtype} of {pixels.shape}"
        )
    if not all(0 < side <= 65500 for side in pixels.shape[:2]):
        raise InvalidArgument(
            f"encode_jpeg: a JPEG is 1 to 65500 pixels high and wide, found {pixels.shape}"
        )
    if quality not in range(1, 101):
        raise InvalidArgument(f"encode_jpeg: quality is 1 to 100, found {quality!r}")
    if subsampling not in _SUBSAMPLINGS:
        raise InvalidArgument(
            f"encode_jpeg: subsampling is one of {', '.join(_SUBSAMPLINGS)}, found {subsampling!r}"
        )
    return jpeg.compress(np.ascontiguousarray(pixels), quality, subsampling)


def _jpeg_pixels(
    view: bytes | memoryview,
    header: jpeg.JpegHeader,
    divisor: int,
    *,
    channels: int,
    out: Pixels | None,
) -> Pixels:
    if header.progressive:
        jpeg.check_scans(view)
    height, width = header.height, header.width
    if divisor > 1:
        height, width = -(-height // divisor), -(-width // divisor)
    if header.orientation == 1:
        if out is not None:
            check_out(out, (height, width, channels))
        return jpeg.decode(view, height=height, width=width, channels=channels, out=out)
    stored = jpeg.decode(view, height=height, width=width, channels=channels, out=None)
    return to_output(turn_upright(stored, header.orientation), out)


def _view(data: Buffer) -> bytes | memoryview:
    return data if type(data) is bytes else memoryview(data).cast("B")


def _header(view: bytes | memoryview) -> jpeg.JpegHeader:
    header = jpeg.read_header(view)
    if header.height * header.width > MAX_PIXELS:
        _check_size(header.height, header.width)
    return header


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS or not height or not width:
        raise MediaError(f"a picture of {height}x{width} pixels: expected 1 to {MAX_PIXELS} pixels")


def _check_box(box: tuple[int, int, int, int], shown: tuple[int, ...]) -> None:
    top, left, height, width = box
    if top < 0 or left < 0 or height < 1 or width < 1:
        fits = False
    else:
        fits = top + height <= shown[0] and left + width <= shown[1]
    if not fits:
        raise InvalidArgument(
            f"box: {height}x{width} pixels at row {top}, column {left} are not within the "
            f"picture's {shown[0]}x{shown[1]}"
        )
