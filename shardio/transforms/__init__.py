"""Ready-made transforms for pictures and clips.

    transform = Compose(RandomResizedCrop(112), HorizontalFlip(), Normalize(mean, std))
    loader = shardio.ShardLoader("out/", batch_size=32, transform=transform)

A picture is a uint8 array of (height, width, 3); a clip is one of (frames, height, width, 3).
A transform draws its parameters once per sample, from a generator seeded for the sample.
"""

from shardio.outputs.torch import OnTensors
from shardio.transforms.base import Compose
from shardio.transforms.geometry import (
    CenterCrop,
    HorizontalFlip,
    RandomErasing,
    RandomResizedCrop,
    RandomRotation,
    Resize,
)
from shardio.transforms.levels import ColorJitter, Normalize, RandomGrayscale, ToFloat

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "HorizontalFlip",
    "Normalize",
    "OnTensors",
    "RandomErasing",
    "RandomGrayscale",
    "RandomResizedCrop",
    "RandomRotation",
    "Resize",
    "ToFloat",
]
