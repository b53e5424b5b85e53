"""What a source holds, where nobody says it: told from the names of its files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from shardio.conversion.source import Input
from shardio.media import has_image_suffix, has_media_suffix

VIDEOS: Final = "videos"
IMAGES: Final = "images"


def guess_kind(inputs: Iterable[Input]) -> str:
    """The converter for these files: that of pictures where there are some and no video.

    A GIF counts as neither: it may be either.
    """
    names = [one.name for one in inputs]
    is_video = any(has_media_suffix(name) and not has_image_suffix(name) for name in names)
    is_image = any(has_image_suffix(name) and not has_media_suffix(name) for name in names)
    return IMAGES if is_image and not is_video else VIDEOS
