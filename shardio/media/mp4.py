"""An MP4 file of stored packets that is computed instead of written.

The tables at the start of the file are made from the packet tables of the streams; the packets
follow in chunks of about a second. The size of the file is therefore known at once, and any range
of its bytes is found by a look-up: nothing is decoded, and only packets in the range are read.
ISO/IEC 14496-12 defines the boxes. The description of the codec (`stsd`) is written by FFmpeg.

Packets keep their bytes, except where players need another form: the start codes of H.264 and HEVC
become lengths, and the ADTS headers of AAC are left out. The number of start codes in a packet is
unknown before the packet is read, so each such packet is filled up to a size that is known.
"""

from __future__ import annotations

import copy
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument, MediaError
from shardio.format.types.streams import EncodedStream, PacketFlag, packet_flags, packet_sizes
from shardio.media.audio_packets import begin_of
from shardio.media.bitstream import has_start_codes
from shardio.media.muxing import FormatRejected, write_file

_Numbers = npt.NDArray[np.int64]

_CODECS: Final = frozenset({"h264", "hevc", "av1", "vp9", "aac", "opus", "flac", "mp3"})
"""The codecs that browsers play in MP4; each browser plays some of them."""
_MAX_U32: Final = (1 << 32) - 1
_MAX_I32: Final = (1 << 31) - 1
_MAX_TIME: Final = 1 << 61
"""The maximum length of a stream in units of its track, with which no sum overflows."""
_MATRIX: Final = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
_TKHD_TAIL: Final = 60
"""The size of the part of a track header that FFmpeg's is used for: volume, matrix and size."""


def can_be_mp4(stream: EncodedStream) -> bool:
    """Return True if browsers may play a stream in an MP4 file."""
    return stream.parameters.get("codec") in _CODECS and len(stream.packets) > 0


