"""Mux the packets of a stream into a file that players open, and verify the file by demuxing it.

The packets are not changed, except that a length replaces the start code before each unit of H.264
and HEVC if the container requires this. No container can hold planes, so their pictures are encoded
losslessly.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np

from shardio.errors import MediaError
from shardio.format.types.streams import (
    PLANES,
    EncodedStream,
    PacketFlag,
    pack_packets,
    packet_flags,
    packet_sizes,
)
from shardio.media.bitstream import packet_units
from shardio.media.checking import build_stream
from shardio.media.clip_decoder import ClipDecoder
from shardio.media.container import ffmpeg_errors
from shardio.media.decoders import decoder_parameters, display_parameter, fraction_parameter
from shardio.media.demuxing import demux
from shardio.media.encoding import keep_scheduling_policy
from shardio.media.frames import frame_from_planes, split_planes
from shardio.media.pixels import MATRICES, RANGES

if TYPE_CHECKING:
    from av.container import OutputContainer

# The names of the encoders of some codecs; any other encoder has the name of its codec. PyAV
# requires an open encoder for each stream of a file, although no frame is encoded here.
_ENCODERS: Final = {
    "av1": "libsvtav1",
    "h264": "libx264",
    "hevc": "libx265",
    "mp3": "libmp3lame",
    "opus": "libopus",
    "vp8": "libvpx",
    "vp9": "libvpx-vp9",
}
_FAST_OPTIONS: Final = {
    "libx264": {"preset": "ultrafast"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=none:pools=none"},
}
_VIDEO_FORMATS: Final = (("mp4", ".mp4"), ("mov", ".mov"), ("matroska", ".mkv"))
_GIF_FORMATS: Final = (("gif", ".gif"), *_VIDEO_FORMATS)
_SOUND_FORMATS: Final = {
    "aac": (("adts", ".aac"),),
    "flac": (("flac", ".flac"),),
    "mp3": (("mp3", ".mp3"),),
    "opus": (("ogg", ".opus"),),
    "pcm": (("wav", ".wav"), ("aiff", ".aiff")),
    "vorbis": (("ogg", ".ogg"),),
}
_ANY_SOUND_FORMATS: Final = (("ipod", ".m4a"), ("matroska", ".mka"))
_CHUNK_FRAMES: Final = 16
"""The number of pictures that are decoded at a time."""
_COLOUR_ATTRIBUTES: Final = ("color_range", "colorspace", "color_primaries", "color_trc")


@dataclass(frozen=True, slots=True)
class MuxedStream:
    """The bytes of a file with one stream, and the suffix of its name, such as ".mp4"."""

    data: bytes
    suffix: str

    def __len__(self) -> int:  # exports use this size to limit their memory
        return len(self.data)


def mux(stream: EncodedStream) -> MuxedStream:
    """Return a file that contains a stream. Demuxing the file gives the same packets and times.

    PCM may be cut into other packets. All times of an audio stream may be shifted. All times of a
    video may be shifted so that it begins at 0: few containers can store times before 0.
    Planes are encoded losslessly with FFV1: the file has other packets, but the same pictures.

    Raises:
        MediaError: no container can store the stream unchanged; the message has the reasons.
        ShardCorrupt: the stream is damaged.
    """
    if stream.parameters.get("codec") == PLANES:
        stream = _encode_losslessly(stream)
    codec = str(stream.parameters.get("codec"))
    reasons = []
    for form, suffix, shift in _candidate_formats(stream, codec):
        try:
            data = write_file(stream, form, shift)
            again = demux(data, "audio" if _is_sound(stream) else "video", name=f"as {form}")
        except FormatRejected as error:
            reasons.append(f"{form}: {error}")
            continue
        except MediaError as error:
            reasons.append(str(error))
            continue
        difference = _difference(stream, again, codec, shift)
        if difference is None:
            return MuxedStream(data, suffix)
        reasons.append(f"{form}: its {difference} would differ")
    raise MediaError(
        f"no container stores packets of {codec} unchanged: {'; '.join(dict.fromkeys(reasons))}"
    )


def _encode_losslessly(stream: EncodedStream) -> EncodedStream:
    """Encode the pictures of a stream of planes with FFV1; every packet is a keyframe."""
    import av
    from av.video.codeccontext import VideoCodecContext

    codec = av.CodecContext.create("ffv1", "w")
    if not isinstance(codec, VideoCodecContext):
        raise AssertionError("FFV1 is a codec of videos")
    codec.width, codec.height, codec.pix_fmt = stream.width, stream.height, "yuv420p"
    codec.time_base, codec.gop_size = stream.time_base, 1
    codec.colorspace, codec.color_range = MATRICES["bt601"], RANGES["limited"]
    codec.thread_type, codec.thread_count = "NONE", 1
    codec.options = {"level": "3", "slices": "4", "slicecrc": "1"}
    packets: list[bytes] = []
    with ClipDecoder() as decoder, ffmpeg_errors(lambda: f"picture {len(packets)}"):
        for first in range(0, stream.n_frames, _CHUNK_FRAMES):
            numbers = range(first, min(first + _CHUNK_FRAMES, stream.n_frames))
            out = np.empty((len(numbers), stream.height * 3 // 2, stream.width), np.uint8)
            decoder.decode(stream, numbers, out, pixels="yuv420")
            for number, picture in zip(numbers, out, strict=True):
                frame = frame_from_planes(split_planes(picture), "yuv420p")
                frame.pts = number
                packets += map(bytes, codec.encode(frame))
        packets += map(bytes, codec.encode(None))
    table = stream.packets
    flags = np.full(len(table), PacketFlag.KEY)
    made = pack_packets(list(map(len, packets)), flags, table["pts"], table["duration"])
    parameters = decoder_parameters(codec) | {"range": "limited", "matrix": "bt601"}
    extradata = codec.extradata or b""
    return build_stream(parameters, extradata, made, b"".join(packets), stream.time_base)


class FormatRejected(Exception):
    """Raised if FFmpeg cannot write a stream in a format."""


def _is_sound(stream: EncodedStream) -> bool:
    return "rate" in stream.parameters


def _candidate_formats(stream: EncodedStream, codec: str) -> Iterator[tuple[str, str, int]]:
    """Yield the formats to try, as (format, file suffix, ticks to subtract from all times)."""
    if not _is_sound(stream):
        is_shown = packet_flags(stream.packets) & PacketFlag.HIDDEN == 0
        first = int(stream.packets["pts"][is_shown].min(initial=0))
        for shift in dict.fromkeys((0, first)):
            formats = _GIF_FORMATS if codec == "gif" else _VIDEO_FORMATS
            yield from ((*form, shift) for form in formats)
        return
    forms = (*_SOUND_FORMATS.get(codec.partition("_")[0], ()), *_ANY_SOUND_FORMATS)
    begin = int(stream.packets["pts"][0]) + int(stream.parameters.get("skip", 0))
    for shift in dict.fromkeys((0, begin)):
        yield from ((form, suffix, shift) for form, suffix in forms)


def write_file(stream: EncodedStream, form: str, shift: int = 0) -> bytes:
    """Write the packets of a stream, with `shift` ticks subtracted from all times, in a format.

    Raises FormatRejected if FFmpeg refuses to. The file is not compared with the stream.
    """
    import av

    content = io.BytesIO()
    base = stream.time_base
    options = {"video_track_timescale": str(base.denominator)} if form in ("mp4", "mov") else {}
    if form == "mp3" and not stream.parameters.get("skip"):
        # Do not let FFmpeg write a tag frame: it would make players drop samples as padding.
        options = {"write_xing": "0"}
    os.environ.setdefault("SVT_LOG", "0")
    try:
        with av.open(content, "w", format=form, container_options=options) as container:
            codec = str(stream.parameters.get("codec"))
            make = _sound_target if _is_sound(stream) else _video_target
            target = make(container, stream, _ENCODERS.get(codec, codec))
            target.time_base = base
            container.start_encoding()
            for packet in _packets(stream, form, shift):
                packet.stream, packet.time_base = target, base
                container.mux_one(packet)
    except (av.FFmpegError, ValueError) as error:
        raise FormatRejected(getattr(error, "strerror", None) or error) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # Parameters come from files: the codec may be of another kind.
        raise FormatRejected(f"a parameter of the stream is missing or invalid: {error}") from error
    return content.getvalue()


def _video_target(container: OutputContainer, stream: EncodedStream, encoder: str) -> Any:
    parameters = stream.parameters
    target: Any = container.add_stream(encoder, rate=25)
    codec = target.codec_context
    formats = [each.name for each in codec.codec.video_formats or ()]
    candidates = (parameters.get("pixel_format"), "yuv444p", *formats, "yuv420p")
    codec.pix_fmt = next(name for name in candidates if name in formats or not formats)
    codec.width, codec.height = int(parameters["width"]), int(parameters["height"])
    for name in _COLOUR_ATTRIBUTES:
        if parameters.get(name):
            setattr(codec, name, int(parameters[name]))
    if aspect := fraction_parameter(parameters, "sample_aspect"):
        codec.sample_aspect_ratio = aspect
    if rate := fraction_parameter(parameters, "frame_rate"):
        codec.framerate = rate
    codec.thread_count = 1
    codec.options = _FAST_OPTIONS.get(codec.name, {})
    with keep_scheduling_policy():
        codec.open(strict=False)
    codec.extradata = bytes(stream.extradata) or None
    if display_parameter(parameters) is not None:
        target.set_display_matrix([int(each) for each in parameters["display"]])
    return target


def _sound_target(container: OutputContainer, stream: EncodedStream, encoder: str) -> Any:
    parameters = stream.parameters
    target: Any = container.add_stream(encoder, rate=int(parameters["rate"]))
    codec = target.codec_context
    codec.layout = parameters["layout"]
    formats = codec.codec.audio_formats
    codec.format = formats[0].name if formats else parameters["sample_format"]
    codec.options = {"strict": "-2"}
    codec.open(strict=False)
    codec.extradata = bytes(stream.extradata) or None
    return target


def _packets(stream: EncodedStream, form: str, shift: int) -> Iterator[Any]:
    """Yield the packets of a stream, with `shift` subtracted from their presentation times.

    Decoding times are computed; each is at or before its packet's presentation time.
    """
    import av

    table, skip = stream.packets, int(stream.parameters.get("skip", 0))
    pts = table["pts"].astype(np.int64) - shift
    in_order = np.sort(pts)
    dts = in_order - max(0, int((in_order - pts).max(initial=0)))
    durations = table["duration"].astype(np.int64)
    # The last packets of an audio stream may contain padding. End these packets where the audio
    # ends.
    if _is_sound(stream) and len(pts):
        end = int(pts[0]) + skip + stream.n_frames
        durations = np.clip(end - pts, 0, durations)
    n_after = int(table["duration"].sum()) - skip - stream.n_frames
    keys = packet_flags(table) & PacketFlag.KEY != 0
    columns = (table["offset"], packet_sizes(table), pts, dts, durations, keys)
    for offset, size, shown, decoded, duration, is_key in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        packet: Any = av.Packet(bytes(stream.data[offset : offset + size]))
        packet.pts, packet.dts, packet.duration = shown, decoded, duration
        packet.is_keyframe = is_key
        if form == "mp3":
            packet.set_sidedata(_padding(skip, max(0, n_after)))
        yield packet


def _padding(n_before: int, n_after: int) -> Any:
    from av.packet import PacketSideData, PktSideDataT

    kind: Any = PacketSideData  # PyAV's stubs lack the arguments of the constructor
    found = kind(get_args(PktSideDataT).index("skip_samples"), 10)
    found.update(struct.pack("<IIxx", n_before, n_after))
    return found


def _difference(stream: EncodedStream, again: EncodedStream, codec: str, shift: int) -> str | None:
    """Return the first property in which `stream`, shifted by `shift` ticks, and `again` differ."""
    if codec.startswith("pcm"):
        same_data = bytes(again.data[:]) == bytes(stream.data[:])
        return None if same_data and again.n_frames == stream.n_frames else "samples"
    if len(stream.packets) != len(again.packets):
        return "number of packets"
    if not np.array_equal(packet_flags(stream.packets), packet_flags(again.packets)):
        return "flags of packets"
    if bytes(stream.data[:]) != bytes(again.data[:]):
        pairs = zip(_units(stream, codec), _units(again, codec), strict=True)
        if any(before != after for before, after in pairs):
            return "packets"
    times, found = stream.packets["pts"].astype(np.int64), again.packets["pts"].astype(np.int64)
    if _is_sound(stream):
        lengths = [(each.n_frames, each.parameters.get("skip", 0)) for each in (stream, again)]
        same = np.array_equal(times - times[:1], found - found[:1])
        return None if same and lengths[0] == lengths[1] else "audible samples"
    scale = stream.time_base / again.time_base
    if scale.denominator != 1 or not np.array_equal((times - shift) * scale.numerator, found):
        return "times"
    shown = [_display_properties(each) for each in (stream, again)]
    return None if shown[0] == shown[1] else "shape or colours"


def _display_properties(stream: EncodedStream) -> tuple[Any, ...]:
    parameters = stream.parameters
    aspect = fraction_parameter(parameters, "sample_aspect") or Fraction(1)
    names = ("pixel_format", "range", "matrix", "rotation")
    return stream.width, stream.height, aspect, *(parameters.get(name) for name in names)


def _units(stream: EncodedStream, codec: str) -> Iterator[list[bytes]]:
    data, table = bytes(stream.data[:]), stream.packets
    for offset, size in zip(table["offset"].tolist(), packet_sizes(table).tolist(), strict=True):
        yield list(packet_units(codec, stream.extradata, data[offset : offset + size]))
