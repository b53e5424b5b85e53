"""Probe, decode and crop still pictures, and encode JPEG and PNG.

libjpeg-turbo decodes JPEGs, directly into the caller's array; Pillow decodes other formats.
docs/reference/images.md describes what becomes of grey, alpha, CMYK, palettes, 16 bits, several
frames, orientation and colour profiles.

A truncated or damaged picture is an error, even if viewers show its intact part. libjpeg conceals
damage with a warning, so each of its warnings is an error. A JPEG has no checksum: a flipped bit
may change colours without an error.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.progress import format_sides
from shardio.errors import InvalidArgument, MediaError, import_extra
from shardio.media import pillow
from shardio.media.pillow import resample
from shardio.media.pixels import (
    TRANSPOSED,
    UPRIGHT,
    Pixels,
    check_out,
    exif_orientation,
    to_output,
    turn_upright,
)

if TYPE_CHECKING:
    from av import VideoFrame
    from typing_extensions import Buffer

_SUFFIXES = frozenset(
    ".avif .bmp .dib .gif .heic .heif .jfif .jp2 .jpe .jpeg .jpg .jxl .pbm .pgm .png .pnm .ppm .qoi"
    " .tif .tiff .webp".split()
)
_JPEG = b"\xff\xd8\xff"
_SIGNATURES = (_JPEG, b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"qoif")
_STILL_BRANDS = frozenset((b"avif", b"avis", b"heic", b"heix", b"mif1"))


def has_image_suffix(name: str) -> bool:
    """Return True if `name` has a suffix of still pictures."""
    return PurePath(name).suffix.lower() in _SUFFIXES


def has_image_signature(head: bytes) -> bool:
    """Return True if a file that begins with `head`, 16 bytes, is a still picture.

    The formats whose signature has only two letters (BMP, PPM) are recognised by suffix instead.
    """
    if head[:4] == b"RIFF":
        return head[8:12] == b"WEBP"
    if head[4:8] == b"ftyp":
        return head[8:12] in _STILL_BRANDS
    return head.startswith(_SIGNATURES)


# The maximum number of pixels, the same as Pillow's limit. A picture of this size takes 0.5 GB of
# memory as RGB, although its file may have only a few KB.
MAX_PIXELS = 178_956_970
_CHANNELS = {"rgb": 3, "grey": 1}
_SUBSAMPLINGS = ("444", "422", "420", "440", "411")


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The properties of a picture that its header contains.

    `height` and `width` are those of the upright picture. `channels` is 1 for grey, 2 for grey and
    alpha, 3 for RGB, 4 for RGBA or CMYK; for a palette, the channels of its colours. `orientation`
    is the number of the orientation in EXIF, from 1 to 8.
    """

    format: str
    height: int
    width: int
    channels: int
    orientation: int


def probe(data: Buffer) -> ImageFacts:
    """Read the header of a picture, without decoding any pixel.

    Raises:
        MediaError: the format is unknown, the header is truncated or invalid, or the picture has
            more than `MAX_PIXELS`.
    """
    view = _byte_view(data)
    if view[:3] == _JPEG:
        header = _read_header(view)
        return ImageFacts("JPEG", *header.upright_size, header.components, header.orientation)
    with pillow.open_picture(view) as picture:
        turned = pillow.orientation(picture)
        width, height = picture.size
        _check_size(height, width)
        if turned >= TRANSPOSED and picture.format != "TIFF":  # Pillow turns a TIFF upright itself
            height, width = width, height
        channels = pillow.header_channels(picture, view)
        return ImageFacts(picture.format or "", height, width, channels, turned)


