"""Read the metadata of a damaged shard, and restore redundant parts of the shard in a copy.

The header is stored twice, and the schema is also stored in the generation of the dataset. Hashes
of 4 KiB blocks, and of the rows of columns, can be computed again from intact data. If they were
not, one damaged block hash would make a shard unreadable, and one damaged row hash could cost 512
samples. The hashes of the chunks of streams are not restored, as this would gain little: on
average, a random damaged byte costs about 1 sample because it damages a stream, and 0.005 samples
because it damages one of these hashes.

A part is restored only if an undamaged hash that is stored elsewhere confirms it. Other damage is
copied, and is detected when the copy is read.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from shardio.errors import DataError, ShardCorrupt
from shardio.format.checksum import (
    BLOCK_BYTES,
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
    check_header_fits,
    unpack_header,
    unpack_table,
)
from shardio.format.schema import Schema
from shardio.format.sections import Sections
from shardio.maintenance.jobs import takes_paths
from shardio.maintenance.verify import Finding, Findings
from shardio.shard.opening import open_sections, read_schema
from shardio.storage import fs
from shardio.storage.content import Content, PreadFile
from shardio.storage.file_access import map_file, open_shard

_PIECE_BYTES: Final = 1 << 20
_HASH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Survey:
    """The metadata of one shard, which may be damaged; unreadable parts are None or empty.

    A shard can be opened if there are no findings.
    """

    path: str
    n_bytes: int
    findings: tuple[Finding, ...]
    header: Header | None = None
    schema: Schema | None = None
    sections: tuple[Section, ...] = ()

    def field_of(self, section: Section) -> str | None:
        """Return the name of a section's field; None if the section belongs to no field."""
        if section.field == NO_FIELD:
            return None
        names = list(self.schema or {})
        return names[section.field] if section.field < len(names) else f"number {section.field}"


@takes_paths("survey_shard(path)", "path")
def survey_shard(path: str | os.PathLike[str]) -> Survey:
    """Read the metadata of a shard, which may be damaged.

    Raises:
        ShardNotFound: there is no such file.
        OSError: the file cannot be opened.
    """
    findings = Findings(path)
    name, content = findings.path, None
    with findings.catching():
        content = PreadFile(name)
        header, schema, sections = open_sections(content, name)
        return Survey(name, content.nbytes, (), header, schema, tuple(sections.values()))
    if content is None:
        return Survey(name, 0, findings.close())
    return _survey_damaged(content, name, findings.close())


def _survey_damaged(content: Content, path: str, refusal: tuple[Finding, ...]) -> Survey:
    headers = (each for each in _headers(content, path) if isinstance(each, Header))
    header, further = next(headers, None), Findings(path)
    sections: Sections = {}
    schema = None
    if header is not None and header.table_offset + header.table_size <= content.nbytes:
        with further.catching():
            sections = _read_table(content, header, path)
    section = sections.get((Kind.SCHEMA, NO_FIELD, 0))
    if section is not None and section.offset + section.size <= content.nbytes:
        with further.catching():
            schema = read_schema(content, sections, path)
    findings = (*refusal, *(f for f in further.close() if f not in refusal))
    return Survey(path, content.nbytes, findings, header, schema, tuple(sections.values()))


def _read_table(content: Content, header: Header, path: str) -> Sections:
    table = bytes(content[header.table_offset : header.table_offset + header.table_size])
    return {section.key: section for section in unpack_table(table, header, path)}


@dataclass
class _DamagedShard:
    """A damaged shard, and the changes to make in its copy: the new bytes at some offsets."""

    path: str
    content: memoryview
    header: Header
    sections: Sections
    notes: list[str]
    patches: dict[int, bytes] = field(default_factory=dict)

    def bytes_of(self, section: Section) -> memoryview:
        return self.content[section.offset : section.offset + section.size]

    def add_patch(self, offset: int, content: bytes, note: str) -> None:
        """Add a patch and a note, unless the shard already has these bytes at the offset."""
        if self.content[offset : offset + len(content)] != content:
            self.patches[offset] = content
            if note not in self.notes:
                self.notes.append(note)


