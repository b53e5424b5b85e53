"""Ready-made transforms for pictures and clips.

    transform = Compose(RandomResizedCrop(112), HorizontalFlip(), Normalize(mean, std))
    loader = shardio.ShardLoader("out/", batch_size=32, transform=transform)

A picture is a uint8 array of (height, width, 3); a clip is one of (frames, height, width, 3).
A transform draws its parameters once per sample, from a generator seeded for the sample.
"""

from shardio._base.callers import did_you_mean, refuse_name
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

_ADVICE = {
    **dict.fromkeys(("RandomFlip", "RandomHorizontalFlip"), "write HorizontalFlip()"),
    **dict.fromkeys(
        ("ConvertImageDtype", "ToDtype", "ToTensor"),
        "write ToFloat(), and output='torch' for the loader",
    ),
}


def __getattr__(name: str) -> object:
    """Raise AttributeError for a name that other libraries have, with what to write instead."""
    text = f"module {__name__!r} has no attribute {name!r}"
    if name[:1].isupper():
        known = f"it has {', '.join(__all__)}; OnTensors runs transforms of torchvision's v2"
        text += f": {_ADVICE.get(name) or did_you_mean(name, __all__) or known}"
    refuse_name(__name__, name, text)
