"""Decode stored pictures, clips and sound, into the rows of a block or for the user's transform.

The tables and decoder of an opened stream are kept for its next clip. Used by `filler`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing
from shardio._base.statistics import DECODE, PHASE_TIMES, now_ns
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument, MediaError
from shardio.format.types.streams import EncodedStream
from shardio.media.audio import AudioDecoder
from shardio.media.audio_packets import begin_of, sample_rate
from shardio.media.clip_decoder import ClipDecoder
from shardio.media.frames import CropBox, CropPosition
from shardio.media.image import MAX_PIXELS, decode_image
from shardio.samples.clips import ClipDraws, Clips, ClipSpec, time_field_names
from shardio.samples.media import AudioField, AudioSpec, clip_seconds, n_samples
from shardio.samples.video_index import FrameTimes, clip_frames
from shardio.shard.verification import Rows

Pixels = npt.NDArray[np.uint8]


class ImageReader:
    """A decoder of the pictures of a dataset, which it borrows.

    Args:
        dataset: holds the pictures.
        names: the fields that are decoded.
    """

    def __init__(self, dataset: Dataset, names: tuple[str, ...]) -> None:
        self._dataset, self.names = dataset, frozenset(names)

    def decode(self, data: Any, name: str, shard: int, row: int, out: Pixels | None = None) -> Any:
        """Decode one picture, into `out` if that is given.

        Args:
            data: its file.
            name, shard, row: its place, for messages; the row in its shard.

        Raises:
            MediaError: it cannot be decoded, or its size is not the declared one.
        """
        start_ns = now_ns()
        try:
            pixels = decode_image(data, out=out)
        except (MediaError, InvalidArgument) as error:
            path = self._dataset.files.reader(shard, name).path
            raise MediaError(f"{path}, field {name!r}, sample {row}: {error}") from error
        PHASE_TIMES.sums_ns[DECODE] += now_ns() - start_ns
        return pixels

    def of_sample(self, sample: dict[str, Any], shard: int, row: int) -> dict[str, Any]:
        """Return a sample with its pictures decoded, in new memory."""
        for name in self.names:
            if sample[name] is not None:
                sample[name] = self.decode(sample[name], name, shard, row)
        return sample

    def shapes(self, name: str, shard: int, rows: Rows) -> npt.NDArray[np.int64]:
        """Return the decoded shape of some rows of a shard, (n, 3); zeros without a picture.

        Raises:
            ShardCorrupt: no picture has such a shape.
            MediaError: it is too large.
        """
        reader = self._dataset.files.reader(shard, name)
        found = reader.records.shapes(name, rows).astype(np.int64)
        found[:, 2] = 3
        found[~reader.records.present(name, rows)] = 0
        most = found[:, 0] * found[:, 1]
        wrong = np.flatnonzero((found[:, :2].max(1) > MAX_PIXELS) | (most > MAX_PIXELS))
        for i in wrong[:1].tolist():
            height, width, _ = found[i].tolist()
            raise MediaError(
                f"{reader.path}, field {name!r}, sample {int(rows[i])}: a picture of "
                f"{height}x{width} pixels: expected 1 to {MAX_PIXELS} pixels"
            )
        return found


Numbers = npt.NDArray[np.int64]
Clip = tuple[int, Pixels]
"""The start of a clip, as in `Cuts`, and the array for its frames."""
Wanted = tuple[list[Clip], list[CropPosition | CropBox | None]]
"""Clips of one video, and where the pictures of each are cropped."""

_MAX_VIDEO_STREAMS: Final = 2048
"""Opening one takes about as long as decoding 12 frames of 112x112; it keeps 5 KB."""
_MAX_PACKETS: Final = 1 << 19
"""Of all streams that are open; 18 MB of tables, 26 MB with the times of their frames."""


class _OpenVideo(NamedTuple):
    """A video that was read lately, and when its frames are shown if clips need to know."""

    stream: EncodedStream
    times: FrameTimes | None


class ClipReader(Closing):
    """A decoder of clips of the videos in one field of a dataset, which it borrows.

    It owns decoders until `close`, and is closed before the dataset. `needs_times` is True if
    moments will be requested.
    """

    def __init__(
        self, dataset: Dataset, spec: ClipSpec, clips: Clips, *, needs_times: bool = False
    ) -> None:
        self._dataset, self._spec, self._clips = dataset, spec, clips
        self.name, self.names = spec.name, spec.names
        self._needs_times = needs_times or spec.clip.goes_by_times or spec.clip.times
        self._decoder = ClipDecoder(max_streams=_MAX_VIDEO_STREAMS)
        self._n_packets = 0
        self._streams: OrderedDict[tuple[int, int], _OpenVideo] = OrderedDict()

    def fill(
        self, out: Pixels, rows: Rows, shards: Rows, draws: ClipDraws | None, part: slice
    ) -> None:
        """Decode the clips of a batch, those of one video together.

        Args:
            out: (clips, *the shape of one).
            rows, shards: of their videos, in all shards.
            draws, part: where they begin, and which of these draws they are.

        Raises:
            ShardCorrupt, MediaError: naming the sample.
        """
        if draws is None:
            raise AssertionError("clips are drawn by the view that has them")
        starts = draws.starts[part].tolist()
        videos: dict[tuple[int, int], Wanted] = {}
        local = (rows - self._dataset.starts.take(shards)).tolist()
        for i, (shard, row) in enumerate(zip(shards.tolist(), local, strict=True)):
            clips, places = videos.setdefault((shard, row), ([], []))
            clips.append((starts[i], out[i]))
            places.append(draws.place(part.start + i))
        for (shard, row), wanted in videos.items():
            self._decode(shard, row, wanted)

    def of_sample(self, shard: int, row: int, start: int, place: CropPosition | None) -> Pixels:
        """One clip in new memory; the row is that in its shard."""
        made = np.empty([n or 0 for n in self._spec.array.shape], np.uint8)
        self._decode(shard, row, ([(start, made)], [place]))
        return made

    def fill_times(self, name: str, out: Numbers, rows: Rows, shards: Rows, starts: Rows) -> None:
        """Write the times of the clips of a batch into one of the fields that have them.

        Args:
            name: which of the fields.
            out: (clips, *the shape of one).
            rows, shards: of their videos, in all shards.
            starts: where they begin.

        Raises:
            ShardCorrupt, MediaError: naming the sample.
        """
        local = (rows - self._dataset.starts.take(shards)).tolist()
        for i, (shard, row) in enumerate(zip(shards.tolist(), local, strict=True)):
            out[i] = self.times_of_sample(shard, row, int(starts[i]))[name]

    def times_of_sample(self, shard: int, row: int, start: int) -> dict[str, Numbers]:
        """Return the time fields of one clip, if requested; the row is within its shard."""
        if not self._spec.clip.times:
            return {}
        try:
            stream, times = self._open(shard, row)
            if times is None:
                raise AssertionError("times are kept where they are asked for")
            frames = np.asarray(self._frames(start, times))
        except (MediaError, InvalidArgument) as error:
            raise self._placed(error, shard, row) from error
        base = np.array([stream.time_base.numerator, stream.time_base.denominator])
        return dict(zip(time_field_names(self.name), (times.pts[frames], base), strict=True))

    def moment(self, shard: int, row: int, start: int) -> tuple[Fraction, Fraction]:
        """When the first frame of a clip is shown, and how long the clip is, in seconds.

        Raises:
            ShardCorrupt, MediaError: naming the sample.
        """
        try:
            stream, times = self._open(shard, row)
            if times is None:
                raise AssertionError("times are kept where they are needed")
            first = int(self._frames(start, times)[0])
        except (MediaError, InvalidArgument) as error:
            raise self._placed(error, shard, row) from error
        seconds = clip_seconds(self._spec.clip, times.length * stream.time_base, stream.n_frames)
        return int(times.pts[first]) * stream.time_base, seconds

    def _frames(self, start: int, times: FrameTimes | None) -> range | Numbers:
        clip = self._spec.clip
        if times is not None and clip.goes_by_times:
            return clip_frames(self._clips, start, times)
        return range(start, start + clip.span, clip.stride)

    def _decode(self, shard: int, row: int, wanted: Wanted) -> None:
        start_ns, (clips, places) = now_ns(), wanted
        try:
            stream, times = self._open(shard, row)
            made = [(self._frames(start, times), out) for start, out in clips]
            self._decoder.decode_many(stream, made, crop=places, pixels=self._spec.clip.pixels)
        except (MediaError, InvalidArgument) as error:
            raise self._placed(error, shard, row) from error
        PHASE_TIMES.sums_ns[DECODE] += now_ns() - start_ns

    def _placed(self, error: Exception, shard: int, row: int) -> MediaError:
        """Return the error of a video, naming it."""
        path = self._dataset.files.reader(shard, self.name).path
        return MediaError(f"{path}, field {self.name!r}, sample {row}: {error}")

    def _open(self, shard: int, row: int) -> _OpenVideo:
        """Return the stream of a video, a recent one or read again."""
        found = self._streams.get((shard, row))
        if found is None:
            records = self._dataset.files.reader(shard, self.name).records
            (stream,) = records.values(self.name, np.array([row]))
            found = _OpenVideo(stream, FrameTimes(stream) if self._needs_times else None)
            self._streams[shard, row] = found
            self._n_packets += len(stream.packets)
            self._forget()
        else:
            self._streams.move_to_end((shard, row))
        return found

    def _forget(self) -> None:
        """Evict the least recently used streams, but not the latest one."""
        while len(self._streams) > 1 and (
            len(self._streams) > _MAX_VIDEO_STREAMS or self._n_packets > _MAX_PACKETS
        ):
            _, (stream, _) = self._streams.popitem(last=False)
            self._n_packets -= len(stream.packets)
            self._decoder.forget(stream)

    def close(self) -> None:
        """Release the decoders, and the streams that are open."""
        self._decoder.close()
        self._streams.clear()
        self._n_packets = 0


Samples = npt.NDArray[Any]
Span = tuple[int, int]

_MAX_AUDIO_STREAMS: Final = 256
"""Each has its own decoder: 50 to 300 KB."""


class AudioReader(Closing):
    """A decoder of the sound in some fields of a dataset, which it borrows.

    It owns decoders until `close`, and is closed before the dataset.

    Args:
        dataset: holds the sound.
        audio_spec: the form in which it is delivered.
        clips: the decoder of the videos in the same samples, if samples are clips; borrowed.
    """

    def __init__(self, dataset: Dataset, audio_spec: AudioSpec, clips: ClipReader | None) -> None:
        self._dataset, self._clips = dataset, clips
        self._fields = {field.name: field for field in audio_spec.fields}
        self.names = frozenset(self._fields)
        self.spans = {field.span: field.name for field in audio_spec.fields}
        """The fields that say where in the sound of another there is some, each with that one."""
        self._decoder = AudioDecoder(max_streams=_MAX_AUDIO_STREAMS)
        self._streams: OrderedDict[tuple[str, int, int], EncodedStream | None] = OrderedDict()

    def decode(
        self, name: str, rows: Rows, shards: Rows, starts: Sequence[int]
    ) -> list[tuple[Samples, Span] | None]:
        """Return the sound of some samples, each with its span; None where there is none.

        Args:
            name: of the field.
            rows, shards: of the samples, in all shards.
            starts: what decides where each sound begins: the start of its clip, or a draw.

        Raises:
            ShardCorrupt, MediaError: naming the sample.
        """
        local = (rows - self._dataset.starts.take(shards)).tolist()
        places = zip(shards.tolist(), local, starts, strict=True)
        return [self.of_sample(name, *place) for place in places]

    def of_sample(self, name: str, shard: int, row: int, start: int) -> tuple[Samples, Span] | None:
        """Return the sound of one sample and its span; the row is within its shard.

        Raises:
            ShardCorrupt, MediaError: naming the sample.
        """
        stream = self._stream(name, shard, row)
        if stream is None:
            return None
        field = self._fields[name]
        start_ns = now_ns()
        try:
            begin, seconds = self._place(field, stream, shard, row, start)
            n = n_samples(seconds, field.rate) if field.n_samples is None else field.n_samples
            found, span = self._decoder.decode_at(
                stream, begin, n, rate=field.rate, channels=self._channels(field, stream)
            )
            if found.shape[1] != field.channels:
                raise MediaError(f"it has {found.shape[1]} channels; its index says {stream.width}")
        except (MediaError, InvalidArgument) as error:
            path = self._dataset.files.reader(shard, name).path
            raise MediaError(f"{path}, field {name!r}, sample {row}: {error}") from error
        PHASE_TIMES.sums_ns[DECODE] += now_ns() - start_ns
        return _typed(found, field), span

    def fields_of(self, shard: int, row: int, start: int) -> dict[str, Any]:
        """Return the sound fields of a sample and their spans; absent sound is None or silence."""
        made: dict[str, Any] = {}
        for name, field in self._fields.items():
            found = self.of_sample(name, shard, row, start)
            samples, span = (self._nothing(field), (0, 0)) if found is None else found
            made[name], made[field.span] = samples, np.array(span, np.int64)
        return made

    def _nothing(self, field: AudioField) -> Samples | None:
        """Return the stand-in for absent sound."""
        if field.n_samples is None:
            return None
        return np.zeros((field.n_samples, field.channels), field.sound.dtype)

    def _place(
        self, field: AudioField, stream: EncodedStream, shard: int, row: int, start: int
    ) -> tuple[Fraction, Fraction]:
        """From when on a sound is wanted, and for how many seconds where `field` does not say."""
        if self._clips is not None:
            return self._clips.moment(shard, row, start)
        begin, rate = begin_of(stream), sample_rate(stream)
        if field.sound.where == "random" and field.n_samples is not None:
            n_starts = -(-stream.n_frames * field.rate // rate) - field.n_samples + 1
            begin += Fraction(start * max(1, n_starts) >> 64, field.rate)
        return begin, Fraction(stream.n_frames, rate)

    def _channels(self, field: AudioField, stream: EncodedStream) -> int | None:
        """Return the number of channels to decode to; None if the stream has the field's own."""
        return None if stream.width == field.channels else field.channels

    def _stream(self, name: str, shard: int, row: int) -> EncodedStream | None:
        """Return the stream of a sample, a recent one or read again; None if it has none."""
        key = name, shard, row
        if key in self._streams:
            self._streams.move_to_end(key)
            return self._streams[key]
        records, own = self._dataset.files.reader(shard, name).records, np.array([row])
        found = None
        if records.present(name, own)[0]:
            (found,) = records.values(name, own)
        self._streams[key] = found
        if len(self._streams) > _MAX_AUDIO_STREAMS:
            self._streams.popitem(last=False)
        return found

    def close(self) -> None:
        """Release the decoders, and the streams that are open."""
        self._decoder.close()
        self._streams.clear()


def _typed(found: npt.NDArray[np.float32], field: AudioField) -> Samples:
    if field.sound.dtype == "float32":
        return found
    scaled: Samples = np.rint(found * np.float32(32768)).clip(-32768, 32767).astype(np.int16)
    return scaled
