"""The base class of transforms of pictures and clips, and chains of transforms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio._base.callers import takes_rng
from shardio.errors import InvalidArgument, SchemaError
from shardio.outputs.torch import as_step

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


def check_bounds(name: str, given: Any, *, minimum: float, maximum: float) -> tuple[float, float]:
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
