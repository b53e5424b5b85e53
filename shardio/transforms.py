"""Ready-made random transforms for pictures and clips.

    transform = Compose(RandomResizedCrop(112), HorizontalFlip(), Normalize(mean, std))
    loader = shardio.ShardLoader("out/", batch_size=32, transform=transform)

A picture is a uint8 array of shape (height, width, 3), a clip one of (frames, height, width, 3).
A transform draws its parameters once per sample, from a generator seeded for the sample.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from shardio._base.callers import takes_rng
from shardio.errors import InvalidArgument, SchemaError, UnsupportedEnvironment, install_hint
from shardio.media import resize
from shardio.outputs.torch import OnTensors, as_step

__all__ = [
    "ColorJitter",
    "Compose",
    "HorizontalFlip",
    "Normalize",
    "OnTensors",
    "RandomResizedCrop",
]


Pixels = npt.NDArray[np.uint8]
Change = Callable[[Pixels], npt.NDArray[Any]]


class PictureTransform(ABC):
    """A transform of the pictures and clips of a sample, with the same parameters for all of them.

    Called as f(sample, rng), it returns a new sample in which the named `fields`, by default all
    pictures and clips, are changed.

    Raises:
        InvalidArgument: (from the constructor) a parameter is invalid.
        SchemaError: (from the call) the sample has no picture or clip, lacks one of `fields`, has
            another kind of value in one of them, or has pictures or clips of different sizes.
    """

    def __init__(self, fields: str | Sequence[str] | None) -> None:
        self._fields = None if fields is None else _names(fields)

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Draw parameters; return a copy of the sample with its pictures and clips changed."""
        made = dict(sample)
        pictures = self._pictures(sample)
        if not pictures:
            return made
        height, width = self._size(pictures)
        change = self._draw(height, width, rng)
        for name, pixels in pictures.items():
            made[name] = change(pixels)
        return made

    @abstractmethod
    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        """Draw parameters; return a function that changes a picture or clip of this size."""

    def _pictures(self, sample: Mapping[str, Any]) -> dict[str, Pixels]:
        if self._fields is None:
            found = {name: value for name, value in sample.items() if _is_picture(value)}
            if not found:
                raise SchemaError(
                    f"{type(self).__name__} found no picture in a sample of {_describe(sample)}: "
                    "expected uint8 of (height, width, 3) or (frames, height, width, 3)"
                )
            return found
        for name in self._fields:
            if name not in sample:
                raise SchemaError(
                    f"{type(self).__name__}: no field {name!r} in a sample of {_describe(sample)}"
                )
            if sample[name] is not None and not _is_picture(sample[name]):
                raise SchemaError(
                    f"field {name!r}: {type(self).__name__} expects uint8 of (height, width, 3) or "
                    f"(frames, height, width, 3); found {_describe({name: sample[name]})}"
                )
        return {name: sample[name] for name in self._fields if sample[name] is not None}

    def _size(self, pictures: Mapping[str, Pixels]) -> tuple[int, int]:
        sizes = {pixels.shape[-3:-1] for pixels in pictures.values()}
        if len(sizes) > 1:
            raise SchemaError(
                f"{type(self).__name__} changes all pictures of a sample alike, so they must have "
                f"one height and width; found {_describe(pictures)}. Use one transform per size, "
                "and name its fields with `fields=`"
            )
        ((height, width),) = sizes
        return int(height), int(width)


def _names(fields: Any) -> tuple[str, ...]:
    names = (fields,) if isinstance(fields, str) or not isinstance(fields, Iterable) else fields
    found = tuple(names)
    if not found or not all(isinstance(name, str) for name in found):
        raise InvalidArgument(f"fields must be one or more names of fields; found {fields!r}")
    return found


def _check_bounds(name: str, given: Any, *, minimum: float, maximum: float) -> tuple[float, float]:
    """Return a pair of numbers; raise InvalidArgument unless minimum <= low <= high <= maximum."""
    try:
        low, high = (float(value) for value in given)
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not minimum <= low <= high <= maximum:
        raise InvalidArgument(
            f"{name} must be two numbers from {minimum:g} to {maximum:g}, the smaller one first; "
            f"found {given!r}"
        )
    return low, high


def _is_picture(value: Any) -> bool:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        return False
    return value.ndim in (3, 4) and value.shape[-1] == 3 and value.size > 0


def _describe(sample: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} ({value.dtype} {value.shape})"
        if isinstance(value, np.ndarray)
        else f"{name} ({type(value).__name__})"
        for name, value in sample.items()
    )


