"""Records compressed with zlib."""

from __future__ import annotations

import zlib

from shardio.errors import ShardCorrupt
from shardio.format.codecs import CodecSpec, Dictionary

CODE = 77


def compress(record: memoryview, dictionary: Dictionary | None) -> tuple[int, memoryview]:
    return CODE, memoryview(zlib.compress(record, 1))


def decompress(stored: memoryview, n_bytes: int, dictionary: Dictionary | None) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        record = unpacker.decompress(stored, n_bytes + 1)
    except zlib.error as error:
        raise ShardCorrupt(f"the record is no zlib stream ({error})", code="zlib") from error
    if len(record) != n_bytes or unpacker.unused_data or not unpacker.eof:
        raise ShardCorrupt("the zlib stream has another size", code="zlib")
    return record


ZLIB = CodecSpec("zlib", CODE, compress, decompress, max_ratio=1032)
