"""Recognise media files by name and first bytes, detect truncation, and open containers.

A file that is shorter than its container declares is an error. FFmpeg may try only a fixed list of
demuxers; otherwise it could read a text file as media, or open the addresses in a playlist.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, BinaryIO, Final

from shardio.errors import MediaError

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.codec.context import CodecContext
    from av.container import InputContainer
    from av.video.stream import VideoStream

HEAD_BYTES = 1024  # a transport stream is recognised by the sync bytes of its first five packets

_SUFFIXES = frozenset(
    # `.ts` is left out, because a file with this suffix is usually TypeScript. Transport streams
    # are recognised by their first bytes instead. `.gif` is included, because a GIF is read as a
    # video.
    ".3g2 .3gp .asf .avi .dv .f4v .flv .gif .ivf .m2ts .m2v .m4v .mkv .mov .mp4 .mpe .mpeg .mpg"
    " .mts .mxf .nut .ogm .ogv .qt .rm .rmvb .vob .webm .wmv .wtv .y4m".split()
)
_SOUND_SUFFIXES = frozenset(
    ".aac .ac3 .aif .aifc .aiff .amr .ape .au .caf .flac .m4a .m4b .mka .mp2 .mp3 .oga .ogg .opus"
    " .ra .wav .wma .wv".split()
)
_STILL_BRANDS = frozenset((b"avif", b"heic", b"heix", b"heim", b"heis", b"mif1"))
_ISO_BOXES = frozenset((b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot", b"styp"))
_EBML = bytes.fromhex("1a45dfa3")
_SEGMENT = bytes.fromhex("18538067")
_FLV = b"FLV\x01"
_FLV_HEAD_BYTES = 1 << 16  # the metadata at the start may list the times of all keyframes
_SIGNATURES = (
    b"GIF87a",
    b"GIF89a",
    _EBML,
    _FLV,
    b"DKIF",
    b"YUV4MPEG2",
    b".RMF",
    b"nut/multimedia container\0",
    bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"),  # ASF: WMV, WMA
    bytes.fromhex("060e2b3402050101"),  # MXF
    bytes.fromhex("000001ba"),  # MPEG program stream
    bytes.fromhex("000001b3"),  # MPEG-1 and -2 video
    bytes.fromhex("0000000167"),  # H.264: a sequence parameter set
    bytes.fromhex("0000000140"),  # HEVC: a video parameter set
    b"OggS",
    b"fLaC",
    b"ID3",
    b"#!AMR",
    b"caff",
    b"wvpk",
    b".snd",
)


def has_media_suffix(name: str) -> bool:
    """Return True if `name` has a suffix of video or audio files."""
    return PurePath(name).suffix.lower() in _SUFFIXES or has_sound_suffix(name)


def has_sound_suffix(name: str) -> bool:
    """Return True if `name` has a suffix of audio files."""
    return PurePath(name).suffix.lower() in _SOUND_SUFFIXES


def has_media_signature(head: bytes) -> bool:
    """Return True if a file that begins with `head` is a video or audio file, or a GIF.

    `head` is the first `HEAD_BYTES` bytes of the file, or all if there are fewer. Still pictures
    in video containers (AVIF, HEIC) do not count.
    """
    if head.startswith(_SIGNATURES):
        return True
    if head[4:8] in _ISO_BOXES:
        # If the size of the box is less than the size of a box header, this is not a box: the four
        # letters are there by chance.
        still = head[4:8] == b"ftyp" and head[8:12] in _STILL_BRANDS
        return not still and int.from_bytes(head[:4], "big") not in range(2, 8)
    if head.startswith(b"RIFF"):
        return head[8:12] in (b"AVI ", b"WAVE")
    if head.startswith(b"FORM"):
        return head[8:12] in (b"AIFF", b"AIFC")
    return _is_transport_stream(head)


def missing_bytes(file: BinaryIO) -> int:
    """Return the number of bytes by which a file is shorter than its container declares.

    Return 1 for a GIF without its last byte; 0 for containers that declare no size.
    """
    n_bytes = file.seek(0, 2)
    file.seek(0)
    head = file.read(12)
    if head[:4] == _EBML:
        return _matroska_missing(file, n_bytes)
    if head[4:8] in _ISO_BOXES:
        return _iso_missing(file, n_bytes)
    if head[:4] == b"RIFF":
        return _riff_missing(file, n_bytes)
    if head[:4] == b"GIF8":
        file.seek(max(0, n_bytes - 16))
        # Zeros after the end are ignored, because some writers add them.
        return 0 if file.read().rstrip(b"\0").endswith(b";") else 1
    if head.startswith(_FLV):
        return _flv_missing(file, n_bytes)
    return 0


def _is_transport_stream(head: bytes) -> bool:
    """Return True if a sync byte comes every 188 bytes, or every 192 from byte 4 on (Blu-ray)."""
    return any(len(syncs) >= 4 and set(syncs) == {0x47} for syncs in (head[::188], head[4::192]))


def _iso_missing(file: BinaryIO, n_bytes: int) -> int:
    offset = 0
    while offset + 8 <= n_bytes:
        file.seek(offset)
        header = file.read(16)
        size = int.from_bytes(header[:4], "big")
        if size == 1:  # a 64-bit size follows the type
            size = int.from_bytes(header[8:16], "big")
        if size < 8 or not header[4:8].isascii():
            # A box of size 0 extends to the end of the file. Bytes that are not a box are ignored,
            # as players do.
            return 0
        offset += size
    return max(0, offset - n_bytes)


def _flv_missing(file: BinaryIO, n_bytes: int) -> int:
    """Return by how many bytes the file is shorter than its `filesize`; 0 for live recordings."""
    file.seek(0)
    _, found, rest = file.read(_FLV_HEAD_BYTES).partition(b"\0\x08filesize\0")
    if not found or len(rest) < 8:
        return 0
    (declared,) = struct.unpack(">d", rest[:8])
    return max(0, int(declared) - n_bytes) if math.isfinite(declared) else 0


def _riff_missing(file: BinaryIO, n_bytes: int) -> int:
    """Return how many bytes are missing. An AVI file above 1 GiB (OpenDML) has several chunks."""
    offset = 0
    while offset + 12 <= n_bytes:
        file.seek(offset)
        header = file.read(8)
        size = int.from_bytes(header[4:], "little")
        if header[:4] != b"RIFF" or size in (0, 0xFFFFFFFF):
            return 0
        offset += 8 + size + size % 2
    # Ignore one missing byte: at the end of a file, the padding byte that follows a chunk of odd
    # size is often left out.
    return offset - n_bytes if offset - n_bytes > 1 else 0


def _matroska_missing(file: BinaryIO, n_bytes: int) -> int:
    file.seek(4)
    header_size = _ebml_size(file)
    if header_size is None:
        return 0
    offset = file.tell() + header_size
    while offset + 4 <= n_bytes:
        file.seek(offset)
        if file.read(4) != _SEGMENT:
            return 0
        size = _ebml_size(file)
        if size is None:  # a live recording, without a declared size
            return 0
        offset = file.tell() + size
    return max(0, offset - n_bytes)


def _ebml_size(file: BinaryIO) -> int | None:
    """Read an EBML size, of 1 to 8 bytes; None if truncated or "unknown" (all bits are 1)."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    n_more = 8 - first[0].bit_length()
    rest = file.read(n_more)
    if len(rest) < n_more:
        return None
    value = int.from_bytes(bytes([first[0] & (0x7F >> n_more)]) + rest, "big")
    return None if value == (1 << 7 * (n_more + 1)) - 1 else value


