"""Small pictures that tests make, most of them with Pillow, PNG also by hand; frames of videos."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardio import EncodedStream
from shardio.media import ClipDecoder

Pixels = npt.NDArray[np.uint8]

PNG_START = b"\x89PNG\r\n\x1a\n"
GREY, RGB, PALETTE, GREY_ALPHA = 0, 2, 3, 4  # PNG's kinds of colour


def smooth(height: int = 12, width: int = 16) -> Pixels:
    """Colours that change from pixel to pixel, no two rows or columns alike."""
    y, x = np.mgrid[0:height, 0:width]
    down, right = y / height, x / width
    return np.stack(
        [40 + 180 * down, 30 + 200 * right, 220 - 90 * down - 99 * right], axis=-1
    ).astype(np.uint8)


def saved(picture: Image.Image | Pixels, kind: str, **options: Any) -> bytes:
    image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(
    stream: EncodedStream, frames: Sequence[int], shape: tuple[int, ...], **options: Any
) -> Pixels:
    """Return frames of a video, each of this shape."""
    out = np.full((len(frames), *shape), 7, np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(stream, frames, out, **options)
    return out


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(size: tuple[int, int], bits: int, colour: int, rows: list[bytes], **chunks: bytes) -> bytes:
    """Return a PNG of packed `rows`, for depths that Pillow does not write.

    `size` is (height, width).
    """
    head = struct.pack(">IIBBBBB", size[1], size[0], bits, colour, 0, 0, 0)
    more = b"".join(chunk(kind.encode(), body) for kind, body in chunks.items())
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return PNG_START + chunk(b"IHDR", head) + more + chunk(b"IDAT", body) + chunk(b"IEND", b"")
