"""Ready transforms: what they draw, what they make of a picture, and what they refuse."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardio import Array, Schema, ShardLoader
from shardio import open as shardio_open
from shardio.errors import InvalidArgument, SchemaError, UnsupportedEnvironment
from shardio.media import encode_jpeg
from shardio.media.values import StoredImage
from shardio.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    Normalize,
    RandomErasing,
    RandomGrayscale,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    ToFloat,
)
from tests.loading import write_dataset
from tests.transforms.pictures import Pixels, changed, clip, generator, picture

N_DRAWS = 4000


def gradient(height: int, width: int) -> Pixels:
    """Each pixel says where it lies: its column in red, its row in green."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x, y, 0 * x], axis=-1).astype(np.uint8)


def unevenness(drawn: npt.ArrayLike, low: float, high: float) -> float:
    """Return the Kolmogorov distance from uniform over its 0.1 % critical value."""
    shares = (np.sort(np.asarray(drawn, float)) - low) / (high - low)
    n = len(shares)
    steps = np.arange(n + 1) / n
    distance = max(np.abs(shares - steps[:-1]).max(), np.abs(shares - steps[1:]).max())
    return float(distance * np.sqrt(n) / 1.95)


# --- where a picture is cut -----------------------------------------------------------------


def boxes(height: int, width: int, **options: Any) -> npt.NDArray[np.int64]:
    crop, rng = RandomResizedCrop(8, **options), generator(1)
    return np.array([crop.box(height, width, rng) for _ in range(N_DRAWS)])


@pytest.mark.parametrize("scale", [(0.1, 0.5), (0.3, 0.35)])
def test_areas_are_uniform_between_the_bounds(scale: tuple[float, float]) -> None:
    found = boxes(2000, 2000, scale=scale)
    areas = found[:, 2] * found[:, 3] / 2000**2
    assert unevenness(areas, *scale) < 1


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (1.5, 3.0)])
def test_ratios_are_uniform_in_their_logarithm(ratio: tuple[float, float]) -> None:
    found = boxes(4000, 4000, scale=(0.1, 0.3), ratio=ratio)
    assert unevenness(np.log(found[:, 3] / found[:, 2]), *np.log(ratio)) < 1


def test_places_are_uniform_over_all_where_a_box_fits() -> None:
    found = boxes(50, 60, scale=(0.25, 0.25), ratio=(1.0, 1.0))
    assert (found[:, 2:] == [27, 27]).all()
    for starts, n_places in ((found[:, 0], 50 - 27 + 1), (found[:, 1], 60 - 27 + 1)):
        counts = np.bincount(starts, minlength=n_places)
        assert len(counts) == n_places
        expected = N_DRAWS / n_places
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        assert chi_squared < n_places + 4 * np.sqrt(2 * n_places)
    assert abs(np.corrcoef(found[:, 0], found[:, 1])[0, 1]) < 4 / np.sqrt(N_DRAWS)


def test_a_box_never_leaves_the_picture() -> None:
    for height, width in ((1, 1), (7, 300), (300, 7), (50, 60)):
        top, left, tall, wide = boxes(height, width).T
        assert (tall > 0).all() and (wide > 0).all() and (top >= 0).all() and (left >= 0).all()
        assert (top + tall <= height).all() and (left + wide <= width).all()


@pytest.mark.parametrize(
    ("size", "box"), [((10, 100), (0, 43, 10, 13)), ((100, 10), (43, 0, 13, 10))]
)
def test_without_a_fit_the_centre_is_cropped(size: tuple[int, int], box: tuple[int, ...]) -> None:
    assert RandomResizedCrop(8, scale=(1.0, 1.0)).box(*size, generator()) == box


def test_what_is_cut_is_scaled_to_the_size() -> None:
    assert changed(RandomResizedCrop(24), picture()).shape == (24, 24, 3)
    assert changed(RandomResizedCrop((16, 20)), picture()).shape == (16, 20, 3)
    assert changed(RandomResizedCrop((16, 20)), clip()).shape == (4, 16, 20, 3)


