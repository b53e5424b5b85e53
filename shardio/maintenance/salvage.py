"""Salvage: restore the redundant parts of a damaged shard, in a copy, so that it can be opened.

The header is stored twice, in the first and in the last page. A second copy of the schema is in the
dataset's generation. Block, column and chunk hashes can be recomputed if the data that they cover
is intact. A part is restored only if an undamaged hash that is stored elsewhere confirms it. Other
damage stays and is detected by reading.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import DataError, ShardCorrupt
from shardio.format.checksum import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    block_hashes,
    hash_bytes,
    pack_hashes,
    rows_per_unit,
)
from shardio.format.layout import (
    MAGIC,
    NO_FIELD,
    PAGE,
    Header,
    Kind,
    Section,
    check_place,
    unpack_header,
    unpack_table,
)
from shardio.format.schema import Schema
from shardio.format.sections import DIMENSION, ENTRY_DTYPE, Entries, Sections
from shardio.format.types.streams import STREAM_DTYPE
from shardio.shard.reader import read_schema
from shardio.storage import fs
from shardio.storage.file_access import map_file, open_shard

_PER_BLOCK = BLOCK_BYTES // DIMENSION.size


def recompute_chunk_hashes(
    content: memoryview, sections: Sections, schema: Schema
) -> Iterator[tuple[str, int, bytes]]:
    """Yield the field, file offset and bytes of each block of chunk hashes that can be restored.

    Args:
        content: the damaged file; sections may reach beyond its end.
        sections: the section table.
        schema: the schema of the shard.
    """
    index, payload = ((kind, NO_FIELD, 0) for kind in (Kind.INDEX, Kind.PAYLOAD))
    for k, (name, field_) in enumerate(schema.records.items()):
        number = schema.field_id(name)
        keys = [(int(kind), number, 0) for kind in (Kind.STREAMS, Kind.CHUNK_HASHES)]
        keys.append((int(Kind.BLOCK_HASHES), number, int(Kind.CHUNK_HASHES)))
        if not field_.is_streamed or not all(key in sections for key in (index, payload, *keys)):
            continue
        lines, hashes, blocks = (sections[key] for key in keys)
        entries = _items(content, sections[index], ENTRY_DTYPE)[k :: len(schema.records)]
        firsts = _items(content, lines, STREAM_DTYPE)["first_chunk"]
        records = _Records(content, sections[payload], entries, firsts[: len(entries)])
        expected = _items(content, blocks, np.dtype("<u8"))
        for block, wanted in enumerate(expected.tolist()):
            place = hashes.offset + block * BLOCK_BYTES
            n_bytes = min(BLOCK_BYTES, hashes.size - block * BLOCK_BYTES)
            if hash_bytes(content[place : place + n_bytes]) == wanted:
                continue
            first = block * _PER_BLOCK
            packed = records.hashes(first, first + n_bytes // DIMENSION.size)
            if hash_bytes(packed) == wanted:
                yield name, place, packed


def _items(content: memoryview, section: Section, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the items of a section that are before the end of the file."""
    stored = content[section.offset : section.offset + section.size]
    return np.frombuffer(stored, dtype, len(stored) // dtype.itemsize)


class _Records:
    """The records of a stream field, and the index of each record's first chunk."""

    def __init__(
        self,
        content: memoryview,
        payload: Section,
        entries: Entries,
        firsts: npt.NDArray[np.uint64],
    ) -> None:
        self._content, self._payload = content, payload
        self._entries, self._firsts = entries, firsts

    def hashes(self, first: int, last: int) -> bytes:
        """Return the hashes of chunks `first` to `last` - 1; b"" if a chunk cannot be located."""
        numbers = np.arange(first, last).astype(np.uint64)
        # Several records have the same first chunk if all but the last are empty; take the last.
        rows = np.searchsorted(self._firsts, numbers, side="right") - 1
        if not len(rows) or rows.min() < 0:
            return b""
        found = []
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            start = (number - int(self._firsts[row])) * CHUNK_BYTES
            n_bytes = min(CHUNK_BYTES, int(self._entries["n_bytes"][row]) - start)
            if n_bytes <= 0:
                return b""
            place = self._payload.offset + int(self._entries["offset"][row]) + start
            found.append(hash_bytes(self._content[place : place + n_bytes]))
        return pack_hashes(found)


_PIECE_BYTES: Final = 1 << 20
_HASH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Mended:
    """A restored file; `notes` describe the restored parts."""

    path: str
    notes: tuple[str, ...] = ()


@dataclass
class _Draft:
    """A damaged shard, and the patches for its copy: a dict from file offset to new bytes."""

    path: str
    content: memoryview
    header: Header
    sections: Sections
    patches: dict[int, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def bytes_of(self, section: Section) -> memoryview:
        return self.content[section.offset : section.offset + section.size]

    def put(self, offset: int, content: bytes, note: str) -> None:
        """Replace bytes in the copy and add a note, unless the bytes are equal."""
        if self.content[offset : offset + len(content)] != content:
            self.patches[offset] = content
            if note not in self.notes:
                self.notes.append(note)


def mend(path: str, folder: Path, schema: Schema | None = None) -> Mended:
    """Restore redundant parts in a copy of a shard; return the shard itself if nothing is restored.

    Args:
        path: the shard; it is only read.
        folder: the folder for the copy; the caller removes it.
        schema: the shard's expected schema, if known.

    Raises:
        ShardNotFound: there is no such file.
        ShardIncomplete, ShardCorrupt, ShardUnsupported: the copy cannot be opened either.
        OSError: the file cannot be opened, or the copy cannot be written.
    """
    copy, notes = folder / "mended.shard", []
    content, n_holes = _map_readable(path, copy)
    if n_holes:
        notes.append(f"{n_holes * PAGE} bytes that the disk cannot read are treated as zeros")
    header, sections = _open_any(content, path)
    draft = _Draft(path, content, header, sections, notes=notes)
    draft.put(0, header.pack(), "the first page is restored from the last")
    draft.put(header.file_size - PAGE, header.pack(), "the last page is restored from the first")
    if len(content) > header.file_size:
        notes.append(f"{len(content) - header.file_size} bytes after its end are left out")
    known = _mend_schema(draft, schema)
    _mend_block_hashes(draft)
    if known is not None:
        _mend_column_hashes(draft, known)
        for name, offset, packed in recompute_chunk_hashes(content, sections, known):
            draft.put(offset, packed, f"hashes of field {name!r} are computed again")
    if not notes:
        return Mended(path)
    if not n_holes:
        fs.copy(path, copy)
    with io.BufferedRandom(fs.update(copy)) as file:
        file.truncate(header.file_size)
        for offset, patch in draft.patches.items():
            file.seek(offset)
            file.write(patch)
    return Mended(str(copy), tuple(notes))


def schema_of(path: str) -> Schema:
    """Return the schema of a shard, even if other parts are damaged.

    Raises:
        ShardNotFound, ShardIncomplete, ShardCorrupt, ShardUnsupported: the schema cannot be read.
    """
    folder = fs.make_temporary_folder(None)
    try:
        content, _ = _map_readable(path, folder / "copy.shard")
        _, sections = _open_any(content, path)
        return read_schema(content, sections, path)
    finally:
        fs.remove_tree(folder)


def _map_readable(path: str, copy: Path) -> tuple[memoryview, int]:
    """Map a file. If some of its pages are unreadable, map a copy with holes in their place.

    Also return the number of unreadable pages.
    """
    fs.unlink(copy)
    holes = unreadable_pages(path)
    if holes:
        _copy_readable(path, copy, set(holes))
    return map_file(str(copy) if holes else path), len(holes)


def unreadable_pages(path: str) -> list[int]:
    """Read a whole file, and return the offset of each page that the disk cannot read.

    The file is read by calls of pread, because touching such a page in a mapping kills the process.
    """
    fd = open_shard(path)
    try:
        n_bytes, holes = os.fstat(fd).st_size, []
        for place in range(0, n_bytes, _PIECE_BYTES):
            end = min(place + _PIECE_BYTES, n_bytes)
            if not _is_readable(fd, place, end - place):
                holes += [page for page in range(place, end, PAGE) if not _is_readable(fd, page)]
        return holes
    finally:
        os.close(fd)


def _is_readable(fd: int, place: int, n_bytes: int = PAGE) -> bool:
    try:
        os.pread(fd, n_bytes, place)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False
    return True


def _copy_readable(path: str, copy: Path, holes: set[int]) -> None:
    """Copy a file page by page, leaving holes for the unreadable pages."""
    with open(path, "rb", buffering=0) as source, fs.create(copy) as target:
        n_bytes = os.fstat(source.fileno()).st_size
        for page in range(0, n_bytes, PAGE):
            if page not in holes:
                target.seek(page)
                target.write(os.pread(source.fileno(), PAGE, page))
        target.truncate(n_bytes)


def _open_any(content: memoryview, path: str) -> tuple[Header, Sections]:
    """Return the header of the first or the last page, and the section table it points to.

    Raises:
        DataError: the error of the first page, if neither page can be used.
    """
    reason: DataError | None = None
    for header in _headers(content, path):
        if isinstance(header, DataError):
            reason = reason or header
            continue
        try:
            check_place(header, header.file_size, path)  # not the actual size, which may differ
            end = header.table_offset + header.table_size
            if end > len(content):
                raise ShardCorrupt(
                    "the file is truncated, and its section table is lost: the data cannot be "
                    "located",
                    code="file_size",
                    path=path,
                    expected=header.file_size,
                    found=len(content),
                )
            table = bytes(content[header.table_offset : end])
            return header, {s.key: s for s in unpack_table(table, header, path)}
        except ShardCorrupt as error:
            reason = error
    if reason is None:
        reason = ShardCorrupt("there is no header", code="magic", path=path)
    raise reason


def _headers(content: memoryview, path: str) -> Iterator[Header | DataError]:
    """Yield the header or error of the first page, then of the last page that has a header."""
    if len(content) < PAGE:
        what, size = "too short to be a shard", len(content)
        yield ShardCorrupt(what, code="file_size", path=path, expected=PAGE, found=size)
        return
    for offset in (0, *_last_header(content)):
        try:
            yield unpack_header(bytes(content[offset : offset + PAGE]), path, offset=offset)
        except DataError as error:
            yield error


def _last_header(content: memoryview) -> Iterator[int]:
    """Yield the offset of the last page that starts with the magic, not counting the first page.

    Yield nothing if there is no such page.
    """
    for page in range((len(content) - 1) // PAGE * PAGE, 0, -PAGE):
        if bytes(content[page : page + len(MAGIC)]) == MAGIC and len(content) >= page + PAGE:
            yield page
            return


def _mend_schema(draft: _Draft, schema: Schema | None) -> Schema | None:
    """Return the shard's schema; if it is damaged, restore it from `schema` if the hash matches.

    Return None if the schema cannot be restored.
    """
    try:
        return read_schema(draft.content, draft.sections, draft.path)
    except DataError:
        section = draft.sections.get((Kind.SCHEMA, NO_FIELD, 0))
    if schema is None or section is None or hash_bytes(schema.to_json()) != section.hash:
        return None
    draft.put(section.offset, schema.to_json(), "the schema is that of the dataset")
    return schema


def _mend_block_hashes(draft: _Draft) -> None:
    """Recompute damaged block hashes over intact data."""
    for section in draft.sections.values():
        target = draft.sections.get((section.of_kind, section.field, 0))
        if section.kind != Kind.BLOCK_HASHES or target is None:
            continue
        if hash_bytes(draft.bytes_of(section)) != section.hash:
            packed = pack_hashes(block_hashes(draft.bytes_of(target)))
            if hash_bytes(packed) == section.hash:
                note = f"hashes of section {target.name} are computed again"
                draft.put(section.offset, packed, note)


def _mend_column_hashes(draft: _Draft, schema: Schema) -> None:
    """Recompute each damaged block of column hashes if the rows that it covers are intact."""
    for name, field_ in schema.columns.items():
        number = schema.field_id(name)
        keys = [
            (int(Kind.COLUMN), number, 0),
            (int(Kind.COLUMN_HASHES), number, 0),
            (int(Kind.BLOCK_HASHES), number, int(Kind.COLUMN_HASHES)),
        ]
        if not all(key in draft.sections for key in keys):
            continue
        column, hashes, blocks = (draft.sections[key] for key in keys)
        row_bytes, stride = field_.row_bytes or 0, field_.stride
        per_unit = rows_per_unit(row_bytes, stride)
        expected = np.frombuffer(draft.bytes_of(blocks)[: blocks.size // 8 * 8], "<u8").tolist()
        if len(expected) * BLOCK_BYTES < hashes.size:
            continue
        for block in range(-(-hashes.size // BLOCK_BYTES)):
            start = block * BLOCK_BYTES
            stored = draft.bytes_of(hashes)[start : start + BLOCK_BYTES]
            if hash_bytes(stored) == expected[block]:
                continue
            first = start // _HASH_BYTES
            packed = pack_hashes(
                hash_bytes(_unit(draft, column, unit * per_unit, per_unit, row_bytes, stride))
                for unit in range(first, first + len(stored) // _HASH_BYTES)
            )
            if hash_bytes(packed) == expected[block]:
                note = f"hashes of field {name!r} are computed again"
                draft.put(hashes.offset + start, packed, note)


def _unit(
    draft: _Draft, column: Section, row: int, per_unit: int, row_bytes: int, stride: int
) -> memoryview:
    """Return the bytes of the unit (the rows that share one hash) that starts at `row`."""
    n_rows = min(per_unit, column.count - row)
    n_bytes = row_bytes if per_unit == 1 else n_rows * stride
    start = column.offset + row * stride
    return draft.content[start : start + n_bytes]
