"""Decode stored images, clips and audio, into the rows of a block or for the user's transform.

Used by `_engine.filling`. In this module, `rows` are numbered over all shards of the dataset, and
`row` is numbered within its shard. The tables and the decoder of a stream are cached for the
stream's next clip.
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
    """A decoder of the images of a dataset. It borrows the dataset.

    Args:
        dataset: the dataset with the images.
        names: the fields to decode.
    """

    def __init__(self, dataset: Dataset, names: tuple[str, ...]) -> None:
        self._dataset, self.names = dataset, frozenset(names)

    def decode(self, data: Any, name: str, shard: int, row: int, out: Pixels | None = None) -> Any:
        """Decode one image, into `out` if given.

        Args:
            data: the bytes of the image file.
            name, shard, row: the field, shard and row of the image, for messages.
            out: an array to fill; its shape is the shape stored in the index.

        Raises:
            MediaError: the image cannot be decoded, or does not have the shape of `out`.
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
        """Return a sample with its images decoded, in new memory."""
        for name in self.names:
            if sample[name] is not None:
                sample[name] = self.decode(sample[name], name, shard, row)
        return sample

    def shapes(self, name: str, shard: int, rows: Rows) -> npt.NDArray[np.int64]:
        """Return the decoded shape of the image in each of `rows` of a shard, (n, 3).

        The shape of a missing image is (0, 0, 0).

        Raises:
            ShardCorrupt: a stored shape is impossible.
            MediaError: an image is too large.
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
"""The start of a clip, as from `Clips.starts`, and the array for its frames."""
Wanted = tuple[list[Clip], list[CropPosition | CropBox | None]]
"""Clips of one video, and the crop of each clip."""

_MAX_VIDEO_STREAMS: Final = 2048
"""The maximum number of open videos. Opening one takes as long as decoding about 12 frames of
112x112; an open video takes 5 KB."""
_MAX_PACKETS: Final = 1 << 19
"""The maximum number of packets of all open videos. Their tables take 18 MB, or 26 MB with the
times of the frames."""


class _OpenVideo(NamedTuple):
    """A recently read video, and the times of its frames if clips need them."""

    stream: EncodedStream
    times: FrameTimes | None


class ClipReader(Closing):
    """A decoder of clips of the videos in one field of a dataset, which it borrows.

    The reader owns video decoders until `close`; close the reader before the dataset. `needs_times`
    must be True if `moment` will be called.
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
        """Decode clips into `out`, the clips of one video together.

        Args:
            out: the output, (clips, *shape of one clip).
            rows, shards: the row and the shard of each clip's video.
            draws, part: the draws of a batch, and the range of these draws that belongs to `out`.

        Raises:
            ShardCorrupt, MediaError: the message names the sample.
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
        """Return one clip in new memory."""
        made = np.empty([n or 0 for n in self._spec.array.shape], np.uint8)
        self._decode(shard, row, ([(start, made)], [place]))
        return made

    def fill_times(self, name: str, out: Numbers, rows: Rows, shards: Rows, starts: Rows) -> None:
        """Write one of the time fields of clips.

        Args:
            name: the name of the time field.
            out: the output, (clips, *shape of the field).
            rows, shards: the row and the shard of each clip's video.
            starts: the starts of the clips.

        Raises:
            ShardCorrupt, MediaError: the message names the sample.
        """
        local = (rows - self._dataset.starts.take(shards)).tolist()
        for i, (shard, row) in enumerate(zip(shards.tolist(), local, strict=True)):
            out[i] = self.times_of_sample(shard, row, int(starts[i]))[name]

    def times_of_sample(self, shard: int, row: int, start: int) -> dict[str, Numbers]:
        """Return the time fields of one clip; none unless the clips have `times`."""
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
        """Return the time of a clip's first frame, and the clip's duration, in seconds.

        Raises:
            ShardCorrupt, MediaError: the message names the sample.
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
        """Return an error that names the video."""
        path = self._dataset.files.reader(shard, self.name).path
        return MediaError(f"{path}, field {self.name!r}, sample {row}: {error}")

    def _open(self, shard: int, row: int) -> _OpenVideo:
        """Return a video, from the cache or read from its shard."""
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
        """Evict the least recently used streams, except the last one, until the limits are met."""
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
"""The maximum number of open audio streams. Each has its own decoder of 50 to 300 KB."""


