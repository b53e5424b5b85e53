"""YUV 4:2:0 to RGB in tinygrad: against arithmetic, and against swscale's accurate conversion."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from av.video.reformatter import VideoReformatter
from tinygrad.engine.jit import TinyJit
from tinygrad.tensor import Tensor

from shardio.errors import InvalidArgument
from shardio.outputs import yuv420_to_rgb
from tests.media_made import EXACT, scene, write_video

on_cpu = pytest.mark.cpu_device
Levels = npt.NDArray[Any]

WEIGHTS = {  # of red and blue in luma
    "bt601": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020": (0.2627, 0.0593),
    "fcc": (0.30, 0.11),
    "smpte240m": (0.212, 0.087),
}
NUMBERS = {"bt709": 1, "fcc": 4, "bt601": 5, "smpte240m": 7, "bt2020": 9}  # FFmpeg's
RANGES = {"limited": 1, "full": 2}


def packed(planes: list[Levels]) -> Levels:
    """Y over U and V side by side."""
    y, u, v = planes
    return np.concatenate([y, np.concatenate([u, v], axis=1)])


def planes_of(frame: av.VideoFrame) -> list[Levels]:
    found = []
    for plane in frame.planes:
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)
        found.append(rows[:, : plane.width].copy())
    return found


def noise(height: int, width: int, seed: int = 0) -> list[Levels]:
    """Planes of any level, also of those that are outside of the limited range."""
    rng = np.random.default_rng([height, width, seed])
    sizes = (height, width), (height // 2, width // 2), (height // 2, width // 2)
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


def frame_of(planes: list[Levels], matrix: str, range: str) -> av.VideoFrame:
    height, width = planes[0].shape
    frame = av.VideoFrame(width, height, "yuv420p")
    frame.colorspace, frame.color_range = NUMBERS[matrix], RANGES[range]
    for plane, levels in zip(frame.planes, planes, strict=True):
        rows = np.zeros((plane.height, plane.line_size), np.uint8)
        rows[:, : plane.width] = levels
        plane.update(rows.tobytes())
    return frame


def by_swscale(frame: av.VideoFrame) -> Levels:
    made = VideoReformatter().reformat(
        frame, frame.width, frame.height, "rgb24", interpolation=EXACT, threads=1
    )
    (rgb,) = (np.frombuffer(memoryview(plane), np.uint8) for plane in made.planes)
    rows = rgb.reshape(frame.height, -1)[:, : frame.width * 3]
    return rows.reshape(frame.height, frame.width, 3).astype(int)


def interpolated(chroma: Levels, places: Levels, axis: int) -> Levels:
    """Chroma at places, in its own samples; constant beyond the first and the last."""
    known = np.arange(chroma.shape[axis])
    return np.apply_along_axis(lambda row: np.interp(places, known, row), axis, chroma)


def by_arithmetic(planes: list[Levels], matrix: str, range: str, siting: str) -> Levels:
    """Levels of red, green and blue by definition, neither rounded nor clipped."""
    (height, width), (red, blue) = planes[0].shape, WEIGHTS[matrix]
    down = (np.arange(height) - 0.5) / 2
    across = (np.arange(width) - (0.5 if siting == "center" else 0)) / 2
    y, u, v = (plane.astype(float) for plane in planes)
    u, v = (interpolated(interpolated(c, down, 0), across, 1) - 128 for c in (u, v))
    if range == "limited":
        y, u, v = (y - 16) * 255 / 219, u * 255 / 224, v * 255 / 224
    r, b = y + 2 * (1 - red) * v, y + 2 * (1 - blue) * u
    return np.stack([r, (y - red * r - blue * b) / (1 - red - blue), b], axis=-1)


# --- what an option means -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matrix", "range"), [*((matrix, "limited") for matrix in WEIGHTS), ("bt709", "full")]
)
def test_levels_are_those_of_the_definition(matrix: Any, range: Any) -> None:
    many = [noise(2, 2, number) for number in (1, 2, 3, 4, 5, 6, 7, 8)]
    frames = Tensor(np.stack([packed(planes) for planes in many]), device="PYTHON")
    found = yuv420_to_rgb(frames, matrix, range, dtype="float32").numpy()
    wanted = np.stack([by_arithmetic(planes, matrix, range, "left") for planes in many])
    np.testing.assert_allclose(found, wanted.clip(0, 255), atol=1e-3)
    assert (wanted < 0).any() and (wanted > 255).any()


@pytest.mark.parametrize("siting", ["left", "center"])
def test_chroma_is_interpolated_from_where_it_lies(siting: Any) -> None:
    planes = noise(4, 4)
    frames = Tensor(packed(planes), device="PYTHON")
    found = yuv420_to_rgb(frames, siting=siting, dtype="float32").numpy()
    wanted = by_arithmetic(planes, "bt601", "limited", siting)
    np.testing.assert_allclose(found, wanted.clip(0, 255), atol=1e-3)


def test_levels_are_rounded_unless_floats_are_asked_for() -> None:
    frames = Tensor(packed(noise(2, 2)), device="PYTHON")
    exact = yuv420_to_rgb(frames, dtype="float32").numpy()
    rounded = yuv420_to_rgb(frames).numpy()
    assert rounded.dtype == np.uint8
    np.testing.assert_array_equal(rounded, np.floor(exact + 0.5))
    assert (exact != rounded).any()
    halves = yuv420_to_rgb(frames, dtype="float16").numpy()
    np.testing.assert_array_equal(halves, exact.astype(np.float16))


@pytest.mark.parametrize("lead", [(2, 3), (0,)])
def test_frames_may_lie_in_any_number_of_axes(lead: tuple[int, ...]) -> None:
    many = np.random.default_rng(0).integers(0, 256, (*lead, 3, 2), np.uint8)
    found = yuv420_to_rgb(Tensor(many, device="PYTHON"))
    assert found.shape == (*lead, 2, 2, 3)
    for place in np.ndindex(lead):
        alone = yuv420_to_rgb(Tensor(many[place], device="PYTHON"))
        np.testing.assert_array_equal(found.numpy()[place], alone.numpy())


# --- against swscale ------------------------------------------------------------------------


@pytest.mark.parametrize("range", RANGES)
@pytest.mark.parametrize("matrix", NUMBERS)
def test_the_definition_is_that_of_swscale(matrix: str, range: str) -> None:
    planes = noise(48, 64)
    wanted = by_arithmetic(planes, matrix, range, "center").clip(0, 255)
    assert np.abs(wanted - by_swscale(frame_of(planes, matrix, range))).max() <= 2


@on_cpu
def test_every_call_of_a_captured_function_converts_what_it_is_given() -> None:
    @TinyJit
    def step(frames: Tensor) -> Tensor:
        return yuv420_to_rgb(frames, "bt709", "full", siting="center").realize()

    rng = np.random.default_rng(1)
    for _ in range(4):
        planes = [np.roll(plane, rng.integers(64), axis=1) for plane in noise(48, 64)]
        found = step(Tensor(packed(planes), device="CPU").realize()).numpy()
        assert np.abs(found - by_swscale(frame_of(planes, "bt709", "full"))).max() <= 2


@on_cpu
def test_a_clip_of_h264_is_as_swscale_has_it(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", scene(4), codec_options={"crf": "4"})
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = list(container.decode(video=0))
    clip = np.stack([packed(planes_of(frame)) for frame in frames])
    found = yuv420_to_rgb(Tensor(clip, device="CPU")).numpy()
    wanted = np.stack([by_swscale(frame) for frame in frames])
    assert np.abs(found - wanted).max() <= 2
    centred = by_arithmetic(planes_of(frames[0]), "bt601", "limited", "center").clip(0, 255)
    assert np.abs(centred - wanted[0]).max() > 10


SIDE = 128  # of the part of a real frame that is compared: with one size, there is one kernel


@on_cpu
def test_real_clips_are_as_swscale_has_them(media_root: Path) -> None:
    n_compared = 0
    for path in sorted((media_root / "clips").glob("*/*")):
        with av.open(str(path)) as container:
            codec = container.streams.video[0].codec_context.name
            frames = list(itertools.islice(container.decode(video=0), 0, 14, 13))
        for frame in frames:
            # Only these decoders put chroma on the left where the stream does not say its place.
            if codec not in ("h264", "hevc", "mpeg4") or min(frame.width, frame.height) < SIDE:
                continue
            if frame.format.name not in ("yuv420p", "yuvj420p"):
                continue
            top, left = ((side - SIDE) // 4 * 2 for side in (frame.height, frame.width))
            middle = np.s_[top : top + SIDE, left : left + SIDE]
            halves = np.s_[top // 2 : (top + SIDE) // 2, left // 2 : (left + SIDE) // 2]
            y, u, v = planes_of(frame)
            square = Tensor(packed([y[middle], u[halves], v[halves]]), device="CPU")
            matrix: Any = "bt709" if frame.colorspace == NUMBERS["bt709"] else "bt601"
            range: Any = "full" if frame.color_range == RANGES["full"] else "limited"
            off = np.abs(yuv420_to_rgb(square, matrix, range).numpy() - by_swscale(frame)[middle])
            assert off[2:-2, 2:-2].max() <= 2, path  # the edges need pixels that were cut off
            n_compared += 1
    assert n_compared > 10


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((3, 4), "int8", "found signed char of"),
        ((6,), "uint8", r"found unsigned char of \(6,\)"),
        ((4, 4), "uint8", "4 rows of 4"),
        ((3, 5), "uint8", "3 rows of 5"),
        ((0, 4), "uint8", "0 rows of 4"),
    ],
)
def test_what_are_no_such_frames_is_refused(shape: tuple[int, ...], dtype: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        yuv420_to_rgb(Tensor(np.zeros(shape, dtype), device="PYTHON"))


@pytest.mark.parametrize(
    ("option", "known"),
    [("matrix", "'bt601', 'bt709'"), ("range", "'limited'"), ("siting", "'left'"), ("dtype", "'u")],
)
def test_an_unknown_value_is_refused_with_those_that_there_are(option: str, known: str) -> None:
    options: Any = {option: "no"}
    with pytest.raises(InvalidArgument, match=f"{option} must be one of .*{known}.*found 'no'"):
        yuv420_to_rgb(Tensor(np.zeros((3, 2), np.uint8), device="PYTHON"), **options)
