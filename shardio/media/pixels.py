"""Apply EXIF orientation to decoded pixels, and copy them to the caller's output array.

EXIF numbers the eight orientations: 1 is upright, 2 to 4 are mirrored or upside down, 5 to 8 are
transposed, so that height and width are swapped.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument

__all__ = ["TRANSPOSED", "UPRIGHT", "check_out", "to_output", "exif_orientation", "turn_upright"]


UPRIGHT = 1
TRANSPOSED = 5  # from here on, height and width as shown are width and height as stored

_TAG = 0x0112
_SHORT, _LONG = 3, 4  # TIFF's types of a number; the standard says SHORT, some writers LONG
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_MARK = b"Exif\0\0"


def exif_orientation(exif: bytes) -> int:
    """Read the orientation, 1 to 8, from an EXIF block, with or without its leading signature.

    Returns 1 if the block has no valid orientation: it never makes a picture fail.
    """
    block = exif.removeprefix(_MARK)
    order = _BYTE_ORDERS.get(block[:4])
    if order is None:
        return UPRIGHT
    try:
        (at,) = struct.unpack_from(order + "I", block, 4)
        (n_entries,) = struct.unpack_from(order + "H", block, at)
        for entry in range(at + 2, at + 2 + 12 * n_entries, 12):
            tag, kind = struct.unpack_from(order + "HH", block, entry)
            if tag == _TAG and kind in (_SHORT, _LONG):
                (found,) = struct.unpack_from(order + "HI"[kind == _LONG], block, entry + 8)
                return int(found) if found in range(1, 9) else UPRIGHT
    except struct.error:
        pass  # the segment is truncated
    return UPRIGHT


def turn_upright(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Rotate and mirror stored `pixels` (height x width x channels) for display; returns a view."""
    if orientation >= TRANSPOSED:
        pixels = pixels.transpose(1, 0, 2)
    down = -1 if orientation in (3, 4, 7, 8) else 1
    right = -1 if orientation in (2, 3, 6, 7) else 1
    return pixels[::down, ::right]


Pixels = npt.NDArray[np.uint8]

_UINT8 = np.dtype(np.uint8)


def to_output(pixels: Pixels, out: Pixels | None) -> Pixels:
    """Copy pixels into `out`; without one, return them C-contiguous."""
    if out is None:
        return np.ascontiguousarray(pixels)
    check_out(out, pixels.shape)
    np.copyto(out, pixels)
    return out


def check_out(out: Pixels, shape: tuple[int, ...]) -> None:
    """Check that pixels of that shape can be written to `out` directly.

    Raises:
        InvalidArgument: `out` has another shape or dtype, or is strided or read-only.
    """
    if out.shape == shape and out.dtype is _UINT8 and out.flags.carray:
        return
    flags = out.flags
    if out.shape == shape and out.dtype == _UINT8 and flags.c_contiguous and flags.writeable:
        return
    kind = "" if flags.writeable else "read-only "
    kind += "" if flags.c_contiguous else "strided "
    raise InvalidArgument(
        f"out: expected writable C-contiguous uint8 of shape {shape}, "
        f"found {kind}{out.dtype} of shape {out.shape}"
    )
