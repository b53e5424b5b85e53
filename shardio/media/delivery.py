"""Where decoded pixels go: a destination of the caller's, checked, or memory of their own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument

__all__ = ["check_out", "delivered"]

Pixels = npt.NDArray[np.uint8]

_UINT8 = np.dtype(np.uint8)


def delivered(pixels: Pixels, out: Pixels | None) -> Pixels:
    """Copy into `out` what could not be made there; without one, make it contiguous."""
    if out is None:
        return np.ascontiguousarray(pixels)
    check_out(out, pixels.shape)
    np.copyto(out, pixels)
    return out


def check_out(out: Pixels, shape: tuple[int, ...]) -> None:
    """Refuse a destination that pixels of that shape cannot be written to as they are.

    Raises:
        InvalidArgument: `out` has another shape or type, or is strided or read-only.
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