def decode_image(
    data: Buffer,
    *,
    out: Pixels | None = None,
    mode: Literal["rgb", "grey"] = "rgb",
    min_size: tuple[int, int] | None = None,
) -> Pixels:
    """Decode a picture to upright pixels: uint8 of height x width x 3, or x 1 for `"grey"`.

    Args:
        data: the bytes of a file.
        out: an array to fill and return: uint8, C-contiguous, of the picture's shape. A JPEG that
            is stored upright is decoded directly into `out`. After an error, the contents of `out`
            are undefined. If `out` is None, a new array is returned.
        mode: "rgb" for three channels, "grey" for one.
        min_size: the minimum (height, width) of the result. To save time, a JPEG is decoded at an
            eighth, a quarter, a half or all of its size: at the smallest of these four sizes that
            is not below `min_size`. Other formats are decoded at full size.

    Raises:
        MediaError: the picture is damaged, truncated, too large or in an unknown format.
        InvalidArgument: an option is invalid, or `out` does not fit.
    """
    channels = _CHANNELS.get(mode)
    if channels is None:
        raise InvalidArgument(f"mode: expected one of {', '.join(_CHANNELS)}, found {mode!r}")
    view = _byte_view(data)
    if view[:3] != _JPEG:
        with pillow.open_picture(view) as picture:
            _check_size(*picture.size)
            pillow.check_png_checksums(view)
            found = pillow.decode_pixels(picture, view, channels)
        return to_output(found, out)
    header = _read_header(view)
    divisor = 1 if min_size is None else _scale_divisor(*header.upright_size, min_size)
    return _decode_jpeg(view, header, divisor, channels, out)


def decode_crop(
    data: Buffer,
    box: tuple[int, int, int, int],
    size: tuple[int, int],
    *,
    out: Pixels | None = None,
) -> Pixels:
    """Decode a part of a picture, and resample it to a size: RGB, uint8 of height x width x 3.

    `box` is the part, (top, left, height, width), in pixels of the upright picture. `size` is the
    (height, width) of the result. To save time, a JPEG is decoded at the smallest size (see
    `min_size` of `decode_image`) at which the part is at least as large as `size`. Resampling is
    bilinear with antialiasing, and gives the same bytes on every run. `out` is as in
    `decode_image`.

    Raises:
        MediaError: the picture is damaged, truncated, too large or in an unknown format.
        InvalidArgument: `box` is not within the picture, an option is invalid, or `out` does not
            fit.
    """
    view = _byte_view(data)
    divisor = 1
    if view[:3] == _JPEG:
        header = _read_header(view)
        _check_box(box, header.upright_size)
        divisor = _scale_divisor(box[2], box[3], size)
        whole = _decode_jpeg(view, header, divisor, 3, None)
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

    `quality` is the quality from 1 to 100 as libjpeg defines it. `subsampling` is the chroma
    subsampling; `"444"` means none.

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
    grey = pixels.shape[2] == 1
    return bytes(
        load_simplejpeg().encode_jpeg(
            np.ascontiguousarray(pixels),
            quality=quality,
            colorspace="GRAY" if grey else "RGB",
            colorsubsampling="Gray" if grey else subsampling,
        )
    )


def _byte_view(data: Buffer) -> bytes | memoryview:
    return data if type(data) is bytes else memoryview(data).cast("B")


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS or not height or not width:
        raise MediaError(f"a picture of {height}x{width} pixels: expected 1 to {MAX_PIXELS} pixels")


def _check_box(box: tuple[int, int, int, int], size: tuple[int, ...]) -> None:
    top, left, height, width = box
    starts_within = top >= 0 and left >= 0 and height >= 1 and width >= 1
    if not starts_within or top + height > size[0] or left + width > size[1]:
        raise InvalidArgument(
            f"box: {height}x{width} pixels at row {top}, column {left} are not within the "
            f"picture's {size[0]}x{size[1]}"
        )


_MARKER_AND_SIZE = struct.Struct(">HH")
_FRAME_HEADER = struct.Struct(">BHHB")
_APP1, _START_OF_SCAN, _END, _FILL = 0xFFE1, 0xFFDA, 0xFFD9, 0xFFFF
# The markers of frames. FFC4 and FFCC are markers of tables, and FFC8 is reserved.
_FRAME_MARKERS = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
# The markers of segments that are skipped: tables, comments and application data. APP1 is not among
# them, because it may contain EXIF.
_SKIPPED_MARKERS = frozenset((0xFFC4, 0xFFDB, 0xFFDD, 0xFFE0, *range(0xFFE2, 0xFFF0), 0xFFFE))
# The markers that no size follows.
_STANDALONE_MARKERS = frozenset((0xFF01, *range(0xFFD0, 0xFFD9)))
_EXIF_PREFIX = b"Exif\0\0"
# The maximum number of segments before the first scan. An XMP of 100 MB has 1,600 segments.
_MAX_SEGMENTS = 4096
# The maximum number of scans. Encoders write about 10 scans. For each scan, decoding takes time in
# proportion to the size of the whole picture.
_MAX_SCANS = 500
_PROGRESSIVE_MARKERS = frozenset((0xFFC2, 0xFFC6, 0xFFCA, 0xFFCE))