def restore_shard(path: str, copy: Path, schema: Schema) -> tuple[str, list[str]]:
    """Restore the redundant parts of a damaged shard in a copy; `schema` is the expected schema.

    Return the path of the copy, and a note for each change; if nothing has to be changed, return
    the path of the shard itself. A file at `copy` is replaced; the caller removes the copy.

    Raises:
        ShardNotFound, ShardIncomplete, ShardCorrupt, ShardUnsupported: the shard is missing, or so
            much of it is damaged that its sections cannot be located.
    """
    notes = []
    content, n_holes = _map_readable(path, copy)
    if n_holes:
        notes.append(f"{n_holes * PAGE} bytes that the disk cannot read are treated as zeros")
    header, sections = _open_damaged(content, path)
    shard = _DamagedShard(path, content, header, sections, notes)
    shard.add_patch(0, header.pack(), "the first page is restored from the last")
    shard.add_patch(
        header.file_size - PAGE, header.pack(), "the last page is restored from the first"
    )
    if len(content) > header.file_size:
        notes.append(f"{len(content) - header.file_size} bytes after the shard's end are left out")
    known = _restore_schema(shard, schema)
    _restore_block_hashes(shard)
    if known is not None:
        _restore_column_hashes(shard, known)
    if not notes:
        return path, []
    if not n_holes:
        fs.copy(path, copy)
    with io.BufferedRandom(fs.update(copy)) as file:
        file.truncate(header.file_size)
        for offset, patch in shard.patches.items():
            file.seek(offset)
            file.write(patch)
    return str(copy), notes


def schema_of(path: str) -> Schema:
    """Return the schema of a shard whose other parts may be damaged.

    Raises the errors of `restore_shard`.
    """
    folder = fs.make_temporary_folder(None)
    try:
        content, _ = _map_readable(path, folder / "copy.shard")
        _, sections = _open_damaged(content, path)
        return read_schema(content, sections, path)
    finally:
        fs.remove_tree(folder)


def _map_readable(path: str, copy: Path) -> tuple[memoryview, int]:
    """Map a file, or, if the disk cannot read some pages, a copy in which these pages are zero.

    Return the map and the number of unreadable pages.
    """
    fs.unlink(copy)
    holes = unreadable_pages(path)
    if holes:
        _copy_readable(path, copy, set(holes))
    return map_file(str(copy) if holes else path)[0], len(holes)


def unreadable_pages(path: str) -> list[int]:
    """Read a whole file, and return the offset of each page that the disk cannot read."""
    fd = open_shard(path)
    try:
        n_bytes, holes = os.fstat(fd).st_size, []
        for offset in range(0, n_bytes, _PIECE_BYTES):
            end = min(offset + _PIECE_BYTES, n_bytes)
            if not _is_readable(fd, offset, end - offset):
                holes += [page for page in range(offset, end, PAGE) if not _is_readable(fd, page)]
        return holes
    finally:
        os.close(fd)


