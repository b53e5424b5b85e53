"""Transforms that move, scale or erase pixels: crops, flips, rotations."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from shardio._base.callers import ANY_OPTION, one_of, refuses
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.media.pillow import resize, rotate
from shardio.transforms.base import (
    Change,
    FixedTransform,
    Pixels,
    RandomTransform,
    check_bounds,
    check_channels,
    check_probability,
)

_MAX_TRIES: Final = 10
_MAX_SIDE: Final = 16384


class RandomResizedCrop(RandomTransform):
    """A crop of random area, aspect ratio and position, resized to `size`.

    The box is drawn as in torchvision, after C. Szegedy et al., "Going deeper with convolutions"
    (2014): a uniform area, a log-uniform aspect ratio and a uniform position. If none of ten boxes
    fits, the largest centred box that `ratio` allows is used. Resizing interpolates linearly, and
    is antialiased if the picture becomes smaller.

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
        super().__init__(fields, size=size, scale=scale, ratio=ratio)
        self._sides = _sides(size)
        self._scale = check_bounds("scale", scale, minimum=1e-6, maximum=1.0)
        low, high = check_bounds("ratio", ratio, minimum=1e-3, maximum=1e3)
        self._ratio, self._log_ratio = (low, high), (math.log(low), math.log(high))
        _require_pillow(self)

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
            return _resized(pixels[..., top : top + tall, left : left + wide, :], self._sides)

        return change


@refuses({ANY_OPTION: "write Resize((height, width))"})
class Resize(FixedTransform):
    """A change of size, with linear interpolation, antialiased where the picture becomes smaller.

    Args:
        size: (height, width) of the result in pixels; or the shorter side as one number, which
            keeps the proportions: the longer side is rounded down.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: a parameter is not valid.
        UnsupportedEnvironment: Pillow is missing: pip install '.[images]'.
    """

    def __init__(
        self, size: int | Sequence[int], *, fields: str | Sequence[str] | None = None
    ) -> None:
        super().__init__(fields, size=size)
        self._sides, self._keeps_proportions = _sides(size), not isinstance(size, Sequence)
        _require_pillow(self)

    def _change(self, pixels: npt.NDArray[Any]) -> Pixels:
        height, width = self._sides
        if self._keeps_proportions:
            tall, wide = pixels.shape[-3:-1]
            shorter = min(tall, wide)
            height, width = height * tall // shorter, width * wide // shorter
        return _resized(pixels, (height, width))


@refuses({ANY_OPTION: "write CenterCrop((height, width))"})
class CenterCrop(FixedTransform):
    """A crop of the centre. A picture that is smaller than the crop gets black borders.

    Args:
        size: (height, width) of the result in pixels, or one number for both.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: a parameter is not valid.
    """

    def __init__(
        self, size: int | Sequence[int], *, fields: str | Sequence[str] | None = None
    ) -> None:
        super().__init__(fields, size=size)
        self._sides = _sides(size)

    def _change(self, pixels: npt.NDArray[Any]) -> Pixels:
        borders, parts = [(0, 0)] * pixels.ndim, [slice(None)] * pixels.ndim
        for axis, side in zip((-3, -2), self._sides, strict=True):
            excess = pixels.shape[axis] - side
            if excess < 0:
                borders[axis] = -excess // 2, (1 - excess) // 2
            else:  # round half to even, as torchvision does
                start = round(excess / 2)
                parts[axis] = slice(start, start + side)
        found = pixels[tuple(parts)]
        return np.pad(found, borders) if found.shape[-3:-1] != self._sides else found


