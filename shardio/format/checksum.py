"""The hashes in a shard, and the bytes that each hash covers.

A hash is xxh3-64 with seed 0. A *unit* is the part of a section that one hash covers:

* a **row** of a column with rows of at least `ROW_HASH_MIN` bytes, without the row's padding,
  which must be zero;
* a **run** of smaller rows with their padding: as many rows as fit in `RUN_BYTES`;
* a **block** of `BLOCK_BYTES` of an index section (a section that locates or describes data);
* a **record** of the payload that is not a stream; its hash is in its index entry;
* a **chunk** of `CHUNK_BYTES` of a stream (a video or audio), so that a part of a stream can be
  verified alone. The stream's index entry has the hash of the hashes of its chunks.

The last run, block or chunk may be smaller. The section table contains one hash for each section:
the hash of the hashes of its units (as little-endian integers) or, if the section has no units, the
hash of its bytes.
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

digest_bytes = xxhash.xxh3_64_digest
"""xxh3-64 as 8 bytes, the most significant one first."""

Hasher = xxhash.xxh3_64


def content_id(table: bytes) -> bytes:
    """Return the id of a shard: the xxh3-128 hash of its section table."""
    return xxhash.xxh3_128_digest(table)


def rows_per_unit(row_bytes: int, stride: int) -> int:
    """Return the number of rows of a column that share one hash."""
    return 1 if row_bytes >= ROW_HASH_MIN else max(1, RUN_BYTES // stride)


def n_units(n_rows: int, row_bytes: int, stride: int) -> int:
    """Return the number of hashes of a column with n_rows."""
    return -(-n_rows // rows_per_unit(row_bytes, stride))


def n_blocks(n_bytes: int) -> int:
    """Return the number of block hashes of an index section that has n_bytes."""
    return -(-n_bytes // BLOCK_BYTES)


def block_hashes(content: memoryview) -> Iterable[int]:
    """Return the hash of each 4 KiB block of `content`, in order."""
    return (hash_bytes(content[i : i + BLOCK_BYTES]) for i in range(0, content.nbytes, BLOCK_BYTES))


def n_chunks(n_bytes: int) -> int:
    """Return the number of chunk hashes of a stream whose record has n_bytes."""
    return -(-n_bytes // CHUNK_BYTES)


def chunk_hashes(record: memoryview) -> list[int]:
    """Return the hash of each chunk of a stream's record, in order."""
    starts = range(0, record.nbytes, CHUNK_BYTES)
    return [hash_bytes(record[at : at + CHUNK_BYTES]) for at in starts]


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Return hashes as they are stored: little-endian unsigned 64-bit integers."""
    return np.fromiter(hashes, "<u8").tobytes()


def format_hashes(expected: int, found: int) -> dict[str, Any]:
    """Return two hashes in hex, as arguments of ShardCorrupt."""
    return {"expected": f"{expected:016x}", "found": f"{found:016x}"}


def blocks_touched(starts: npt.NDArray[np.int64], n_bytes: int) -> npt.NDArray[np.int64]:
    """Return the indices of the blocks that contain the items at the offsets `starts`.

    The size of an item is `n_bytes`, which is at most the size of a block.
    """
    first = starts // BLOCK_BYTES
    last = (starts + (n_bytes - 1)) // BLOCK_BYTES
    return distinct(np.concatenate([first, last]))


def distinct(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the unique numbers, ascending.

    np.unique is avoided: its first call imports numpy.ma, which takes 35 ms.
    """
    ordered = np.sort(numbers)
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]
