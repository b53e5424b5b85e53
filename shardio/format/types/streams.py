"""The field types of videos and audio, and the tables that locate the packets of their streams.

Each value is one stream of unchanged packets; `shardio.media` demuxes and decodes streams. The
record of a stream is

    | parameters: canonical JSON | extradata | packets, back to back |

One table has a row for each stream (`STREAM`), and another one has a row for each packet
(`PACKET`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from fractions import Fraction
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from shardio._base.callers import ANY_OPTION, refuses
from shardio._base.progress import format_sides
from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.checksum import CHUNK_BYTES
from shardio.format.codecs import ZSTD_MAX_RATIO, Codec, decode
from shardio.format.layout import Required
from shardio.format.types.field import MAX_RECORD_BYTES, Content, FieldType, type_mismatch
from shardio.format.types.images import EncodedMedia
from shardio.format.types.text import canonical_json, check_json

PACKET: Final = struct.Struct("<QQqQ")
"""A row of the table of packets: offset from the first packet of the stream; bytes | flags << 48;
presentation time and duration in ticks."""
PACKET_DTYPE: Final = np.dtype(
    [("offset", "<u8"), ("stored", "<u8"), ("pts", "<i8"), ("duration", "<u8")]
)
Packets = npt.NDArray[np.void]

STREAM: Final = struct.Struct("<QQQQIIIIIIQ")
"""A row of the table of streams: first packet, number of packets, first chunk, number of frames,
time base's numerator and denominator, width, height, bytes of parameters, bytes of extradata,
duration. Packets and chunks (see `checksum`) are counted over all streams of the field."""
STREAM_DTYPE: Final = np.dtype(
    [
        ("first_packet", "<u8"),
        ("n_packets", "<u8"),
        ("first_chunk", "<u8"),
        ("n_frames", "<u8"),
        ("numerator", "<u4"),
        ("denominator", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("parameter_bytes", "<u4"),
        ("extradata_bytes", "<u4"),
        ("duration", "<u8"),
    ]
)
Streams = npt.NDArray[np.void]
MAX_PARAMETER_BYTES: Final = 1 << 20

_ZERO_WITHOUT_STREAM: Final = [
    name for name in STREAM_DTYPE.names or () if not name.startswith("first")
]
"""The numbers of a row of the table of streams that must be 0 if the sample has no stream."""
PIECE_BYTES: Final = 16 * CHUNK_BYTES
"""The number of bytes that are hashed and written at a time."""
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_SIZE_BITS: Final = 48
_SIZE_MASK: Final = np.uint64((1 << _SIZE_BITS) - 1)


class PacketFlag(IntFlag):
    """Properties of a packet that are known without decoding."""

    KEY = 1
    """Decoding can begin at this packet."""
    HIDDEN = 2
    """The frame is never shown: an edit list excludes it, or it only serves as a reference."""
    DISPOSABLE = 4
    """No other frame depends on the frame of this packet."""


_FLAGS: Final = int(PacketFlag.KEY | PacketFlag.HIDDEN | PacketFlag.DISPOSABLE)


class PacketData(Protocol):
    """A bytes-like object, or stored data whose slices are verified when they are read."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes | memoryview: ...


@dataclass(frozen=True, slots=True, eq=False)
class EncodedStream:
    """One stream of encoded media. Its packets are in decoding order.

    Args:
        parameters: the decoder's parameters, as JSON values; `codec` is FFmpeg's name of the codec.
        extradata: the codec's configuration (FFmpeg's `extradata`).
        packets: the table of packets, of `PACKET_DTYPE`; offsets count from the start of `data`.
        data: the packets, back to back.
        time_base: the length of a tick in seconds. All times and durations in the table of packets,
            and the duration of the stream, are in ticks.
        n_frames: the number of shown frames; for audio, the number of samples per channel.
        width, height: the size of a video's displayed frames in pixels. For audio, `width` is the
            number of channels and `height` is the sample rate in Hz.
        duration: the time from the start of the first frame to the end of the last frame, in ticks;
            0 if unknown.
    """

    parameters: Mapping[str, Any]
    extradata: bytes = field(repr=False)
    packets: Packets = field(repr=False)
    data: PacketData = field(repr=False)
    time_base: Fraction
    n_frames: int
    width: int
    height: int
    duration: int = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({stream_text(self)})"


