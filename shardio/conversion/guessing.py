"""What a source holds, where nobody says it: told from the names of its files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from shardio.conversion.source import Input
from shardio.media import has_image_suffix, has_media_suffix, has_sound_suffix

VIDEOS: Final = "videos"
IMAGES: Final = "images"
AUDIO: Final = "audio"
ARRAYS: Final = "arrays"
_ARRAY_SUFFIXES: Final = (".npy", ".npz", ".safetensors")


def guess_kind(inputs: Iterable[Input]) -> str:
    """The converter for these files: that of sound, or of pictures, where there is no video.

    Sound comes first: pictures beside it are covers. A GIF counts as neither picture nor video.
    Arrays come last: beside anything else they are about it.
    """
    names = [one.name for one in inputs]
    is_image = any(has_image_suffix(name) and not has_media_suffix(name) for name in names)
    if any(map(_is_video, names)):
        return VIDEOS
    if any(map(has_sound_suffix, names)):
        return AUDIO
    if is_image:
        return IMAGES
    has_other = any(map(has_media_suffix, names))  # a GIF
    is_array = any(name.lower().endswith(_ARRAY_SUFFIXES) for name in names)
    return ARRAYS if is_array and not has_other else VIDEOS


def _is_video(name: str) -> bool:
    return has_media_suffix(name) and not (has_sound_suffix(name) or has_image_suffix(name))
