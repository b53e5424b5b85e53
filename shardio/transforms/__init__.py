"""Ready-made random transforms for pictures and clips.

    transform = Compose(RandomResizedCrop(112), HorizontalFlip(), Normalize(mean, std))
    loader = shardio.ShardLoader("out/", batch_size=32, transform=transform)

A picture is uint8 (height, width, 3), a clip (frames, height, width, 3). All pictures and clips of
a sample change alike, by one draw: frames of a clip, and fields of the same moment. Random numbers
come from the sample's generator, so results do not depend on the worker that fills the batch.
"""

from shardio.transforms.base import (
    ColorJitter,
    Compose,
    HorizontalFlip,
    Normalize,
    RandomResizedCrop,
)

__all__ = ["ColorJitter", "Compose", "HorizontalFlip", "Normalize", "RandomResizedCrop"]
