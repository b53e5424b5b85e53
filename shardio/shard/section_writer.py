"""The part of a shard that is written at its end: sections, their table, both header pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from shardio.format.checksum import (
    BLOCK_BYTES,
    block_hashes,
    content_id,
    hash_bytes,
    pack_hashes,
)
from shardio.format.layout import PAGE, Header, Kind, Section, pack_table, padded


class SectionTable:
    """Appends sections to a file, each on a page of its own, and remembers their table.

    Borrows the file, which stands behind the first header page and what was streamed after it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._place = PAGE
        self._sections: list[Section] = []

    def adopt(
        self, kind: int, field: int, n_bytes: int, count: int, stride: int, hash_: int
    ) -> None:
        """Enter the section that was streamed into the file already, right behind the header."""
        self._enter(kind, field, 0, n_bytes, count, stride, hash_)

    def add(
        self,
        kind: int,
        field: int,
        chunks: Iterable[memoryview],
        count: int,
        stride: int,
        hash_: int,
        of_kind: int = 0,
    ) -> None:
        """Append a section whose hash is known."""
        n_bytes = 0
        for chunk in chunks:
            self._file.write(chunk)
            n_bytes += chunk.nbytes
        self._enter(kind, field, of_kind, n_bytes, count, stride, hash_)

    def add_blocked(self, kind: int, field: int, chunks: Iterable[memoryview], stride: int) -> None:
        """Append an index section and the section of its block hashes.

        `chunks` are whole blocks, but for the last.
        """
        hashes: list[bytes] = []
        n_bytes = 0
        for chunk in chunks:
            self._file.write(chunk)
            n_bytes += chunk.nbytes
            hashes.append(pack_hashes(block_hashes(chunk)))
        packed = b"".join(hashes)
        whole = hash_bytes(packed)
        self._enter(kind, field, 0, n_bytes, n_bytes // stride, stride, whole)
        n_blocks = -(-n_bytes // BLOCK_BYTES)
        self.add(Kind.BLOCK_HASHES, field, [memoryview(packed)], n_blocks, 8, whole, kind)

    def _enter(
        self, kind: int, field: int, of_kind: int, n_bytes: int, count: int, stride: int, hash_: int
    ) -> None:
        self._sections.append(
            Section(kind, field, of_kind, self._place, n_bytes, count, stride, hash_)
        )
        self._file.write(bytes(padded(n_bytes) - n_bytes))
        self._place += padded(n_bytes)

    def close(self, n_samples: int, required: int) -> Header:
        """Append the table and the last page, then write the first."""
        table = pack_table(self._sections)
        self._file.write(table.ljust(padded(len(table)), b"\0"))
        header = Header(
            n_samples=n_samples,
            file_size=self._place + padded(len(table)) + PAGE,
            table_offset=self._place,
            table_size=len(table),
            table_hash=hash_bytes(table),
            id=content_id(table),
            required=required,
        )
        self._file.write(header.pack())
        self._file.seek(0)
        self._file.write(header.pack())
        return header
