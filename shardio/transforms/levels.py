"""Transforms of levels, the values of the channels of a pixel: colours and normalization."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from shardio._base.callers import one_of, unknown_field
from shardio.errors import InvalidArgument, SchemaError
from shardio.transforms.base import (
    Change,
    FixedTransform,
    Pixels,
    RandomTransform,
    check_bounds,
    check_channels,
    check_probability,
    names_of,
)

Floats = npt.NDArray[np.floating[Any]]
FloatType = Literal["float32", "float16"]

_GREY: Final = np.array([0.299, 0.587, 0.114])
"""The weights of red, green and blue in luma, the grey level of a pixel (BT.601)."""
_TO_YIQ: Final = np.array([_GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_FROM_YIQ: Final = np.linalg.inv(_TO_YIQ)
_CHUNK_PIXELS: Final = 8192
"""The number of pixels to convert at once, whose floats fit into a core's cache. Converting a clip
as a whole would take almost twice the time."""


class ColorJitter(RandomTransform):
    """Random changes of brightness, contrast, saturation and hue, as in torchvision's ColorJitter.

    For a number x, the factor of brightness, contrast or saturation is drawn uniformly from
    max(0, 1 - x) to 1 + x. The shift of the hue is drawn from -x to x, where 1 is a full turn. A
    pair gives the bounds directly.

    Brightness scales the levels (channel values) of all pixels. Contrast scales the distance of
    levels from the mean grey of the picture or clip. Saturation scales the distance of levels from
    the grey of their pixel. Hue rotates colours around the grey axis and keeps their luma, as in
    NVIDIA DALI; torchvision's rotation in HSV takes much longer. All changes are applied as one
    linear map, and the result is clipped once, so the order of the changes makes no difference.

    Args:
        brightness, contrast, saturation, hue: a number x or a pair of bounds, as above.
        fields: the names of the fields to change; by default all pictures and clips.

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
        given = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        super().__init__(fields, **given, hue=hue)
        self._factors = [
            _factor_bounds("brightness", brightness),
            _factor_bounds("contrast", contrast),
            _factor_bounds("saturation", saturation),
        ]
        if isinstance(hue, int | float | np.integer | np.floating):
            hue = (-hue, hue)
        self._hue = check_bounds("hue", hue, minimum=-0.5, maximum=0.5)

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        # Always draw four numbers. Otherwise, a change of one parameter would change the random
        # numbers for the others.
        brightness, contrast, saturation = (rng.uniform(*factor) for factor in self._factors)
        angle = 2 * math.pi * rng.uniform(*self._hue)
        colours = brightness * contrast * _colour_matrix(saturation, angle)

        def change(pixels: Pixels) -> Pixels:
            grey = 0.0 if contrast == 1 else brightness * (1 - contrast) * _mean_grey(pixels)
            return _map_levels(pixels, colours, grey)

        return change


class RandomGrayscale(RandomTransform):
    """A conversion to grey with probability `p`. All three channels become the luma of the pixel.

    Args:
        p: the probability of the conversion.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: `p` is not from 0 to 1.
    """

    def __init__(self, p: float = 0.1, *, fields: str | Sequence[str] | None = None) -> None:
        super().__init__(fields, p=p)
        self._p = check_probability(p)

    def _draw(self, height: int, width: int, rng: np.random.Generator) -> Change:
        return _to_grey if rng.random() < self._p else lambda pixels: pixels


class ToFloat(FixedTransform):
    """Conversion of levels to floats from 0 to 1: level / 255. Normalize includes this step.

    Args:
        dtype: the dtype of the result.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: a parameter is not valid.
    """

    def __init__(
        self, dtype: FloatType = "float32", *, fields: str | Sequence[str] | None = None
    ) -> None:
        super().__init__(fields, dtype=dtype)
        self._dtype = _float_type(dtype)

    def _change(self, pixels: npt.NDArray[Any]) -> Floats:
        made = np.divide(pixels, np.float32(255), dtype=np.float32)
        found: Floats = made.astype(self._dtype, copy=False)
        return found


