"""Sound: cut into packets that know their samples, and any span of samples decoded from them.

A stream's ticks are its samples. Sample 0 is the first that is heard: what encoders put before it
(and a container says so) is left out; its `pts` tells where it lies beside the video.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardio.closing import Closing
from shardio.errors import InvalidArgument, MediaError
from shardio.format.streams import EncodedStream, PacketFlag, pack_packets, packet_sizes
from shardio.media.decoders import numbered_packet, open_audio_decoder
from shardio.media.opening import audio_stream, check_whole

if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame
    from av.container import InputContainer

__all__ = ["AudioDecoder", "demux_sound"]

Samples = npt.NDArray[np.float32]

_SKIP = struct.Struct("<II")  # samples to leave out at the beginning of a packet, and at its end
_LEAD_PACKETS = 12  # decoded and dropped before a span: MP3 looks 9 packets back, Opus 80 ms
_EXACT_CODECS = ("pcm_", "flac", "alac", "wavpack", "tta", "ape")
_TAPS = 64  # samples on either side that the resampler looks at, and some


def demux_sound(source: bytes | str, container: InputContainer, name: str) -> EncodedStream:
    """Cut an open container's first audio stream into packets; every one is decoded once.

    Raises:
        MediaError: there is no sound, it is damaged, or packets alone do not carry it.
    """
    import av

    stream = audio_stream(container, name)
    codec = stream.codec_context
    parameters = {
        "codec": codec.codec.canonical_name,
        "rate": codec.sample_rate,
        "layout": codec.layout.name,
        "sample_format": codec.format.name,
    }
    parts: list[bytes] = []
    skipped, end, first = [0, 0], 0, None
    try:
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise MediaError(f"packet {len(parts)} is marked corrupt")
            if not packet.size:
                continue
            if packet.has_sidedata("skip_samples"):
                before, after = _SKIP.unpack(bytes(packet.get_sidedata("skip_samples"))[:8])
                skipped = [skipped[0] or before, skipped[1] + after]
            parts.append(bytes(packet))
            if packet.pts is not None:
                first = packet.pts if first is None else first
                end = max(end, packet.pts + (packet.duration or 0))
        check_whole(source, container, stream, end)
    except av.FFmpegError as error:
        raise MediaError(f"{name}: breaks after {len(parts)} packets: {error.strerror}") from error
    except MediaError as error:
        raise MediaError(f"{name}: {error}") from error
    begin = (first or 0) * (stream.time_base or Fraction(0))
    try:
        return _counted(parameters, codec.extradata or b"", parts, begin, *skipped)
    except MediaError as error:
        raise MediaError(f"{name}: {error}") from error


def _counted(
    parameters: dict[str, Any],
    extradata: bytes,
    parts: list[bytes],
    begin: Fraction,
    n_before: int,
    n_after: int,
) -> EncodedStream:
    """Count the samples of each packet by decoding it."""
    counts = np.zeros(len(parts), np.int64)
    codec = open_audio_decoder(parameters, extradata)
    for number, frame in _frames(codec, enumerate(parts)):
        counts[number] += frame.samples
        if frame.sample_rate != parameters["rate"] or frame.layout.name != parameters["layout"]:
            raise MediaError(f"its rate or channels change at packet {number}; re-encode it")
    n_samples = int(counts.sum()) - n_before - n_after
    if n_samples <= 0:
        raise MediaError("its audio stream holds no sample")
    if n_before:
        parameters["skip"] = n_before
    pts = np.cumsum(counts) - counts + math.floor(begin * parameters["rate"])
    flags = np.full(len(parts), int(PacketFlag.KEY))
    return EncodedStream(
        parameters=parameters,
        extradata=extradata,
        packets=pack_packets([len(part) for part in parts], flags, pts, counts),
        data=b"".join(parts),
        time_base=Fraction(1, parameters["rate"]),
        n_frames=n_samples,
        width=len(codec.layout.channels),
        height=parameters["rate"],
        duration=n_samples,
    )


def _frames(
    codec: AudioCodecContext, parts: Any, n_dropped: int = 0
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


@dataclass(slots=True)
class _Opened:
    stream: EncodedStream
    codec: AudioCodecContext
    ends: npt.NDArray[np.int64]  # of the samples of each packet, in what is heard
    sizes: list[int]


class AudioDecoder(Closing):
    """Decodes spans of sound; the streams used last stay open.

    One thread; not to be shared among threads. `close()` or the end of `with` releases them.
    """

    def __init__(self, max_streams: int = 8) -> None:
        if max_streams < 1:
            raise InvalidArgument(f"max_streams is {max_streams}; at least 1 is needed")
        self._max_streams = max_streams
        self._opened: OrderedDict[int, _Opened] = OrderedDict()

    def decode(
        self,
        stream: EncodedStream,
        start: int,
        stop: int,
        *,
        rate: int | None = None,
        channels: int | None = None,
    ) -> Samples:
        """Decode samples `start` to `stop` as float32 of (samples, channels), from -1 to 1.

        Args:
            stream: sound.
            start, stop: in samples of `rate`, counted from the first that is heard. What lies
                behind the end is silence.
            rate: samples per second; None is the stream's. The same sample has the same value
                wherever the span begins, but for codecs that remember (MP3, AAC: by a hair).
            channels: 1 or 2, mixed by FFmpeg's rules; None is as many as the stream has.

        Raises:
            MediaError: the stream is damaged.
            InvalidArgument: the span or an option is not acceptable.
        """
        source_rate = int(stream.parameters["rate"])
        rate = source_rate if rate is None else rate
        if not 0 <= start <= stop or not 1000 <= rate <= 768_000 or channels not in (None, 1, 2):
            raise InvalidArgument(
                f"samples {start} to {stop} at a rate of {rate} in {channels} channels; expected "
                f"0 <= start <= stop, a rate from 1000 to 768000, 1 or 2 channels"
            )
        opened = self._open(stream)
        layout = {None: opened.codec.layout.name, 1: "mono", 2: "stereo"}[channels]
        # From a sample on that lies on both grids: the resampler's phase is then that of the whole.
        unit = source_rate // math.gcd(source_rate, rate)
        margin = 0 if rate == source_rate else _TAPS * max(1, -(-source_rate // rate))
        first = max(0, (start * source_rate // rate - margin) // unit * unit)
        last = min(stream.n_frames, -(-stop * source_rate // rate) + margin)
        found = _resampled(_span(opened, first, last), layout, source_rate, rate)
        offset = start - first * rate // source_rate
        out = np.zeros((stop - start, found.shape[1]), np.float32)
        part = found[offset : offset + len(out)]
        # The whole sound has this many samples: the resampler's last ones fade into nothing.
        n_whole = -(-stream.n_frames * rate // source_rate)
        part = part[: max(0, n_whole - start)]
        out[: len(part)] = part
        return out

    def _open(self, stream: EncodedStream) -> _Opened:
        found = self._opened.get(id(stream))
        if found is None:
            codec = open_audio_decoder(stream.parameters, stream.extradata)
            ends = np.cumsum(stream.packets["duration"].astype(np.int64))
            ends -= int(stream.parameters.get("skip", 0))
            found = _Opened(stream, codec, ends, packet_sizes(stream.packets).tolist())
            self._opened[id(stream)] = found
            if len(self._opened) > self._max_streams:
                self._opened.popitem(last=False)
        else:
            self._opened.move_to_end(id(stream))
        return found

    def close(self) -> None:
        """Release the decoders and the streams that were decoded last."""
        self._opened.clear()


def _span(opened: _Opened, start: int, stop: int) -> list[AudioFrame]:
    """Decode the frames of samples `start` to `stop`, cut to them."""
    from av import AudioFrame

    stream, ends = opened.stream, opened.ends
    begin = int(np.searchsorted(ends, start, "right"))
    end = min(len(ends), int(np.searchsorted(ends, stop, "left")) + 1)
    exact = str(stream.parameters["codec"]).startswith(_EXACT_CODECS)
    lead = 0 if exact else min(begin, _LEAD_PACKETS)
    frames = []
    offsets = stream.packets["offset"].tolist()
    parts = (
        (n, bytes(stream.data[offsets[n] : offsets[n] + opened.sizes[n]]))
        for n in range(begin - lead, end)
    )
    at = int(ends[begin - 1]) if begin else int(ends[0]) - int(stream.packets["duration"][0])
    for number, frame in _frames(opened.codec, parts, lead):
        if number < begin:
            continue
        keep = slice(max(0, start - at), max(0, stop - at))
        at += frame.samples
        values: npt.NDArray[Any] = frame.to_ndarray()
        if not frame.format.is_planar:
            values = values.reshape(-1, len(frame.layout.channels)).T
        values = np.ascontiguousarray(values[:, keep])
        if values.shape[1]:
            planar = frame.format.planar.name
            made = AudioFrame.from_ndarray(values, format=planar, layout=frame.layout.name)
            made.sample_rate = frame.sample_rate
            frames.append(made)
    return frames


def _resampled(frames: list[AudioFrame], layout: str, source_rate: int, rate: int) -> Samples:
    """Convert frames to float32 of (samples, channels)."""
    import av

    resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
    made: list[Any] = []
    position = 0
    try:
        for frame in frames:
            frame.pts, frame.time_base = position, Fraction(1, source_rate)
            position += frame.samples
            made += resampler.resample(frame)
        if frames:
            made += resampler.resample(None)
    except av.FFmpegError as error:
        raise MediaError(f"its sound cannot be resampled: {error.strerror}") from error
    arrays = [each.to_ndarray().T for each in made]
    n_channels = len(av.AudioLayout(layout).channels)
    return np.concatenate([np.zeros((0, n_channels), np.float32), *arrays])
