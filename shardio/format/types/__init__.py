"""The field types and their registry. Code that depends on a type is in the class of the type."""

from __future__ import annotations

from typing import Final

from shardio.format.types.arrays import DTYPES, Array, DType, List
from shardio.format.types.field import CODECS, MAX_RECORD_BYTES, Field, FieldType
from shardio.format.types.images import EncodedImage, Image
from shardio.format.types.streams import Audio, EncodedStream, Video
from shardio.format.types.text import Bytes, Json, Text

__all__ = [
    "CODECS",
    "DTYPES",
    "MAX_RECORD_BYTES",
    "Array",
    "Audio",
    "Bytes",
    "DType",
    "EncodedImage",
    "EncodedStream",
    "Field",
    "FieldType",
    "Image",
    "Json",
    "List",
    "Text",
    "Video",
]

FIELD_TYPES: Final[dict[int, type[Field]]] = {
    kind.code: kind for kind in (Array, Bytes, Text, Json, List, Image, Video, Audio)
}
"""The field types by their codes in stored schemas."""