def test_the_pixels_are_those_of_the_box() -> None:
    crop = RandomResizedCrop(32, scale=(0.2, 0.6))
    top, left, tall, wide = crop.box(200, 240, generator(5))
    found = changed(crop, gradient(200, 240), seed=5).astype(float)
    # The middle of new pixel i lies at (i + 1/2) / 32 of the box, and pixel x at x + 1/2.
    middles = (np.arange(32) + 0.5) / 32
    inner = slice(2, -2)
    np.testing.assert_allclose(found[0, inner, 0], (left + middles * wide - 0.5)[inner], atol=0.6)
    np.testing.assert_allclose(found[inner, 0, 1], (top + middles * tall - 0.5)[inner], atol=0.6)


def test_shrinking_takes_all_pixels_into_account() -> None:
    fine = np.zeros((64, 64, 3), np.uint8)
    fine[::2] = 254  # lines that a sparse grid would hit or miss
    whole = RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    assert np.abs(changed(whole, fine).astype(int) - 127).max() <= 8


def test_without_pillow_the_constructor_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedEnvironment, match=r"pip install '\.\[images\]'"):
        RandomResizedCrop(8)


# --- mirrored -------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 1.0])
def test_the_share_of_mirrored_pictures_is_p(p: float) -> None:
    flip, rng, pixels = HorizontalFlip(p), generator(2), gradient(1, 2)
    n_mirrored = 0
    for _ in range(N_DRAWS):
        found = flip({"image": pixels}, rng)["image"]
        n_mirrored += int(found[0, 0, 0] == 1)
    assert abs(n_mirrored - p * N_DRAWS) <= 4 * np.sqrt(N_DRAWS * p * (1 - p))


def test_mirroring_exchanges_left_and_right_alone() -> None:
    pixels = clip()
    np.testing.assert_array_equal(changed(HorizontalFlip(1.0), pixels), pixels[:, :, ::-1])


# --- colours --------------------------------------------------------------------------------


