"""The index of the payload: one fixed-stride entry per (row, record field), and shapes.

Addressing is arithmetic: the entry of row r and record field k of m is number r * m + k. Nothing
here loops over samples; the bounds of all entries are checked in one vectorised pass.
"""

from __future__ import annotations

import math
import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.errors import ShardCorrupt
from shardio.format.codecs import BY_CODE, SPECS, Codec
from shardio.format.types import (
    MAX_CHANNELS,
    MAX_PICTURE_SIDE,
    MAX_RECORD_BYTES,
    MEDIA,
    Array,
    Field,
    List,
)

ENTRY: Final = struct.Struct("<QQQQ")
"""offset in the payload, stored bytes | codec << 48, raw bytes, hash of the stored bytes."""
ENTRY_DTYPE: Final = np.dtype(
    [("offset", "<u8"), ("stored", "<u8"), ("n_bytes", "<u8"), ("hash", "<u8")]
)
DIMENSION: Final = struct.Struct("<Q")

_SIZE_BITS: Final = 48
_SIZE_MASK: Final = np.uint64((1 << _SIZE_BITS) - 1)
RECORD_ALIGNMENT: Final = 64
"""The alignment of raw array records, in bytes, so that they can be used in place."""
Entries = npt.NDArray[np.void]


def pack_entry(offset: int, n_stored: int, codec: int, n_bytes: int, hash_: int) -> bytes:
    """Return the 32 bytes of one entry."""
    return ENTRY.pack(offset, n_stored | codec << _SIZE_BITS, n_bytes, hash_)


def stored_bytes(entries: Entries) -> npt.NDArray[np.uint64]:
    """Return the stored size of each record in the payload."""
    found: npt.NDArray[np.uint64] = np.bitwise_and(entries["stored"], _SIZE_MASK)
    return found


def codecs(entries: Entries) -> npt.NDArray[np.uint64]:
    """Return the codec of each record."""
    found: npt.NDArray[np.uint64] = np.right_shift(entries["stored"], np.uint64(_SIZE_BITS))
    return found


def alignment(field: Field, codec: int) -> int:
    """Return the alignment of this field's records with this codec, in bytes."""
    return RECORD_ALIGNMENT if isinstance(field, Array | List) and codec == Codec.RAW else 1


def invalid_entries(entries: Entries, field: Field, payload_bytes: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries with invalid numbers.

    Checked without overflow: the codec is known, the record lies inside the payload, a raw record
    has equal sizes, a compressed one is smaller than its content but not below its codec's
    maximum ratio, a fixed-shape array has its exact size if present, raw arrays are aligned, and
    present media are not empty.
    """
    stored, kinds, offsets = stored_bytes(entries), codecs(entries), entries["offset"]
    raw, spec = kinds == Codec.RAW, SPECS[field.codec]
    bad = ~raw
    for code in {spec.code, *spec.others} - {Codec.RAW}:
        here = kinds == np.uint64(code)
        bad &= ~here
        bad |= here & (entries["n_bytes"] > stored * np.uint64(BY_CODE[code].max_ratio))
    bad |= stored > payload_bytes
    bad |= offsets > np.uint64(payload_bytes) - np.minimum(stored, np.uint64(payload_bytes))
    bad |= entries["n_bytes"] > MAX_RECORD_BYTES
    bad |= raw & (entries["n_bytes"] != stored)
    bad |= ~raw & (entries["n_bytes"] <= stored)
    if isinstance(field, Array | List):
        bad |= raw & (offsets % np.uint64(RECORD_ALIGNMENT) != 0)
    if isinstance(field, Array) and field.row_bytes is not None:
        is_absent = (entries["n_bytes"] == 0) & field.optional
        bad |= ~is_absent & (entries["n_bytes"] != field.row_bytes)
    if isinstance(field, MEDIA) and not field.optional:
        bad |= stored == 0
    found: npt.NDArray[np.bool_] = bad
    return found


def first_invalid(entries: Entries, field: Field, payload_bytes: int) -> int | None:
    """Return the position of the first entry with invalid numbers, or None."""
    if field.codec == "raw" and _are_raw(entries, field, payload_bytes):
        return None
    bad = invalid_entries(entries, field, payload_bytes)
    return int(np.argmax(bad)) if bad.any() else None


def _are_raw(entries: Entries, field: Field, payload_bytes: int) -> bool:
    """Return True if all entries are valid entries of raw records; takes half the time.

    Their codec is 0, so the stored size and the raw size are one number. If that and the offset are
    at most the payload's bytes, below 2^48, their sum does not overflow.
    """
    sizes, offsets = entries["n_bytes"], entries["offset"]
    if not len(entries) or payload_bytes > _SIZE_MASK or isinstance(field, Array | List):
        return False
    if isinstance(field, MEDIA) and not sizes.all():
        return False  # a missing value of an optional field
    fit = max(sizes.max(), offsets.max()) <= payload_bytes
    return bool(
        fit and (offsets + sizes).max() <= payload_bytes and (entries["stored"] == sizes).all()
    )


def extent(itemsize: int, shape: tuple[int, ...]) -> int:
    """Return the bytes that NumPy addresses for an array of `shape`: dimensions of 0 count as 1."""
    return itemsize * math.prod(d or 1 for d in shape)


def full_shape(field: Array, varying: npt.NDArray[np.uint64], n_bytes: int) -> tuple[int, ...]:
    """Return the shape of one sample's array from its stored varying dimensions.

    Raises:
        ShardCorrupt: the shape does not match the record's n_bytes. The error has no place.
    """
    rest = iter(varying.tolist())
    shape = tuple(next(rest) if d is None else d for d in field.shape)
    needed = 0 if 0 in shape else extent(field.numpy.itemsize, shape)
    if needed != n_bytes or extent(field.numpy.itemsize, shape) > MAX_RECORD_BYTES:
        raise ShardCorrupt(
            f"the stored shape {shape} does not account for the record's bytes",
            code="shape",
            expected=n_bytes,
            found=needed,
        )
    return shape


def are_pictures(dims: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return a mask of the lines that are a valid height, width and number of channels."""
    most = np.array([MAX_PICTURE_SIDE, MAX_PICTURE_SIDE, MAX_CHANNELS], np.uint64)
    found: npt.NDArray[np.bool_] = ((dims > 0) & (dims <= most)).sum(axis=1) == dims.shape[1]
    return found


def picture_shape(dims: npt.NDArray[np.uint64]) -> tuple[int, int, int]:
    """Return height, width and channels of an image from its stored dimensions.

    Raises:
        ShardCorrupt: no image can have these. The error has no place.
    """
    height, width, channels = dims.tolist()
    if not is_picture(height, width, channels):
        raise ShardCorrupt(
            "no picture has this height, width and number of channels",
            code="picture",
            expected=f"1 to {MAX_PICTURE_SIDE}, 1 to {MAX_PICTURE_SIDE}, 1 to {MAX_CHANNELS}",
            found=(height, width, channels),
        )
    return height, width, channels


def is_picture(height: int, width: int, channels: int) -> bool:
    """Return True if an image can have these dimensions."""
    sides = 1 <= height <= MAX_PICTURE_SIDE and 1 <= width <= MAX_PICTURE_SIDE
    return sides and 1 <= channels <= MAX_CHANNELS
