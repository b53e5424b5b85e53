"""Clips of a dataset's videos: their selection, random draws, and schema in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.dataset.dataset import Dataset
from shardio.dataset.scan import ShardSamples, scan
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.format.types import Array, Field, Video
from shardio.format.types.streams import Streams
from shardio.media.frames import CropPosition
from shardio.order.permutation import OF_CLIPS, OF_CROPS, derive_key, keyed_hashes
from shardio.shard.verification import Rows
from shardio.views.clips import Clip, Clips, Events
from shardio.views.video_index import VideoIndex, event_dtype

_HALF: Final = 1 << 32
_OPTIONS: Final = ("frames", "stride", "step", "size")
"""The clip options stored in the view of a generation."""


@dataclass(frozen=True, slots=True)
class ClipSpec:
    """The clips cut out of the videos of one field, and their format in a batch.

    `size` is the (height, width) of their frames; `n_videos` is the number of samples of the
    dataset that they come from, including those without a clip; `events` is the dtype and the
    number of the events around which clips are cut.
    """

    clip: Clip
    name: str
    size: tuple[int, int]
    n_videos: int
    events: tuple[str, int] | None = None

    @property
    def array(self) -> Array:
        """The array type of one clip."""
        height, width = self.size
        if self.clip.pixels == "yuv420":
            return Array("uint8", (self.clip.frames, height * 3 // 2, width))
        return Array("uint8", (self.clip.frames, height, width, 3))

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of a clip: its pixels, and with `times` the times of its frames."""
        return (self.name, *time_field_names(self.name)) if self.clip.times else (self.name,)

    def delivered(self, schema: Schema) -> Schema:
        """Return the schema of samples whose video is a clip."""
        fields: dict[str, Field] = {}
        made = self.array, Array("int64", (self.clip.frames,)), Array("int64", (2,))
        for name, field in schema.items():
            is_cut = name == self.name and isinstance(field, Video)
            fields |= dict(zip(self.names, made, strict=False)) if is_cut else {name: field}
        return Schema(fields)


def time_field_names(name: str) -> tuple[str, str]:
    """Return the names of the fields with the times of a clip's frames, and with their unit."""
    return f"{name}_pts", f"{name}_time_base"


def resolve_video_field(
    schema: Schema, names: tuple[str, ...], clip: Any, *, is_asked: bool
) -> tuple[str | None, tuple[str, ...]]:
    """Return the field of the clips, None if there is none, and the fields to read.

    Args:
        schema: of the dataset.
        names: the fields that are read so far.
        clip: as a user gave it, or None.
        is_asked: whether the user named the fields: none is left out then without a word.

    Raises:
        InvalidArgument: it is no clip, or does not go with the fields.
    """
    if not isinstance(clip, Clip | None):
        raise InvalidArgument(f"clip must be a shardio.Clip; found {clip!r}")
    videos = [name for name in names if isinstance(schema[name], Video)]
    known = ", ".join(videos) or "none"
    wanted = None if clip is None else clip.field
    if clip is not None and (not videos or wanted not in (None, *videos)):
        what = "a field of videos" if wanted is None else f"{wanted!r}, a field of videos"
        raise InvalidArgument(f"clip needs {what}; of those that are read, these are: {known}")
    others = [name for name in videos if name != wanted]
    if len(videos) > 1 and (wanted is None or is_asked):
        way = "choose one with clip=Clip(field=…)" if wanted is None else f"leave out {others}"
        raise InvalidArgument(f"a loader takes clips from one field of videos; of {known} {way}")
    if wanted is not None:
        names = tuple(name for name in names if name not in others)
    video = wanted or videos[0] if videos else None
    if clip is not None and clip.times and video is not None:
        if both := [name for name in time_field_names(video) if name in names]:
            raise InvalidArgument(
                f"clip with times=True adds {', '.join(both)}, which is a field already: leave it "
                "out with `fields`"
            )
    return video, names


def default_clip(view: Mapping[str, Any]) -> Clip:
    """Return the clips of a dataset's stored view; `Clip()` if it is a view of rows."""
    return Clip(**{name: view[name] for name in _OPTIONS if name in view})


def select_clips(dataset: Dataset, clip: Clip, name: str) -> ClipSpec:
    """Set a dataset's samples to clips of the videos in a field, of the currently selected rows.

    The number of frames and the length of each video are in the index, 64 bytes per video, all of
    which are read. For clips by time, the packet tables of videos without a stored length are read
    too.

    Raises:
        InvalidArgument: there are videos, but no clip of any; their sizes differ, and `size` is not
            given; the field of events is invalid, or has an event outside of its video.
        ShardCorrupt: that part of the index is damaged.
    """
    n_frames = np.zeros(dataset.rows.n_rows, np.int64)
    sizes: set[tuple[int, int]] = set()
    around = _EventCollector(dataset, clip.around) if clip.around is not None else None

    def look(part: ShardSamples) -> tuple[VideoIndex, VideoEvents | None]:
        videos = VideoIndex(part.reader(name), name, part.rows, clip)
        return videos, None if around is None else around.look(part, videos)

    for part, (videos, happened) in scan(dataset, look):
        n_frames[part.numbers] = videos.n_frames
        has_clip = videos.n_frames >= clip.span
        if around is not None and happened is not None:
            has_clip = around.take(happened, part.numbers, has_clip)
        if len(sizes) < 2:
            sizes |= _sizes(videos.lines[has_clip])
    events = None if around is None else around.events(len(n_frames))
    clips = Clips(clip, n_frames, events)
    if n_frames.any() and not len(clips):
        raise InvalidArgument(_no_clips_message(dataset, clip, name, int(n_frames.max())))
    size = clip.size or _common(dataset, clip, name, sizes)
    dataset.rows.set_clips(clips)
    stored_events = None if events is None else (events.values.dtype.str, len(events.values))
    return ClipSpec(clip, name, size, len(n_frames), stored_events)