def _is_readable(fd: int, offset: int, n_bytes: int = PAGE) -> bool:
    try:
        os.pread(fd, n_bytes, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False
    return True


def _copy_readable(path: str, copy: Path, holes: set[int]) -> None:
    with open(path, "rb", buffering=0) as source, fs.create(copy) as target:
        n_bytes = os.fstat(source.fileno()).st_size
        for page in range(0, n_bytes, PAGE):
            if page not in holes:
                target.seek(page)
                target.write(os.pread(source.fileno(), PAGE, page))
        target.truncate(n_bytes)


def _open_damaged(content: memoryview, path: str) -> tuple[Header, Sections]:
    """Return the first intact header whose section table can be read, and the table."""
    reason: DataError | None = None
    for header in _headers(content, path):
        if isinstance(header, DataError):
            reason = reason or header
            continue
        try:
            # Pass the size in the header: the actual size differs if the file is truncated.
            check_header_fits(header, header.file_size, path)
            if header.table_offset + header.table_size > len(content):
                raise ShardCorrupt(
                    "the file is truncated, and its section table is lost: the data cannot be "
                    "located",
                    code="file_size",
                    path=path,
                    expected=header.file_size,
                    found=len(content),
                )
            return header, _read_table(content, header, path)
        except ShardCorrupt as error:
            reason = error
    raise reason or ShardCorrupt("there is no header", code="magic", path=path)


def _headers(content: Content, path: str) -> Iterator[Header | DataError]:
    """Yield a header or an error for the first page, and for the last page that has a header."""
    if content.nbytes < PAGE:
        what, size = "too short to be a shard", content.nbytes
        yield ShardCorrupt(what, code="file_size", path=path, expected=PAGE, found=size)
        return
    for offset in _header_offsets(content):
        try:
            yield unpack_header(bytes(content[offset : offset + PAGE]), path, offset=offset)
        except DataError as error:
            yield error


def _header_offsets(content: Content) -> Iterator[int]:
    """Yield 0, then the offset of the last page that starts with MAGIC."""
    yield 0
    for page in range(content.nbytes // PAGE * PAGE - PAGE, 0, -PAGE):
        if bytes(content[page : page + len(MAGIC)]) == MAGIC:
            yield page
            return


def _restore_schema(shard: _DamagedShard, schema: Schema) -> Schema | None:
    """Return the schema of the shard.

    If it is damaged, restore it from `schema` if the hash matches; otherwise return None.
    """
    try:
        return read_schema(shard.content, shard.sections, shard.path)
    except DataError:
        section = shard.sections.get((Kind.SCHEMA, NO_FIELD, 0))
    if section is None or hash_bytes(schema.to_json()) != section.hash:
        return None
    shard.add_patch(section.offset, schema.to_json(), "the schema is that of the dataset")
    return schema


def _restore_block_hashes(shard: _DamagedShard) -> None:
    """Compute damaged block hashes again if the data that they cover is intact."""
    for section in shard.sections.values():
        target = shard.sections.get((section.of_kind, section.field, 0))
        if section.kind != Kind.BLOCK_HASHES or target is None:
            continue
        if hash_bytes(shard.bytes_of(section)) != section.hash:
            packed = pack_hashes(block_hashes(shard.bytes_of(target)))
            if hash_bytes(packed) == section.hash:
                note = f"hashes of section {target.name} are computed again"
                shard.add_patch(section.offset, packed, note)


def _restore_column_hashes(shard: _DamagedShard, schema: Schema) -> None:
    """Compute damaged 4 KiB blocks of row hashes again; use a block if its own hash matches."""
    for name, field_ in schema.columns.items():
        number = schema.field_id(name)
        column = shard.sections.get((int(Kind.COLUMN), number, 0))
        hashes = shard.sections.get((int(Kind.COLUMN_HASHES), number, 0))
        blocks = shard.sections.get((int(Kind.BLOCK_HASHES), number, int(Kind.COLUMN_HASHES)))
        if column is None or hashes is None or blocks is None:
            continue
        stored, rows = shard.bytes_of(hashes), shard.bytes_of(column)
        row_bytes, stride = field_.row_bytes or 0, field_.stride
        per_unit = rows_per_unit(row_bytes, stride)
        n_hashed = row_bytes if per_unit == 1 else per_unit * stride
        expected = np.frombuffer(shard.bytes_of(blocks)[: blocks.size // 8 * 8], "<u8").tolist()
        for start, wanted in zip(range(0, hashes.size, BLOCK_BYTES), expected, strict=False):
            block = stored[start : start + BLOCK_BYTES]
            if hash_bytes(block) == wanted:
                continue
            starts = [
                unit * per_unit * stride
                for unit in range(start // _HASH_BYTES, (start + len(block)) // _HASH_BYTES)
            ]
            packed = pack_hashes(hash_bytes(rows[at : at + n_hashed]) for at in starts)
            if hash_bytes(packed) == wanted:
                note = f"hashes of field {name!r} are computed again"
                shard.add_patch(hashes.offset + start, packed, note)
