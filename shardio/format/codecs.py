"""Codecs of records: raw, or one zstd frame with or without a dictionary.

If the codec does not shrink a record, the record is stored raw. The index entry of each record
therefore has the codec. `SPECS` lists the codecs that fields can have. No other code distinguishes
codecs, except for the handling of dictionaries.

Before anything is allocated, the content size that a zstd frame declares must equal the size in the
index entry. python-zstandard's `max_output_size` alone gives no protection, because the size in the
frame header takes precedence.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import or_
from typing import Final

import zstandard

from shardio.errors import InsufficientMemory, ShardCorrupt
from shardio.format.layout import Required

ZSTD_LEVEL: Final = 3
"""zstd's default. The same input gives the same bytes only with this level and zstd version."""

ZSTD_MAX_RATIO: Final = 1 << 15
"""The maximum compression ratio of zstd: a block of 4 bytes yields at most 128 KiB, so no frame
decompresses to more than 2^15 times its size. Index entries beyond this ratio are refused, which
bounds the memory that a damaged entry can make a reader allocate.
"""

MAX_DICTIONARY_BYTES: Final = 1 << 20
_DICTIONARY_BYTES: Final = 64 << 10
_SAMPLE_BYTES: Final = 2 << 20
"""Bytes of a field to train a dictionary on. Training takes 0.25 s; more data does not help."""
_MIN_SAMPLES: Final = 16
_SAMPLE_PER_DICTIONARY: Final = 16
"""Minimum bytes of training data per byte of dictionary; a larger one would memorize the data."""


class Codec(IntEnum):
    """Stable codes of codecs, stored in index entries and schemas."""

    RAW = 0
    ZSTD = 1
    ZSTD_DICTIONARY = 2


class _Contexts(threading.local):
    """The zstd contexts of one thread. They cannot be shared, and take 1 ms to create."""

    def __init__(self, content: bytes = b"") -> None:
        known = None
        if content:
            known = zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_FULLDICT)
        self.compressor = zstandard.ZstdCompressor(
            level=ZSTD_LEVEL, write_content_size=True, dict_data=known
        )
        self.decompressor = zstandard.ZstdDecompressor(dict_data=known)


class Dictionary:
    """A zstd dictionary trained on a field's records; safe to use from any thread.

    Frames compressed with the dictionary declare its `id`.

    Raises:
        ShardCorrupt: the content is not a zstd dictionary, or has no id. The error has no place.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        try:
            self.contexts = _Contexts(content)
        except zstandard.ZstdError as error:
            raise ShardCorrupt(f"not a zstd dictionary ({error})", code="dictionary") from error
        self.id = int.from_bytes(content[4:8], "little")
        if not self.id:
            what = "the zstd dictionary has the id 0, which no frame can name"
            raise ShardCorrupt(what, code="dictionary")


Compress = Callable[[memoryview, Dictionary | None], tuple[int, memoryview]]
"""A function that compresses a record; returns the codec for its index entry, and the bytes."""
Decompress = Callable[[memoryview, int, Dictionary | None], bytes]
"""A function that returns the content of a record; raises ShardCorrupt if its size differs."""


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A codec that a field can have.

    Args:
        name: the public name, as in `Array(codec=name)`.
        code: the stable code in schemas, and in the index entries of compressed records.
        compress: the function that compresses a record; None to store records unchanged.
        decompress: the function that decompresses records with this code; None if unchanged.
        max_ratio: the maximum compression ratio.
        others: further codes that records of a field with this codec may have, besides raw.
        has_dictionary: True if each field with this codec has a section with a dictionary.
        required_by_field: the features that a reader needs for a field with this codec.
        required_by_record: the features that a reader needs for a record with this code.
    """

    name: str
    code: int
    compress: Compress | None = None
    decompress: Decompress | None = None
    max_ratio: int = 1
    others: tuple[int, ...] = ()
    has_dictionary: bool = False
    required_by_field: Required = Required(0)
    required_by_record: Required = Required(0)


_plain = _Contexts()

cached_dictionary = functools.lru_cache(maxsize=64)(Dictionary)
"""Return a Dictionary; equal content gives the same object, as contexts take 0.2 ms to create."""