class _JpegHeader(NamedTuple):
    """The properties in the header of a JPEG. `height` and `width` are those before rotation."""

    height: int
    width: int
    components: int
    orientation: int
    progressive: bool

    @property
    def upright_size(self) -> tuple[int, int]:
        is_turned = self.orientation >= TRANSPOSED
        return (self.width, self.height) if is_turned else (self.height, self.width)


def _read_header(data: bytes | memoryview) -> _JpegHeader:
    at, frame, orientation = 2, None, None
    unpack_from = _MARKER_AND_SIZE.unpack_from  # saves 1 % of the time of a small picture
    try:
        for _ in range(_MAX_SEGMENTS):
            marker, size = unpack_from(data, at)
            if marker in _SKIPPED_MARKERS and size >= 2:
                at += 2 + size
                continue
            if marker == _START_OF_SCAN:
                return _build_header(frame, orientation or UPRIGHT)
            if marker == _FILL:
                at += 1
                continue
            if marker < 0xFF01 or marker == _END or marker in _STANDALONE_MARKERS or size < 2:
                raise MediaError(
                    f"JPEG: expected a segment at offset {at}, found {marker:#06x} of {size} bytes"
                )
            if marker in _FRAME_MARKERS and frame is None:
                frame = (marker, *_FRAME_HEADER.unpack_from(data, at + 4))
            elif marker == _APP1 and orientation is None and data[at + 4 : at + 10] == _EXIF_PREFIX:
                orientation = exif_orientation(bytes(data[at + 4 : at + 2 + size]))
            at += 2 + size
    except struct.error:
        raise MediaError(
            f"JPEG: its {len(data)} bytes end within the header: the segment at offset {at} is "
            "truncated or missing"
        ) from None
    raise MediaError(f"JPEG: no picture within the first {_MAX_SEGMENTS} segments")


def _build_header(frame: tuple[int, ...] | None, orientation: int) -> _JpegHeader:
    if frame is None:
        raise MediaError("JPEG: a scan begins before any frame header")
    kind, _, height, width, components = frame
    if not height or not width or components not in (1, 3, 4):
        raise MediaError(
            f"JPEG: a frame of {height}x{width} pixels in {components} components "
            "(expected at least 1x1 in 1, 3 or 4)"
        )
    _check_size(height, width)
    return _JpegHeader(height, width, components, orientation, kind in _PROGRESSIVE_MARKERS)


