"""Read, decode and encode JPEG with libjpeg-turbo, at full size or a half, quarter or eighth.

libjpeg conceals damage: it fills missing parts with grey or earlier data, and only warns. Here
every warning is an error. Some damage remains undetected, because JPEG has no checksum: a flipped
bit may only change colours.
"""

from __future__ import annotations

import functools
import struct
from types import ModuleType
from typing import NamedTuple

from shardio.errors import MediaError, UnsupportedEnvironment, install_hint
from shardio.media.pixels import TRANSPOSED, UPRIGHT, Pixels, exif_orientation

__all__ = [
    "JpegHeader",
    "check_scans",
    "compress",
    "decode",
    "is_jpeg",
    "read_header",
    "scale_divisor",
]

Encoded = bytes | memoryview

_PAIR = struct.Struct(">HH")
_FRAME = struct.Struct(">BHHB")
_START = b"\xff\xd8\xff"
_APP1, _START_OF_SCAN, _END, _FILL = 0xFFE1, 0xFFDA, 0xFFD9, 0xFFFF
# Frame markers. C4 and CC mark tables, and C8 is reserved.
_FRAMES = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
# Tables, comments, and application data; not APP1, which may contain EXIF.
_SKIPPED = frozenset((0xFFC4, 0xFFDB, 0xFFDD, 0xFFE0, *range(0xFFE2, 0xFFF0), 0xFFFE))
_STANDALONE = frozenset((0xFF01, *range(0xFFD0, 0xFFD9)))  # markers without a size
_EXIF = b"Exif\0\0"
_MAX_SEGMENTS = 4096  # before the first scan; an extended XMP of 100 MB has 1,600 segments
_MAX_SCANS = 500  # encoders write about 10; decoding each scan processes the whole picture
_PROGRESSIVE = frozenset((0xFFC2, 0xFFC6, 0xFFCA, 0xFFCE))


class JpegHeader(NamedTuple):
    """The properties in the header; height and width are as stored, before rotation."""

    height: int
    width: int
    components: int
    bits: int
    orientation: int
    progressive: bool

    @property
    def shown(self) -> tuple[int, int]:
        """Height and width as displayed."""
        return (
            (self.width, self.height)
            if self.orientation >= TRANSPOSED
            else (self.height, self.width)
        )


def is_jpeg(data: Encoded) -> bool:
    """Return True if `data` begins with the JPEG signature."""
    return data[:3] == _START


def read_header(data: Encoded) -> JpegHeader:
    """Parse the segments up to the first scan.

    Raises:
        MediaError: a segment is truncated or invalid, or there is no frame header.
    """
    at, frame, orientation = 2, None, None
    unpack_from = _PAIR.unpack_from  # saves 1 % of the time of a small picture with nine segments
    try:
        for _ in range(_MAX_SEGMENTS):
            marker, size = unpack_from(data, at)
            if marker in _SKIPPED and size >= 2:
                at += 2 + size
                continue
            if marker == _START_OF_SCAN:
                return _build_header(frame, orientation or UPRIGHT)
            if marker == _FILL:
                at += 1
                continue
            if marker < 0xFF01 or marker == _END or marker in _STANDALONE or size < 2:
                raise MediaError(
                    f"JPEG: expected a segment at offset {at}, found {marker:#06x} of {size} bytes"
                )
            if marker in _FRAMES and frame is None:
                frame = (marker, *_FRAME.unpack_from(data, at + 4))
            elif marker == _APP1 and orientation is None and data[at + 4 : at + 10] == _EXIF:
                orientation = exif_orientation(bytes(data[at + 4 : at + 2 + size]))
            at += 2 + size
    except struct.error:
        raise MediaError(
            f"JPEG: its {len(data)} bytes end within the header: the segment at offset {at} is "
            "truncated or missing"
        ) from None
    raise MediaError(f"JPEG: no picture within the first {_MAX_SEGMENTS} segments")


def _build_header(frame: tuple[int, ...] | None, orientation: int) -> JpegHeader:
    if frame is None:
        raise MediaError("JPEG: a scan begins before any frame header")
    kind, bits, height, width, components = frame
    if not height or not width or components not in (1, 3, 4):
        raise MediaError(
            f"JPEG: a frame of {height}x{width} pixels in {components} components "
            "(expected at least 1x1 in 1, 3 or 4)"
        )
    return JpegHeader(height, width, components, bits, orientation, kind in _PROGRESSIVE)


def check_scans(data: Encoded) -> None:
    """Reject a progressive file with so many scans that decoding takes very long.

    Raises:
        MediaError: there are more than `_MAX_SCANS` scans, embedded previews included.
    """
    n_scans = bytes(data).count(_START_OF_SCAN.to_bytes(2, "big"))
    if n_scans > _MAX_SCANS:
        raise MediaError(f"JPEG: expected at most {_MAX_SCANS} scans, found {n_scans}")


def scale_divisor(height: int, width: int, min_size: tuple[int, int]) -> int:
    """Return the largest divisor of 1, 2, 4 and 8 that leaves at least `min_size` (height, width).

    libjpeg-turbo also supports divisors in between, but has no vector code for them.
    """
    for divisor in (8, 4, 2):
        if -(-height // divisor) >= min_size[0] and -(-width // divisor) >= min_size[1]:
            return divisor
    return 1


def decode(
    data: Encoded,
    *,
    height: int,
    width: int,
    channels: int,
    out: Pixels | None,
) -> Pixels:
    """Decode the picture as stored: `height` x `width` x `channels` (1 or 3).

    The size is the header's, divided by 1, 2, 4 or 8 and rounded up. The pixels are written to
    `out`, or to new memory. CMYK and YCCK are read inverted, as Adobe stores them, and converted
    without a profile.

    Raises:
        MediaError: libjpeg-turbo rejects the data, or would have to conceal damage.
    """
    library = load_simplejpeg()
    try:
        pixels: Pixels = library.decode_jpeg(
            data,
            "RGB" if channels == 3 else "GRAY",
            False,  # the fast DCT saves 5 % of the time and is up to 2 levels off
            False,  # upsampling of colour
            height,
            width,
            1.0,
            out,
            True,  # warnings are errors
        )
    except (ValueError, RuntimeError, KeyError) as error:
        raise MediaError(f"JPEG: it does not decode without concealment: {error}") from error
    if pixels.shape != (height, width, channels):
        raise MediaError(
            f"JPEG: expected {height}x{width} pixels after its header, found "
            f"{pixels.shape[0]}x{pixels.shape[1]}"
        )
    return pixels


def compress(pixels: Pixels, quality: int, subsampling: str) -> bytes:
    """Encode C-contiguous `pixels`, height x width x 3 or 1."""
    grey = pixels.shape[2] == 1
    return bytes(
        load_simplejpeg().encode_jpeg(
            pixels,
            quality=quality,
            colorspace="GRAY" if grey else "RGB",
            colorsubsampling="Gray" if grey else subsampling,
        )
    )


@functools.cache
def load_simplejpeg() -> ModuleType:
    """Import simplejpeg, which bundles its own libjpeg-turbo.

    Raises:
        UnsupportedEnvironment: simplejpeg is not installed.
    """
    try:
        import simplejpeg
    except ImportError as error:
        raise UnsupportedEnvironment(
            f"JPEG needs simplejpeg ({error}): {install_hint('images')}"
        ) from error
    module: ModuleType = simplejpeg
    return module