class Mp4File:
    """The bytes of an MP4 file with a video, a sound, or both.

    Time 0 of the file is the first shown frame of the video; without a video, the first audible
    sample. The streams are borrowed: their data must stay readable.

    Raises:
        MediaError: browsers do not play the codec, or MP4 cannot store the times of a stream.
    """

    def __init__(
        self, video: EncodedStream | None = None, sound: EncodedStream | None = None
    ) -> None:
        streams = [each for each in (video, sound) if each is not None]
        if not streams:
            raise InvalidArgument("an MP4 file needs a video or a sound")
        try:
            zero = _begin(streams[0])
            self._tracks = [_Track(each, zero) for each in streams]
            self._chunks = _interleave(self._tracks)
            self._head = self._make_head()
        except (struct.error, OverflowError) as error:
            raise MediaError(f"MP4 cannot store its times: {error}") from error
        self._starts = self._chunks.offsets + len(self._head)
        self.size: int = len(self._head) + self._chunks.n_bytes
        """The size of the file in bytes."""

    @property
    def media_type(self) -> str:
        """The media type of the file, with its codecs as RFC 6381 names them."""
        kind = "video" if self._tracks[0].is_video else "audio"
        return f'{kind}/mp4; codecs="{", ".join(each.codec for each in self._tracks)}"'

    @property
    def n_tracks(self) -> int:
        """The number of streams in the file."""
        return len(self._tracks)

    @property
    def n_table_bytes(self) -> int:
        """The size in bytes of the tables that the object keeps in memory."""
        tracks = sum(each.n_table_bytes for each in self._tracks)
        return len(self._head) + tracks + 6 * self._starts.nbytes  # and five arrays of the chunks

    def with_streams(
        self, video: EncodedStream | None = None, sound: EncodedStream | None = None
    ) -> Mp4File:
        """Return the same file, whose packets are read from equal streams of another reader.

        With no streams, the result has only the tables, and keeps no reader's memory alive.
        """
        streams = [each for each in (video, sound) if each is not None]
        if len(streams) not in (0, len(self._tracks)):
            raise InvalidArgument("the streams are not those of the file")
        found = copy.copy(self)
        found._tracks = [copy.copy(each) for each in self._tracks]
        for track, stream in itertools.zip_longest(found._tracks, streams):
            if stream is not None and len(stream.packets) != len(track.sizes):
                raise InvalidArgument("the streams are not those of the file")
            track.stream = stream
        return found

    def _make_head(self) -> bytes:
        n_bytes = self._chunks.n_bytes
        mdat = struct.pack(">I4s", n_bytes + 8, b"mdat") if n_bytes + 8 <= _MAX_U32 else b""
        mdat = mdat or struct.pack(">I4sQ", 1, b"mdat", n_bytes + 16)
        ftyp = _box(b"ftyp", b"isom\0\0\2\0isomiso2mp41")
        first = len(ftyp) + len(self._movie(0)) + len(mdat)
        return ftyp + self._movie(first) + mdat

    def _movie(self, first: int) -> bytes:
        """Return the box of all tables; `first` is the offset of the first packet in the file."""
        table, scale = self._chunks, math.lcm(*(each.timescale for each in self._tracks))
        scale = scale if scale <= _MAX_I32 else self._tracks[0].timescale
        boxes, length = [], 0
        for number, track in enumerate(self._tracks):
            mine = table.tracks == number
            chunks = _chunk_boxes(table.offsets[mine] + first, table.counts[mine])
            boxes.append(track.box(number + 1, scale, chunks))
            length = max(length, track.end(scale))
        head = struct.pack(">IQQIQ", 1 << 24, 0, 0, scale, length)
        head += struct.pack(">IH10x", 1 << 16, 1 << 8) + _MATRIX + bytes(24)
        return _box(b"moov", _box(b"mvhd", head, _u32(len(boxes) + 1)), *boxes)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of the file.

        Raises:
            InvalidArgument: the range is not within the file.
            ShardCorrupt, MediaError: a packet in the range is damaged.
        """
        if not 0 <= start <= stop <= self.size:
            raise InvalidArgument(
                f"expected a range within the file's {self.size} bytes; found {start} to {stop}"
            )
        found, chunks = [self._head[start:stop]], self._chunks
        at = max(start, len(self._head))
        chunk = int(np.searchsorted(self._starts, at, "right")) - 1
        while at < stop:
            begin, n_bytes = int(self._starts[chunk]), int(chunks.sizes[chunk])
            track, source = self._tracks[int(chunks.tracks[chunk])], int(chunks.sources[chunk])
            found.append(track.read(source + at - begin, source + min(stop - begin, n_bytes)))
            at, chunk = begin + n_bytes, chunk + 1
        return b"".join(found)


def _begin(stream: EncodedStream) -> Fraction:
    """Return the time of the first shown frame or of the first audible sample, in seconds."""
    if "rate" in stream.parameters:
        return begin_of(stream)
    is_shown = packet_flags(stream.packets) & PacketFlag.HIDDEN == 0
    if not is_shown.any():
        raise MediaError("a video without a frame")
    return int(stream.packets["pts"][is_shown].min()) * stream.time_base


@dataclass(frozen=True)
class _Chunks:
    """The packets of all tracks, in chunks of about a second, in the order of the file.

    For each chunk: its track, its offset from the first chunk, its number of packets, its size, and
    its offset from the first packet of its track.
    """

    tracks: _Numbers
    offsets: _Numbers
    counts: _Numbers
    sizes: _Numbers
    sources: _Numbers
    n_bytes: int


def _interleave(tracks: Sequence[_Track]) -> _Chunks:
    parts = []
    for number, track in enumerate(tracks):
        seconds, firsts = np.unique(track.seconds, return_index=True)
        counts = np.diff(firsts, append=len(track.sizes))
        sources = track.starts[firsts]
        sizes = np.diff(sources, append=track.n_bytes)
        parts.append(np.stack([seconds, np.full(len(firsts), number), counts, sizes, sources]))
    table = np.concatenate(parts, axis=1)
    _, owners, counts, sizes, sources = table[:, np.lexsort((table[1], table[0]))]
    ends = np.cumsum(sizes)
    return _Chunks(owners, ends - sizes, counts, sizes, sources, int(ends[-1]))


class _Track:
    """The tables of one stream, and its packets in the form that MP4 needs.

    Times of the file are in units of 1 / `timescale` second, and count from the decoding time of
    the first packet.
    """

    def __init__(self, stream: EncodedStream, zero: Fraction) -> None:
        codec = stream.parameters.get("codec")
        if codec not in _CODECS:
            raise MediaError(f"browsers play no {codec} in MP4")
        if not can_be_mp4(stream):
            raise MediaError("a stream without packets")
        self.stream: EncodedStream | None = stream
        self.timescale = stream.time_base.denominator
        self.is_video = "rate" not in stream.parameters
        unit = stream.time_base.numerator
        pts = stream.packets["pts"].astype(np.int64)
        last = int(stream.packets["duration"][-1])
        if (int(pts.max()) - int(pts.min()) + last) * unit > _MAX_TIME:
            raise MediaError(f"MP4 cannot store its times, in ticks of {stream.time_base} s")
        decoded = np.sort(pts)
        decoded -= max(0, int((decoded - pts).max()))
        self._origin, self._unit = int(decoded[0]), unit
        self._decoded: _Numbers = (decoded - self._origin) * unit
        self._offsets: _Numbers = (pts - decoded) * unit
        end = self._decoded[-1] + last * unit
        self._durations: _Numbers = np.diff(self._decoded, append=end)
        largest = max(int(self._durations.max()), int(self._offsets.max()), self.timescale)
        if largest > _MAX_I32 or int(self._durations.min()) < 0:
            raise MediaError(f"MP4 cannot store its times, in ticks of {stream.time_base} s")
        self._keys = np.flatnonzero(packet_flags(stream.packets) & PacketFlag.KEY)
        self._set_edit(stream, pts, zero)
        self._form = _form_of(stream)
        self.sizes: _Numbers = packet_sizes(stream.packets) + self._form.n_added
        if int(self.sizes.max()) > _MAX_U32 or int(self.sizes.min()) < 0:
            raise MediaError("a packet has a size that MP4 cannot store")
        ends = np.cumsum(self.sizes)
        self.starts: _Numbers = ends - self.sizes
        self.n_bytes = int(ends[-1])
        self._sample_entry, self._tail, self._headers = _sample_entry(stream, self._form)
        self.codec = _codec_name(self._sample_entry)

    @property
    def n_table_bytes(self) -> int:
        """The size of the arrays in bytes."""
        arrays = (self._decoded, self._offsets, self._durations, self._keys, self.sizes)
        return sum(each.nbytes for each in (*arrays, self.starts, self.seconds))

    def _set_edit(self, stream: EncodedStream, pts: _Numbers, zero: Fraction) -> None:
        """Set the part of the track that is played, and the time before it begins."""
        is_shown = packet_flags(stream.packets) & PacketFlag.HIDDEN == 0
        begin = _begin(stream)
        if self.is_video:
            ends = pts + stream.packets["duration"].astype(np.int64)
            first, last = int(pts[is_shown].min()), int(ends[is_shown].max())
            length = stream.duration or (last - first) or 1  # one frame without a duration
        else:
            first, length = round(begin / stream.time_base), stream.n_frames
            early = max(0, math.ceil((zero - begin) / stream.time_base))
            first, length = first + early, length - early
        self._delay = max(Fraction(0), begin - zero)
        self._media_time = (first - self._origin) * self._unit
        self._length = length * self._unit
        if self._length <= 0 or self._media_time < 0:
            raise MediaError("the stream ends before the video begins, or its times are invalid")
        since = float(self._delay) + (self._decoded - self._media_time) / self.timescale
        self.seconds: _Numbers = np.floor(since).astype(np.int64)

    def end(self, scale: int) -> int:
        """Return the time at which the track ends, in units of 1 / `scale` second."""
        return math.ceil((self._delay + Fraction(self._length, self.timescale)) * scale)

    def read(self, start: int, stop: int) -> bytes:
        """Return some bytes of the packets in the form of the file."""
        if self.stream is None:
            raise InvalidArgument("the file has no streams")
        data, convert = self.stream.data, self._form.convert
        if convert is None:
            return bytes(data[start:stop])
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        last = int(np.searchsorted(self.starts, stop, "left"))
        table = self.stream.packets[first:last]
        begins, sizes = table["offset"].tolist(), packet_sizes(table).tolist()
        base = begins[0]
        part = memoryview(data[base : begins[-1] + sizes[-1]])
        made = [
            convert(bytes(part[at - base : at - base + size]), size + self._form.n_added)
            for at, size in zip(begins, sizes, strict=True)
        ]
        begin = int(self.starts[first])
        return b"".join(made)[start - begin : stop - begin]

    def box(self, number: int, scale: int, chunks: bytes) -> bytes:
        """Return the `trak` box; `scale` is the timescale of the movie."""
        head = struct.pack(">IQQIIQ", 1 << 24 | 3, 0, 0, number, 0, self.end(scale))
        n_units = int(self._decoded[-1] + self._durations[-1])
        media = struct.pack(">IQQIQI", 1 << 24, 0, 0, self.timescale, n_units, 0x55C40000)
        samples = _box(b"stbl", self._sample_entry, self._time_boxes(), self._size_box(), chunks)
        kind, *information = self._headers
        return _box(
            b"trak",
            _box(b"tkhd", head, self._tail),
            _box(b"edts", self._edit_box(scale)),
            _box(b"mdia", _box(b"mdhd", media), kind, _box(b"minf", *information, samples)),
        )

    def _edit_box(self, scale: int) -> bytes:
        length = math.ceil(Fraction(self._length * scale, self.timescale))
        edits = [struct.pack(">QqI", length, self._media_time, 1 << 16)]
        if delay := round(self._delay * scale):
            edits.insert(0, struct.pack(">QqI", delay, -1, 1 << 16))
        return _box(b"elst", _u32(1 << 24, len(edits)), *edits)

    def _time_boxes(self) -> bytes:
        boxes = _box(b"stts", _u32(0), _run_table(self._durations))
        if self._offsets.any():
            boxes += _box(b"ctts", _u32(0), _run_table(self._offsets))
        if len(self._keys) < len(self.sizes):
            keys = (self._keys + 1).astype(">u4").tobytes()
            boxes += _box(b"stss", _u32(0, len(self._keys)), keys)
        return boxes

    def _size_box(self) -> bytes:
        return _box(b"stsz", _u32(0, 0, len(self.sizes)), self.sizes.astype(">u4").tobytes())


def _box(kind: bytes, *parts: bytes) -> bytes:
    return struct.pack(">I4s", 8 + sum(map(len, parts)), kind) + b"".join(parts)


def _u32(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)


def _run_table(values: _Numbers) -> bytes:
    """Return the number of runs of equal values, then the length and the value of each run."""
    firsts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    runs = np.stack([np.diff(firsts, append=len(values)), values[firsts]], axis=1)
    return _u32(len(runs)) + runs.astype(">u4").tobytes()


def _chunk_boxes(offsets: _Numbers, counts: _Numbers) -> bytes:
    """Return the tables of chunks: the number of packets in each, and the offset of each."""
    firsts = np.flatnonzero(np.diff(counts, prepend=-1))
    runs = np.stack([firsts + 1, counts[firsts], np.ones_like(firsts)], axis=1)
    first_packets = _box(b"stsc", _u32(0, len(runs)), runs.astype(">u4").tobytes())
    return first_packets + _box(b"co64", _u32(0, len(offsets)), offsets.astype(">u8").tobytes())


def _children(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the bytes of each box in `data`, headers included."""
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if size < 8:
            return
        yield kind, data[at : at + size]
        at += size


