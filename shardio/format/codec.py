"""How a record's bytes are stored: raw, or as one zstd frame.

A record that zstd does not shrink is stored raw, so the codec stands in the record's own index
entry. The frame's declared content size must equal the index entry's before anything is
allocated: python-zstandard's `max_output_size` alone does not protect, the frame header wins.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import Final

import zstandard

from shardio.errors import MemoryShort, ShardCorrupt

ZSTD_LEVEL: Final = 3
"""zstd's own default; part of "same input, same bytes" together with the library's version."""


class Codec(IntEnum):
    """Stable codes, as index entries and schemas hold them."""

    RAW = 0
    ZSTD = 1
    ZSTD_DICTIONARY = 2  # reserved: refused by a required-feature bit until it is built


class _Contexts(threading.local):
    """zstd contexts of one thread: they are not safe to share, and cost a millisecond to make."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def encode(record: memoryview, codec: Codec) -> tuple[Codec, memoryview]:
    """What to store for `record`, and the codec that its index entry must name."""
    if codec is Codec.RAW:
        return Codec.RAW, record
    packed = memoryview(_contexts.compressor.compress(record))
    return (Codec.ZSTD, packed) if packed.nbytes < record.nbytes else (Codec.RAW, record)


def decode(stored: memoryview, codec: int, n_bytes: int) -> bytes | memoryview:
    """The record's n_bytes; for a raw record the very memory it was given.

    Raises:
        ShardCorrupt: the frame does not hold exactly n_bytes; the place is the caller's to add.
        MemoryShort: there is no room for n_bytes.
    """
    if codec == Codec.RAW:
        return stored
    try:
        declared = zstandard.frame_content_size(stored)
    except zstandard.ZstdError as error:
        raise ShardCorrupt(f"the record is no zstd frame ({error})", code="zstd_frame") from error
    if declared != n_bytes:
        raise ShardCorrupt(
            "the zstd frame and the index disagree about the record's size",
            code="zstd_size",
            expected=n_bytes,
            found=declared,
        )
    try:
        record = _contexts.decompressor.decompress(
            stored, max_output_size=n_bytes, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ShardCorrupt(f"the zstd frame is damaged ({error})", code="zstd_frame") from error
    except MemoryError as error:
        raise MemoryShort(f"a record needs {n_bytes} bytes of memory to decompress") from error
    if len(record) != n_bytes:
        raise ShardCorrupt(
            "the zstd frame holds another size than it declares",
            code="zstd_size",
            expected=n_bytes,
            found=len(record),
        )
    return record
