"""Transforms with the same parameters as torchvision v2 and Albumentations give the same pixels.

torchvision's tensors are (channels, height, width). Tolerances are in levels of 0 to 255, or, for
results of floats, in units of the results.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

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
from tests.transforms.pictures import changed, clip, generator, picture, smooth

pytestmark = pytest.mark.external

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def torchvision() -> Any:
    """Return torchvision.transforms.v2."""
    pytest.importorskip("torch", reason="needs torch, which the extra dev does without")
    return pytest.importorskip("torchvision.transforms.v2", reason="torchvision is not installed")


@pytest.fixture(scope="module")
def albumentations() -> Any:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
        return pytest.importorskip("albumentations", reason="Albumentations is not installed")


def to_tensor(pixels: npt.NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, -3)))


def as_tensor(transform: Any, pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    made: npt.NDArray[Any] = np.moveaxis(transform(to_tensor(pixels)).numpy(), -3, -1)
    return made


def as_pillow(transform: Any, pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    from PIL import Image

    return np.asarray(transform(Image.fromarray(pixels)))


def compare(found: npt.NDArray[Any], wanted: npt.NDArray[Any], tolerance: float) -> None:
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=0, atol=tolerance)


EXACT, LEVEL = 0.0, 1.0
SAME: list[tuple[Any, str, tuple[Any, ...], dict[str, Any], float]] = [
    (ToFloat(), "ToDtype", ("float32",), {"scale": True}, 1e-7),
    (Resize(24), "Resize", (24,), {}, LEVEL),
    (Resize((70, 33)), "Resize", ((70, 33),), {}, LEVEL),
    (CenterCrop((21, 20)), "CenterCrop", ((21, 20),), {}, EXACT),
    (CenterCrop((45, 31)), "CenterCrop", ((45, 31),), {}, EXACT),
    (CenterCrop(75), "CenterCrop", (75,), {}, EXACT),
    (HorizontalFlip(1.0), "RandomHorizontalFlip", (1.0,), {}, EXACT),
    (RandomGrayscale(1.0), "RandomGrayscale", (1.0,), {}, LEVEL),
    (ColorJitter(brightness=(1.4, 1.4)), "ColorJitter", ((1.4, 1.4),), {}, LEVEL),
    (ColorJitter(saturation=(0.3, 0.3)), "ColorJitter", (), {"saturation": (0.3, 0.3)}, 2 * LEVEL),
]


@pytest.mark.parametrize(("own", "name", "arguments", "options", "tolerance"), SAME)
def test_pictures_and_clips_are_those_of_torchvision(
    torchvision: Any, own: Any, name: str, arguments: Any, options: Any, tolerance: float
) -> None:
    import torch

    arguments = [torch.float32 if each == "float32" else each for each in arguments]
    other = getattr(torchvision, name)(*arguments, **options)
    for pixels in (picture(), clip()):
        compare(changed(own, pixels), as_tensor(other, pixels), tolerance)


@pytest.mark.parametrize("factor", [0.4, 1.7])
def test_contrast_of_pictures_is_that_of_torchvision(torchvision: Any, factor: float) -> None:
    own = ColorJitter(contrast=(factor, factor))
    other = torchvision.ColorJitter(contrast=(factor, factor))
    compare(changed(own, picture()), as_tensor(other, picture()), 2 * LEVEL)


def test_normalized_values_are_those_of_torchvision(torchvision: Any) -> None:
    import torch

    both = [torchvision.ToDtype(torch.float32, scale=True), torchvision.Normalize(MEAN, STD)]
    wanted = as_tensor(torchvision.Compose(both), clip())
    compare(changed(Normalize(MEAN, STD), clip()), wanted, 1e-5)
    compare(changed(Compose(ToFloat(), Normalize(MEAN, STD)), clip()), wanted, 1e-5)


def test_cropped_boxes_are_scaled_as_in_torchvision(torchvision: Any) -> None:
    crop = RandomResizedCrop((24, 30))
    for seed in range(8):
        box = crop.box(40, 60, generator(seed))
        wanted = as_tensor(
            lambda x, box=box: torchvision.functional.resized_crop(x, *box, [24, 30]), clip()
        )
        compare(changed(crop, clip(), seed), wanted, LEVEL)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("degrees", [-100.0, 20.0, 45.0])
def test_rotations_are_those_of_torchvision(
    torchvision: Any, interpolation: Any, degrees: float
) -> None:
    mode = torchvision.InterpolationMode(interpolation)
    other = torchvision.RandomRotation((degrees, degrees), interpolation=mode, fill=9)
    own = RandomRotation((degrees, degrees), interpolation=interpolation, fill=9)
    compare(changed(own, picture()), as_pillow(other, picture()), EXACT)
    # On tensors, torchvision blends pixels at the border with `fill`, and rounds other coordinates.
    pixels = smooth(80, 70)
    apart = np.abs(changed(own, pixels).astype(int) - as_tensor(other, pixels))
    assert (apart > 2 * LEVEL).mean() < 0.03


def test_boxes_of_erasing_are_those_of_torchvision(torchvision: Any) -> None:
    import torch

    options: dict[str, Any] = {"scale": (0.1, 0.1), "ratio": (0.5, 0.5)}
    other = torchvision.RandomErasing(1.0, **options)
    drawn = other.make_params([torch.zeros((3, 40, 60))])
    own = RandomErasing(1.0, value=7, **options)
    box = own.box(40, 60, generator())
    assert box is not None and box[2:] == (drawn["h"], drawn["w"])
    rng = generator(5)
    rng.random()  # the draw of `p`
    top, left, tall, wide = own.box(40, 60, rng) or (0, 0, 0, 0)
    wanted = as_tensor(
        lambda x: torchvision.functional.erase(
            x, top, left, tall, wide, torch.full((3, 1, 1), 7, dtype=torch.uint8)
        ),
        clip(),
    )
    compare(changed(own, clip(), seed=5), wanted, EXACT)


def test_boxes_of_erasing_are_distributed_as_in_torchvision(torchvision: Any) -> None:
    import torch

    own, rng, other = RandomErasing(), generator(1), torchvision.RandomErasing(1.0)
    torch.manual_seed(1)
    given: Any = torch.zeros((3, 200, 300))
    drawn = [other.make_params([given]) for _ in range(1500)]
    theirs = np.array([[each["h"], each["w"]] for each in drawn])
    ours = np.array([box[2:] for _ in range(1500) if (box := own.box(200, 300, rng))])
    for mine, yours in (
        (ours.prod(1), theirs.prod(1)),
        (ours[:, 0] / ours[:, 1], theirs[:, 0] / theirs[:, 1]),
    ):
        at = np.concatenate([mine, yours])
        shares = [np.searchsorted(np.sort(each), at, "right") / len(each) for each in (mine, yours)]
        critical = 1.95 * np.sqrt(1 / len(mine) + 1 / len(yours))  # Kolmogorov-Smirnov, 0.1 %
        assert np.abs(shares[0] - shares[1]).max() < critical


ALIKE: list[tuple[Any, str, dict[str, Any], float]] = [
    (CenterCrop(20), "CenterCrop", {"height": 20, "width": 20}, EXACT),
    (HorizontalFlip(1.0), "HorizontalFlip", {"p": 1.0}, EXACT),
    (ToFloat(), "ToFloat", {"max_value": 255, "p": 1.0}, 1e-7),
    (Normalize(MEAN, STD), "Normalize", {"mean": MEAN, "std": STD, "p": 1.0}, 1e-5),
    (RandomGrayscale(1.0), "ToGray", {"p": 1.0}, LEVEL),
    (
        ColorJitter(brightness=(0.6, 0.6)),
        "ColorJitter",
        {"brightness": (0.6, 0.6), "contrast": 0, "saturation": 0, "hue": 0, "p": 1.0},
        LEVEL,
    ),
]


@pytest.mark.parametrize(("own", "name", "options", "tolerance"), ALIKE)
def test_pictures_are_those_of_albumentations(
    albumentations: Any, own: Any, name: str, options: dict[str, Any], tolerance: float
) -> None:
    other = getattr(albumentations, name)(**options)
    compare(changed(own, picture()), other(image=picture())["image"], tolerance)
