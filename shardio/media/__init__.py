"""Encoded media to pixels and exact times: `container` looks at files, `video` decodes them."""

from shardio.media.container import HEAD_BYTES, has_media_signature, has_media_suffix, missing_bytes
from shardio.media.picture import MAX_SIDE
from shardio.media.video import Picture, VideoFile, library_versions

__all__ = [
    "HEAD_BYTES",
    "MAX_SIDE",
    "Picture",
    "VideoFile",
    "has_media_signature",
    "has_media_suffix",
    "library_versions",
    "missing_bytes",
]
