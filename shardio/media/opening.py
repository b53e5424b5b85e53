"""Opens media files for those who decode and those who only cut: one list of what is tried.

Strict on purpose: a file that ends before its container does is an error, and so is a container
that FFmpeg would read on into a text file, a playlist or an address.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, BinaryIO

from shardio.errors import MediaError
from shardio.media.container import missing_bytes

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

__all__ = [
    "DECODER_OPTIONS",
    "audio_stream",
    "check_whole",
    "has_guessed_times",
    "open_container",
    "stored_times",
    "video_streams",
]

# Only these are tried: others would read a text file as ANSI art, a JPEG as a video of one frame,
# and a playlist as whatever files and addresses it names.
_DEMUXERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,mpegvideo,h264,hevc,m4v,obu,ivf"
    ",flv,asf,ogg,nut,mxf,rm,yuv4mpegpipe,dv,wtv"
    ",wav,w64,mp3,aac,ac3,eac3,flac,aiff,caf,amr,ape,au,wv,tta"
)
DECODER_OPTIONS = {"err_detect": "crccheck+explode"}
"""FFmpeg conceals damage where it can; with these the decoder reports it."""
_STALE_TAG_US = 1_000_000  # a duration that a muxer wrote may be a little off; never by a second


def open_container(source: str | bytes, name: str, *, fills_in: bool = True) -> InputContainer:
    """Open a path, or the bytes of a file; `name` is what errors call it.

    Args:
        fills_in: have FFmpeg guess the times and durations that the container does not store.

    Raises:
        MediaError: no container is recognised.
        FileNotFoundError: there is no such file.
    """
    import av

    options = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "file"}
    if not fills_in:
        options["fflags"] = "nofillin"
    # `file:` keeps FFmpeg from reading a protocol into the name.
    place = f"file:{source}" if isinstance(source, str) else io.BytesIO(source)
    try:
        return av.open(place, "r", options=options, metadata_errors="replace")
    except FileNotFoundError:
        raise
    except av.FFmpegError as error:
        raise MediaError(f"{name}: not a readable video: {error.strerror}") from error


def video_streams(container: InputContainer, name: str) -> list[VideoStream]:
    """Name the video streams that are no cover pictures; the first is the one to read.

    Raises:
        MediaError: there is none, or nothing decodes the first.
    """
    from av.stream import Disposition

    streams = [
        stream
        for stream in container.streams.video
        if not stream.disposition & Disposition.attached_pic
    ]
    if not streams:
        raise MediaError(f"{name}: no video stream (streams: {_found(container)})")
    if streams[0].codec_context is None:
        raise MediaError(f"{name}: no decoder for its video stream")
    return streams


def audio_stream(container: InputContainer, name: str) -> AudioStream:
    """Find the first audio stream.

    Raises:
        MediaError: there is none, or nothing decodes it.
    """
    if not container.streams.audio:
        raise MediaError(f"{name}: no audio stream (streams: {_found(container)})")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise MediaError(f"{name}: no decoder for its audio stream")
    return stream


def has_guessed_times(container: InputContainer, stream: VideoStream | AudioStream) -> bool:
    """Return True if FFmpeg may guess the times of the first packets. Call it before reading any.

    FFmpeg drops times below 0 from Matroska, and of some codecs it guesses them instead: back
    from the first time it has, by durations rounded to milliseconds, or, if the probed packets
    have no time, up from 0, so that the clock starts anew where the first known time follows.
    """
    start = stream.start_time
    return "matroska" in container.format.name and (start is None or start < 0)


def stored_times(source: str | bytes, name: str, index: int) -> list[int | None]:
    """Return the time of each packet of a stream as its container stores it, else None."""
    with open_container(source, name, fills_in=False) as container:
        packets = container.demux(container.streams[index])
        return [packet.pts for packet in packets if packet.size]


def _found(container: InputContainer) -> str:
    return ", ".join(stream.type for stream in container.streams) or "none"


def check_whole(
    source: str | bytes, container: InputContainer, stream: VideoStream | AudioStream, end: int
) -> None:
    """Compare what was read with what the container declares.

    `end` is where the last packet of `stream` ends, in its time base.

    Raises:
        MediaError: there is less than declared.
    """
    with _bytes_of(source) as file:
        n_missing = missing_bytes(file)
    if n_missing:
        raise MediaError(f"the file ends {n_missing} bytes before its container does")
    # Matroska drops what it cannot parse and goes on; then only the duration tells.
    if "matroska" not in container.format.name or stream.time_base is None:
        return
    tag = _microseconds(stream.metadata.get("DURATION", ""))
    declared = min(tag, container.duration or 0)
    found = int(end * stream.time_base * 1_000_000)
    if declared - found > _STALE_TAG_US:
        raise MediaError(f"its frames end at {found} us of {declared} us")


def _bytes_of(source: str | bytes) -> BinaryIO:
    return open(source, "rb") if isinstance(source, str) else io.BytesIO(source)


def _microseconds(tag: str) -> int:
    """Read Matroska's `HH:MM:SS.nnnnnnnnn`; anything else is 0."""
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d)\.(\d{6})\d*", tag)
    if match is None:
        return 0
    hours, minutes, seconds, micros = map(int, match.groups())
    return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros
