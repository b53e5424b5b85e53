"""Cuts media files into packets, untouched, with a table from which any frame is decodable.

What a container knows needs no decoding but of the first frame, which alone tells how frames are to
be turned and coloured. Where containers are known to be wrong or silent about times and about
what is shown, every frame is decoded once (`checking`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from shardio.errors import InvalidArgument, MediaError
from shardio.format.streams import EncodedStream, PacketFlag, pack_packets
from shardio.media.checking import checked, finished
from shardio.media.colours import display_of, stream_facts
from shardio.media.decoders import decoder_parameters
from shardio.media.opening import DECODER_OPTIONS, check_whole, open_container, video_streams
from shardio.media.packets import PACKED, encoder_note, is_hidden, spare_layers
from shardio.media.sound import demux_sound

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

__all__ = ["demux"]

# What stores a time of presentation with every frame, and one frame per packet.
_EXACT_CONTAINERS = ("mov,mp4", "matroska", "flv")
_EXACT_CODECS = frozenset("h264 hevc av1 vp8 vp9 mjpeg prores dnxhd ffv1".split())
_CHANGES = ("new_extradata", "param_change", "palette")


def demux(
    source: bytes | str, kind: str = "video", *, check: bool | None = None, name: str = ""
) -> EncodedStream:
    """Cut the first video (no cover picture) or audio stream of a file into its packets.

    Args:
        source: a path, or the bytes of a file.
        kind: "video" or "audio".
        check: decode every frame once: proves that nothing is damaged, that each keyframe is one
            and that times are in the order of presentation, and mends times and keyframes that are
            not. None: only where the container or codec leaves that open. Sound is always decoded.
        name: what errors call it; the path by default.

    Raises:
        MediaError: it is no such media, it is damaged, or packets alone do not carry it.
        FileNotFoundError: there is no such file.
    """
    if kind not in ("video", "audio"):
        raise InvalidArgument(f"kind is {kind!r}; expected 'video' or 'audio'")
    name = name or (source if isinstance(source, str) else "media in memory")
    with open_container(source, name) as container:
        if kind == "audio":
            return demux_sound(source, container, name)
        streams = video_streams(container, name)
        try:
            cut = _Cut(container, streams[0])
            check_whole(source, container, streams[0], cut.end)
            stream = cut.stream(len(streams))
            if check or (check is None and cut.is_doubtful(stream)):
                step = cut.frame_duration()
                stream = checked(stream, np.array([p is None for p in cut.times], bool), step)
            return stream
        except MediaError as error:
            raise MediaError(f"{name}: {error}") from error


@dataclass(slots=True)
class _Cut:
    """The packets of one stream of an open container, and what is known of them."""

    container: InputContainer
    source: VideoStream
    parts: list[bytes] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    times: list[int | None] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    extradata: bytes = b""
    end: int = 0
    display: bytes | None = None

    def __post_init__(self) -> None:
        import av

        codec = self.source.codec_context
        self.parameters = decoder_parameters(codec)
        self.extradata = codec.extradata or b""
        codec.thread_type, codec.thread_count = "NONE", 1
        codec.options = dict(DECODER_OPTIONS)
        try:
            first = self._read()
        except av.FFmpegError as error:
            raise MediaError(f"breaks after {len(self.parts)} packets: {error.strerror}") from error
        if first is None:
            raise MediaError("its video stream holds no frame")
        self._note(first)

    def _read(self) -> VideoFrame | None:
        """Take in every packet; returns the first frame."""
        first: VideoFrame | None = None
        spare = spare_layers(self.parameters["codec"], self.extradata)
        for packet in self.container.demux(self.source):
            if packet.size:
                self._take(packet)
                self.layers.append(spare(self.parts[-1]))
            if first is None:
                first = next(iter(packet.decode()), None)
        return first

    def _take(self, packet: Packet[VideoStream]) -> None:
        n = len(self.parts)
        if packet.is_corrupt:
            raise MediaError(f"packet {n} is marked corrupt")
        changed = [kind for kind in _CHANGES if packet.has_sidedata(kind)]  # type: ignore[arg-type]
        if changed and (n or changed != ["new_extradata"]):
            raise MediaError(
                f"its container changes the decoder's configuration at packet {n} "
                f"({', '.join(changed)}), which packets alone do not carry; re-encode it"
            )
        part = bytes(packet)
        flags = PacketFlag.KEY if packet.is_keyframe else PacketFlag(0)
        if packet.is_discard or is_hidden(self.parameters["codec"], part):
            flags |= PacketFlag.HIDDEN
        if packet.is_disposable:
            flags |= PacketFlag.DISPOSABLE
        self.parts.append(part)
        self.flags.append(int(flags))
        self.times.append(packet.pts)
        self.durations.append(max(0, packet.duration or 0))
        if packet.pts is not None:
            self.end = max(self.end, packet.pts + self.durations[-1])

    def _note(self, frame: VideoFrame) -> None:
        """Record what the first frame tells."""
        self.parameters |= stream_facts(frame)
        if self.parameters["codec"] == "h264" and "444" in self.parameters["pixel_format"]:
            if note := encoder_note(self.extradata, self.parts[0]):
                self.parameters["lead_in"] = note.hex()
        aspect, rate = self.source.sample_aspect_ratio, self.source.average_rate
        if aspect and aspect != 1:
            self.parameters["sample_aspect"] = f"{aspect.numerator}:{aspect.denominator}"
        if rate:
            self.parameters["frame_rate"] = f"{rate.numerator}:{rate.denominator}"
        self.display = display_of(frame)
        if self.display is not None:
            self.parameters["display"] = np.frombuffer(self.display, "<i4").tolist()

    def stream(self, n_streams: int) -> EncodedStream:
        """What was read, as the container has it; times that it lacks are those before them."""
        if n_streams > 1:
            self.parameters |= {"stream": self.source.index, "video_streams": n_streams}
        flags = np.array(self.flags, np.int64)
        if PACKED not in self.layers:
            flags[np.array(self.layers) == max(0, *self.layers)] |= PacketFlag.DISPOSABLE
        keys = np.flatnonzero(flags & PacketFlag.KEY)
        if not len(keys):
            raise MediaError("none of its packets is a keyframe: nothing says where to begin")
        flags[: keys[0]] |= PacketFlag.HIDDEN
        times, latest = [], next((time for time in self.times if time is not None), 0)
        for time in self.times:
            latest = latest if time is None else time
            times.append(latest)
        packets = pack_packets(list(map(len, self.parts)), flags, times, self.durations)
        return finished(
            self.parameters, self.extradata, packets, b"".join(self.parts), self._time_base()
        )

    def _time_base(self) -> Fraction:
        if not self.source.time_base:
            raise MediaError("the video stream has no time base")
        return self.source.time_base

    def frame_duration(self) -> int:
        """Ticks from one frame to the next, for containers that store no times."""
        rate = self.source.average_rate or Fraction(25)
        return max(1, round(1 / (rate * self._time_base())))

    def is_doubtful(self, stream: EncodedStream) -> bool:
        """Whether the table needs a decoder's word."""
        flags, pts = np.array(self.flags), stream.packets["pts"]
        shown = (flags & PacketFlag.HIDDEN) == 0
        first = int(np.flatnonzero(flags & PacketFlag.KEY)[0])
        return (
            not self.container.format.name.startswith(_EXACT_CONTAINERS)
            or self.parameters["codec"] not in _EXACT_CODECS
            or None in self.times
            or first > 0
            or bool((pts[shown] < pts[first]).any())
            or len(np.unique(pts[shown])) < int(shown.sum())
        )