def grey_of(pixels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weighed: npt.NDArray[np.float64] = pixels.astype(float) @ [0.299, 0.587, 0.114]
    return weighed


def muted(seed: int = 0) -> Pixels:
    """Return a picture whose levels no change of these tests takes out of 0 to 255."""
    return generator(seed).integers(90, 130, (12, 16, 3), np.uint8)


def close(found: Pixels, wanted: npt.NDArray[Any]) -> None:
    np.testing.assert_allclose(found, np.clip(wanted, 0, 255), atol=0.51)


@pytest.mark.parametrize("factor", [0.0, 1.5])
def test_a_factor_scales_the_distance_from_black_or_grey(factor: float) -> None:
    grey = grey_of(muted())[..., None]
    for name, centre in (("brightness", 0), ("contrast", grey.mean()), ("saturation", grey)):
        jitter = ColorJitter(**{name: (factor, factor)})  # type: ignore[arg-type]
        close(changed(jitter, muted()), centre + (muted() - centre) * factor)
    both = ColorJitter(brightness=(0.5, 0.5), contrast=(factor, factor))
    close(changed(both, muted()), (grey.mean() + (muted() - grey.mean()) * factor) / 2)


def test_hue_turns_colours_and_keeps_greys_and_brightness() -> None:
    turned = changed(ColorJitter(hue=(0.25, 0.25)), muted())
    assert np.abs(turned.astype(int) - muted()).max() > 10
    np.testing.assert_allclose(grey_of(turned), grey_of(muted()), atol=0.6)
    grey = np.repeat(muted()[..., :1], 3, axis=-1)
    close(changed(ColorJitter(hue=(0.25, 0.25)), grey), grey)
    there = changed(ColorJitter(hue=(0.5, 0.5)), muted())
    close(there, 2 * grey_of(muted())[..., None] - muted())


def test_a_turn_of_hue_goes_from_red_towards_green() -> None:
    red = np.full((1, 1, 3), (180, 90, 90), np.uint8)
    turned = changed(ColorJitter(hue=(1 / 3, 1 / 3)), red)[0, 0]
    assert turned.argmax() == 1


def test_levels_outside_are_clipped() -> None:
    found = changed(ColorJitter(brightness=(3.0, 3.0)), picture())
    close(found, picture().astype(float) * 3)
    assert (found == 255).any()
    close(
        changed(ColorJitter(contrast=(4.0, 4.0)), picture()),
        4.0 * picture() - 3 * grey_of(picture()).mean(),
    )


@pytest.mark.parametrize(
    ("given", "bounds"), [(0.4, (0.6, 1.4)), (2.0, (0.0, 3.0)), ((0.3, 0.5), (0.3, 0.5))]
)
def test_factors_are_uniform_between_their_bounds(given: Any, bounds: tuple[float, float]) -> None:
    jitter, rng = ColorJitter(brightness=given), generator(3)
    pixels = np.full((1, 1, 3), 80, np.uint8)
    found = [jitter({"x": pixels}, rng)["x"][0, 0, 0] / 80 for _ in range(N_DRAWS)]
    # Levels are whole: half a level of either side is what a draw may be off.
    assert unevenness(found + generator(4).uniform(-0.5, 0.5, N_DRAWS) / 80, *bounds) < 1.2


def test_shifts_of_hue_are_uniform_from_minus_x_to_x() -> None:
    jitter, rng = ColorJitter(hue=0.3), generator(5)
    pixels = np.full((1, 1, 3), (160, 100, 110), np.uint8)
    before = _angle(pixels[0, 0])
    turns = [
        (_angle(jitter({"x": pixels}, rng)["x"][0, 0]) - before) / 2 / np.pi for _ in range(2000)
    ]
    wrapped = (np.array(turns) + 0.5) % 1 - 0.5
    assert unevenness(wrapped, -0.3, 0.3) < 1.2


def _angle(colour: npt.NDArray[Any]) -> float:
    red, green, blue = colour.astype(float)
    i = 0.5959 * red - 0.2746 * green - 0.3213 * blue
    q = 0.2115 * red - 0.5227 * green + 0.3112 * blue
    return float(np.arctan2(q, i))


def test_what_one_parameter_is_does_not_change_the_other_draws() -> None:
    alone = changed(ColorJitter(saturation=0.5), muted(), seed=7)
    grey = grey_of(muted())[..., None]
    brighter = changed(ColorJitter(brightness=(1.2, 1.2), saturation=0.5), muted(), seed=7)
    assert np.abs(alone - grey).max() > 1
    np.testing.assert_allclose(brighter, alone * 1.2, atol=1.2)


@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
def test_the_share_of_grey_pictures_is_p(p: float) -> None:
    turn, rng, pixels = RandomGrayscale(p), generator(6), muted()[:1, :1]
    greys = [turn({"image": pixels}, rng)["image"] for _ in range(N_DRAWS)]
    n_grey = sum((grey[..., 1:] == grey[..., :1]).all() for grey in greys)
    assert abs(n_grey - p * N_DRAWS) <= 4 * np.sqrt(N_DRAWS * p * (1 - p))


def test_grey_is_luma_in_all_channels() -> None:
    found = changed(RandomGrayscale(1.0), clip())
    close(found, np.repeat(grey_of(clip())[..., None], 3, axis=-1))
    white = np.full((9000, 1, 3), 255, np.uint8)  # more pixels than are converted at once
    np.testing.assert_array_equal(changed(RandomGrayscale(1.0), white), white)


# --- floats ---------------------------------------------------------------------------------


def test_levels_become_floats_of_mean_0_and_deviation_1() -> None:
    pixels = clip()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    found = changed(Normalize(mean, std), pixels)
    assert found.dtype == np.float32 and found.shape == pixels.shape
    np.testing.assert_allclose(found, (pixels / 255 - mean) / std, atol=1e-5)
    found = changed(Normalize(0.5, 0.25), pixels)  # of all channels
    np.testing.assert_allclose(found, (pixels / 255 - 0.5) / 0.25, atol=1e-5)
    halves = changed(Normalize(0.5, 0.25, dtype="float16"), pixels)
    assert halves.dtype == np.float16
    np.testing.assert_array_equal(halves, found.astype(np.float16))


def test_means_of_levels_up_to_255_are_refused_for_uint8_only() -> None:
    normalize = Normalize((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
    with pytest.raises(SchemaError, match=r"levels from 0 to 1; .*: divide mean and std by 255"):
        normalize({"x": clip()})
    floats = clip().astype(np.float32)  # which may have any range
    np.testing.assert_allclose(
        changed(normalize, floats),
        changed(Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), clip()),
        atol=1e-4,
    )


def test_floats_are_normalized_as_they_are() -> None:
    pixels, normalize = clip(), Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    levels = changed(normalize, pixels)
    for dtype in (np.float32, np.float64):
        found = changed(normalize, (pixels / 255).astype(dtype))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, levels, atol=1e-5)
    np.testing.assert_allclose(changed(Compose(ToFloat(), normalize), pixels), levels, atol=1e-5)


def test_levels_become_floats_from_0_to_1() -> None:
    for dtype in ("float32", "float16"):
        found = changed(ToFloat(dtype), clip())
        np.testing.assert_array_equal(found, (clip() / np.float32(255)).astype(dtype))
        assert found.dtype == dtype


def test_floats_beside_pictures_stay_as_they_are() -> None:
    points = np.ones((5, 2, 3), np.float32)
    found = Normalize(0.5, 0.5)({"frames": clip(), "points": points})
    assert found["points"] is points and found["frames"].dtype == np.float32


# --- a sample and its fields ----------------------------------------------------------------

DRAWING = [
    RandomResizedCrop(16, scale=(0.1, 0.4)),
    HorizontalFlip(),
    ColorJitter(0.5, 0.0, 0.5, 0.5),
    RandomGrayscale(0.5),
    RandomRotation(30),
    RandomErasing(0.7, value="random"),
    Compose(RandomResizedCrop(16), HorizontalFlip(), ColorJitter(0.5, 0.5), Normalize(0, 1)),
]
named = pytest.mark.parametrize("transform", DRAWING, ids=lambda t: type(t).__name__)


@named
def test_all_frames_of_a_clip_and_all_fields_change_by_one_draw(transform: Any) -> None:
    one = picture()
    frames = np.stack([one, one, one])
    for seed in range(8):
        sample = {"a": one, "clip": frames, "b": one, "label": 3}
        found = transform(sample, generator(seed))
        assert list(found) == list(sample) and found["label"] == 3
        for same in (found["b"], *found["clip"]):
            np.testing.assert_array_equal(same, found["a"])


@named
def test_the_same_generator_gives_the_same_and_another_one_another(transform: Any) -> None:
    found = [changed(transform, picture(), seed).tobytes() for seed in (0, 0, 1, 2, 3, 4)]
    assert found[0] == found[1]
    assert len(set(found)) > 1


@pytest.mark.parametrize("transform", [Resize(16), CenterCrop(16), ToFloat(), Normalize(0, 1)])
def test_fixed_transforms_change_all_frames_alike_and_draw_nothing(transform: Any) -> None:
    frames, rng = np.stack([picture()] * 3), generator()
    found = transform({"clip": frames, "image": picture()}, rng)
    for frame in found["clip"]:
        np.testing.assert_array_equal(frame, found["image"])
    assert rng.random() == generator().random()


@named
def test_the_sample_that_is_given_stays_as_it_is(transform: Any) -> None:
    pixels = picture()
    pixels.flags.writeable = False
    sample = {"image": pixels}
    transform(sample, generator())
    np.testing.assert_array_equal(sample["image"], picture())


def test_named_fields_are_changed_and_no_others() -> None:
    sample = {"a": picture(), "b": picture(), "c": picture()}
    found = HorizontalFlip(1.0, fields=["a", "c"])(sample, generator())
    assert found["b"] is sample["b"]
    for name in "ac":
        np.testing.assert_array_equal(found[name], picture()[:, ::-1])
    found = HorizontalFlip(1.0, fields="b")(sample, generator())
    assert found["a"] is sample["a"] and found["b"] is not sample["b"]


def test_an_optional_picture_may_be_missing() -> None:
    flip = HorizontalFlip(1.0, fields=["a", "b"])
    found = flip({"a": None, "b": picture()}, generator())
    assert found["a"] is None
    np.testing.assert_array_equal(found["b"], picture()[:, ::-1])
    assert flip({"a": None, "b": None}, generator()) == {"a": None, "b": None}


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (
            {"x": np.zeros((4, 4), np.uint8), "n": 3},
            r"no picture in .* x \(uint8 \(4, 4\)\), n \(int",
        ),
        ({"x": np.zeros((4, 4, 3))}, r"no picture in .*float64"),
        ({"x": picture(4, 4), "y": picture(4, 5)}, r"one height and width; .*\(4, 5, 3\)"),
    ],
)
def test_a_sample_without_fitting_pictures_is_refused(sample: Any, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        HorizontalFlip()(sample, generator())


def test_a_named_field_that_is_no_picture_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"no field 'y' in a sample of x"):
        HorizontalFlip(fields=["y"])({"x": picture()}, generator())
    floats = Normalize(0, 1)({"x": picture()}, generator())
    with pytest.raises(SchemaError, match=r"field 'x': HorizontalFlip expects uint8.*float32"):
        HorizontalFlip(fields="x")(floats, generator())


