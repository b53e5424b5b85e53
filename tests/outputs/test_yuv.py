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

# tinygrad runs clang for kernels that its cache in the home folder lacks.
pytestmark = pytest.mark.process

on_cpu = pytest.mark.cpu_device
Levels = npt.NDArray[Any]


def packed(planes: list[Levels]) -> Levels:
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


def by_arithmetic(planes: list[Levels]) -> Levels:
    """Levels of red, green and blue by definition, neither rounded nor clipped."""
    (height, width), (red, blue) = planes[0].shape, (0.299, 0.114)
    down, across = (np.arange(height) - 0.5) / 2, np.arange(width) / 2
    y, u, v = (plane.astype(float) for plane in planes)
    u, v = (interpolated(interpolated(c, down, 0), across, 1) - 128 for c in (u, v))
    y, u, v = (y - 16) * 255 / 219, u * 255 / 224, v * 255 / 224
    r, b = y + 2 * (1 - red) * v, y + 2 * (1 - blue) * u
    return np.stack([r, (y - red * r - blue * b) / (1 - red - blue), b], axis=-1)


def test_levels_are_those_of_the_definition_and_rounded_unless_floats_are_asked_for() -> None:
    many = [noise(4, 4, number) for number in range(8)]
    frames = Tensor(np.stack([packed(planes) for planes in many]), device="PYTHON")
    exact = yuv420_to_rgb(frames, dtype="float32").numpy()
    wanted = np.stack([by_arithmetic(planes) for planes in many])
    np.testing.assert_allclose(exact, wanted.clip(0, 255), atol=1e-3)
    assert (wanted < 0).any() and (wanted > 255).any()
    rounded = yuv420_to_rgb(frames).numpy()
    assert rounded.dtype == np.uint8
    np.testing.assert_array_equal(rounded, np.floor(exact + 0.5))
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


@on_cpu
def test_every_call_of_a_captured_function_converts_what_it_is_given() -> None:
    @TinyJit
    def step(frames: Tensor) -> Tensor:
        return yuv420_to_rgb(frames).realize()

    for seed in range(4):
        planes = noise(48, 64, seed)
        found = step(Tensor(packed(planes), device="CPU").realize()).numpy()
        assert np.abs(found - by_arithmetic(planes).clip(0, 255)).max() <= 1


@on_cpu
def test_a_clip_of_h264_is_as_swscale_has_it(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", scene(4), codec_options={"crf": "4"})
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = list(container.decode(video=0))
    clip = np.stack([packed(planes_of(frame)) for frame in frames])
    found = yuv420_to_rgb(Tensor(clip, device="CPU")).numpy()
    wanted = np.stack([by_swscale(frame) for frame in frames])
    assert np.abs(found - wanted).max() <= 2


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
            if frame.format.name != "yuv420p" or frame.colorspace == 1 or frame.color_range == 2:
                continue  # BT.709, or full range
            top, left = ((side - SIDE) // 4 * 2 for side in (frame.height, frame.width))
            middle = np.s_[top : top + SIDE, left : left + SIDE]
            halves = np.s_[top // 2 : (top + SIDE) // 2, left // 2 : (left + SIDE) // 2]
            y, u, v = planes_of(frame)
            square = Tensor(packed([y[middle], u[halves], v[halves]]), device="CPU")
            off = np.abs(yuv420_to_rgb(square).numpy() - by_swscale(frame)[middle])
            assert off[2:-2, 2:-2].max() <= 2, path  # the edges need pixels that were cut off
            n_compared += 1
    assert n_compared > 10


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "words"),
    [
        ((3, 4), "int8", {}, "found signed char of"),
        ((6,), "uint8", {}, r"found unsigned char of \(6,\)"),
        ((4, 4), "uint8", {}, "4 rows of 4"),
        ((3, 5), "uint8", {}, "3 rows of 5"),
        ((0, 4), "uint8", {}, "0 rows of 4"),
        ((3, 2), "uint8", {"dtype": "no"}, "dtype must be one of .*'uint8'.*found 'no'"),
    ],
)
def test_bad_frames_refused(shape: tuple[int, ...], dtype: str, options: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        yuv420_to_rgb(Tensor(np.zeros(shape, dtype), device="PYTHON"), **options)