VideoEvents = tuple[Rows, npt.NDArray[Any]]
"""The number of events of each video, and all events."""


class _EventCollector:
    """Collects the events of videos that are long enough for a clip.

    Raises:
        InvalidArgument: the field cannot have events.
    """

    def __init__(self, dataset: Dataset, name: str) -> None:
        self._name = name
        self._kind = event_dtype(dataset.schema, name)
        self._videos: list[Rows] = []
        self._values = [np.zeros(0, self._kind)]

    def look(self, part: ShardSamples, videos: VideoIndex) -> VideoEvents:
        """Return the events of some videos of a shard."""
        return videos.events(part.reader(self._name), self._name)

    def take(
        self, happened: VideoEvents, numbers: Rows, is_long: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Add the events of the videos with these numbers.

        Return a mask of the videos that have any.
        """
        counts, values = happened
        self._values.append(values[np.repeat(is_long, counts)].astype(self._kind))
        counts = counts * is_long
        self._videos.append(np.repeat(numbers, counts))
        found: npt.NDArray[np.bool_] = counts > 0
        return found

    def events(self, n_videos: int) -> Events:
        """Return all events, in the order of their videos."""
        videos = np.concatenate([np.zeros(0, np.int64), *self._videos])
        values = np.concatenate(self._values)[np.argsort(videos, kind="stable")]
        return Events(np.bincount(videos, minlength=n_videos).astype(np.int64), values)


def _no_clips_message(dataset: Dataset, clip: Clip, name: str, longest: int) -> str:
    """Return the reason why videos of at most `longest` frames have no clip at all."""
    if longest >= clip.span:
        return f"{dataset.path}: field {clip.around!r} has no event of any video with a clip"
    if clip.rate is None:
        return (
            f"{dataset.path}: no video in field {name!r} has the {clip.span} frames of a clip of "
            f"frames={clip.frames}, stride={clip.stride}; the longest has {longest}"
        )
    return (
        f"{dataset.path}: no video in field {name!r} lasts as long as a clip of "
        f"frames={clip.frames}, fps={clip.rate}; the longest has {longest} frames at that rate"
    )


def _sizes(lines: Streams) -> set[tuple[int, int]]:
    """Return up to two distinct (height, width) of some videos."""
    if not len(lines):
        return set()
    pairs: npt.NDArray[np.uint32] = np.stack([lines["height"], lines["width"]], axis=1)
    others = pairs[(pairs != pairs[0]).any(1)]
    return {(int(height), int(width)) for height, width in (*pairs[:1], *others[:1])}


def _common(
    dataset: Dataset, clip: Clip, name: str, sizes: Iterable[tuple[int, int]]
) -> tuple[int, int]:
    """Return the common size of all videos that have clips.

    Raises:
        InvalidArgument: sizes differ, or are odd and cannot be yuv420.
    """
    found = sorted(sizes)
    if len(found) > 1:
        shown = " and of ".join(f"{height}x{width}" for height, width in found[:2])
        raise InvalidArgument(
            f"{dataset.path}: field {name!r} has videos of {shown} pixels, and a batch needs one "
            "size: pass clip=Clip(size=(height, width), …)"
        )
    height, width = found[0] if found else (2, 2)
    if clip.pixels == "yuv420" and (height % 2 or width % 2):
        raise InvalidArgument(
            f"{dataset.path}: field {name!r} has videos of {height}x{width} pixels, and "
            'pixels="yuv420" needs even sizes: pass clip=Clip(size=(height, width), …)'
        )
    return height, width


class ClipDraws(NamedTuple):
    """The first frame of each sample's clip, and the position of its crop.

    `places` has, for each, the fractions of the surplus at the left and at the top, from 0 up to 1;
    None: half of it.
    """

    starts: Rows
    places: npt.NDArray[np.float64] | None

    def place(self, i: int) -> CropPosition | None:
        """Return the crop position of one clip."""
        return None if self.places is None else CropPosition(*self.places[i].tolist())


def draw_clips(clips: Clips, samples: Rows, positions: Rows, *, seed: int, epoch: int) -> ClipDraws:
    """Return first frames and crop positions of the clips at some positions of an epoch.

    Args:
        clips: all clips.
        samples: their numbers, from 0 up.
        positions: in the epoch, over all ranks; with seed and epoch they key the random draws.
    """
    draws = keyed_hashes(positions, derive_key(OF_CLIPS, seed, epoch))
    starts = clips.starts(samples, clips.videos(samples), draws)
    if clips.clip.crop == "center":
        return ClipDraws(starts, None)
    drawn = keyed_hashes(positions, derive_key(OF_CROPS, seed, epoch))
    halves = np.stack([drawn >> np.uint64(32), drawn & np.uint64(_HALF - 1)], axis=1)
    return ClipDraws(starts, halves / _HALF)
