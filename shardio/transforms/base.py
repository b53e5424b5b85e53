"""The base class of transforms that change pictures and clips, and composition of transforms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio._base.callers import takes_rng
from shardio.errors import InvalidArgument, SchemaError

Pixels = npt.NDArray[np.uint8]
Change = Callable[[Pixels], npt.NDArray[Any]]


class PictureTransform(ABC):
    """A transform of the pictures and clips of a sample, by one draw for all.

    Called as f(sample, rng). `fields` are their names; without it, all uint8 arrays of (height,
    width, 3) or (frames, height, width, 3). The given sample is not modified. Other fields pass
    through.

    Raises:
        InvalidArgument: from the constructor, for invalid parameters.
        SchemaError: from the call, if a field is missing or not a picture.
    """

    def __init__(self, fields: str | Sequence[str] | None) -> None:
        self._fields = None if fields is None else _names(fields)

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Draw, and return the sample with its pictures changed."""
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
        """Draw the change for all pictures of one sample, which have this size."""

    def _pictures(self, sample: Mapping[str, Any]) -> dict[str, Pixels]:
        """Return the pictures of a sample; an optional field may have none."""
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
                    f"{type(self).__name__} is to change field {name!r}, which a sample of "
                    f"{_describe(sample)} does not have"
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
                f"{type(self).__name__} changes all pictures of a sample alike, so they must be of "
                f"one height and width; found {_describe(pictures)}: name fields of one size with "
                "`fields=`, in one transform for each"
            )
        ((height, width),) = sizes
        return int(height), int(width)


def _names(fields: Any) -> tuple[str, ...]:
    names = (fields,) if isinstance(fields, str) or not isinstance(fields, Iterable) else fields
    found = tuple(names)
    if not found or not all(isinstance(name, str) for name in found):
        raise InvalidArgument(f"fields must be a field's name, or several; found {fields!r}")
    return found


def check_bounds(name: str, given: Any, *, least: float, most: float) -> tuple[float, float]:
    """Check a pair of numbers, the first at most the second, from least to most."""
    try:
        low, high = (float(value) for value in given)
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not least <= low <= high <= most:
        raise InvalidArgument(
            f"{name} must be two numbers from {least:g} to {most:g}, the smaller one first; "
            f"found {given!r}"
        )
    return low, high


def _is_picture(value: Any) -> bool:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        return False
    return value.ndim in (3, 4) and value.shape[-1] == 3 and value.size > 0


def _describe(sample: Mapping[str, Any]) -> str:
    """Describe fields and the types of their values."""
    return ", ".join(
        f"{name} ({value.dtype} {value.shape})"
        if isinstance(value, np.ndarray)
        else f"{name} ({type(value).__name__})"
        for name, value in sample.items()
    )


class Compose:
    """A transform that calls others in turn, each with the result of the one before.

    User functions may be mixed in: f(sample) or f(sample, rng), dict to dict. All draw from the
    same generator, in their order.

    Raises:
        InvalidArgument: a transform cannot be called like this, or there is none.
    """

    def __init__(self, *transforms: Callable[..., Mapping[str, Any]]) -> None:
        if not transforms:
            raise InvalidArgument("Compose takes one transform or more, each as an argument")
        for transform in transforms:
            if not callable(transform):
                raise InvalidArgument(f"Compose takes functions of a sample; found {transform!r}")
        self._steps = [(t, takes_rng("each transform", "sample", t)) for t in transforms]

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the result of the last transform."""
        for transform, draws in self._steps:
            sample = transform(sample, rng) if draws else transform(sample)
        return sample
