"""TODO.

Values of fields as files: the bytes of each, and how its name ends.

Names of files made of text that comes from anywhere: they never lead out of their folder.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.format.fields import (
    FIELD_TYPES,
    Array,
    Audio,
    Bytes,
    Field,
    Image,
    Json,
    List,
    Text,
    Video,
)
from shardio.media import MuxedStream, mux


def widen_bfloat16(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The numbers that bfloat16 stand for, given as their bits."""
    found: npt.NDArray[np.float32] = np.left_shift(bits.astype("<u4"), 16).view("<f4")
    return found


def export_dtype(field: Array) -> np.dtype[Any]:
    """The dtype that the numbers of a field have elsewhere: bfloat16 become float32, unchanged."""
    return np.dtype("<f4") if field.dtype == "bfloat16" else field.numpy


def number_converter(field: Array) -> Callable[[Any], npt.NDArray[Any]]:
    """What makes of a field's numbers those of `dtype_out`."""
    return widen_bfloat16 if field.dtype == "bfloat16" else np.asarray


def field_spec(field: Field) -> str:
    """A field in a word, as converters take it: `float32[3,*]`, `text?`."""
    if isinstance(field, List):
        word = f"list[{field_spec(field.element)}]"
    elif isinstance(field, Array):
        dims = ",".join("*" if n is None else str(n) for n in field.shape)
        word = f"{export_dtype(field).name}{f'[{dims}]' if field.shape else ''}"
    else:
        word = FIELD_TYPES[type(field)].name.lower()
    return f"{word}?" if field.optional else word


Encode = Callable[[Any], tuple[str, bytes]]
"""Gives how the name of a value's file ends, with its dot, and its bytes."""

_INTEGER_SUFFIXES: Final = ("cls", "cls2", "id", "index", "inx")
_SUFFIXES: Final = {
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
_NOT_BYTES_SUFFIXES: Final = {*_INTEGER_SUFFIXES, "npz", "pickle", "pkl", "pt", "pth", "pyd"}.union(
    *_SUFFIXES.values()
)
_IMAGE_SIGNATURES: Final = (
    (b"\xff\xd8", ".jpg"),
    (b"\x89PNG", ".png"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tiff"),
    (b"MM\0*", ".tiff"),
    (b"qoif", ".qoi"),
    *((f"P{n}".encode(), ".ppm") for n in range(1, 8)),
)


def has_suffix(name: str, field: Field) -> bool:
    """Whether files whose names end as a field's does are read as what the field is."""
    ending = name.lower().rpartition(".")[2]
    if isinstance(field, Bytes):
        return ending not in _NOT_BYTES_SUFFIXES
    if ending in _INTEGER_SUFFIXES:
        return is_int64_scalar(field)
    return ending in _SUFFIXES.get(type(field), ())


def is_int64_scalar(field: Field) -> bool:
    """Whether a field is a number as those of classes are."""
    return isinstance(field, Array) and (field.dtype, field.shape) == ("int64", ())


def suffix_of(name: str, field: Field) -> str:
    """How the names of a field's files end, with a dot; "" where the bytes of each say it."""
    if is_int64_scalar(field) and (
        name == "label" or name.lower().rpartition(".")[2] in _INTEGER_SUFFIXES
    ):
        return ".cls"
    endings: dict[type, str] = {Array: ".npy", Text: ".txt", Json: ".json", Bytes: ".bin"}
    return endings.get(type(field), "")


def file_encoder(name: str, field: Field) -> Encode | None:
    """What makes a field's values files; None where no file holds one."""
    ending = suffix_of(name, field)
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
        return lambda value: (image_suffix(value), value)
    return None if isinstance(field, List) else _encode_muxed


def preparation_of(field: Field) -> Callable[[Any], Any] | None:
    """What is done to a field's values as they are read: streams become files, which may fail."""
    return mux if isinstance(field, Video | Audio) else None


def _encode_muxed(value: MuxedStream) -> tuple[str, bytes]:
    return value.suffix, value.data


def npy_encoder(field: Array) -> Callable[[Any], bytes]:
    """What writes arrays as .npy; heads are made once for each shape."""
    dtype, numbers = export_dtype(field), number_converter(field)
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


def image_suffix(data: bytes) -> str:
    """How the name of a picture's file ends, by its bytes."""
    if data[:4] == b"RIFF":
        return ".webp"
    if data[4:8] == b"ftyp":
        return ".avif"
    return next((ending for start, ending in _IMAGE_SIGNATURES if data.startswith(start)), ".jpg")


_MAX_BYTES: Final = 120
"""Of a part of a name: with what is put behind it, a file system takes it."""


def safe_part(text: str) -> str:
    """A text as the name of one file or folder; never empty, hidden, or more than one part."""
    kept = "".join("_" if c in '/\\:*?"<>|' or not c.isprintable() else c for c in text)
    kept = kept.encode()[:_MAX_BYTES].decode(errors="ignore").rstrip(". ")
    if kept.startswith((".", "_", "~")):
        kept = f"x{kept}"
    return kept or "x"


def safe_path(text: str) -> str:
    """A text as a path below some folder, of any number of parts."""
    parts = [safe_part(part) for part in text.split("/") if part not in ("", ".", "..")]
    return "/".join(parts[-8:]) or "x"


def distinct_names(names: Iterable[str], *reserved: str) -> dict[str, str]:
    """A name of a file for each of some names, also where upper and lower case are the same."""
    found: dict[str, str] = {}
    taken = {*reserved}
    for name in names:
        base = made = safe_part(name)
        number = 1
        while made.casefold() in taken:
            number += 1
            made = f"{base}-{number}"
        taken.add(made.casefold())
        found[name] = made
    return found