def _find(data: bytes, *path: bytes) -> bytes:
    """Return the box at a path of nested boxes, with its header."""
    found = bytes(8) + data
    for kind in path:
        inside = (box for each, box in _children(found[8:]) if each == kind)
        found = next(inside, b"")
        if not found:
            raise MediaError(f"FFmpeg wrote an MP4 file without {b'/'.join(path).decode()}")
    return found


def _sample_entry(stream: EncodedStream, form: _Form) -> tuple[bytes, bytes, list[bytes]]:
    """Return boxes of a file with the first packet that FFmpeg writes.

    The boxes are `stsd`, the end of `tkhd`, and a list of `hdlr`, the media header and `dinf`.
    """
    size = int(packet_sizes(stream.packets[:1])[0])
    packets = stream.packets[:1].copy()
    first = replace(stream, packets=packets, data=bytes(stream.data[:size]), n_frames=1)
    try:
        file = write_file(first, "mp4")
    except FormatRejected as error:
        raise MediaError(f"MP4 cannot store its packets: {error}") from error
    track = _find(file, b"moov", b"trak")[8:]
    media = b"smhd" if "rate" in stream.parameters else b"vmhd"
    stsd = _find(track, b"mdia", b"minf", b"stbl", b"stsd")
    ((kind, entry),) = _children(stsd[16:])
    entry = entry[8:]
    if entry[-16:-12] == b"btrt":  # the bit rate, of one packet only
        entry = entry[:-20]
    headers = [_find(track, b"mdia", b"hdlr"), _find(track, b"mdia", b"minf", media)]
    headers.append(_find(track, b"mdia", b"minf", b"dinf"))
    made = _box(b"stsd", stsd[8:16], _box(b"hvc1" if kind == b"hev1" else kind, entry))
    return made, _find(track, b"tkhd")[-_TKHD_TAIL:], headers


