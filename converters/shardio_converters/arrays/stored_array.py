"""An array that lies in a file, read whole or piece by piece."""

from __future__ import annotations

import lzma
import math
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from shardio import MediaError

TEXT: Final = "text"
"""Stands for the dtype of arrays of strings."""

NOT_ZIP: Final = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, NotImplementedError, RuntimeError, ValueError),
)
"""What `zipfile` raises of archives that are damaged, beside OSError for a place beyond a file."""
_BLOCK_BYTES: Final = 1 << 20  # of rows that are read at a time


@dataclass(frozen=True)
class StoredArray:
    """An array that lies in a file; `begin` gives what reads its numbers.

    `dtype` is shardio's name, `TEXT` of strings; `numpy` says how they lie there.
    """

    name: str
    dtype: str
    numpy: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    begin: Callable[[], IO[bytes] | Part]

    def whole(self) -> npt.NDArray[Any]:
        """Read all of it.

        Raises:
            MediaError: the file ends before it, or goes on behind it, or is damaged.
        """
        shape = self.shape[::-1] if self.is_fortran else self.shape
        with self.begin() as file:
            found = _read(file, self.numpy, shape, self.name)
            _check_end(file, self.name)
        return found.T if self.is_fortran else found

    def rows(self) -> Iterator[npt.NDArray[Any]]:
        """Read what lies along its first axis one by one; one in Fortran order is read whole.

        Raises:
            MediaError: as of `whole`.
        """
        if self.is_fortran:
            yield from self.whole()
            return
        with self.begin() as file:
            n_left, n_bytes = self.shape[0], math.prod(self.shape[1:]) * self.numpy.itemsize
            n_block = max(1, _BLOCK_BYTES // max(1, n_bytes))
            while n_left:
                n_read = min(n_block, n_left)
                yield from _read(file, self.numpy, (n_read, *self.shape[1:]), self.name)
                n_left -= n_read
            _check_end(file, self.name)


class Part:
    """So many bytes of an open file, from a place on; it is for others to close."""

    def __init__(self, file: IO[bytes], start: int, n_bytes: int) -> None:
        self._fd, self._at, self._end = file.fileno(), start, start + n_bytes

    def read(self, n_bytes: int) -> bytes:
        """Read so many bytes, or what is left."""
        data = os.pread(self._fd, min(n_bytes, self._end - self._at), self._at)
        self._at += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer, as far as bytes are left; how many there were."""
        n_bytes = os.preadv(self._fd, [buffer[: self._end - self._at]], self._at)
        self._at += n_bytes
        return n_bytes

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the file to the others that read it."""


def _read(
    file: IO[bytes] | Part, dtype: np.dtype[Any], shape: tuple[int, ...], name: str
) -> npt.NDArray[Any]:
    """Read the next numbers, in C order; they are little-endian then."""
    try:
        found = np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise MediaError(f"array {name!r}: shape {shape} of {dtype}: {error}") from error
    try:
        if found.nbytes:
            _fill(file, found.reshape(-1).view(np.uint8).data, name)
    except MediaError:
        raise
    except NOT_ZIP as error:
        raise MediaError(f"array {name!r}: damaged: {error}") from error
    if dtype.kind == "b" and (found.view(np.uint8) > 1).any():
        raise MediaError(f"array {name!r}: a bool in it is neither 0 nor 1")
    check_text(found, f"array {name!r}")
    return found.astype(dtype.newbyteorder("<"), copy=False)


def check_text(array: npt.NDArray[Any], what: str) -> None:
    """Make sure that strings of fixed length consist of characters: NumPy fails at others.

    Raises:
        MediaError: they do not.
    """
    if array.dtype.kind == "U" and array.nbytes:
        numbers = np.ascontiguousarray(array).reshape(-1).view(f"{array.dtype.byteorder}u4")
        if (most := int(numbers.max())) > sys.maxunicode:
            raise MediaError(f"{what}: found character {most:#x}; {sys.maxunicode:#x} at most")


def _fill(file: IO[bytes] | Part, view: memoryview, name: str) -> None:
    n_filled = 0
    while n_filled < len(view):
        n_bytes: int = file.readinto(view[n_filled:])  # type: ignore[union-attr]
        if not n_bytes:
            missing = len(view) - n_filled
            raise MediaError(f"array {name!r}: the file ends {missing:,} bytes too early")
        n_filled += n_bytes


def _check_end(file: IO[bytes] | Part, name: str) -> None:
    """Make sure that nothing follows; of a member of a .npz, its checksum is compared now."""
    try:
        is_more = bool(file.read(1))
    except NOT_ZIP as error:
        raise MediaError(f"array {name!r}: damaged: {error}") from error
    if is_more:
        raise MediaError(f"array {name!r}: bytes follow it; expected the end of the file")
