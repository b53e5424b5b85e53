"""Ready transforms for pictures and clips: what training draws anew for every sample.

    transform = Compose(RandomResizedCrop(112), HorizontalFlip(), Normalize(mean, std))
    loader = shardio.ShardLoader("out/", batch_size=32, transform=transform)

A picture is uint8 (height, width, 3), a clip (frames, height, width, 3). All pictures and clips of
a sample change alike, by one draw: frames of a clip, and fields of the same moment. What is drawn
comes from the sample's generator, so it does not depend on who fills which batch.
"""

from shardio.transforms.base import Compose
from shardio.transforms.color import ColorJitter, Normalize
from shardio.transforms.geometry import HorizontalFlip, RandomResizedCrop

__all__ = ["ColorJitter", "Compose", "HorizontalFlip", "Normalize", "RandomResizedCrop"]