def _codec_name(description: bytes) -> str:
    """Return the name of a codec by RFC 6381, from its description."""
    kind = description[20:24].decode()
    known: dict[str, tuple[bytes, int, Callable[[bytes], str]]] = {
        "avc1": (b"avcC", 4, lambda record: record[1:4].hex()),
        "hvc1": (b"hvcC", 13, _hevc_name),
        "av01": (b"av1C", 3, _av1_name),
        "vp09": (b"vpcC", 7, lambda r: f"{r[4]:02d}.{r[5]:02d}.{r[6] >> 4:02d}"),
        "mp4a": (b"esds", 8, _mpeg4_audio_name),
    }
    if kind not in known:
        return kind.lower()
    box, n_bytes, name = known[kind]
    at = description.find(box) + 4
    if at < 4 or len(description) < at + n_bytes:
        raise MediaError(f"FFmpeg describes a stream of {kind} without a whole {box.decode()}")
    return f"{kind}.{name(description[at:])}"


def _hevc_name(record: bytes) -> str:
    space = ("", "A", "B", "C")[record[1] >> 6]
    flags = int(f"{int.from_bytes(record[2:6]):032b}"[::-1], 2)
    tier, limits = "LH"[record[1] >> 5 & 1], record[6:12].rstrip(b"\0")
    parts = [f"{space}{record[1] & 31}", f"{flags:x}", f"{tier}{record[12]}"]
    return ".".join([*parts, *(f"{each:x}" for each in limits)])


