"""Decode any range of audio samples from a stream of packets.

A tick of an audio stream is one sample. Sample 0 is the first audible sample: the encoder's padding
before it, whose length the container declares, is dropped. The times of packets (`pts`) count from
the same zero as the times of the video in the same file.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from shardio._base.callers import one_of
from shardio._base.classes import Closing
from shardio.errors import InvalidArgument
from shardio.format.types.streams import EncodedStream, packet_sizes
from shardio.media.audio_packets import (
    LEAD_PACKETS,
    SampleIndex,
    begin_of,
    decode_frames,
    nearest_sample,
    sample_rate,
)
from shardio.media.container import ffmpeg_errors
from shardio.media.decoders import get_or_create, open_audio_decoder

if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame

SoundType = Literal["float32", "int16"]
Start = Literal["first", "random"]

MIN_RATE, MAX_RATE = 1000, 768_000  # samples per second
_MAX_SECONDS: Final = 86_400


@dataclass(frozen=True, slots=True)
class Sound:
    """The format to which a loader decodes fields of type `Audio`.

    The value of a field NAME is an array of (samples, channels). An additional field NAME_span,
    int64 (2,), holds the range of the samples that come from the audio. Samples outside this range
    are silence.

    Args:
        rate: the sample rate in Hz to resample to; None keeps the stored rate, which must be the
            same in all rows.
        channels: 1 or 2, mixed by FFmpeg's rules; None keeps the stored channels, whose count must
            be the same in all rows.
        seconds: the length of the array in seconds: an integer, a `Fraction`, a string such as
            "0.64" or a float. None means the length of the clip if samples are clips of videos,
            otherwise the length of the audio. Shorter audio is padded with silence; of longer
            audio, only the part that `where` selects is returned.
        dtype: `"float32"`, from -1 to 1, or `"int16"`.
        where: `"first"` for the first `seconds` of the audio; `"random"` for a part whose start is
            drawn uniformly. Each time that the audio occurs in an epoch, a new start is drawn.
            `"random"` requires `seconds`, and is not available if samples are clips.

    If samples are clips of videos, the audio begins with the first frame of the clip.

    Raises:
        InvalidArgument: an option is invalid.
    """

    rate: int | None = 16_000
    channels: int | None = 1
    seconds: int | float | str | Fraction | None = None
    dtype: SoundType = "float32"
    where: Start = "first"

    def __post_init__(self) -> None:
        rate = self.rate
        if rate is not None and (type(rate) is not int or not MIN_RATE <= rate <= MAX_RATE):
            raise InvalidArgument(
                f"rate must be a whole number from {MIN_RATE} to {MAX_RATE:,}, samples per "
                f"second, or None; found {rate!r}"
            )
        if type(self.channels) is bool or self.channels not in (None, 1, 2):
            raise InvalidArgument(f"channels must be 1, 2 or None; found {self.channels!r}")
        for name, choices in (("dtype", get_args(SoundType)), ("where", get_args(Start))):
            one_of(name, getattr(self, name), choices)
        if self.seconds is not None:
            object.__setattr__(self, "seconds", _parse_seconds(self.seconds))
        elif self.where == "random":
            raise InvalidArgument('where="random" needs seconds, the length of the drawn part')

    @property
    def length(self) -> Fraction | None:
        """The exact value of `seconds`."""
        return None if self.seconds is None else Fraction(self.seconds)


def _parse_seconds(value: Any) -> Fraction:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
            raise ValueError
        # Convert a float by its decimal repr: 0.64 then becomes exactly 64/100.
        found = Fraction(repr(value) if isinstance(value, float) else value)
    except (ValueError, ZeroDivisionError):
        found = Fraction(0)
    if not 0 < found <= _MAX_SECONDS:
        raise InvalidArgument(
            f"seconds must be a number above 0 and up to {_MAX_SECONDS:,}, or None; found {value!r}"
        )
    return found


Samples = npt.NDArray[np.float32]

_EXACT_CODECS = ("pcm_", "flac", "alac", "wavpack", "tta", "ape")
_MAX_SAMPLES = 1 << 31  # samples per call; only a damaged packet table asks for more
_TAPS = 64  # the resampler reads at most this number of samples on each side of a sample


@dataclass(slots=True)
class _OpenAudio:
    stream: EncodedStream
    codec: AudioCodecContext
    sample_index: SampleIndex

    def packets(self, packets: range) -> Iterator[tuple[int, bytes]]:
        table = self.stream.packets[packets.start : packets.stop]
        columns = table["offset"].tolist(), packet_sizes(table).tolist()
        for number, offset, size in zip(packets, *columns, strict=True):
            yield number, bytes(self.stream.data[offset : offset + size])


class AudioDecoder(Closing):
    """A decoder of ranges of audio that keeps recently used streams open. Not thread-safe."""

    def __init__(self, max_streams: int = 8) -> None:
        if max_streams < 1:
            raise InvalidArgument(f"max_streams is {max_streams}; at least 1 is needed")
        self._max_streams = max_streams
        self._open_streams: OrderedDict[int, _OpenAudio] = OrderedDict()

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
            stream: an audio stream.
            start, stop: indices of samples after resampling to `rate`, counted from the first
                audible sample. Samples after the end of the stream are silence. The value of a
                sample does not depend on `start`, except slightly for codecs whose decoder keeps a
                state from one packet to the next (MP3, AAC).
            rate: the sample rate in Hz; None keeps the rate of the stream.
            channels: 1 or 2, mixed by FFmpeg's rules; None keeps the channels of the stream.

        Raises:
            MediaError: the stream is damaged.
            InvalidArgument: the range or an option is not valid.
        """
        rate = sample_rate(stream) if rate is None else rate
        if not 0 <= start <= stop or rate < 1:
            raise InvalidArgument(
                f"samples {start} to {stop} at a rate of {rate}; expected 0 <= start <= stop"
            )
        begin = begin_of(stream) + Fraction(start, rate)
        found, _ = self.decode_at(stream, begin, stop - start, rate=rate, channels=channels)
        end = -(-stream.n_frames * rate // sample_rate(stream))
        found[max(0, end - start) :] = 0
        return found

    def decode_at(
        self,
        stream: EncodedStream,
        begin: Fraction,
        n_samples: int,
        *,
        rate: int,
        channels: int | None = None,
    ) -> tuple[Samples, tuple[int, int]]:
        """Decode `n_samples` samples, beginning at `begin`; samples outside the stream are silence.

        Args:
            stream: an audio stream.
            begin: the start in seconds, counted from the zero of the stream's `pts`. The first
                sample of the result is the sample nearest to `begin`.
            n_samples: the number of samples to return, after resampling to `rate`.
            rate, channels: as in `decode`.

        Returns:
            An array, float32 of (samples, channels), and the range of its samples that are within
            the stream; (0, 0) if none is.

        Raises:
            MediaError, InvalidArgument: as in `decode`.
        """
        is_valid = MIN_RATE <= rate <= MAX_RATE and channels in (None, 1, 2)
        if not 0 <= n_samples <= _MAX_SAMPLES or not is_valid:
            raise InvalidArgument(
                f"{n_samples} samples at a rate of {rate} in {channels} channels; expected 0 to "
                f"{_MAX_SAMPLES}, a rate from {MIN_RATE} to {MAX_RATE}, 1 or 2 channels"
            )
        opened, first = self._open(stream), nearest_sample(stream, begin, rate)
        found = self._decode_range(opened, first, first + n_samples, rate, channels)
        ends = (-(-n * rate // sample_rate(stream)) - first for n in opened.sample_index.extent)
        low, high = (min(max(0, end), n_samples) for end in ends)
        return found, ((low, high) if low < high else (0, 0))

    def _decode_range(
        self, opened: _OpenAudio, start: int, stop: int, rate: int, channels: int | None
    ) -> Samples:
        """Resample the stream to `rate`; return samples `start` to `stop` of the result."""
        source_rate, n_all = sample_rate(opened.stream), opened.sample_index.extent[1]
        layout = {None: opened.codec.layout.name, 1: "mono", 2: "stereo"}[channels]
        n_channels = channels or len(opened.codec.layout.channels)
        out = np.zeros((stop - start, n_channels), np.float32)
        begin, end = max(0, start), min(stop, -(-n_all * rate // source_rate))
        if begin >= end:
            return out
        # Start at a time at which both rates have a sample. The resampler then has the same phase
        # as if the resampler had started at sample 0.
        unit = source_rate // math.gcd(source_rate, rate)
        margin = 0 if rate == source_rate else _TAPS * max(1, -(-source_rate // rate))
        first = max(0, (begin * source_rate // rate - margin) // unit * unit)
        last = min(n_all, -(-end * source_rate // rate) + margin)
        found = _resample(_decode_span(opened, first, last), layout, rate)
        # Cut the result at `end`, because the resampler appends samples that fade out.
        offset = begin - first * rate // source_rate
        part = found[offset : offset + end - begin]
        out[begin - start :][: len(part)] = part
        return out

    def _open(self, stream: EncodedStream) -> _OpenAudio:
        def make() -> _OpenAudio:
            codec = open_audio_decoder(stream.parameters, stream.extradata)
            return _OpenAudio(stream, codec, SampleIndex(stream))

        return get_or_create(self._open_streams, id(stream), self._max_streams, make)

    def close(self) -> None:
        """Release all decoders and streams."""
        self._open_streams.clear()


def _decode_span(opened: _OpenAudio, start: int, stop: int) -> AudioFrame | None:
    """Decode samples `start` to `stop`, with silence in gaps; None if there is no sample."""
    sample_index = opened.sample_index
    wanted = sample_index.packets(start, stop)
    stream = opened.stream
    exact = str(stream.parameters["codec"]).startswith(_EXACT_CODECS)
    lead = 0 if exact else min(wanted.start, LEAD_PACKETS)
    made: list[npt.NDArray[Any]] = []
    like: AudioFrame | None = None
    position, latest, at = start, -1, 0
    parts = opened.packets(range(wanted.start - lead, wanted.stop))
    # Only decoders of `_EXACT_CODECS` can be reused. For other codecs, flushing does not reset the
    # whole state of a decoder: an AAC decoder keeps the state of a noise generator.
    codec = opened.codec if exact else open_audio_decoder(stream.parameters, stream.extradata)
    for number, frame in decode_frames(codec, parts, lead):
        if number < wanted.start or not sample_index.counts[number]:
            continue
        if number != latest:
            latest, at = number, int(sample_index.starts[number])
        begin, end = max(at, position), min(at + frame.samples, stop)
        if begin < end:
            like = like or frame
            values: npt.NDArray[Any] = frame.to_ndarray()
            if not frame.format.is_planar:
                values = values.reshape(-1, len(frame.layout.channels)).T
            if position < begin:
                silence = 128 if values.dtype == np.uint8 else 0
                made.append(np.full((len(values), begin - position), silence, values.dtype))
            made.append(values[:, begin - at : end - at])
            position = end
        at += frame.samples
    return None if like is None else _concatenate(like, made)


def _concatenate(like: AudioFrame, parts: list[npt.NDArray[Any]]) -> AudioFrame:
    """Join arrays of (channels, samples) into one frame, so that one call resamples all of them."""
    from av import AudioFrame

    values = np.concatenate(parts, axis=1)
    made = AudioFrame.from_ndarray(
        np.ascontiguousarray(values), format=like.format.planar.name, layout=like.layout.name
    )
    made.sample_rate, made.pts = like.sample_rate, 0
    made.time_base = Fraction(1, like.sample_rate)
    return made


def _resample(frame: AudioFrame | None, layout: str, rate: int) -> Samples:
    import av

    n_channels = len(av.AudioLayout(layout).channels)
    if frame is None:
        return np.zeros((0, n_channels), np.float32)
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
    with ffmpeg_errors(lambda: "its audio cannot be resampled"):
        made = [*resampler.resample(frame), *resampler.resample(None)]
    arrays: list[Any] = [each.to_ndarray() for each in made]
    return np.concatenate(arrays, axis=1).T if arrays else np.zeros((0, n_channels), np.float32)