class AudioReader(Closing):
    """A decoder of the audio in some fields of a dataset, which it borrows.

    The reader owns audio decoders until `close`; close the reader before the dataset.

    Args:
        dataset: the dataset with the audio.
        audio_spec: the format of the decoded audio.
        clips: if samples are clips, the decoder of their videos; borrowed.
    """

    def __init__(self, dataset: Dataset, audio_spec: AudioSpec, clips: ClipReader | None) -> None:
        self._dataset, self._clips = dataset, clips
        self._fields = {field.name: field for field in audio_spec.fields}
        self.names = frozenset(self._fields)
        self.spans = {field.span: field.name for field in audio_spec.fields}
        """For each field with the range of audio (`NAME_span`), the field of the audio."""
        self._decoder = AudioDecoder(max_streams=_MAX_AUDIO_STREAMS)
        self._streams: OrderedDict[tuple[str, int, int], EncodedStream | None] = OrderedDict()

    def decode(
        self, name: str, rows: Rows, shards: Rows, starts: Sequence[int]
    ) -> list[tuple[Samples, Span] | None]:
        """Return the audio of some samples, each with its span; None for missing audio.

        Args:
            name: the field.
            rows, shards: the row and the shard of each sample.
            starts: for each sample, the start of its clip, or the 64 random bits that determine the
                beginning of the audio.

        Raises:
            ShardCorrupt, MediaError: the message names the sample.
        """
        local = (rows - self._dataset.starts.take(shards)).tolist()
        places = zip(shards.tolist(), local, starts, strict=True)
        return [self.of_sample(name, *place) for place in places]

    def of_sample(self, name: str, shard: int, row: int, start: int) -> tuple[Samples, Span] | None:
        """Return the audio of one sample and its span; None if the audio is missing.

        Raises:
            ShardCorrupt, MediaError: the message names the sample.
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
        """Return the audio fields of a sample and their spans; missing audio is None or silence."""
        made: dict[str, Any] = {}
        for name, field in self._fields.items():
            found = self.of_sample(name, shard, row, start)
            samples, span = (self._nothing(field), (0, 0)) if found is None else found
            made[name], made[field.span] = samples, np.array(span, np.int64)
        return made

    def _nothing(self, field: AudioField) -> Samples | None:
        """Return the value of a missing sample: silence, or None if the length varies."""
        if field.n_samples is None:
            return None
        return np.zeros((field.n_samples, field.channels), field.sound.dtype)

    def _place(
        self, field: AudioField, stream: EncodedStream, shard: int, row: int, start: int
    ) -> tuple[Fraction, Fraction]:
        """Return the time at which the audio begins, and its duration if `field` has none."""
        if self._clips is not None:
            return self._clips.moment(shard, row, start)
        begin, rate = begin_of(stream), sample_rate(stream)
        if field.sound.where == "random" and field.n_samples is not None:
            n_starts = -(-stream.n_frames * field.rate // rate) - field.n_samples + 1
            begin += Fraction(start * max(1, n_starts) >> 64, field.rate)
        return begin, Fraction(stream.n_frames, rate)

    def _channels(self, field: AudioField, stream: EncodedStream) -> int | None:
        """Return the channel count to mix to; None if the stream has that many channels already."""
        return None if stream.width == field.channels else field.channels

    def _stream(self, name: str, shard: int, row: int) -> EncodedStream | None:
        """Return the stream of a sample, from the cache or its shard; None if it is missing."""
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
