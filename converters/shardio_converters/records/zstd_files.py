"""Files compressed with Zstandard, read as their decompressed content."""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING

import zstandard

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CHUNK_BYTES = 16 << 10  # input per step, which decompresses to at most 500 MB


def open_zstd(file: IO[bytes]) -> IO[bytes]:
    """Return a reader of the decompressed content of `file`, which stays open.

    The reader raises `zstandard.ZstdError` for a damaged frame, and `EOFError` for a truncated
    frame, which the reader of `zstandard` would not report.
    """
    return io.BufferedReader(_ZstdFrames(file), 1 << 20)


class _ZstdFrames(io.RawIOBase):
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
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
                    raise EOFError("the file ends within a Zstandard frame")
                return 0
            self._output = memoryview(self._frame.decompress(data))
            self._is_in_frame, self._next_input = not self._frame.eof, b""
            if self._frame.eof:
                self._next_input = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
        view = memoryview(buffer).cast("B")
        n_bytes = min(len(view), len(self._output))
        view[:n_bytes] = self._output[:n_bytes]
        self._output = self._output[n_bytes:]
        return n_bytes