class Normalize(FixedTransform):
    """Conversion of levels to normalized floats: (level / 255 - `mean`) / `std`, per channel.

    Pictures of floats, such as ToFloat returns, are not divided by 255. Place Normalize after the
    transforms that accept only uint8, which are all others except RandomErasing. `Normalize.of`
    takes the mean and standard deviation from a dataset.

    Args:
        mean, std: three numbers, or one for all channels, for levels from 0 to 1 as in torchvision.
        dtype: the dtype of the result.
        fields: the names of the fields to change; by default all pictures and clips.

    Raises:
        InvalidArgument: a parameter is not valid.
        SchemaError: (from the call) pictures are uint8, and a mean is above 1.
    """

    takes_floats = True

    mean: tuple[float, ...]
    """The mean of each channel, of levels from 0 to 1 as in torchvision's Normalize."""
    std: tuple[float, ...]
    """The standard deviation of each channel, of levels from 0 to 1."""

    def __init__(
        self,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        *,
        dtype: FloatType = "float32",
        fields: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(fields, mean=mean, std=std, dtype=dtype)
        self._dtype = _float_type(dtype)
        means, deviations = check_channels("mean", mean), check_channels("std", std)
        if not (deviations > 0).all():
            raise InvalidArgument(f"std must be above 0; found {std!r}")
        self.mean, self.std = tuple(means.tolist()), tuple(deviations.tolist())
        self._scale = (1 / deviations).astype(np.float32)
        self._scale_of_levels = (1 / (255 * deviations)).astype(np.float32)
        self._shift = (-means / deviations).astype(np.float32)

    @classmethod
    def of(
        cls,
        dataset: Any,
        *,
        dtype: FloatType = "float32",
        fields: str | Sequence[str] | None = None,
    ) -> Self:
        """Return a Normalize with the statistics of a dataset, which `shardio stats` computes.

        Args:
            dataset: an opened dataset or a view of one. For a subset, opened with `subset=`, these
                are the statistics of the subset.
            dtype: the dtype of the result.
            fields: the names of the fields to change; by default all pictures and clips. The
                statistics of several fields are combined.

        Raises:
            InvalidArgument: no field has pictures; or statistics are missing, and the message names
                the command that computes them.
        """
        names = None if fields is None else names_of(fields)
        mean, std = _channel_statistics(getattr(dataset, "dataset", dataset), names)
        return cls(mean, std, dtype=dtype, fields=fields)

    def _change(self, pixels: npt.NDArray[Any]) -> Floats:
        if pixels.dtype == np.uint8 and max(self.mean) > 1:
            raise SchemaError(
                f"Normalize takes the mean of levels from 0 to 1; found {self.mean}: divide mean "
                "and std by 255"
            )
        # Multiply whole rows of a picture: NumPy is four times slower if it broadcasts an array of
        # three numbers to all pixels.
        width = pixels.shape[-2]
        rows = np.ascontiguousarray(pixels).reshape(-1, width * 3)
        scale = self._scale_of_levels if pixels.dtype == np.uint8 else self._scale
        made = np.multiply(rows, np.tile(scale, width), dtype=np.float32)
        made += np.tile(self._shift, width)
        found: Floats = made.astype(self._dtype, copy=False).reshape(pixels.shape)
        return found


def _channel_statistics(
    dataset: Any, names: Sequence[str] | None
) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel, of levels from 0 to 1."""
    if not isinstance(getattr(dataset, "stats", None), Mapping):
        raise InvalidArgument(
            f"Normalize.of takes an opened dataset, such as shardio.open(path); found {dataset!r}"
        )
    if hasattr(dataset, "sources_of"):
        raise InvalidArgument(f"{dataset.path} has no statistics: pass one of its datasets")
    schema = dataset.schema
    if unknown := [name for name in names or () if name not in schema]:
        raise InvalidArgument(unknown_field(str(dataset.path), unknown[0], schema).args[0])
    with_pictures = [name for name, field in schema.items() if _has_pictures(field)]
    if not with_pictures:
        raise InvalidArgument(f"{dataset.path}: no field has pictures of three channels")
    if others := [name for name in names or () if name not in with_pictures]:
        raise InvalidArgument(
            f"{dataset.path}: field {others[0]!r} has no pictures of three channels: pass "
            f"fields={with_pictures}"
        )
    names = names or with_pictures
    subset = dataset.subset_name
    parts: dict[str | None, Any] = {**dataset.stats.get("subsets", {})}
    parts[None] = dataset.stats.get("whole", {})
    found = [parts.get(subset, {}).get("fields", {}).get(name, {}) for name in names]
    if missing := [n for n, each in zip(names, found, strict=True) if not each.get("pictures")]:
        part = "" if subset is None else f" --subset {subset}"
        raise InvalidArgument(
            f"{dataset.path}: there are no statistics of the pixels of {', '.join(missing)}: "
            f"{_other_statistics(dataset.path, parts, missing)}run "
            f"`shardio stats {dataset.path}{part} --decode`, and open the dataset again"
        )
    shares = np.array([each["count"] for each in found]) / sum(each["count"] for each in found)
    means, deviations = (
        np.array([each["channels"][key] for each in found]) / 255 for key in ("mean", "std")
    )
    mean = shares @ means
    variance = shares @ (deviations**2 + (means - mean) ** 2)
    return mean.tolist(), np.sqrt(variance).tolist()


def _other_statistics(path: Any, parts: Mapping[str | None, Any], names: Sequence[str]) -> str:
    """Return advice to take the statistics of another part of a dataset; "" if no part has them."""
    for part in sorted(parts, key=lambda name: (name != "train", name or "")):
        fields = parts[part].get("fields", {})
        if all(fields.get(name, {}).get("pictures") for name in names):
            subset = "" if part is None else f", subset={part!r}"
            where = "the whole dataset" if part is None else f"the subset {part!r}"
            call = f"Normalize.of(shardio.open({str(path)!r}{subset}))"
            return f"take those of {where}, {call}, or "
    return ""


def _has_pictures(field: Any) -> bool:
    if field.array is None:
        return field.medium in ("image", "video")
    is_level, shape = field.array.dtype == "uint8", field.array.shape
    return is_level and len(shape) in (3, 4) and shape[-1] == 3


def _float_type(dtype: FloatType) -> np.dtype[np.floating[Any]]:
    found: np.dtype[np.floating[Any]] = np.dtype(one_of("dtype", dtype, ("float32", "float16")))
    return found


def _to_grey(pixels: Pixels) -> Pixels:
    given = np.ascontiguousarray(pixels).reshape(-1, 3)
    made = np.empty_like(given)
    weights = _GREY.astype(np.float32)
    for start in range(0, len(given), _CHUNK_PIXELS):
        levels = given[start : start + _CHUNK_PIXELS].astype(np.float32) @ weights
        levels += np.float32(0.5)
        grey = levels.astype(np.uint8)
        # Assign to the channels one by one, which takes less than half of the time of broadcasting.
        for channel in range(3):
            made[start : start + _CHUNK_PIXELS, channel] = grey
    return made.reshape(pixels.shape)


def _colour_matrix(saturation: float, angle: float) -> Floats:
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
    matrix = colours.T.astype(np.float32)
    for start in range(0, len(given), _CHUNK_PIXELS):
        levels = given[start : start + _CHUNK_PIXELS].astype(np.float32) @ matrix
        levels += np.float32(grey + 0.5)
        np.maximum(levels, 0, out=levels)
        np.minimum(levels, 255, out=levels)
        made[start : start + _CHUNK_PIXELS] = levels
    return made.reshape(pixels.shape)


def _factor_bounds(name: str, given: float | Sequence[float]) -> tuple[float, float]:
    if isinstance(given, int | float | np.integer | np.floating):
        if not given >= 0:
            raise InvalidArgument(f"{name} must be at least 0, or two bounds; found {given!r}")
        given = (max(0.0, 1 - float(given)), 1 + float(given))
    return check_bounds(name, given, minimum=0.0, maximum=1e6)
