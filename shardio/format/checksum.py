"""The bytes that each hash covers.

Hashes are xxh3-64 (seed 0), kept as unsigned 64-bit integers. There are four kinds of unit, and
every section belongs to one of them:

* a **row** of a column whose rows have at least `ROW_HASH_MIN` bytes: the row's own bytes (the
  padding up to the stride is not hashed, but must be zero);
* a **run** of a column with smaller rows: as many whole strides as fit in `RUN_BYTES`;
* a **block** of `BLOCK_BYTES` of an index section (the last one may be shorter);
* a **chunk** of `CHUNK_BYTES` of the record of a stream (the last one may be shorter), so that a
  clip needs only the chunks that it touches. The index entry has the hash of the chunks' hashes.

Every other record of the payload is covered by the hash in its index entry. Bytes are hashed only
once: the hash of a section with unit hashes is the hash of its unit hashes, as little-endian
integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK_BYTES = 4096
RUN_BYTES = 64 << 10
CHUNK_BYTES = 64 << 10
ROW_HASH_MIN = 2 << 10

hash_bytes = xxhash.xxh3_64_intdigest
"""xxh3-64 of any bytes-like object, as an integer."""

digest_bytes = xxhash.xxh3_64_digest
"""xxh3-64 as 8 bytes, the most significant one first."""

Hasher = xxhash.xxh3_64
"""An incremental xxh3-64."""


def content_id(table: bytes) -> bytes:
    """Return the 16 bytes that identify a shard: xxh3-128 of its section table.

    The table contains the hashes of all sections.
    """
    return xxhash.xxh3_128_digest(table)


def rows_per_unit(row_bytes: int, stride: int) -> int:
    """Return how many rows of a column share one hash."""
    return 1 if row_bytes >= ROW_HASH_MIN else max(1, RUN_BYTES // stride)


def n_units(n_rows: int, row_bytes: int, stride: int) -> int:
    """Return the number of hashes of a column of n_rows."""
    return -(-n_rows // rows_per_unit(row_bytes, stride))


def n_blocks(n_bytes: int) -> int:
    """Return the number of block hashes of an index section of n_bytes."""
    return -(-n_bytes // BLOCK_BYTES)


def block_hashes(content: memoryview) -> Iterable[int]:
    """Return the hash of each 4 KiB block of `content`, in order."""
    return (hash_bytes(content[i : i + BLOCK_BYTES]) for i in range(0, content.nbytes, BLOCK_BYTES))


def n_chunks(n_bytes: int) -> int:
    """Return the number of chunk hashes of a stream's record of n_bytes."""
    return -(-n_bytes // CHUNK_BYTES)


def chunk_hashes(record: memoryview) -> list[int]:
    """Return the hash of each chunk of a stream's record, in order."""
    starts = range(0, record.nbytes, CHUNK_BYTES)
    return [hash_bytes(record[at : at + CHUNK_BYTES]) for at in starts]


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Return hashes as they are stored: little-endian unsigned 64-bit integers."""
    return np.fromiter(hashes, "<u8").tobytes()


def show_hashes(expected: int, found: int) -> dict[str, Any]:
    """Return two hashes in hex, as arguments of ShardCorrupt."""
    return {"expected": f"{expected:016x}", "found": f"{found:016x}"}


def blocks_touched(starts: npt.NDArray[np.int64], n_bytes: int) -> npt.NDArray[np.int64]:
    """Return the blocks that contain the n_bytes from each of `starts`: unique, ascending."""
    first = starts // BLOCK_BYTES
    last = (starts + (n_bytes - 1)) // BLOCK_BYTES
    return distinct(np.concatenate([first, last]))


def distinct(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the unique numbers, ascending.

    Used instead of np.unique, whose first call imports numpy.ma: 35 ms before the first batch.
    """
    ordered = np.sort(numbers)
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]