# The demuxers that FFmpeg may use. Some of the others read any text file as ANSI art, or a JPEG as
# a video of one frame.
_DEMUXERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,mpegvideo,h264,hevc,m4v,obu,ivf"
    ",flv,asf,ogg,nut,mxf,rm,yuv4mpegpipe,dv,wtv"
    ",wav,w64,mp3,aac,ac3,eac3,flac,aiff,caf,amr,ape,au,wv,tta"
)
PARSE_ONLY: Final = {"skip_loop_filter": "all"}
"""Options of a decoder whose pictures are not used, such as the one with which FFmpeg opens a file.
The decoder parses every bit of a frame, and so finds the same damage, but omits the loop filter,
which takes up to 45 % of the time for an H.264 frame."""

# Some muxers write a duration that is too long, but by less than this time in microseconds.
_STALE_TAG_US = 1_000_000


def open_container(
    source: str | bytes, name: str, *, kind: str = "video", fill_in_times: bool = True
) -> InputContainer:
    """Open a path, or the bytes of a file; errors mention `name`, and `kind`, "video" or "audio".

    If `fill_in_times` is True, FFmpeg guesses times and durations that the container lacks.
    """
    import av

    options = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "file", **PARSE_ONLY}
    if not fill_in_times:
        options["fflags"] = "nofillin"
    # Without the prefix `file:`, FFmpeg could read the beginning of a name as a protocol.
    place = f"file:{source}" if isinstance(source, str) else io.BytesIO(source)
    try:
        return av.open(place, "r", options=options, metadata_errors="replace")
    except FileNotFoundError:
        raise
    except av.FFmpegError as error:
        what = "video" if kind == "video" else "sound file"
        raise MediaError(f"{name}: not a readable {what}: {error.strerror}") from error


