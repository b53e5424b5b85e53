"""The base class of transforms of pictures and clips, and chains of transforms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardio._base.callers import checking, shown, takes_rng
from shardio._base.classes import listed
from shardio.errors import InvalidArgument, SchemaError
from shardio.format.types.array_values import is_of
from shardio.media.values import StoredImage, StoredVideo
from shardio.outputs.torch import as_step

Pixels = npt.NDArray[np.uint8]
Change = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


class PictureTransform(ABC):
    """A transform of the pictures and clips of a sample.

    Called as f(sample, rng), it returns a new sample in which the named `fields`, by default all
    pictures and clips, are changed.

    Raises:
        InvalidArgument: (from the constructor) a parameter is invalid.
        SchemaError: (from the call) the sample has no picture or clip, lacks one of `fields`, or
            has another kind of value in one of them.
    """

    takes_floats: ClassVar[bool] = False
    """True if pictures may be floats. Without `fields`, pictures of floats are changed only in
    samples without pictures of uint8."""

    def __init__(self, fields: str | Sequence[str] | None, **options: Any) -> None:
        """Set the fields; `options` are the arguments of the constructor, for `repr`."""
        self._fields = None if fields is None else names_of(fields)
        self._options = options if fields is None else options | {"fields": self._fields}

    def __repr__(self) -> str:
        shown = (f"{name}={_brief(value)}" for name, value in self._options.items())
        return f"{type(self).__name__}({listed(shown, 160)})"

    @abstractmethod
    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return a copy of the sample with its pictures and clips changed."""

    def _pictures(self, sample: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        _check_sample(type(self).__name__, "takes", sample)
        dtypes = "uint8 or floats" if self.takes_floats else "uint8"
        expected = f"{dtypes} of (height, width, 3) or (frames, height, width, 3)"
        if self._fields is None:
            for kind in "uf" if self.takes_floats else "u":
                found = {name: each for name, each in sample.items() if _is_picture(each, kind)}
                if found:
                    return found
            raise SchemaError(
                f"{type(self).__name__} found no picture in a sample of {_describe(sample)}: "
                f"expected {expected}{self._advice(sample)}"
            )
        kinds = "uf" if self.takes_floats else "u"
        for name in self._fields:
            if name not in sample:
                raise SchemaError(
                    f"{type(self).__name__}: no field {name!r} in a sample of {_describe(sample)}"
                )
            if sample[name] is not None and not _is_picture(sample[name], kinds):
                raise SchemaError(
                    f"field {name!r}: {type(self).__name__} expects {expected}; "
                    f"found {_describe({name: sample[name]})}"
                    f"{self._advice({name: sample[name]})}"
                )
        return {name: sample[name] for name in self._fields if sample[name] is not None}

    def _advice(self, sample: Mapping[str, Any]) -> str:
        if any(is_of(value, "torch", "Tensor") for value in sample.values()):
            return ". In a chain with torch modules, write shardio.transforms.Compose(…)"
        if not self.takes_floats and any(_is_picture(value, "f") for value in sample.values()):
            return ". Put ToFloat or Normalize after the transforms of uint8"
        for name, value in sample.items():
            if isinstance(value, StoredImage | StoredVideo):
                decoded = f"{{{name!r}: sample[{name!r}].decode()}}"
                return (
                    f". A stored sample is not decoded: pass {decoded}, or a sample of "
                    "shardio.map_view.MapView(dataset)"
                )
        return ""


class RandomTransform(PictureTransform):
    """A transform with random parameters, which are the same for all pictures of a sample.

    Raises SchemaError (from the call) if the pictures and clips have different sizes.
    """

    def __call__(
        self, sample: Mapping[str, Any], rng: np.random.Generator | None = None
    ) -> dict[str, Any]:
        """Draw parameters; return a copy of the sample with its pictures and clips changed."""
        pictures = self._pictures(sample)
        if rng is None:
            raise InvalidArgument(
                f"{type(self).__name__} draws from a generator: call it as f(sample, rng), such as "
                "with rng = numpy.random.default_rng(0)"
            )
        made = dict(sample)
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

    def _size(self, pictures: Mapping[str, npt.NDArray[Any]]) -> tuple[int, int]:
        sizes = {pixels.shape[-3:-1] for pixels in pictures.values()}
        if len(sizes) > 1:
            raise SchemaError(
                f"{type(self).__name__} changes all pictures of a sample alike, so they must have "
                f"one height and width; found {_describe(pictures)}. Use one transform per size, "
                "and name its fields with `fields=`"
            )
        ((height, width),) = sizes
        return int(height), int(width)


class FixedTransform(PictureTransform):
    """A transform without random parameters. The pictures of a sample may have different sizes."""

    def __call__(
        self, sample: Mapping[str, Any], rng: np.random.Generator | None = None
    ) -> dict[str, Any]:
        """Return a copy of the sample with its pictures and clips changed."""
        pictures = self._pictures(sample)
        return {**sample, **{name: self._change(pixels) for name, pixels in pictures.items()}}

    @abstractmethod
    def _change(self, pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the changed picture or clip."""


def names_of(fields: Any) -> tuple[str, ...]:
    """Return a tuple of the given names of fields; a string is one name."""
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


def check_channels(
    name: str, given: Any, *, maximum: float | None = None
) -> npt.NDArray[np.float64]:
    """Return three numbers, one for each channel; raise InvalidArgument unless they are finite.

    With `maximum`, the numbers must be from 0 to `maximum`.
    """
    try:
        found = np.broadcast_to(np.asarray(given, np.float64), 3)
    except (TypeError, ValueError):
        found = np.full(3, np.nan)
    is_inside = maximum is None or ((found >= 0) & (found <= maximum)).all()
    if not np.isfinite(found).all() or not is_inside:
        within = "" if maximum is None else f" from 0 to {maximum:g}"
        raise InvalidArgument(
            f"{name} must be three numbers{within}, one per channel, or one for all; "
            f"found {given!r}"
        )
    return found


def check_probability(p: Any) -> float:
    """Return `p`; raise InvalidArgument unless it is a number from 0 to 1."""
    if not isinstance(p, int | float | np.integer | np.floating) or not 0 <= p <= 1:
        raise InvalidArgument(f"p must be a probability, from 0 to 1; found {p!r}")
    return float(p)


def _check_sample(name: str, verb: str, sample: Any) -> None:
    if not isinstance(sample, Mapping):
        raise SchemaError(
            f'{name} {verb} a sample, a dict such as {{"image": pixels}}; '
            f"found {type(sample).__name__}"
        )


def _is_picture(value: Any, kinds: str) -> bool:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
        return False
    if value.dtype.kind == "u" and value.dtype != np.uint8:
        return False
    return value.ndim in (3, 4) and value.shape[-1] == 3 and value.size > 0


def _brief(value: Any) -> str:
    """Return the repr of an option; sequences and arrays are shown as tuples."""
    if isinstance(value, str) or np.ndim(value) == 0:
        return f"{value:.6g}" if isinstance(value, float) else repr(value)
    parts = [_brief(each) for each in np.asarray(value).tolist()]
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def _describe(sample: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} ({value.dtype} {value.shape})"
        if isinstance(value, np.ndarray)
        else f"{name} ({type(value).__name__})"
        for name, value in sample.items()
    )


class Compose:
    """A chain of transforms, each called with the result of the previous one.

    Functions f(sample) or f(sample, rng) that return a dict are transforms too. All draw random
    numbers from the same generator, one after another. The results of torch modules and of
    OnTensors are converted back to NumPy arrays, with pictures in (height, width, 3).

    Raises InvalidArgument if no transform is given, or one cannot be called in this way.
    """

    def __init__(self, *transforms: Callable[..., Mapping[str, Any]]) -> None:
        if not transforms:
            raise InvalidArgument("Compose takes one or more transforms, each as an argument")
        for transform in transforms:
            if not callable(transform):
                advice = (
                    "pass each as an argument, Compose(a, b)"
                    if isinstance(transform, list | tuple)
                    else "such as HorizontalFlip()"
                )
                raise InvalidArgument(
                    f"Compose takes functions of a sample: {advice}; found {shown(transform)}"
                )
        with checking("Compose"):
            steps = [as_step(each) for each in transforms]
            self._steps = [(t, takes_rng("each transform", "sample", t)) for t in steps]

    @property
    def transforms(self) -> tuple[Callable[..., Mapping[str, Any]], ...]:
        """The transforms, in the order of their calls."""
        return tuple(step for step, _ in self._steps)

    def __repr__(self) -> str:
        names = (getattr(t, "__name__", None) or " ".join(repr(t).split()) for t, _ in self._steps)
        return f"Compose({listed(names, 1000)})"

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the result of the last transform."""
        for transform, draws in self._steps:
            sample = transform(sample, rng) if draws else transform(sample)
            if not isinstance(sample, Mapping):
                name = getattr(transform, "__name__", None) or repr(transform)
                _check_sample(f"the transform {name} in Compose", "must return", sample)
        return sample