def train_dictionary(records: Sequence[bytes | memoryview]) -> bytes:
    """Return a dictionary for similar records, at most 64 KiB; b"" if there is too little data.

    Deterministic. At most the first 2 MiB of the records are used.
    """
    samples: list[bytes | bytearray | memoryview] = []
    n_bytes = 0
    for record in records:
        if n_bytes + len(record) > _SAMPLE_BYTES:
            break
        samples.append(bytes(record))
        n_bytes += len(record)
    size = min(_DICTIONARY_BYTES, n_bytes // _SAMPLE_PER_DICTIONARY)
    if len(samples) < _MIN_SAMPLES or not size:
        return b""
    try:
        return zstandard.train_dictionary(size, samples, level=ZSTD_LEVEL).as_bytes()
    except zstandard.ZstdError:  # too little data, or records too similar to train on
        return b""


def encode(
    record: memoryview, codec: int, dictionary: Dictionary | None = None
) -> tuple[int, memoryview]:
    """Return the codec for the record's index entry, and the bytes to store."""
    compress = BY_CODE[codec].compress
    if compress is None:
        return Codec.RAW, record
    code, packed = compress(record, dictionary)
    return (code, packed) if packed.nbytes < record.nbytes else (Codec.RAW, record)


def decode(
    stored: memoryview, codec: int, n_bytes: int, dictionary: Dictionary | None = None
) -> bytes | memoryview:
    """Return the content of a record, `n_bytes` long; `stored` itself if the record is raw.

    Raises:
        ShardCorrupt: the content does not have n_bytes. The caller adds the place.
        InsufficientMemory: n_bytes cannot be allocated.
    """
    decompress = BY_CODE[codec].decompress
    return stored if decompress is None else decompress(stored, n_bytes, dictionary)


def check_dictionary(stored: memoryview, dictionary: Dictionary) -> None:
    """Raise ShardCorrupt if a frame declares no dictionary; decompression refuses a wrong one."""
    declared = zstandard.get_frame_parameters(stored).dict_id
    if declared != dictionary.id:
        what = "the zstd frame does not declare its field's dictionary"
        raise ShardCorrupt(what, code="dictionary", expected=dictionary.id, found=declared)


def _compress(record: memoryview, dictionary: Dictionary | None) -> tuple[int, memoryview]:
    """Compress a record, with its field's dictionary if there was enough data to train one."""
    code = Codec.ZSTD if dictionary is None else Codec.ZSTD_DICTIONARY
    contexts = _plain if dictionary is None else dictionary.contexts
    return code, memoryview(contexts.compressor.compress(record))


def _decompress_with_dictionary(
    stored: memoryview, n_bytes: int, dictionary: Dictionary | None
) -> bytes:
    if dictionary is None:
        what = "a record needs a dictionary, and its field has none"
        raise ShardCorrupt(what, code="dictionary")
    return _decompress(stored, n_bytes, dictionary.contexts)


def _decompress(stored: memoryview, n_bytes: int, contexts: _Contexts) -> bytes:
    try:
        declared = zstandard.frame_content_size(stored)
    except zstandard.ZstdError as error:
        what = f"the record is not a zstd frame ({error})"
        raise ShardCorrupt(what, code="zstd_frame") from error
    if declared != n_bytes:
        what = "the zstd frame and the index disagree about the record's size"
        raise ShardCorrupt(what, code="zstd_size", expected=n_bytes, found=declared)
    try:
        record: bytes = contexts.decompressor.decompress(
            stored, max_output_size=n_bytes, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ShardCorrupt(f"the zstd frame is damaged ({error})", code="zstd_frame") from error
    except MemoryError as error:
        what = f"a record needs {n_bytes} bytes of memory to decompress"
        raise InsufficientMemory(what) from error
    if len(record) != n_bytes:
        what = "the zstd frame decompresses to another size than it declares"
        raise ShardCorrupt(what, code="zstd_size", expected=n_bytes, found=len(record))
    return record


SPECS: Final[dict[str, CodecSpec]] = {}
"""The codecs by name."""
BY_CODE: Final[dict[int, CodecSpec]] = {}
"""The codecs by the code of their records."""

for _spec in (
    CodecSpec("raw", Codec.RAW),
    CodecSpec(
        "zstd",
        Codec.ZSTD,
        lambda record, _: _compress(record, None),
        lambda stored, n_bytes, _: _decompress(stored, n_bytes, _plain),
        max_ratio=ZSTD_MAX_RATIO,
        required_by_record=Required.ZSTD,
    ),
    CodecSpec(
        "zstd_dictionary",
        Codec.ZSTD_DICTIONARY,
        _compress,
        _decompress_with_dictionary,
        max_ratio=ZSTD_MAX_RATIO,
        others=(Codec.ZSTD,),
        has_dictionary=True,
        required_by_field=Required.ZSTD_DICTIONARY,
    ),
):
    SPECS[_spec.name] = BY_CODE[_spec.code] = _spec

RECORD_FEATURES: Final = functools.reduce(or_, (s.required_by_record for s in SPECS.values()))
"""The features that depend on the codecs of the records, not on the schema."""