def stream_text(stream: EncodedStream) -> str:
    """Return a short text about a stream: its codec, size and length."""
    codec = str(stream.parameters.get("codec"))[:32]
    if "rate" in stream.parameters:
        return f"{codec}, {stream.n_frames:,} samples at {stream.height:,} Hz"
    sides = format_sides(stream.height, stream.width)
    seconds = float(stream.duration * stream.time_base)
    length = f", {seconds:.2f} s" if seconds else ""
    return f"{codec}, {sides}, {stream.n_frames:,} frames{length}"


def packet_sizes(packets: Packets) -> npt.NDArray[np.int64]:
    """Return the size of each packet in bytes."""
    found: npt.NDArray[np.int64] = np.bitwise_and(packets["stored"], _SIZE_MASK).astype(np.int64)
    return found


def packet_flags(packets: Packets) -> npt.NDArray[np.int64]:
    """Return the `PacketFlag`s of each packet."""
    flags = np.right_shift(packets["stored"], np.uint64(_SIZE_BITS))
    found: npt.NDArray[np.int64] = flags.astype(np.int64)
    return found


def pack_packets(
    sizes: npt.ArrayLike, flags: npt.ArrayLike, pts: npt.ArrayLike, durations: npt.ArrayLike
) -> Packets:
    """Return the table of packets stored back to back, in decoding order.

    `sizes` are in bytes, `pts` and `durations` (0 if unknown) in ticks, `flags` are `PacketFlag`s.
    """
    n_bytes = np.asarray(sizes, np.uint64)
    found = np.zeros(len(n_bytes), PACKET_DTYPE)
    found["offset"] = np.cumsum(n_bytes) - n_bytes
    found["stored"] = n_bytes | np.asarray(flags, np.uint64) << np.uint64(_SIZE_BITS)
    found["pts"] = pts
    found["duration"] = durations
    return found


@dataclass(frozen=True, slots=True)
class StreamTables:
    """A stream's packed row, with 0 as its first packet and chunk, and the rows of its packets."""

    row: bytes = bytes(STREAM.size)
    packets: bytes = b""


class StreamRecord:
    """The record of a stream and its tables, to be written to a shard.

    Parameters and extradata (`head`) and packets (`data`) are kept apart: joining them would copy
    gigabytes for hours of video.
    """

    __slots__ = ("_data", "_head", "nbytes", "required", "tables")

    def __init__(
        self,
        head: bytes,
        data: bytes | memoryview,
        tables: StreamTables,
        required: Required = Required(0),  # noqa: B008  # an immutable number
    ) -> None:
        self._head, self._data, self.tables = head, data, tables
        self.nbytes: Final = len(head) + len(data)
        self.required: Final = required
        """The features that a reader needs for the codec of the stream."""

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of the record in pieces of whole chunks; the last may be shorter."""
        data, n_head = memoryview(self._data), len(self._head)
        for at in range(0, self.nbytes, PIECE_BYTES):
            end = at + PIECE_BYTES
            head, part = self._head[at:end], data[max(0, at - n_head) : max(0, end - n_head)]
            yield memoryview(b"".join((head, part))) if head else part

    def owned_copy(self) -> StreamRecord:
        """Return a copy that owns all of its memory."""
        return StreamRecord(self._head, bytes(self._data), self.tables, self.required)

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())


Record = tuple[Content, tuple[int, ...]] | StreamRecord
"""A record to be written: a stream, or bytes and a shape; () except for arrays and images."""


def with_first_indices(row: bytes, first_packet: int, first_chunk: int) -> bytes:
    """Return a copy of a stream's packed row with other numbers of the first packet and chunk."""
    _, n_packets, _, *rest = STREAM.unpack(row)
    return STREAM.pack(first_packet, n_packets, first_chunk, *rest)


