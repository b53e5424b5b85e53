"""A shard taken apart into sections, and put together again with hashes that are right.

A fuzzer that changes bytes of a file gets no further than the first hash. Here it changes the
parts, and `seal` makes a file of them whose hashes hold, as far as it is asked to. Nothing here
asks the schema, which may be changed as well: which hashes belong together, the keys tell.

The dense form is the same shard without padding and without what follows from the rest, so that
every byte of it means something: this is what the corpus holds.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from shardio.format.checksum import block_hashes, content_id, hash_bytes, pack_hashes
from shardio.format.layout import (
    FIRST_OPTIONAL_KIND,
    NO_FIELD,
    PAGE,
    Header,
    Kind,
    Section,
    pack_table,
    padded,
    unpack_header,
    unpack_table,
)
from shardio.format.sections import ENTRY_DTYPE

Key = tuple[int, int, int]

_FRONT: Final = struct.Struct("<BQQQH")
"""flags, samples, required and optional features, format minor."""
_PART: Final = struct.Struct("<HHHQQH")
"""kind, field, of_kind, count, stride, bytes of content."""
_KEEP_SECTION_HASHES: Final = 1
_KEEP_BLOCK_HASHES: Final = 2
MAX_DENSE_PARTS: Final = 64

_PLAIN_HASH: Final = {int(Kind.SCHEMA), int(Kind.DICTIONARY)}


@dataclass
class Parts:
    """The parts of a shard; `seal` makes the file.

    `header` and `table` hold changes to the values that follow from the sections; a table entry is
    chosen by its position. `hashes` and `blocks` say if hashes are made right.
    """

    n_samples: int
    required: int
    sections: list[Section]
    contents: list[bytes]
    optional: int = 0
    minor: int = 0
    header: dict[str, Any] = field(default_factory=dict)
    table: dict[int, dict[str, int]] = field(default_factory=dict)
    hashes: bool = True
    blocks: bool = True

    @classmethod
    def of(cls, content: bytes) -> Parts:
        header = unpack_header(content[:PAGE], "seed")
        end = header.table_offset + header.table_size
        sections = list(unpack_table(content[header.table_offset : end], header, "seed"))
        contents = [content[s.offset : s.offset + s.size] for s in sections]
        return cls(header.n_samples, header.required, sections, contents)

    def copy(self) -> Parts:
        return dataclasses.replace(
            self,
            sections=list(self.sections),
            contents=list(self.contents),
            header=dict(self.header),
            table=dict(self.table),
        )

    def find(self, kind: int, number: int = NO_FIELD, of_kind: int = 0) -> int | None:
        key = (kind, number, of_kind)
        return next((i for i, s in enumerate(self.sections) if s.key == key), None)

    def seal(self) -> bytes:
        """Return the file: sections laid out one after the other, table, both header pages."""
        contents = list(self.contents)
        if self.blocks:
            self._hash_blocks(contents)
        place, pieces, table = PAGE, [], []
        for i, (section, content) in enumerate(zip(self.sections, contents, strict=True)):
            hash_ = self._hash_of(i, contents) if self.hashes else section.hash
            fitting = dataclasses.replace(section, offset=place, size=len(content), hash=hash_)
            table.append(dataclasses.replace(fitting, **self.table.get(i, {})))
            pieces.append(content.ljust(padded(len(content)), b"\0"))
            place += padded(len(content))
        packed = pack_table(table)
        page = self._page(place, packed)
        return b"".join([page, *pieces, packed.ljust(padded(len(packed)), b"\0"), page])

    def _page(self, place: int, packed: bytes) -> bytes:
        header = Header(
            n_samples=self.n_samples,
            file_size=place + padded(len(packed)) + PAGE,
            table_offset=place,
            table_size=len(packed),
            table_hash=hash_bytes(packed),
            id=content_id(packed),
            required=self.required,
            optional=self.optional,
            minor=self.minor,
        )
        return dataclasses.replace(header, **self.header).pack()

    def _hash_blocks(self, contents: list[bytes]) -> None:
        for i, section in enumerate(self.sections):
            target = self.find(section.of_kind, section.field)
            if section.kind == Kind.BLOCK_HASHES and target is not None:
                contents[i] = pack_hashes(block_hashes(memoryview(contents[target])))

    def _hash_of(self, i: int, contents: list[bytes]) -> int:
        section = self.sections[i]
        if section.kind in _PLAIN_HASH or section.kind >= FIRST_OPTIONAL_KIND:
            return hash_bytes(contents[i])
        if section.kind == Kind.BLOCK_HASHES:
            return hash_bytes(contents[i])
        if section.kind == Kind.PAYLOAD and (index := self.find(Kind.INDEX)) is not None:
            whole = len(contents[index]) // ENTRY_DTYPE.itemsize
            return hash_bytes(np.frombuffer(contents[index], ENTRY_DTYPE, whole)["hash"].tobytes())
        if section.kind == Kind.COLUMN:
            hashes = self.find(Kind.COLUMN_HASHES, section.field)
        else:
            hashes = self.find(Kind.BLOCK_HASHES, section.field, section.kind)
        return section.hash if hashes is None else hash_bytes(contents[hashes])


def to_dense(parts: Parts) -> bytes:
    """Return the dense form of a shard, without changes of header and table."""
    flags = (not parts.hashes) * _KEEP_SECTION_HASHES | (not parts.blocks) * _KEEP_BLOCK_HASHES
    dense = [_FRONT.pack(flags, parts.n_samples, parts.required, parts.optional, parts.minor)]
    for section, content in zip(parts.sections, parts.contents, strict=True):
        if section.kind == Kind.BLOCK_HASHES and parts.blocks:
            content = b""  # they follow from the rest
        dense.append(_PART.pack(*section.key, section.count, section.stride, len(content)))
        dense.append(content)
    return b"".join(dense)


def from_dense(dense: bytes) -> Parts:
    """Return the shard that any bytes at all stand for; missing parts are empty."""
    front = dense[: _FRONT.size].ljust(_FRONT.size, b"\0")
    flags, n_samples, required, optional, minor = _FRONT.unpack(front)
    sections: list[Section] = []
    contents: list[bytes] = []
    place = _FRONT.size
    while place + _PART.size <= len(dense) and len(sections) < MAX_DENSE_PARTS:
        kind, number, of_kind, count, stride, n_bytes = _PART.unpack_from(dense, place)
        place += _PART.size
        sections.append(Section(kind, number, of_kind, 0, 0, count, stride, 0))
        contents.append(dense[place : place + n_bytes])
        place += n_bytes
    return Parts(
        n_samples,
        required,
        sections,
        contents,
        optional,
        minor,
        hashes=not flags & _KEEP_SECTION_HASHES,
        blocks=not flags & _KEEP_BLOCK_HASHES,
    )
