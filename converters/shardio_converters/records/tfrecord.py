"""Records from TFRecord files, plain or compressed, without TensorFlow."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import IO, ClassVar, Final

from shardio import Input, MediaError
from shardio_converters.records.record_source import RecordConverter

_NAME: Final = re.compile(r"\.tfrec(ords?)?(-\d+-of-\d+)?(\.gz|\.zlib)?$", re.IGNORECASE)
_HEAD: Final = struct.Struct("<QI")  # size of the record in bytes, checksum of the size
_MAX_RECORD: Final = (1 << 31) - 1  # bytes; the limit of protobuf messages
_BLOCK_BYTES: Final = 1 << 20  # the size of single reads
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32  # the format is detected from the first bytes


@dataclass(frozen=True, kw_only=True)
class TFRecords(RecordConverter):
    """A converter that makes one sample per TFRecord record; see `RecordConverter`."""

    kind: ClassVar[str] = "tfrecord"
    what: ClassVar[str] = "TFRecord file"

    def libraries(self) -> Mapping[str, str]:
        """Return the version of google-crc32c."""
        _checksum()
        return {"google-crc32c": version("google-crc32c")}

    def read(self, source: Input) -> Generator[bytes] | None:
        """Return a generator of the records of a file; None for a file of another kind."""
        checksum = _checksum()
        file = open(source.path, "rb")
        head = file.read(_HEAD.size)
        file.seek(0)
        content: IO[bytes] | _Inflated = file
        if not _is_head(head, checksum) and _is_compressed(head):
            with suppress(MediaError):
                head = _Inflated(file).read(_HEAD.size)
            file.seek(0)
            content = _Inflated(file)
        if not _NAME.search(source.name) and not _is_head(head, checksum):
            file.close()
            return None
        size = os.fstat(file.fileno()).st_size if content is file else None
        return _records(file, content, size, checksum)


def _checksum() -> Callable[[bytes], int]:
    from google_crc32c import value

    found: Callable[[bytes], int] = value
    return found


def _masked(checksum: int) -> int:
    """Return a checksum in TFRecord's masked form: rotated, plus a constant."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFF_FFFF


def _is_head(head: bytes, checksum: Callable[[bytes], int]) -> bool:
    return len(head) == _HEAD.size and _masked(checksum(head[:8])) == _HEAD.unpack(head)[1]


def _is_compressed(head: bytes) -> bool:
    is_zlib = len(head) > 1 and head[0] & 15 == 8 and not int.from_bytes(head[:2]) % 31
    return is_zlib or head[:2] == b"\x1f\x8b"


def _records(
    file: IO[bytes],
    content: IO[bytes] | _Inflated,
    n_bytes: int | None,
    checksum: Callable[[bytes], int],
) -> Generator[bytes]:
    """Yield the records, and close `file` at the end.

    `content` reads `file`, or decompresses it; `n_bytes` is the size of `file`, None if compressed.
    """
    with file:
        data, at, n_records, start = b"", 0, 0, 0
        while True:
            if len(data) - at < _HEAD.size:
                data, at = data[at:] + content.read(_BLOCK_BYTES), 0
                if not data:
                    return
            where = f"record {n_records:,} at byte {start:,}"
            if len(data) - at < _HEAD.size:
                data, at = _read_at_least(content, data[at:], _HEAD.size, where), 0
            length, stored = _HEAD.unpack_from(data, at)
            if (found := _masked(checksum(data[at : at + 8]))) != stored:
                raise MediaError(
                    f"{where}: expected checksum {stored:#010x} of its length, found {found:#010x}"
                )
            _check_length(length, start, n_bytes, where)
            at += _HEAD.size
            if len(data) - at < length + 4:
                data, at = _read_at_least(content, data[at:], length + 4, where), 0
            record = data[at : at + length]
            at += length + 4
            stored = int.from_bytes(data[at - 4 : at], "little")
            if (found := _masked(checksum(record))) != stored:
                raise MediaError(f"{where}: expected checksum {stored:#010x}, found {found:#010x}")
            yield record
            n_records += 1
            start += _HEAD.size + length + 4


def _check_length(length: int, start: int, n_bytes: int | None, where: str) -> None:
    if length > _MAX_RECORD:
        raise MediaError(f"{where}: found {length:,} bytes, expected {_MAX_RECORD:,} at most")
    if n_bytes is not None and (stop := start + _HEAD.size + length + 4) > n_bytes:
        raise MediaError(f"{where}: the file ends {stop - n_bytes:,} bytes too early")


def _read_at_least(content: IO[bytes] | _Inflated, data: bytes, n_bytes: int, where: str) -> bytes:
    """Return `data` and more bytes from `content`, at least `n_bytes`."""
    parts, missing = [data], n_bytes - len(data)
    while missing > 0:
        part = content.read(_BLOCK_BYTES)
        if not part:
            raise MediaError(f"{where}: the file ends {missing:,} bytes too early")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


class _Inflated:
    """A decompressor of a gzip or zlib file; gzip may have several members."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._stream = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._unread = b""

    def read(self, n_bytes: int, /) -> bytes:
        """Return up to `n_bytes`; b"" at the end."""
        while True:
            data = self._unread or self._file.read(_BLOCK_BYTES)
            if not data:
                if self._stream.eof:
                    return b""
                raise MediaError("the compressed bytes end too early")
            try:
                if self._stream.eof:
                    self._stream = zlib.decompressobj(_GZIP_OR_ZLIB)
                found = self._stream.decompress(data, n_bytes)
            except zlib.error as error:
                raise MediaError(f"the compressed bytes are damaged: {error}") from error
            self._unread = self._stream.unconsumed_tail or self._stream.unused_data
            if found:
                return found
