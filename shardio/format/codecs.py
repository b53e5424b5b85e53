"""The codecs of records: raw (not compressed), and zstd with or without a dictionary.

A compressed record is one zstd frame. A record that compression does not make smaller is stored
raw. The index entry of each record therefore contains the codec of the record.

Before memory is allocated, the size that a frame declares is compared with the index entry, because
python-zstandard ignores `max_output_size` if a frame declares its size.
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
"""The level of zstd. Compressed bytes also depend on the version of zstd."""

PLANES_LEVEL: Final = -1
"""The level of zstd for planes of videos. Frames of 112 x 112 take 15 us to decompress and 8.5 KB;
at level 3 they take 20 us and 7.1 KB."""

ZSTD_MAX_RATIO: Final = 1 << 15
"""The maximum compression ratio of zstd: 4 bytes of a frame yield at most 128 KiB. An index entry
with a larger ratio is refused, so a damaged entry cannot cause a larger allocation."""

MAX_DICTIONARY_BYTES: Final = 1 << 20
"""The maximum size of a dictionary that a reader accepts."""
_DICTIONARY_BYTES: Final = 64 << 10
"""The maximum size of a new dictionary."""
_SAMPLE_BYTES: Final = 2 << 20
"""The maximum size of the training data. Training on 2 MiB takes 0.25 s; more data makes the
dictionary no better."""
_MIN_SAMPLES: Final = 16
_SAMPLE_PER_DICTIONARY: Final = 16
"""The minimum number of bytes of training data per byte of the dictionary. A larger dictionary
would be a copy of the data."""


class Codec(IntEnum):
    """The codes of codecs in index entries and schemas. A code never changes its meaning."""

    RAW = 0
    ZSTD = 1
    ZSTD_DICTIONARY = 2


class _Contexts(threading.local):
    """A compressor and a decompressor for each thread, because threads cannot share them.

    Creating and first using them takes up to 0.3 ms.
    """

    def __init__(self, content: bytes = b"", level: int = ZSTD_LEVEL) -> None:
        known = None
        if content:
            known = zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_FULLDICT)
        self.compressor = zstandard.ZstdCompressor(
            level=level, write_content_size=True, dict_data=known
        )
        self.decompressor = zstandard.ZstdDecompressor(dict_data=known)


class Dictionary:
    """A zstd dictionary, trained on the records of a field; frames name its `id`. Thread-safe.

    Raises ShardCorrupt, without a path, if the content is not a zstd dictionary or has the id 0.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        try:
            self.contexts = _Contexts(content)
        except zstandard.ZstdError as error:
            raise ShardCorrupt(f"not a zstd dictionary ({error})", code="dictionary") from error
        self.id = int.from_bytes(content[4:8], "little")
        if not self.id:
            what = "the zstd dictionary has the id 0, which means no dictionary"
            raise ShardCorrupt(what, code="dictionary")


Compress = Callable[[memoryview, Dictionary | None], tuple[int, memoryview]]
"""A function that compresses a record, with a dictionary or None; it returns the codec for the
record's index entry, and the compressed bytes."""
Decompress = Callable[[memoryview, int, Dictionary | None], bytes]
"""A function of the stored bytes, the size of the content, and the dictionary or None; it returns
the content, or raises ShardCorrupt."""


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A codec that a field can have.

    Args:
        name: the public name, as in `Array(codec=name)`.
        code: the stable code in schemas, and in the index entries of compressed records.
        compress, decompress: None if records are stored unchanged.
        max_ratio: the maximum compression ratio.
        other_codes: the codes that records of a field may have, besides `code` and raw.
        has_dictionary: True if each field with this codec has a section with a dictionary.
        required_by_field, required_by_record: the features that a reader needs for a field with
            this codec, and for a record with this code.
    """

    name: str
    code: int
    compress: Compress | None = None
    decompress: Decompress | None = None
    max_ratio: int = 1
    other_codes: tuple[int, ...] = ()
    has_dictionary: bool = False
    required_by_field: Required = Required(0)
    required_by_record: Required = Required(0)


_PLAIN_CONTEXTS = _Contexts()
_PLANES_CONTEXTS = _Contexts(level=PLANES_LEVEL)

cached_dictionary = functools.lru_cache(maxsize=64)(Dictionary)
"""Return the Dictionary with the given content; creating one takes 0.2 ms."""


def train_dictionary(records: Sequence[bytes | memoryview]) -> bytes:
    """Return the content of a dictionary trained on `records`; b"" if there is too little data."""
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
    """Compress a record if this makes it smaller; return the codec and the bytes to store."""
    compress = BY_CODE[codec].compress
    if compress is None:
        return Codec.RAW, record
    code, packed = compress(record, dictionary)
    return (code, packed) if packed.nbytes < record.nbytes else (Codec.RAW, record)


def compress_planes(planes: bytes) -> bytes:
    """Return the planes of a picture as a zstd frame; unchanged if that is not smaller."""
    packed: bytes = _PLANES_CONTEXTS.compressor.compress(planes)
    return min(planes, packed, key=len)  # the length tells both apart: of equals, take the planes


def decode(
    stored: memoryview, codec: int, n_bytes: int, dictionary: Dictionary | None = None
) -> bytes | memoryview:
    """Return the content of a record, which has n_bytes according to the index.

    Raises ShardCorrupt, without a path, if the record cannot be decompressed or has another size,
    and InsufficientMemory if n_bytes cannot be allocated.
    """
    decompress = BY_CODE[codec].decompress
    return stored if decompress is None else decompress(stored, n_bytes, dictionary)


def check_dictionary(stored: memoryview, dictionary: Dictionary) -> None:
    """Raise ShardCorrupt unless a zstd frame declares that it was compressed with `dictionary`.

    Decompression accepts a frame that declares no dictionary.
    """
    declared = zstandard.get_frame_parameters(stored).dict_id
    if declared != dictionary.id:
        what = "the zstd frame does not declare its field's dictionary"
        raise ShardCorrupt(what, code="dictionary", expected=dictionary.id, found=declared)


def _compress(record: memoryview, dictionary: Dictionary | None) -> tuple[int, memoryview]:
    code = Codec.ZSTD if dictionary is None else Codec.ZSTD_DICTIONARY
    contexts = _PLAIN_CONTEXTS if dictionary is None else dictionary.contexts
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
"""The codecs by name; `BY_CODE` contains the same codecs by code."""
BY_CODE: Final[dict[int, CodecSpec]] = {}

for _spec in (
    CodecSpec("raw", Codec.RAW),
    CodecSpec(
        "zstd",
        Codec.ZSTD,
        lambda record, _: _compress(record, None),
        lambda stored, n_bytes, _: _decompress(stored, n_bytes, _PLAIN_CONTEXTS),
        max_ratio=ZSTD_MAX_RATIO,
        required_by_record=Required.ZSTD,
    ),
    CodecSpec(
        "zstd_dictionary",
        Codec.ZSTD_DICTIONARY,
        _compress,
        _decompress_with_dictionary,
        max_ratio=ZSTD_MAX_RATIO,
        other_codes=(Codec.ZSTD,),
        has_dictionary=True,
        required_by_field=Required.ZSTD_DICTIONARY,
    ),
):
    SPECS[_spec.name] = BY_CODE[_spec.code] = _spec

RECORD_FEATURES: Final = functools.reduce(
    or_, (s.required_by_record for s in SPECS.values()), Required.PLANES
)
"""The features that depend on a shard's records, and not on its schema."""
