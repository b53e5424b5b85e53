"""Sources of fields that are decoded: images, clips of videos, and audio.

Streams and decoders are cached, because the next clip is often from the same stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.statistics import DECODE, PHASE_TIMES, now_ns
from shardio.batch.layout import FixedSlot, VaryingSlot
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument, MediaError
from shardio.format.types.streams import EncodedStream
from shardio.media.audio import AudioDecoder
from shardio.media.audio_packets import begin_of, sample_rate
from shardio.media.clip_decoder import ClipDecoder
from shardio.media.decoders import get_or_create
from shardio.media.frames import CropPosition
from shardio.media.image import MAX_PIXELS, decode_image
from shardio.samples.clips import Clips, time_field_names
from shardio.samples.field_sources import (
    BatchRows,
    Bytes,
    FieldSource,
    IndexChunk,
    Present,
    RecordSource,
)
from shardio.samples.media import AudioField, clip_seconds, n_samples
from shardio.samples.video_index import FrameTimes, clip_frames
from shardio.shard.verification import Rows

Pixels = npt.NDArray[np.uint8]


class ImageSource(RecordSource):
    """A source of decoded images."""

    is_converted = True

    def convert(self, value: Any, chunk: IndexChunk, k: int) -> Any:
        """Return the pixels of an image; None if the image is missing."""
        return None if value is None else self._decode(value, *chunk.shard_rows[k])

    def fill_fixed(
        self, batch: BatchRows, slot: FixedSlot, out: Bytes, present: Present | None
    ) -> None:
        """Decode images that all have one size; a missing image is black."""
        self._decode_all(batch, list(out.reshape(-1, *slot.shape)))

    def fill_varying(self, batch: BatchRows, slot: VaryingSlot, used: int) -> int:
        """Decode images of varying size."""
        layout, memory = batch.layout, batch.memory
        sizes = np.zeros((batch.n_read, 3), np.int64)
        for shard, batch_rows, local in self._by_shard(batch):
            sizes[batch_rows] = self._sizes(shard, local)
        n_bytes = sizes.prod(1)
        starts, total = batch.reserve_values(slot, n_bytes, used)
        layout.shapes(memory.bytes, slot)[: batch.n_read] = sizes
        heap = memory.bytes[layout.heap :]
        columns = starts, n_bytes.tolist(), sizes.tolist()
        outs = [heap[at : at + n].reshape(size) for at, n, size in zip(*columns, strict=True)]
        self._decode_all(batch, outs)
        return total

    def _decode_all(self, batch: BatchRows, outs: list[Pixels]) -> None:
        for batch_row, shard, row, record in self._records(batch):
            if record is None:
                outs[batch_row][...] = 0
            else:
                self._decode(record, shard, row, outs[batch_row])

    def _decode(self, data: Any, shard: int, row: int, out: Pixels | None = None) -> Any:
        start_ns = now_ns()
        try:
            pixels = decode_image(data, out=out)
        except (MediaError, InvalidArgument) as error:
            raise self._media_error(error, shard, row) from error
        PHASE_TIMES.sums_ns[DECODE] += now_ns() - start_ns
        return pixels

    def _sizes(self, shard: int, rows: Rows) -> npt.NDArray[np.int64]:
        """Return the decoded shape of the images in `rows` of a shard; 0 if an image is missing."""
        records = self._dataset.files.reader(shard, self.name).records
        found = records.shapes(self.name, rows).astype(np.int64)
        found[:, 2] = 3
        found[~records.present(self.name, rows)] = 0
        n_pixels = found[:, 0] * found[:, 1]
        wrong = np.flatnonzero((found[:, :2].max(1) > MAX_PIXELS) | (n_pixels > MAX_PIXELS))
        for i in wrong[:1].tolist():
            height, width, _ = found[i].tolist()
            what = f"a picture of {height}x{width} pixels: expected 1 to {MAX_PIXELS} pixels"
            raise self._media_error(what, shard, int(rows[i]))
        return found


Numbers = npt.NDArray[np.int64]
VideoClips = tuple[list[tuple[int, Pixels]], list[CropPosition | None]]
"""The clips of one video, as pairs (start code, output array), and the crop of each clip."""

_MAX_VIDEO_STREAMS: Final = 2048
"""The maximum number of open videos, 5 KB each. Opening one takes as long as decoding 12 frames."""
_MAX_PACKETS: Final = 1 << 19
"""The maximum number of packets of all open videos: 18 MB, or 26 MB with times of frames."""


class ClipSource(FieldSource):
    """A source of clips of the videos in one field. Owns video decoders until `close`.

    The dataset is borrowed, so close this source first. `clips.clip.size` must be set.
    """

    def __init__(self, dataset: Dataset, clips: Clips) -> None:
        self._clips, clip = clips, clips.clip
        super().__init__(dataset, clip.field or "", clip.names)
        self._clip = clip
        self._decoder = ClipDecoder(_MAX_VIDEO_STREAMS, loop_filter=clip.loop_filter)
        self._n_packets = 0
        self._videos: OrderedDict[tuple[int, int], FrameTimes] = OrderedDict()

    def read_sample(self, chunk: IndexChunk, k: int) -> dict[str, Any]:
        """Return a clip and, with `times`, the times of its frames."""
        (shard, row), code = chunk.shard_rows[k], int(chunk.start_codes[k])
        made = np.empty([n or 0 for n in self._clip.array.shape], np.uint8)
        crop = None if chunk.draws is None else chunk.draws.crop_position(k)
        self._decode(shard, row, ([(code, made)], [crop]))
        return {self.name: made} | self._added_fields(shard, row, code)

    def fill_fixed(
        self, batch: BatchRows, slot: FixedSlot, out: Bytes, present: Present | None
    ) -> None:
        """Decode the clips of each video together; if `slot` is a time field, write the times."""
        chunk, part, rows = batch.chunk, batch.part, out.view(slot.dtype).reshape(-1, *slot.shape)
        videos: dict[tuple[int, int], VideoClips] = {}
        for i, code in enumerate(chunk.start_codes[part].tolist()):
            shard, row = chunk.shard_rows[part.start + i]
            if slot.name != self.name:
                rows[i] = self._added_fields(shard, row, code)[slot.name]
                continue
            pairs, crops = videos.setdefault((shard, row), ([], []))
            pairs.append((code, rows[i]))
            crops.append(None if chunk.draws is None else chunk.draws.crop_position(part.start + i))
        for (shard, row), clips in videos.items():
            self._decode(shard, row, clips)

    def _added_fields(self, shard: int, row: int, start_code: int) -> dict[str, Any]:
        """Return the time fields of one clip; an empty dict if the option `times` is False."""
        if not self._clip.times:
            return {}
        times, pts = self._frame_times(shard, row, start_code)
        base = np.array(times.time_base.as_integer_ratio())
        return dict(zip(time_field_names(self.name), (pts, base), strict=True))

    def _frames(self, start_code: int, times: FrameTimes) -> Numbers:
        """Return the frames of one clip."""
        return clip_frames(self._clips, start_code, times)

    def clip_time(self, shard: int, row: int, start_code: int) -> tuple[Fraction, Fraction]:
        """Return the time of a clip's first frame, and the clip's duration, in seconds."""
        times, pts = self._frame_times(shard, row, start_code)
        length = times.length * times.time_base
        return int(pts[0]) * times.time_base, clip_seconds(
            self._clip, length, times.stream.n_frames
        )

    def _frame_times(self, shard: int, row: int, start_code: int) -> tuple[FrameTimes, Numbers]:
        """Return the times of a video's frames, and the times of a clip's frames, in ticks."""
        try:
            times = self._open(shard, row)
            return times, times.pts[self._frames(start_code, times)]
        except (MediaError, InvalidArgument) as error:
            raise self._media_error(error, shard, row) from error

    def _decode(self, shard: int, row: int, clips: VideoClips) -> None:
        start_ns, (pairs, crops) = now_ns(), clips
        try:
            times = self._open(shard, row)
            made = [(self._frames(code, times), out) for code, out in pairs]
            self._decoder.decode_many(times.stream, made, crop=crops, pixels=self._clip.pixels)
        except (MediaError, InvalidArgument) as error:
            raise self._media_error(error, shard, row) from error
        PHASE_TIMES.sums_ns[DECODE] += now_ns() - start_ns

    def _open(self, shard: int, row: int) -> FrameTimes:
        found = self._videos.get((shard, row))
        if found is None:
            records = self._dataset.files.reader(shard, self.name).records
            (stream,) = records.values(self.name, np.array([row]))
            found = self._videos[shard, row] = FrameTimes(stream)
            self._n_packets += len(stream.packets)
            while len(self._videos) > 1 and (
                len(self._videos) > _MAX_VIDEO_STREAMS or self._n_packets > _MAX_PACKETS
            ):
                _, oldest = self._videos.popitem(last=False)
                self._n_packets -= len(oldest.stream.packets)
                self._decoder.forget(oldest.stream)
        else:
            self._videos.move_to_end((shard, row))
        return found

    def close(self) -> None:
        """Release the decoders and the open streams."""
        self._decoder.close()
        self._videos.clear()
        self._n_packets = 0


Samples = npt.NDArray[Any]
Span = tuple[int, int]
ClipTime = Callable[[int, int, int], tuple[Fraction, Fraction]]

_MAX_AUDIO_STREAMS: Final = 256
"""The maximum number of open audio streams. Each has its own decoder of 50 to 300 KB."""


class AudioSource(FieldSource):
    """A source of decoded audio. Owns audio decoders until `close`, and borrows the dataset.

    `clip_time` is `ClipSource.clip_time` if samples are clips, else None.
    """

    def __init__(
        self, dataset: Dataset, field: AudioField, clip_time: ClipTime | None = None
    ) -> None:
        super().__init__(dataset, field.name, (field.name, field.span))
        self._field, self._clip_time = field, clip_time
        self._decoder = AudioDecoder(max_streams=_MAX_AUDIO_STREAMS)
        self._streams: OrderedDict[tuple[int, int], list[EncodedStream]] = OrderedDict()

    def read_sample(self, chunk: IndexChunk, k: int) -> dict[str, Any]:
        """Return the audio and its span; missing audio is None, or silence of the fixed length."""
        field = self._field
        samples, span = self._audio(chunk, k)
        if samples is None and field.n_samples is not None:
            samples = np.zeros((field.n_samples, field.channels), field.sound.dtype)
        return {field.name: samples, field.span: np.array(span, np.int64)}

    def fill_fixed(
        self, batch: BatchRows, slot: FixedSlot, out: Bytes, present: Present | None
    ) -> None:
        """Write audio of fixed length, and its spans; missing audio is written as silence."""
        if slot.name == self.name:
            rows = out.view(slot.dtype).reshape(-1, *slot.shape)
            for i, samples in enumerate(self._decode_all(batch)):
                rows[i] = 0 if samples is None else samples

    def fill_varying(self, batch: BatchRows, slot: VaryingSlot, used: int) -> int:
        """Write audio of varying length."""
        layout, memory, found = batch.layout, batch.memory, self._decode_all(batch)
        n_bytes = np.array([0 if each is None else each.nbytes for each in found], np.int64)
        starts, total = batch.reserve_values(slot, n_bytes, used)
        heap, shapes = memory.bytes[layout.heap :], layout.shapes(memory.bytes, slot)
        for i, (start, samples) in enumerate(zip(starts, found, strict=True)):
            shapes[i] = 0 if samples is None else samples.shape
            if samples is not None:
                heap[start : start + samples.nbytes] = samples.reshape(-1).view(np.uint8)
        return total

    def _decode_all(self, batch: BatchRows) -> list[Samples | None]:
        """Return the decoded audio of a batch, and write the spans."""
        slot = next(each for each in batch.layout.fixed if each.name == self._field.span)
        spans = batch.layout.fixed_rows(batch.memory.bytes, slot, batch.n_read)
        numbers = range(batch.part.start, batch.part.stop)
        found = [self._audio(batch.chunk, k) for k in numbers]
        spans[:] = [span for _, span in found]
        return [samples for samples, _ in found]

    def _audio(self, chunk: IndexChunk, k: int) -> tuple[Samples | None, Span]:
        shard, row = chunk.shard_rows[k]
        stream, field, start_ns = self._stream(shard, row), self._field, now_ns()
        if stream is None:
            return None, (0, 0)
        try:
            begin, seconds = self._time_range(stream, shard, row, int(chunk.start_codes[k]))
            n = n_samples(seconds, field.rate) if field.n_samples is None else field.n_samples
            # If the stream has the right number of channels, do not mix its channels.
            channels = None if stream.width == field.channels else field.channels
            found, span = self._decoder.decode_at(
                stream, begin, n, rate=field.rate, channels=channels
            )
            if found.shape[1] != field.channels:
                raise MediaError(f"it has {found.shape[1]} channels; its index says {stream.width}")
        except (MediaError, InvalidArgument) as error:
            raise self._media_error(error, shard, row) from error
        PHASE_TIMES.sums_ns[DECODE] += now_ns() - start_ns
        if field.sound.dtype == "float32":
            return found, span
        scaled = np.rint(found * np.float32(32768)).clip(-32768, 32767)
        return scaled.astype(np.int16), span

    def _time_range(
        self, stream: EncodedStream, shard: int, row: int, start_code: int
    ) -> tuple[Fraction, Fraction]:
        """Return the time at which the audio begins, and the duration of the clip or the stream."""
        if self._clip_time is not None:
            return self._clip_time(shard, row, start_code)
        field, begin, rate = self._field, begin_of(stream), sample_rate(stream)
        if field.sound.where == "random" and field.n_samples is not None:
            n_starts = -(-stream.n_frames * field.rate // rate) - field.n_samples + 1
            begin += Fraction(start_code * max(1, n_starts) >> 64, field.rate)
        return begin, Fraction(stream.n_frames, rate)

    def _stream(self, shard: int, row: int) -> EncodedStream | None:

        def read() -> list[EncodedStream]:
            records, own = self._dataset.files.reader(shard, self.name).records, np.array([row])
            is_present = records.present(self.name, own)[0]
            return list(records.values(self.name, own)) if is_present else []

        found = get_or_create(self._streams, (shard, row), _MAX_AUDIO_STREAMS, read)
        return found[0] if found else None

    def close(self) -> None:
        """Release the decoders and the open streams."""
        self._decoder.close()
        self._streams.clear()
