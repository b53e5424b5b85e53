"""Whether a file should be a still picture, by its first bytes or its name; nothing is decoded."""

from __future__ import annotations

from pathlib import PurePath

__all__ = ["has_image_signature", "has_image_suffix"]

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
    """Whether the suffix of `name` promises a picture."""
    return PurePath(name).suffix.lower() in _SUFFIXES


def has_image_signature(head: bytes) -> bool:
    """Whether a file's first 16 bytes (or fewer) are those of a picture.

    Formats whose first bytes are two letters (BMP, PPM) are known by their suffix alone.
    """
    if head[:4] == b"RIFF":
        return head[8:12] == b"WEBP"
    if head[4:8] == b"ftyp":
        return head[8:12] in _STILL_BRANDS
    return head.startswith(_STARTS)