# --- one after the other --------------------------------------------------------------------


def test_transforms_are_called_in_their_order_with_one_generator() -> None:
    calls = []

    def draws(sample: Any, rng: np.random.Generator) -> Any:
        calls.append(rng.random())
        return sample

    def counts(sample: Any) -> Any:
        return {**sample, "n": sample.get("n", 0) + 1}

    chain = Compose(draws, counts, Compose(counts, draws))
    assert chain({}, generator(9)) == {"n": 2}
    assert calls == generator(9).random(2).tolist()


@pytest.mark.process
def test_a_loader_gives_the_same_draws_with_any_number_of_workers(tmp_path: Path) -> None:
    schema = Schema({"frames": Array("uint8", (2, 12, 16, 3)), "label": Array("int64")})
    frames = generator().integers(0, 256, (10, 2, 12, 16, 3), np.uint8)
    samples = ({"frames": frames[i], "label": i} for i in range(10))
    folder = write_dataset(tmp_path / "set", 10, 1, schema, samples)
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    transform = Compose(RandomResizedCrop(8), HorizontalFlip(), jitter, Normalize(0.5, 0.5))
    found = []
    for n_workers in (0, 2):
        options: Any = {"output": "numpy", "num_workers": n_workers, "seed": 4}
        with ShardLoader(folder, 4, transform=transform, **options) as loader:
            epochs = [[batch["frames"].copy() for batch in loader] for _ in range(2)]
        found.append([np.concatenate(batches) for batches in epochs])
    for epoch in range(2):
        np.testing.assert_array_equal(found[0][epoch], found[1][epoch])
    assert found[0][0].shape == (10, 2, 8, 8, 3)
    assert (found[0][0] != found[0][1]).any()


