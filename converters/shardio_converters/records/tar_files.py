"""A streaming reader of tars. A tar ends with two blocks of zeros; only zeros may follow.

`tarfile` is not used: it treats damage after the first member as the end of the file.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from struct import Struct
from typing import IO, Final

import zstandard

from shardio import MediaError
from shardio_converters.files import read_up_to
from shardio_converters.records.zstd_files import open_zstd

SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.zst")

_BLOCK: Final = 512
# Name, size, checksum, type, magic and prefix
_HEADER: Final = Struct("100s 24x 12s 12x 8s s 100x 8s 80x 155s 12x")
_CHECKSUM: Final = slice(148, 156)  # these bytes count as spaces in the checksum
_USTAR: Final = b"ustar\0"  # the magic of POSIX; GNU tar writes another one, and no prefix
_REGULAR: Final = (b"0", b"\0", b"7")
_FOLDER: Final = b"5"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL = b"L", b"K", b"x", b"g"
_EXTENSIONS: Final = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL)
_MAX_EXTENSION: Final = 1 << 20  # the maximum size of a name, or of another extension header
_MAX_MEMBER: Final = 4 << 30  # the maximum size of a member that is read into memory
_PIECE: Final = 1 << 20  # the number of bytes that are skipped at a time
_DAMAGED: Final = (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError)


class Member:
    """A regular file in a tar, readable until the next member is requested."""

    __slots__ = ("_n_left", "_stream", "n_bytes", "name")

    def __init__(self, name: str, n_bytes: int, stream: _Stream) -> None:
        self.name, self.n_bytes = name, n_bytes
        self._stream, self._n_left = stream, n_bytes

    def read(self, most: int | None = None) -> bytes:
        """Read up to `most` more bytes; by default all that are left."""
        n_bytes = self._n_left if most is None else min(most, self._n_left)
        if n_bytes > _MAX_MEMBER:
            raise MediaError(f"{n_bytes:,} bytes; {_MAX_MEMBER:,} at most")
        self._n_left -= n_bytes
        return self._stream.read(n_bytes)

    def end(self) -> None:
        """Skip unread data and padding."""
        self._stream.skip(self._n_left + -self.n_bytes % _BLOCK)
        self._n_left = 0


def is_tar(name: str) -> bool:
    """Return True if a file name is that of a tar; raise for an unsupported compression."""
    lower = name.lower()
    if lower.endswith(SUFFIXES):
        return True
    if lower.endswith((".tar.bz2", ".tar.xz", ".tar.lz4", ".tbz2", ".txz")):
        raise MediaError(f"found {lower.rpartition('.')[2]}; expected one of {', '.join(SUFFIXES)}")
    return False


def open_tar(path: str, name: str, files: ExitStack) -> Iterator[Member]:
    """Return the regular members of a tar, readable until `files` is closed."""
    file: IO[bytes] = files.enter_context(open(path, "rb"))
    lower = name.lower()
    if lower.endswith((".gz", ".tgz")):
        return _members(_Stream(gzip.GzipFile(fileobj=file), None))
    if lower.endswith(".zst"):
        return _members(_Stream(files.enter_context(open_zstd(file)), None))
    return _members(_Stream(file, os.fstat(file.fileno()).st_size))


def _members(stream: _Stream) -> Iterator[Member]:
    for_all: dict[str, str] = {}
    about: dict[str, str] = {}
    while header := _next_header(stream):
        name, n_bytes, kind = header
        if kind in _EXTENSIONS:
            if n_bytes > _MAX_EXTENSION:
                raise MediaError(f"a name of {n_bytes:,} bytes; {_MAX_EXTENSION:,} at most")
            data = stream.read(n_bytes)
            stream.skip(-n_bytes % _BLOCK)
            if kind == _LONG_NAME:
                about["path"] = _text(data.partition(b"\0")[0])
            elif kind != _LONG_LINK:
                (for_all if kind == _PAX_FOR_ALL else about).update(_pax(data))
            continue
        facts = {**for_all, **about}
        about = {}
        name = facts.get("path", name)
        if kind == _FOLDER or (kind == b"\0" and name.endswith("/")):
            continue
        if kind not in _REGULAR or any(fact.startswith("GNU.sparse.") for fact in facts):
            raise MediaError(
                f"member {name!r}: found a link, a device or a sparse file (type {kind!r}), "
                "expected a whole file"
            )
        member = Member(name, _size(facts, n_bytes), stream)
        yield member
        member.end()
    if about:
        raise MediaError(f"ends at byte {stream.position:,}; the member of {about!r} is missing")


def _next_header(stream: _Stream) -> tuple[str, int, bytes] | None:
    """Return name, size and type of the next entry; None at the end, which is checked."""
    block = stream.read(_BLOCK)
    if not any(block):
        if any(stream.read(_BLOCK)):
            raise MediaError(f"byte {stream.position:,}: expected a second block of zeros")
        stream.read_end()
        return None
    name, size, checksum, kind, magic, prefix = _HEADER.unpack(block)
    expected, found = _number(checksum, "checksum"), sum(block) - sum(block[_CHECKSUM]) + 8 * 32
    if expected != found:
        raise MediaError(
            f"byte {stream.position - _BLOCK:,}: expected a header of checksum {expected}, "
            f"found one of {found}"
        )
    whole = _text(name.partition(b"\0")[0])
    if magic.startswith(_USTAR) and prefix[0]:
        whole = _text(prefix.partition(b"\0")[0]) + "/" + whole
    return whole, _number(size, "size"), kind


def _number(field: bytes, what: str) -> int:
    """Parse a number: octal digits or, for large numbers, binary after a byte 0x80."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    try:
        found = int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        found = -1
    if found < 0:
        raise MediaError(f"a header's {what}: expected a number, found {field!r}")
    return found


