"""Mending hashes of chunks of streams: worked out again where the packets under them are whole.

Used by `mending`. What is worked out is right if its block's hash, which was not damaged, says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.format.checksum import BLOCK_BYTES, CHUNK_BYTES, hash_bytes, pack_hashes
from shardio.format.fields import STREAMED
from shardio.format.index import DIMENSION, ENTRY_DTYPE, Entries
from shardio.format.layout import NO_FIELD, Kind, Section
from shardio.format.schema import Schema
from shardio.format.streams import STREAM_DTYPE
from shardio.shard.opening import Sections

_PER_BLOCK = BLOCK_BYTES // DIMENSION.size


def chunk_hashes_again(
    content: memoryview, sections: Sections, schema: Schema
) -> Iterator[tuple[str, int, bytes]]:
    """The name of a field, the place in the file, and the bytes of each block that can be mended.

    Args:
        content: the damaged file; what its sections say of it may be beyond its end.
        sections: its table.
        schema: its fields.
    """
    index, payload = ((kind, NO_FIELD, 0) for kind in (Kind.INDEX, Kind.PAYLOAD))
    for k, (name, field) in enumerate(schema.records.items()):
        number = schema.field_id(name)
        keys = [(int(kind), number, 0) for kind in (Kind.STREAMS, Kind.CHUNK_HASHES)]
        keys.append((int(Kind.BLOCK_HASHES), number, int(Kind.CHUNK_HASHES)))
        if not isinstance(field, STREAMED) or not all(
            key in sections for key in (index, payload, *keys)
        ):
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
    """The items of a section, as far as the file has them."""
    stored = content[section.offset : section.offset + section.size]
    return np.frombuffer(stored, dtype, len(stored) // dtype.itemsize)


class _Records:
    """The records of a field, and the number of each one's first chunk."""

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
        """The hashes of chunks from `first` to before `last`; b"" where one is nowhere."""
        numbers = np.arange(first, last).astype(np.uint64)
        # Who has no chunks has the first one of the next.
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
