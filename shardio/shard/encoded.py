"""What is given for a field of media, as it is stored: all that a writer needs of `media`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shardio.errors import MediaError
from shardio.format.fields import Audio, Field, Image, Video
from shardio.format.streams import EncodedStream
from shardio.format.values import EncodedImage


def as_encoded(name: str, field: Field, value: Any) -> Any:
    """What a shard stores for a value of a field of media; what is no such thing stays as it is.

    The bytes of a picture's file are looked into for its height, width and channels; a media file
    (its bytes) is cut into packets.

    Raises:
        MediaError: the bytes cannot be read as what they should be. It names the field.
    """
    if isinstance(value, EncodedImage | EncodedStream):
        return value
    is_file = isinstance(value, bytes | bytearray | memoryview)
    if not is_file or not isinstance(field, Audio | Image | Video):
        return value
    try:
        return _encoded(field, bytes(value))
    except MediaError as error:
        raise MediaError(f"field {name!r}: {error}") from error


def _encoded(field: Field, data: bytes) -> Any:
    if isinstance(field, Image):
        facts = import_module("shardio.media.image").probe(data)
        return EncodedImage(data, facts.height, facts.width, facts.channels)
    kind = "video" if isinstance(field, Video) else "audio"
    return import_module("shardio.media.demuxing").demux(data, kind)
