"""Which way up a picture is shown: the orientation in its EXIF block, and pixels turned by it.

EXIF numbers the eight ways in which a camera can be held: 1 is upright, 2 to 4 are mirrored or
upside down, 5 to 8 lie on their side, so that height and width change places.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

__all__ = ["LYING", "UPRIGHT", "exif_orientation", "upright"]

UPRIGHT = 1
LYING = 5  # from here on, height and width as shown are width and height as stored

_TAG = 0x0112
_SHORT, _LONG = 3, 4  # TIFF's types of a number; the standard says SHORT, some writers LONG
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_MARK = b"Exif\0\0"


def exif_orientation(exif: bytes) -> int:
    """Read the orientation, 1 to 8, from an EXIF block, with or without its leading mark.

    1 where the block says nothing, is damaged, or holds another number: it decides over no pixel.
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
        pass  # it ends early
    return UPRIGHT


def upright(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Turn and mirror stored `pixels` (height x width x channels) as they are shown; a view."""
    if orientation >= LYING:
        pixels = pixels.transpose(1, 0, 2)
    down = -1 if orientation in (3, 4, 7, 8) else 1
    right = -1 if orientation in (2, 3, 6, 7) else 1
    return pixels[::down, ::right]