def _av1_name(record: bytes) -> str:
    depth = (8, 10, 10, 12)[record[2] >> 5 & 3]
    return f"{record[1] >> 5}.{record[1] & 31:02d}{'MH'[record[2] >> 7]}.{depth:02d}"


def _mpeg4_audio_name(record: bytes) -> str:
    """Return the type of object and, for AAC, the type of audio in an `esds` box."""
    kinds: dict[int, int] = {}
    at = 4
    for tag, n_fixed in ((3, 3), (4, 13), (5, 0)):
        if at >= len(record) or record[at] != tag:
            break
        at += 1
        while at < len(record) and record[at] & 128:
            at += 1
        at += 1
        if at >= len(record):
            raise MediaError("FFmpeg describes a stream of mp4a by an esds that is cut off")
        kinds[tag] = record[at]
        at += n_fixed
    kind = kinds.get(4, 0x40)
    return f"{kind:02X}" if kind != 0x40 else f"40.{kinds.get(5, 16) >> 3}"


# --- the form of packets --------------------------------------------------------------------

_N_EXAMINED: Final = 32
"""The number of packets at the start of a stream that set the room for filler."""
_MIN_ROOM: Final = 16
_FILLER: Final = {"h264": b"\x0c", "hevc": b"\x4c\x01"}
"""The header of a unit of filler."""
_ADTS_BYTES: Final = 7


@dataclass(frozen=True)
class _Form:
    """The bytes that each packet gains, and a function of a packet and its new size."""

    n_added: int = 0
    convert: Callable[[bytes, int], bytes] | None = None


def _form_of(stream: EncodedStream) -> _Form:
    codec, table = str(stream.parameters["codec"]), stream.packets[:_N_EXAMINED]
    if codec in _FILLER and has_start_codes(codec, stream.extradata):
        ends = (table["offset"].astype(np.int64) + packet_sizes(table)).tolist()
        data = bytes(stream.data[: ends[-1]])
        most = max(
            data.count(b"\0\0\1", begin, end)
            for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        )
        return _Form(2 * most + _MIN_ROOM, lambda packet, size: _with_lengths(packet, size, codec))
    is_adts = codec == "aac" and not stream.extradata
    if is_adts and bytes(stream.data[:2]) in (b"\xff\xf1", b"\xff\xf9"):
        return _Form(-_ADTS_BYTES, _without_adts)
    return _Form()


def _with_lengths(packet: bytes, size: int, codec: str) -> bytes:
    """Return a packet with a length before each unit instead of a start code, and with filler."""
    units = (unit.rstrip(b"\0") for unit in packet.split(b"\0\0\1")[1:])
    made = b"".join(len(unit).to_bytes(4) + unit for unit in units if unit)
    header = _FILLER[codec]
    n_left = size - len(made) - 4 - len(header) - 1
    if n_left < 0:
        raise MediaError(
            f"a packet has more NAL units than the first {_N_EXAMINED}: cannot convert it to MP4"
        )
    n_unit = len(header) + n_left + 1
    return b"".join((made, n_unit.to_bytes(4), header, b"\xff" * n_left, b"\x80"))


def _without_adts(packet: bytes, size: int) -> bytes:
    if packet[:2] not in (b"\xff\xf1", b"\xff\xf9"):
        raise MediaError("a packet of AAC has no header like that of the first packet")
    return packet[_ADTS_BYTES:]
