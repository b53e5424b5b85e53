"""Pictures of another size, by Pillow, which loads late."""

from __future__ import annotations

import importlib.util

import numpy as np

from shardio.errors import EnvironmentUnsuitable
from shardio.transforms.pictures import Pixels


def check_resizing(who: str) -> None:
    """Look whether Pillow is there, without loading it.

    Raises:
        EnvironmentUnsuitable: it is not.
    """
    if importlib.util.find_spec("PIL") is None:
        raise EnvironmentUnsuitable(f"{who} needs Pillow: pip install 'shardio[images]'")


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Scale a picture or each frame of a clip to that size; the result is new memory.

    Linear; where it shrinks, over all pixels that a new one covers, so that nothing flickers.
    """
    from PIL import Image

    made = np.empty((*pixels.shape[:-3], height, width, 3), np.uint8)
    frames = pixels.reshape(-1, *pixels.shape[-3:]) if pixels.ndim == 3 else pixels
    for frame, out in zip(frames, made.reshape(-1, height, width, 3), strict=True):
        picture = Image.fromarray(frame)
        out[...] = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    return made
