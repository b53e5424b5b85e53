"""Cuts sound into packets, untouched, that know how many samples they hold and when."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from shardio.errors import MediaError
from shardio.format.streams import EncodedStream, PacketFlag, pack_packets
from shardio.media.container import (
    audio_stream,
    check_whole,
    has_guessed_times,
    open_container,
    stored_times,
)
from shardio.media.decoders import numbered_packet, open_audio_decoder
from shardio.media.sound_times import packet_times

if TYPE_CHECKING:
    from av import Packet
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

__all__ = ["demux_sound", "frames_of", "sound_of"]

_SKIP = struct.Struct("<II")  # samples to leave out at the beginning of a packet, and at its end


def demux_sound(source: bytes | str, container: InputContainer, name: str) -> EncodedStream:
    """Cut an open container's first audio stream into packets; every one is decoded once.

    Raises:
        MediaError: there is no sound, it is damaged, or packets alone do not carry it.
    """
    stream = audio_stream(container, name)
    try:
        return _read(source, container, stream, name).stream()
    except MediaError as error:
        raise MediaError(f"{name}: {error}") from error


def sound_of(source: bytes | str, name: str = "") -> EncodedStream | None:
    """Cut the first audio stream of a file into packets; None where nothing is to be heard.

    Args:
        source: a path, or the bytes of a file.
        name: what errors call it; the path by default.

    Raises:
        MediaError: it is damaged, or packets alone do not carry it.
        FileNotFoundError: there is no such file.
    """
    name = name or (source if isinstance(source, str) else "media in memory")
    with open_container(source, name) as container:
        if not container.streams.audio:
            return None
        stream = audio_stream(container, name)
        try:
            cut = _read(source, container, stream, name)
            return cut.stream() if cut.parts else None
        except MediaError as error:
            raise MediaError(f"{name}: its sound: {error}") from error


def _read(source: bytes | str, container: InputContainer, stream: AudioStream, name: str) -> _Cut:
    """Take in every packet of an audio stream."""
    import av

    codec = stream.codec_context
    parameters: dict[str, Any] = {
        "codec": codec.codec.canonical_name,
        "rate": codec.sample_rate,
        "layout": codec.layout.name,
        "sample_format": codec.format.name,
    }
    if (n_streams := len(container.streams.audio)) > 1:
        parameters |= {"stream": stream.index, "audio_streams": n_streams}
    time_base = stream.time_base or Fraction(1, codec.sample_rate)
    cut, end = _Cut(time_base, parameters, codec.extradata or b""), 0
    is_guessed = has_guessed_times(container, stream)
    try:
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise MediaError(f"packet {len(cut.parts)} is marked corrupt")
            if not packet.size:
                continue
            cut.take(packet)
            if packet.pts is not None:
                end = max(end, packet.pts + (packet.duration or 0))
        check_whole(source, container, stream, end)
        if is_guessed:
            cut.times = stored_times(source, name, stream.index)
    except av.FFmpegError as error:
        raise MediaError(f"breaks after {len(cut.parts)} packets: {error.strerror}") from error
    return cut


@dataclass(slots=True)
class _Cut:
    """The packets of an audio stream, and what their container says of each."""

    time_base: Fraction
    parameters: dict[str, Any]
    extradata: bytes
    parts: list[bytes] = field(default_factory=list)
    times: list[int | None] = field(default_factory=list)
    are_left_out: list[bool] = field(default_factory=list)
    n_before: int = 0
    n_after: int = 0

    def take(self, packet: Packet[AudioStream]) -> None:
        """Take a packet in."""
        if packet.has_sidedata("skip_samples"):
            before, after = _SKIP.unpack(bytes(packet.get_sidedata("skip_samples"))[:8])
            self.n_before = self.n_before or before
            self.n_after += after
        self.parts.append(bytes(packet))
        self.times.append(packet.pts)
        self.are_left_out.append(packet.is_discard)

    def stream(self) -> EncodedStream:
        """Count the samples of each packet by decoding it, and find their times.

        Raises:
            MediaError: it is damaged, or packets alone do not carry it.
        """
        parameters, extradata = self.parameters, self.extradata
        counts = np.zeros(len(self.parts), np.int64)
        codec = open_audio_decoder(parameters, extradata)
        for number, frame in frames_of(codec, enumerate(self.parts)):
            counts[number] += frame.samples
            if frame.sample_rate != parameters["rate"] or frame.layout.name != parameters["layout"]:
                raise MediaError(f"its rate or channels change at packet {number}; re-encode it")
        # What is left out at the beginning is decoded for what follows; behind it, an edit list
        # takes packets out of the middle.
        are_out = np.array(self.are_left_out, bool)
        n_lead = int(np.argmin(are_out)) if len(are_out) and not are_out.all() else 0
        n_before = max(self.n_before, int(counts[:n_lead].sum()))
        are_out[:n_lead] = False
        counts[are_out] = 0
        rate = parameters["rate"]
        pts = packet_times(self.times, counts.tolist(), self.time_base, rate, n_before)
        heard = np.flatnonzero(counts)
        n_samples = 0
        if len(heard):
            n_samples = int((pts + counts)[heard].max() - pts[0]) - n_before - self.n_after
        if n_samples <= 0:
            raise MediaError("its audio stream holds no sample")
        if n_before:
            parameters["skip"] = n_before
        flags = np.where(are_out, int(PacketFlag.HIDDEN), int(PacketFlag.KEY))
        return EncodedStream(
            parameters=parameters,
            extradata=extradata,
            packets=pack_packets([len(part) for part in self.parts], flags, pts, counts),
            data=b"".join(self.parts),
            time_base=Fraction(1, rate),
            n_frames=n_samples,
            width=len(codec.layout.channels),
            height=rate,
            duration=n_samples,
        )


def frames_of(
    codec: AudioCodecContext, parts: Iterable[tuple[int, bytes]], n_dropped: int = 0
) -> Iterator[tuple[int, AudioFrame]]:
    """Decode numbered packets into (number of the packet, frame), one decoder after another."""
    import av

    codec.flush_buffers()
    number = 0
    try:
        for at, (number, part) in enumerate(parts):
            try:
                frames = codec.decode(numbered_packet(number, part))
            except av.FFmpegError:
                if at >= n_dropped:
                    raise
                continue  # what leads up to a span may lack what came before it
            for frame in frames:
                if frame.is_corrupt and at >= n_dropped:
                    raise MediaError(f"packet {number} does not decode without concealment")
                yield number, frame
        for frame in codec.decode(None):
            yield number, frame
    except av.FFmpegError as error:
        raise MediaError(f"packet {number} does not decode: {error.strerror}") from error
