"""Compressed files (Zstandard, gzip, zlib), read as their decompressed content."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import zstandard

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CHUNK_BYTES = 16 << 10  # input per step, which decompresses to at most 500 MB
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32  # the format is detected from the first bytes


def open_zstd(file: IO[bytes]) -> IO[bytes]:
    """Return a reader of the decompressed content of `file`, which stays open.

    The reader raises `zstandard.ZstdError` for a damaged frame, and `EOFError` for a truncated
    frame, which the reader of `zstandard` would not report.
    """
    return _reader(file, zstandard.ZstdDecompressor().decompressobj)


def open_zlib(file: IO[bytes]) -> IO[bytes]:
    """Return a reader of the decompressed content of gzip or zlib; damage raises `zlib.error`.

    A gzip file may have several members.
    """
    return _reader(file, partial(zlib.decompressobj, _GZIP_OR_ZLIB))


def _reader(file: IO[bytes], begin_frame: Callable[[], Any]) -> IO[bytes]:
    return io.BufferedReader(_Frames(file, begin_frame), 1 << 20)


class _Frames(io.RawIOBase):
    def __init__(self, file: IO[bytes], begin_frame: Callable[[], Any]) -> None:
        self._file, self._begin_frame = file, begin_frame
        self._frame = begin_frame()
        self._is_in_frame = False
        self._next_input = b""  # the input after the end of a frame
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        while not self._output:
            data = self._next_input or self._file.read(_CHUNK_BYTES)
            if not data:
                if self._is_in_frame:
                    raise EOFError("the compressed bytes end too early")
                return 0
            self._output = memoryview(self._frame.decompress(data))
            self._is_in_frame, self._next_input = not self._frame.eof, b""
            if self._frame.eof:
                self._next_input = self._frame.unused_data
                self._frame = self._begin_frame()
        view = memoryview(buffer).cast("B")
        n_bytes = min(len(view), len(self._output))
        view[:n_bytes] = self._output[:n_bytes]
        self._output = self._output[n_bytes:]
        return n_bytes