@contextlib.contextmanager
def prefix_errors(name: str) -> Iterator[None]:
    """Put the name of a file before the message of a MediaError."""
    try:
        yield
    except MediaError as error:
        if str(error).startswith(f"{name}: "):
            raise
        raise MediaError(f"{name}: {error}") from error


@contextlib.contextmanager
def ffmpeg_errors(what: Callable[[], str]) -> Iterator[None]:
    """Raise FFmpeg's errors in the block as MediaError; the message begins with `what()`."""
    import av

    try:
        yield
    except av.FFmpegError as error:
        raise MediaError(f"{what()}: {error.strerror}") from error


def video_streams(container: InputContainer, name: str) -> list[VideoStream]:
    """Return all video streams but cover pictures; raise MediaError if the first has no decoder."""
    from av.stream import Disposition

    streams = [
        stream
        for stream in container.streams.video
        if not stream.disposition & Disposition.attached_pic
    ]
    if not streams:
        raise MediaError(f"{name}: no video stream (streams: {_stream_types(container)})")
    if streams[0].codec_context is None:
        raise MediaError(f"{name}: no decoder for its video stream")
    return streams


def audio_stream(container: InputContainer, name: str) -> AudioStream:
    """Return the first audio stream; raise MediaError if there is none, or no decoder for it."""
    if not container.streams.audio:
        raise MediaError(f"{name}: no audio stream (streams: {_stream_types(container)})")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise MediaError(f"{name}: no decoder for its audio stream")
    return stream


def has_guessed_times(container: InputContainer, stream: VideoStream | AudioStream) -> bool:
    """Return True if FFmpeg may guess the times of the first packets. Call this before reading.

    In Matroska files, FFmpeg drops times below 0. For some codecs, it guesses them: it counts up
    from 0, or back from a known time by durations that are rounded to milliseconds.
    """
    start = stream.start_time
    return "matroska" in container.format.name and (start is None or start < 0)


def make_strict(codec: CodecContext, options: Mapping[str, str] | None = None) -> None:
    """Make a decoder report damage, which FFmpeg conceals by default, and use only one thread."""
    codec.thread_type, codec.thread_count = "NONE", 1
    codec.options = {"err_detect": "crccheck+explode", **(options or {})}


def stored_times(source: str | bytes, name: str, index: int) -> list[int | None]:
    """Return the time that the container stores for each packet; None for packets without time."""
    with open_container(source, name, fill_in_times=False) as container:
        packets = container.demux(container.streams[index])
        return [packet.pts for packet in packets if packet.size]


def _stream_types(container: InputContainer) -> str:
    return ", ".join(stream.type for stream in container.streams) or "none"


def check_complete(
    source: str | bytes, container: InputContainer, stream: VideoStream | AudioStream, end: int
) -> None:
    """Raise MediaError if a file, or `stream`, ends before the end that the file declares.

    `end` is the tick of `stream` at which the last packet ends.
    """
    with open(source, "rb") if isinstance(source, str) else io.BytesIO(source) as file:
        n_missing = missing_bytes(file)
    if n_missing:
        raise MediaError(f"the file ends {n_missing} bytes before its container does")
    # FFmpeg skips the parts of a Matroska file that it cannot parse. Only a comparison with the
    # declared duration reveals that packets are missing.
    if "matroska" not in container.format.name or stream.time_base is None:
        return
    tag = _microseconds(stream.metadata.get("DURATION", ""))
    declared = min(tag, container.duration or 0)
    found = int(end * stream.time_base * 1_000_000)
    if declared - found > _STALE_TAG_US:
        raise MediaError(f"its frames end at {found} us of {declared} us")


def _microseconds(tag: str) -> int:
    """Parse Matroska's `HH:MM:SS.nnnnnnnnn`; return 0 for anything else."""
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d)\.(\d{6})\d*", tag)
    if match is None:
        return 0
    hours, minutes, seconds, micros = map(int, match.groups())
    return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros
