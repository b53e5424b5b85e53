"""Transforms that move, scale, turn or erase pixels, against simple references in NumPy."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardio.errors import SchemaError, UnsupportedEnvironment
from shardio.transforms import CenterCrop, Normalize, RandomErasing, RandomRotation, Resize
from tests.transforms.pictures import changed, clip, generator, picture, smooth

N_DRAWS = 2000


# --- sizes ----------------------------------------------------------------------------------


def triangle_weights(n: int, n_new: int) -> npt.NDArray[np.float64]:
    """Return a matrix that resamples n values to n_new, with a triangle as wide as the step."""
    step = n / n_new
    middles = (np.arange(n_new) + 0.5) * step - 0.5
    weights = 1 - np.abs(np.arange(n) - middles[:, None]) / max(step, 1.0)
    weights = np.maximum(weights, 0)
    made: npt.NDArray[np.float64] = weights / weights.sum(1, keepdims=True)
    return made


def resampled(pixels: npt.NDArray[Any], height: int, width: int) -> npt.NDArray[np.float64]:
    rows = triangle_weights(pixels.shape[-3], height)
    columns = triangle_weights(pixels.shape[-2], width)
    made: npt.NDArray[np.float64] = np.einsum("yh,...hwc,xw->...yxc", rows, pixels, columns)
    return made


@pytest.mark.parametrize("size", [(20, 30), (80, 120), (17, 90), (40, 60)])
def test_resizing_is_a_triangle_filter(size: tuple[int, int]) -> None:
    for pixels in (picture(), clip()):
        found = changed(Resize(size), pixels)
        assert found.shape == (*pixels.shape[:-3], *size, 3) and found.dtype == np.uint8
        np.testing.assert_allclose(found, resampled(pixels, *size), atol=1.01)


@pytest.mark.parametrize(
    ("given", "size", "made"),
    [((40, 60), 20, (20, 30)), ((60, 40), 20, (30, 20)), ((37, 101), 24, (24, 65))],
)
def test_a_number_is_the_shorter_side(
    given: tuple[int, int], size: int, made: tuple[int, int]
) -> None:
    assert changed(Resize(size), picture(*given)).shape == (*made, 3)
    assert changed(Resize(np.int64(size).item()), picture(*given)).shape == (*made, 3)


def test_pictures_of_several_sizes_are_resized_and_cropped() -> None:
    sample = {"a": picture(40, 60), "b": picture(20, 24), "label": 3}
    for transform in (Resize((16, 16)), CenterCrop(16)):
        found = transform(sample)
        assert found["a"].shape == found["b"].shape == (16, 16, 3) and found["label"] == 3


@pytest.mark.parametrize("kind", [Resize, RandomRotation])
def test_without_pillow_the_constructor_names_the_extra(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedEnvironment, match=rf"{kind.__name__}.*pip install '\.\[images"):
        kind(8)


# --- the centre -----------------------------------------------------------------------------


def test_the_centre_is_cropped() -> None:
    pixels = clip()
    np.testing.assert_array_equal(changed(CenterCrop((20, 40)), pixels), pixels[:, 10:30, 10:50])
    np.testing.assert_array_equal(changed(CenterCrop(7), picture()), picture()[16:23, 26:33])
    np.testing.assert_array_equal(changed(CenterCrop((40, 60)), picture()), picture())


def test_a_smaller_picture_gets_black_borders() -> None:
    pixels = clip()
    found = changed(CenterCrop((45, 30)), pixels)
    assert found.shape == (4, 45, 30, 3)
    np.testing.assert_array_equal(found[:, 2:42], pixels[:, :, 15:45])
    assert not found[:, :2].any() and not found[:, 42:].any()


# --- rotations ------------------------------------------------------------------------------


def turned(pixels: npt.NDArray[Any], degrees: float) -> npt.NDArray[np.float64]:
    """Rotate counterclockwise around the centre: interpolate linearly, 0 outside."""
    height, width = pixels.shape[:2]
    y, x = np.mgrid[0:height, 0:width].astype(float)
    y, x = y - (height - 1) / 2, x - (width - 1) / 2
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    at_x, at_y = cos * x - sin * y + (width - 1) / 2, sin * x + cos * y + (height - 1) / 2
    left, top = np.floor(at_x), np.floor(at_y)
    made = np.zeros(pixels.shape)
    for dy in (0, 1):
        for dx in (0, 1):
            share = (1 - np.abs(at_y - top - dy)) * (1 - np.abs(at_x - left - dx))
            row, column = (top + dy).astype(int), (left + dx).astype(int)
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            values = pixels[row.clip(0, height - 1), column.clip(0, width - 1)]
            made += np.where(inside, share, 0)[..., None] * values
    return made


@pytest.mark.parametrize("degrees", [-170.0, -33.0, 12.5, 20.0, 90.0])
def test_a_rotation_is_counterclockwise_around_the_centre(degrees: float) -> None:
    pixels = smooth(61, 61)
    wanted = turned(pixels, degrees)
    inside = turned(np.ones_like(pixels), degrees)[..., 0] > 1 - 1e-9
    for interpolation, tolerance in (("nearest", 6.0), ("bilinear", 1.01)):
        rotation = RandomRotation((degrees, degrees), interpolation=interpolation)  # type: ignore[arg-type]
        found = changed(rotation, pixels)
        assert found.shape == pixels.shape and found.dtype == np.uint8
        np.testing.assert_allclose(found[inside], wanted[inside], atol=tolerance)


def test_what_lies_outside_is_filled() -> None:
    found = changed(RandomRotation((45, 45), fill=(7, 8, 9)), np.full((40, 40, 3), 200, np.uint8))
    np.testing.assert_array_equal(found[0, 0], [7, 8, 9])
    np.testing.assert_array_equal(found[20, 20], [200] * 3)


def test_angles_are_uniform_between_the_bounds() -> None:
    rotation, rng, pixels = RandomRotation(30), generator(1), smooth(31, 31)
    seen = {rotation({"x": pixels}, rng)["x"].tobytes() for _ in range(20)}
    assert len(seen) > 10
    bounded = RandomRotation((10, 20))
    found = [bounded({"x": pixels}, generator(i))["x"] for i in range(5)]
    low, high = (changed(RandomRotation((a, a)), pixels).astype(int) for a in (10, 20))
    apart = np.abs(high - low).mean()
    assert all(np.abs(each - low).mean() <= apart * 1.1 for each in found)


# --- erasing --------------------------------------------------------------------------------


def erased(pixels: npt.NDArray[Any], seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """Return an erased picture and the mask of its pixels that changed."""
    found = changed(RandomErasing(1.0, **options), pixels, seed)
    return found, (found != pixels).any(-1)


def test_a_box_of_the_drawn_size_is_filled_and_nothing_else_changes() -> None:
    pixels = np.full((100, 80, 3), 50, np.uint8)
    for seed in range(20):
        found, mask = erased(pixels, seed, scale=(0.1, 0.1), ratio=(2.0, 2.0), value=(1, 2, 300))
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        assert (len(rows), len(columns)) == (40, 20)  # a tenth of the area, twice as high as wide
        assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        np.testing.assert_array_equal(found[mask], [[1, 2, 255]] * 800)


def test_places_of_boxes_reach_all_corners() -> None:
    erasing, rng = RandomErasing(scale=(0.25, 0.25), ratio=(1.0, 1.0)), generator(3)
    found = [box for _ in range(N_DRAWS) if (box := erasing.box(10, 10, rng)) is not None]
    assert len(found) == N_DRAWS
    assert {box[2:] for box in found} == {(5, 5)}
    counts = np.bincount([top * 6 + left for top, left, *_ in found], minlength=36)
    assert len(counts) == 36 and counts.min() > N_DRAWS / 36 / 2


def test_boxes_that_do_not_fit_leave_the_picture() -> None:
    pixels = picture()
    assert RandomErasing(scale=(1.0, 1.0)).box(40, 60, generator()) is None
    assert changed(RandomErasing(1.0, scale=(1.0, 1.0)), pixels) is pixels


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_the_share_of_erased_pictures_is_p(p: float) -> None:
    erasing, rng, pixels = RandomErasing(p, value=1), generator(2), np.zeros((20, 20, 3), np.uint8)
    n = sum(bool(erasing({"x": pixels}, rng)["x"].any()) for _ in range(N_DRAWS))
    assert abs(n - p * N_DRAWS) <= 4 * np.sqrt(N_DRAWS * p * (1 - p))


def test_noise_fills_levels_evenly_and_floats_normally_and_all_frames_alike() -> None:
    options: dict[str, Any] = {"scale": (0.5, 0.5), "ratio": (1.0, 1.0), "value": "random"}
    frames = np.zeros((3, 100, 100, 3), np.uint8)
    found, mask = erased(frames, **options)
    np.testing.assert_array_equal(found[0], found[2])
    assert abs(found[mask].mean() - 127.5) < 3 and abs(found[mask].std() - 73.9) < 3
    found, mask = erased(frames.astype(np.float32), **options)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0], found[2])
    assert abs(found[mask].mean()) < 0.05 and abs(found[mask].std() - 1) < 0.05


def test_floats_are_erased_where_they_are_the_only_pictures_or_named() -> None:
    floats, levels = picture().astype(np.float32), picture()
    sample = {"x": floats, "y": levels}
    found = RandomErasing(1.0)(sample, generator())
    assert found["x"] is floats and found["y"] is not levels
    found = RandomErasing(1.0, value=0.5, fields="x")(sample, generator())
    assert (found["x"] == 0.5).any() and found["y"] is levels
    after = RandomErasing(1.0)(Normalize(0.5, 0.5)({"x": levels}), generator())
    assert (after["x"] == 0).any()
    with pytest.raises(SchemaError, match=r"field 'n': RandomErasing expects uint8 or floats of"):
        RandomErasing(fields="n")({"n": levels.astype(np.int16)}, generator())
