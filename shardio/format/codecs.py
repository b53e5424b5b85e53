"""How a record's bytes are stored: raw, or as one zstd frame, with or without a dictionary.

A record that zstd does not shrink is stored raw, so the codec stands in the record's own index
entry. The frame's declared content size must equal the index entry's before anything is
allocated: python-zstandard's `max_output_size` alone does not protect, the frame header wins.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import zstandard

from shardio.errors import InsufficientMemory, ShardCorrupt

ZSTD_LEVEL: Final = 3
"""zstd's own default; part of "same input, same bytes" together with the library's version."""

MAX_DICTIONARY_BYTES: Final = 1 << 20
_DICTIONARY_BYTES: Final = 64 << 10
_SAMPLE_BYTES: Final = 2 << 20
"""How much of a field is learned from: a quarter of a second, and more does not help."""
_LEAST_SAMPLES: Final = 16
_SAMPLE_PER_DICTIONARY: Final = 16
"""A dictionary of more than this part of what it is learned from would learn it by heart."""


class Codec(IntEnum):
    """Stable codes, as index entries and schemas hold them."""

    RAW = 0
    ZSTD = 1
    ZSTD_DICTIONARY = 2


class _Contexts(threading.local):
    """zstd contexts of one thread: they are not safe to share, and cost a millisecond to make."""

    def __init__(self, content: bytes = b"") -> None:
        known = None
        if content:
            known = zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_FULLDICT)
        self.compressor = zstandard.ZstdCompressor(
            level=ZSTD_LEVEL, write_content_size=True, dict_data=known
        )
        self.decompressor = zstandard.ZstdDecompressor(dict_data=known)


class Dictionary:
    """What zstd has learned of a field's records; the same object serves any thread.

    Its `id` is what frames that are compressed with it declare.

    Raises:
        ShardCorrupt: the content is no zstd dictionary, or has no id. It names no place.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        try:
            self.contexts = _Contexts(content)
        except zstandard.ZstdError as error:
            raise ShardCorrupt(
                f"this is no zstd dictionary ({error})", code="dictionary"
            ) from error
        self.id = int.from_bytes(content[4:8], "little")
        if not self.id:
            raise ShardCorrupt(
                "the zstd dictionary has the id 0: none can ask for it", code="dictionary"
            )


_plain = _Contexts()

cached_dictionary = functools.lru_cache(maxsize=64)(Dictionary)
"""A Dictionary, the same one for the same content: contexts cost 0.2 ms and as much memory."""


def train_dictionary(records: Sequence[bytes | memoryview]) -> bytes:
    """A dictionary for records like these: at most 64 KiB; b"" where there is little to learn.

    The same records give the same dictionary. At most 2 MiB of them are looked at, from the first.
    """
    samples: list[bytes | bytearray | memoryview] = []
    n_bytes = 0
    for record in records:
        if n_bytes + len(record) > _SAMPLE_BYTES:
            break
        samples.append(bytes(record))
        n_bytes += len(record)
    size = min(_DICTIONARY_BYTES, n_bytes // _SAMPLE_PER_DICTIONARY)
    if len(samples) < _LEAST_SAMPLES or not size:
        return b""
    try:
        return zstandard.train_dictionary(size, samples, level=ZSTD_LEVEL).as_bytes()
    except zstandard.ZstdError:  # too small, or too much alike to learn from
        return b""


def encode(
    record: memoryview, codec: Codec, dictionary: Dictionary | None = None
) -> tuple[Codec, memoryview]:
    """What to store for `record`, and the codec that its index entry must name."""
    if codec is Codec.RAW:
        return Codec.RAW, record
    packs = Codec.ZSTD if dictionary is None else Codec.ZSTD_DICTIONARY
    contexts = _plain if dictionary is None else dictionary.contexts
    packed = memoryview(contexts.compressor.compress(record))
    return (packs, packed) if packed.nbytes < record.nbytes else (Codec.RAW, record)


def check_dictionary(stored: memoryview, dictionary: Dictionary) -> None:
    """Make sure that a frame declares the dictionary that it is decompressed with.

    Raises:
        ShardCorrupt: it declares none. (Another one's is refused when it is decompressed.)
    """
    declared = zstandard.get_frame_parameters(stored).dict_id
    if declared != dictionary.id:
        raise ShardCorrupt(
            "the zstd frame does not declare its field's dictionary",
            code="dictionary",
            expected=dictionary.id,
            found=declared,
        )


def decode(
    stored: memoryview, codec: int, n_bytes: int, dictionary: Dictionary | None = None
) -> bytes | memoryview:
    """The record's n_bytes; for a raw record the very memory it was given.

    Raises:
        ShardCorrupt: the frame does not hold exactly n_bytes; the place is the caller's to add.
        InsufficientMemory: there is no room for n_bytes.
    """
    if codec == Codec.RAW:
        return stored
    contexts = _plain
    if codec == Codec.ZSTD_DICTIONARY:
        if dictionary is None:
            what = "a record needs a dictionary, and its field has none"
            raise ShardCorrupt(what, code="dictionary")
        contexts = dictionary.contexts
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
        record = contexts.decompressor.decompress(
            stored, max_output_size=n_bytes, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ShardCorrupt(f"the zstd frame is damaged ({error})", code="zstd_frame") from error
    except MemoryError as error:
        raise InsufficientMemory(
            f"a record needs {n_bytes} bytes of memory to decompress"
        ) from error
    if len(record) != n_bytes:
        raise ShardCorrupt(
            "the zstd frame holds another size than it declares",
            code="zstd_size",
            expected=n_bytes,
            found=len(record),
        )
    return record
