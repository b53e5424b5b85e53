"""Values of fields as files: the bytes of each, and how its name ends."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from shardio.export.value_files import dtype_out, numbers_out
from shardio.format.fields import Array, Audio, Bytes, Field, Image, Json, List, Text, Video
from shardio.media import MuxedStream, mux

Encode = Callable[[Any], tuple[str, bytes]]
"""Gives how the name of a value's file ends, with its dot, and its bytes."""

_WHOLE: Final = ("cls", "cls2", "id", "index", "inx")
_KNOWN: Final = {
    Array: ("npy",),
    Text: ("txt", "text", "transcript"),
    Json: ("json", "jsn"),
    Image: (
        *("avif", "bmp", "dib", "gif", "jfif", "jpe", "jpeg", "jpg", "pbm", "pgm", "png", "pnm"),
        *("ppm", "qoi", "tif", "tiff", "webp"),
    ),
    Video: ("avi", "flv", "m4v", "mkv", "mov", "mp4", "mpeg", "mpg", "ogv", "webm", "wmv"),
    Audio: ("aac", "aiff", "flac", "m4a", "mp3", "ogg", "opus", "wav", "wma"),
}
"""What readers of WebDataset take files for, by the ends of their names."""
_NEVER_BYTES: Final = {*_WHOLE, "npz", "pickle", "pkl", "pt", "pth", "pyd"}.union(*_KNOWN.values())
_STARTS: Final = (
    (b"\xff\xd8", ".jpg"),
    (b"\x89PNG", ".png"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tiff"),
    (b"MM\0*", ".tiff"),
    (b"qoif", ".qoi"),
    *((f"P{n}".encode(), ".ppm") for n in range(1, 8)),
)


def has_ending(name: str, field: Field) -> bool:
    """Whether files whose names end as a field's does are read as what the field is."""
    ending = name.lower().rpartition(".")[2]
    if isinstance(field, Bytes):
        return ending not in _NEVER_BYTES
    if ending in _WHOLE:
        return is_whole(field)
    return ending in _KNOWN.get(type(field), ())


def is_whole(field: Field) -> bool:
    """Whether a field is a number as those of classes are."""
    return isinstance(field, Array) and (field.dtype, field.shape) == ("int64", ())


def ending_of(name: str, field: Field) -> str:
    """How the names of a field's files end, with a dot; "" where the bytes of each say it."""
    if is_whole(field) and (name == "label" or name.lower().rpartition(".")[2] in _WHOLE):
        return ".cls"
    endings: dict[type, str] = {Array: ".npy", Text: ".txt", Json: ".json", Bytes: ".bin"}
    return endings.get(type(field), "")


def encoder_of(name: str, field: Field) -> Encode | None:
    """What makes a field's values files; None where no file holds one."""
    ending = ending_of(name, field)
    if ending == ".cls":
        return lambda value: (ending, str(int(value)).encode())
    if isinstance(field, Array):
        array = npy_encoder(field)
        return lambda value: (ending, array(value))
    if isinstance(field, Text):
        return lambda value: (ending, value.encode())
    if isinstance(field, Json):
        return lambda value: (ending, json.dumps(value, ensure_ascii=False).encode())
    if isinstance(field, Bytes):
        return lambda value: (ending, value)
    if isinstance(field, Image):
        return lambda value: (picture_ending(value), value)
    return None if isinstance(field, List) else _muxed


def prepare_of(field: Field) -> Callable[[Any], Any] | None:
    """What is done to a field's values as they are read: streams become files, which may fail."""
    return mux if isinstance(field, Video | Audio) else None


def _muxed(value: MuxedStream) -> tuple[str, bytes]:
    return value.suffix, value.data


def npy_encoder(field: Array) -> Callable[[Any], bytes]:
    """What writes arrays as .npy; heads are made once for each shape."""
    dtype, numbers = dtype_out(field), numbers_out(field)
    heads: dict[tuple[int, ...], bytes] = {}

    def encode(value: Any) -> bytes:
        array = numbers(np.asarray(value, field.numpy))
        head = heads.get(array.shape)
        if head is None:
            if len(heads) > 4096:  # shapes may be as many as samples
                heads.clear()
            said = {"descr": dtype.str, "fortran_order": False, "shape": array.shape}
            file = io.BytesIO()
            np.lib.format.write_array_header_1_0(file, said)
            head = heads[array.shape] = file.getvalue()
        return head + array.tobytes()

    return encode


def picture_ending(data: bytes) -> str:
    """How the name of a picture's file ends, by its bytes."""
    if data[:4] == b"RIFF":
        return ".webp"
    if data[4:8] == b"ftyp":
        return ".avif"
    return next((ending for start, ending in _STARTS if data.startswith(start)), ".jpg")