def _scale_divisor(height: int, width: int, min_size: tuple[int, int]) -> int:
    """Return the divisor, 1, 2, 4 or 8, of the smallest size that is not below `min_size`.

    libjpeg-turbo has vector code for these sizes only.
    """
    for divisor in (8, 4, 2):
        if -(-height // divisor) >= min_size[0] and -(-width // divisor) >= min_size[1]:
            return divisor
    return 1


def _decode_jpeg(
    data: bytes | memoryview, header: _JpegHeader, divisor: int, channels: int, out: Pixels | None
) -> Pixels:
    """Decode a JPEG upright, with each side divided by `divisor` (1, 2, 4 or 8) and rounded up."""
    if header.progressive:
        # This count includes the scans of embedded previews.
        n_scans = bytes(data).count(_START_OF_SCAN.to_bytes(2, "big"))
        if n_scans > _MAX_SCANS:
            raise MediaError(f"JPEG: expected at most {_MAX_SCANS} scans, found {n_scans}")
    shape = -(-header.height // divisor), -(-header.width // divisor), channels
    if header.orientation != 1:
        stored = _decode_stored(data, shape, None)
        return to_output(turn_upright(stored, header.orientation), out)
    if out is not None:
        check_out(out, shape)
    return _decode_stored(data, shape, out)


def _decode_stored(
    data: bytes | memoryview, shape: tuple[int, int, int], out: Pixels | None
) -> Pixels:
    """Decode a JPEG as stored, without turning it upright, to the given shape.

    CMYK and YCCK count as inverted, as Adobe stores them, and are converted without a profile.
    """
    library, (height, width, channels) = load_simplejpeg(), shape
    try:
        pixels: Pixels = library.decode_jpeg(
            data,
            "RGB" if channels == 3 else "GRAY",
            False,  # no fast DCT: it would save 5 % of the time, but change values by up to 2
            False,  # no fast upsampling of colours
            height,
            width,
            1.0,
            out,
            True,  # warnings are errors
        )
    except (ValueError, RuntimeError, KeyError) as error:
        raise MediaError(f"JPEG: it does not decode without concealment: {error}") from error
    if pixels.shape != shape:
        raise MediaError(
            f"JPEG: expected {height}x{width} pixels after its header, found "
            f"{pixels.shape[0]}x{pixels.shape[1]}"
        )
    return pixels


@functools.cache
def load_simplejpeg() -> ModuleType:
    """Import simplejpeg; raise UnsupportedEnvironment if it is not installed."""
    module: ModuleType = import_extra("JPEG needs simplejpeg", "images", "simplejpeg")
    return module


_QUANTIZER: Final = 4
"""The quantizer of JPEGs, from 1 (best) to 31: about quality 90 of libjpeg."""


def fit(pixels: Pixels, side: int) -> Pixels:
    """Scale RGB pixels so that they are at most `side` high and wide.

    Larger pixels are averaged; smaller ones are enlarged by a whole factor, so that they are sharp.
    """
    import av

    height, width = pixels.shape[:2]
    factor = max(1, side // max(height, width))
    if factor > 1:
        return pixels.repeat(factor, axis=0).repeat(factor, axis=1)
    if max(height, width) <= side:
        return pixels
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    found: Any = frame.reformat(*size, "rgb24", interpolation="AREA").to_ndarray()
    return np.asarray(found, np.uint8)


def to_jpeg(pixels: Pixels) -> bytes:
    """Encode RGB pixels as a JPEG."""
    from av import VideoFrame

    _check(pixels)
    frame = VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    return _encode(
        frame.reformat(format="yuvj420p", dst_colorspace="ITU601", dst_color_range="JPEG"), "mjpeg"
    )


def to_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode uint8 pixels as a PNG: grey, (height, width), or RGB or RGBA, (height, width, n)."""
    from av import VideoFrame

    _check(pixels, (1, 3, 4))
    form = {1: "gray", 3: "rgb24", 4: "rgba"}[1 if pixels.ndim == 2 else pixels.shape[2]]
    return _encode(VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=form), "png")


def _check(pixels: npt.NDArray[np.uint8], channels: tuple[int, ...] = (3,)) -> None:
    n_channels = {2: 1, 3: pixels.shape[-1]}.get(pixels.ndim) if pixels.size else None
    if pixels.dtype != np.uint8 or n_channels not in channels:
        raise InvalidArgument(
            f"expected uint8 pixels of {' or '.join(map(str, channels))} channels, found "
            f"{pixels.dtype} of {pixels.shape}"
        )


def _encode(frame: VideoFrame, codec: str) -> bytes:
    from av import CodecContext
    from av.error import FFmpegError

    encoder: Any = CodecContext.create(codec, "w")
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, frame.format.name
    encoder.framerate, encoder.time_base = Fraction(25), Fraction(1, 25)
    encoder.thread_count = 1
    if codec == "mjpeg":
        encoder.qmin = encoder.qmax = _QUANTIZER
    try:
        return b"".join(map(bytes, [*encoder.encode(frame), *encoder.encode(None)]))
    except FFmpegError as error:
        raise MediaError(
            f"cannot encode {format_sides(frame.height, frame.width)} pixels as {codec}: {error}"
        ) from error
