"""The hashes in a shard, and the bytes that each hash covers.

A hash is xxh3-64 with seed 0, stored as an unsigned 64-bit integer. A *unit* is a piece of a
section that has its own hash. There are five kinds of unit:

* a **row** of a column, if the rows have at least `ROW_HASH_MIN` bytes. The hash does not cover the
  padding between the row and the next one, but this padding must be zero;
* a **run** of rows of a column with smaller rows: as many rows as fit in `RUN_BYTES`. The hash
  covers the rows and their padding;
* a **block** of `BLOCK_BYTES` of an index section, which is a small section that locates or
  describes data. The last block of a section may be shorter;
* a **record** of the payload, unless it is a stream (a video or audio). Its hash is in its index
  entry;
* a **chunk** of `CHUNK_BYTES` of the record of a stream. A reader of a part of the stream verifies
  only the chunks that it reads. The last chunk of a record may be shorter. The index entry of the
  record has the hash of the hashes of all its chunks.

The section table has a hash for each section. Bytes are not hashed twice: if a section consists of
units, its hash is the hash of the hashes of these units, as little-endian integers.
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
"""The class of an xxh3-64 hash to which bytes are added step by step."""


def content_id(table: bytes) -> bytes:
    """Return the id of a shard: the xxh3-128 hash of its section table, which has all hashes."""
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


def show_hashes(expected: int, found: int) -> dict[str, Any]:
    """Return two hashes in hex, as arguments of ShardCorrupt."""
    return {"expected": f"{expected:016x}", "found": f"{found:016x}"}


def blocks_touched(starts: npt.NDArray[np.int64], n_bytes: int) -> npt.NDArray[np.int64]:
    """Return the indices of the blocks of an index section that contain some items.

    Each item begins at an offset in `starts` and has `n_bytes`, at most the size of a block.
    """
    first = starts // BLOCK_BYTES
    last = (starts + (n_bytes - 1)) // BLOCK_BYTES
    return distinct(np.concatenate([first, last]))


def distinct(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the unique numbers, ascending.

    np.unique is not used, because its first call imports numpy.ma. This takes 35 ms, and would
    delay the first batch.
    """
    ordered = np.sort(numbers)
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]