class RandomRotation(RandomTransform):
    """A rotation around the centre by a random angle. The size stays the same.

    Args:
        degrees: the bounds of the angle, which is uniform; a number x means from -x to x. Positive
            angles are counterclockwise.
        interpolation: "nearest" to copy the nearest pixel, or "bilinear", which is smoother.
        fill: the level of pixels from outside the picture; three numbers, or one for all channels.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: a parameter is not valid.
        UnsupportedEnvironment: Pillow is missing: pip install '.[images]'.
    """

    def __init__(
        self,
        degrees: float | Sequence[float],
        *,
        interpolation: Literal["nearest", "bilinear"] = "nearest",
        fill: int | Sequence[int] = 0,
        fields: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(fields, degrees=degrees, interpolation=interpolation, fill=fill)
        if isinstance(degrees, int | float | np.integer | np.floating):
            degrees = (-degrees, degrees)
        self._degrees = check_bounds("degrees", degrees, minimum=-360, maximum=360)
        self._interpolation = one_of("interpolation", interpolation, ("nearest", "bilinear"))
        self._fill = tuple(check_channels("fill", fill, maximum=255).astype(int).tolist())
        _require_pillow(self)

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        angle = rng.uniform(*self._degrees)
        options = angle, self._interpolation, self._fill

        def change(pixels: Pixels) -> Pixels:
            frames = pixels if pixels.ndim == 4 else pixels[None]
            made = np.stack([rotate(frame, *options) for frame in frames])
            return made.reshape(pixels.shape)

        return change


class RandomErasing(RandomTransform):
    """A box of random area, aspect ratio and position that is filled, with probability `p`.

    The box is drawn as in torchvision. If none of ten boxes fits, the picture stays as it is.
    Pictures may be floats: RandomErasing may follow Normalize.

    Args:
        p: the probability of a box.
        scale: the bounds of the area of the box, as a share of the picture's area.
        ratio: the bounds of height / width of the box.
        value: the values that fill the box: a number, three numbers for the channels, or "random"
            for noise (uniform from 0 to 255 in uint8, standard normal in floats). All frames of a
            clip get the same noise.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: a parameter is not valid.
    """

    takes_floats = True

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0,
        *,
        fields: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(fields, p=p, scale=scale, ratio=ratio, value=value)
        self._p = check_probability(p)
        self._scale = check_bounds("scale", scale, minimum=0.0, maximum=1.0)
        low, high = check_bounds("ratio", ratio, minimum=1e-3, maximum=1e3)
        self._log_ratio = math.log(low), math.log(high)
        is_noise = isinstance(value, str) and one_of("value", value, ("random",))
        self._value = None if is_noise else check_channels("value", value)

    def box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int] | None:
        """Draw a box in a picture of `height` and `width`; return (top, left, height, width).

        Return None if no box fits.
        """
        for _ in range(_MAX_TRIES):
            area = rng.uniform(*self._scale) * height * width
            aspect = math.exp(rng.uniform(*self._log_ratio))
            tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if tall < height and wide < width:
                top = int(rng.integers(height - tall, endpoint=True))
                left = int(rng.integers(width - wide, endpoint=True))
                return top, left, tall, wide
        return None

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        box = self.box(height, width, rng) if rng.random() < self._p else None
        if box is None:
            return lambda pixels: pixels
        (top, left, tall, wide), seed = box, int(rng.integers(1 << 62))

        def change(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
            made = pixels.copy()
            part = made[..., top : top + tall, left : left + wide, :]
            if self._value is not None:
                part[:] = self._value if made.dtype.kind == "f" else self._value.clip(0, 255)
            elif made.dtype.kind == "f":
                part[:] = np.random.default_rng(seed).normal(size=part.shape[-3:])
            else:
                part[:] = np.random.default_rng(seed).integers(256, size=part.shape[-3:])
            return made

        return change


class HorizontalFlip(RandomTransform):
    """A left-right flip with probability `p`.

    Args:
        p: the probability of a flip.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: `p` is not from 0 to 1.
    """

    def __init__(self, p: float = 0.5, *, fields: str | Sequence[str] | None = None) -> None:
        super().__init__(fields, p=p)
        self._p = check_probability(p)

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        return _mirror if rng.random() < self._p else lambda pixels: pixels


def _mirror(pixels: Pixels) -> Pixels:
    # Move whole pixels of three bytes. This takes less than half of the time of moving single
    # bytes.
    whole = np.ascontiguousarray(pixels).view("V3")
    return np.ascontiguousarray(whole[..., ::-1, :]).view(np.uint8)


def _resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    frames = pixels if pixels.ndim == 4 else pixels[None]
    made = np.empty((len(frames), *size, 3), np.uint8)
    for frame, out in zip(frames, made, strict=True):
        resize(frame, size, out=out)
    return made if pixels.ndim == 4 else made[0]


def _require_pillow(transform: object) -> None:
    # Only check that Pillow is installed. Pillow is imported when a picture is changed.
    if importlib.util.find_spec("PIL") is None:
        raise UnsupportedEnvironment(
            f"{type(transform).__name__} needs Pillow: {install_hint('images')}"
        )


def _sides(size: Any) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    are_numbers = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in sides)
    if len(sides) != 2 or not are_numbers or not all(0 < n <= _MAX_SIDE for n in sides):
        raise InvalidArgument(
            f"size must be (height, width) or one number, in pixels, from 1 to {_MAX_SIDE}; "
            f"found {size!r}"
        )
    return int(sides[0]), int(sides[1])