class Compose:
    """A chain of transforms, each called with the result of the previous one.

    Functions f(sample) or f(sample, rng) that return a dict are transforms too. All draw from the
    same generator, one after another. The results of torch modules and of OnTensors are converted
    back to NumPy arrays, with pictures in (height, width, 3).

    Raises InvalidArgument if no transform is given, or one cannot be called in this way.
    """

    def __init__(self, *transforms: Callable[..., Mapping[str, Any]]) -> None:
        if not transforms:
            raise InvalidArgument("Compose takes one or more transforms, each as an argument")
        for transform in transforms:
            if not callable(transform):
                raise InvalidArgument(f"Compose takes functions of a sample; found {transform!r}")
        steps = [as_step(each) for each in transforms]
        self._steps = [(t, takes_rng("each transform", "sample", t)) for t in steps]

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the result of the last transform."""
        for transform, draws in self._steps:
            sample = transform(sample, rng) if draws else transform(sample)
        return sample


Floats = npt.NDArray[np.floating[Any]]

_GREY: Final = np.array([0.299, 0.587, 0.114])
"""The weights of red, green and blue in luma, the grey level of a pixel (BT.601)."""
_TO_YIQ: Final = np.array([_GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_FROM_YIQ: Final = np.linalg.inv(_TO_YIQ)
_CHUNK_PIXELS: Final = 8192
"""The number of pixels to convert at once, whose floats fit into a core's cache. Converting a clip
as a whole would take almost twice the time."""


class ColorJitter(PictureTransform):
    """Random changes of brightness, contrast, saturation and hue, as by torchvision's ColorJitter.

    For a number x, the factor of brightness, contrast or saturation is drawn uniformly from
    max(0, 1 - x) to 1 + x. The shift of the hue is drawn from -x to x, where 1 is a full turn. A
    pair gives the bounds directly.

    Brightness scales the levels (channel values) of all pixels. Contrast scales the distance of
    levels from the mean grey of the picture or clip. Saturation scales the distance of levels from
    the grey of their pixel. Hue rotates colours around the grey axis and keeps their luma, as in
    NVIDIA DALI; torchvision's rotation in HSV takes much longer. All changes are applied as one
    linear map, and the result is clipped once, so the order of the changes makes no difference.

    Raises:
        InvalidArgument: a parameter is not valid.
    """

    def __init__(
        self,
        brightness: float | Sequence[float] = 0.0,
        contrast: float | Sequence[float] = 0.0,
        saturation: float | Sequence[float] = 0.0,
        hue: float | Sequence[float] = 0.0,
        *,
        fields: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(fields)
        self._factors = [
            _factor("brightness", brightness),
            _factor("contrast", contrast),
            _factor("saturation", saturation),
        ]
        if isinstance(hue, int | float):
            hue = (-hue, hue)
        self._hue = _check_bounds("hue", hue, minimum=-0.5, maximum=0.5)

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        # Always draw four numbers. Otherwise, a change of one parameter would change the random
        # numbers for the others.
        brightness, contrast, saturation = (rng.uniform(*factor) for factor in self._factors)
        angle = 2 * math.pi * rng.uniform(*self._hue)
        colours = brightness * contrast * _colour_map(saturation, angle)

        def change(pixels: Pixels) -> Pixels:
            grey = 0.0 if contrast == 1 else brightness * (1 - contrast) * _mean_grey(pixels)
            return _map_levels(pixels, colours, grey)

        return change


class Normalize(PictureTransform):
    """Conversion of levels to floats: (level / 255 - `mean`) / `std`, per channel.

    Use Normalize as the last transform, because the others only accept uint8.

    Args:
        mean, std: three numbers, or one for all channels, for levels from 0 to 1 as in torchvision.
        dtype: the dtype of the result.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: a parameter is not valid.
    """

    def __init__(
        self,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        *,
        dtype: Literal["float32", "float16"] = "float32",
        fields: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(fields)
        if dtype not in ("float32", "float16"):
            raise InvalidArgument(f"dtype must be 'float32' or 'float16'; found {dtype!r}")
        means, deviations = _channels("mean", mean), _channels("std", std)
        if not (deviations > 0).all():
            raise InvalidArgument(f"std must be above 0; found {std!r}")
        self._dtype = np.dtype(dtype)
        self._scale = (1 / (255 * deviations)).astype(np.float32)
        self._shift = (-means / deviations).astype(np.float32)

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        return self._normalized

    def _normalized(self, pixels: Pixels) -> Floats:
        # Multiply whole rows of a picture: NumPy is four times slower if it broadcasts an array of
        # three numbers to all pixels.
        width = pixels.shape[-2]
        rows = np.ascontiguousarray(pixels).reshape(-1, width * 3)
        made = np.multiply(rows, np.tile(self._scale, width), dtype=np.float32)
        made += np.tile(self._shift, width)
        return made.astype(self._dtype, copy=False).reshape(pixels.shape)


def _colour_map(saturation: float, angle: float) -> Floats:
    cos, sin = saturation * math.cos(angle), saturation * math.sin(angle)
    turned = np.array([[1, 0, 0], [0, cos, sin], [0, -sin, cos]])  # rotates red towards green
    found: Floats = _FROM_YIQ @ turned @ _TO_YIQ
    return found


def _mean_grey(pixels: Pixels) -> float:
    width = pixels.shape[-2]
    columns = pixels.reshape(-1, width * 3).sum(axis=0, dtype=np.uint64)
    means = columns.reshape(width, 3).sum(axis=0) * (3 / pixels.size)
    return float(means @ _GREY)


def _map_levels(pixels: Pixels, colours: Floats, grey: float) -> Pixels:
    given = np.ascontiguousarray(pixels).reshape(-1, 3)
    made = np.empty_like(given)
    of_rgb = colours.T.astype(np.float32)
    for start in range(0, len(given), _CHUNK_PIXELS):
        levels = given[start : start + _CHUNK_PIXELS].astype(np.float32) @ of_rgb
        levels += np.float32(grey + 0.5)
        np.maximum(levels, 0, out=levels)
        np.minimum(levels, 255, out=levels)
        made[start : start + _CHUNK_PIXELS] = levels
    return made.reshape(pixels.shape)


def _factor(name: str, given: float | Sequence[float]) -> tuple[float, float]:
    if isinstance(given, int | float):
        if not given >= 0:
            raise InvalidArgument(f"{name} must be from 0 up, or two bounds; found {given!r}")
        given = (max(0.0, 1 - given), 1 + given)
    return _check_bounds(name, given, minimum=0.0, maximum=1e6)


def _channels(name: str, given: float | Sequence[float]) -> Floats:
    try:
        found = np.broadcast_to(np.asarray(given, np.float64), 3)
    except (TypeError, ValueError):
        found = np.full(3, np.nan)
    if not np.isfinite(found).all():
        raise InvalidArgument(
            f"{name} must be three numbers, one per channel, or one for all; found {given!r}"
        )
    return found


_MAX_TRIES: Final = 10
_MAX_SIDE: Final = 16384


class RandomResizedCrop(PictureTransform):
    """A crop of random area, aspect ratio and position, resized to `size`.

    The box is drawn as in torchvision, after C. Szegedy et al., "Going deeper with convolutions"
    (2014): a uniform area, a log-uniform aspect ratio and a uniform position. If none of ten boxes
    fits, the largest centred box that `ratio` allows is used. Resizing is linear, and antialiased
    if the picture becomes smaller.

    Args:
        size: (height, width) of the result in pixels, or one number for both.
        scale: the bounds of the area of the crop, as a share of the picture's area.
        ratio: the bounds of the aspect ratio, width / height, of the crop.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: a parameter is not valid.
        UnsupportedEnvironment: Pillow is missing: pip install '.[images]'.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        *,
        fields: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(fields)
        self._height, self._width = _sides(size)
        self._scale = _check_bounds("scale", scale, minimum=1e-6, maximum=1.0)
        low, high = _check_bounds("ratio", ratio, minimum=1e-3, maximum=1e3)
        self._ratio, self._log_ratio = (low, high), (math.log(low), math.log(high))
        # Only check that Pillow is installed. Pillow is imported when a picture is resized.
        if importlib.util.find_spec("PIL") is None:
            raise UnsupportedEnvironment(
                f"{type(self).__name__} needs Pillow: {install_hint('images')}"
            )

    def box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw a box in a picture of `height` and `width`; return (top, left, height, width)."""
        for _ in range(_MAX_TRIES):
            area = rng.uniform(*self._scale) * height * width
            aspect = math.exp(rng.uniform(*self._log_ratio))
            tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 0 < tall <= height and 0 < wide <= width:
                top = int(rng.integers(height - tall, endpoint=True))
                left = int(rng.integers(width - wide, endpoint=True))
                return top, left, tall, wide
        aspect = min(max(width / height, self._ratio[0]), self._ratio[1])
        tall = max(1, min(height, round(width / aspect)))
        wide = max(1, min(width, round(height * aspect)))
        return (height - tall) // 2, (width - wide) // 2, tall, wide

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        top, left, tall, wide = self.box(height, width, rng)

        def change(pixels: Pixels) -> Pixels:
            frames = pixels[..., top : top + tall, left : left + wide, :]
            frames = frames if pixels.ndim == 4 else frames[None]
            made = np.empty((len(frames), self._height, self._width, 3), np.uint8)
            for frame, out in zip(frames, made, strict=True):
                resize(frame, (self._height, self._width), out=out)
            return made if pixels.ndim == 4 else made[0]

        return change


class HorizontalFlip(PictureTransform):
    """A left-right flip with probability `p`.

    Raises:
        InvalidArgument: `p` is not from 0 to 1.
    """

    def __init__(self, p: float = 0.5, *, fields: str | Sequence[str] | None = None) -> None:
        super().__init__(fields)
        given: Any = p
        if not isinstance(given, int | float) or not 0 <= given <= 1:
            raise InvalidArgument(f"p must be a probability, from 0 to 1; found {p!r}")
        self._p = p

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        return _mirror if rng.random() < self._p else lambda pixels: pixels


def _mirror(pixels: Pixels) -> Pixels:
    # Move whole pixels of three bytes. This takes less than half of the time of moving single
    # bytes.
    whole = np.ascontiguousarray(pixels).view("V3")
    return np.ascontiguousarray(whole[..., ::-1, :]).view(np.uint8)


def _sides(size: Any) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(isinstance(n, int) and 0 < n <= _MAX_SIDE for n in sides):
        raise InvalidArgument(
            f"size must be (height, width) or one number, in pixels, from 1 to {_MAX_SIDE}; "
            f"found {size!r}"
        )
    return sides
