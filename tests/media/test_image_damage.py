"""Damaged pictures: every truncation, and flipped bits, give pixels or MediaError, nothing else."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from shardio.errors import MediaError
from shardio.media import image
from shardio.media.image import decode_image, encode_jpeg, probe
from tests.media.images_made import PNG_START, Pixels, chunk, exif, saved, smooth

# Pillow's remarks on damaged metadata, which are for the user of a library to see.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FILES: dict[str, bytes] = {
    "jpeg": encode_jpeg(smooth(), quality=90),
    "jpeg, progressive": saved(smooth(), "JPEG", progressive=True),
    "jpeg, turned": saved(smooth(), "JPEG", exif=exif(6)),
    "png": saved(smooth(), "PNG"),
    "webp": saved(smooth(), "WEBP"),
    "webp, lossless": saved(smooth(), "WEBP", lossless=True),
    "avif": saved(smooth(), "AVIF"),
    "gif": saved(smooth(), "GIF"),
    "bmp": saved(smooth(4, 4), "BMP"),
    "tiff": saved(smooth(4, 4), "TIFF"),
    "ppm": saved(smooth(4, 4), "PPM"),
    "qoi": saved(smooth(4, 4), "QOI"),
}


def tried(data: bytes) -> Pixels | None:
    """Return the pixels, or None for damage that is noticed; probing must agree with decoding."""
    try:
        pixels = decode_image(data)
    except MediaError as error:
        assert "\n" not in str(error)
        pixels = None
    try:
        facts = probe(data)
    except MediaError:
        assert pixels is None
    else:
        assert pixels is None or pixels.shape == (facts.height, facts.width, 3)
    return pixels


@pytest.mark.parametrize("name", ["jpeg", "jpeg, progressive", "jpeg, turned"])
def test_an_eighth_of_the_size_shows_the_same_damage(name: str) -> None:
    """The converter of images decodes originals in this way."""
    data, n_damaged = FILES[name], 0
    for at in range(2, len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        is_damaged = []
        for min_size in (None, (1, 1)):
            try:
                decode_image(flipped, min_size=min_size)
            except MediaError:
                is_damaged.append(True)
            else:
                is_damaged.append(False)
        assert is_damaged[0] == is_damaged[1], at
        n_damaged += is_damaged[0]
    assert 0 < n_damaged < len(data)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_cut_off_is_an_error_or_lacks_no_pixel(name: str) -> None:
    data = FILES[name]
    whole = decode_image(data)
    passing = 0
    for n_bytes in range(len(data)):
        pixels = tried(data[:n_bytes])
        if pixels is not None:
            np.testing.assert_array_equal(pixels, whole)
            passing += 1
    # What GIF and QOI end with says nothing but that they end.
    assert passing == {"gif": 2, "qoi": 8}.get(name, 0)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_flipped_bit_gives_pixels_or_an_error(name: str) -> None:
    data = bytearray(FILES[name])
    noticed = 0
    for at in range(len(data)):
        bit = 1 << (at * 5 + 3) % 8
        data[at] ^= bit
        noticed += tried(bytes(data)) is None
        data[at] ^= bit
    assert noticed
    if name == "png":
        assert noticed == len(data)


def test_a_png_with_any_bit_flipped_is_refused() -> None:
    data = bytearray(FILES["png"])
    for at in range(8, len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(MediaError):
                decode_image(data)
            data[at] ^= 1 << bit


def test_a_damaged_chunk_of_a_png_is_named() -> None:
    data = bytearray(FILES["png"])
    at = data.index(b"IDAT") - 4
    data[at + 12] ^= 1
    with pytest.raises(MediaError, match=f"b'IDAT' at offset {at} is damaged: expected CRC 0x"):
        decode_image(data)


def test_a_grey_rest_is_an_error() -> None:
    """Half of a photo, closed as if it were whole: viewers show grey below."""
    noise = np.random.default_rng(5).integers(0, 256, (64, 64, 3), np.uint8)
    data = encode_jpeg(noise, quality=90)
    for cut in (data[: len(data) // 2], data[: len(data) // 2] + b"\xff\xd9"):
        assert image.load_simplejpeg().decode_jpeg(cut, strict=False).shape == noise.shape
        with pytest.raises(MediaError, match="without concealment: .*(?i:premature end)"):
            decode_image(cut)


def test_a_file_of_very_many_scans_is_refused() -> None:
    data = FILES["jpeg, progressive"]
    last = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(MediaError, match=r"expected at most 500 scans, found 6\d\d"):
        decode_image(data[:-2] + last * 600 + data[-2:])


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">HH", marker, 2 + len(body)) + body


START = b"\xff\xd8"
SCAN = segment(0xFFDA, b"\1\1\0\0\x3f\0")


def frame(height: int, width: int, components: int, bits: int = 8) -> bytes:
    return segment(0xFFC0, struct.pack(">BHHB", bits, height, width, components) + bytes(9))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (START + b"\xff", "truncated or missing"),
        (START + frame(8, 8, 3), "truncated or missing"),
        (START + segment(0xFFE0, b"JFIF") + SCAN, "before any frame header"),
        (START + b"\xff\xd9\0\0", "0xffd9"),
        (START + b"\xff\xd8\xff\xd8", "0xffd8"),
        (START + b"\xff\xe0\0\1", "0xffe0 of 1 bytes"),
        (START + segment(0xFFE0, b"") + b"\0\0\0\0", "found 0x0000"),
        (START + frame(0, 8, 3) + SCAN, "0x8 pixels"),
        (START + frame(8, 0, 3) + SCAN, "8x0 pixels"),
        (START + frame(8, 8, 2) + SCAN, "in 2 components"),
        (START + segment(0xFFE1, b"") * 5000, "within the first 4096 segments"),
        (START + b"\xff" * 9000, "within the first 4096 segments"),
    ],
)
def test_a_header_that_makes_no_sense_says_where(data: bytes, what: str) -> None:
    for function in (probe, decode_image):
        with pytest.raises(MediaError, match=what):
            function(data)


def test_a_header_may_be_filled_up_and_say_more_than_once_which_way_up() -> None:
    plain = FILES["jpeg"]
    turned = START + b"\xff\xff" + segment(0xFFE1, exif_mark(6)) + segment(0xFFE1, exif_mark(3))
    facts = probe(turned + plain[2:])
    assert (facts.height, facts.width, facts.orientation) == (16, 12, 6)
    assert decode_image(turned + plain[2:]).shape == (16, 12, 3)


def exif_mark(orientation: int) -> bytes:
    return b"Exif\0\0" + exif(orientation).removeprefix(b"Exif\0\0")


def test_twelve_bits_are_refused() -> None:
    data = START + frame(8, 8, 1, bits=12) + SCAN + bytes(8) + b"\xff\xd9"
    with pytest.raises(MediaError, match="JPEG: it does not decode"):
        decode_image(data)


def test_a_png_ends_with_its_last_chunk() -> None:
    np.testing.assert_array_equal(decode_image(FILES["png"] + b"more"), smooth())
    for cut, what in (
        (PNG_START + chunk(b"IHDR", bytes(13)), "not a picture"),
        (FILES["png"][:-12], "end within the chunk"),
    ):
        with pytest.raises(MediaError, match=what):
            decode_image(cut)
