"""The header page and the section table of a shard: structs, packing, unpacking and validation.

A shard consists of the header page, sections, the section table, and a copy of the header page.
Sections begin at page boundaries and are padded with zeros. There are no gaps and no overlaps.
`docs/reference/format.md` is the specification; a test compares its tables with the structs here.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final

from shardio.errors import ShardCorrupt, ShardIncomplete, ShardUnsupported
from shardio.format.checksum import content_id, format_hashes, hash_bytes

PAGE: Final = 4096
MAGIC: Final = b"\x89SHD\r\n\x1a\n"
"""The first bytes of every shard. As in PNG's signature, a non-ASCII byte, CR LF, ^Z and LF reveal
a transfer in text mode."""
MAJOR: Final = 1
MINOR: Final = 0

HEADER: Final = struct.Struct("<8sHHIQQQQQQQ16s")
"""Magic bytes, major version, minor version, page size, required features, optional features,
number of samples, file size; offset, size and hash of the section table; id of the shard."""
HEADER_HASH: Final = struct.Struct("<Q")
"""The hash of the packed HEADER, stored after it."""
SECTION: Final = struct.Struct("<HHHHQQQQQ")
"""An entry of the section table: kind, field, kind of the covered section, zero, offset, size,
count, stride, hash. `Section` explains them."""

NO_FIELD: Final = 0xFFFF
"""The field id of sections that do not belong to one field, such as the payload."""
MAX_SECTIONS: Final = 1 << 14
MAX_SAMPLES: Final = 1 << 48
MAX_SCHEMA_BYTES: Final = 4 << 20
MAX_FILE_BYTES: Final = 1 << 62
FIRST_OPTIONAL_KIND: Final = 0x8000
"""The first code of optional kinds: a reader skips a section whose optional kind is unknown."""


class Kind(IntEnum):
    """The kind of a section, which says what the section contains. Codes never change."""

    SCHEMA = 1
    COLUMN = 2
    COLUMN_HASHES = 3
    PAYLOAD = 4
    INDEX = 5
    SHAPES = 6
    BLOCK_HASHES = 7
    DICTIONARY = 8
    VALIDITY = 9
    CHUNK_HASHES = 10
    PACKETS = 11
    STREAMS = 12


_KIND_NAMES: Final = {int(kind): kind.name.lower() for kind in Kind}


class Required(IntFlag):
    """Features that a reader must support to read a shard that uses them."""

    ZSTD = 1 << 0
    ZSTD_DICTIONARY = 1 << 1
    OPTIONAL_FIELDS = 1 << 2
    NESTED_NAMES = 1 << 3
    LISTS = 1 << 4
    IMAGES = 1 << 5
    VIDEOS = 1 << 6
    AUDIO = 1 << 7
    FLOAT8 = 1 << 8
    COMPLEX = 1 << 9
    SIDE_COLUMNS = 1 << 10
    PLANES = 1 << 11


SUPPORTED: Final = Required((Required.AUDIO << 1) - 1) | Required.PLANES
"""The features that this version supports: those up to AUDIO, and PLANES."""


def padded(n_bytes: int) -> int:
    """Return n_bytes rounded up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Section:
    """One entry of the section table.

    `field` is the id of a field, or NO_FIELD. `size` excludes padding. `stride` is the size of each
    of the `count` items in bytes, or 0 if items differ in size. In an entry of the kind
    BLOCK_HASHES, `of_kind` is the kind of the section with the blocks; otherwise 0.
    """

    kind: int
    field: int
    of_kind: int
    offset: int
    size: int
    count: int
    stride: int
    hash: int

    @property
    def key(self) -> tuple[int, int, int]:
        """The unique key of a section in its table."""
        return (self.kind, self.field, self.of_kind)

    @property
    def end(self) -> int:
        """The offset at which the next section, or the section table, begins."""
        return self.offset + padded(self.size)

    @property
    def name(self) -> str:
        """The name of the section's kind, for messages."""
        word = _KIND_NAMES.get(self.kind, f"kind {self.kind}")
        return f"{word} of {_KIND_NAMES.get(self.of_kind, self.of_kind)}" if self.of_kind else word

    def pack(self) -> bytes:
        """Return the section's entry in the section table."""
        numbers = self.offset, self.size, self.count, self.stride, self.hash
        return SECTION.pack(*self.key, 0, *numbers)


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of the header page, which is both the first and the last page of a shard."""

    n_samples: int
    file_size: int
    table_offset: int
    table_size: int
    table_hash: int
    id: bytes
    required: int = 0
    optional: int = 0
    minor: int = MINOR

    def pack(self) -> bytes:
        """Return the header page: the fields, their hash, and zeros."""
        features, sizes = (self.required, self.optional), (self.n_samples, self.file_size)
        table = self.table_offset, self.table_size, self.table_hash
        fields = HEADER.pack(MAGIC, MAJOR, self.minor, PAGE, *features, *sizes, *table, self.id)
        return (fields + HEADER_HASH.pack(hash_bytes(fields))).ljust(PAGE, b"\0")


def pack_table(sections: Sequence[Section]) -> bytes:
    """Return the bytes of the section table."""
    return b"".join(section.pack() for section in sections)


def unpack_header(page: bytes, path: str, *, offset: int = 0) -> Header:
    """Unpack a header page that was read at `offset`, and validate it without the rest of the file.

    Raises ShardIncomplete for a page of zeros, ShardUnsupported for another major version or an
    unknown required feature, and ShardCorrupt if any other rule is broken.
    """
    corrupt = functools.partial(ShardCorrupt, path=path, section="header")
    if not any(page):
        raise ShardIncomplete(
            f"{path}: the header was never written: the writer did not finish; "
            "nothing in the file can be read; write the shard again"
        )
    fields = HEADER.unpack_from(page)
    magic, major, minor, page_size, required, optional = fields[:6]
    n_samples, file_size, table_offset, table_size, table_hash, shard_id = fields[6:]
    if magic != MAGIC:
        what = "not a shard: wrong magic bytes"
        raise corrupt(what, code="magic", offset=offset, expected=MAGIC, found=magic)
    if major != MAJOR:
        # Check the version before the hash: another major version may keep the hash elsewhere.
        raise ShardUnsupported(
            f"{path}: format version {major}.{minor}, this shardio reads version {MAJOR}; "
            f"read it with a shardio that reads version {major}"
        )
    (stored,) = HEADER_HASH.unpack_from(page, HEADER.size)
    if (found := hash_bytes(page[: HEADER.size])) != stored:
        what, hashes = "the header does not match its hash", format_hashes(stored, found)
        raise corrupt(what, code="header_hash", offset=offset + HEADER.size, **hashes)
    padding = HEADER.size + HEADER_HASH.size
    if page.count(0, padding) != PAGE - padding:
        at = next(i for i in range(padding, PAGE) if page[i])
        what = "the header's padding is not zero"
        raise corrupt(what, code="padding", offset=offset + at, expected=0, found=page[at])
    if page_size != PAGE:
        what = "unknown page size"
        raise corrupt(what, code="page_size", offset=offset + 12, expected=PAGE, found=page_size)
    check_required(required, path)
    table = table_offset, table_size, table_hash
    return Header(n_samples, file_size, *table, shard_id, required, optional, minor)


def check_required(required: int, path: str) -> None:
    """Raise ShardUnsupported if `required` has a feature that this version does not support."""
    missing = required & ~int(SUPPORTED)
    if not missing:
        return
    known = {int(f): f.name or "" for f in Required}
    names = [known.get(1 << i, f"bit {i}").lower() for i in range(64) if missing >> i & 1]
    raise ShardUnsupported(
        f"{path}: needs {', '.join(names)}, which this version of shardio cannot read; "
        "read it with a newer shardio"
    )


def check_header_fits(header: Header, actual_size: int, path: str) -> None:
    """Raise ShardCorrupt if the file size or table position in the header does not fit the file."""
    corrupt = functools.partial(
        ShardCorrupt, path=path, section="header", expected=header.file_size
    )
    if header.file_size != actual_size:
        cut = actual_size < header.file_size
        what = "the file is truncated" if cut else "the file has bytes after its end"
        raise corrupt(what, code="file_size", found=actual_size)
    table_end = header.table_offset + padded(header.table_size) + PAGE
    fits = (
        header.table_offset % PAGE == 0
        and header.table_offset >= 2 * PAGE
        and 0 < header.table_size <= MAX_SECTIONS * SECTION.size
        and header.table_size % SECTION.size == 0
        and table_end == header.file_size <= MAX_FILE_BYTES
    )
    if not fits:
        what = "the section table does not end where the last page begins"
        raise corrupt(what, code="table_place", found=table_end)


def unpack_table(table: bytes, header: Header, path: str) -> tuple[Section, ...]:
    """Unpack and validate the section table; `check_header_fits` must have accepted the header."""
    corrupt = functools.partial(ShardCorrupt, path=path, section="section table")
    at = header.table_offset
    if (found := hash_bytes(table)) != header.table_hash:
        what = "the section table does not match its hash"
        raise corrupt(what, code="table_hash", offset=at, **format_hashes(header.table_hash, found))
    if (id_ := content_id(table)) != header.id:
        what = "the id of the shard is not the hash of its section table"
        raise corrupt(what, code="id", offset=at, expected=header.id.hex(), found=id_.hex())
    sections, seen, start = [], set(), PAGE
    for i, (kind, field, of_kind, zero, *numbers) in enumerate(SECTION.iter_unpack(table)):
        offset = header.table_offset + i * SECTION.size
        section = Section(kind, field, of_kind, *numbers)
        if zero:
            what = "a reserved number is not zero"
            raise corrupt(what, code="reserved", offset=offset, expected=0, found=zero)
        if section.key in seen:
            what = "two sections have the same key"
            raise corrupt(what, code="duplicate", offset=offset, found=section.name)
        _check_extent(section, start, offset, header, corrupt)
        seen.add(section.key)
        sections.append(section)
        start = section.end
    if at != start:
        what = "bytes between the last section and the table"
        raise corrupt(what, code="hole", offset=at, expected=at, found=start)
    return tuple(sections)


def _check_extent(
    section: Section, start: int, offset: int, header: Header, corrupt: Callable[..., ShardCorrupt]
) -> None:
    """Raise ShardCorrupt unless a section begins at `start` and ends before the section table.

    `offset` is the file offset of the section's entry in the table, for the error.
    """
    if section.offset != start:
        code = "overlap" if section.offset < start else "hole"
        what = f"section {section.name} does not begin where the previous section ends: {code}"
        raise corrupt(what, code=code, offset=offset, expected=start, found=section.offset)
    if section.size > header.file_size or section.end > header.table_offset:
        what, limit = f"section {section.name} reaches into the section table", header.table_offset
        raise corrupt(what, code="size", offset=offset, expected=limit, found=section.end)
