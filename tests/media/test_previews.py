"""Pixels are scaled and encoded for display."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from shardio import InvalidArgument
from shardio.media import demux, fit, preview_pixels, to_jpeg, to_png
from tests.media_made import quadrants, scene, write_video


def test_large_pixels_are_averaged_and_small_ones_enlarged_by_a_whole_factor() -> None:
    stripes = np.zeros((300, 400, 3), np.uint8)
    stripes[:, ::2] = 200
    assert fit(stripes, 100).shape == (75, 100, 3)
    assert np.abs(fit(stripes, 100).astype(int) - 100).max() < 4
    assert np.array_equal(fit(quadrants(10, 4), 35), quadrants(30, 12))
    same = quadrants(40, 30)
    assert fit(same, 40) is same and fit(same, 79) is same
    assert fit(np.zeros((2, 1000, 3), np.uint8), 64).shape == (1, 64, 3)


@pytest.mark.parametrize("size", [(1, 1), (64, 48), (33, 21)])
def test_a_png_keeps_every_pixel_and_a_jpeg_is_close(size: tuple[int, int]) -> None:
    rgb = quadrants(*size) if min(size) > 1 else np.full((1, 1, 3), 90, np.uint8)
    with Pillow.open(io.BytesIO(to_png(rgb))) as picture:
        assert (picture.format, np.array_equal(np.asarray(picture), rgb)) == ("PNG", True)
    with Pillow.open(io.BytesIO(to_png(rgb[..., 0]))) as picture:
        assert (picture.mode, np.array_equal(np.asarray(picture), rgb[..., 0])) == ("L", True)
    rgba = np.dstack([rgb, rgb[..., 0]])
    with Pillow.open(io.BytesIO(to_png(rgba))) as picture:
        assert (picture.mode, np.array_equal(np.asarray(picture), rgba)) == ("RGBA", True)
    with Pillow.open(io.BytesIO(to_jpeg(rgb))) as picture:
        assert picture.format == "JPEG"
        assert np.abs(np.asarray(picture).astype(int) - rgb).mean() < 12


@pytest.mark.parametrize("shape", [(4, 4, 2), (0, 4, 3), (4,), (2, 4, 4, 3)])
def test_other_arrays_are_no_pixels(shape: tuple[int, ...]) -> None:
    for encode in (to_jpeg, to_png):
        with pytest.raises(InvalidArgument, match="expected uint8 pixels"):
            encode(np.zeros(shape, np.uint8))


def test_a_jpeg_has_three_channels() -> None:
    for shape in ((4, 4, 4), (4, 4)):
        with pytest.raises(InvalidArgument, match="uint8 pixels of 3 channels"):
            to_jpeg(np.zeros(shape, np.uint8))


def test_a_video_is_shown_by_its_middle_keyframe_at_the_size_asked_for(tmp_path: Path) -> None:
    path = write_video(
        tmp_path / "a.mp4", scene(30), codec_options={"g": "10", "sc_threshold": "0"}
    )
    video = demux(str(path))
    found = preview_pixels(video, 48)
    assert found is not None and found.shape == (32, 48, 3)
    whole = preview_pixels(video, 1000)
    assert whole is not None and whole.shape == (64, 96, 3)
    expected = scene(30)[10]  # keyframes are 0, 10 and 20; 10 is the first of the nearest
    assert np.abs(whole.astype(int) - expected).mean() < 12


@pytest.mark.parametrize("shape", [(0, 64, 64, 3), (4, 0, 64, 3), (0, 64), (64, 0, 3)])
def test_no_pixels_have_no_preview(shape: tuple[int, ...]) -> None:
    for dtype in (np.uint8, np.float32):
        assert preview_pixels(np.zeros(shape, dtype)) is None
