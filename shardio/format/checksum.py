"""Which bytes each hash covers.

Everything is hashed with xxh3-64 (seed 0), kept as an unsigned 64-bit integer. Four kinds of
unit exist, and every section belongs to one of them:

* a **row** of a column whose rows have at least `ROW_HASH_MIN` bytes: the row's own bytes (the
  zeros that fill it up to the stride are not hashed; they must be zero);
* a **run** of a column with smaller rows: as many whole strides as fit in `RUN_BYTES`;
* a **block** of `BLOCK_BYTES` of an index section (the last one may be shorter);
* a **chunk** of `CHUNK_BYTES` of the record of a stream (the last one may be shorter), so that a
  clip is checked by what it touches. The hash in the index entry is that of the chunks' hashes.

Any other record of the payload is covered by the hash in its index entry. Bytes are hashed once:
the hash of a section that has unit hashes is the hash of those, as little-endian integers.
"""

from __future__ import annotations

from collections.abc import Iterable

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
"""The same as 8 bytes, the most significant one first."""

Hasher = xxhash.xxh3_64
"""The same, fed piece by piece."""


def content_id(table: bytes) -> bytes:
    """The 16 bytes that identify a shard: xxh3-128 of its section table, which holds every hash."""
    return xxhash.xxh3_128_digest(table)


def rows_per_unit(row_bytes: int, stride: int) -> int:
    """How many rows of a column share one hash."""
    return 1 if row_bytes >= ROW_HASH_MIN else max(1, RUN_BYTES // stride)


def n_units(n_rows: int, row_bytes: int, stride: int) -> int:
    """How many hashes a column of n_rows has."""
    return -(-n_rows // rows_per_unit(row_bytes, stride))


def n_blocks(n_bytes: int) -> int:
    """How many block hashes an index section of n_bytes has."""
    return -(-n_bytes // BLOCK_BYTES)


def block_hashes(content: memoryview) -> Iterable[int]:
    """The hash of each 4 KiB block of `content`, in order."""
    return (hash_bytes(content[i : i + BLOCK_BYTES]) for i in range(0, content.nbytes, BLOCK_BYTES))


def n_chunks(n_bytes: int) -> int:
    """How many chunk hashes the record of a stream has."""
    return -(-n_bytes // CHUNK_BYTES)


def chunk_hashes(record: memoryview) -> list[int]:
    """The hash of each chunk of the record of a stream, in order."""
    starts = range(0, record.nbytes, CHUNK_BYTES)
    return [hash_bytes(record[at : at + CHUNK_BYTES]) for at in starts]


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Hashes as they are stored: little-endian unsigned 64-bit."""
    return np.fromiter(hashes, "<u8").tobytes()


def blocks_touched(starts: npt.NDArray[np.int64], n_bytes: int) -> npt.NDArray[np.int64]:
    """The blocks that n_bytes from each of `starts` lie in, each once, ascending."""
    first = starts // BLOCK_BYTES
    last = (starts + (n_bytes - 1)) // BLOCK_BYTES
    return distinct(np.concatenate([first, last]))


def distinct(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each of the numbers once, ascending.

    As np.unique, which imports numpy.ma when it is first called: 35 ms before the first batch.
    """
    ordered = np.sort(numbers)
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]
