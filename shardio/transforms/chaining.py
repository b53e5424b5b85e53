"""One transform of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardio._base.signatures import takes_rng
from shardio.errors import InvalidArgument


class Compose:
    """Calls transforms one after the other, each with what the one before has made.

    Functions of one's own go with those from here: f(sample) or f(sample, rng), dict to dict. All
    draw from the same generator, in their order.

    Raises:
        InvalidArgument: one of them cannot be called like this, or there is none.
    """

    def __init__(self, *transforms: Callable[..., Mapping[str, Any]]) -> None:
        if not transforms:
            raise InvalidArgument("Compose takes one transform or more, each as an argument")
        for transform in transforms:
            if not callable(transform):
                raise InvalidArgument(f"Compose takes functions of a sample; found {transform!r}")
        self._steps = [(t, takes_rng("each transform", "sample", t)) for t in transforms]

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        """Return what the last of them has made."""
        for transform, draws in self._steps:
            sample = transform(sample, rng) if draws else transform(sample)
        return sample
