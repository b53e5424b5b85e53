"""Geometry and colour of one frame, against arithmetic that does not use swscale."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt
import pytest
from av.video.reformatter import VideoReformatter
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio.media.frames import CropPosition, FrameWriter, covering_size
from shardio.media.pixels import FrameConverter, plane_rows
from tests.media_made import BLUE, EXACT, GREEN, RED, WHITE, Image, quadrants

COEFFICIENTS = {  # FFmpeg's number of a matrix: the weights of red and blue in luma
    1: (0.2126, 0.0722),
    2: (0.299, 0.114),  # untagged
    3: (0.299, 0.114),  # reserved
    4: (0.30, 0.11),
    5: (0.299, 0.114),
    6: (0.299, 0.114),
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
}
LIMITED, FULL = 1, 2


def flat(y: int, u: int, v: int, pixel_format: str = "yuv420p") -> av.VideoFrame:
    frame = av.VideoFrame(64, 48, pixel_format)
    deep = pixel_format.endswith("10le")
    for plane, value in zip(frame.planes, (y, u, v), strict=True):
        one = (value * 4).to_bytes(2, "little") if deep else bytes([value])
        plane.update(one * (plane.buffer_size // len(one)))
    return frame


def rendered(
    frame: av.VideoFrame, size: int = 32, aspect: int = 1, display: bytes | None = None
) -> Image:
    return FrameWriter((size, size), Fraction(aspect)).render(frame, display)


def expected_rgb(y: int, u: int, v: int, matrix: int, color_range: int) -> list[float]:
    red, blue = COEFFICIENTS[matrix]
    if color_range == FULL:
        luma, cb, cr = y / 255, (u - 128) / 255, (v - 128) / 255
    else:
        luma, cb, cr = (y - 16) / 219, (u - 128) / 224, (v - 128) / 224
    r, b = luma + 2 * (1 - red) * cr, luma + 2 * (1 - blue) * cb
    g = (luma - red * r - blue * b) / (1 - red - blue)
    return [min(1.0, max(0.0, part)) * 255 for part in (r, g, b)]


@pytest.mark.parametrize("color_range", [0, LIMITED, FULL])
@pytest.mark.parametrize("matrix", COEFFICIENTS)
@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv444p", "yuv420p10le"])
def test_range_matrix_and_depth_of_frames(pixel_format: str, matrix: int, color_range: int) -> None:
    writer = FrameWriter((32, 32), Fraction(1))
    for yuv in ((235, 128, 128), (120, 90, 180), (60, 200, 90), (16, 128, 128)):
        frame = flat(*yuv, pixel_format)
        frame.colorspace, frame.color_range = matrix, color_range
        found = writer.render(frame, None)
        wanted = expected_rgb(*yuv, matrix, color_range)
        assert np.abs(found.astype(float) - wanted).max() <= 1.5, (yuv, found[0, 0], wanted)


def test_a_matrix_that_swscale_does_not_know_is_an_error() -> None:
    frame = flat(100, 100, 100)
    frame.colorspace = 8  # YCgCo
    with pytest.raises(av.FFmpegError):
        rendered(frame)


@pytest.mark.parametrize(
    ("width", "height", "aspect", "to"),
    [
        (1280, 720, Fraction(1), (199, 112)),
        (720, 1280, Fraction(1), (112, 199)),
        (50, 50, Fraction(1), (112, 112)),
        (340, 256, Fraction(64, 51), (187, 112)),
        (720, 576, Fraction(16, 15), (149, 112)),
        (100, 200, Fraction(4), (224, 112)),
        (640, 480, Fraction(0), (149, 112)),
        (101, 75, Fraction(1), (151, 112)),
    ],
)
def test_short_sides_fit(width: int, height: int, aspect: Fraction, to: tuple[int, int]) -> None:
    assert covering_size(width * (aspect or Fraction(1)), Fraction(height), (112, 112)) == to


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 512))
def test_no_side_is_below_the_size_and_one_is_it(width: int, height: int, size: int) -> None:
    assert min(covering_size(Fraction(width), Fraction(height), (size, size))) == size


def test_a_strip_out_of_all_proportion_is_refused() -> None:
    frame = av.VideoFrame(4000, 2, "yuv420p")
    with pytest.raises(ValueError, match="4000x2 pixels as shown would be"):
        rendered(frame, 112)


def matrix_bytes(a: int, b: int, c: int, d: int) -> bytes:
    one = 1 << 16
    return np.array([a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30], np.int32).tobytes()


@pytest.mark.parametrize(
    ("matrix", "corners"),  # corners: upper left, upper right, lower left, lower right
    [
        ((1, 0, 0, 1), (RED, GREEN, BLUE, WHITE)),
        ((0, 1, -1, 0), (BLUE, RED, WHITE, GREEN)),  # clockwise
        ((-1, 0, 0, -1), (WHITE, BLUE, GREEN, RED)),
        ((0, -1, 1, 0), (GREEN, WHITE, RED, BLUE)),
        ((-1, 0, 0, 1), (GREEN, RED, WHITE, BLUE)),  # mirrored
        ((1, 0, 0, -1), (BLUE, WHITE, RED, GREEN)),
        ((0, 1, 1, 0), (RED, BLUE, GREEN, WHITE)),
        ((0, -1, -1, 0), (WHITE, GREEN, BLUE, RED)),
    ],
)
def test_every_turn_and_mirroring_of_the_display_matrix_is_applied(
    matrix: tuple[int, int, int, int], corners: tuple[tuple[int, int, int], ...]
) -> None:
    frame = av.VideoFrame.from_ndarray(quadrants(96, 64), format="rgb24")
    found = rendered(frame, display=matrix_bytes(*matrix))
    assert found.shape == (32, 32, 3)
    places = [(4, 4), (4, 27), (27, 4), (27, 27)]
    assert [tuple(found[place].tolist()) for place in places] == list(corners)


def test_the_crop_is_central_after_turning() -> None:
    image = np.zeros((32, 45, 3), np.uint8)
    image[:, :, 0] = np.arange(45)
    frame = av.VideoFrame.from_ndarray(image, format="rgb24")
    upright = rendered(frame)
    assert upright[0, :, 0].tolist() == list(range(6, 38))
    turned = rendered(frame, display=matrix_bytes(-1, 0, 0, -1))
    assert turned[0, :, 0].tolist() == list(range(38, 6, -1))


def test_stored_pixels_twice_as_wide_as_high_are_made_square() -> None:
    frame = av.VideoFrame.from_ndarray(quadrants(32, 32), format="rgb24")
    found = rendered(frame, aspect=2)  # shown 64 wide, cropped to 32
    edge = np.flatnonzero(np.diff(found[4, :, 0].astype(int)) < -60)
    assert len(edge) and abs(edge[0] - 15.5) <= 1.5
    assert tuple(found[4, 0]) == RED and tuple(found[27, 31]) == WHITE


@pytest.mark.parametrize("alpha", [0, 128, 255])
def test_transparent_parts_lie_over_black(alpha: int) -> None:
    image = np.full((40, 40, 4), 200, np.uint8)
    image[..., 3] = alpha
    frame = av.VideoFrame.from_ndarray(image, format="rgba")
    found = rendered(frame)
    assert np.abs(found.astype(int) - round(200 * alpha / 255)).max() <= 1


def test_the_colour_under_transparent_pixels_does_not_bleed_into_the_others() -> None:
    image = np.zeros((64, 64, 4), np.uint8)
    image[..., :3] = 255  # white everywhere, and all of it hidden
    image[:32, :, :3], image[:32, :, 3] = 0, 255  # the visible half is black
    frame = av.VideoFrame.from_ndarray(image, format="rgba")
    assert rendered(frame, 48).max() == 0


@given(
    st.sampled_from(["yuv420p", "yuvj420p", "yuv422p", "yuv444p", "yuv420p10le", "yuv444p10le"]),
    st.integers(4, 60),
    st.integers(8, 60),
    st.integers(1, 140),
    st.integers(1, 140),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_planes_and_packed_pixels_of_swscale_are_the_same_values(
    pixel_format: str, half_width: int, half_height: int, width: int, height: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    frame = av.VideoFrame(2 * half_width, 2 * half_height, pixel_format)
    for plane in frame.planes:
        high = 4 if pixel_format.endswith("10le") else 256
        plane.update(rng.integers(0, high, plane.buffer_size, dtype=np.uint8).tobytes())
    frame.colorspace, frame.color_range = int(rng.choice([1, 5])), int(rng.choice([1, 2]))
    wanted = VideoReformatter().reformat(frame, width, height, "rgb24", interpolation=EXACT)
    found = np.empty((height, width, 3), np.uint8)
    convert, channels = FrameConverter().rgb(frame, width, height)
    planes = convert(frame)
    if not channels:
        found[...] = plane_rows(planes[0], height, 3 * width).reshape(height, width, 3)
    for channel, plane in zip(channels, planes, strict=False):
        found[..., channel] = plane_rows(plane, height, width)
    assert len(channels) == (3 if 8 <= height <= frame.height else 0)
    assert np.array_equal(found, wanted.to_ndarray())


def looks() -> list[av.VideoFrame]:
    """Frames of noise: two of one look, then others, then the first look again."""
    rng = np.random.default_rng(5)
    found = []
    for width, height, pixel_format, matrix, color_range in (
        (64, 48, "yuv420p", 5, LIMITED),
        (64, 48, "yuv420p", 5, LIMITED),
        (64, 48, "yuv420p", 1, LIMITED),
        (64, 48, "yuv420p", 3, LIMITED),  # reserved
        (64, 48, "yuv420p", 5, FULL),
        (64, 48, "yuvj420p", 5, FULL),
        (80, 48, "yuv420p", 5, LIMITED),
        (64, 60, "yuv420p", 5, LIMITED),
        (51, 39, "yuv420p", 5, LIMITED),
        (64, 48, "yuv444p", 5, LIMITED),
        (64, 48, "yuv420p10le", 5, LIMITED),
        (64, 48, "rgb24", 0, 0),
        (64, 48, "rgba", 0, 0),
        (64, 48, "yuv420p", 5, LIMITED),
    ):
        frame = av.VideoFrame(width, height, pixel_format)
        for plane in frame.planes:
            deep = pixel_format.endswith("10le")
            noise = rng.integers(0, 1024 if deep else 256, plane.buffer_size // (1 + deep))
            plane.update(noise.astype("<u2" if deep else np.uint8).tobytes())
        frame.colorspace, frame.color_range = matrix, color_range
        found.append(frame)
    return found


@pytest.mark.parametrize("crop", [None, CropPosition(0.4, 0.9), CropPosition(0.1, 0)])
@pytest.mark.parametrize("size", [(48, 64), (40, 48), (30, 40), (96, 96)])
@pytest.mark.parametrize("pixels", ["rgb", "yuv420"])
def test_frames_as_the_first(pixels: str, size: tuple[int, int], crop: CropPosition | None) -> None:
    turned = matrix_bytes(0, 1, -1, 0)
    writer = FrameWriter(size, Fraction(1), crop, pixels)
    for frame in looks():
        for display in (None, turned, None):
            alone = FrameWriter(size, Fraction(1), crop, pixels).render(frame, display)
            assert np.array_equal(writer.render(frame, display), alone)


def nearest_rgb(frame: av.VideoFrame) -> npt.NDArray[np.float64]:
    """Compute the RGB of a 4:2:0 frame; four pixels share their chroma, without interpolation."""
    y, u, v = (plane_rows(plane, plane.height, plane.width) for plane in frame.planes)
    u, v = (part.repeat(2, 0).repeat(2, 1) for part in (u, v))
    full = frame.color_range == FULL or frame.format.name == "yuvj420p"
    red, blue = COEFFICIENTS[frame.colorspace]
    low, luma_span, chroma_span = (0, 255, 255) if full else (16, 219, 224)
    luma, cb, cr = (
        (y - float(low)) / luma_span,
        (u - 128.0) / chroma_span,
        (v - 128.0) / chroma_span,
    )
    r, b = luma + 2 * (1 - red) * cr, luma + 2 * (1 - blue) * cb
    g = (luma - red * r - blue * b) / (1 - red - blue)
    return np.stack([r, g, b], -1).clip(0, 1) * 255


@pytest.mark.parametrize("size", [(2, 2), (6, 10), (8, 46), (48, 64), (112, 112)])
@pytest.mark.parametrize("color_range", [0, LIMITED, FULL])
@pytest.mark.parametrize("matrix", COEFFICIENTS)
@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuvj420p"])
def test_fast_colours_repeat_chroma(
    pixel_format: str, matrix: int, color_range: int, size: tuple[int, int]
) -> None:
    rng = np.random.default_rng(7)
    frame = av.VideoFrame(size[1], size[0], pixel_format)
    for plane in frame.planes:
        plane.update(rng.integers(0, 256, plane.buffer_size, dtype=np.uint8).tobytes())
    frame.colorspace, frame.color_range = matrix, color_range
    found = FrameWriter(size, Fraction(1), None, "rgb-fast").render(frame, None)
    off = np.abs(found - nearest_rgb(frame))
    assert off.max() < 3 and off.mean() < 1


def test_fast_colours_of_smooth_pictures_are_close_to_exact_ones() -> None:
    frame = av.VideoFrame(112, 80, "yuv420p")
    for plane in frame.planes:
        rows = plane_rows(plane, plane.height, plane.width)
        rows[...] = np.linspace(30, 200, plane.height)[:, None] + np.linspace(-9, 9, plane.width)
    exact, fast = (
        FrameWriter((80, 112), Fraction(1), None, pixels).render(frame, None).astype(int)
        for pixels in ("rgb", "rgb-fast")
    )
    assert 0 < np.abs(exact - fast).max() <= 5 and np.abs(exact - fast).mean() < 2


@pytest.mark.parametrize(
    ("width", "height", "pixel_format", "size"),
    [
        (64, 48, "yuv420p", (24, 32)),
        (64, 48, "yuv420p", (48, 48)),
        (64, 48, "yuv422p", (48, 64)),
        (64, 48, "yuv420p10le", (48, 64)),
        (51, 48, "yuv420p", (48, 51)),
        (64, 39, "yuv420p", (39, 64)),
        (64, 48, "rgba", (48, 64)),
    ],
)
def test_other_pictures_have_exact_colours(
    width: int, height: int, pixel_format: str, size: tuple[int, int]
) -> None:
    frame = av.VideoFrame(width, height, pixel_format)
    for plane in frame.planes:
        plane.update(np.random.default_rng(1).integers(0, 4, plane.buffer_size, np.uint8).tobytes())
    exact, fast = (
        FrameWriter(size, Fraction(1), None, pixels).render(frame, None)
        for pixels in ("rgb", "rgb-fast")
    )
    is_cropped_only = size == (48, 48)
    assert np.array_equal(exact, fast) != is_cropped_only
