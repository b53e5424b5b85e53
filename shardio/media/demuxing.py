"""Demux media files into packets, with a table that makes it possible to decode any frame.

Usually only the first frame of a video is decoded, for orientation and colours. Videos whose times
or keyframe flags may be wrong are decoded completely, by `checking`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing, undo_on_error
from shardio.errors import InvalidArgument, MediaError
from shardio.format.checksum import distinct
from shardio.format.types.streams import EncodedStream, PacketFlag, pack_packets, packet_flags
from shardio.media.audio_packets import demux_audio
from shardio.media.bitstream import disposable_packets, hidden_packets, x264_version_unit
from shardio.media.checking import build_stream, verify_by_decoding, with_flags_and_times
from shardio.media.container import (
    PARSE_ONLY,
    check_complete,
    ffmpeg_errors,
    has_guessed_times,
    make_strict,
    open_container,
    prefix_errors,
    stored_times,
    video_streams,
)
from shardio.media.decoders import decoder_parameters
from shardio.media.pixels import display_matrix, frame_facts
from shardio.media.timestamps import frame_interval

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

# Containers that store one frame per packet, and a presentation time for every frame.
_EXACT_CONTAINERS = ("mov,mp4", "matroska", "flv")
_EXACT_CODECS = frozenset("h264 hevc av1 vp8 vp9 mjpeg prores dnxhd ffv1".split())
_CONFIGURATION_CHANGES = ("new_extradata", "param_change", "palette")
# The flags as plain ints, because the operators of an enum take longer than all other work for a
# packet.
_KEY, _HIDDEN, _DISPOSABLE = map(int, (PacketFlag.KEY, PacketFlag.HIDDEN, PacketFlag.DISPOSABLE))


def demux(
    source: bytes | str,
    kind: str = "video",
    *,
    check: bool | None = None,
    name: str = "",
    n_packets: int | None = None,
) -> EncodedStream:
    """Demux the first video stream (other than a cover picture) or audio stream of a file.

    Args:
        source: a path, or the bytes of a file.
        kind: "video" or "audio".
        check: True to decode every frame of a video once. This detects damage, and corrects wrong
            times and keyframe flags. If `check` is None, frames are decoded only if the times or
            the flags may be wrong; if it is False, only if packets have no times. Audio is always
            decoded.
        name: the name of the file in errors; the path by default.
        n_packets: the number of packets of a video to read, from the beginning of the file; by
            default all. With fewer, damage of the rest is not detected.

    Raises:
        MediaError: the file has no such stream, the stream is damaged, or it cannot be represented
            by packets alone.
        FileNotFoundError: there is no such file.
    """
    if kind not in ("video", "audio"):
        raise InvalidArgument(f"kind is {kind!r}; expected 'video' or 'audio'")
    name = name or (source if isinstance(source, str) else "media in memory")
    with open_container(source, name, kind=kind) as container:
        if kind == "audio":
            return demux_audio(source, container, name)
        streams = video_streams(container, name)
        is_guessed = has_guessed_times(container, streams[0])
        with prefix_errors(name):
            packets = islice(container.demux(streams[0]), n_packets)
            reader = PacketReader(container, streams[0], packets)
            if n_packets is None:
                check_complete(source, container, streams[0], reader.end())
            if is_guessed:
                reader.times = stored_times(source, name, streams[0].index)[: len(reader.times)]
            stream = reader.stream(len(streams))
            untimed = np.array([time is None for time in reader.times], bool)
            if check or untimed.any() or (check is None and reader.needs_decoding(stream)):
                stream = verify_by_decoding(stream, untimed, reader.frame_interval())
            return stream


@dataclass(slots=True)
class PacketReader:
    """The packets of one stream of an open container, with their times and flags.

    Args:
        packets: the packets to read; by default all packets of the stream.
        parameters_from: another reader of the same stream, from which the parameters are taken.
        stop_at_first_frame: True to stop reading once a frame has been decoded.
    """

    container: InputContainer
    av_stream: VideoStream
    packets: Iterable[Packet[VideoStream]] | None = None
    parameters_from: PacketReader | None = None
    stop_at_first_frame: bool = False
    content: io.BytesIO = field(default_factory=io.BytesIO)
    sizes: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    times: list[int | None] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    extradata: bytes = b""

    def __post_init__(self) -> None:
        if self.parameters_from is not None:
            self.parameters = dict(self.parameters_from.parameters)
            self.extradata = self.parameters_from.extradata
            self._read(decode=False)
            return
        codec = self.av_stream.codec_context
        self.parameters = decoder_parameters(codec)
        self.extradata = codec.extradata or b""
        make_strict(codec, PARSE_ONLY)  # only properties of the first frame are used
        with ffmpeg_errors(lambda: f"breaks after {len(self.sizes)} packets"):
            first = self._read()
        if first is None:
            raise MediaError("its video stream holds no frame")
        self._add_frame_parameters(first)

    def _read(self, *, decode: bool = True) -> VideoFrame | None:
        """Read the packets. With `decode`, return the first frame; otherwise, decode nothing."""
        first: VideoFrame | None = None
        sizes, flags, times, durations = self.sizes, self.flags, self.times, self.durations
        write = self.content.write  # copies the bytes of a packet; `getvalue` does not copy again
        packets = self.container.demux(self.av_stream) if self.packets is None else self.packets
        for packet in packets:
            if size := packet.size:
                if packet.is_corrupt:
                    raise MediaError(f"packet {len(sizes)} is marked corrupt")
                for _ in packet.iter_sidedata():
                    self._reject_configuration_change(packet)
                    break
                flags.append(
                    _KEY * packet.is_keyframe
                    | _HIDDEN * packet.is_discard
                    | _DISPOSABLE * packet.is_disposable
                )
                times.append(packet.pts)
                durations.append(max(0, packet.duration or 0))
                write(packet)
                sizes.append(size)
            if decode and first is None:
                first = self._decode_first_frame(packet)
                if first is not None and self.stop_at_first_frame:
                    break
        return first

    def _decode_first_frame(self, packet: Packet[VideoStream]) -> VideoFrame | None:
        import av

        found = next(iter(packet.decode()), None)
        if found is None and packet.is_keyframe and len(self.sizes) == 1:
            # The decoder delays the keyframe, because other frames may be shown before it. Draining
            # the decoder outputs the frame at once; waiting takes three times as long.
            codec = self.av_stream.codec_context
            with contextlib.suppress(av.FFmpegError):
                found = next(iter(codec.decode(None)), None)
            if found is None:
                codec.flush_buffers()
                packet.decode()
        return found

    def _reject_configuration_change(self, packet: Packet[VideoStream]) -> None:
        n = len(self.sizes)
        changed = [kind for kind in _CONFIGURATION_CHANGES if packet.has_sidedata(kind)]  # type: ignore[arg-type]
        if changed and (n or changed != ["new_extradata"]):
            raise MediaError(
                f"its container changes the decoder's configuration at packet {n} "
                f"({', '.join(changed)}), which packets alone cannot represent; re-encode it"
            )

    def _add_frame_parameters(self, frame: VideoFrame) -> None:
        self.parameters |= frame_facts(frame)
        if self.parameters["codec"] == "h264" and "444" in self.parameters["pixel_format"]:
            if note := x264_version_unit(self.extradata, self.content.getvalue()[: self.sizes[0]]):
                self.parameters["lead_in"] = note.hex()
        aspect, rate = self.av_stream.sample_aspect_ratio, self.av_stream.average_rate
        if aspect and aspect != 1:
            self.parameters["sample_aspect"] = f"{aspect.numerator}:{aspect.denominator}"
        if rate:
            self.parameters["frame_rate"] = f"{rate.numerator}:{rate.denominator}"
        if (display := display_matrix(frame)) is not None:
            self.parameters["display"] = np.frombuffer(display, "<i4").tolist()

    def end(self) -> int:
        """Return the tick at which the last packet ends."""
        spans = zip(self.times, self.durations, strict=True)
        return max((time + n for time, n in spans if time is not None), default=0)

    def stream(self, n_streams: int) -> EncodedStream:
        """Build the stream as its container describes it, without decoding.

        A packet without a time gets the time of the previous packet.
        """
        if n_streams > 1:
            self.parameters |= {"stream": self.av_stream.index, "video_streams": n_streams}
        data = self.content.getvalue()
        codec, flags = self.parameters["codec"], np.array(self.flags, np.int64)
        flags[hidden_packets(codec, data, self.sizes)] |= _HIDDEN
        flags[disposable_packets(codec, self.extradata, data, self.sizes)] |= _DISPOSABLE
        keys = np.flatnonzero(flags & PacketFlag.KEY)
        if not len(keys):
            raise MediaError("none of its packets is a keyframe, so decoding cannot start anywhere")
        flags[: keys[0]] |= PacketFlag.HIDDEN
        known, latest = [], next((time for time in self.times if time is not None), 0)
        for time in self.times:
            latest = latest if time is None else time
            known.append(latest)
        packets = pack_packets(self.sizes, flags, known, self.durations)
        return build_stream(self.parameters, self.extradata, packets, data, self.time_base())

    def time_base(self) -> Fraction:
        """Return the seconds per tick."""
        if not self.av_stream.time_base:
            raise MediaError("the video stream has no time base")
        return self.av_stream.time_base

    def frame_interval(self) -> Fraction:
        """Return the ticks from one frame to the next, at the average frame rate."""
        return frame_interval(self.av_stream.average_rate, self.time_base())

    def needs_decoding(self, stream: EncodedStream) -> bool:
        """Return True if `stream` must be decoded because its times or flags may be wrong."""
        flags, pts = packet_flags(stream.packets), stream.packets["pts"]
        shown = (flags & PacketFlag.HIDDEN) == 0
        first = int(np.flatnonzero(flags & PacketFlag.KEY)[0])
        return (
            not self.container.format.name.startswith(_EXACT_CONTAINERS)
            or self.parameters["codec"] not in _EXACT_CODECS
            or first > 0
            or bool((pts[shown] < pts[first]).any())
            or len(distinct(pts[shown])) < int(shown.sum())
        )


class SpanReader(Closing):
    """An open video file. `cut` returns the frames of a span of time; `check` is as for `demux`."""

    def __init__(self, path: str, *, check: bool | None = None) -> None:
        self._path, self._check = path, check
        self._container = open_container(path, path)
        with undo_on_error(self._container.close):
            with prefix_errors(path):
                self._read_head()

    def _read_head(self) -> None:
        """Check that spans can be cut out of the file, and read the file up to its first frame."""
        streams = video_streams(self._container, self._path)
        self._av_stream, self._n_streams = streams[0], len(streams)
        if has_guessed_times(self._container, self._av_stream):
            raise MediaError(
                "FFmpeg does not read the times of its first packets (Matroska, before 0), so no "
                "span can be cut out; re-encode it"
            )
        self._head = PacketReader(self._container, self._av_stream, stop_at_first_frame=True)
        end = (self._av_stream.start_time or 0) + (self._av_stream.duration or 0)
        check_complete(self._path, self._container, self._av_stream, end)
        self._time_base = self._head.time_base()
        self._ticks_per_second = max(1, round(1 / self._time_base))

    def cut(
        self, begin: Fraction, end: Fraction | None = None, zero: Fraction = Fraction(0)
    ) -> EncodedStream:
        """Return a stream of the frames that are shown at `begin` or later, and before `end`.

        The stream also has earlier and later packets that these frames need, such as the packets
        from the preceding keyframe on. The frames of these extra packets are never shown.

        Args:
            begin, end: the span, in seconds. If `end` is None, the span ends with the file.
            zero: the time in the file, in seconds, that becomes time 0 of the stream.
        """
        first = -(-begin // self._time_base)
        stop = None if end is None else -(-end // self._time_base)
        with prefix_errors(self._path), ffmpeg_errors(lambda: "damaged"):
            packets = self._packets(first, stop)
            reader = PacketReader(
                self._container, self._av_stream, packets, parameters_from=self._head
            )
            stream = reader.stream(self._n_streams)
            flags, pts = packet_flags(stream.packets), stream.packets["pts"].astype(np.int64)
            flags[(pts < first) | ((pts >= stop) if stop is not None else False)] |= _HIDDEN
            stream = with_flags_and_times(stream, flags, pts - round(zero / self._time_base))
            if self._check or (self._check is None and reader.needs_decoding(stream)):
                untimed = np.zeros(len(stream.packets), bool)
                stream = verify_by_decoding(stream, untimed, reader.frame_interval())
            return stream

    def _packets(self, first: int, stop: int | None) -> list[Packet[VideoStream]]:
        start = self._av_stream.start_time or 0
        back = max(first, start)
        while True:
            packets = self._read(back, stop)
            times = [packet.pts or 0 for packet in packets]
            shown = [time for time in times if first <= time and (stop is None or time < stop)]
            # If the packets that were read begin after `first`, frames of the span may be missing.
            is_whole = back == start or (bool(times) and times[0] <= first)
            begin = min(shown, default=first - 1)
            facts = enumerate(zip(packets, times, strict=True))
            keys = [n for n, (packet, time) in facts if packet.is_keyframe and time <= begin]
            if is_whole and keys and shown:
                key = keys[-1]
                # Drop the packets whose frames are decoded after the keyframe but shown before it,
                # because these frames need packets before the keyframe.
                return [packets[n] for n in range(key, len(packets)) if times[n] >= times[key]]
            if back == start:
                end = "its end" if stop is None else f"{float(stop * self._time_base):g}"
                what = "frame that can be decoded" if shown else "frame"
                begin_s = float(first * self._time_base)
                raise MediaError(f"no {what} from second {begin_s:g} to {end}")
            back = max(start, 2 * back - first - self._ticks_per_second)

    def _read(self, back: int, stop: int | None) -> list[Packet[VideoStream]]:
        """Read from the keyframe at or before `back` to the last packet shown before `stop`."""
        packets: list[Packet[VideoStream]] = []
        n_needed = 0
        self._container.seek(back, stream=self._av_stream, backward=True)
        for packet in self._container.demux(self._av_stream):
            if not packet.size:
                continue
            if packet.pts is None:
                raise MediaError("a packet has no time, so no span can be cut out")
            packets.append(packet)
            if stop is None or packet.pts < stop:
                n_needed = len(packets)
            elif packet.dts is not None and packet.dts >= stop:
                break
        return packets[:n_needed]

    def close(self) -> None:
        """Close the file."""
        self._container.close()


def times_of(stream: EncodedStream) -> npt.NDArray[np.int64]:
    """Return the presentation time of each frame of a video, in ticks, sorted."""
    is_shown = (packet_flags(stream.packets) & PacketFlag.HIDDEN) == 0
    return np.sort(stream.packets["pts"][is_shown].astype(np.int64))
