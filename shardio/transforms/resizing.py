"""Pictures and clips of another size; whether what does it is there is asked early."""

from __future__ import annotations

import importlib.util

import numpy as np

from shardio.errors import UnsupportedEnvironment, install_hint
from shardio.media import resize
from shardio.transforms.base import Pixels


def check_resizing(who: str) -> None:
    """Look whether Pillow is there, without loading it.

    Raises:
        UnsupportedEnvironment: it is not.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UnsupportedEnvironment(f"{who} needs Pillow: {install_hint('images')}")


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Scale a picture or each frame of a clip to that size; the result is new memory.

    Linear; where it shrinks, over all pixels that a new one covers, so that nothing flickers.
    """
    made = np.empty((*pixels.shape[:-3], height, width, 3), np.uint8)
    frames = pixels.reshape(-1, *pixels.shape[-3:]) if pixels.ndim == 3 else pixels
    for frame, out in zip(frames, made.reshape(-1, height, width, 3), strict=True):
        resize(frame, (height, width), out=out)
    return made
