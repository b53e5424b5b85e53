"""What a source holds, where nobody says it: told from the names of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from shardio.conversion.source import Input
from shardio.media import has_image_suffix, has_media_suffix, has_sound_suffix

VIDEOS: Final = "videos"
IMAGES: Final = "images"
AUDIO: Final = "audio"
OTHERS: Final[dict[str, tuple[str, ...]]] = {
    "zarr": ("zarr.json", ".zgroup", ".zarray", ".zarr.zip"),
    "hdf5": (".h5", ".hdf5", ".he5", ".nxs"),
    "arrays": (".npy", ".npz", ".safetensors"),
    "mds": (".mds", ".mds.zstd"),
    "webdataset": (".tar", ".tar.gz", ".tar.zst", ".tgz"),
    "tfrecord": (
        *(".tfrec", ".tfrecord", ".tfrecords"),
        *(".tfrecord.gz", ".tfrecords.gz", ".tfrecord.zlib", ".tfrecords.zlib"),
    ),
    "arrayrecord": (".array_record", ".arrayrecord"),
    "arrow": (".parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc"),
    "tables": (".csv", ".jsonl", ".ndjson", ".tsv"),
}
"""Kinds that are none of media, with the suffixes of their files; the first that fits is meant."""
LEROBOT: Final = "lerobot"
PROMISES: Final[dict[str, tuple[str, ...]]] = {
    VIDEOS: (".mp4", ".mkv", ".webm", ".mov"),
    AUDIO: (".wav", ".flac", ".mp3", ".ogg"),
    IMAGES: (".jpg", ".png", ".webp", ".tif"),
    LEROBOT: ("meta/info.json",),
    **OTHERS,
}
"""What is in names that promise a kind, of media the most frequent ones."""
_SHARD: Final = re.compile(r"-\d+-of-\d+")
"""Which of several files one is, in its name."""
_LEROBOT: Final = (re.compile(r"(?:.*/)?meta/info\.json"), re.compile(r"(?:.*/)?data/.+\.parquet"))
"""What every data set of LeRobot's has; its videos are part of it."""


def guess_kind(inputs: Iterable[Input]) -> str:
    """The converter for these files: that of videos, where names say nothing."""
    return told_kind(one.name for one in inputs) or VIDEOS


def told_kind(of_files: Iterable[str]) -> str | None:
    """What the names of files promise: sound, or pictures, where there is no video.

    A data set of LeRobot's is one whatever else is there. Sound comes first: pictures beside it are
    covers. A GIF counts as neither picture nor video. All others come last: beside media they are
    about them. None: no name promises anything.
    """
    names = list(of_files)
    if all(any(map(known.fullmatch, names)) for known in _LEROBOT):
        return LEROBOT
    is_image = any(has_image_suffix(name) and not has_media_suffix(name) for name in names)
    if any(map(_is_video, names)):
        return VIDEOS
    if any(map(has_sound_suffix, names)):
        return AUDIO
    if is_image:
        return IMAGES
    if any(map(has_media_suffix, names)):  # a GIF
        return VIDEOS
    ends = [_SHARD.sub("", name).lower() for name in names]
    found = (kind for kind, known in OTHERS.items() if any(end.endswith(known) for end in ends))
    return next(found, None)


def _is_video(name: str) -> bool:
    return has_media_suffix(name) and not (has_sound_suffix(name) or has_image_suffix(name))
