"""Decode media to pixels, audio samples and exact times; encode pixels.

README.md in this folder lists the modules. Public names are imported from here.
"""

from shardio.media.audio import AudioDecoder
from shardio.media.audio_packets import begin_of, part_of, sound_of
from shardio.media.clip_decoder import ClipDecoder, keyframes_of
from shardio.media.container import (
    HEAD_BYTES,
    has_media_signature,
    has_media_suffix,
    has_sound_suffix,
)
from shardio.media.demuxing import SpanReader, demux, times_of
from shardio.media.encoding import PLANES_CODECS, JpegEncoder, PlanesEncoder, StreamEncoder, encode
from shardio.media.frames import MAX_SIDE, CropPosition
from shardio.media.image import (
    ImageFacts,
    decode_crop,
    decode_image,
    encode_jpeg,
    fit,
    has_image_signature,
    has_image_suffix,
    probe,
    to_jpeg,
    to_png,
)
from shardio.media.media_files import VideoFile, library_versions, load_clip, load_image
from shardio.media.mp4 import Mp4File, can_be_mp4
from shardio.media.muxing import MuxedStream, mux
from shardio.media.pillow import pillow_image, resize
from shardio.media.pixels import Pixels
from shardio.media.timestamps import MonotonicTimestamps
from shardio.media.values import StoredImage, StoredVideo, preview_pixels

__all__ = [
    "HEAD_BYTES",
    "MAX_SIDE",
    "PLANES_CODECS",
    "AudioDecoder",
    "ClipDecoder",
    "ImageFacts",
    "JpegEncoder",
    "Mp4File",
    "MuxedStream",
    "Pixels",
    "PlanesEncoder",
    "CropPosition",
    "MonotonicTimestamps",
    "SpanReader",
    "StoredImage",
    "StoredVideo",
    "StreamEncoder",
    "VideoFile",
    "begin_of",
    "can_be_mp4",
    "decode_crop",
    "decode_image",
    "demux",
    "encode",
    "encode_jpeg",
    "fit",
    "has_image_signature",
    "has_image_suffix",
    "has_media_signature",
    "has_media_suffix",
    "has_sound_suffix",
    "keyframes_of",
    "library_versions",
    "load_clip",
    "load_image",
    "mux",
    "part_of",
    "pillow_image",
    "preview_pixels",
    "probe",
    "resize",
    "sound_of",
    "times_of",
    "to_jpeg",
    "to_png",
]
