"""Every way up, in every format that can say it, against Pillow's own turning."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from shardio.media import pixels
from shardio.media.image import decode_crop, decode_image, probe
from tests.media.images_made import exif, saved, smooth

WITH_EXIF = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF")
ALL_WAYS = range(1, 9)


@pytest.mark.parametrize("kind", WITH_EXIF)
@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_picture_is_upright_in_every_format(kind: str, way: int) -> None:
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95}
    data = saved(smooth(), kind, exif=exif(way), **options)
    with Image.open(io.BytesIO(data)) as picture:
        expected = np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    facts, found = probe(data), decode_image(data)
    assert (facts.height, facts.width, facts.orientation) == (*expected.shape[:2], way)
    assert facts.height == (16 if way >= 5 else 12)
    np.testing.assert_allclose(found, expected, atol=3 if kind == "JPEG" else 0)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_crop_and_a_smaller_decode_of_a_lying_jpeg_are_those_of_the_upright_one(way: int) -> None:
    data = saved(smooth(20, 26), "JPEG", exif=exif(way), quality=95, subsampling=0)
    whole = decode_image(data)
    found = decode_crop(data, (3, 5, 10, 8), (10, 8))
    np.testing.assert_array_equal(found, whole[3:13, 5:13])
    small = decode_image(data, min_size=(whole.shape[0] // 2, whole.shape[1] // 2))
    assert small.shape[:2] == (whole.shape[0] // 2, whole.shape[1] // 2)
    expected = whole.reshape(*small.shape[:1], 2, -1, 2, 3).mean((1, 3))
    np.testing.assert_allclose(small, expected, atol=6)


def block(order: str, kind: int, value: bytes, tag: int = 0x0112) -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    head = struct.pack(order + "IHHHI", 8, 1, tag, kind, 1)
    return mark + head + value.ljust(4, b"\0")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (block("<", 3, b"\6\0"), 6),
        (block(">", 3, b"\0\6"), 6),
        (b"Exif\0\0" + block(">", 3, b"\0\3"), 3),
        (block("<", 4, b"\x08\0\0\0"), 8),
        (block(">", 4, b"\0\0\0\x08"), 8),
        (block("<", 3, b"\0\0"), 1),
        (block("<", 3, b"\x09\0"), 1),
        (block("<", 2, b"\6\0"), 1),  # text
        (block("<", 3, b"\6\0", tag=0x0113), 1),
        (b"", 1),
        (b"nonsense", 1),
        (b"II*\0\xff\xff\xff\xff", 1),
    ],
)
def test_the_orientation_in_either_byte_order(data: bytes, expected: int) -> None:
    assert pixels.exif_orientation(data) == expected


def test_a_block_that_is_cut_off_anywhere_means_upright() -> None:
    whole = block("<", 3, b"\6\0")
    assert {pixels.exif_orientation(whole[:n]) for n in range(len(whole) - 2)} == {1}