# --- what a constructor refuses -------------------------------------------------------------

NONSENSE: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (RandomResizedCrop, (0,), {}, "size must be .*found 0"),
    (RandomResizedCrop, ((8, 8, 8),), {}, "size must be"),
    (RandomResizedCrop, (8,), {"scale": (0.5, 0.1)}, "scale must be two numbers"),
    (RandomResizedCrop, (8,), {"scale": (0.5, 1.5)}, "scale must be .* to 1"),
    (RandomResizedCrop, (8,), {"ratio": (0, 1)}, "ratio must be"),
    (RandomResizedCrop, (8,), {"fields": []}, "fields must be"),
    (HorizontalFlip, (1.1,), {}, "p must be a probability"),
    (RandomResizedCrop, (True,), {}, "size must be"),
    (ToFloat, (np.array([1, 2]),), {}, "dtype must be"),
    (HorizontalFlip, (float("nan"),), {}, "p must be a probability"),
    (HorizontalFlip, (), {"fields": ["a", 3]}, "fields must be"),
    (ColorJitter, (-0.1,), {}, "brightness must be at least 0"),
    (ColorJitter, (), {"contrast": (2, 1)}, "contrast must be two numbers"),
    (ColorJitter, (), {"hue": 0.6}, "hue must be two numbers from -0.5 to 0.5"),
    (Resize, (0,), {}, "size must be .*found 0"),
    (Resize, ((8, 8, 8),), {}, "size must be"),
    (CenterCrop, (8.5,), {}, r"size must be .*found 8\.5"),
    (RandomRotation, (400,), {}, "degrees must be two numbers from -360 to 360"),
    (RandomRotation, ((20, 10),), {}, "degrees must be two numbers"),
    (RandomRotation, (10,), {"interpolation": "cubic"}, "interpolation must be one of"),
    (RandomRotation, (10,), {"fill": 256}, "fill must be three numbers from 0 to 255"),
    (RandomRotation, (10,), {"fill": (1, 2)}, "fill must be three numbers"),
    (RandomErasing, (2,), {}, "p must be a probability"),
    (RandomErasing, (), {"scale": (0.5, 1.5)}, "scale must be two numbers from 0 to 1"),
    (RandomErasing, (), {"ratio": (0, 1)}, "ratio must be"),
    (RandomErasing, (), {"value": "noise"}, "value must be one of 'random'; found 'noise'"),
    (RandomErasing, (), {"value": (1, 2)}, "value must be three numbers"),
    (Normalize, ((0, 0), 1), {}, "mean must be"),
    (Normalize, (float("nan"), 1), {}, "mean must be"),
    (Normalize, (0, (1, 0, 1)), {}, "std must be above 0"),
    (Normalize, (0, 1), {"dtype": "float64"}, "dtype must be"),
    (ToFloat, ("float64",), {}, "dtype must be"),
    (RandomGrayscale, (-0.1,), {}, "p must be a probability"),
    (Compose, (), {}, "one or more transforms"),
    (Compose, ([HorizontalFlip()],), {}, "takes functions of a sample"),
    (Compose, (lambda a, b, c: a,), {}, r"must take \(sample\) or \(sample, rng\)"),
]


