"""Values as files: their bytes, suffixes, field specs, and safe names built from any text."""

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
    """Return bfloat16 numbers, given as their bits, as float32."""
    found: npt.NDArray[np.float32] = np.left_shift(bits.astype("<u4"), 16).view("<f4")
    return found


def export_dtype(field: Array) -> np.dtype[Any]:
    """Return the dtype in which a field is exported: bfloat16 as float32, others unchanged."""
    return np.dtype("<f4") if field.dtype == "bfloat16" else field.numpy


def number_converter(field: Array) -> Callable[[Any], npt.NDArray[Any]]:
    """Return a function that converts a field's numbers to `export_dtype`."""
    return widen_bfloat16 if field.dtype == "bfloat16" else np.asarray


def field_spec(field: Field) -> str:
    """Return the spec string that converters take for a field: `float32[3,*]`, `text?`."""
    if isinstance(field, List):
        spec = f"list[{field_spec(field.element)}]"
    elif isinstance(field, Array):
        dims = ",".join("*" if n is None else str(n) for n in field.shape)
        spec = f"{export_dtype(field).name}{f'[{dims}]' if field.shape else ''}"
    else:
        spec = FIELD_TYPES[type(field)].name.lower()
    return f"{spec}?" if field.optional else spec


Encode = Callable[[Any], tuple[str, bytes]]
"""A function that returns a value's suffix, with its dot, and the bytes of its file."""

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
"""Suffixes that WebDataset readers decode as each field type."""
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
    """Return True if a field's name ends in a suffix that readers decode as its type."""
    suffix = name.lower().rpartition(".")[2]
    if isinstance(field, Bytes):
        return suffix not in _NOT_BYTES_SUFFIXES
    if suffix in _INTEGER_SUFFIXES:
        return is_int64_scalar(field)
    return suffix in _SUFFIXES.get(type(field), ())


def is_int64_scalar(field: Field) -> bool:
    """Return True if a field is a single int64, as class labels are."""
    return isinstance(field, Array) and (field.dtype, field.shape) == ("int64", ())


def suffix_of(name: str, field: Field) -> str:
    """Return the suffix of a field's files, with its dot; "" if it depends on the bytes."""
    if is_int64_scalar(field) and (
        name == "label" or name.lower().rpartition(".")[2] in _INTEGER_SUFFIXES
    ):
        return ".cls"
    suffixes: dict[type, str] = {Array: ".npy", Text: ".txt", Json: ".json", Bytes: ".bin"}
    return suffixes.get(type(field), "")


def file_encoder(name: str, field: Field) -> Encode | None:
    """Return the function that encodes a field's values as files; None if no file can hold them."""
    suffix = suffix_of(name, field)
    if suffix == ".cls":
        return lambda value: (suffix, str(int(value)).encode())
    if isinstance(field, Array):
        array = npy_encoder(field)
        return lambda value: (suffix, array(value))
    if isinstance(field, Text):
        return lambda value: (suffix, value.encode())
    if isinstance(field, Json):
        return lambda value: (suffix, json.dumps(value, ensure_ascii=False).encode())
    if isinstance(field, Bytes):
        return lambda value: (suffix, value)
    if isinstance(field, Image):
        return lambda value: (image_suffix(value), value)
    return None if isinstance(field, List) else _encode_muxed


def preparation_of(field: Field) -> Callable[[Any], Any] | None:
    """Return the function applied to values as they are read: it muxes streams, which may fail."""
    return mux if isinstance(field, Video | Audio) else None


def _encode_muxed(value: MuxedStream) -> tuple[str, bytes]:
    return value.suffix, value.data


def npy_encoder(field: Array) -> Callable[[Any], bytes]:
    """Return a function that encodes arrays as .npy; headers are cached by shape."""
    dtype, numbers = export_dtype(field), number_converter(field)
    heads: dict[tuple[int, ...], bytes] = {}

    def encode(value: Any) -> bytes:
        array = numbers(np.asarray(value, field.numpy))
        head = heads.get(array.shape)
        if head is None:
            if len(heads) > 4096:  # bounded: each sample may have a shape of its own
                heads.clear()
            header = {"descr": dtype.str, "fortran_order": False, "shape": array.shape}
            file = io.BytesIO()
            np.lib.format.write_array_header_1_0(file, header)
            head = heads[array.shape] = file.getvalue()
        return head + array.tobytes()

    return encode


def image_suffix(data: bytes) -> str:
    """Return the suffix of an image file, from its signature."""
    if data[:4] == b"RIFF":
        return ".webp"
    if data[4:8] == b"ftyp":
        return ".avif"
    return next((suffix for start, suffix in _IMAGE_SIGNATURES if data.startswith(start)), ".jpg")


_MAX_NAME_BYTES: Final = 120
"""Maximum bytes of one path part; leaves room for a suffix and a number."""


def safe_part(text: str) -> str:
    """Return a text as one file or folder name: never empty or hidden, and without separators."""
    kept = "".join("_" if c in '/\\:*?"<>|' or not c.isprintable() else c for c in text)
    kept = kept.encode()[:_MAX_NAME_BYTES].decode(errors="ignore").rstrip(". ")
    if kept.startswith((".", "_", "~")):
        kept = f"x{kept}"
    return kept or "x"


def safe_path(text: str) -> str:
    """Return a text as a relative path of up to 8 parts."""
    parts = [safe_part(part) for part in text.split("/") if part not in ("", ".", "..")]
    return "/".join(parts[-8:]) or "x"


def distinct_names(names: Iterable[str], *reserved: str) -> dict[str, str]:
    """Map names to safe file names that differ even where case is ignored."""
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