@dataclass(frozen=True, slots=True, repr=False)
class _StreamField(EncodedMedia):
    is_streamed: ClassVar[bool] = True

    def record_encoder(self, name: str) -> Callable[[Any], Record]:
        return lambda value: self.encode_stream(name, value)

    def encode_stream(self, name: str, value: object) -> StreamRecord:
        if value is None and self.optional:
            return StreamRecord(b"", b"", StreamTables())
        if not isinstance(value, EncodedStream):
            raise type_mismatch(name, "an EncodedStream", value)
        try:
            parameters = dict(value.parameters)
            check_parameters(parameters)
            head = canonical_json(parameters)
            check_json(parameters)
        except (ShardCorrupt, SchemaError, TypeError, ValueError) as error:
            raise SchemaError(f"field {name!r}: {error}") from error
        tables = stream_tables(name, value, len(head), has_frames=self.has_frames)
        data, required = value.data[:], required_by_codec(parameters)
        if required & Required.PLANES and self.has_frames:
            _check_planes(name, value, data)
        return StreamRecord(b"".join((head, value.extradata)), data, tables, required)

    def _encode(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        return memoryview(bytes(self.encode_stream(name, value))), ()

    def value_bytes(self, value: Any) -> bytes:
        record = self.encode_stream("", value)
        return record.tables.row + record.tables.packets + bytes(record)


@refuses({ANY_OPTION: "a video is stored as it is; write dataset.clips(frames) for its clips"})
@dataclass(frozen=True, slots=True, repr=False)
class Video(_StreamField):
    """A field of videos. Each value is the packets of one video stream.

    Any span of packets can be read and verified without other packets. See `Array` for `optional`.
    """

    code: ClassVar[int] = FieldType.VIDEO
    required: ClassVar[Required] = Required.VIDEOS
    medium: ClassVar[str | None] = "video"
    things: ClassVar[str] = "encoded videos"
    has_frames: ClassVar[bool] = True


@refuses(
    {
        ANY_OPTION: "audio is stored as it is; to resample it, pass "
        "decode={name: shardio.Sound(rate=…)} to the loader"
    }
)
@dataclass(frozen=True, slots=True, repr=False)
class Audio(_StreamField):
    """A field of audio. A value is the packets of one audio stream. See `Array` for `optional`."""

    code: ClassVar[int] = FieldType.AUDIO
    required: ClassVar[Required] = Required.AUDIO
    medium: ClassVar[str | None] = "audio"
    things: ClassVar[str] = "encoded sounds"


def stream_tables(
    name: str, stream: EncodedStream, n_parameters: int, *, has_frames: bool
) -> StreamTables:
    """Return the tables of a user's stream; raise SchemaError if the stream is invalid.

    `n_parameters` is the size of the parameters as canonical JSON, in bytes. If `has_frames` is
    True, `n_frames` must be the number of shown packets.
    """
    packets = np.ascontiguousarray(stream.packets)
    if packets.dtype != PACKET_DTYPE or packets.ndim != 1:
        raise SchemaError(
            f"field {name!r}: expected packets of dtype {PACKET_DTYPE}, found {packets.dtype} with "
            f"{packets.ndim} dimensions"
        )
    if (wrong := packets_error(packets, len(stream.data))) is not None:
        raise SchemaError(f"field {name!r}: {wrong}")
    time_base, sizes = Fraction(stream.time_base), (n_parameters, len(stream.extradata))
    numbers = {
        "n_frames": (stream.n_frames, 0, _U64),
        "the time base's numerator": (time_base.numerator, 1, _U32),
        "the time base's denominator": (time_base.denominator, 1, _U32),
        "width": (stream.width, 1, _U32),
        "height": (stream.height, 1, _U32),
        "bytes of parameters": (n_parameters, 1, MAX_PARAMETER_BYTES),
        "bytes of extradata": (len(stream.extradata), 0, _U32),
        "duration": (stream.duration, 0, _U64),
        "bytes of all": (len(stream.data) + sum(sizes), 1, MAX_RECORD_BYTES),
    }
    for what, (number, least, most) in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise SchemaError(f"field {name!r}: {what} must be an integer; found {number!r}")
        if not least <= number <= most:
            raise SchemaError(f"field {name!r}: {what} must be {least} to {most}; found {number}")
    shown = n_shown(packets)
    if has_frames and shown != stream.n_frames:
        raise SchemaError(
            f"field {name!r}: n_frames is {stream.n_frames}, but {shown} packets are shown"
        )
    row = STREAM.pack(
        0,
        len(packets),
        0,
        int(stream.n_frames),
        time_base.numerator,
        time_base.denominator,
        int(stream.width),
        int(stream.height),
        *sizes,
        int(stream.duration),
    )
    return StreamTables(row, packets.tobytes())


def n_shown(packets: Packets) -> int:
    """Return the number of packets of a video whose frames are shown."""
    return int(np.count_nonzero(packet_flags(packets) & PacketFlag.HIDDEN == 0))


def packets_error(packets: Packets, n_bytes: int) -> str | None:
    """Return the reason why a table of packets with `n_bytes` in total is invalid, or None."""
    if not len(packets):
        return None if n_bytes == 0 else f"{n_bytes} bytes of packets, but no packet"
    if (packet_flags(packets) & ~_FLAGS).any():
        return "a packet has a flag that is not known"
    offsets, sizes = packets["offset"], packet_sizes(packets).astype(np.uint64)
    # `offsets + sizes` cannot overflow if both are at most n_bytes, which is below 2^63.
    is_inside = max(int(offsets.max()), int(sizes.max())) <= n_bytes
    ends = offsets + sizes
    tile = is_inside and offsets[0] == 0 and ends[-1] == n_bytes
    if not tile or not np.array_equal(ends[:-1], offsets[1:]):
        return "the packets do not lie back to back, or are not all of the data"
    return None


def invalid_streams(
    streams: Streams, sizes: npt.NDArray[np.uint64], n_packets: int, n_chunks: int
) -> npt.NDArray[np.bool_]:
    """Return a mask of the invalid rows of a table of streams; the checks cannot overflow.

    `sizes` contains the size of each stream's record: a number below 2^48, or 0 for a missing
    stream. `n_packets` and `n_chunks` count the packets and chunks of all streams of the field.
    """
    chunks = (sizes + np.uint64(CHUNK_BYTES - 1)) // np.uint64(CHUNK_BYTES)
    bad = _exceeds(streams["first_packet"], streams["n_packets"], n_packets)
    bad |= _exceeds(streams["first_chunk"], chunks, n_chunks)
    heads = streams["parameter_bytes"].astype(np.uint64) + streams["extradata_bytes"]
    bad |= (heads > sizes) | (streams["parameter_bytes"] > MAX_PARAMETER_BYTES)
    is_there = sizes > 0
    for name in ("numerator", "denominator", "width", "height", "parameter_bytes"):
        bad |= is_there & (streams[name] == 0)
    bad |= is_there & (np.gcd(streams["numerator"], streams["denominator"]) != 1)
    for name in _ZERO_WITHOUT_STREAM:
        bad |= ~is_there & (streams[name] != 0)
    found: npt.NDArray[np.bool_] = bad
    return found


def _exceeds(
    first: npt.NDArray[np.uint64], n: npt.NDArray[np.uint64], n_all: int
) -> npt.NDArray[np.bool_]:
    everything = np.uint64(n_all)
    found: npt.NDArray[np.bool_] = first > everything
    found |= n > everything - np.minimum(first, everything)
    return found


def check_parameters(parameters: object) -> Mapping[str, Any]:
    """Return the parameters of a stream; raise ShardCorrupt unless they are a dict with a codec."""
    codec = parameters.get("codec") if isinstance(parameters, dict) else None
    if not isinstance(parameters, dict) or not isinstance(codec, str) or not codec:
        raise ShardCorrupt(
            "the parameters of a stream are not an object that names a codec",
            code="parameters",
            found=str(parameters)[:60],
        )
    return parameters


PLANES: Final = "planes"
"""The codec of videos whose pictures are stored as their 4:2:0 planes, with or without zstd."""


def required_by_codec(parameters: Mapping[str, Any]) -> Required:
    """Return the features that a reader needs for a stream with these parameters."""
    return Required.PLANES if parameters["codec"] == PLANES else Required(0)


def planes_bytes(width: int, height: int) -> int:
    """Return the number of bytes of a picture as 4:2:0 planes."""
    return width * height * 3 // 2


def _check_planes(name: str, stream: EncodedStream, data: bytes | memoryview) -> None:
    """Raise SchemaError if a user's stream of planes is invalid."""
    if wrong := planes_error(stream.packets, stream.width, stream.height, data):
        raise SchemaError(f"field {name!r}: {broken_rule(*wrong)}")


def broken_rule(what: str, expected: Any, found: Any) -> str:
    """Return the text of an error about planes; `expected` is None where there is no number."""
    return what if expected is None else f"{what}: expected {expected}, found {found}"


def planes_error(
    packets: Packets, width: int, height: int, data: bytes | memoryview | None = None
) -> tuple[str, Any, Any] | None:
    """Return why a stream of planes is invalid, the expected and the found value; None if valid.

    `data` is the bytes of all packets; if it is None, only the table of packets is checked.
    """
    if (width | height) & 1:
        odd = width if width & 1 else height
        return "the height or width of planes is odd", odd + 1, odd
    flags, sizes = packet_flags(packets), packet_sizes(packets)
    optional = np.full(len(packets), PacketFlag.KEY)
    optional[:1] = 0  # the first packet must be a keyframe
    wrong = np.flatnonzero((flags | optional) != PacketFlag.KEY)
    for number in wrong[:1].tolist():
        what = f"packet {number} of planes is hidden or disposable, or is the first and no keyframe"
        return what, int(PacketFlag.KEY), int(flags[number])
    for number in np.flatnonzero(packets["pts"][1:] <= packets["pts"][:-1])[:1].tolist():
        before, found = packets["pts"][number : number + 2].tolist()
        return f"packet {number + 1} of planes is not shown after the one before", before + 1, found
    n_bytes = planes_bytes(width, height)
    wrong = np.flatnonzero((sizes > n_bytes) | (sizes < n_bytes / ZSTD_MAX_RATIO))
    for number in wrong[:1].tolist():
        what = f"packet {number} of planes cannot hold a picture of {n_bytes} bytes"
        return what, n_bytes, int(sizes[number])
    return None if data is None else _unpacking_error(packets, n_bytes, memoryview(data))


def _unpacking_error(
    packets: Packets, n_bytes: int, data: memoryview
) -> tuple[str, Any, Any] | None:
    starts, sizes = packets["offset"].tolist(), packet_sizes(packets).tolist()
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        try:
            unpack_planes(data[start : start + size], n_bytes)
        except ShardCorrupt as error:
            return f"packet {number} of planes: {error.what}", error.expected, error.found
    return None


def unpack_planes(packet: memoryview, n_bytes: int) -> bytes | memoryview:
    """Return the `n_bytes` of planes in a packet: as it is, or decompressed if it is shorter.

    Raises ShardCorrupt, without a path, if the packet cannot be decompressed to `n_bytes`.
    """
    return packet if len(packet) == n_bytes else decode(packet, Codec.ZSTD, n_bytes)