@pytest.mark.parametrize(("kind", "arguments", "options", "words"), NONSENSE)
def test_a_constructor_refuses_nonsense(
    kind: Any, arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        kind(*arguments, **options)


# --- how they show themselves ---------------------------------------------------------------


def test_a_transform_shows_its_options() -> None:
    mean: Any = np.array([0.1, 1 / 3, 0.3])
    function: Any = muted
    for transform, shown in (
        (HorizontalFlip(), "HorizontalFlip(p=0.5)"),
        (Resize((8, 9), fields="a"), "Resize(size=(8, 9), fields=('a',))"),
        (
            RandomResizedCrop(112),
            "RandomResizedCrop(size=112, scale=(0.08, 1), ratio=(0.75, 1.33333))",
        ),
        (Normalize(mean, 1), "Normalize(mean=(0.1, 0.333333, 0.3), std=1, dtype='float32')"),
        (
            RandomErasing(value="random"),
            "RandomErasing(p=0.5, scale=(0.02, 0.33), ratio=(0.3, 3.3), value='random')",
        ),
        (Compose(ToFloat(), function), "Compose(ToFloat(dtype='float32'), muted)"),
    ):
        assert repr(transform) == shown
    many = [f"a field with a long name, number {i}" for i in range(999)]
    assert len(repr(HorizontalFlip(fields=many))) <= 200


def test_every_transform_shows_all_of_its_options() -> None:
    for transform in (
        *(RandomRotation(3), ColorJitter(), CenterCrop(3), Resize(3), ToFloat(), HorizontalFlip()),
        *(RandomErasing(), RandomGrayscale(), RandomResizedCrop(3), Normalize(0, 1)),
    ):
        options = set(inspect.signature(type(transform)).parameters) - {"fields"}
        assert all(f"{name}=" in repr(transform) for name in options)


def test_numbers_of_numpy_are_taken_as_numbers() -> None:
    flip = HorizontalFlip(np.float32(1))  # type: ignore[arg-type]
    assert np.array_equal(changed(flip, picture()), picture()[:, ::-1])
    size: Any = np.int64(5)
    assert changed(Resize((size, size)), picture()).shape == (5, 5, 3)
    assert changed(RandomResizedCrop(size), picture()).shape == (5, 5, 3)
    one: Any = np.float32(0.5)
    jitters = ColorJitter(one, hue=one), ColorJitter(0.5, hue=0.5)
    assert np.array_equal(*(changed(each, picture()) for each in jitters))
    turns = RandomRotation(np.int64(9)), RandomRotation(9)  # type: ignore[arg-type]
    assert np.array_equal(*(changed(each, picture()) for each in turns))


def test_what_is_no_sample_is_refused_with_what_to_write() -> None:
    transforms: list[Any] = [HorizontalFlip(), ToFloat()]
    for transform in transforms:
        with pytest.raises(SchemaError, match=r"takes a sample, a dict such as .*found ndarray"):
            transform(picture(), generator(0))
    with pytest.raises(InvalidArgument, match=r"f\(sample, rng\).*default_rng\(0\)"):
        HorizontalFlip()({"x": picture()})
    with pytest.raises(SchemaError, match=r"expected uint8 .*Put ToFloat or Normalize after"):
        HorizontalFlip()({"x": picture().astype(np.float32)}, generator(0))
    with pytest.raises(SchemaError, match=r"expects uint8 .*Put ToFloat or Normalize after"):
        Resize(8, fields="x")({"x": picture().astype(np.float32)})
    stored = {"x": StoredImage(encode_jpeg(picture()), *picture().shape)}
    for resize in (Resize(8), Resize(8, fields="x")):
        with pytest.raises(SchemaError, match=r"pass {'x': sample\['x'\]\.decode\(\)}, or a sam"):
            resize(stored)


def test_a_chain_says_what_to_write() -> None:
    with pytest.raises(InvalidArgument, match=r"each as an argument, Compose\(a, b\)"):
        Compose([HorizontalFlip()])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"the class ToFloat; pass an instance, ToFloat\("):
        Compose(ToFloat)  # type: ignore[arg-type]

    def nothing(sample: Any) -> Any:
        return None

    with pytest.raises(SchemaError, match=r"transform nothing in Compose must return a sample"):
        Compose(nothing, HorizontalFlip())({"x": picture()}, generator(0))


def test_statistics_are_those_of_fields_that_have_pictures(tmp_path: Path) -> None:
    schema = Schema({"x": Array("uint8", (4, 4, 3)), "label": Array("int64")})
    samples = [{"x": np.zeros((4, 4, 3), np.uint8), "label": 0}]
    with shardio_open(write_dataset(tmp_path / "set", 1, 1, schema, samples)) as dataset:
        with pytest.raises(InvalidArgument, match=r"no field 'labels'; did you mean 'label'"):
            Normalize.of(dataset, fields="labels")
        with pytest.raises(InvalidArgument, match=r"'label' has no pictures .*fields=\['x'\]"):
            Normalize.of(dataset, fields="label")
