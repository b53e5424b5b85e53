"""The stored bytes of a field of a sample as a file to download."""

from __future__ import annotations

import io
import json
import re
from typing import Any, Final, NamedTuple

import numpy as np

import shardio
from shardio.media import has_image_signature, mux, probe
from shardio_tools.view.mp4 import IMAGE_TYPES
from shardio_tools.view.stored import (
    StoredArray,
    as_numbers,
    field_of,
    locate,
    present_value,
    stored_value,
)

MAX_ORIGINAL: Final = 64 << 20
_MAX_MUXED: Final = 16 << 20
"""The maximum sizes of a file to download, and of a stream of packets, of which several copies are
in memory while its file is made."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Original(NamedTuple):
    """A file to download."""

    data: bytes
    file_name: str


def max_bytes(field: Any) -> int:
    """Return the maximum size of values of a field that can be downloaded."""
    return _MAX_MUXED if field.is_streamed else MAX_ORIGINAL


def original(dataset: Any, row: int, field: str) -> Original:
    """Return the value of a field of a sample as a file, in its stored form where it has one.

    Images and bytes are the stored files, videos and sound are in a container, arrays are NumPy's
    files, and texts, JSON and numbers are text.

    Raises:
        InvalidArgument: there is no such sample or field, the value is missing, or it is too large.
        ShardCorrupt, MediaError, …: the value is damaged.
    """
    kind = field_of(dataset, field)
    stem = f"{_UNSAFE.sub('_', field)}-{row}"
    if kind.array is not None and kind.array.shape:
        array = StoredArray.of(dataset, row, field)
        _check_size(kind, array.n_bytes, row, field)
        return Original(_npy(array.part(0, array.shape[0])), f"{stem}.npy")
    if kind.medium == "image":
        shard, local = locate(dataset, row)
        n_bytes = int(dataset.reader(shard, field).lengths(field, [local])[0])
        _check_size(kind, n_bytes, row, field)
    value = (stored_value if kind.is_json else present_value)(dataset, row, field)
    if kind.array is not None:
        text = str(as_numbers(np.asarray(value), kind.array)[()])
        return Original(f"{text}\n".encode(), f"{stem}.txt")
    if kind.is_streamed:
        _check_size(kind, len(value.data), row, field)
        muxed = mux(value)
        return Original(muxed.data, stem + muxed.suffix)
    if kind.is_json:
        data = json.dumps(value, ensure_ascii=False, indent=1).encode()
        return Original(data, f"{stem}.json")
    if kind.is_utf8:
        return Original(value.encode(), f"{stem}.txt")
    if isinstance(value, bytes):
        return Original(bytes(value), stem + _suffix_of(value))
    arrays = {f"{i:06d}": as_numbers(each, kind.item) for i, each in enumerate(value)}
    _check_size(kind, sum(each.nbytes for each in arrays.values()), row, field)
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return Original(out.getvalue(), f"{stem}.npz")


def _check_size(kind: Any, n_bytes: int, row: int, field: str) -> None:
    if n_bytes > (most := max_bytes(kind)):
        raise shardio.InvalidArgument(
            f"sample {row:,}: the field {field!r} has {n_bytes:,} bytes; up to {most:,} "
            "can be downloaded: shardio export writes files of any size"
        )


def _npy(values: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()


def _suffix_of(data: bytes) -> str:
    """Return the suffix of a file, which is known for images only."""
    if not has_image_signature(data[:64]):
        return ".bin"
    try:
        name = probe(data).format
    except shardio.DataError:
        return ".bin"
    return IMAGE_TYPES[name][1] if name in IMAGE_TYPES else f".{name.lower()}"