def _text(name: bytes) -> str:
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MediaError(f"the name of a member is not UTF-8: {name!r}") from error


def _pax(data: bytes) -> dict[str, str]:
    """Parse a POSIX 2001 extended header: records of `length key=value`."""
    found = {}
    while data:
        length, _, _ = data.partition(b" ")
        n_bytes = int(length) if length.isdigit() and len(length) < 8 else 0
        record = data[len(length) + 1 : n_bytes]
        key, mark, value = record.partition(b"=")
        if n_bytes > len(data) or not mark or not value.endswith(b"\n"):
            raise MediaError(f"a pax header: expected 'length key=value', found {data[:40]!r}")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            found[_text(key)] = _text(value[:-1])
        data = data[n_bytes:]
    return found


def _size(facts: Mapping[str, str], n_bytes: int) -> int:
    given = facts.get("size")
    if given is None:
        return n_bytes
    if not (given.isascii() and given.isdigit()) or len(given) > 20:
        raise MediaError(f"a pax header's size: expected a number, found {given!r}")
    return int(given)


class _Stream:
    def __init__(self, file: IO[bytes] | gzip.GzipFile, n_bytes: int | None) -> None:
        self._file, self._n_bytes = file, n_bytes  # `n_bytes` is None if compressed
        self.position = 0

    def read(self, n_bytes: int) -> bytes:
        self._check(n_bytes)
        data = read_up_to(self._piece, n_bytes)
        self.position += len(data)
        if len(data) < n_bytes:
            self._refuse(n_bytes - len(data))
        return data

    def skip(self, n_bytes: int) -> None:
        self._check(n_bytes)
        if self._n_bytes is not None:
            self.position += n_bytes
            self._file.seek(n_bytes, os.SEEK_CUR)
            return
        while n_bytes:
            n_bytes -= len(self.read(min(n_bytes, _PIECE)))

    def read_end(self) -> None:
        while data := self._piece(_PIECE):
            if any(data):
                raise MediaError(f"bytes follow the end at byte {self.position:,}; expected zeros")

    def _check(self, n_bytes: int) -> None:
        if self._n_bytes is not None and n_bytes > (left := self._n_bytes - self.position):
            self.position = self._n_bytes
            self._refuse(n_bytes - left)

    def _refuse(self, n_left: int) -> None:
        raise MediaError(
            f"ends at byte {self.position:,}; expected {n_left:,} more, "
            "and two blocks of zeros at its end"
        )

    def _piece(self, n_bytes: int) -> bytes:
        try:
            return self._file.read(n_bytes)
        except _DAMAGED as error:
            raise MediaError(f"damaged at byte {self.position:,}, or before: {error}") from error
