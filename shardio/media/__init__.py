"""Encoded media to pixels and exact times: `container` looks at files, `video` decodes them.

`image` does the same for pictures, and encodes JPEG.
"""

from shardio.media.container import HEAD_BYTES, has_media_signature, has_media_suffix, missing_bytes
from shardio.media.image import ImageFacts, decode_crop, decode_image, encode_jpeg, probe
from shardio.media.picture import MAX_SIDE
from shardio.media.resample import resize
from shardio.media.video import Picture, VideoFile, library_versions

__all__ = [
    "HEAD_BYTES",
    "MAX_SIDE",
    "ImageFacts",
    "Picture",
    "VideoFile",
    "decode_crop",
    "decode_image",
    "encode_jpeg",
    "has_media_signature",
    "has_media_suffix",
    "library_versions",
    "missing_bytes",
    "probe",
    "resize",
]
