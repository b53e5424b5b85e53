"""Decode stored pictures and clips, into the rows of a block or for the user's transform.

The tables and decoder of an opened video are kept for its next clip.
"""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing
from shardio._base.statistics import DECODE, PHASE_TIMES, now_ns
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument, MediaError
from shardio.format.streams import EncodedStream
from shardio.media.clip_decoder import ClipDecoder
from shardio.media.frames import CropBox, CropPosition
from shardio.media.image import MAX_PIXELS, decode_image
from shardio.samples.clips import ClipDraws, ClipSpec, time_field_names
from shardio.samples.media import clip_seconds
from shardio.shard.verification import Rows
from shardio.views.video_index import FrameTimes, clip_frames

Pixels = npt.NDArray[np.uint8]


class ImageReader:
    """A decoder of the pictures of a dataset, which it borrows.

    Args:
        dataset: holds the pictures.
        names: the fields that are decoded.
        dct: as for `media.decode_image`.
    """

    def __init__(self, dataset: Dataset, names: tuple[str, ...], dct: Any) -> None:
        self._dataset, self.names, self._dct = dataset, frozenset(names), dct

    def decode(self, data: Any, name: str, shard: int, row: int, out: Pixels | None = None) -> Any:
        """Decode one picture, into `out` if that is given.

        Args:
            data: its file.
            name, shard, row: its place, for messages; the row in its shard.

        Raises:
            MediaError: it does not decode, or is not of the size that it is said to have.
        """
        start_ns = now_ns()
        try:
            pixels = decode_image(data, out=out, dct=self._dct)
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

_MOST_STREAMS: Final = 2048
"""Opening one takes about as long as decoding 12 frames of 112x112; it keeps 5 KB."""
_MOST_PACKETS: Final = 1 << 19
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

    def __init__(self, dataset: Dataset, cut: ClipSpec, *, needs_times: bool = False) -> None:
        self._dataset, self._cut, self.name, self.names = dataset, cut, cut.name, cut.names
        self._needs_times = needs_times or cut.clip.goes_by_times or cut.clip.times
        self._decoder = ClipDecoder(max_streams=_MOST_STREAMS)
        self._n_packets = 0
        self._streams: OrderedDict[tuple[int, int], _OpenVideo] = OrderedDict()

    def fill(self, out: Pixels, rows: Rows, shards: Rows, cuts: ClipDraws, part: slice) -> None:
        """Decode the clips of a batch, those of one video together.

        Args:
            out: (clips, *the shape of one).
            rows, shards: of their videos, in all shards.
            cuts, part: where they begin, and which of the cuts they are.

        Raises:
            ShardCorrupt, MediaError: naming the sample.
        """
        starts = cuts.starts[part].tolist()
        videos: dict[tuple[int, int], Wanted] = {}
        local = (rows - self._dataset.starts.take(shards)).tolist()
        for i, (shard, row) in enumerate(zip(shards.tolist(), local, strict=True)):
            clips, places = videos.setdefault((shard, row), ([], []))
            clips.append((starts[i], out[i]))
            places.append(cuts.place(part.start + i))
        for (shard, row), wanted in videos.items():
            self._decode(shard, row, wanted)

    def of_sample(self, shard: int, row: int, start: int, place: CropPosition | None) -> Pixels:
        """One clip in new memory; the row is that in its shard."""
        made = np.empty([n or 0 for n in self._cut.array.shape], np.uint8)
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
        if not self._cut.clip.times:
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
        seconds = clip_seconds(self._cut.clip, times.length * stream.time_base, stream.n_frames)
        return int(times.pts[first]) * stream.time_base, seconds

    def _frames(self, start: int, times: FrameTimes | None) -> range | Numbers:
        clip, clips = self._cut.clip, self._dataset.rows.clips
        if times is not None and clips is not None and clip.goes_by_times:
            return clip_frames(clips, start, times)
        return range(start, start + clip.span, clip.stride)

    def _decode(self, shard: int, row: int, wanted: Wanted) -> None:
        start_ns, (clips, places) = now_ns(), wanted
        try:
            stream, times = self._open(shard, row)
            made = [(self._frames(start, times), out) for start, out in clips]
            self._decoder.decode_many(stream, made, crop=places, pixels=self._cut.clip.pixels)
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
        """Let go of the streams that were used longest ago, but not of the latest."""
        while len(self._streams) > 1 and (
            len(self._streams) > _MOST_STREAMS or self._n_packets > _MOST_PACKETS
        ):
            _, (stream, _) = self._streams.popitem(last=False)
            self._n_packets -= len(stream.packets)
            self._decoder.forget(stream)

    def close(self) -> None:
        """Release the decoders, and the streams that are open."""
        self._decoder.close()
        self._streams.clear()
        self._n_packets = 0
