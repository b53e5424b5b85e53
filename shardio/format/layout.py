"""The header page and the section table: one struct each, and how they are packed.

`structure.py` unpacks and checks them.

A shard is: header page, data and index sections, schema, section table, and the header page
again. Sections begin on pages, are padded with zeros, and tile the file: no hole, no overlap.
`docs/reference/format.md` is the specification; a test compares its tables with these structs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final

from shardio.format.checksum import hash_bytes

PAGE: Final = 4096
MAGIC: Final = b"\x89SHD\r\n\x1a\n"
"""A non-ASCII byte, CR LF, ^Z and LF: what text-mode transfers damage, as PNG's does."""
MAJOR: Final = 1
MINOR: Final = 0

HEADER: Final = struct.Struct("<8sHHIQQQQQQQ16s")
"""magic, major, minor, page size, required and optional features, samples, file size, table
offset, table size, table hash, id; followed by the hash of these bytes."""
HEADER_HASH: Final = struct.Struct("<Q")
SECTION: Final = struct.Struct("<HHHHQQQQQ")
"""kind, field, kind it belongs to, zero, offset, size, count, stride, hash."""

NO_FIELD: Final = 0xFFFF
MAX_SECTIONS: Final = 1 << 14
MAX_SCHEMA_BYTES: Final = 4 << 20
MAX_FILE_BYTES: Final = 1 << 62
FIRST_OPTIONAL_KIND: Final = 0x8000
"""Section kinds from here on may be skipped by readers that do not know them."""


class Kind(IntEnum):
    """What a section holds. Codes are stable."""

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
    """Features without which a shard cannot be read. Those of `BUILT` are built."""

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


BUILT: Final = (
    Required.ZSTD
    | Required.ZSTD_DICTIONARY
    | Required.OPTIONAL_FIELDS
    | Required.NESTED_NAMES
    | Required.LISTS
    | Required.IMAGES
    | Required.VIDEOS
    | Required.AUDIO
)
"""The required features that this version reads."""


def padded(n_bytes: int) -> int:
    """n_bytes rounded up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Section:
    """One entry of the section table.

    `size` counts stored bytes without padding; `count` and `stride` are those of its items;
    `of_kind` says what a BLOCK_HASHES section covers and is 0 elsewhere.
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
        """What makes a section unique in its table."""
        return (self.kind, self.field, self.of_kind)

    @property
    def end(self) -> int:
        """Where the next section begins."""
        return self.offset + padded(self.size)

    @property
    def name(self) -> str:
        """Its kind in words, for messages."""
        word = _KIND_NAMES.get(self.kind, f"kind {self.kind}")
        return f"{word} of {_KIND_NAMES.get(self.of_kind, self.of_kind)}" if self.of_kind else word

    def pack(self) -> bytes:
        """Its bytes in the section table."""
        return SECTION.pack(
            self.kind,
            self.field,
            self.of_kind,
            0,
            self.offset,
            self.size,
            self.count,
            self.stride,
            self.hash,
        )


@dataclass(frozen=True, slots=True)
class Header:
    """The first and last page of a shard."""

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
        """The whole page: fields, hash, zeros."""
        fields = HEADER.pack(
            MAGIC,
            MAJOR,
            self.minor,
            PAGE,
            self.required,
            self.optional,
            self.n_samples,
            self.file_size,
            self.table_offset,
            self.table_size,
            self.table_hash,
            self.id,
        )
        return (fields + HEADER_HASH.pack(hash_bytes(fields))).ljust(PAGE, b"\0")


def pack_table(sections: Sequence[Section]) -> bytes:
    """The section table's bytes."""
    return b"".join(section.pack() for section in sections)
