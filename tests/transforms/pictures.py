"""Pictures and clips for the tests of transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def picture(height: int = 40, width: int = 60, seed: int = 0) -> Pixels:
    return generator(seed).integers(0, 256, (height, width, 3), np.uint8)


def clip(n_frames: int = 4) -> Pixels:
    return np.stack([picture(seed=i) for i in range(n_frames)])


def smooth(height: int, width: int) -> Pixels:
    """Return a picture whose neighbouring pixels differ by a few levels, without symmetry."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / 9), np.cos(y / 11), np.sin((x + 2 * y) / 23)]
    return np.stack([128 + 60 * wave for wave in waves], axis=-1).astype(np.uint8)


def changed(transform: Any, pixels: npt.NDArray[Any], seed: int = 0) -> Any:
    return transform({"image": pixels}, generator(seed))["image"]
