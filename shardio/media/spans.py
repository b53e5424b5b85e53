"""Cuts spans of time out of a video file: packets untouched, each span a stream of its own."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardio._base.closing import Closing
from shardio.errors import MediaError
from shardio.format.streams import (
    EncodedStream,
    PacketFlag,
    pack_packets,
    packet_flags,
    packet_sizes,
)
from shardio.media.checking import checked, finished
from shardio.media.container import check_whole, has_guessed_times, open_container, video_streams
from shardio.media.streams import Cut

if TYPE_CHECKING:
    from av import Packet
    from av.video.stream import VideoStream

__all__ = ["SpanReader", "times_of"]


class SpanReader(Closing):
    """Owns an open video file, from which spans are cut in any order; no more than they is read.

    Args:
        path: of the file.
        check: decode every frame of a span once, as `demux` does of a whole file.

    Raises:
        MediaError: it is no video, or it is damaged.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str, *, check: bool | None = None) -> None:
        self._path, self._check = path, check
        self._container = open_container(path, path)
        try:
            streams = video_streams(self._container, path)
            self._source, self._n_streams = streams[0], len(streams)
            if has_guessed_times(self._container, self._source):
                raise MediaError(
                    "its first packets have no time that FFmpeg reads (Matroska, before 0), so no "
                    "span can be cut out; re-encode it"
                )
            self._head = Cut(self._container, self._source, is_head=True)
            check_whole(path, self._container, self._source, self._container_end())
            self._time_base = self._head.time_base()
            self._second = max(1, round(1 / self._time_base))
        except MediaError as error:
            self._container.close()
            raise MediaError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error

    def cut(
        self, begin: Fraction, end: Fraction | None = None, zero: Fraction = Fraction(0)
    ) -> EncodedStream:
        """Cut out the frames that are shown from `begin` on, and before `end`, in seconds.

        Where the first of them is no keyframe, what comes before it from a keyframe on is there as
        well, and what frames behind the span the last ones need: decoded, and never shown.

        Args:
            end: the end of the file by default.
            zero: the time of the file that is 0 in the stream.

        Raises:
            MediaError: there is no frame in the span, or the file is damaged.
        """
        import av

        first = -(-begin // self._time_base)
        stop = None if end is None else -(-end // self._time_base)
        try:
            packets = self._packets(first, stop)
            cut = Cut(self._container, self._source, packets, like=self._head)
            stream = cut.stream(self._n_streams)
            stream = _within(stream, first, stop, round(zero / self._time_base))
            if self._check or (self._check is None and cut.is_doubtful(stream)):
                timed = np.zeros(len(stream.packets), bool)
                stream = checked(stream, timed, cut.frame_interval())
        except av.FFmpegError as error:
            raise MediaError(f"{self._path}: damaged: {error.strerror}") from error
        except MediaError as error:
            raise MediaError(f"{self._path}: {error}") from error
        return stream

    def _container_end(self) -> int:
        """When the file ends by what it says itself, in ticks."""
        return (self._source.start_time or 0) + (self._source.duration or 0)

    def _packets(self, first: int, stop: int | None) -> list[Packet[VideoStream]]:
        """Read what a span needs, from the last keyframe shown no later than its first frame on."""
        start = self._source.start_time or 0
        back = max(first, start)
        while True:
            packets, times = self._read(back, stop)
            shown = [time for time in times if first <= time and (stop is None or time < stop)]
            # Where reading began behind it, frames of the span may have been passed over.
            is_whole = back == start or (bool(times) and times[0] <= first)
            begin = min(shown, default=first - 1)
            facts = enumerate(zip(packets, times, strict=True))
            keys = [n for n, (packet, time) in facts if packet.is_keyframe and time <= begin]
            if is_whole and keys and shown:
                key = keys[-1]
                # What is sent after a keyframe and shown before it needs what is before both.
                return [packets[n] for n in range(key, len(packets)) if times[n] >= times[key]]
            if back == start:
                raise MediaError(_why_none(first, stop, self._time_base, is_there=bool(shown)))
            back = max(start, 2 * back - first - self._second)

    def _read(self, back: int, stop: int | None) -> tuple[list[Packet[VideoStream]], list[int]]:
        """Read from the keyframe at or before `back` to the last packet shown before `stop`.

        The packets, and when each is shown.
        """
        packets: list[Packet[VideoStream]] = []
        times: list[int] = []
        n_needed = 0
        self._container.seek(back, stream=self._source, backward=True)
        for packet in self._container.demux(self._source):
            if not packet.size:
                continue
            if packet.pts is None:
                raise MediaError("a packet has no time, so no span can be cut out")
            packets.append(packet)
            times.append(packet.pts)
            if stop is None or packet.pts < stop:
                n_needed = len(packets)
            elif packet.dts is not None and packet.dts >= stop:
                break
        return packets[:n_needed], times[:n_needed]

    def close(self) -> None:
        """Close the file."""
        self._container.close()


def times_of(stream: EncodedStream) -> npt.NDArray[np.int64]:
    """When each frame of a video is shown, in ticks, in order."""
    is_shown = (packet_flags(stream.packets) & PacketFlag.HIDDEN) == 0
    return np.sort(stream.packets["pts"][is_shown].astype(np.int64))


def _why_none(first: int, stop: int | None, time_base: Fraction, *, is_there: bool) -> str:
    end = "its end" if stop is None else f"{float(stop * time_base):g}"
    what = "frame that can be decoded" if is_there else "frame"
    return f"no {what} from second {float(first * time_base):g} to {end}"


def _within(stream: EncodedStream, first: int, stop: int | None, zero: int) -> EncodedStream:
    """The stream with frames outside of a span hidden, and with times that count from `zero`."""
    flags, pts = packet_flags(stream.packets), stream.packets["pts"].astype(np.int64)
    outside = pts < first if stop is None else (pts < first) | (pts >= stop)
    flags[outside] |= PacketFlag.HIDDEN
    sizes, durations = packet_sizes(stream.packets), stream.packets["duration"]
    packets = pack_packets(sizes, flags, pts - zero, durations)
    return finished(
        stream.parameters, stream.extradata, packets, bytes(stream.data[:]), stream.time_base
    )
