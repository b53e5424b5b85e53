"""Decoded pixels of every kind of picture, compared with Pillow or arithmetic; sizes and errors."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from shardio.errors import InvalidArgument, MediaError, UnsupportedEnvironment
from shardio.media import decode_crop, decode_image, encode_jpeg, image, pillow, probe
from shardio.media.image import MAX_PIXELS, ImageFacts
from shardio.media.pillow import resize
from tests.media.images_made import GREY, GREY_ALPHA, PALETTE, RGB, Pixels, exif, png, saved, smooth

JPEG_TOLERANCE = 2  # Pillow's libjpeg-turbo beside simplejpeg's: the same arithmetic, two versions

LOSSLESS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "WEBP": {"lossless": True},
    "BMP": {},
    "TIFF": {"compression": "tiff_lzw"},
    "PPM": {},
    "QOI": {},
}


def by_pillow(data: bytes) -> Pixels:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


@pytest.mark.parametrize("kind", sorted(LOSSLESS))
def test_a_lossless_picture_comes_back_exactly(kind: str) -> None:
    data = saved(smooth(), kind, **LOSSLESS[kind])
    assert probe(data) == ImageFacts(kind, 12, 16, 3, 1)
    np.testing.assert_array_equal(decode_image(data), smooth())


@pytest.mark.parametrize("kind", ["AVIF", "WEBP"])
def test_a_lossy_picture_is_what_its_library_decodes(kind: str) -> None:
    data = saved(smooth(), kind)
    np.testing.assert_array_equal(decode_image(data), by_pillow(data))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_of_any_size_is_what_pillow_decodes(subsampling: int, progressive: object) -> None:
    for height, width in [(1, 1), (1, 9), (3, 3), (7, 17), (16, 8), (33, 40)]:
        data = saved(
            smooth(height, width), "JPEG", subsampling=subsampling, progressive=progressive
        )
        assert probe(data) == ImageFacts("JPEG", height, width, 3, 1)
        np.testing.assert_allclose(decode_image(data), by_pillow(data), atol=JPEG_TOLERANCE)


def test_the_inks_of_a_jpeg_are_read_as_adobe_writes_them() -> None:
    inks = Image.new("CMYK", (8, 8), (20, 60, 100, 30))
    data = saved(inks, "JPEG", quality=100)
    assert probe(data).channels == 4
    expected = [(255 - ink) * (255 - 30) / 255 for ink in (20, 60, 100)]
    np.testing.assert_allclose(decode_image(data)[4, 4], expected, atol=3)


def test_ycck_is_the_same_inks() -> None:
    data = saved(Image.new("CMYK", (8, 8), (20, 60, 100, 30)), "JPEG", quality=100)
    at = data.index(b"Adobe") + 11  # its transform: 0 is CMYK, 2 is YCCK
    ycck = data[:at] + b"\x02" + data[at + 1 :]
    found = decode_image(ycck).astype(int)
    np.testing.assert_allclose(found, by_pillow(ycck).astype(int), atol=JPEG_TOLERANCE)
    assert abs(found - decode_image(data)).max() > 20


def test_a_grey_jpeg_has_three_equal_channels_or_one() -> None:
    grey = smooth()[..., 0]
    data = saved(grey, "JPEG", quality=95)
    assert probe(data).channels == 1
    rgb, one = decode_image(data), decode_image(data, mode="grey")
    assert (rgb.shape, one.shape) == ((12, 16, 3), (12, 16, 1))
    np.testing.assert_array_equal(rgb, one.repeat(3, axis=2))
    np.testing.assert_allclose(one[..., 0].astype(int), grey, atol=6)


def packed(*numbers: int) -> list[bytes]:
    return [struct.pack(f">{len(numbers)}H", *numbers)]


PLTE = bytes([10, 20, 30, 40, 50, 60])
DEEP = packed(0x1234, 0x8000, 0xFFFE)
ALPHA = Image.new("RGBA", (1, 1), (100, 200, 50, 128))
INKS = Image.new("CMYK", (1, 1), (0, 255, 100, 0))
KINDS: dict[str, tuple[bytes, int, list[list[int]]]] = {
    # the file; its channels; the pixels of its one row
    "1 bit": (png((1, 4), 1, GREY, [b"\xa0"]), 1, [[255], [0], [255], [0]]),
    "2 bits": (png((1, 4), 2, GREY, [b"\xb1"]), 1, [[170], [255], [0], [85]]),
    "4 bits": (png((1, 2), 4, GREY, [b"\xb1"]), 1, [[187], [17]]),
    "16-bit grey": (png((1, 2), 16, GREY, packed(0x12FF, 0x8000)), 1, [[0x12], [0x80]]),
    "16-bit colour": (png((1, 1), 16, RGB, DEEP), 3, [[0x12, 0x80, 0xFF]]),
    "16-bit TIFF": (saved(Image.new("I;16", (1, 1), 0x1234), "TIFF"), 1, [[0x12]]),
    "16-bit PPM": (b"P5 2 1 65535\n" + packed(0x12FF, 0x8000)[0], 1, [[0x12], [0x80]]),
    "16-bit PPM in colour": (b"P6 1 1 65535\n" + DEEP[0], 3, [[0x12, 0x80, 0xFF]]),
    "palette": (png((1, 2), 1, PALETTE, [b"\x40"], PLTE=PLTE), 3, [[10, 20, 30], [40, 50, 60]]),
    "palette with alpha": (
        png((1, 2), 1, PALETTE, [b"\x40"], PLTE=PLTE, tRNS=b"\x80"),
        4,
        [[5, 10, 15], [40, 50, 60]],
    ),
    "clear grey": (png((1, 2), 8, GREY, [b"\7\x09"], tRNS=b"\0\7"), 2, [[0], [9]]),
    "clear 2-bit grey": (png((1, 4), 2, GREY, [b"\xb1"], tRNS=b"\0\2"), 2, [[0], [255], [0], [85]]),
    "clear 16-bit grey": (
        png((1, 2), 16, GREY, packed(0x1234, 0x1235), tRNS=b"\x12\x34"),
        2,
        [[0], [0x12]],
    ),
    "clear colour": (
        png((1, 2), 8, RGB, [bytes(range(1, 7))], tRNS=b"\0\1\0\2\0\3"),
        4,
        [[0, 0, 0], [4, 5, 6]],
    ),
    "clear 16-bit colour": (png((1, 1), 16, RGB, DEEP, tRNS=DEEP[0]), 4, [[0x12, 0x80, 0xFF]]),
    "grey and alpha": (png((1, 2), 8, GREY_ALPHA, [b"\x64\x80\x64\xff"]), 2, [[50], [100]]),
    "16-bit grey and alpha": (png((1, 1), 16, GREY_ALPHA, packed(0x8000, 0x8000)), 2, [[64]]),
    "alpha": (saved(ALPHA, "WEBP", lossless=True), 4, [[50, 100, 25]]),
    "no alpha at all": (saved(Image.new("RGBA", (1, 1), (100, 200, 50, 0)), "PNG"), 4, [[0, 0, 0]]),
    "inks in TIFF": (saved(INKS, "TIFF"), 4, [[255, 0, 155]]),
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_picture_becomes_the_rgb_of_the_table(name: str) -> None:
    data, channels, row = KINDS[name]
    assert probe(data).channels == channels
    expected = np.broadcast_to(np.array(row, np.uint8), (len(row), 3))[np.newaxis]
    np.testing.assert_array_equal(decode_image(data), expected)


def test_grey_is_the_luma_of_bt601() -> None:
    data = saved(smooth(), "PNG")
    found = decode_image(data, mode="grey")
    luma = smooth() @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(found[..., 0], luma, atol=0.51)
    as_jpeg = decode_image(saved(smooth(), "JPEG", quality=100, subsampling=0), mode="grey")
    np.testing.assert_allclose(as_jpeg[..., 0], luma, atol=3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_several_frames_the_first_is_taken(kind: str) -> None:
    first, second = Image.new("RGB", (6, 4), (200, 30, 30)), Image.new("RGB", (6, 4), (0, 90, 250))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(first, kind, save_all=True, append_images=[second], duration=40, **options)
    np.testing.assert_array_equal(decode_image(data), np.asarray(first))


def test_ten_bits_of_avif_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVT_LOG", "1")  # the encoder would tell of itself
    file = io.BytesIO()
    with av.open(file, "w", format="avif") as container:
        stream = container.add_stream("libsvtav1", rate=1)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p10le"
        grey = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 90, np.uint8), format="rgb24")
        container.mux(stream.encode(grey.reformat(format="yuv420p10le")))
        container.mux(stream.encode(None))
    assert probe(file.getvalue()) == ImageFacts("AVIF", 64, 64, 3, 1)
    np.testing.assert_allclose(decode_image(file.getvalue()), 90, atol=2)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_white_are_refused(mode: str) -> None:
    data = saved(Image.new(mode, (2, 2), 70000), "TIFF")
    with pytest.raises(MediaError, match="black and white are not defined"):
        decode_image(data)


def test_a_colour_profile_changes_no_number() -> None:
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    for kind in ("PNG", "JPEG"):
        plain, tagged = saved(smooth(), kind), saved(smooth(), kind, icc_profile=profile)
        assert len(tagged) > len(plain)
        np.testing.assert_array_equal(decode_image(plain), decode_image(tagged))


@pytest.mark.parametrize("divisor", [1, 2, 4, 8])
def test_a_jpeg_is_decoded_no_larger_than_is_enough(divisor: int) -> None:
    data = encode_jpeg(smooth(22, 25), quality=95, subsampling="444")
    size = (-(-22 // divisor), -(-25 // divisor))
    small = decode_image(data, min_size=size)
    assert small.shape == (*size, 3)
    assert decode_image(saved(smooth(), "PNG"), min_size=(2, 2)).shape == (12, 16, 3)
    larger = decode_image(data, min_size=(size[0], size[1] + 1))
    assert larger.shape[1] >= min(25, size[1] + 1)
    whole = decode_image(data)[: 22 // divisor * divisor, : 25 // divisor * divisor]
    means = whole.reshape(22 // divisor, divisor, 25 // divisor, divisor, 3).mean((1, 3))
    np.testing.assert_allclose(small[: 22 // divisor, : 25 // divisor], means, atol=5)


@pytest.mark.parametrize(
    "data",
    [
        saved(smooth(), "JPEG"),
        saved(smooth(), "PNG"),
        saved(smooth(16, 12), "JPEG", exif=exif(6)),
        saved(Image.new("CMYK", (16, 12), (20, 60, 100, 30)), "JPEG"),
    ],
    ids=["JPEG", "PNG", "turned", "inks"],
)
def test_a_picture_goes_into_a_row_of_a_block(data: bytes) -> None:
    block = np.zeros((3, 12, 16, 3), np.uint8)
    assert np.shares_memory(decode_image(data, out=block[1]), block)
    np.testing.assert_array_equal(block[1], decode_image(data))
    assert not block[0].any()
    assert not block[2].any()


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda d: np.frombuffer(d, "u1")])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_encoded_bytes_may_lie_in_anything(kind: str, make: Callable[[bytes], Any]) -> None:
    data = saved(smooth(), kind)
    assert probe(make(data)) == probe(data)
    np.testing.assert_array_equal(decode_image(make(data)), decode_image(data))


def read_only() -> Pixels:
    out = np.zeros((12, 16, 3), np.uint8)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(
    "out",
    [
        np.zeros((12, 17, 3), np.uint8),
        np.zeros((11, 16, 3), np.uint8),
        np.zeros((12, 16, 3), np.int8),
        np.zeros((12, 32, 3), np.uint8)[:, ::2],
        read_only(),
    ],
)
def test_a_destination_that_does_not_fit_is_named(kind: str, out: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"writable C-contiguous uint8 of shape \(12"):
        decode_image(saved(smooth(), kind), out=out)


def test_an_unknown_mode_is_listed_with_what_there_is() -> None:
    with pytest.raises(InvalidArgument, match="mode: expected one of rgb, grey, found 'bgr'"):
        decode_image(saved(smooth(), "JPEG"), mode="bgr")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_crop_of_its_own_size_is_a_part_of_the_picture(kind: str) -> None:
    data = saved(smooth(), kind)
    found = decode_crop(data, (2, 3, 7, 9), (7, 9))
    np.testing.assert_array_equal(found, decode_image(data)[2:9, 3:12])


def test_a_crop_is_the_resized_part_whatever_size_was_decoded() -> None:
    data = encode_jpeg(smooth(96, 80) // 3 * 3, quality=100, subsampling="444")
    part = np.ascontiguousarray(decode_image(data)[5:75, 8:70])
    expected = resize(part, (30, 30))
    out = np.zeros((30, 30, 3), np.uint8)
    found = decode_crop(data, (5, 8, 70, 62), (30, 30), out=out)  # decoded at one half
    assert found is out
    np.testing.assert_allclose(found.astype(int), expected, atol=8)
    np.testing.assert_array_equal(found, decode_crop(data, (5, 8, 70, 62), (30, 30)))


def test_nothing_outside_of_the_box_bleeds_in() -> None:
    picture = np.zeros((40, 40, 3), np.uint8)
    picture[10:30, 10:30] = 200
    found = decode_crop(saved(picture, "PNG"), (10, 10, 20, 20), (7, 9))
    assert (found == 200).all()


@pytest.mark.parametrize(
    "box", [(-1, 0, 5, 5), (0, -1, 5, 5), (8, 0, 5, 5), (0, 12, 5, 5), (0, 0, 0, 5), (0, 0, 5, 0)]
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_box_that_is_not_within_the_picture_is_refused(kind: str, box: Any) -> None:
    with pytest.raises(InvalidArgument, match="12x16"):
        decode_crop(saved(smooth(), kind), box, (4, 4))


def test_resizing_a_half_is_the_mean_with_its_neighbours() -> None:
    y = np.arange(0, 240, 4, dtype=np.uint8)
    ramp = np.broadcast_to(y[:, np.newaxis, np.newaxis], (60, 8, 1)).copy()
    found = resize(ramp, (30, 4))
    np.testing.assert_allclose(found[1:-1, :, 0].T, [2 + 8.0 * np.arange(1, 29)] * 4, atol=1)
    out = np.zeros((30, 4, 1), np.uint8)
    np.testing.assert_array_equal(resize(ramp, (30, 4), out=out), found)
    same = resize(smooth(), (12, 16))
    np.testing.assert_array_equal(same, smooth())
    assert not np.shares_memory(resize(ramp, (60, 8)), ramp)


def test_quality_and_subsampling_decide_over_the_bytes() -> None:
    picture = smooth(64, 64)
    sizes = [len(encode_jpeg(picture, quality=quality)) for quality in (20, 60, 95)]
    assert sizes == sorted(set(sizes))
    for subsampling in ("444", "422", "420", "440", "411"):
        data = encode_jpeg(picture, subsampling=subsampling)
        _, _, _, said = image.load_simplejpeg().decode_jpeg_header(data)
        assert said == subsampling
        np.testing.assert_allclose(decode_image(data).astype(int), picture, atol=25)


@pytest.mark.parametrize("shape", [(16, 70_000, 3), (70_000, 16, 3)])
def test_pixels_that_a_jpeg_cannot_hold_are_an_error(shape: tuple[int, int, int]) -> None:
    with pytest.raises(MediaError, match=f"cannot encode {shape[0]} high × {shape[1]} wide pixels"):
        image.to_jpeg(np.zeros(shape, np.uint8))


def test_one_channel_becomes_a_grey_jpeg() -> None:
    data = encode_jpeg(smooth()[..., :1], quality=95)
    assert probe(data).channels == 1
    np.testing.assert_allclose(decode_image(data, mode="grey")[..., 0], smooth()[..., 0], atol=4)


@pytest.mark.parametrize(
    ("pixels", "options"),
    [
        (smooth().astype(np.int16), {}),
        (smooth()[..., 0], {}),
        (np.zeros((4, 4, 4), np.uint8), {}),
        (np.zeros((0, 4, 3), np.uint8), {}),
        (smooth(), {"quality": 0}),
        (smooth(), {"quality": 101}),
        (smooth(), {"subsampling": "410"}),
        (smooth(), {"size": (0, 4)}),
        (smooth(), {"size": (4, 0)}),
        (smooth(), {"size": (4, 20_000)}),
    ],
)
def test_what_is_no_picture_is_neither_encoded_nor_resized(pixels: Any, options: Any) -> None:
    if "size" not in options:
        with pytest.raises(InvalidArgument, match="encode_jpeg:"):
            encode_jpeg(pixels, **options)
    if not options.keys() - {"size"}:
        with pytest.raises(InvalidArgument, match="resize:|size: expected height and width of 1"):
            resize(pixels, options.get("size", (2, 2)))


@pytest.mark.parametrize("function", [probe, decode_image])
@pytest.mark.parametrize("data", [b"", b"\xff", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>", bytes(99)])
def test_what_is_no_picture_is_described(function: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(MediaError, match=f"begin with {data[:12].hex(' ') or 'nothing'}"):
        function(data)


@pytest.mark.parametrize("function", [probe, decode_image])
def test_a_bomb_is_refused_by_its_header(function: Callable[[bytes], object]) -> None:
    bomb = png((20_000, 20_000), 8, RGB, [b"\0"])
    size, huge = struct.pack(">HH", 8, 8), struct.pack(">HH", 65_000, 65_000)
    tall = encode_jpeg(smooth(8, 8)).replace(size, huge, 1)
    for data in (bomb, tall):
        with pytest.raises(MediaError, match=str(MAX_PIXELS)):
            function(data)


@pytest.mark.parametrize("package", ["simplejpeg", "PIL"])
def test_a_missing_package_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(smooth(), "JPEG" if package == "simplejpeg" else "PNG")
    monkeypatch.setitem(sys.modules, package, None)
    image.load_simplejpeg.cache_clear()
    pillow.pillow_image.cache_clear()
    with pytest.raises(UnsupportedEnvironment) as raised:
        decode_image(data)
    image.load_simplejpeg.cache_clear()
    pillow.pillow_image.cache_clear()
    assert "pip install '.[images]'" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_real_pictures_are_what_pillow_decodes(media_root: Path) -> None:
    from PIL import ImageOps

    for path in sorted((media_root / "images").iterdir()):
        data = path.read_bytes()
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture)
            flat = Image.new("RGBA", upright.size, "black")
            flat.alpha_composite(upright.convert("RGBA"))
            expected = np.asarray(flat.convert("RGB")).astype(int)
        found, facts = decode_image(data), probe(data)
        assert found.shape == (facts.height, facts.width, 3) == expected.shape, path.name
        difference = abs(found - expected)
        assert difference.max() <= (JPEG_TOLERANCE if path.suffix == ".jpg" else 1), path.name
