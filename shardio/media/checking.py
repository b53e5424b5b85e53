"""Verify and correct the packet table of a stream by decoding its packets once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardio.errors import MediaError
from shardio.format.checksum import Hasher
from shardio.format.types.streams import (
    EncodedStream,
    PacketFlag,
    Packets,
    pack_packets,
    packet_flags,
    packet_sizes,
)
from shardio.media.container import ffmpeg_errors
from shardio.media.decoders import (
    display_parameter,
    fraction_parameter,
    lead_in,
    numbered_packet,
    open_video_decoder,
)
from shardio.media.frames import display_rotation, display_size
from shardio.media.pixels import plane_rows
from shardio.media.timestamps import fill_missing_times, in_presentation_order

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.codeccontext import VideoCodecContext


def build_stream(
    parameters: Mapping[str, Any],
    extradata: bytes,
    packets: Packets,
    data: bytes,
    time_base: Fraction,
) -> EncodedStream:
    """Build a video stream from its packets; compute frame count, display size and duration."""
    shown = packets[(packet_flags(packets) & PacketFlag.HIDDEN) == 0]
    if not len(shown):
        raise MediaError("its video stream holds no frame")
    last = shown[np.argmax(shown["pts"])]
    length = int(last["pts"]) + int(last["duration"]) - int(shown["pts"].min())
    turned, _, _ = display_rotation(display_parameter(parameters))
    aspect = fraction_parameter(parameters, "sample_aspect")
    width, height = display_size(parameters["width"], parameters["height"], aspect, turned=turned)
    return EncodedStream(
        parameters=parameters,
        extradata=extradata,
        packets=packets,
        data=data,
        time_base=time_base,
        n_frames=len(shown),
        width=width,
        height=height,
        duration=length if last["duration"] else 0,
    )


def verify_by_decoding(
    stream: EncodedStream, untimed: npt.NDArray[np.bool_], interval: Fraction
) -> EncodedStream:
    """Decode every packet, and return the stream with a corrected packet table.

    Packets whose frame is not shown get the flag HIDDEN. A keyframe loses the flag KEY if it is
    hidden, or if decoding from it gives other pictures than decoding the whole stream. In the
    result, times rise in presentation order. `untimed` is a mask of the packets for which the
    container has no time; `interval` is the number of ticks from one frame to the next.
    """
    shown = _DigestDecoder(stream).decode(range(len(stream.packets)))
    flags = packet_flags(stream.packets)
    out = np.fromiter(shown, np.int64, len(shown))
    # Some decoded frames are not shown, because an edit list hides them.
    order = out[(flags[out] & PacketFlag.HIDDEN) == 0]
    flags |= PacketFlag.HIDDEN
    flags[order] &= ~np.int64(PacketFlag.HIDDEN)
    times = _correct_times(stream, order, untimed, interval)
    pts = stream.packets["pts"].copy()
    pts[order] = times
    return _drop_false_keyframes(with_flags_and_times(stream, flags, pts), shown)


def with_flags_and_times(
    stream: EncodedStream, flags: npt.NDArray[np.int64], pts: npt.NDArray[np.int64]
) -> EncodedStream:
    """Return a stream of the packets of `stream`, with the given flags and times."""
    packets = pack_packets(packet_sizes(stream.packets), flags, pts, stream.packets["duration"])
    parameters, data = stream.parameters, bytes(stream.data[:])
    return build_stream(parameters, stream.extradata, packets, data, stream.time_base)


def _correct_times(
    stream: EncodedStream,
    order: npt.NDArray[np.int64],
    untimed: npt.NDArray[np.bool_],
    interval: Fraction,
) -> list[int]:
    packets = stream.packets[order]
    stored = zip(packets["pts"].tolist(), untimed[order].tolist(), strict=True)
    known = [None if is_missing else time for time, is_missing in stored]
    complete = fill_missing_times(known, packets["duration"].tolist(), interval)
    times = [time for time, _ in in_presentation_order((time, None) for time in complete)]
    for n, (before, after) in enumerate(zip(times, times[1:], strict=False), 1):
        if after < before:
            raise MediaError(
                f"its clock restarts at frame {n} ({before}, then {after}): the file joins several "
                f"recordings; split or re-encode it"
            )
        if after == before and order[n] < order[n - 1]:
            raise MediaError(f"frames {n - 1} and {n} have the same time, {after}; re-encode it")
    return times


def _drop_false_keyframes(stream: EncodedStream, shown: Mapping[int, int]) -> EncodedStream:
    """Remove the flag KEY if a keyframe is hidden, or if decoding from it does not give `shown`.

    `shown` maps the index of each packet to the digest of its frame, from decoding all packets.
    """
    flags, pts = packet_flags(stream.packets), stream.packets["pts"]
    keys = np.flatnonzero(flags & PacketFlag.KEY).tolist()
    visible = (flags & PacketFlag.HIDDEN) == 0
    decoding = _DigestDecoder(stream)
    for key, stop in zip(keys[1:], [*keys[2:], len(flags)], strict=False):
        numbers = [n for n in range(key, stop) if pts[n] >= pts[key]]
        try:
            alone = decoding.decode(numbers)
            proven = all(alone.get(n) == shown[n] for n in numbers if visible[n])
        except MediaError:
            proven = False
        if not proven or not visible[key]:
            flags[key] &= ~np.int64(PacketFlag.KEY)
    packets = pack_packets(packet_sizes(stream.packets), flags, pts, stream.packets["duration"])
    return replace(stream, packets=packets)


class _DigestDecoder:
    def __init__(self, stream: EncodedStream) -> None:
        self._codec = open_video_decoder(stream.parameters, stream.extradata)
        self._reorder = self._codec.reorder_depth
        self._lead_in = lead_in(stream.parameters)
        self._data = memoryview(bytes(stream.data[:]))
        self._offsets = stream.packets["offset"].tolist()
        self._sizes = packet_sizes(stream.packets).tolist()
        self._is_key = ((packet_flags(stream.packets) & PacketFlag.KEY) != 0).tolist()
        self._pixel_bytes: dict[str, list[int]] = {}

    def decode(self, numbers: Sequence[int]) -> dict[int, int]:
        """Decode packets; return the digests of frames by packet index, in presentation order."""
        codec, shown, number = self._codec, dict[int, int](), -1
        codec.flush_buffers()
        codec.reorder_depth = self._reorder
        with ffmpeg_errors(lambda: f"breaks at packet {number}"):
            for number in numbers:
                begin = self._offsets[number]
                part = self._data[begin : begin + self._sizes[number]]
                lead = self._lead_in if number == numbers[0] else b""
                packet = numbered_packet(number, part, lead, is_key=self._is_key[number])
                self._collect(codec, packet, shown)
            self._collect(codec, None, shown)
        return shown

    def _collect(self, codec: VideoCodecContext, packet: Any, shown: dict[int, int]) -> None:
        for frame in codec.decode(packet):
            if frame.is_corrupt:
                raise MediaError(f"packet {frame.pts} does not decode without concealment")
            if frame.pts is None or frame.pts in shown:
                raise MediaError(f"packet {frame.pts} gives several frames; re-encode it")
            shown[frame.pts] = self._digest(frame)

    def _digest(self, frame: VideoFrame) -> int:
        """Hash the visible pixels of the planes, without the padding of rows, whose bytes vary."""
        name = frame.format.name
        if name not in self._pixel_bytes:
            self._pixel_bytes[name] = [0] * len(frame.planes)
            for part in frame.format.components:
                self._pixel_bytes[name][part.plane] += (part.bits + 7) // 8
        found = Hasher(f"{name} {frame.width} {frame.height}".encode())
        for plane, n_bytes in zip(frame.planes, self._pixel_bytes[name], strict=True):
            rows = plane_rows(plane, plane.height, plane.width * n_bytes)
            found.update(np.ascontiguousarray(rows).data)
        return found.intdigest()
