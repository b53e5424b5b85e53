"""Demux audio into packets, and compute the exact time of every packet's samples.

A container rounds the time of each packet to a tick, which may be a millisecond long. As long as
packets follow each other without a gap, each rounded time gives a range for the start of the
stream. The intersection of these ranges is short, mostly a single value. If a packet begins later
than the previous packet ends, there is a gap, which is silence.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import MediaError
from shardio.format.types.streams import EncodedStream, PacketFlag, pack_packets, packet_sizes
from shardio.media.container import (
    audio_stream,
    check_complete,
    ffmpeg_errors,
    has_guessed_times,
    open_container,
    prefix_errors,
    stored_times,
)
from shardio.media.decoders import numbered_packet, open_audio_decoder

if TYPE_CHECKING:
    from av import Packet
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

LEAD_PACKETS: Final = 12
"""The number of packets to decode before a range: MP3 needs up to 9 of them, Opus 80 ms."""
_RESAMPLER_MARGIN: Final = 4096
"""The number of samples to add before and after a part, because a resampler reads them too."""
_MAX_RATE: Final = 1 << 24
_MAX_PARAMETER: Final = 1 << 62

_MAX_JITTER_S: Final = Fraction(1, 10)
"""A packet that is late by less than this, in seconds, counts as gapless, as in FFmpeg."""

_Numbers = npt.NDArray[np.int64]


def packet_times(
    times: Sequence[int | None],
    counts: Sequence[int],
    time_base: Fraction,
    rate: int,
    n_before: int = 0,
) -> _Numbers:
    """Return the time of the first sample of each packet, in samples.

    Args:
        times: the packet times in the container, in ticks of `time_base`; None if unknown.
        counts: the number of samples decoded from each packet.
        time_base: seconds per tick.
        rate: samples per second.
        n_before: the number of samples before the first audible sample.
    """
    n_earlier: _Numbers = np.cumsum(np.asarray(counts, np.int64)) - counts
    found = n_earlier.copy()
    for run in _gapless_runs(times, counts, time_base, rate):
        known = int(n_earlier[run.first]) + (0 if run.first else n_before)
        # Fill the array up to its end. The next run overwrites the elements of its own packets.
        found[run.first :] = n_earlier[run.first :] + run.start_time(known)
    return found


@dataclass(slots=True)
class _PacketRun:
    """A run of packets without gaps between them; `first` is the index of its first packet.

    The time of a packet, minus the duration of all earlier samples, is the start of the stream. As
    times are rounded to ticks, the start is only known to lie between `low` and `high`, in units of
    1 / (2 * `unit`) sample. A tick of the container is `tick` / `unit` samples.
    """

    first: int
    low: int
    high: int
    tick: int
    unit: int

    def start_time(self, known: int) -> int:
        """Return a start time within the bounds, in samples.

        If possible, choose it so that sample number `known` begins at a whole tick.
        """
        lead, tick = 2 * known * self.unit, 2 * self.tick
        at = -(-(self.low + lead) // tick) * tick - lead
        if at > self.high:
            at = (self.low + self.high) // 2
        return (at + self.unit) // (2 * self.unit)


def _gapless_runs(
    times: Sequence[int | None], counts: Sequence[int], time_base: Fraction, rate: int
) -> list[_PacketRun]:
    tick, unit = (time_base * rate).as_integer_ratio()  # a tick is tick / unit samples
    slack = tick if unit > 1 or tick > 1 else 0  # rounding changes a time by up to half a tick
    jitter = 2 * unit * rate * _MAX_JITTER_S
    runs: list[_PacketRun] = []
    n_earlier = 0
    for i, (time, count) in enumerate(zip(times, counts, strict=True)):
        if time is not None and count:
            start = 2 * (time * tick - n_earlier * unit)
            low, high = start - slack, start + slack
            if not runs:
                runs.append(_PacketRun(0, low, high, tick, unit))
            run = runs[-1]
            late = start - Fraction(run.low + run.high, 2)
            if max(low, run.low) <= min(high, run.high):
                run.low, run.high = max(low, run.low), min(high, run.high)
            elif late > jitter:
                runs.append(_PacketRun(i, low, high, tick, unit))
            elif late < -jitter:
                seconds = float(-late / (2 * unit * rate))
                raise MediaError(
                    f"its times go back by {seconds:.3f} s at packet {i}; re-encode it"
                )
        n_earlier += count
    return runs


def sample_rate(stream: EncodedStream) -> int:
    """Return the sample rate of an audio stream."""
    rate = stream.parameters.get("rate")
    if not isinstance(rate, int) or not 0 < rate <= _MAX_RATE:
        raise MediaError(f"a stream's rate is {rate!r}: expected samples per second")
    return rate


def first_sample_time(stream: EncodedStream) -> int:
    """Return the `pts` of sample 0, the first audible one; its unit is the sample."""
    first = int(stream.packets["pts"][0]) if len(stream.packets) else 0
    return first + int_parameter(stream, "skip")


def int_parameter(stream: EncodedStream, name: str, default: int = 0) -> int:
    """Return an integer parameter of a stream."""
    found = stream.parameters.get(name, default)
    if type(found) is not int or abs(found) > _MAX_PARAMETER:
        raise MediaError(f"a stream's {name} is {found!r}: expected a whole number")
    return found


def begin_of(stream: EncodedStream) -> Fraction:
    """Return the start of an audio stream, or of a part of one, in seconds."""
    text = stream.parameters.get("begin")
    if text is None:
        return Fraction(first_sample_time(stream), sample_rate(stream))
    over, _, under = str(text).partition(":")
    try:
        return Fraction(int(over), int(under))
    except (ValueError, ZeroDivisionError) as error:
        raise MediaError(
            f"a stream's begin is {text!r}: expected seconds such as '1:25'"
        ) from error


def nearest_sample(stream: EncodedStream, time: Fraction, rate: int) -> int:
    """Return the sample nearest to `time`, in seconds, as an index after resampling to `rate`."""
    since = time - Fraction(first_sample_time(stream), sample_rate(stream))
    return math.floor(since * rate + Fraction(1, 2))


def part_of(stream: EncodedStream, begin: Fraction, seconds: Fraction) -> EncodedStream | None:
    """Cut a part out of an audio stream, with all packets that are needed to decode the part.

    Each sample keeps its time and its value. Return None if the part contains no audible sample.

    Args:
        stream: a complete audio stream, which is not itself a part of another stream.
        begin: the start of the part in seconds, counted from the zero of the stream's `pts`.
        seconds: the duration of the part.
    """
    rate, index = sample_rate(stream), SampleIndex(stream)
    start = nearest_sample(stream, begin, rate)
    stop = start + math.floor(seconds * rate + Fraction(1, 2))
    low, high = max(start, index.extent[0]), min(stop, index.extent[1])
    if low >= high:
        return None
    around = index.packets(low - _RESAMPLER_MARGIN, high + _RESAMPLER_MARGIN)
    chosen = slice(max(0, around.start - LEAD_PACKETS), around.stop)
    packets = stream.packets[chosen].copy()
    base = int(packets["offset"][0])
    size = int(packet_sizes(packets).sum())
    packets["offset"] -= packets["offset"][0]
    parameters = {
        **stream.parameters,
        "skip": first_sample_time(stream) - int(packets["pts"][0]),
        "samples": stream.n_frames,
        "begin": f"{begin.numerator}:{begin.denominator}",
    }
    return replace(
        stream,
        parameters=parameters,
        packets=packets,
        data=bytes(stream.data[base : base + size]),
        n_frames=stop - start,
        duration=stop - start,
    )


class SampleIndex:
    """The range of samples of each packet of an audio stream; the first audible sample is 0.

    The silent samples of gaps are counted too, and belong to no packet.
    """

    def __init__(self, stream: EncodedStream) -> None:
        self.starts: _Numbers = stream.packets["pts"] - first_sample_time(stream)
        self.counts: _Numbers = stream.packets["duration"].astype(np.int64)
        self.ends: _Numbers = self.starts + self.counts
        some = self.starts[self.counts > 0]
        first = max(0, int(some[0])) if len(some) else 0
        n_all = int_parameter(stream, "samples", stream.n_frames)
        last = int(self.ends.max(initial=0))
        self.extent = first, max(first, min(n_all, last))
        """The index of the first sample in any packet, and the index after the last such sample."""

    def packets(self, start: int, stop: int) -> range:
        """Return the packets with samples `start` to `stop`, and perhaps one packet more."""
        begin = int(np.searchsorted(self.ends, start, "right"))
        end = int(np.searchsorted(self.ends, stop, "left")) + 1
        return range(begin, min(len(self.ends), end))


_SKIP_COUNTS = struct.Struct("<II")  # the samples to drop at the start and the end of a packet


def demux_audio(source: bytes | str, container: InputContainer, name: str) -> EncodedStream:
    """Demux the first audio stream of an open container; decode it to count its samples."""
    stream = audio_stream(container, name)
    with prefix_errors(name):
        return _AudioPacketReader(source, container, stream, name).stream()


def sound_of(source: bytes | str, name: str = "") -> EncodedStream | None:
    """Demux the first audio stream of a file, given by path or content; None if it has no audio.

    Errors call the file `name`, by default the path.
    """
    name = name or (source if isinstance(source, str) else "media in memory")
    with open_container(source, name, kind="audio") as container:
        if not container.streams.audio:
            return None
        stream = audio_stream(container, name)
        with prefix_errors(f"{name}: its audio"):
            reader = _AudioPacketReader(source, container, stream, name)
            return reader.stream() if reader.packets else None


class _AudioPacketReader:
    def __init__(
        self, source: bytes | str, container: InputContainer, stream: AudioStream, name: str
    ) -> None:
        codec = stream.codec_context
        self.parameters: dict[str, Any] = {
            "codec": codec.codec.canonical_name,
            "rate": codec.sample_rate,
            "layout": codec.layout.name,
            "sample_format": codec.format.name,
        }
        if (n_streams := len(container.streams.audio)) > 1:
            self.parameters |= {"stream": stream.index, "audio_streams": n_streams}
        self.extradata = codec.extradata or b""
        self.time_base = stream.time_base or Fraction(1, codec.sample_rate)
        self.packets: list[bytes] = []
        self.times: list[int | None] = []
        self.discarded: list[bool] = []
        self.n_before = self.n_after = end = 0
        is_guessed = has_guessed_times(container, stream)
        with ffmpeg_errors(lambda: f"breaks after {len(self.packets)} packets"):
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    raise MediaError(f"packet {len(self.packets)} is marked corrupt")
                if packet.size:
                    self._add(packet)
                    if packet.pts is not None:
                        end = max(end, packet.pts + (packet.duration or 0))
            check_complete(source, container, stream, end)
            if is_guessed:
                self.times = stored_times(source, name, stream.index)

    def _add(self, packet: Packet[AudioStream]) -> None:
        if packet.has_sidedata("skip_samples"):
            before, after = _SKIP_COUNTS.unpack(bytes(packet.get_sidedata("skip_samples"))[:8])
            self.n_before = self.n_before or before
            self.n_after += after
        self.packets.append(bytes(packet))
        self.times.append(packet.pts)
        self.discarded.append(packet.is_discard)

    def stream(self) -> EncodedStream:
        """Count the samples of each packet by decoding it, and build the stream."""
        parameters, extradata = self.parameters, self.extradata
        counts = np.zeros(len(self.packets), np.int64)
        codec = open_audio_decoder(parameters, extradata)
        for number, frame in decode_frames(codec, enumerate(self.packets)):
            counts[number] += frame.samples
            if frame.sample_rate != parameters["rate"] or frame.layout.name != parameters["layout"]:
                raise MediaError(f"its rate or channels change at packet {number}; re-encode it")
        # The container may mark packets as discarded. Discarded packets at the start are needed to
        # decode the packets that follow. Discarded packets that are not at the start were cut out
        # by an edit list, so their samples do not count.
        are_cut = np.array(self.discarded, bool)
        n_lead = int(np.argmin(are_cut)) if len(are_cut) and not are_cut.all() else 0
        n_before = max(self.n_before, int(counts[:n_lead].sum()))
        are_cut[:n_lead] = False
        counts[are_cut] = 0
        rate = parameters["rate"]
        pts = packet_times(self.times, counts.tolist(), self.time_base, rate, n_before)
        counted = np.flatnonzero(counts)
        n_samples = 0
        if len(counted):
            n_samples = int((pts + counts)[counted].max() - pts[0]) - n_before - self.n_after
        if n_samples <= 0:
            raise MediaError("its audio stream holds no sample")
        if n_before:
            parameters["skip"] = n_before
        flags = np.where(are_cut, int(PacketFlag.HIDDEN), int(PacketFlag.KEY))
        return EncodedStream(
            parameters=parameters,
            extradata=extradata,
            packets=pack_packets([len(part) for part in self.packets], flags, pts, counts),
            data=b"".join(self.packets),
            time_base=Fraction(1, rate),
            n_frames=n_samples,
            width=len(codec.layout.channels),
            height=rate,
            duration=n_samples,
        )


def decode_frames(
    codec: AudioCodecContext, parts: Iterable[tuple[int, bytes]], n_dropped: int = 0
) -> Iterator[tuple[int, AudioFrame]]:
    """Decode packets, pairs of (index, bytes), to pairs of (index, frame).

    Errors in the first `n_dropped` packets are ignored.
    """
    import av

    codec.flush_buffers()
    number = 0
    with ffmpeg_errors(lambda: f"packet {number} does not decode"):
        for at, (number, part) in enumerate(parts):
            try:
                frames = codec.decode(numbered_packet(number, part))
            except av.FFmpegError:
                if at >= n_dropped:
                    raise
                continue  # this packet may depend on earlier packets, which are not decoded here
            for frame in frames:
                if frame.is_corrupt and at >= n_dropped:
                    raise MediaError(f"packet {number} does not decode without concealment")
                yield number, frame
        for frame in codec.decode(None):
            yield number, frame
