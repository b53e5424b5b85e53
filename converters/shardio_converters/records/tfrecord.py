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
from shardio_converters.files import read_up_to
from shardio_converters.records.record_source import RecordConverter
from shardio_converters.records.zstd_files import open_zlib

_NAME: Final = re.compile(r"\.tfrec(ords?)?(-\d+-of-\d+)?(\.gz|\.zlib)?$", re.IGNORECASE)
_HEAD: Final = struct.Struct("<QI")  # size of the record in bytes, checksum of the size
_MAX_RECORD: Final = (1 << 31) - 1  # bytes; the limit of protobuf messages
_BUFFER_BYTES: Final = 1 << 20


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
        file: IO[bytes] = open(source.path, "rb", _BUFFER_BYTES)
        head = file.read(_HEAD.size)
        file.seek(0)
        content = file
        if not _is_head(head, checksum) and _is_compressed(head):
            with suppress(EOFError, zlib.error):
                head = open_zlib(file).read(_HEAD.size)
            file.seek(0)
            content = open_zlib(file)
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
    file: IO[bytes], content: IO[bytes], n_bytes: int | None, checksum: Callable[[bytes], int]
) -> Generator[bytes]:
    """Yield the records, and close `file` at the end.

    `content` is `file`, or decompresses it; `n_bytes` is the size of `file`, None if compressed.
    """
    with file:
        n_records = start = 0
        while head := _read(content, _HEAD.size):
            where = f"record {n_records:,} at byte {start:,}"
            _refuse_short(head, _HEAD.size, where)
            length, stored = _HEAD.unpack(head)
            if (found := _masked(checksum(head[:8]))) != stored:
                raise MediaError(
                    f"{where}: expected checksum {stored:#010x} of its length, found {found:#010x}"
                )
            _check_length(length, start, n_bytes, where)
            data = _read(content, length + 4)
            _refuse_short(data, length + 4, where)
            record, stored = data[:length], int.from_bytes(data[length:], "little")
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


def _read(content: IO[bytes], n_bytes: int) -> bytes:
    """Read `n_bytes`, or fewer at the end."""
    try:
        return read_up_to(content.read, n_bytes)
    except EOFError as error:
        raise MediaError(str(error)) from error
    except zlib.error as error:
        raise MediaError(f"the compressed bytes are damaged: {error}") from error


def _refuse_short(data: bytes, n_bytes: int, where: str) -> None:
    if missing := n_bytes - len(data):
        raise MediaError(f"{where}: the file ends {missing:,} bytes too early")
